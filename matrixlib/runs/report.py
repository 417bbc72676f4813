"""Offline report of a run: one HTML file with nothing to fetch, verdict first.

    python -m matrixlib.runs.report            all runs under reports/, and their index
    python -m matrixlib.runs.report RUN        one run (name or folder), and the index

It is made from what the run's folder holds (summary.json, run.json, config.yaml, metrics.jsonl); whatever a
crashed run left out or damaged is named. The pages are templates/report.html and templates/index.html.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from matrixlib import files, progress
from matrixlib.config import read_yaml
from matrixlib.engine import metrics
from matrixlib.engine.stats import DECISIONS
from matrixlib.files import reports_root
from matrixlib.hardware.runtime import words
from matrixlib.runs import figures, watch

if TYPE_CHECKING:
    from jinja2 import Environment

LABELS = {
    "positions": "held-out positions",
    "top1": "top-1 agreement with the teacher",
    "top3": "top-3 agreement with the teacher",
    "top5": "top-5 agreement with the teacher",
    "policy kl": "policy KL to the teacher [nats]",
    "value correlation": "correlation of value and expected score",
    "wdl accuracy": "win-draw-loss accuracy",
}
MESSAGES = 20  # that a report shows of each kind: what was decided, and the latest of the others
T = TypeVar("T")
STRANGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""What whoever draws trips over where a file is JSON, but none that was written here."""
SPARKS, SPARK_ROWS = 40, 5  # points of a sparkline, rows of metrics.jsonl that make one


def write_report(run_folder: Path, curves: bytes = b"") -> Path:
    """Write report.html of a run and return its path. curves: the PNG of its curves, where that is drawn already.

    Raises ValueError where the folder does not exist; missing or damaged parts are named in the report.
    """
    folder = Path(run_folder)
    if not os.path.isdir(folder):
        raise ValueError(f"no run at {folder}; runs are the folders under {reports_root()}")
    problems: list[str] = []
    summary = _read(folder / "summary.json", problems, _object) or {}
    record = _read(folder / "run.json", problems, _object) or {}
    content: dict[str, Any] = {"checks": _checks(summary), "figures": _figures(summary), "scores": _scores(summary)}
    if any((folder / name).exists() for name in ("run.json", "config.yaml", "metrics.jsonl")) or not summary:
        rows = _read(folder / "metrics.jsonl", problems, metrics.read) or []
        configuration = _read(folder / "config.yaml", problems, lambda path: path.read_text("utf-8", "replace"))
        options = _read(folder / "config.yaml", [], lambda path: read_yaml(path.read_text("utf-8"), path.name))
        runtime = _mapping(summary.get("runtime") or record.get("runtime"))
        reasons = _mapping(runtime.pop("reasons", None))
        runtime.pop("requested", None)
        environment = {key: record[key] for key in ("commit", "catalogue", "started") if record.get(key)}
        try:
            content |= {
                "pictures": _pictures(rows, folder.name, curves),
                "messages": _messages(rows),
                "stability": _stability(rows, _mapping(_mapping(options).get("optim")).get("clip_norm")),
            }
        except STRANGE as error:
            problems.append(f"metrics.jsonl holds what no training has written: {error!r}")
        content |= {
            "runtime": [(name, words(value), reasons.get(name, "")) for name, value in runtime.items()],
            "configuration": configuration,
            "environment": (environment | _mapping(record.get("versions"))).items(),
            "problems": problems,
        }
    else:
        content["pictures"] = _stored_pictures(folder)
    content["time"] = files.utc_now()
    text = _render(
        "report.html", name=folder.name, outcome=outcome(folder, summary), summary=summary, record=record, **content
    )
    path = folder / "report.html"
    files.write_text(path, text)
    return path


def add_verdict(run_folder: Path, verdict: Mapping[str, Any]) -> Path:
    """Put a notebook's verdict (passed, demo, checks) into summary.json; write report and index again."""
    path = Path(run_folder) / "summary.json"
    files.write_json(path, files.read_json(path) | {"verdict": dict(verdict)})
    picture, rows = path.with_name("training.png"), path.with_name("metrics.jsonl")
    drawn = picture.exists() and rows.exists() and picture.stat().st_mtime_ns >= rows.stat().st_mtime_ns
    report = write_report(run_folder, picture.read_bytes() if drawn else b"")
    write_index(Path(run_folder).parent)
    return report


def write_index(root: Path | None = None) -> Path:
    """Write index.html of all runs, newest first, with verdict and key figures; returns its path."""
    root = Path(root) if root is not None else reports_root()
    runs = []
    for folder in watch.run_folders(root):
        summary = _read(folder / "summary.json", [], _object) or {}
        losses = _sampled_losses(folder / "metrics.jsonl")
        rows = figure_rows(_mapping(summary.get("evaluation")))
        word, text = outcome(folder, summary)
        runs.append(
            {
                "name": folder.name,
                "report": f"{folder.name}/report.html" if (folder / "report.html").exists() else "",
                "outcome": word,
                "losses": [loss for _, loss in losses],
                "points": _polyline(losses),
                "result": text or summary.get("headline") or ", ".join(f"{label} {value}" for label, value, _ in rows),
                "summary": summary,
                "record": _read(folder / "run.json", [], _object) or {},
            }
        )
    root.mkdir(parents=True, exist_ok=True)
    path = root / "index.html"
    files.write_text(path, _render("index.html", runs=runs, time=files.utc_now()))
    return path


def outcome(folder: Path, summary: Mapping[str, Any]) -> tuple[str, str]:
    """(PASS or FAIL where a notebook has judged the run, else a word for how it stands; what there is to say of it)."""
    standing = watch.standing(folder)
    verdict = summary.get("verdict")
    if standing.word not in watch.UNDER_WAY and isinstance(verdict, Mapping) and "passed" in verdict:
        return "PASS" if verdict["passed"] else "FAIL", ""
    words = {"complete": "no verdict", "begun": "not finished"}
    return words.get(standing.word, standing.word), "" if standing.word in words else standing.text


def figure_rows(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(figure, value, its baselines) as text, for an evaluation such as a run's summary.json holds.

    A baseline belongs to the figures with its last word in their names: `uniform_top1` to `top1`, `majority_wdl` to
    `wdl_accuracy`. Shares (top..., ...accuracy) are shown in percent. What is neither a number nor text is left out.
    """
    rows = []
    for name, value in figures.items():
        if isinstance(value, (int, float, str)):
            beside = [f"{key} {_number(name, against)}" for key, against in _baselines(figures, name).items()]
            rows.append((name.replace("_", " "), _number(name, value), ", ".join(beside)))
    return rows


def _baselines(figures: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        key.rsplit("_", 1)[0].replace("_", " "): value
        for key, value in _mapping(figures.get("baselines")).items()
        if key.rsplit("_", 1)[-1] in name.split("_")
    }


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


def _render(template: str, **content: Any) -> str:
    """A page of templates/; every value is escaped, a missing one is empty."""
    return _pages().get_template(template).render(content)


@functools.cache
def _pages() -> Environment:
    """The templates, which are compiled once."""
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    pages = Environment(
        loader=PackageLoader("matrixlib.runs"),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["duration"] = progress.duration
    pages.filters["colour"] = _colour
    return pages


def _colour(word: str) -> str:
    """CSS class of an outcome."""
    if word in ("FAIL", "halted", "failed", "stalled", "gone"):
        return "fail"
    return "pass" if word == "PASS" else "open"


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


def _checks(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    checks = _mapping(summary.get("verdict")).get("checks")
    return [check for check in checks if isinstance(check, Mapping)] if isinstance(checks, list) else []


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = figure_rows(_mapping(summary.get("evaluation")))
    if isinstance(parameters := summary.get("parameters"), int):
        rows.append(("parameters of the network", f"{parameters:,}", ""))
    return [(LABELS.get(name, name), value, beside) for name, value, beside in rows]


def _scores(summary: Mapping[str, Any]) -> str:
    """The shares of an evaluation with their intervals, as a PNG in base 64; "" where it does not say first of how many
    rows they are."""
    evaluation = _mapping(summary.get("evaluation"))
    count = next(iter(evaluation.values()), None)
    scores = {}
    for name, value in evaluation.items():
        if _is_share(name) and isinstance(value, float) and 0 <= value <= 1:
            against = _baselines(evaluation, name).items()
            label = name.replace("_", " ")
            scores[LABELS.get(label, label)] = value, {key: v for key, v in against if isinstance(v, float)}
    if not scores or not isinstance(count, int) or count < 1:
        return ""
    return base64.b64encode(figures.png(figures.scores_figure(scores, count))).decode()


def _pictures(rows: Sequence[Mapping[str, Any]], name: str, curves: bytes) -> list[tuple[str, str, str]]:
    """(heading, text for those who do not see it, PNG in base 64) of every picture; curves: as in `write_report`."""
    pictures: list[tuple[str, str, bytes]] = []
    if rows:
        alt = "Losses, accuracy, learning rate, gradient norm and throughput over update steps"
        pictures.append(("Curves", alt, curves or figures.png(figures.training_figure(rows, name))))
    if timed := [row for row in rows if row.get("times")]:
        alt = "Milliseconds of an update by phase"
        pictures.append(("Where the time went", alt, figures.png(figures.phases_figure(timed))))
    return [(title, alt, base64.b64encode(picture).decode()) for title, alt, picture in pictures]


def _stored_pictures(folder: Path) -> list[tuple[str, str, str]]:
    """As `_pictures`, of the PNG files of a folder that is no run, by their names."""
    titles = {path: path.stem.replace("-", " ").capitalize() for path in sorted(folder.glob("*.png"))}
    return [(title, title, base64.b64encode(path.read_bytes()).decode()) for path, title in titles.items()]


def _messages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a person should know: first what was decided (end, rollbacks, skipped updates), then the latest others."""
    told = metrics.messages(rows)
    decisions = [(step, text) for decision in DECISIONS for step, event, text in told if event == decision]
    others = [(step, text) for step, event, text in told if event not in DECISIONS]
    left_out = len(decisions[MESSAGES:]) + len(others[:-MESSAGES])
    shown = [f"update {step:,}: {text}" for step, text in (*decisions[:MESSAGES], *others[-MESSAGES:])]
    return shown + ([f"... and {left_out:,} more in metrics.jsonl"] if left_out else [])


def _stability(rows: Sequence[Mapping[str, Any]], clip_norm: object) -> list[tuple[str, str]]:
    """(what, count or figure) of what disturbed the training or came near to it; empty where nothing is known."""
    if not rows or "skipped" not in rows[-1]:
        return []
    last = rows[-1]
    table = [
        ("updates skipped", f"{last['skipped']:,}"),
        ("updates with a loss or gradient that was not finite", f"{sum(map(metrics.not_finite, rows)):,}"),
        ("falls of the loss scale", f"{last.get('overflows', 0):,}"),
        ("rollbacks", f"{last.get('rollbacks', 0):,}"),
    ]
    figures_at = [row["statistics"] for row in rows if "statistics" in row]
    norms = figures_at[-1].get("gradient_norm", {}) if figures_at else {}
    table.append(
        (f"gradients clipped{f' (optim.clip_norm {clip_norm})' if clip_norm else ''}", f"{last['clip_share']:.1%}")
    )
    if norms:
        table.append(("gradient norm, median of the latest", f"{norms['median']:.3g}"))
        table.append(("optim.clip_norm that would have clipped 5% of the latest", f"{norms['p95']:.3g}"))
    outputs = [(values["max"], name) for one in figures_at for name, values in one.get("outputs", {}).items()]
    if outputs:
        table.append(("largest output", "{:.4g} ({})".format(*max(outputs))))
    infinite = [values["infinite"] for one in figures_at for values in one.get("outputs", {}).values()]
    if any(infinite):
        table.append(("largest share of infinite outputs", f"{max(infinite):.1%}"))
    held = [row["memory"] for row in rows if "memory" in row]
    if peaks := [one["peak_mib"] for one in held if "peak_mib" in one]:
        table.append(("most memory", f"{max(peaks):,.0f} MiB, {max(one.get('share', 0) for one in held):.0%} of all"))
    if busy := [one["busy"] for one in held if "busy" in one]:
        table.append(("the GPU was busy, median", f"{statistics.median(busy):.0%}"))
    if dead := figures_at[-1].get("dead_units") if figures_at else None:
        share, name = max((share, name) for name, share in dead.items())
        table.append(("dead units, worst activation", f"{share:.1%} ({name})"))
    return table


def _polyline(losses: Sequence[tuple[int, float]]) -> str:
    """Points of an SVG curve, 120 wide and 28 high; "" for fewer than two."""
    if len(losses) < 2:
        return ""
    steps, values = zip(*losses, strict=True)
    wide, tall = max(steps[-1] - steps[0], 1), max(max(values) - min(values), 1e-9)
    return " ".join(
        f"{120 * (step - steps[0]) / wide:.1f},{26 - 24 * (loss - min(values)) / tall:.1f}" for step, loss in losses
    )


def _sampled_losses(path: Path) -> list[tuple[int, float]]:
    """(step, mean loss of a few rows) at places spread evenly over a metrics file; damaged lines are left out."""
    means: dict[int, float] = {}
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            for place in range(SPARKS):
                file.seek(size * place // SPARKS)
                if place:
                    file.readline()  # the rest of a row
                losses = [step_loss for _ in range(SPARK_ROWS) if (step_loss := _loss(file.readline()))]
                if losses:
                    means[losses[0][0]] = sum(loss for _, loss in losses) / len(losses)
    except OSError:
        return []
    return sorted(means.items())


def _loss(line: bytes) -> tuple[int, float] | None:
    """(step, loss) of one row, the sum of its terms where no total is stored; None where it is not finite."""
    try:
        row = json.loads(line)
        losses = row["losses"].values() if "loss" not in row else [row["loss"]]
        loss = sum(map(float, losses))  # "nan" and "inf" stand in the file as text
        return (int(row["step"]), loss) if math.isfinite(loss) else None
    except (*STRANGE, RecursionError):
        return None


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except files.FolderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
