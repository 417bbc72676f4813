"""Offline report of a run: one HTML file with nothing to fetch, verdict first; and an index of all runs.

    python -m matrixlib.runs.report            all runs under reports/, and their index
    python -m matrixlib.runs.report RUN        one run (name or folder), and the index

Where a launcher kept the executed notebook in the run's folder, the report is that notebook without its code, else
key figures and pictures. Warnings, stability, runtime, configuration and environment follow. Whatever a crashed run
left out or damaged is named. The page is templates/page.html.
"""

from __future__ import annotations

import base64
import html
import logging
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from matplotlib.figure import Figure
from pandas import DataFrame

from matrixlib import files, progress
from matrixlib.config import read_yaml
from matrixlib.engine import metrics
from matrixlib.engine.stats import DECISIONS
from matrixlib.files import reports_root
from matrixlib.hardware.runtime import words
from matrixlib.runs import figures, watch

MAX_MESSAGES = 20  # in a report of each kind: what was decided, and the latest of the others
T = TypeVar("T")
STRANGE = (ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What drawing trips over where a file is JSON, but none that was written here."""
COLOURS = {"PASS": "pass"} | dict.fromkeys(("FAIL", "halted", "failed", "stalled", "gone"), "fail")
"""Outcome -> CSS class; of all others it is `open`."""
FACTS = (
    "preset",
    "started",
    "updates",
    "positions",
    "time",
    "positions/s",
    "share of peak",
    "stopped early",
    "damage",
)
Section = tuple[str, "Figure | DataFrame | Path | str | Sequence[str]"]
"""Heading, and what stands below it."""


def write_report(run_folder: Path) -> Path:
    """Write report.html of a run and return its path; of a run with metrics, also training.png, its curves.

    Raises ValueError where the folder does not exist; missing or damaged parts are named in the report.
    """
    folder = Path(run_folder)
    if not os.path.isdir(folder):
        raise ValueError(f"no run at {folder}; runs are the folders under {reports_root()}")
    problems: list[str] = []
    summary = _read(folder / "summary.json", problems, files.read_json) or {}
    record = _read(folder / "run.json", problems, files.read_json) or {}
    table = figures_table(_mapping(summary.get("evaluation")))
    if isinstance(parameters := summary.get("parameters"), int):
        table.loc["parameters of the network"] = f"{parameters:,}", ""
    sections: list[Section] = [("Key figures", table)]
    details: list[Section] = []
    if any((folder / name).exists() for name in ("run.json", "config.yaml", "metrics.jsonl")) or not summary:
        rows = _read(folder / "metrics.jsonl", problems, metrics.read) or []
        configuration = _read(folder / "config.yaml", problems, lambda path: path.read_text("utf-8", "replace")) or ""
        options = _read(folder / "config.yaml", [], lambda path: read_yaml(path.read_text("utf-8"), path.name))
        try:
            sections += _pictures(folder, rows)
            details = [("Warnings", _messages(rows)), ("Stability", _stability(rows, _mapping(options).get("optim")))]
        except STRANGE as error:
            problems.append(f"metrics.jsonl holds what no training has written: {error!r}")
        known = {key: record[key] for key in ("commit", "catalogue", "started") if record.get(key)}
        details += [
            ("Runtime", _runtime(summary.get("runtime") or record.get("runtime"))),
            ("Configuration", configuration),
            ("Environment", _column(known | _mapping(record.get("versions")))),
            ("Parts that are missing or damaged", problems),
        ]
    else:
        sections += [(path.stem.replace("-", " ").capitalize(), path) for path in sorted(folder.glob("*.png"))]
    row = _row(folder, summary, record)
    page = _page(
        row["run"],
        (_executed_notebook(folder) or _html(sections)) + _html(details),
        outcome=row["verdict"],
        why=row["why"],
        verdict=_mapping(summary.get("verdict")),
        headline=summary.get("headline", ""),
        facts=[f"{name} {_text(name, row[name])}" for name in FACTS if row[name]],
    )
    path = folder / "report.html"
    files.write_text(path, page)
    return path


def add_verdict(run_folder: Path, verdict: Mapping[str, Any]) -> Path:
    """Put a notebook's verdict (passed, demo, checks) into summary.json; write report and index again."""
    path = Path(run_folder) / "summary.json"
    files.write_json(path, files.read_json(path) | {"verdict": dict(verdict)})
    report = write_report(run_folder)
    write_index(Path(run_folder).parent)
    return report


def frame(root: Path | None = None) -> DataFrame:
    """All runs under a root, the one that began last first: verdict, result, and what was trained how fast."""
    rows = []
    for folder in watch.run_folders(root or reports_root()):
        summary, record = (_read(folder / name, [], files.read_json) or {} for name in ("summary.json", "run.json"))
        rows.append(_row(folder, summary, record))
    return DataFrame(rows)


def _row(folder: Path, summary: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    word, why = outcome(folder, summary)
    shares = figures_table(_mapping(summary.get("evaluation")))["value"]
    lost = _mapping(summary.get("lost_rows")).items()
    names = {"steps": "updates", "positions": "positions", "seconds": "time"}
    names |= {"positions_per_second": "positions/s", "share_of_peak": "share of peak", "stopped_early": "stopped early"}
    return {
        "run": folder.name,
        "verdict": word,
        "why": why,
        "training loss": _sparkline(summary.get("curve")),
        "result": why or summary.get("headline") or ", ".join(f"{name} {value}" for name, value in shares.items()),
        "preset": summary.get("preset") or record.get("preset") or "",
        **{column: summary.get(name) for name, column in names.items()},
        "damage": ", ".join(f"{share:.2%} of the {split} rows replaced by others" for split, share in lost if share),
        "started": record.get("started") or "",
    }


def write_index(root: Path | None = None) -> Path:
    """Write index.html of all runs, newest first, with verdict and key figures; returns its path."""
    root = Path(root) if root is not None else reports_root()
    root.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in frame(root).to_dict("records"):
        texts = {name: html.escape(_text(str(name), value)) for name, value in row.items() if name != "why"}
        texts["verdict"] = f'<span class="{COLOURS.get(row["verdict"], "open")}">{texts["verdict"]}</span>'
        if (root / row["run"] / "report.html").exists():
            texts["run"] = f'<a href="{quote(row["run"])}/report.html">{texts["run"]}</a>'
        rows.append(texts)
    table = DataFrame(rows).to_html(escape=False, index=False, border=0) if rows else "<p>No runs yet.</p>"
    note = "<p><code>python -m matrixlib.runs.watch</code> lists every run and its status.</p>"
    path = root / "index.html"
    files.write_text(path, _page("Runs", f'<div class="wide">{table}</div>{note}'))
    return path


def outcome(folder: Path, summary: Mapping[str, Any]) -> tuple[str, str]:
    """(PASS or FAIL where a notebook has judged the run, else a word for how it stands; what there is to say of it)."""
    standing = watch.standing(folder)
    verdict = summary.get("verdict")
    if standing.word not in watch.UNDER_WAY and isinstance(verdict, Mapping) and "passed" in verdict:
        return "PASS" if verdict["passed"] else "FAIL", ""
    words = {"complete": "no verdict", "begun": "not finished"}
    return words.get(standing.word, standing.word), "" if standing.word in words else standing.text


def figures_table(evaluation: Mapping[str, Any]) -> DataFrame:
    """An evaluation such as a run's summary.json holds, as text: a row for each figure, `value` and `baselines`.

    A baseline belongs to the figures with its last word in their names: `uniform_top1` to `top1`, `majority_wdl` to
    `wdl_accuracy`. Shares (top..., ...accuracy) are shown in percent. What is neither a number nor text is left out.
    """
    rows = {}
    for name, value in evaluation.items():
        if isinstance(value, (int, float, str)):
            beside = [f"{key} {_number(name, against)}" for key, against in _baselines(evaluation, name).items()]
            rows[name.replace("_", " ")] = _number(name, value), ", ".join(beside)
    return DataFrame.from_dict(rows, orient="index", columns=["value", "baselines"])


def main(arguments: Sequence[str]) -> int:
    """Command line: rebuild the reports of the runs named (all without any) and the index."""
    root, failed = reports_root(), 0
    folders = [Path(name) if os.path.isdir(name) else root / name for name in arguments]
    for folder in (*(folders or sorted(watch.run_folders(root))), None):
        try:
            with files.writing(folder or root):
                print(write_report(folder) if folder else write_index(root))
        except ValueError as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


# The page


def _page(title: str, body: str, **content: Any) -> str:
    """templates/page.html; everything but `body` is escaped."""
    from jinja2 import Environment, PackageLoader

    pages = Environment(loader=PackageLoader("matrixlib.runs"), autoescape=True)
    return pages.get_template("page.html").render(
        title=title, body=body, time=files.utc_now(), colours=COLOURS, **content
    )


def _executed_notebook(folder: Path) -> str:
    """The outputs and texts of the newest notebook in a folder that papermill has executed to its end, or to an error;
    empty where there is none, or the run has been continued since."""
    paths = sorted(folder.glob("*.ipynb"), key=lambda path: path.stat().st_mtime)
    log = folder / "metrics.jsonl"
    if not paths or (log.is_file() and paths[-1].stat().st_mtime < log.stat().st_mtime):
        return ""
    import nbformat
    from nbconvert import HTMLExporter

    try:
        notebook = nbformat.read(paths[-1], as_version=4)
    except ValueError:
        return ""
    if not notebook.metadata.get("papermill", {}).get("end_time"):
        return ""
    exporter = HTMLExporter(
        template_name="basic",  # no style of its own, and no script from anywhere
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
        embed_images=True,
        log=logging.Logger(__name__, logging.ERROR),  # it warns of each picture without an alternative text
    )
    return exporter.from_notebook_node(notebook)[0]


def _html(sections: Sequence[Section]) -> str:
    """Sections with something in them."""
    parts = []
    for heading, content in sections:
        if len(content) if isinstance(content, str | DataFrame | Sequence) else True:
            parts.append(f"<h2>{html.escape(heading)}</h2>\n{_element(heading, content)}\n")
    return "".join(parts)


def _element(heading: str, content: Any) -> str:
    if isinstance(content, DataFrame):
        head = content.columns.dtype == object
        return f'<div class="wide">{content.to_html(header=head, border=0, classes="figures")}</div>'
    if isinstance(content, str):
        return f"<pre>{html.escape(content)}</pre>"
    if isinstance(content, Path | Figure):
        data = content.read_bytes() if isinstance(content, Path) else figures.png(content)
        return f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in content) + "</ul>"


def _text(name: str, value: Any) -> str:
    """One value of `frame`, for people."""
    if value is None or value != value:  # NaN: a column of numbers has it for None
        return ""
    if not isinstance(value, int | float):
        return str(value)
    if name == "time":
        return progress.duration(value)
    return f"{value:.0%}" if name == "share of peak" else f"{value:,.0f}"


def _sparkline(losses: Any) -> str:
    """A curve of block characters."""
    if not isinstance(losses, list) or not all(isinstance(one, float) for one in losses) or len(losses) < 2:
        return ""
    low, tall = min(losses), max(max(losses) - min(losses), 1e-9)
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (loss - low) / tall)] for loss in losses)


# What a run's folder holds


def _read(path: Path, problems: list[str], read: Callable[[Path], T]) -> T | None:
    """What a file holds; None where it is missing or damaged, which is then a problem."""
    try:
        return read(path.resolve(strict=True))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
    return None


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _number(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.1%}" if _is_share(name) else f"{value:.3f}"


def _is_share(name: str) -> bool:
    return name.split("_")[-1].startswith(("top", "accuracy", "valid"))


def _baselines(evaluation: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        key.rsplit("_", 1)[0].replace("_", " "): value
        for key, value in _mapping(evaluation.get("baselines")).items()
        if key.rsplit("_", 1)[-1] in name.split("_")
    }


def _pictures(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Curves, which training.png keeps, and where the time went."""
    sections: list[Section] = []
    picture, log = folder / "training.png", folder / "metrics.jsonl"
    if rows:
        if not picture.exists() or picture.stat().st_mtime_ns < log.stat().st_mtime_ns:
            files.write_bytes(picture, figures.png(figures.training_figure(rows, folder.name)))
        sections.append(("Curves", picture))
    if timed := [row for row in rows if row.get("times")]:
        sections.append(("Where the time went", figures.phases_figure(timed)))
    return sections


def _messages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a person should know: first what was decided (end, rollbacks, skipped updates), then the latest others."""
    told = metrics.messages(rows)
    decisions = [(step, text) for decision in DECISIONS for step, event, text in told if event == decision]
    others = [(step, text) for step, event, text in told if event not in DECISIONS]
    left_out = len(decisions[MAX_MESSAGES:]) + len(others[:-MAX_MESSAGES])
    shown = [f"update {step:,}: {text}" for step, text in (*decisions[:MAX_MESSAGES], *others[-MAX_MESSAGES:])]
    return shown + ([f"... and {left_out:,} more in metrics.jsonl"] if left_out else [])


def _stability(rows: Sequence[Mapping[str, Any]], optim: object) -> DataFrame:
    """What disturbed the training or came near to it; empty where nothing is known."""
    if not rows or "skipped" not in rows[-1]:
        return DataFrame()
    last, clip_norm = rows[-1], _mapping(optim).get("clip_norm")
    table = {
        "updates skipped": f"{last['skipped']:,}",
        "updates with a loss or gradient that was not finite": f"{sum(map(metrics.not_finite, rows)):,}",
        "falls of the loss scale": f"{last.get('overflows', 0):,}",
        "rollbacks": f"{last.get('rollbacks', 0):,}",
        f"gradients clipped{f' (optim.clip_norm {clip_norm})' if clip_norm else ''}": f"{last['clip_share']:.1%}",
    }
    recorded = [row["statistics"] for row in rows if "statistics" in row]
    if norms := recorded[-1].get("gradient_norm", {}) if recorded else {}:
        table["gradient norm, median of the latest"] = f"{norms['median']:.3g}"
        table["optim.clip_norm that would have clipped 5% of the latest"] = f"{norms['p95']:.3g}"
    outputs = [(values, name) for one in recorded for name, values in one.get("outputs", {}).items()]
    if outputs:
        table["largest output"] = "{:.4g} ({})".format(*max((values["max"], name) for values, name in outputs))
        if infinite := max(values["infinite"] for values, _ in outputs):
            table["largest share of infinite outputs"] = f"{infinite:.1%}"
    held = [row["memory"] for row in rows if "memory" in row]
    if peaks := [one["peak_mib"] for one in held if "peak_mib" in one]:
        table["most memory"] = f"{max(peaks):,.0f} MiB, {max(one.get('share', 0) for one in held):.0%} of all"
    if busy := [one["busy"] for one in held if "busy" in one]:
        table["the GPU was busy, median"] = f"{statistics.median(busy):.0%}"
    if dead := recorded[-1].get("dead_units") if recorded else None:
        table["dead units, worst activation"] = "{:.1%} ({})".format(
            *max((share, name) for name, share in dead.items())
        )
    return _column(table)


def _runtime(runtime: object) -> DataFrame:
    """What was chosen, and why."""
    chosen, reasons = _mapping(runtime), _mapping(_mapping(runtime).get("reasons"))
    rows = {
        name: (words(chosen[name]), str(reasons.get(name, "")))
        for name in chosen
        if name not in ("reasons", "requested")
    }
    return DataFrame.from_dict(rows, orient="index")


def _column(values: Mapping[str, Any]) -> DataFrame:
    return DataFrame.from_dict({name: [str(value)] for name, value in values.items()}, orient="index")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except files.FolderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
