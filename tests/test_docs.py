"""The README says what is there: files, options, presets, variables, make targets, commands.

``python tests/test_docs.py`` writes the generated tables of the README again.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from matrixlib import config

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TREES = {"matrixlib": "*.py", "notebooks": "*.ipynb", "params": "*.yaml"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def readme() -> str:
    return README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Fenced blocks of one language."""
    return [body for kind, body in FENCE.findall(readme()) if kind == language]


def spans() -> list[str]:
    """Inline code."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", FENCE.sub("", readme()))]


def section(title: str) -> str:
    """Text under a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", readme(), re.MULTILINE | re.DOTALL)
    assert found, f"the README has no section '{title}'"
    return found[1]


def first_cells(text: str) -> list[str]:
    """What stands in backticks at the start of each table row."""
    return re.findall(r"^\| \[?`([^`]+)`", text, re.MULTILINE)


# Generated tables


def options_table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| Option | Type | Meaning |", "|---|---|---|"]
    for key, kind, meaning in rows:
        shown = re.sub(r"'(\w+)'", r"`\1`", kind)
        assert "|" not in kind + meaning, f"{key}: a '|' would end the cell"
        lines.append(f"| `{key}` | {shown} | {meaning} |")
    return "\n".join(lines)


def presets_table() -> str:
    lines = ["| Preset | Network | Length and batch | What it is |", "|---|---|---|---|"]
    for name in config.presets():
        text = (config.PARAMS / f"{name}.yaml").read_text(encoding="utf-8")
        data = yaml.safe_load(text)
        model, train = data["model"], data["train"]
        steps = train["steps"]
        updates = f"updates for {train['minutes']:g} minutes," if steps == "auto" else f"{steps:,} updates"
        length = f"{updates} of {train['batch_size']:,}"
        if data["task"] == "chess":
            size = f"{model['blocks']} blocks of {model['channels']} channels"
        else:
            size = f"{model['layers']} layers of width {model['width']}"
        lines.append(f"| `{name}` | {size} | {length} | {purpose(text, name)} |")
    return "\n".join(lines)


def purpose(text: str, name: str) -> str:
    """First sentence of the comment that a preset starts with."""
    comment = re.match(r"(?:#.*\n)+", text)
    assert comment, f"params/{name}.yaml must start with a comment that says what it is for"
    words = " ".join(line.lstrip("# ").strip() for line in comment[0].splitlines())
    return re.split(r"(?<=[.])\s", words, maxsplit=1)[0]


TABLES = {
    "presets": presets_table,
    "options": lambda: options_table(config.options_table(config.Config)),
    "chess-options": lambda: options_table(config.own_options(config.ChessConfig)),
    "cycle-options": lambda: options_table(config.options_table(config.CycleConfig)),
    "latin-options": lambda: options_table(config.own_options(config.LatinConfig)),
    "tictactoe-options": lambda: options_table(config.own_options(config.TicTacToeConfig)),
}


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}:begin -->\n)(.*?)(\n?<!-- {name}:end -->)", re.DOTALL)


def rewrite() -> None:
    """Put the generated tables into the README."""
    text = readme()
    for name, table in TABLES.items():
        made = table()
        text, count = between(name).subn(lambda m, made=made: f"{m[1]}{made}\n{m[3].lstrip()}", text)
        assert count == 1, f"the README needs one pair of markers '{name}'"
    README.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables_are_those_of_the_code(name: str) -> None:
    found = between(name).findall(readme())
    assert len(found) == 1
    assert found[0][1] == TABLES[name](), "write them again: python tests/test_docs.py"


# Files


def tree() -> list[str]:
    """Paths of the README's tree, from its indentation; folders end in a slash."""
    text = next(iter(re.findall(r"^```text\n(.*?)^```", section("The tree"), re.MULTILINE | re.DOTALL)))
    paths: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        assert depth <= len(above), f"'{line}' is indented too far"
        above = above[:depth]
        paths.append("".join(above) + name)
        if name.endswith("/"):
            above.append(name)
    return paths


def says_something(path: Path) -> bool:
    """False for an `__init__.py` with nothing but a docstring: it only marks a package."""
    if path.name != "__init__.py":
        return True
    return any(not isinstance(node, ast.Expr) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def test_the_tree_names_every_file_once() -> None:
    named = [path for path in tree() if Path(path).suffix in (".py", ".ipynb", ".yaml")]
    there = [
        path.relative_to(ROOT).as_posix()
        for folder, pattern in TREES.items()
        for path in (ROOT / folder).rglob(pattern)
        if "checkpoint" not in path.parent.name and says_something(path)
    ]
    assert sorted(named) == sorted(there)


def test_what_the_tree_names_is_there() -> None:
    paths = tree()
    assert len(paths) == len(set(paths))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [path for path in paths if path.endswith("/") != (ROOT / path).is_dir()] == []


def test_linked_and_named_files_exist() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", readme())]
    local = {link for link in links if link and "://" not in link and "@@" not in link}
    local |= {s for s in spans() if re.fullmatch(r"(matrixlib|notebooks|params|tests|\.ci)/[\w./]*", s)}
    assert local
    assert [name for name in sorted(local) if not (ROOT / name).exists()] == []
    known = {path.name for path in (*ROOT.glob("*.*"), *(ROOT / "matrixlib").rglob("*.py"))}
    bare = {s for s in spans() if re.fullmatch(r"\w+\.(py|toml|yml|lock)", s)}
    assert sorted(bare - known) == []


def test_pictures_are_small_and_have_a_text() -> None:
    shown = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", readme())
    assert len(shown) >= 3
    for text, path in shown:
        assert len(text) > 20, path
        assert (ROOT / path).stat().st_size < 200_000, path


def test_every_notebook_has_its_line() -> None:
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(first_cells(section("Notebooks"))) == names


def test_every_preset_has_its_row() -> None:
    assert sorted(first_cells(section("Presets"))) == config.presets()


# Commands and variables


def make_calls() -> Iterator[list[str]]:
    """Words of every make command in the README."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    for text in (*lines, *spans()):
        if text.startswith("make "):
            yield text.split()[1:]


def test_make_targets_and_variables_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE))
    calls = list(make_calls())
    assert ["train"] in calls
    assert ["test"] in calls
    for words in calls:
        for word in words:
            name, equals, _ = word.partition("=")
            assert f"$({name})" in text if equals else name in targets, f"make {' '.join(words)}: {word}"


def commands(program: str) -> list[list[str]]:
    """Words of the README's shell lines that call `program`, from there on."""
    found = []
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if program in words:
                found.append(words[words.index(program) + 1 :])
    return found


def parameters(notebook: Path) -> set[str]:
    """Names of the cell tagged `parameters`."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1, notebook.name
    body = ast.parse("".join(tagged[0]["source"])).body
    return {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_papermill_examples_would_be_accepted() -> None:
    calls = commands("papermill")
    assert len(calls) >= 5
    for words in calls:
        notebook = ROOT / "notebooks" / Path(words[0]).name
        assert notebook.is_file(), words
        assert words[1].endswith(".ipynb"), words
        given: dict[str, Any] = {}
        rest = iter(words[2:])
        for flag in rest:
            if flag == "-p":
                name, value = next(rest), next(rest)
                given[name] = yaml.safe_load(value)
            else:
                assert flag == "-y", words
                given |= yaml.safe_load(next(rest))
        assert given.keys() <= parameters(notebook), words
        preset, overrides = given.get("preset", "demo"), given.get("overrides", {})
        if notebook.stem == "cycle":
            config.load_cycle(preset, overrides)
        else:
            device = {"runtime": {"device": given.get("device", "auto")}}
            config.load(preset, config.merge(device, overrides))


def test_options_of_commands_exist() -> None:
    source = "".join(
        (ROOT / "matrixlib" / f"{name}.py").read_text(encoding="utf-8") for name in ("launch", "bench")
    )
    for option in {word for span in spans() for word in span.split() if word.startswith("--")} - {"--file"}:
        assert f'"{option}"' in source, option


def test_environment_variables_are_those_of_the_code() -> None:
    sources = [*(ROOT / "matrixlib").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    name = re.compile(r"MATRIXLIB_[A-Z]+")
    there = {found for path in sources for found in name.findall(path.read_text(encoding="utf-8"))}
    assert set(first_cells(section("Environment variables"))) == there
    assert set(name.findall(readme())) == there


def test_options_named_in_the_text_exist() -> None:
    keys = {key for schema in config.TASKS.values() for key, _, _ in config.options_table(schema)}
    sections = {key.partition(".")[0] for key in keys}
    words = {word for span in spans() for word in re.findall(r"^[a-z]+(?:\.[a-z_0-9]+)+$", span)}
    files = (".py", ".yaml", ".json", ".ipynb", ".html", ".jsonl", ".log")
    modules = {word for word in words if (ROOT / "matrixlib" / f"{word.replace('.', '/')}.py").exists()}
    named = {word for word in words - modules if word.split(".")[0] in sections and not word.endswith(files)}
    assert named
    assert sorted(named - keys) == []


def test_no_placeholder_is_left() -> None:
    assert re.findall(r"@@\w+@@", readme()) == []


if __name__ == "__main__":
    rewrite()
