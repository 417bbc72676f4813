"""The chess task: packed batches from stored rows, counts, losses at the start, both encodings."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest
import torch
from positions import HARD, random_positions
from test_task_contract import check_task
from torch import Tensor, nn

from matrixlib.config import ConfigError, merge
from matrixlib.engine.task import active_terms
from matrixlib.tasks import load_config
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.config import ChessConfig, ModelConfig
from matrixlib.tasks.chess.heads import Head
from matrixlib.tasks.chess.losses import visible_rows
from matrixlib.tasks.chess.matrix0 import convert_weights, matrix0_config, read_checkpoint
from matrixlib.tasks.chess.planes import planes
from matrixlib.tasks.chess.spec import TASK
from matrixlib.tasks.chess.ssl_targets import head_target as ssl_target
from matrixlib.tasks.chess.task import ChessTask

ALL_SSL = ["piece", "threat", "pin", "fork", "control"]
MANY_MOVES = HARD[-2]  # 218 legal moves
Rows = dict[str, np.ndarray]


def task(encoding: str = "oriented", ssl: list[str] = ALL_SSL, **changes: Any) -> ChessTask:
    model: dict[str, Any] = {"encoding": encoding, "ssl": ssl, "channels": 16, "blocks": 1}
    config = load_config("demo", merge({"model": model}, changes))
    assert isinstance(config, ChessConfig)
    return ChessTask(config)


def positions(count: int, seed: int = 0) -> list[chess.Board]:
    """Positions of random games that are not over, both sides to move, some without castling rights."""
    return [board for board in random_positions(2 * count, seed) if not board.is_game_over()][:count]


def stored(boards: list[chess.Board], seed: int = 0) -> Rows:
    """Rows as the loader gathers them, every move listed, with random targets."""
    rng = np.random.default_rng(seed)
    rows = records.from_boards(boards)
    index, offset = records.legal_indices(rows)
    rows["wdl"] = rng.multinomial(65535, [0.3, 0.5, 0.2], len(rows))
    rows["result"] = rng.integers(-1, 3, len(rows))
    weight = rng.integers(1, 2000, len(index)).astype(np.uint16)
    return {"records": rows, "policy_index": index, "policy_weight": weight, "policy_offset": offset}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return stored(positions(96))


def tensors(arrays: Rows) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def rng(seed: int = 5) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    "encoding, kind, norm",
    [("oriented", "wdl", "group"), ("oriented", "scalar", "batch"), ("matrix0", "scalar", "batch")],
)
def test_chess_keeps_the_task_contract(encoding: str, kind: str, norm: str) -> None:
    data = stored(positions(23, seed=7))
    data["records"]["wdl"][::3] = 0
    data["policy_weight"][: data["policy_offset"][4]] = 0  # four rows without a policy target
    options = {"norm": {"blocks": norm, "stem_heads": norm}, "dropout": 0.1, "droppath": 0.1, "value": {"kind": kind}}
    check_task(task(encoding, model=options, loss={"label_smoothing": 0.05, "result_share": 0.3}), data)


def test_prepared_arrays(rows: Rows) -> None:
    before = {name: array.copy() for name, array in rows.items()}
    out = task().prepare(rows, rng())
    shapes = {
        "pieces": ("uint8", (96, 32)),
        "state": ("int16", (96, 6)),
        "policy_index": ("int16", (96, 96)),
        "policy_weight": ("float32", (96, 96)),
        "wdl": ("float32", (96, 3)),
        "result": ("int8", (96,)),
        "maps": ("uint8", (96, 5, 8)),
        "hidden": ("uint8", (96, 8)),
    }
    assert {name: (str(array.dtype), array.shape) for name, array in out.items()} == shapes
    np.testing.assert_allclose(out["wdl"].sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(out["policy_weight"].sum(1), 1, atol=1e-5)
    assert not out["policy_weight"][out["policy_index"] < 0].any()
    again = task().prepare(rows, rng())
    assert all(np.array_equal(out[name], again[name]) for name in out)
    assert all(np.array_equal(rows[name], before[name]) for name in rows), "the stored rows are left alone"
    assert set(task(ssl=[]).prepare(rows, rng())) == set(shapes) - {"maps", "hidden"}
    assert set(task(ssl=["pin"]).prepare(rows, rng())) == set(shapes) - {"hidden"}


def test_rows_with_more_moves_than_places_widen_the_batch_and_a_long_game_keeps_its_ply() -> None:
    data = stored([chess.Board(MANY_MOVES), chess.Board()])
    data["records"]["ply"] = 40000
    out = task().prepare_plain(data, rng())
    assert out["policy_index"].shape == (2, 224)
    assert (out["policy_index"] >= 0).sum(1).tolist() == [218, 20]
    assert int(out["state"][0, 5]) & 0xFFFF == 40000
    assert task().prepare_plain(stored([]), rng())["policy_index"].shape == (0, 96)


def test_only_rows_without_castling_rights_are_mirrored_and_the_target_follows() -> None:
    boards = positions(60, seed=3)
    for board in boards[:40]:
        board.set_castling_fen("-")
    data = stored(boards, seed=1)
    prepared, plain = (task(data={"mirror": mirror}).prepare(data, rng(1)) for mirror in (True, False))
    changed = (prepared["pieces"] != plain["pieces"]).any(1)
    assert 10 < changed.sum() < 40
    assert not changed[data["records"]["castling"] != 0].any()
    for row in np.flatnonzero(changed):
        board = records.to_board(data["records"][row])
        for index, weight in zip(plain["policy_index"][row], plain["policy_weight"][row], strict=True):
            if index >= 0:
                move = records.move_from_index(int(index), board)
                twin = chess.Move(move.from_square ^ 7, move.to_square ^ 7, move.promotion)
                place = prepared["policy_index"][row] == records.policy_index(twin, board.turn)
                assert prepared["policy_weight"][row][place].tolist() == [weight]
    assert TASK.label_problems(task(), prepared) == []


def test_counts_by_hand(rows: Rows) -> None:
    batch = tensors(task().prepare(rows, rng()))
    shown = batch["hidden"].sum(1) == 0
    counts = task(loss={"result_share": 1.0}).counts(batch)
    assert 0 < int(shown.sum()) < 96
    assert counts == {
        "policy": int(shown.sum()),
        "value": int((shown & (batch["result"] != 2)).sum()),
        "ssl_piece": int(np.bitwise_count(batch["hidden"].numpy()).sum()),
        **{f"ssl_{name}": 64 * int(shown.sum()) for name in ALL_SSL[1:]},
    }


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
@pytest.mark.parametrize("preset", ["demo", "matrix0_53m"])
def test_losses_start_at_chance(rows: Rows, encoding: str, preset: str) -> None:
    """ln(number of legal moves), ln 3, and ln(classes) for the other heads."""
    small = {"channels": 32, "blocks": 3, "attention": {"heads": 4}, "encoding": encoding, "ssl": ALL_SSL}
    chess_task = ChessTask(load_config(preset, {"model": small}))
    batch = tensors(chess_task.prepare(rows, rng()))
    counts, bounds = chess_task.counts(batch), chess_task.bounds(batch)
    with torch.no_grad():
        actual, _ = chess_task.losses(chess_task.build_model(), batch, frozenset(chess_task.weights))
    legal = (batch["policy_index"] >= 0).sum(1)[batch["hidden"].eq(0).all(1)].double()
    assert bounds["policy"][0] == pytest.approx(float(legal.log().sum()))
    for term, (chance, floor) in bounds.items():
        assert floor <= chance
        near = 0.08 * math.log(3)
        assert float(actual[term]) / counts[term] == pytest.approx(chance / counts[term], abs=near), term
    if chess_task.config.model.value.kind == "wdl":
        assert bounds["value"][0] == pytest.approx(counts["value"] * math.log(3))


def test_rows_with_hidden_squares_give_only_the_piece_loss(rows: Rows) -> None:
    chess_task = task()
    model, batch = chess_task.build_model().eval(), tensors(chess_task.prepare(rows, rng()))
    hidden = batch["hidden"].ne(0).any(1)
    squares = np.unpackbits(batch["hidden"].numpy(), axis=1, bitorder="little").reshape(-1, 8, 8)
    assert not planes(batch, "oriented")[:, :12].sum(1)[torch.from_numpy(squares).bool()].any()
    spoilt = {**batch, "policy_weight": batch["policy_weight"].clone()}
    spoilt["policy_weight"][hidden] = spoilt["policy_weight"][hidden].flip(1)
    spoilt["wdl"] = torch.where(hidden[:, None], torch.tensor([1.0, 0, 0]), batch["wdl"])
    terms = frozenset(chess_task.weights)
    with torch.no_grad():
        one, two = (chess_task.losses(model, b, terms)[0] for b in (batch, spoilt))
    assert one == two


def test_self_supervised_targets_are_those_of_python_chess(rows: Rows) -> None:
    batch = tensors(task().prepare_plain(rows, rng()))
    for row, record in enumerate(rows["records"]):
        board = records.to_board(record)
        maps = {name: ssl_target(batch, name)[row].flatten().tolist() for name in ("piece", "threat", "control")}
        for square in chess.SQUARES:
            oriented, piece = square if board.turn else square ^ 56, board.piece_at(square)
            mine = {name: int(squares[oriented]) for name, squares in maps.items()}
            ours, theirs = (len(board.attackers(color, square)) for color in (board.turn, not board.turn))
            kind = 12 if piece is None else piece.piece_type - 1 + 6 * (piece.color != board.turn)
            assert mine == {"piece": kind, "threat": theirs > 0, "control": 1 + (ours > theirs) - (ours < theirs)}


class Perfect(nn.Module):
    """Answers the piece head with the planes it is shown: every square's class, in the network's frame."""

    def forward(self, inputs: Tensor, heads: frozenset[str]) -> dict[str, Any]:
        pieces = inputs[:, :12]
        maps = torch.cat([pieces, 1 - pieces.sum(1, keepdim=True)], dim=1)
        size = len(inputs)
        return {"policy": torch.zeros(size, 4672), "value": torch.zeros(size, 3), "ssl": {"piece": maps * 50}}


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_square_heads_live_in_the_frame_of_the_planes(rows: Rows, encoding: str) -> None:
    chess_task = task(encoding, ["piece"])
    batch = tensors(chess_task.prepare_plain(rows, rng()))
    answers = chess_task.predict(Perfect(), batch, frozenset({"piece"}))["ssl/piece"]
    assert torch.equal(answers.argmax(1), ssl_target(batch, "piece").long())


def test_matrix0_moves_and_outputs(shared: Path) -> None:
    """Policy indices of all legal moves, and a whole prediction, against what Matrix0's own code gave."""
    folder = shared / "parity"
    expected = np.load(folder / "parity.npz")
    boards = [chess.Board(line) for line in (folder / "positions.fen").read_text().splitlines() if line.strip()]
    options = matrix0_config(json.loads((folder / "small_cfg.json").read_text())["netconfig_full"])
    chess_task = ChessTask(task().config.model_copy(update={"model": options}))
    batch = tensors(chess_task.prepare_plain(stored(boards), rng()))
    model = chess_task.build_model().eval()
    model.load_state_dict(convert_weights(read_checkpoint(folder / "small_ckpt.pt"), model.state_dict()))
    with torch.no_grad():
        answers = chess_task.predict(model, batch, frozenset({"piece"}))
        raw = chess_task.outputs(model, batch)["policy"]
    np.testing.assert_allclose(answers["value"].numpy(), expected["value"], atol=1e-4)
    offsets = expected["legal_offsets"]
    for row, board in enumerate(boards):
        legal = expected["legal_flat"][offsets[row] : offsets[row + 1]]
        names = expected["legal_uci"][offsets[row] : offsets[row + 1]]
        theirs = dict(zip(names.tolist(), expected["policy"][row][legal], strict=True))
        index = batch["policy_index"][row]
        mine = {
            records.move_from_index(int(move), board).uci(): float(score)
            for move, score in zip(index[index >= 0], raw[row][index >= 0], strict=True)
        }
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert raw.isnan().equal(batch["policy_index"] < 0)


def test_illegal_target_mass_is_found(rows: Rows) -> None:
    batch = task(ssl=[]).prepare_plain(rows, rng())
    assert TASK.label_problems(task(), batch) == []
    place = int(batch["policy_weight"][3].argmax())
    batch["policy_index"][3, place] = next(index for index in range(4672) if index not in batch["policy_index"][3])
    (problem,) = TASK.label_problems(task(), batch)
    share = batch["policy_weight"][3, place]
    assert problem.startswith(f"1 of 96 positions have policy targets on illegal moves (up to {share:.1%})")


def test_the_same_seed_builds_the_same_network_and_disturbs_no_stream() -> None:
    chess_task, before = task(), torch.get_rng_state()
    one, two, other = (each.build_model().state_dict() for each in (chess_task, chess_task, task(seed=1)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert not torch.equal(one["stem.conv.weight"], other["stem.conv.weight"])


@pytest.mark.parametrize("trunk", [True, False])
def test_ssl_reaches_the_trunk_unless_it_is_switched_off(rows: Rows, trunk: bool) -> None:
    """Matrix0 cut its trunk off by default, so its self-supervised loss could not shape the network."""
    chess_task = task(model={"ssl_trunk": trunk})
    model, batch = chess_task.build_model(), tensors(chess_task.prepare(rows, rng()))
    for head in ALL_SSL:
        model.zero_grad(set_to_none=True)
        actual, _ = chess_task.losses(model, batch, frozenset({f"ssl_{head}"}))
        actual[f"ssl_{head}"].backward()
        reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        heads = {name for name in reached if name.startswith(f"ssl_heads.{head}.")}
        assert heads
        assert ("stem.conv.weight" in reached) == trunk
        assert (reached == heads) != trunk


def test_weights_of_heads_are_applied(rows: Rows) -> None:
    """Matrix0's configured weights were never read: all were 1 in effect."""
    weights = {"piece": 0.0, "threat": 0.25, "pin": 1.5, "fork": 3.0, "control": 0.125}
    chess_task = task(loss={"ssl": weights})
    assert {term: chess_task.weights[f"ssl_{term}"] for term in ALL_SSL} == weights
    assert "ssl_piece" not in active_terms(chess_task)


def test_nothing_is_hidden_for_a_piece_head_without_weight(rows: Rows) -> None:
    """Its rows would train nothing at all: an ablation by weights would compare different numbers of positions."""
    chess_task = task(loss={"ssl": {"piece": 0.0}})
    batch = tensors(chess_task.prepare(rows, rng()))
    assert "hidden" not in batch
    assert chess_task.counts(batch)["policy"] == chess_task.counts(tensors(task().prepare_plain(rows, rng())))["policy"]
    assert chess_task.counts(batch)["ssl_piece"] == 0


@pytest.mark.parametrize("shares", [{"hidden_rows": 0.0}, {"hidden_squares": 0.0}, {"hidden_rows": 1.0}])
def test_shares_that_leave_a_head_untrained_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="hidden"):
        task(data=shares)
    task(data=shares, ssl=["threat"])
    task(data=shares, loss={"ssl": {"piece": 0.0}})


def test_predictions_are_corrected_for_positive_weights(rows: Rows) -> None:
    """A head that knows nothing but the base rate says the base rate, however much its positives count."""
    chess_task = task(ssl=["pin"], loss={"positive": {"pin": 50.0}})
    model = chess_task.build_model().eval()
    batch = tensors(chess_task.prepare_plain(rows, rng()))
    for parameter in model.ssl_heads["pin"].out.parameters():
        torch.nn.init.zeros_(parameter)
    answers = chess_task.predict(model, batch, frozenset({"pin"}))["ssl/pin"]
    torch.testing.assert_close(answers, torch.full_like(answers, 1 / 51))


def heads_only(chess_task: ChessTask, rows: Rows, chunk: int) -> tuple[list[Tensor], int]:
    """(losses and gradients of the heads' terms, bytes kept for the backward pass) with a chunk."""
    model, batch = chess_task.build_model().train(), tensors(chess_task.prepare(rows, rng()))
    chess_task.set_chunk(model, chunk)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):
        actual, _ = chess_task.losses(model, batch, chess_task.gated)
    kept = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}.values())
    torch.stack([actual[term] for term in sorted(actual)]).sum().backward()
    grads = [value.grad for value in model.parameters() if value.grad is not None]
    return [*(actual[term].detach() for term in sorted(actual)), *grads], kept


@pytest.mark.parametrize("chunk", [1, 7, 96])
def test_a_chunk_of_the_heads_changes_nothing_but_memory(rows: Rows, chunk: int) -> None:
    """Parts weigh by their size, the shared features get one gradient, and the losses are the same."""
    chess_task = task()
    whole, most = heads_only(chess_task, rows, 0)
    parts, kept = heads_only(chess_task, rows, chunk)
    assert len(whole) == len(parts)
    for one, two in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert (kept < 0.9 * most) == (chunk < 96)


def test_batchnorm_heads_are_never_cut(rows: Rows) -> None:
    """Their statistics are those of the whole micro-batch."""
    chess_task = task(model={"norm": {"stem_heads": "batch"}})
    (whole, _), (parts, _) = (heads_only(chess_task, rows, chunk) for chunk in (0, 7))
    assert all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))


class Mobility(Head):
    """How many legal moves there are, in tens."""

    name = "mobility"

    def build(self, config: ModelConfig) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64 * config.channels, 1), nn.Flatten(0))

    def targets(self, rows: Rows) -> np.ndarray:
        return (np.diff(rows["policy_offset"]) / 10).astype(np.float32)

    def row_losses(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square()

    def row_metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"moves": 10 * output}


def flat(config: ModelConfig) -> nn.Module:
    """A trunk without a tower."""
    return nn.Sequential(nn.Conv2d(19, config.channels, 3, padding=1), nn.ReLU())


def surely_won(outputs: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    return (1 - outputs["value"].softmax(1)[:, 0])[visible_rows(batch)].sum()


def test_parts_of_ones_own_keep_the_task_contract(rows: Rows) -> None:
    plain = task()
    own = dataclasses.replace(plain, trunk=flat, heads=(Mobility(),), loss_functions={"value": surely_won})
    check_task(own, rows)
    batch, model = tensors(own.prepare(rows, rng())), own.build_model()
    assert own.weights == plain.weights | {"mobility": 1.0}
    assert own.gated == plain.gated
    assert set(own.bounds(batch)) == set(plain.bounds(batch)) - {"value"}, "nobody knows those of another loss"
    sums, metrics = own.losses(model, batch, frozenset({"value", "mobility"}))
    shown, counts = visible_rows(batch), own.counts(batch)
    assert counts["mobility"] == int(shown.sum()) < len(shown)
    outputs = own.forward(model, batch, frozenset(own.weights))
    moves = torch.from_numpy(np.diff(rows["policy_offset"]) / 10)
    squared = (outputs["mobility"] - moves).square()[shown].sum().item()
    assert sums["mobility"].item() == pytest.approx(squared, rel=1e-5)
    assert metrics["mobility/moves"].item() == pytest.approx(10 * float(outputs["mobility"][shown].sum()), rel=1e-4)
    assert sums["value"].item() == surely_won(outputs, batch).item()
    assert not [name for name in model.state_dict() if name.startswith(("stem", "tower"))], "the trunk is another"
    beside = dataclasses.replace(plain, loss_functions={"surely_won": surely_won})
    assert set(plain.build_model().state_dict()) == set(beside.build_model().state_dict())
    assert "surely_won" in beside.losses(beside.build_model(), batch, frozenset(beside.weights))[0]


@pytest.mark.parametrize(
    "parts, problem",
    [
        ({"trunk": lambda config: nn.Conv2d(19, 5, 3)}, r"trunk: its output for one position is \(1, 5, 6, 6\)"),
        ({"heads": (Mobility(), Mobility())}, "heads: the name 'mobility' is taken"),
        ({"loss_functions": {"value": lambda outputs, batch: outputs["value"]}}, "'value' must return a 0-d tensor"),
    ],
)
def test_parts_of_ones_own_that_cannot_work_are_named(rows: Rows, parts: dict[str, Any], problem: str) -> None:
    own = dataclasses.replace(task(), **parts)
    with pytest.raises(ValueError, match=problem):
        own.losses(own.build_model(), tensors(own.prepare(rows, rng())), frozenset({"value"}))
