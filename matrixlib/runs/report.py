"""Offline report of a run: one HTML file with nothing to fetch, verdict first.

    python -m matrixlib.runs.report            all runs under reports/, and their index
    python -m matrixlib.runs.report RUN        one run (name or folder), and the index

It is made from what the run's folder holds (summary.json, run.json, config.yaml, metrics.jsonl); whatever a
crashed run left out or damaged is named.
"""

from __future__ import annotations

import base64
import html
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from matrixlib import files, progress
from matrixlib.engine import metrics
from matrixlib.files import reports_root
from matrixlib.runs import figures

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --page: #ffffff; --line: #d8d8dc; --soft: #f5f5f7;
  --quiet: #6b6b70; --curve: #1f77b4; --good: #1a7f37; --bad: #b3261e; --wait: #8a6100; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e6e8; --page: #17181a; --line: #3a3b3f; --soft: #222326;
  --quiet: #9a9aa0; --curve: #6fb3e0; --good: #57c878; --bad: #ff8a80; --wait: #e0b040; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid; padding: .4rem 1rem; font-size: 1.2rem; background: var(--soft); }
.pass { color: var(--good); } .fail { color: var(--bad); } .open { color: var(--wait); }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
.result { font-size: 1.05rem; } .soft, .soft a { color: var(--quiet); }
svg { display: block; width: 8rem; height: 2rem; stroke: var(--curve); fill: none; stroke-width: 1.5; }
img { max-width: 100%; background: #fff; border-radius: .4rem; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: .85rem; border-radius: .4rem; }
pre.columns { columns: 17rem; } .index { max-width: 84rem; } .index a { white-space: nowrap; }
.wide { overflow-x: auto; }
"""

LABELS = {
    "positions": "held-out positions",
    "top1": "top-1 agreement with the teacher",
    "top3": "top-3 agreement with the teacher",
    "top5": "top-5 agreement with the teacher",
    "policy kl": "policy KL to the teacher [nats]",
    "value correlation": "correlation of value and expected score",
    "wdl accuracy": "win-draw-loss accuracy",
}
MESSAGES = 20  # that a report shows
SPARKS, SPARK_ROWS = 40, 5  # points of a sparkline, rows of metrics.jsonl that make one


def write_report(run_folder: Path) -> Path:
    """Write report.html of a run and return its path.

    Raises ValueError where the folder does not exist; missing or damaged parts are named in the report.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise ValueError(f"no run at {folder}; runs are the folders under {reports_root()}")
    problems: list[str] = []
    summary = _read_json(folder / "summary.json", problems)
    record = _read_json(folder / "run.json", problems)
    parts = [f"<h1>{_text(folder.name)}</h1>", _verdict(summary)]
    if headline := summary.get("headline"):
        parts.append(f'<p class="result">{_text(headline)}</p>')
    parts += [
        f'<p class="soft">{_text(_headline(summary, record))} - <a href="../index.html">all runs</a></p>',
        _checks(summary),
        _section("Key figures", _figures(summary)),
    ]
    if any((folder / name).exists() for name in ("run.json", "config.yaml", "metrics.jsonl")) or not summary:
        rows = _rows(folder, problems)
        parts += [
            _section("Curves", _curves(rows, folder.name)),
            _section("Where the time went", _phases(rows)),
            _section("What it said", _messages(rows)),
            _section("Runtime", _runtime(summary.get("runtime") or record.get("runtime"))),
            _section("Configuration", _file(folder / "config.yaml")),
            _section("Environment", _environment(record)),
            _section("Parts that are missing or damaged", _list(problems)),
        ]
    path = folder / "report.html"
    files.write_text(path, page(folder.name, "\n".join(parts)))
    return path


def add_verdict(run_folder: Path, verdict: Mapping[str, Any]) -> Path:
    """Put a notebook's verdict (passed, demo, checks) into summary.json; write report and index again."""
    path = Path(run_folder) / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    files.write_json(path, summary | {"verdict": dict(verdict)})
    report = write_report(run_folder)
    write_index(Path(run_folder).parent)
    return report


def write_index(root: Path | None = None) -> Path:
    """Write index.html of all runs, newest first, with verdict and key figures; returns its path."""
    root = Path(root) if root is not None else reports_root()
    runs = [path for path in root.iterdir() if path.is_dir() and _is_run(path)] if root.is_dir() else []
    lines = []
    for folder in sorted(runs, key=_started, reverse=True):
        summary = _read_json(folder / "summary.json", [])
        record = _read_json(folder / "run.json", [])
        kind, word = _outcome(summary)
        name = _text(folder.name)
        link = f'<a href="{name}/report.html">{name}</a>' if (folder / "report.html").exists() else name
        cells = [
            f'<span class="{kind}">{word}</span>',
            link,
            _sparkline(folder / "metrics.jsonl"),
            _text(summary.get("headline") or _short_figures(summary)),
            _text(_headline(summary, record)),
        ]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>verdict</th><th>run</th><th>training loss</th><th>result</th><th>what it was</th></tr>"
    table = (
        f'<div class="wide"><table>{head}{"".join(lines)}</table></div>' if lines else "<p>No runs yet.</p>"
    )
    root.mkdir(parents=True, exist_ok=True)
    path = root / "index.html"
    files.write_text(path, page("Runs", f"<h1>Runs</h1>{table}", "index"))
    return path


def page(title: str, body: str, kind: str = "report") -> str:
    """A whole HTML document around `body`, with a class for the style; the title is escaped, the body is not."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n"
        f'<body class="{kind}">\n{body}\n</body></html>\n'
    )


def figure_rows(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(figure, value, its baselines) as text, for an evaluation such as `evaluation.held_out` returns.

    A baseline belongs to the figures with its last word in their names: `uniform_top1` to `top1`,
    `majority_wdl` to `wdl_accuracy`. Shares (top..., ...accuracy) are shown in percent.
    """
    baselines = figures.get("baselines") or {}
    rows = []
    for name, value in figures.items():
        if name == "baselines" or not isinstance(value, (int, float, str)):
            continue
        beside = [
            f"{key.rsplit('_', 1)[0].replace('_', ' ')} {_number(name, against)}"
            for key, against in baselines.items()
            if key.rsplit("_", 1)[-1] in name.split("_")
        ]
        rows.append((name.replace("_", " "), _number(name, value), ", ".join(beside)))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Command line: rebuild the reports of the runs given (all without any) and the index."""
    root = reports_root()
    if arguments:
        folders = [path if (path := Path(given)).is_dir() else root / given for given in arguments]
    else:
        folders = sorted(path for path in root.glob("*") if path.is_dir() and _is_run(path))
    try:
        for folder in folders:
            print(write_report(folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(write_index(root))
    return 0


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _section(title: str, body: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{body}" if body else ""


def _number(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    share = name.startswith("top") or name.endswith("accuracy")
    return f"{value:.1%}" if share else f"{value:.3f}"


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(data, dict):
        problems.append(f"{path.name} holds no mapping")
        return {}
    return data


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("run.json", "config.yaml", "summary.json"))


def _started(folder: Path) -> tuple[str, str]:
    return str(_read_json(folder / "run.json", []).get("started", "")), folder.name


def _outcome(summary: Mapping[str, Any]) -> tuple[str, str]:
    """(CSS class, word) of a run."""
    verdict = summary.get("verdict")
    if isinstance(verdict, Mapping) and "passed" in verdict:
        return ("pass", "PASS") if verdict["passed"] else ("fail", "FAIL")
    return ("open", "no verdict") if summary.get("complete") else ("open", "not finished")


def _verdict(summary: Mapping[str, Any]) -> str:
    kind, word = _outcome(summary)
    verdict = summary.get("verdict")
    verdict = verdict if isinstance(verdict, Mapping) else {}
    note = (
        " (a demo: it shows that everything runs, not how strong the network is)"
        if verdict.get("demo")
        else ""
    )
    return f'<p class="verdict {kind}">Verdict: {word}{note}</p>'


def _checks(summary: Mapping[str, Any]) -> str:
    verdict = summary.get("verdict")
    checks = verdict.get("checks", ()) if isinstance(verdict, Mapping) else ()
    rows = [
        ("pass" if check.get("passed") else "FAIL", check.get("name", ""), check.get("detail", ""))
        for check in checks
        if isinstance(check, Mapping)
    ]
    return _table((), rows)


def _headline(summary: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """One line of what the run was."""
    words = []
    if preset := summary.get("preset") or record.get("preset"):
        words.append(f"preset {preset}")
    if isinstance(steps := summary.get("steps"), int):
        words.append(f"{steps:,} updates")
    if isinstance(positions := summary.get("positions"), int):
        words.append(f"{positions:,} positions")
    if isinstance(seconds := summary.get("seconds"), (int, float)) and seconds >= 0:
        words.append(progress.duration(seconds))
    if isinstance(rate := summary.get("positions_per_second"), (int, float)):
        words.append(f"{rate:,} positions/s")
    if isinstance(share := summary.get("share_of_peak"), (int, float)):
        peak = summary.get("peak_gflops")
        of = f" ({peak:,.0f} GFLOP/s)" if isinstance(peak, (int, float)) else ""
        words.append(f"{share:.0%} of the measured matrix rate{of}")
    if reason := summary.get("stopped_early"):
        words.append(f"stopped early: {reason}")
    if started := record.get("started"):
        words.append(f"started {started}")
    return ", ".join(words)


def _figures(summary: Mapping[str, Any]) -> str:
    figures = summary.get("evaluation")
    found = figure_rows(figures) if isinstance(figures, Mapping) else []
    rows = [(LABELS.get(name, name), value, beside) for name, value, beside in found]
    if isinstance(parameters := summary.get("parameters"), int):
        rows.append(("parameters of the network", f"{parameters:,}", ""))
    return _table(("figure", "value", "baselines"), rows, number=1)


def _short_figures(summary: Mapping[str, Any]) -> str:
    return ", ".join(f"{label} {value}" for label, value, _ in figure_rows(summary.get("evaluation") or {}))


def _rows(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl; none where it is missing or damaged, which is then a problem."""
    try:
        return metrics.read(folder / "metrics.jsonl")
    except FileNotFoundError:
        problems.append("metrics.jsonl is missing")
    except (OSError, ValueError) as error:
        problems.append(f"metrics.jsonl cannot be read: {error}")
    return []


def _curves(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    alt = "Losses, accuracy, learning rate, gradient norm and throughput over update steps"
    return _picture(figures.training_figure(rows, name), alt) if rows else ""


def _phases(rows: Sequence[Mapping[str, Any]]) -> str:
    timed = [row for row in rows if row.get("times")]
    return _picture(figures.phases_figure(timed), "Milliseconds of an update by phase") if timed else ""


def _picture(figure: Figure, alt: str) -> str:
    data = base64.b64encode(figures.png(figure)).decode("ascii")
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


def _messages(rows: Sequence[Mapping[str, Any]]) -> str:
    """The warnings of the training, as far as they are few."""
    said = [f"update {row['step']:,}: {text}" for row in rows for text in row.get("messages", ())]
    more = [f"... and {len(said) - MESSAGES:,} more in metrics.jsonl"] if len(said) > MESSAGES else []
    return _list(said[:MESSAGES] + more)


def _sparkline(path: Path) -> str:
    """The training loss as a small curve; "" where there is none. Reads a part of the file only."""
    points = _sampled_losses(path)
    if len(points) < 2:
        return ""
    steps, losses = zip(*points, strict=True)
    low, high = min(losses), max(losses)
    wide, tall = max(steps[-1] - steps[0], 1), max(high - low, 1e-9)
    places = " ".join(
        f"{120 * (step - steps[0]) / wide:.1f},{26 - 24 * (loss - low) / tall:.1f}" for step, loss in points
    )
    words = f"training loss {losses[0]:.2f} to {losses[-1]:.2f}"
    return f'<svg viewBox="0 0 120 28" role="img"><title>{words}</title><polyline points="{places}"/></svg>'


def _sampled_losses(path: Path) -> list[tuple[int, float]]:
    """(step, mean loss of a few rows) at places spread evenly over a metrics file; damaged lines are left out."""
    found: dict[int, float] = {}
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            for place in range(SPARKS):
                file.seek(size * place // SPARKS)
                if place:
                    file.readline()  # the rest of a row
                losses = [step_loss for _ in range(SPARK_ROWS) if (step_loss := _loss(file.readline()))]
                if losses:
                    found[losses[0][0]] = sum(loss for _, loss in losses) / len(losses)
    except OSError:
        return []
    return sorted(found.items())


def _loss(line: bytes) -> tuple[int, float] | None:
    """(step, loss) of one row, the sum of its terms where no total is stored; None where it is not finite."""
    try:
        row = json.loads(line)
        losses = row["losses"].values() if "loss" not in row else [row["loss"]]
        loss = sum(map(float, losses))  # "nan" and "inf" stand in the file as text
        return (int(row["step"]), loss) if math.isfinite(loss) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _runtime(runtime: object) -> str:
    if not isinstance(runtime, Mapping):
        return ""
    reasons = runtime.get("reasons")
    rows = [(key, value, "") for key, value in runtime.items() if key != "reasons"]
    return _table((), [row[:2] for row in rows]) + _list(reasons if isinstance(reasons, list) else [])


def _environment(record: Mapping[str, Any]) -> str:
    versions = record.get("versions")
    rows = [(key, record[key]) for key in ("commit", "catalogue", "started") if record.get(key)]
    rows += list(versions.items()) if isinstance(versions, Mapping) else []
    return _table((), rows)


def _file(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        return f'<pre class="columns">{_text(text)}</pre>'
    except OSError as error:
        return f"<p>{_text(path.name)} cannot be read: {_text(error.strerror)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], number: int = -1) -> str:
    """number: column that is set flush right."""
    if not rows:
        return ""
    kinds = {number: ' class="number"'}
    top = _row("th", head, kinds) if head else ""
    body = "".join(_row("td", row, kinds) for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def _row(tag: str, cells: Sequence[object], kinds: Mapping[int, str]) -> str:
    inner = "".join(f"<{tag}{kinds.get(k, '')}>{_text(cell)}</{tag}>" for k, cell in enumerate(cells))
    return f"<tr>{inner}</tr>"


def _list(items: Sequence[object]) -> str:
    return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in items) + "</ul>" if items else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
