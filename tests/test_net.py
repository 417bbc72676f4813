"""A trained network for use: loading a run, evaluating positions, Black's perspective, errors."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest
import torch
from networks import CPU, MATRIX0, random_net
from positions import random_positions

import matrixlib
from matrixlib import config as configuration
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware import speed
from matrixlib.hardware.runtime import Serving
from matrixlib.runs import run as runs
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.records import from_boards, legal_indices, move_from_index
from matrixlib.tasks.chess.spec import load as load_chess
from matrixlib.tasks.spec import runtime_for_use

KIWIPETE = "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R w KQkq - 0 1"


@pytest.fixture(scope="module")
def net() -> Net:
    """A network with random weights: what it says is nonsense, but it must be the same nonsense for equal positions."""
    return random_net(ssl=["piece", "threat", "control"])


@pytest.mark.parametrize("positions", [5, None, b"abc", [[]], [5], [KIWIPETE, None]])
def test_what_is_no_fen_is_named(net: Net, positions: Any) -> None:
    with pytest.raises(ValueError, match=r"^give a FEN or a list of them, not "):
        net.evaluate(positions)
    with pytest.raises(ValueError, match=r"^give a run's folder or name, not "):
        matrixlib.load(None)


def test_moves_are_the_legal_ones_and_probabilities_sum_to_one(net: Net) -> None:
    fens = [chess.STARTING_FEN, KIWIPETE, "8/P6k/8/8/8/8/7p/K7 b - - 0 1"]
    for fen, evaluation in zip(fens, net.evaluate(fens), strict=True):
        board = chess.Board(fen)
        assert set(evaluation.moves) == {move.uci() for move in board.legal_moves}
        shares = list(evaluation.moves.values())
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert shares == sorted(shares, reverse=True)
        assert sum(evaluation.wdl) == pytest.approx(1, abs=1e-5)
        assert evaluation.value == pytest.approx(evaluation.wdl[0] - evaluation.wdl[2], abs=1e-5)


def test_black_sees_the_mirrored_board_as_white_sees_the_original(net: Net) -> None:
    board = chess.Board(KIWIPETE)
    white, black = net.evaluate([board.fen(), board.mirror().fen()])

    turned = str.maketrans("12345678", "87654321")
    assert white.wdl == pytest.approx(black.wdl)
    for move, share in white.moves.items():
        assert black.moves[move.translate(turned)] == pytest.approx(share, abs=1e-6)
    for head, maps in white.ssl.items():
        np.testing.assert_allclose(maps, black.ssl[head][:, ::-1], atol=1e-5)


@pytest.mark.parametrize("model", [{}, MATRIX0], ids=["oriented", "matrix0"])
def test_a_thousand_positions_are_tensors_in_one_call(model: dict[str, Any]) -> None:
    """What `predict` says of them 256 at a time, on the host, and what `evaluate` says one by one."""
    net = random_net(**model)
    fens = [board.fen() for board in random_positions(1000, seed=7)]
    sizes: list[int] = []
    net.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    batch = net.batch(fens)
    with torch.inference_mode():
        out = net.task.predict(net.model, batch)
        raw = net.model(net.planes(fens), frozenset({"policy", "value"}))
    assert (sizes, raw["policy"].shape) == ([1000, 1000], (1000, 4672))
    expected = net.predict({name: tensor.numpy() for name, tensor in batch.items()})
    for name in ("policy", "value"):
        torch.testing.assert_close(out[name], torch.from_numpy(expected[name]), atol=1e-5, rtol=1e-5)
    best = move_from_index(int(batch["policy_index"][0, out["policy"][0].argmax()]), chess.Board(fens[0]))
    assert net.evaluate(fens[0])[0].best == best.uci()
    np.testing.assert_allclose(net.values([chess.Board(fen) for fen in fens]), expected["value"], atol=1e-5)


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_a_position_alone_is_evaluated_as_among_others(encoding: str) -> None:
    """Alone the attention policy computes the logits of all moves, among others those of the legal ones."""
    net = random_net(encoding=encoding, policy={"kind": "attention"})
    batch = packed(net, 8)
    whole = net.predict(batch)
    for row in range(8):
        alone = net.predict({name: array[row : row + 1] for name, array in batch.items()})
        for name, expected in whole.items():
            np.testing.assert_allclose(alone[name][0], expected[row], rtol=1e-5, atol=1e-5)


def test_maps_are_probabilities_and_a_finished_game_has_no_move_but_a_value(net: Net) -> None:
    evaluation, over = net.evaluate([KIWIPETE, "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"])
    shapes = {head: maps.shape for head, maps in evaluation.ssl.items()}
    assert shapes == {"piece": (13, 8, 8), "threat": (1, 8, 8), "control": (3, 8, 8)}
    np.testing.assert_allclose(evaluation.ssl["piece"].sum(0), 1, atol=1e-5)
    assert (over.moves, over.best, abs(over.value) <= 1) == ({}, None, True)


def packed(net: Net, count: int) -> dict[str, np.ndarray]:
    rows = from_boards(random_positions(count, seed=4))
    return net.task.inputs(rows, *legal_indices(rows))


@pytest.mark.parametrize("model", [{}, MATRIX0], ids=["oriented", "matrix0"])
@pytest.mark.parametrize("heads", [frozenset(), frozenset({"piece", "threat"})], ids=["play", "maps"])
def test_cut_and_filled_batches_say_the_same(model: dict[str, Any], heads: frozenset[str]) -> None:
    plain = random_net(ssl=["piece", "threat"], **model)
    filled = Net(plain.model, plain.task, plain.runtime, Serving((4, 16), True, False))
    batch = packed(plain, 37)
    expected, outputs = plain.predict(batch, heads), filled.predict(batch, heads)
    assert expected.keys() == outputs.keys()
    for name, array in expected.items():
        assert array.dtype == outputs[name].dtype == np.float32
        np.testing.assert_allclose(outputs[name], array, atol=1e-5)
        assert (plain.predict(batch, heads)[name] == array).all(), "not the same bits twice"


def test_threads_of_a_search_evaluate_batches_at_once_and_say_the_same() -> None:
    plain, before = random_net(), torch.get_num_threads()
    torch.set_num_threads(5)
    shared = Net(plain.model, plain.task, plain.runtime, Serving((8,), False, False)).with_threads(3)
    assert shared.beside == 3
    assert shared.executor is not None
    batches = [packed(plain, rows) for rows in (1, 9, 37)]
    for batch, found in zip(batches, shared.executor.map(shared.predict, batches), strict=True):
        for name, array in plain.predict(batch).items():
            np.testing.assert_allclose(found[name], array, atol=1e-6)
    with ThreadPoolExecutor() as other:
        threads = torch.get_num_threads(), other.submit(torch.get_num_threads).result()
    torch.set_num_threads(before)
    assert threads == (5, 5), "the threads of a training beside it"


@pytest.mark.parametrize(("error", "good"), [(RuntimeError, 0), (RuntimeError, 1), (torch.OutOfMemoryError, 0)])
def test_a_compiler_that_fails_is_left_out_but_not_blamed_for_what_fails_later_or_for_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError], good: int
) -> None:
    plain, calls = random_net(), list[object]()

    def failing(model: torch.nn.Module, **options: object) -> Callable[..., object]:
        def forward(*inputs: object) -> object:
            calls.append(inputs)
            if len(calls) > good:
                raise error("no C++ compiler here")
            return model(*inputs)

        return forward

    monkeypatch.setattr(torch, "compile", failing)
    net, batch = Net(plain.model, plain.task, plain.runtime, Serving((4,), True, True)), packed(plain, 4)
    if error is RuntimeError and not good:
        with pytest.warns(RuntimeWarning, match="continuing without it: .*no C\\+\\+ compiler here"):
            outputs = net.predict(batch)
        np.testing.assert_allclose(outputs["value"], plain.predict(batch)["value"], atol=1e-5)
        return
    for _ in range(good):
        net.predict(batch)
    with pytest.raises(error, match="no C"):
        net.predict(batch)


def test_more_sizes_than_torch_compiles_by_itself_are_compiled_and_beyond_the_limit_there_is_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a tracer in place of the compiler, which takes seconds."""
    torch.compiler.reset()
    plain, graphs = random_net(), list[object]()

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    net = Net(plain.model, plain.task, plain.runtime, Serving(tuple(range(2, 13)), True, True))
    monkeypatch.setattr("matrixlib.engine.network.RECOMPILES", 10)
    for size in range(2, 12):
        net.predict(packed(plain, size))
    assert len(graphs) == 10 > 8
    with pytest.warns(RuntimeWarning, match="continuing without it: .*recompile limit"):
        outputs = net.predict(packed(plain, 12))
    assert len(graphs) == 10
    np.testing.assert_allclose(outputs["value"], plain.predict(packed(plain, 12))["value"], atol=1e-5)


@pytest.mark.parametrize(
    ("trained", "native", "dtype"),
    [("fp32", True, "fp32"), ("bf16", True, "bf16"), ("bf16", False, "fp32"), ("fp16", True, "fp32")],
)
def test_a_network_is_evaluated_as_it_was_trained(
    monkeypatch: pytest.MonkeyPatch, trained: str, native: bool, dtype: str
) -> None:
    """Figures of a run are equal on all machines; in fp32 where one lacks the dtype."""
    monkeypatch.setattr(runtimes, "native_bf16", lambda facts, device: native)
    monkeypatch.setattr(speed, "bf16_gain", lambda device: pytest.fail("nothing is timed"))
    config = load_config("demo", {"runtime": {"precision": trained}})
    assert runtime_for_use(config, "cpu").dtype == dtype
    if trained == "fp16":
        with pytest.raises(ValueError, match="precision 'fp16' needs a loss scaler"):
            runtime_for_use(config, "cpu", "fp16")


def test_load_a_run_by_name_and_by_folder(reports: Path) -> None:
    tiny: dict[str, Any] = {
        "data": {"limit": 512},
        "model": {"channels": 16, "blocks": 1},
        "train": {"steps": 4, "batch_size": 64},
        "validation": {"interval": 2, "sample": 64, "full_every": 2, "limit": 256},
        "checkpoint": {"interval": 2},
        "runtime": CPU,
    }
    current = runs.open_run(run="mine", overrides=tiny)
    for _ in current.train():
        pass
    by_name, by_folder = matrixlib.load("mine", device="cpu"), matrixlib.load(reports / "mine", device="cpu")
    assert by_name.evaluate(KIWIPETE)[0].moves == by_folder.evaluate(KIWIPETE)[0].moves
    config = reports / "mine" / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("channels: 16", "channels: 24"))
    with pytest.raises(ValueError, match=r"mine/config\.yaml is not that of step_00000004: .* has shape"):
        matrixlib.load("mine", device="cpu")
    config.write_text(text)
    folder = reports / "mine" / "checkpoints" / "step_00000002"
    second = matrixlib.load(folder, device="cpu").evaluate(KIWIPETE)[0]
    assert second.moves == matrixlib.load("mine", checkpoint=folder.name, device="cpu").evaluate(KIWIPETE)[0].moves
    with pytest.raises(ValueError, match="step_00000099"):
        matrixlib.load("mine", checkpoint="step_00000099", device="cpu")
    with pytest.raises(ValueError, match="no run at 'other'"):
        matrixlib.load("other")
    with pytest.raises(ValueError, match="'mine' is of the task chess, not my_module:TASK"):
        matrixlib.load("mine", task="my_module:TASK")


def test_a_run_of_another_task_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(configuration.to_yaml(load_config("latin_demo")))
    with pytest.raises(ValueError, match="trains latin, not chess"):
        load_chess(tmp_path)
