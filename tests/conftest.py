"""Fixtures that every test file may use."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

from matrixlib.runs import ending
from matrixlib.tasks.chess.stockfish.client import Stockfish, find_program

ROOT = Path(__file__).resolve().parents[1]

# Tests are many small computations: a second thread of torch's pool mostly spins, and on a shared machine it makes
# them several times slower. Set before torch is imported, and inherited by the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak and browser tests run only with `-m soak` and `-m e2e`; files with the most slow tests come first, so that
    none of them is left at the end for one process alone.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow") or item.path.suffix == ".ipynb")
    items.sort(key=lambda item: -slow[item.path])  # stable: a file's tests stay together, in their order
    for mark in ("soak", "e2e"):
        if mark in config.getoption("-m"):
            continue
        for item in items:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"{mark} test: run `make {mark}`"))


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


PICTURED = ending.UNDRAWN
"""Of what is left undrawn by itself."""


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> None:
    """The end of a run in this process has no pictures, which take a second: notebooks draw them, and `drawn`."""
    ending.UNDRAWN = PICTURED | {"train", "compare", "cycle", "overfit"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end with their pictures and pages, as they do for users."""
    monkeypatch.setattr(ending, "UNDRAWN", PICTURED)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real data beside the checkout ($MATRIXLIB_SHARED); the test skips where it is absent."""
    folder = Path(os.environ.get("MATRIXLIB_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"shared test data not found at {folder}; set MATRIXLIB_SHARED")
    return folder


@pytest.fixture(scope="session")
def forkserver() -> Any:
    """Processes that start in no time, as what a training imports is imported once for all of them. They have the
    environment of the first of them."""
    if not warm.FORKS:
        pytest.skip("processes are started by forkserver, which this system lacks")
    context = warm.context()
    ready = context.Process(target=int)
    ready.start()
    ready.join()
    return context


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reports root of the test's own."""
    root = tmp_path / "reports"
    root.mkdir()
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(root))
    return root


@pytest.fixture(scope="session", params=["on PATH", "current"])
def stockfish(request: pytest.FixtureRequest) -> Path:
    """A Stockfish; the test skips where there is none. On PATH is Debian's of 2022.

    A current one is named by $MATRIXLIB_STOCKFISH: a program, or `bin/stockfish-*-single.js` of the npm package
    `stockfish` (`npm install stockfish` in any folder; needs `apt install nodejs`).
    """
    path = os.environ.get("MATRIXLIB_STOCKFISH")
    if request.param == "current" and not path:
        pytest.skip("no current Stockfish: `npm install stockfish`, MATRIXLIB_STOCKFISH=.../stockfish-*-single.js")
    found = find_program(path if request.param == "current" and path else "stockfish")
    if found is None:
        pytest.skip("there is no Stockfish: `apt install stockfish`")
    return Path(found)


@pytest.fixture(scope="session")
def lc0() -> str:
    """Lc0, on PATH or named by $MATRIXLIB_LC0; the test skips where there is none."""
    if not (found := os.environ.get("MATRIXLIB_LC0") or shutil.which("lc0")):
        pytest.skip("Lc0 is neither on the path nor named by MATRIXLIB_LC0")
    return found


@pytest.fixture(scope="module")
def engine(stockfish: Path) -> Iterator[Stockfish]:
    """A running Stockfish; the test skips where there is none."""
    with Stockfish(stockfish) as running:
        yield running


@pytest.fixture
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled code is to be kept, with nothing in the environment that says so."""
    monkeypatch.setenv("MATRIXLIB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that what the test sets is taken away again
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "compiled"
