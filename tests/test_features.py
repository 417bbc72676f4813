"""The table of features: every row of the specification is there, and what it names exists."""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "features.yaml").read_text(encoding="utf-8"))


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """Names of the test functions of a file, wherever they stand in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row: it says where the feature is and what holds it, or what is missing and why."""
    if row.keys() == {"missing"}:
        known = re.match(r"(issue \d+|not applicable|out of scope): \w", str(row["missing"]))
        return [] if known else ["name the issue that is to bring it, or say why it does not apply"]
    if row.keys() != {"where", "tests"} or not (row["where"] and row["tests"]):
        return ["give `where` and `tests`, or `missing`"]
    gone = [name for name in row["where"] if not (ROOT / name).is_file()]
    for name in row["tests"]:
        file, _, test = name.partition("::")
        if not (ROOT / file).is_file() or test not in functions_of(ROOT / file):
            gone.append(name)
    return [f"there is no {name}" for name in gone]


def test_every_row_names_what_is_there() -> None:
    wrong = {name: found for name, row in TABLE.items() if (found := problems(row))}
    assert not wrong
    assert list(TABLE) == sorted(TABLE), "in the order of their numbers"


def test_every_feature_of_the_specification_has_its_row(shared: Path) -> None:
    path = shared / "FEATURES.md"
    if not path.is_file():
        pytest.skip(f"the specification's list of features is not at {path}")
    ids = set(re.findall(r"^\| (R\d{3}) \|", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert ids
    assert ids == set(TABLE), f"without a row: {sorted(ids - set(TABLE))}; unknown: {sorted(set(TABLE) - ids)}"


def test_maintainers_are_named() -> None:
    text = (ROOT / "MAINTAINERS.md").read_text(encoding="utf-8")
    for folder in sorted(path.name for path in (ROOT / "matrixlib").iterdir() if (path / "__init__.py").is_file()):
        assert f"`matrixlib/{folder}/`" in text, f"who looks after matrixlib/{folder}/?"
    assert "is reached by its issues" in " ".join(text.split())
