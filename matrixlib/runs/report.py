"""Offline report of a run, one self-contained HTML file, verdict first; and an index of all runs.

`python -m matrixlib.runs.report [RUN ...]` makes those of named runs (default all under reports/) and the index. If a
run's folder has the executed notebook, that is the report, without code; else key figures and curves. Then warnings,
stability, runtime, configuration, environment, and what is missing or damaged.
"""

import base64
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas
from pandas import DataFrame

from matrixlib import files, progress
from matrixlib.engine import metrics, timing
from matrixlib.engine.stats import DECISIONS
from matrixlib.files import reports_root
from matrixlib.hardware.runtime import words
from matrixlib.runs import figures, watch
from matrixlib.tasks.spec import figures_table, number_text

MAX_MESSAGES = 20  # of each kind: decisions, and the latest others
FACTS = {  # key of summary.json -> column of the index
    "steps": "updates",
    "positions": "positions",
    "seconds": "time",
    "positions_per_second": "positions/s",
    "share_of_peak": "share of peak",
    "stopped_early": "stopped early",
}
SHOWN: list[tuple[str, str, Any, str]] = [  # of a training: name, columns of its rows, which numbers, how written
    ("gradient norm, median of the latest", "statistics/gradient_norm/median", "last", "{:.3g}"),
    ("optim.clip_norm that would have clipped 5% of the latest", "statistics/gradient_norm/p95", "last", "{:.3g}"),
    ("largest output", "statistics/outputs/(.*)/max", "max", "{:.4g} ({})"),
    ("dead units, worst activation", "statistics/dead_units/(.*)", "max", "{:.1%} ({})"),
    ("most memory, MiB", "memory/peak_mib", "max", "{:,.0f}"),
    ("most memory, of all", "memory/share", "max", "{:.0%}"),
    ("the GPU was busy, median", "memory/busy", "median", "{:.0%}"),
]
SHOWN_BESIDE = ("seed", "train.steps", "runtime.device")  # have their own columns, or are not choices
MAX_NOTES = 500  # characters
READ_TEXT = partial(Path.read_text, encoding="utf-8", errors="replace")
STRANGE = (AttributeError, KeyError, TypeError, ValueError)  # of malformed JSON
Section = tuple[str, DataFrame | bytes | str]  # heading, and below it a table, a PNG file, or text as it is


def write_report(run_folder: Path) -> Path:
    """Write report.html of a run and return its path; also training.png if it has metrics.

    ValueError if the folder is none of a run; missing or damaged parts are named in the report.
    """
    folder = Path(run_folder)
    if not watch.is_run(folder):
        raise ValueError(f"no run at {folder}; runs are the folders under {reports_root()}")
    problems: list[str] = []
    row, summary, record = _known(folder, problems)
    table = figures_table(summary.get("evaluation", {}))
    if "parameters" in summary:
        table.loc["parameters of the network"] = f"{summary['parameters']:,}", ""
    sections: list[Section] = [("Key figures", table)]
    details: list[Section] = []
    if any((folder / name).exists() for name in ("run.json", "config.yaml", "metrics.jsonl")) or not summary:
        rows = _read(folder / "metrics.jsonl", problems, metrics.read) or []
        configuration = _read(folder / "config.yaml", problems, READ_TEXT) or ""
        if rows:
            picture, log = folder / "training.png", folder / "metrics.jsonl"
            if not picture.exists() or picture.stat().st_mtime_ns < log.stat().st_mtime_ns:
                files.write_bytes(picture, figures.png(figures.training_figure(rows, folder.name)))
            sections.append(("Curves", picture.read_bytes()))
        if timed := [row for row in rows if row.get("times")]:
            seconds = timing.phase_seconds(timed).sum()
            table = DataFrame({"seconds": seconds, "share": seconds / seconds.sum()}).round(3)
            sections.append(("Where the time went", table))
        chosen = dict(summary.get("runtime") or record.get("runtime") or {})
        reasons, _ = chosen.pop("reasons", {}), chosen.pop("requested", None)
        known = {key: record[key] for key in ("commit", "catalogue", "started") if record.get(key)}
        details = [
            ("Warnings", "\n".join(_messages(rows))),
            ("Stability", _stability(rows)),
            ("Runtime", _rows({name: (words(chosen[name]), reasons.get(name, "")) for name in chosen})),
            ("Configuration", configuration),
            ("Environment", _rows(known | record.get("versions", {}))),
            ("Parts that are missing or damaged", "\n".join(problems)),
        ]
    else:  # a notebook that trains nothing
        sections += [(path.stem.capitalize(), path.read_bytes()) for path in sorted(folder.glob("*.png"))]
    page = _page(
        row["run"],
        row=row,
        verdict=summary.get("verdict", {}),
        headline=summary.get("headline", ""),
        facts=[name for name in ("preset", "started", *FACTS.values()) if row[name]],
        notebook=_executed_notebook(folder),
        sections=sections,
        details=details,
    )
    path = folder / "report.html"
    files.write_text(path, page)
    return path


def write_page(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write an offline page of tables, pictures and texts, such as a sweep's; returns its path."""
    files.write_text(path, _page(title, sections=sections))
    return path


def add_verdict(run_folder: Path, verdict: Mapping[str, Any]) -> Path:
    """Store a notebook's verdict (passed, demo, checks) in summary.json; rewrite report and index."""
    path = Path(run_folder) / "summary.json"
    files.write_json(path, files.read_json(path) | {"verdict": dict(verdict)})
    report = write_report(run_folder)
    write_index(Path(run_folder).parent)
    return report


def frame(root: Path | None = None) -> DataFrame:
    """All runs under a root, newest first: verdict, notes, changes from the preset, held-out figures, speed."""
    return DataFrame([_known(folder, [])[0] for folder in watch.run_folders(root or reports_root())])


def _known(folder: Path, problems: list[str]) -> tuple[dict[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """(row of `frame`, summary.json, run.json); malformed ones are marked damaged."""
    summary, record = (_read(folder / name, problems, files.read_json) or {} for name in ("summary.json", "run.json"))
    try:
        figures_table(summary.get("evaluation", {}))
        return _row(folder, summary, record), summary, record
    except STRANGE as error:
        problems.append(f"its summary.json or run.json holds what no run writes: {error!r}")
        return _row(folder, {}, {}) | {"verdict": "damaged", "why": problems[-1]}, {}, {}


def _row(folder: Path, summary: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    status = watch.run_status(folder)
    known = {"complete": "no verdict", "begun": "not finished"}
    word, why = known.get(status.word, status.word), "" if status.word in known else status.text
    if status.word not in watch.UNDER_WAY and "verdict" in summary:
        word, why = "PASS" if summary["verdict"]["passed"] else "FAIL", ""
    curve = summary.get("curve", [])
    low, tall = min(curve, default=0), max(max(curve, default=0) - min(curve, default=0), 1e-9)
    changes, requested = record.get("changes", {}), record.get("requested", {})
    numbers = summary.get("evaluation", {}).items()
    return {
        "run": folder.name,
        "verdict": word,
        "why": why,
        "notes": (_read(folder / "notes.txt", [], READ_TEXT) or "").strip()[:MAX_NOTES],
        "preset": summary.get("preset") or record.get("preset") or "",
        "changes": ", ".join(f"{name} {value}" for name, value in changes.items() if name not in SHOWN_BESIDE),
        "seed": requested.get("seed"),
        "data": str(requested.get("data", {}).get("source") or ""),
        **{name.replace("_", " "): value for name, value in numbers if isinstance(value, float)},
        "training loss": "".join("▁▂▃▄▅▆▇█"[int(7.99 * (loss - low) / tall)] for loss in curve),
        **{column: summary.get(name) for name, column in FACTS.items()},
        "result": summary.get("headline") or "",
        "lost rows": max(summary.get("lost_rows", {}).values(), default=0),
        "started": record.get("started") or "",
    }


def write_index(root: Path | None = None) -> Path:
    """Write index.html of all runs, newest first, sortable and filterable; returns its path."""
    root = Path(root) if root is not None else reports_root()
    root.mkdir(parents=True, exist_ok=True)
    table = frame(root)
    columns = [name for name in table if name in ("run", "verdict") or table[name].replace(["", 0], None).notna().any()]
    runs = [row | {"page": (root / row["run"] / "report.html").exists()} for row in table.to_dict("records")]
    path = root / "index.html"
    files.write_text(path, _page("Runs", runs=runs, columns=columns))
    return path


def main(arguments: Sequence[str]) -> int:
    """Command line: rebuild the reports of named runs (default all) and the index."""
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


def _page(title: str, **content: Any) -> str:
    from jinja2 import Environment, PackageLoader

    pages = Environment(loader=PackageLoader("matrixlib.runs"), autoescape=True)
    pages.filters |= {"base64": lambda data: base64.b64encode(data).decode(), "text": _text}
    return pages.get_template("page.html").render(title=title, time=files.utc_now(), **content)


def _executed_notebook(folder: Path) -> str:
    """Outputs and texts of a folder's newest ended papermill notebook; empty without one, or if resumed since."""
    paths = sorted(folder.glob("*.ipynb"), key=lambda path: path.stat().st_mtime)
    log = folder / "metrics.jsonl"
    if not paths or (log.is_file() and paths[-1].stat().st_mtime < log.stat().st_mtime):
        return ""
    import nbformat
    from nbconvert import HTMLExporter

    try:
        notebook = nbformat.read(paths[-1], as_version=4)
    except ValueError:  # partially written
        return ""
    if not notebook.metadata.get("papermill", {}).get("end_time"):
        return ""
    exporter = HTMLExporter(
        template_name="basic",  # without styles and scripts
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
        embed_images=True,
        log=logging.Logger(__name__, logging.ERROR),  # silences missing alt texts
    )
    return exporter.from_notebook_node(notebook)[0]


def _text(value: Any, name: str) -> str:
    if value is None or value != value:  # NaN: a column of numbers has it for None
        return ""
    if not isinstance(value, int | float):
        return str(value)
    if name == "time":
        return progress.duration(value)
    if name == "share of peak":
        return f"{value:.0%}" if value <= 1 else "disturbed: the peak was measured beside other work"
    if name == "lost rows":
        return f"{value:.2%}"
    return f"{value:,.0f}" if name in FACTS.values() else number_text(name, value)


# What a run's folder holds


def _read(path: Path, problems: list[str], read: Callable[[Path], Any]) -> Any:
    """A file's contents; None, and a problem, if missing or damaged."""
    try:
        return read(path.resolve(strict=True))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
    return None


def _messages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Messages for people: decisions first (end, rollbacks, skipped updates), then the latest others."""
    told = metrics.messages(rows)
    decisions = [(step, text) for decision in DECISIONS for step, event, text in told if event == decision]
    others = [(step, text) for step, event, text in told if event not in DECISIONS]
    left_out = len(decisions[MAX_MESSAGES:]) + len(others[:-MAX_MESSAGES])
    shown = [f"update {step:,}: {text}" for step, text in (*decisions[:MAX_MESSAGES], *others[-MAX_MESSAGES:])]
    return shown + ([f"... and {left_out:,} more in metrics.jsonl"] if left_out else [])


def _stability(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Stability figures of a training; empty if unknown."""
    if not rows or "skipped" not in rows[-1]:
        return DataFrame()
    last = rows[-1]
    found = {
        "updates skipped": f"{last['skipped']:,}",
        "updates with a loss or gradient that was not finite": f"{sum(map(metrics.not_finite, rows)):,}",
        "falls of the loss scale": f"{last['overflows']:,}",
        "rollbacks": f"{last['rollbacks']:,}",
        "gradients clipped": f"{last['clip_share']:.1%}",
    }
    kept = [{key: row[key] for key in ("statistics", "memory") if key in row} for row in rows]
    table = pandas.json_normalize([one for one in kept if one], sep="/")
    for name, pattern, which, form in SHOWN:
        columns = [column for column in map(str, table) if re.fullmatch(pattern, column)]
        if columns:
            numbers = table[columns].ffill().iloc[-1] if which == "last" else table[columns].agg(which)
            part = re.fullmatch(pattern, str(numbers.idxmax()))
            found[name] = form.format(numbers.max(), *(part.groups() if part else ()))
    return _rows(found)


def _rows(values: Mapping[str, Any]) -> DataFrame:
    rows = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    return DataFrame.from_dict(rows, orient="index").astype(str)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except files.FolderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
