"""Every notebook in JupyterLab, in a real browser: opened, run, looked at.

`make e2e` runs all of it and keeps the screenshots in reports/e2e/; `make test` only sees the live panel move.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("playwright", reason="playwright is not installed (extra: dev)")

from browser import SEES_FRAMES, Lab, chromium, copy_notebook, find_chromium, laboratory

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "reports" / "e2e"
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb") if path.stem != "train")


@pytest.fixture
def lab(tmp_path: Path, reports: Path) -> Iterator[tuple[Path, str]]:
    """A folder with a JupyterLab over it, whose runs go to the test's own reports."""
    find_chromium()
    with laboratory(tmp_path, {"MATRIXLIB_REPORTS": str(reports), "MATRIXLIB_DEVICE": "cpu"}) as address:
        yield tmp_path, address


@pytest.fixture
def pictures(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Where the screenshots go: kept by `make e2e` alone."""
    folder = PICTURES if request.node.get_closest_marker("e2e") else tmp_path / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def saved_outputs(path: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]


def static_pictures(path: Path) -> int:
    """Pictures in a saved notebook, which must hold no widget beside them."""
    outputs = saved_outputs(path)
    assert not any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in outputs)
    return sum("image/png" in output.get("data", {}) for output in outputs)


def frames(lab: Lab) -> int:
    return int(lab.page.evaluate("() => window.frames_seen.size"))


def wait_for_frames(lab: Lab, count: int) -> None:
    """Until so many different pictures of the live panel were seen."""
    lab.page.wait_for_function(f"() => window.frames_seen.size >= {count}", timeout=120_000)


@pytest.mark.slow
def test_the_live_panel_moves_and_ends_as_one_picture(
    lab: tuple[Path, str], pictures: Path
) -> None:
    folder, address = lab
    path = copy_notebook("train", folder)
    with chromium() as page:
        train = Lab(page, address, "train", pictures)
        train.open()
        page.evaluate(SEES_FRAMES)
        train.run_all()
        wait_for_frames(train, 5)
        train.wait_until_run()
        assert page.locator("img.widget-image").count() == 0
        assert page.locator(".jp-RenderedImage img").count() == 2, "the curves, and where the time went"
        assert any("VERDICT: PASS" in text for text in train.texts())
        train.save()
    assert static_pictures(path) == 2
