"""Training and self-play compute what they have always computed: the same bits as commit d7c9085."""

import json
from pathlib import Path
from typing import Any

import golden_runs
import pytest

FIRST = 15  # updates of the trainings that every test run looks at; `make soak` sees all


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(golden_runs.GOLDEN.read_text(encoding="utf-8"))
    here = golden_runs.versions()
    if here != kept["versions"]:
        pytest.skip(f"the golden runs are of {kept['versions']}, and here is {here}")
    return kept


@pytest.fixture(scope="module")
def begun(golden: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first updates of the trainings."""
    folder = tmp_path_factory.mktemp("golden")
    golden_runs.execute(folder, FIRST)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", ["demo", "latin_demo"])
def test_the_same_first_bits_as_ever(run: str, golden: dict[str, Any], begun: Path) -> None:
    rows = golden_runs.rows_of(begun / run)
    assert len(rows) == FIRST
    assert [row["loss"] for row in rows] == golden[run]["loss"][:FIRST]
    assert [row["grad_norm"] for row in rows] == golden[run]["gradient_norm"][:FIRST]


@pytest.mark.soak
def test_the_same_bits_to_the_end_and_the_same_games(golden: dict[str, Any], tmp_path: Path) -> None:
    assert json.loads(json.dumps(golden_runs.compute(tmp_path))) == golden
