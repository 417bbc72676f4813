"""Replays of the notebooks by nbval (`pytest --nbval notebooks`): each with a reports root of its own, on the CPU.

Kernels that the tests' own process starts are forked, here and in other tests.
"""

from __future__ import annotations

import functools
import gc
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import warm
from jupyter_client.provisioning import local_provisioner

from matrixlib.tasks.chess.stockfish.client import EngineError, Stockfish

sys.modules.setdefault("rfc3987_syntax", None)  # two seconds, for checks of schemas' addresses
pytest_plugins = ["nbval.plugin"]
REPORTS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all has been imported
    config.option.nbval_current_env = True
    config.option.nbval_sanitize_with = str(Path(__file__).parent / "tests" / "nbval.cfg")
    warm.spare_time()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collections of garbage, which end trials and arms, do not look through all that has been imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The kernel starts in the set-up of a notebook's first cell, with the environment of that moment."""
    with pytest.MonkeyPatch.context() as patch:
        if warm.FORKS:
            patch.setattr(local_provisioner, "launch_kernel", warm.launch_kernel)
        if item.path.suffix == ".ipynb":
            kept = item.parent.stash
            if REPORTS not in kept:
                kept[REPORTS] = tempfile.TemporaryDirectory()
            patch.setenv("MATRIXLIB_REPORTS", kept[REPORTS].name)
            patch.setenv("MATRIXLIB_DEVICE", "cpu")
            patch.setenv("MATRIXLIB_LIVE", "0")
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.name == "sample.ipynb" and (reason := without_stockfish()):
        pytest.skip(reason)


@functools.cache
def without_stockfish() -> str:
    """Why sample.ipynb can't be replayed here: its stored counts are those of one version of the engine."""
    try:
        with Stockfish() as engine:
            version = engine.name
    except EngineError as error:
        return str(error)
    return "" if version == "Stockfish 15.1" else f"sample.ipynb was stored with Stockfish 15.1, here is {version}"
