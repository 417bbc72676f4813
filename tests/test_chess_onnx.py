"""Chess networks as ONNX: every option says the same in the file, which explains itself; nothing wrong is written."""

import copy
import importlib
import json
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import chess
import numpy as np
import pytest
import torch
from networks import CPU, MATRIX0, random_net
from packaging.requirements import Requirement
from positions import hard_positions

import matrixlib
from matrixlib.engine import onnx
from matrixlib.hardware.runtime import resolve
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.evaluate import onnx as export
from matrixlib.tasks.chess.evaluate import throughput
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.onnx import PLANE_NAMES, moves, plane_names
from matrixlib.tasks.chess.planes import move_map, planes
from matrixlib.tasks.chess.records import from_boards, legal_indices, policy_index
from matrixlib.tasks.chess.task import ChessTask

ROOT = Path(__file__).resolve().parents[1]
needs_packages = pytest.mark.skipif(not onnx.installed(), reason=f"needs {', '.join(onnx.PACKAGES)}")
SMALL = {"channels": 32, "blocks": 2, "value": {"channels": 8, "hidden": 16}}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "group norm, open lines, attention, all heads": (
        "small",
        {
            **SMALL,
            "lines": 8,
            "attention": {"every": 1, "heads": 2, "bias": True, "mask": True, "unmasked_mix": 0.3},
            "policy": {"kind": "attention", "channels": 8, "rank": 16},
            "ssl": ["piece", "threat", "pin", "fork", "control"],
        },
    ),
    "matrix0_53m": (
        "matrix0_53m",
        {**SMALL, "attention": {"every": 2, "heads": 2}, "policy": {"channels": 8, "rank": 16}},
    ),
}


def fresh(preset: str, model: dict[str, Any]) -> Net:
    settings = load_config(preset, {"model": model, "runtime": CPU})
    assert isinstance(settings, ChessConfig)
    task = get_task("chess").task(settings)
    assert isinstance(task, ChessTask)
    return Net(task.build_model(), task, resolve(settings.runtime, settings.train, settings.data))


def shaken(preset: str, model: dict[str, Any]) -> Net:
    """A network in which no weight and no statistic is what it was drawn as, so that none may be left out."""
    net, generator = fresh(preset, model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*net.model.parameters(), *net.model.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(torch.rand(tensor.shape, generator=generator) + 0.5)
                tensor.add_(0.05 * torch.rand(tensor.shape, generator=generator))
    return net


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    """A network, and its file."""
    net, path = random_net(channels=64), tmp_path_factory.mktemp("onnx") / "model.onnx"
    export.export(net, path)
    return net, path


def packed(net: Net, boards: list[chess.Board]) -> dict[str, np.ndarray]:
    rows = from_boards(boards)
    return net.task.inputs(rows, *legal_indices(rows))


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name == "matrix0_53m")) for name in NETWORKS]
)
def test_the_file_says_what_the_network_says(tmp_path: Path, name: str) -> None:
    """In batches of 1 and 3 and others, with the weights inside of the file."""
    net, path = shaken(*NETWORKS[name]), tmp_path / "model.onnx"
    file = export.export(net, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"], "weights in a file beside it"
    assert 0 < file.difference < 1e-4
    boards = [board for board in hard_positions() if any(board.legal_moves)]
    session = onnx.session(path, threads=1)
    for count in (1, len(boards)):
        batch = packed(net, boards[:count])
        given = planes({k: torch.from_numpy(v) for k, v in batch.items()}, net.task.config.model.encoding)
        answers = dict(zip(file.outputs, session.run(None, {"planes": given.numpy()}), strict=True))
        heads = frozenset(net.task.config.model.ssl)
        expected = net.predict(batch, heads)
        value = "value" if net.task.config.model.value.kind == "scalar" else "wdl"
        np.testing.assert_allclose(answers[value], expected[value], atol=1e-5)
        assert answers["policy"].shape == (count, 4672)
        for head in heads if net.task.config.model.encoding == "oriented" else ():
            np.testing.assert_allclose(answers[f"ssl_{head}"], expected[f"ssl/{head}"], atol=1e-5)
        by_file = export.load(net, path).predict(batch)
        for key in ("policy", "value"):
            np.testing.assert_allclose(by_file[key], expected[key], atol=1e-4)


@needs_packages
def test_a_file_that_says_something_else_is_not_written(
    exported: tuple[Net, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (net, stored), path = exported, tmp_path / "model.onnx"
    path.write_text("an earlier one")
    monkeypatch.setattr(torch.onnx, "export", lambda module, inputs, draft, **_: shutil.copy(stored, draft))
    for wrong in (1e-2, float("nan")):
        other = Net(copy.deepcopy(net.model), net.task, net.runtime)
        next(other.model.parameters()).add_(wrong)
        with pytest.raises(ValueError, match="differ from the network"):
            export.export(other, path)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["an earlier one"]
    with pytest.raises(ValueError, match="no folder"):
        export.export(net, tmp_path / "nowhere" / "model.onnx")


@needs_packages
def test_the_file_explains_itself_and_becomes_small_and_can_play(exported: tuple[Net, Path], tmp_path: Path) -> None:
    (net, path), small = exported, tmp_path / "model.int8.onnx"
    onnx.quantise(path, small)
    assert small.stat().st_size < path.stat().st_size / 2
    notes = onnx.session(small).get_modelmeta().custom_metadata_map
    assert json.loads(notes["planes"]) == list(PLANE_NAMES["oriented"])
    assert json.loads(notes["moves"]) == moves("oriented")
    assert notes["encoding"] == "oriented"
    boards = [board for board in hard_positions() if any(board.legal_moves)]
    batch = packed(net, boards)
    expected, answers = (requested.predict(batch)["value"] for requested in (net, export.load(net, small)))
    assert 0 < np.abs(expected - answers).max() < 0.1
    assert np.corrcoef(expected, answers)[0, 1] > 0.99, "what is measured with it is about the same network"


@needs_packages
@pytest.mark.parametrize("encoding", ["oriented", "matrix0", "lc0"])
def test_a_file_of_ours_opens_as_a_network(exported: tuple[Net, Path], tmp_path: Path, encoding: str) -> None:
    net, path = exported
    if encoding != "oriented":
        model: dict[str, Any] = {"channels": 32, "blocks": 2, "history": True, "moves_left": {"channels": 4}}
        net = fresh("lc0_quick", model) if encoding == "lc0" else random_net({"model": {"ssl": [], **MATRIX0}})
        path = tmp_path / "net.onnx"
        export.export(net, path)
    again = matrixlib.load(path)
    known = again.task.config.model
    assert known == net.task.config.model.model_copy(update={"ssl": known.ssl, "moves_left": known.moves_left})
    assert json.loads(again.model.session.get_modelmeta().custom_metadata_map["moves"]) == moves(encoding)
    fens = [board.fen() for board in hard_positions() if any(board.legal_moves)]
    fens += ["startpos moves e2e4 e7e5 g1f3 b8c6", "startpos moves e2e4 c7c5 g1f3 d7d6"]
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    served_by_two, threads = again.with_threads(2), torch.get_num_threads()
    torch.set_num_threads(before)
    assert threads == 5, "the threads of what else computes here"
    for served in (again, served_by_two, again.with_workers()):
        for ours, theirs in zip(net.evaluate(fens), served.evaluate(fens), strict=True):
            assert theirs.moves == pytest.approx(ours.moves, abs=1e-4)
            assert theirs.value == pytest.approx(ours.value, abs=1e-4)
    with pytest.raises(ValueError, match="not written as ONNX"):
        get_task("chess").export(again, tmp_path / "out.onnx")
    file = importlib.import_module("onnx").load(path)
    (options,) = (entry for entry in file.metadata_props if entry.key == "model")
    for text, refusal in {
        "{": r"other\.onnx: export its run by this version, which refuses its metadata: Expecting property",
        '{"later": 1}': r"refuses its metadata: options: unknown key 'model\.later'",
    }.items():
        options.value = text
        importlib.import_module("onnx").save(file, tmp_path / "other.onnx")
        with pytest.raises(ValueError, match=refusal):
            matrixlib.load(tmp_path / "other.onnx")
    del file.metadata_props[:]
    importlib.import_module("onnx").save(file, tmp_path / "other.onnx")
    with pytest.raises(ValueError, match=r"other\.onnx was not written by `export`"):
        matrixlib.load(tmp_path / "other.onnx")
    (tmp_path / "cut.onnx").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cut\.onnx cannot be read as ONNX"):
        matrixlib.load(tmp_path / "cut.onnx")


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_moves_are_named_by_their_index(encoding: str) -> None:
    named = moves(encoding)
    assert len(named) == 4672
    assert len(PLANE_NAMES[encoding]) == 19
    for board in hard_positions():
        shown = board if board.turn or encoding == "matrix0" else board.mirror()
        net_index = {policy_index(move, board.turn): move for move in board.legal_moves}
        task_index = move_map(encoding)[0 if board.turn else 1][list(net_index)].tolist()
        for index, move in zip(task_index, net_index.values(), strict=True):
            turn = (lambda square: square) if shown is board else chess.square_mirror
            turned = chess.Move(turn(move.from_square), turn(move.to_square), move.promotion)
            assert named[index] + ("q" if move.promotion == chess.QUEEN else "") == turned.uci()
            assert turned in shown.legal_moves


def test_planes_and_moves_of_lc0_are_named() -> None:
    newest, every = (plane_names(fresh("lc0_quick", {"history": history}).task) for history in (False, True))
    assert (len(every), len(newest)) == (112, 21)
    assert newest == every[:13] + every[104:]
    assert [every[i] for i in (13, 25, 109)] == ["our P, 1 plies ago", "repeated, 1 plies ago", "half-move clock / 100"]
    assert moves("lc0").index("e1h1") >= 0 <= moves("lc0").index("a7b8q")
    assert len({*moves("lc0")}) == 1858


@pytest.mark.parametrize("name", onnx.PACKAGES)
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for present in onnx.PACKAGES:
        monkeypatch.setitem(sys.modules, present, ModuleType(present))
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {Requirement(line).name for line in extras["optional-dependencies"]["onnx"]} == set(onnx.PACKAGES)
    path, net = tmp_path / "model.onnx", random_net()
    with pytest.raises(ValueError, match=rf"'{name}' is not installed.*\[onnx\]"):
        onnx.session(path) if name == "onnxruntime" else export.export(net, path)


def test_speeds_stand_beside_their_limit() -> None:
    net = random_net()
    speeds = throughput.measure({"torch fp32": net, "other int8": net}, (1, 8), seconds=0.01)
    assert speeds[["engine", "rows"]].values.tolist() == [
        [name, rows] for rows in (1, 8) for name in ("torch fp32", "other int8")
    ]
    assert (speeds["rate"] > 0).all()
    table = throughput.table(speeds)
    assert list(table) == ["1 at once [1/s]", "8 at once [1/s]", "limit [1/s]", "share"]
    assert table["share"].between(0, 1).to_dict() == {"torch fp32": True, "other int8": False}
