"""The documents say what is there: files, options, presets, variables, make targets, commands.

``python tests/test_docs.py`` writes their generated tables again.
"""

import io
import json
import os
import re
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from cells import definitions
from options import options_of
from pages import PAGES, ROOT, anchor, lines, papermill_calls, read, section, spans
from papermill import inspect_notebook
from papermill.cli import papermill
from torch import nn

from matrixlib import config, files
from matrixlib.bench import __main__ as bench
from matrixlib.runs import launch
from matrixlib.runs.cycle_games import CycleConfig, load_cycle
from matrixlib.runs.record import MAY_CHANGE
from matrixlib.runs.sweep import SweepConfig, load_sweep
from matrixlib.tasks import TASKS, get_task, load_config
from matrixlib.tasks.chess.uci import engine as uci

README = ROOT / "README.md"
GUIDES = ROOT / "notebooks" / "guides"
MEASURED = ROOT / "tests" / "golden" / "presets.json"
RECORD = MEASURED.with_name("bench.json")
MAIN_PRESETS = ("demo", "quick", "quick_1h", "small", "matrix0_attention_policy", "latin_quick", "melee_quick")


def first_cells(text: str) -> list[str]:
    """What stands in backticks at the start of each table row."""
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


def test_what_may_change_on_resume_is_said_as_it_is() -> None:
    text = read(GUIDES / "runs.md")
    said = re.search(r"What may change on resume:.*?Any other", text, re.DOTALL)
    assert said is not None
    names = set(re.findall(r"`([\w.]+)`", said[0]))
    assert names == {name.removesuffix(".") for name in MAY_CHANGE}


# Generated tables


def markdown(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.split(", ")
    assert all("|" not in cell for row in rows for cell in row), "a '|' would end a cell"
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def options_table(rows: list[tuple[str, str, str, str]]) -> str:
    return markdown(
        "Option, Type, Default, Meaning",
        [
            (f"`{key}`", re.sub(r"'(\w+)'", r"`\1`", kind), f"`{default}`" if default else "", meaning)
            for key, kind, default, meaning in rows
        ],
    )


def presets_table() -> str:
    head = "Preset, Network, Parameters, Length and batch, Rows/s, Time, Memory, What it is"
    return markdown(head, preset_rows())


def main_presets_table() -> str:
    """Those that a newcomer chooses between."""
    rows = {row[0].strip("`"): (row[0], row[2], row[5], row[7]) for row in preset_rows()}
    return markdown("Preset, Parameters, Time, What it is", [rows[name] for name in MAIN_PRESETS])


def preset_rows() -> list[tuple[str, ...]]:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["presets"]
    rows = []
    for name in config.presets():
        text = (files.PARAMS / f"{name}.yaml").read_text(encoding="utf-8")
        data = config.dump(load_config(name))
        model, train, steps = data["model"], data["train"], data["train"]["steps"]
        updates = f"updates for {train['minutes']:g} minutes," if steps == "auto" else f"{steps:,} updates"
        size = f"{model['blocks']} blocks of {model['channels']} channels" if "blocks" in model else ""
        count = rate = time = memory = ""
        if figures := measured.get(name):
            count, speed = f"{figures['parameters']:,}", figures["rows_per_second"]
            rate = f"{speed:,.0f}" if speed > 100 else f"{speed:.1f}"
            time = duration(60 * train["minutes"] if steps == "auto" else steps * train["batch_size"] / speed)
            memory = f"{figures['peak_mib'] / 1024:.1f} GiB"
        size = size or f"{model['layers']} layers of width {model['width']}"
        length = f"{updates} of {train['batch_size']:,}"
        rows.append((f"`{name}`", size, count, length, rate, time, memory, purpose(text, name)))
    return rows


# Weights of networks whose size and operations are counted, which take most of the time
UNDRAWN = dict.fromkeys(("normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_"), lambda tensor, *_, **__: tensor)


def reshaped_table() -> str:
    """Matrix0's network with other widths and depths, its heads with 16 channels each."""
    rows = []
    for width, blocks in ((320, 24), (256, 24), (256, 28), (256, 32)):
        model = {"channels": width, "blocks": blocks, "attention": {"heads": width // 16}}
        config, spec = load_config("matrix0_53m", {"model": model}), get_task("chess")
        with torch.device("meta"):
            parameters = sum(p.numel() for p in spec.task(config).build_model().parameters())
        with mock.patch.multiple(nn.init, **UNDRAWN):
            flops = spec.training_flops(config)
        assert flops
        rows.append((f"{width}", f"{blocks}", f"{width // 16}", f"{parameters:,}", f"{flops / 1e9:.1f}"))
    return markdown("Channels, Blocks, Heads, Parameters, GFLOPs a position", rows)


def duration(seconds: float) -> str:
    """In the largest unit of which there are two or more."""
    units = (("days", 86_400), ("hours", 3600), ("minutes", 60))
    return next(
        (f"{seconds / n:,.0f} {unit}" for unit, n in units if seconds >= 2 * n), f"{max(2, seconds):.0f} seconds"
    )


def purpose(text: str, name: str) -> str:
    """First sentence of the comment that a preset starts with."""
    comment = re.match(r"(?:#.*\n)+", text)
    assert comment, f"params/{name}.yaml must start with a comment that says what it is for"
    words = " ".join(line.lstrip("# ").strip() for line in comment[0].splitlines())
    return re.split(r"(?<=[.])\s", words, maxsplit=1)[0]


def commands_help() -> str:
    """What each command says of itself with --help."""
    shown = []
    for main in (launch.main, bench.main, uci.main):
        out = io.StringIO()
        with redirect_stdout(out), mock.patch.dict(os.environ, COLUMNS="110", NO_COLOR="1"), suppress(SystemExit):
            main(["--help"])
        shown.append(f"```text\n{out.getvalue().strip()}\n```")
    return "\n\n".join(shown)


def performance() -> str:
    """The record of a quiet machine that is kept in tests/golden: a table for each workload."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    parts = [f"Measured on {record['machine']}, {record['started'][:10]}, torch {record['versions']['torch']}:"]
    for name, part in definitions("bench")["text"](record).groupby(level=0, sort=False):
        rows = [(str(figure), *map(str, row)) for (_, figure), row in zip(part.index, part.to_numpy(), strict=True)]
        parts.append(markdown(", ".join([str(name), *part.columns]), rows))
    return "\n\n".join(parts)


def own_options(task: str) -> list[tuple[str, str, str, str]]:
    """The options of a task that are not those of every task, or have another default."""
    shared = options_of(config.Config)
    own = options_of(get_task(task).config)
    return [row for row in own if row not in shared and row[0] != "task"]


OPTIONS = GUIDES / "options.md"
TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "presets": (GUIDES / "presets.md", presets_table),
    "reshaped": (GUIDES / "presets.md", reshaped_table),
    "main-presets": (README, main_presets_table),
    "performance": (GUIDES / "performance.md", performance),
    "commands": (OPTIONS, commands_help),
    "options": (OPTIONS, lambda: options_table(options_of(config.Config))),
    "chess-options": (OPTIONS, lambda: options_table(own_options("chess"))),
    "latin-options": (OPTIONS, lambda: options_table(own_options("latin"))),
    "melee-options": (OPTIONS, lambda: options_table(own_options("melee"))),
    "tictactoe-options": (OPTIONS, lambda: options_table(own_options("tictactoe"))),
    "cycle-options": (
        GUIDES / "selfplay.md",
        lambda: options_table([row for row in options_of(CycleConfig) if "network." not in row[0]]),
    ),
    "sweep-options": (GUIDES / "sweeps.md", lambda: options_table(options_of(SweepConfig))),
}


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}:begin -->\n)(.*?)(\n?<!-- {name}:end -->)", re.DOTALL)


def rewrite() -> None:
    """Put the generated tables into their pages."""
    for name, (page, table) in TABLES.items():
        body = table()
        text, count = between(name).subn(lambda m, body=body: f"{m[1]}{body}\n{m[3].lstrip()}", read(page))
        assert count == 1, f"{page.name} needs one pair of markers '{name}'"
        page.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables_are_those_of_the_code(name: str) -> None:
    page, table = TABLES[name]
    ((_, body, _),) = between(name).findall(read(page))
    assert body == table(), "write them again: python tests/test_docs.py"


def test_measured_parameters_are_those_of_the_code() -> None:
    for name, figures in json.loads(MEASURED.read_text(encoding="utf-8"))["presets"].items():
        config = load_config(name)
        model = get_task(config.task).task(config).build_model()
        assert figures["parameters"] == sum(p.numel() for p in model.parameters()), (
            "python tests/bench/bench_presets.py"
        )


# Files


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
            if "://" in link or link.startswith("../../actions/"):  # GitHub's pages of this repository
                continue
            name, _, heading = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            if heading:
                headings = re.findall(r"^#+ (.*)$", read(target), re.MULTILINE)
                assert heading in map(anchor, headings), f"{page.name}: {link}"


def test_named_files_exist() -> None:
    now = spans([page for page in PAGES if page.name != "CHANGELOG.md"])  # which names what is gone, too
    named = {s for s in now if re.fullmatch(r"(matrixlib|notebooks|params|tests|\.ci)/[\w./]*", s)}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    known = {path.name for path in (*ROOT.glob("*.*"), *(ROOT / "matrixlib").rglob("*.py"))}
    bare = {s for s in now if re.fullmatch(r"\w+\.(py|toml|yml|lock)", s)}
    assert sorted(bare - known) == []


def test_every_guide_and_notebook_is_linked_once() -> None:
    for title, folder, pattern in (("Guides", GUIDES, "*"), ("Notebooks", GUIDES.parent, "*.ipynb")):
        linked = re.findall(r"\]\((.*?)\)", section("README.md", title))
        assert sorted(linked) == sorted(path.relative_to(ROOT).as_posix() for path in folder.glob(pattern)), title


def test_the_front_pages_stay_short() -> None:
    for name, most in {"README.md": 180, "CONTRIBUTING.md": 200, "CHANGELOG.md": 250}.items():
        assert len(read(ROOT / name).splitlines()) <= most, name


def test_version_and_owners_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+), (\S+)$", read(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert newest
    assert newest.groups() == (citation["version"], str(citation["date-released"]))
    assert (project["version"], project["license"]) == (citation["version"], citation["license"])
    owned = [line.split() for line in read(ROOT / ".github" / "CODEOWNERS").splitlines() if line[:1] not in ("", "#")]
    assert owned
    for path, *owners in owned:
        assert (ROOT / path.strip("/")).exists(), path
        assert all(owner.startswith("@") for owner in owners), path


# Commands and variables


def test_make_targets_and_variables_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE))
    calls = [text.split()[1:] for text in (*lines(), *spans()) if text.startswith("make ")]
    assert ["train"] in calls
    for words in calls:
        for word in words:
            name, equals, _ = word.partition("=")
            assert f"$({name})" in text if equals else name in targets, f"make {' '.join(words)}: {word}"


def test_papermill_examples_would_be_accepted() -> None:
    calls = papermill_calls()
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
        assert given.keys() <= inspect_notebook(notebook).keys(), words
        for side in ("", "_a", "_b"):
            preset, overrides = given.get(f"preset{side}", "demo"), given.get(f"overrides{side}", {})
            if notebook.stem == "cycle":
                load_cycle(preset, overrides)
            elif notebook.stem == "sweep":
                load_sweep(preset, overrides)
            else:
                device = {"runtime": {"device": given.get("device", "auto")}}
                load_config(preset, config.merge(device, overrides))


def test_options_of_commands_exist() -> None:
    names = ("runs/launch.py", "runs/watch.py", "runs/report.py", "bench/__main__.py", "tasks/chess/uci/engine.py")
    source = "".join((ROOT / "matrixlib" / name).read_text(encoding="utf-8") for name in names)
    known = {option for parameter in papermill.params for option in (*parameter.opts, *parameter.secondary_opts)}
    calls = [
        text for text in (*lines(), *spans()) if re.match(r"(python -m matrixlib\.|matrixlib-uci|papermill) ?", text)
    ]
    asked = {word for call in calls for word in call.split() if word.startswith("--")}
    assert {"--checkpoint", "--only", "--preset"} <= asked
    for option in asked - known:
        assert f'"{option}"' in source, option


def test_environment_variables_are_those_of_the_code() -> None:
    sources = [*(ROOT / "matrixlib").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    name = re.compile(r"MATRIXLIB_[A-Z0-9]+")
    there = {found for path in sources for found in name.findall(path.read_text(encoding="utf-8"))}
    assert set(first_cells(read(GUIDES / "environment.md"))) == there
    assert {found for page in PAGES for found in name.findall(read(page))} == there


def test_options_named_in_the_text_exist() -> None:
    keys = {key for schema in [get_task(task).config for task in TASKS] for key, *_ in options_of(schema)}
    sections = {key.partition(".")[0] for key in keys}
    words = {word for span in spans() for word in re.findall(r"^[a-z]+(?:\.[a-z_0-9]+)+$", span)}
    files = (".py", ".yaml", ".json", ".ipynb", ".html", ".jsonl", ".log")
    modules = {word for word in words if (ROOT / "matrixlib" / f"{word.replace('.', '/')}.py").exists()}
    named = {word for word in words - modules if word.split(".")[0] in sections and not word.endswith(files)}
    assert named
    assert sorted(named - keys) == []


if __name__ == "__main__":
    rewrite()
