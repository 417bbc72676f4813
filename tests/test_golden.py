"""Training and self-play compute what they have always computed: the same bits as commit d7c9085."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_runs
import pytest


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(golden_runs.GOLDEN.read_text(encoding="utf-8"))
    here = golden_runs.versions()
    if here != kept["versions"]:
        pytest.skip(f"the golden runs are of {kept['versions']}, and here is {here}")
    return kept


@pytest.fixture(scope="module")
def computed(golden: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(golden_runs.compute(tmp_path_factory.mktemp("golden"))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("run", ["demo", "latin_demo", "cycle"])
def test_the_same_bits_as_ever(run: str, golden: dict[str, Any], computed: dict[str, Any]) -> None:
    assert computed[run] == golden[run]


def test_the_golden_runs_are_whole() -> None:
    kept = json.loads(Path(golden_runs.GOLDEN).read_text(encoding="utf-8"))
    for name in ("demo", "latin_demo"):
        assert len(kept[name]["loss"]) == golden_runs.UPDATES
    assert len(kept["cycle"]["shards"]) == 3
