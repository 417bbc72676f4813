"""ONNX: the file says what the network says, for every size and batches of 1 and 3."""

from pathlib import Path

import pytest
from test_latin_task import latin_task

from matrixlib.engine import onnx
from matrixlib.tasks.latin import export
from matrixlib.tasks.latin.vocabulary import EMPTY, PAD, token_table


@pytest.mark.skipif(not onnx.installed(), reason=f"needs {', '.join(onnx.PACKAGES)}")
@pytest.mark.slow
def test_the_exported_network_says_the_same(tmp_path: Path) -> None:
    file = export.export(latin_task().build_model(), tmp_path / "latin.onnx")
    assert [entry.name for entry in tmp_path.iterdir()] == ["latin.onnx"], "weights in a file beside it"
    assert file.difference < 1e-4
    assert file.examples == 4 * 14, "every size, in batches of 1 and 3"


def test_hidden_cells_are_fed_as_empty_and_not_as_pad() -> None:
    """An earlier consumer fed 0, which is PAD by now."""
    grid, _, mode = export.puzzles(3, 4, seed=0)
    assert set(mode.tolist()) == {0, 1, 2}
    assert (grid[:, 4:] == PAD).all()
    assert (grid[:, :4, :4] != PAD).all()
    assert (grid == EMPTY).any()
    for one, number in zip(grid, mode, strict=True):
        assert set(one[:4, :4].ravel().tolist()) <= {EMPTY, *token_table()[number, 4, :4]}
