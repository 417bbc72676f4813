"""Offline report of a run: one HTML file with nothing to fetch, verdict first; and an index of all runs.

    python -m matrixlib.runs.report            all runs under reports/, and their index
    python -m matrixlib.runs.report RUN        one run (name or folder), and the index

Where a launcher kept the executed notebook in the run's folder, the report is that notebook without its code, else
key figures and pictures. Warnings, stability, runtime, configuration and environment follow. Whatever a crashed run
left out or damaged is named. The page is templates/page.html.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import logging
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
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
STRANGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""What drawing trips over where a file is JSON, but none that was written here."""
SPARKLINE = (
    '<svg viewBox="0 0 120 28" role="img"><title>training loss {:.2f} to {:.2f}</title><polyline points="{}"/></svg>'
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
    summary = _read(folder / "summary.json", problems, _object) or {}
    record = _read(folder / "run.json", problems, _object) or {}
    sections, details = _figures(summary), list[Section]()
    if any((folder / name).exists() for name in ("run.json", "config.yaml", "metrics.jsonl")) or not summary:
        rows = _read(folder / "metrics.jsonl", problems, metrics.read) or []
        configuration = _read(folder / "config.yaml", problems, lambda path: path.read_text("utf-8", "replace")) or ""
        options = _read(folder / "config.yaml", [], lambda path: read_yaml(path.read_text("utf-8"), path.name))
        try:
            sections += _pictures(folder, rows)
            details = [("Warnings", _messages(rows)), ("Stability", _stability(rows, _mapping(options).get("optim")))]
        except STRANGE as error:
            problems.append(f"metrics.jsonl holds what no training has written: {error!r}")
        details += [
            ("Runtime", _runtime(summary.get("runtime") or record.get("runtime"))),
            ("Configuration", configuration),
            ("Environment", _environment(record)),
            ("Parts that are missing or damaged", problems),
        ]
    else:
        sections += [(path.stem.replace("-", " ").capitalize(), path) for path in sorted(folder.glob("*.png"))]
    body = _executed_notebook(folder) or _html(sections)
    word, text = outcome(folder, summary)
    page = _page(
        title=folder.name,
        verdict=text or word,
        colour=_colour(word),
        demo=_mapping(summary.get("verdict")).get("demo"),
        headline=summary.get("headline", ""),
        facts=_facts(summary, record),
        checks=_checks(summary),
        body=body + _html(details),
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
        summary, record = (_read(folder / name, [], _object) or {} for name in ("summary.json", "run.json"))
        word, text = outcome(folder, summary)
        shares = figures_table(_mapping(summary.get("evaluation")))["value"]
        row = {"run": folder.name, "verdict": word, "training loss": summary.get("curve", [])}
        row["result"] = (
            text or summary.get("headline") or ", ".join(f"{name} {value}" for name, value in shares.items())
        )
        row["preset"] = summary.get("preset") or record.get("preset", "")
        row |= {name: summary.get(name, "") for name in ("steps", "positions", "seconds", "positions_per_second")}
        rows.append(row | {"started": record.get("started", "")})
    names = ["run", "verdict", "training loss", "result", "preset", "steps", "positions", "seconds"]
    return DataFrame(rows, columns=[*names, "positions_per_second", "started"])


def write_index(root: Path | None = None) -> Path:
    """Write index.html of all runs, newest first, with verdict and key figures; returns its path."""
    root = Path(root) if root is not None else reports_root()
    root.mkdir(parents=True, exist_ok=True)
    runs = frame(root)
    table = runs.map(lambda value: html.escape(f"{value:,}" if isinstance(value, int | float) else str(value)))
    table["seconds"] = [_duration(value) for value in runs["seconds"]]
    table["verdict"] = [f'<span class="{_colour(word)}">{word}</span>' for word in table["verdict"]]
    table["training loss"] = [_sparkline(losses) for losses in runs["training loss"]]
    links = [f"{name}/report.html" if (root / name / "report.html").exists() else "" for name in runs["run"]]
    names = zip(table["run"], links, strict=True)
    table["run"] = [f'<a href="{html.escape(link)}">{name}</a>' if link else name for name, link in names]
    table = table.rename(columns={"steps": "updates", "seconds": "time", "positions_per_second": "positions/s"})
    body = table.to_html(escape=False, index=False, border=0) if len(table) else "<p>No runs yet.</p>"
    note = "<p><code>python -m matrixlib.runs.watch</code> lists every run and its status.</p>"
    path = root / "index.html"
    files.write_text(path, _page(title="Runs", body=f'<div class="wide">{body}</div>{note}'))
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


def _page(**content: Any) -> str:
    """templates/page.html; every value but `body` is escaped."""
    return _template().render(content, time=files.utc_now())


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    return Environment(loader=PackageLoader("matrixlib.runs"), autoescape=True).get_template("page.html")


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


def _colour(word: str) -> str:
    """CSS class of an outcome."""
    if word in ("FAIL", "halted", "failed", "stalled", "gone"):
        return "fail"
    return "pass" if word == "PASS" else "open"


def _sparkline(losses: Any) -> str:
    """An SVG curve, 120 wide and 28 high; "" for fewer than two numbers."""
    if not isinstance(losses, list) or not all(isinstance(one, float) and math.isfinite(one) for one in losses):
        return ""
    if len(losses) < 2:
        return ""
    low, tall = min(losses), max(max(losses) - min(losses), 1e-9)
    points = [f"{120 * i / (len(losses) - 1):.1f},{26 - 24 * (x - low) / tall:.1f}" for i, x in enumerate(losses)]
    return SPARKLINE.format(losses[0], losses[-1], " ".join(points))


# What a run's folder holds


def _read(path: Path, problems: list[str], read: Callable[[Path], T]) -> T | None:
    """What a file holds; None where it is missing or damaged, which is then a problem."""
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for a writer
            raise ValueError("it is no file")
        return read(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
    return None


def _object(path: Path) -> dict[str, Any]:
    # a whole number of hundreds of digits is inf: as no float it would break whatever formats it
    data = json.loads(path.read_text(encoding="utf-8"), parse_int=lambda digits: (int, float)[len(digits) > 18](digits))
    if not isinstance(data, dict):
        raise ValueError("it holds no mapping")
    return data


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


def _duration(seconds: object) -> str:
    return progress.duration(seconds) if isinstance(seconds, int | float) and seconds >= 0 else ""


def _facts(summary: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """One line of a run, in parts."""
    texts = {"preset": summary.get("preset") or record.get("preset"), "started": record.get("started")}
    texts["stopped early:"] = summary.get("stopped_early")
    numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    parts = [f"{word} {text}" for word, text in texts.items() if text]
    for name, unit in (("steps", "updates"), ("positions", "positions"), ("positions_per_second", "positions/s")):
        parts += [f"{numbers[name]:,} {unit}"] if name in numbers else []
    parts += list(filter(None, [_duration(summary.get("seconds"))]))
    if "share_of_peak" in numbers:
        peak = f" ({numbers['peak_gflops']:,.0f} GFLOP/s)" if "peak_gflops" in numbers else ""
        parts.append(f"{numbers['share_of_peak']:.0%} of the measured matrix rate{peak}")
    for split, share in _mapping(summary.get("lost_rows")).items():
        if isinstance(share, float) and share > 0:
            parts.append(f"damaged and replaced by others: {share:.2%} of the {split} rows")
    return parts


def _checks(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    checks = _mapping(summary.get("verdict")).get("checks")
    return [check for check in checks if isinstance(check, Mapping)] if isinstance(checks, list) else []


def _figures(summary: Mapping[str, Any]) -> list[Section]:
    """Key figures, their shares with intervals where the evaluation says first of how many rows they are."""
    evaluation = _mapping(summary.get("evaluation"))
    table = figures_table(evaluation)
    if isinstance(parameters := summary.get("parameters"), int):
        table.loc["parameters of the network"] = f"{parameters:,}", ""
    count = next(iter(evaluation.values()), None)
    shares = {}
    for name, value in evaluation.items():
        if _is_share(name) and isinstance(value, float) and 0 <= value <= 1:
            against = {key: v for key, v in _baselines(evaluation, name).items() if isinstance(v, float)}
            shares[name.replace("_", " ")] = value, against
    sections: list[Section] = [("Key figures", table)]
    if shares and isinstance(count, int) and count > 0:
        sections.append(
            (f"Shares of {count:,} held-out rows, with 95 % intervals", figures.scores_figure(shares, count))
        )
    return sections


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
    return DataFrame(pd.Series(table))


def _runtime(runtime: object) -> DataFrame:
    """What was chosen, and why."""
    chosen, reasons = _mapping(runtime), _mapping(_mapping(runtime).get("reasons"))
    rows = {
        name: (words(chosen[name]), str(reasons.get(name, "")))
        for name in chosen
        if name not in ("reasons", "requested")
    }
    return DataFrame.from_dict(rows, orient="index")


def _environment(record: Mapping[str, Any]) -> DataFrame:
    known = {key: record[key] for key in ("commit", "catalogue", "started") if record.get(key)}
    return DataFrame(pd.Series({**known, **_mapping(record.get("versions"))}, dtype=object))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except files.FolderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
