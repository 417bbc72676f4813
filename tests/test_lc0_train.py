"""Networks for Lc0: trained here, written as weight files, read back, run by Lc0 itself, and begun from such a file."""

import errno
import gzip
import random
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import chess
import chess.engine
import lc0_files
import numpy as np
import pytest
import torch
from cells import run_notebook
from networks import CPU, random_net

import matrixlib
from matrixlib import config as configuration
from matrixlib.config import ConfigError
from matrixlib.engine.optim import parameter_groups
from matrixlib.runs import run as runs
from matrixlib.runs.data import RunError
from matrixlib.runs.start import source_weights
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.chess.config import SSL_CHANNELS
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.throughput import positions
from matrixlib.tasks.chess.lc0.network import planes
from matrixlib.tasks.chess.lc0.weights import LC0_PLANES, Message
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.task import packed_state

PROMOTIONS = ("1n1n3k/P1P5/8/8/8/8/8/4R2K w - - 0 1", "6k1/8/8/8/8/8/3p1p2/K1N1N3 b - - 3 40")
CONV = {"kind": "conv", "channels": 16, "rank": 96}
SMALL = {"channels": 16, "blocks": 2, "policy": CONV}
FORMS: dict[str, dict[str, Any]] = {
    "relu": {},
    "mish": {"activation": "mish", "value": {"activation": "mish"}},
    "plain": {"se_ratio": 0.0},
    "history": {"history": True},
    "attention": {"policy": {"kind": "attention", "rank": 8, "channels": 12}},
    "classical": {"policy": {"kind": "dense", "channels": 4}, "value": {"kind": "scalar"}},
    "moves left": {"moves_left": {"channels": 8, "hidden": 24}, "history": True},
}


def opened(name: str, model: Any = (), data: Any = (), **train: Any) -> runs.Run:
    """A small run. model, data, train: options of these sections."""
    overrides = {"model": configuration.merge(SMALL, dict(model)), "data": {"workers": 0, **dict(data)}, "runtime": CPU}
    overrides |= {"train": {"steps": 12, "batch_size": 64, **train}, "optim": {"warmup_steps": 2}}
    overrides |= {"validation": {"interval": 4, "limit": 64, "sample": 64, "batch_size": 64}}
    return runs.open_run("lc0_quick", run=name, overrides=overrides)


def made(form: str = "relu") -> Net:
    """A network with random weights and statistics whose moves are not alike."""
    task: Any = get_task("chess").task(load_config("lc0_quick", {"model": configuration.merge(SMALL, FORMS[form])}))
    model, generator = task.build_model(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_((noise - 1).exp())
            elif tensor.is_floating_point():
                tensor += 0.05 * noise
            if "pairs" in name:
                tensor *= 1.3
    return Net(model, task, random_net().runtime)


@pytest.mark.usefixtures("reports")
def test_frozen_parts_stay_as_they_are() -> None:
    """Weights and the statistics of their norms; across validation, a resumed run and averages."""
    run = opened("frozen", freeze=["stem", "tower.0"])
    before = deepcopy(run.trainer.model.state_dict())
    with closing(run):
        next(stats for stats in run.train() if stats.step == 7)
    with closing(opened("frozen", freeze=["stem", "tower.0"])) as run:
        assert run.trainer.step == 7
        assert [stats.step for stats in run.train()][-1] == 12
        for after in (run.trainer.model.state_dict(), run.trainer.checkpoints.newest().tensors["ema"]):
            for name, tensor in after.items():
                held, plain = name.startswith(("stem.", "tower.0.")), name.endswith("order")
                assert plain or torch.equal(tensor, before[name]) == held, name


def test_an_unknown_part_cannot_be_frozen(reports: Path) -> None:
    """The error comes before anything is written."""
    with pytest.raises(ValueError, match=r"train.freeze: the network has no part 'body'; its parts are stem, tower, "):
        opened("unknown", freeze=["body"])
    with pytest.raises(ValueError, match="no trainable parameter"):
        opened("whole", freeze=["stem", "tower", "policy_head", "value_head", "ssl_heads", "auxiliary"])
    assert not any(reports.iterdir())


def games(count: int, plies: int) -> list[chess.Board]:
    """Positions after random plies, with their moves."""
    boards, rng = [], random.Random(7)
    for number in range(count):
        board = chess.Board()
        for _ in range(number * plies // count):
            board.push(rng.choice(list(board.legal_moves)))
            if board.is_game_over():
                board.pop()
        boards.append(board)
    return boards


def difference(ours: Net, other: Net, boards: list[chess.Board]) -> float:
    """Largest difference of probabilities, values, and plies left in hundreds."""
    most = float(np.abs(np.subtract(plies_left(ours, boards), plies_left(other, boards))).max()) / 100
    for a, b in zip(ours.evaluate_boards(boards), other.evaluate_boards(boards), strict=True):
        most = max(most, abs(a.value - b.value), *(abs(share - b.moves[move]) for move, share in a.moves.items()))
    return most


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Net:
    """A network of the preset, small, after seconds of training with every self-supervised head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIXLIB_REPORTS", str(tmp_path_factory.mktemp("reports")))
        with closing(opened("trained", FORMS["attention"] | {"ssl": list(SSL_CHANNELS)}, steps=80)) as run:
            losses = [one.losses["policy"] + one.losses["value"] for one in run.train()]
            assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.05
            groups = parameter_groups(run.trainer.model, 0.1, muon=True)
            orthogonal = {id(p) for group in groups if group["orthogonal"] for p in group["params"]}
            names = {name for name, p in run.trainer.model.named_parameters() if id(p) in orthogonal}
            assert "tower.0.convs.0.weight" in names
            assert not names & {"stem.conv.weight", "policy_head.pairs.key.weight", "value_head.fc3.weight"}
        net = matrixlib.load(run.folder, device="cpu")
    assert isinstance(net, Net)
    return net


def test_a_trained_network_is_read_back(trained: Net, tmp_path: Path) -> None:
    text = trained.save_lc0(tmp_path / "net.pb.gz")
    assert "without the heads ssl_piece, ssl_threat" in text
    back = matrixlib.load(tmp_path / "net.pb.gz", device="cpu")
    assert difference(trained, back, games(40, 80)) < 2e-3
    assert back.task.history == trained.task.history == 0
    message = Message(memoryview(gzip.decompress((tmp_path / "net.pb.gz").read_bytes())))
    assert message.message(5).integer(1) == trained.updates > 0


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_back(tmp_path: Path, form: str) -> None:
    net = made(form)
    net.save_lc0(tmp_path / "net.pb.gz")
    back = matrixlib.load(tmp_path / "net.pb.gz", device="cpu")
    assert back.task.config.model == net.task.config.model.model_copy(update={"ssl": ()})
    assert difference(net, back, games(40, 80)) < 5e-3, "logits up to 50 are rounded to 16 bits"


def test_lc0s_history_is_multiplied_by_nothing(trained: Net, tmp_path: Path) -> None:
    """As Lc0 itself unpacks the 16 bits."""
    trained.save_lc0(tmp_path / "net.pb.gz")
    net = Message(memoryview(gzip.decompress((tmp_path / "net.pb.gz").read_bytes())))
    layer = net.message(10).message(1).message(1)
    low, high = (np.frombuffer(layer.chunk(k), "<f4")[0] for k in (1, 2))
    share = np.frombuffer(layer.chunk(3), "<u2") / np.float32(65535)
    weights = (low * (1 - share) + high * share).reshape(-1, LC0_PLANES, 9)
    assert np.abs(weights[:, 13:104]).max() == 0
    assert np.abs(weights[:, [*range(13), *range(104, 110), 111]]).max((0, 2)).min() > 0


def test_hidden_squares_look_empty(trained: Net) -> None:
    rows = from_boards([chess.Board()])
    batch = {"pieces": torch.from_numpy(rows["pieces"].copy()), "state": torch.from_numpy(packed_state(rows))}
    hidden = torch.tensor([[255, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.uint8)
    for history in (False, True):
        now, seen = planes(batch, history), planes(batch | {"hidden": hidden}, history)
        assert (now[0, :12].sum(), seen[0, :12].sum()) == (32, 23)
        assert torch.equal(now[0, -8:], seen[0, -8:])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, r"model.encoding lc0, .*model.norm.blocks batch, .*value.activation relu"),
        ({"policy": {"kind": "factored"}}, r"model.policy.kind conv or attention or dense"),
        ({"policy": CONV | {"channels": 8}}, r"model.policy.channels \d+"),
        ({"attention": {"every": 1}}, "model.attention.every 0"),
        ({"value": {"hidden": 64}}, "model.value.hidden 128"),
        ({"value": {"pool": "pooled"}}, "model.value.pool flatten"),
    ],
)
def test_what_lc0_cannot_run_is_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    path = tmp_path / "net.pb.gz"
    with pytest.raises(ValueError, match=f"Lc0 cannot run this network: train one with .*{named}.*preset lc0_quick"):
        random_net(**options).save_lc0(path)
    assert not path.exists()
    if options:
        with pytest.raises(ConfigError, match=f"with encoding lc0 set {named}"):
            load_config("lc0_quick", {"model": options})


def test_bad_paths_are_named(tmp_path: Path) -> None:
    net = made()
    with pytest.raises(ValueError, match=r"net.onnx: the name of a weight file must end in .pb.gz"):
        net.save_lc0(tmp_path / "net.onnx")
    with pytest.raises(ValueError, match=r"nowhere/net.pb.gz: cannot be written \(No such file"):
        net.save_lc0(tmp_path / "nowhere" / "net.pb.gz")
    with pytest.raises(ConfigError, match="history"):
        load_config("demo", {"model": {"history": True}})


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a file, onto a folder, and where the disk is full."""
    net, kept = made(), tmp_path / "kept.pb.gz"
    (tmp_path / "file").touch()
    (tmp_path / "folder.pb.gz").mkdir()
    kept.write_bytes(b"before")
    before = sorted(tmp_path.iterdir())
    for path, reason in (("file/net.pb.gz", "Not a directory"), ("folder.pb.gz", "Is a directory")):
        with pytest.raises(ValueError, match=rf"{path}: cannot be written \({reason}\)"):
            net.save_lc0(tmp_path / path)
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ValueError, match=r"kept.pb.gz: cannot be written \(No space left"):
        net.save_lc0(kept)
    assert (sorted(tmp_path.iterdir()), kept.read_bytes()) == (before, b"before")


def test_the_notebook_writes_it(tmp_path: Path) -> None:
    made().save_lc0(tmp_path / "net.pb.gz")
    again = tmp_path / "again.pb.gz"
    shown = run_notebook("eval", run=str(tmp_path / "net.pb.gz"), device="cpu", sample=64, lc0=str(again))
    assert f"wrote {again}" in shown.text
    assert again.is_file()
    with pytest.raises(ValueError, match="pgn, onnx, int8 and lc0 must be different files"):
        run_notebook("eval", run=str(again), onnx=str(again), lc0=str(again))


def test_a_run_begins_with_maia_and_goes_on(shared: Path, reports: Path, tmp_path: Path) -> None:
    path = shared / "maia" / "maia-1900.pb.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the shared data")
    maia = matrixlib.load(path, device="cpu")
    with pytest.raises(RunError, match=r"network has model.history True, not False, model.channels 64, not 16"):
        opened("other", {}, init=str(path))
    options = maia.task.config.model.model_dump()
    with closing(opened("mine", options, init=str(path), batch_size=16, steps=2)) as run:
        model, task = run.trainer.evaluation_model(), cast(Any, run.task)
        assert model is not None
        begun = Net(model, task, maia.runtime)
        assert difference(maia, begun, games(20, 40)) == 0
        rows = {name: torch.from_numpy(array) for name, array in positions(maia, 128).items()}
        played, trained = (task.predict(deepcopy(model).train(mode), rows)["value"] for mode in (False, True))
        assert (played - trained).abs().mean() < 0.05, "the statistics of our positions are about its own"
        assert len(list(run.train())) == 2
    net = cast(Net, matrixlib.load(run.folder, device="cpu"))
    net.save_lc0(tmp_path / "mine.pb.gz")
    back = cast(Net, matrixlib.load(tmp_path / "mine.pb.gz", device="cpu"))
    assert difference(net, back, games(8, 40)) < 2e-3 < difference(net, maia, games(8, 40))


@pytest.mark.usefixtures("reports")
def test_a_run_begins_with_a_file_that_has_a_moves_left_head_or_not(tmp_path: Path) -> None:
    """The error names the option; what fits can be taken without it."""
    heads = {"with": FORMS["moves left"] | {"ssl": []}, "without": FORMS["history"] | {"ssl": []}}
    made("moves left").save_lc0(tmp_path / "with.pb.gz")
    made("history").save_lc0(tmp_path / "without.pb.gz")
    for ours, theirs, change in (("without", "with", "8, not 0"), ("with", "without", "0, not 8")):
        source = str(tmp_path / f"{theirs}.pb.gz")
        with pytest.raises(RunError, match=rf"model.moves_left.channels {change}.* train.init_partial: true"):
            opened(f"refused-{ours}", heads[ours], init=source)
        with closing(opened(ours, heads[ours], init=source, init_partial=True)) as run:
            stem = run.trainer.model.state_dict()["stem.conv.weight"]
            assert torch.equal(
                stem, cast(Net, matrixlib.load(source, device="cpu")).model.state_dict()["stem.conv.weight"]
            )


def test_a_file_with_folded_norms_trains_nothing(tmp_path: Path) -> None:
    path = lc0_files.save(tmp_path / "folded.pb.gz", lc0_files.network())
    with pytest.raises(RunError, match="batch norm folded in, so it can be played, not trained"):
        source_weights(str(path), load_config("lc0_quick"))


# Lc0 itself


class Answer(NamedTuple):
    shares: dict[str, float]
    value: float
    wdl: list[float]
    plies: float


def asked(engine: chess.engine.SimpleEngine, board: chess.Board) -> Answer:
    """Probability by move, value, win-draw-loss and plies to the end that Lc0 prints for a position with its moves."""
    shares, value, wdl, plies = dict[str, float](), 0.0, list[float](), 0.0
    with engine.analysis(board, chess.engine.Limit(nodes=1), game=object()) as analysis:
        for info in analysis:
            if "wdl" in info:
                wdl = [count / 1000 for count in info["wdl"].relative]
            name, _, rest = info.get("string", "").partition(" ")
            if name == "node":
                value = float(rest.rpartition("(V:")[2].strip(" )"))
                plies = float(rest.rpartition("(M:")[2].partition(")")[0])
            elif "(P:" in rest:
                shares[board.parse_uci(name).uci()] = float(rest.partition("(P:")[2].partition("%")[0]) / 100
    return Answer(shares, value, wdl, plies)


def plies_left(net: Net, boards: list[chess.Board]) -> list[float]:
    """Of a network's moves-left head, 0 without."""
    return [evaluation.moves_left or 0.0 for evaluation in net.evaluate_boards(boards)]


def check_lc0(command: list[str], net: Net, boards: list[chess.Board]) -> list[Answer]:
    """Assert that Lc0 says of positions with their moves what the network does; what it says."""
    answers = list[Answer]()
    with chess.engine.SimpleEngine.popen_uci(command) as engine:
        options: dict[str, Any] = {"VerboseMoveStats": True, "PolicyTemperature": 1.0, "UCI_ShowWDL": True}
        engine.configure(options | {"ScoreType": "Q"})  # else Lc0 rescales what it prints
        for board, ours, left in zip(boards, net.evaluate_boards(boards), plies_left(net, boards), strict=True):
            said = asked(engine, board)
            assert said.plies == pytest.approx(left, abs=0.06)
            assert said.shares == pytest.approx(ours.moves, abs=1e-3), board.fen()
            assert said.value == pytest.approx(ours.value, abs=1e-3)
            if ours.wdl is not None:  # printed in thousandths that sum to 1
                assert said.wdl[::2] == pytest.approx(ours.wdl[::2], abs=1e-3)
                assert said.wdl[1] == pytest.approx(ours.wdl[1], abs=1.6e-3)
            answers.append(said)
    return answers


@pytest.mark.parametrize("form", ["trained", *FORMS])
def test_lc0_says_the_same(form: str, lc0: str, trained: Net, tmp_path: Path) -> None:
    path = tmp_path / "net.pb.gz"
    (trained if form == "trained" else made(form)).save_lc0(path)
    boards = [*games(40, 80), *map(chess.Board, PROMOTIONS)]
    check_lc0([lc0, f"--weights={path}", "--backend=blas"], cast(Net, matrixlib.load(path, device="cpu")), boards)
