"""ONNX: the file says what the network says, for every size and batches of 1 and 3."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from test_latin_task import latin_task

from matrixlib.tasks.latin import export
from matrixlib.tasks.latin.vocabulary import EMPTY, PAD, token_table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
there = all(importlib.util.find_spec(name) for name in PACKAGES)


@pytest.mark.skipif(not there, reason=f"needs {', '.join(PACKAGES)}")
@pytest.mark.slow
def test_the_exported_network_says_the_same(tmp_path: Path) -> None:
    model = latin_task().build_model()
    path = tmp_path / "latin.onnx"
    export.export(model, path)
    assert [file.name for file in tmp_path.iterdir()] == ["latin.onnx"], "weights in a file beside it (R202)"
    assert export.parity(model, path) < 1e-4


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for present in PACKAGES:
        monkeypatch.setitem(sys.modules, present, ModuleType(present))
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    model, path = latin_task().build_model(), tmp_path / "latin.onnx"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {Requirement(line).name for line in extras["optional-dependencies"]["onnx"]} == set(PACKAGES)
    with pytest.raises(ValueError, match=rf"'{name}' is not installed.*\[onnx\]"):
        export.parity(model, path) if name == "onnxruntime" else export.export(model, path)


def test_hidden_cells_are_fed_as_empty_and_not_as_pad() -> None:
    """R191: the specification's consumer feeds 0, which is PAD by now."""
    grid, _, mode = export.puzzles(3, 4, seed=0)
    assert set(mode.tolist()) == {0, 1, 2}
    assert (grid[:, 4:] == PAD).all()
    assert (grid[:, :4, :4] != PAD).all()
    assert (grid == EMPTY).any()
    for one, number in zip(grid, mode, strict=True):
        assert set(one[:4, :4].ravel().tolist()) <= {EMPTY, *token_table()[number, 4, :4]}
