"""The end of a run, also a failed one: summary.json, curves and report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixlib import files
from matrixlib.engine import metrics
from matrixlib.engine.health import TrainingHalted
from matrixlib.files import read_json, write_json

if TYPE_CHECKING:
    from torch import nn

    from matrixlib.engine.trainer import Trainer
    from matrixlib.hardware.runtime import Runtime
    from matrixlib.runs.data import RunData

UNDRAWN = frozenset({"sweep", "faults"})  # kinds of run whose curves and pages are only made on demand, by runs.report
CURVE_POINTS = 40  # of the loss curve in summary.json, drawn by the index


def finish(folder: Path, preset: str, data: RunData, trainer: Trainer, model: nn.Module) -> None:
    """Evaluate `model` on the held-out data after the last update, and write all results."""
    spec, config, runtime = data.spec, data.config, data.runtime
    trainer.write_heartbeat("evaluation", force=True)
    rows = metrics.read(trainer.metrics.path)
    net = spec.network(model, config, runtime)
    net.lesson = data.teacher.record if data.teacher is not None else {}
    figures = spec.evaluate(net, data.validation, data.catalogue)
    if played := rows[-1].get("strength"):  # earlier ones are not of the end
        names = {"elo": "Elo over the anchor", "low": "lower bound", "high": "upper bound"}
        figures |= {text: played[name] for name, text in names.items()}
    shares = [row["share_of_peak"] for row in rows if "share_of_peak" in row]
    summary = {
        "complete": True,
        "steps": trainer.step,
        "planned_steps": config.train.steps,
        "stopped_early": trainer.stop_reason,
        "rollbacks": rows[-1]["rollbacks"],
        "reproducible": runtime.device == "cpu" and not (config.gating.seconds or trainer.adapted),
        "positions": trainer.step * config.train.batch_size,
        "lost_rows": {split: round(data.lost(split), 6) for split in ("train", "validation")},
        "seconds": round(sum(row["seconds"] * row.get("updates", 1) for row in rows), 1),
        "positions_per_second": round(statistics.median(row["throughput"] for row in rows)),
        "share_of_peak": statistics.median(shares) if shares else None,
        "peak_gflops": read_json(folder / "run.json").get("peak", {}).get("gflops"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "evaluation": figures,
        "headline": spec.headline(figures),
    }
    _write(folder, preset, runtime, summary, rows)
    trainer.write_heartbeat("stopped", force=True)


def end_early(folder: Path, preset: str, runtime: Runtime, error: BaseException) -> None:
    """Record why a run was halted, failed or interrupted, and draw what there is. Adds a note to the error with the
    report's path, or why there is none; raises nothing."""
    if not (folder / "metrics.jsonl").exists():  # no update yet
        return
    word = "failed" if isinstance(error, Exception) else "interrupted"  # Ctrl-C, SIGTERM
    if isinstance(error, TrainingHalted):
        word = "halted"
    reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")  # Ctrl-C has no text
    try:
        rows = metrics.read(folder / "metrics.jsonl")
        summary = {"complete": False, "end": word, "reason": reason, "steps": rows[-1]["step"] if rows else 0}
        where = _write(folder, preset, runtime, summary, rows)
    except (OSError, ValueError) as failed:  # a full disk, say, which may have ended the run
        error.add_note(f"no report could be written: {failed}")
    else:
        error.add_note(f"{'curves and report' if where.suffix == '.html' else 'summary'}: {where}")


def _write(
    folder: Path, preset: str, runtime: Runtime, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> Path:
    """Write summary.json, training.png, report.html and the index; returns the report's path, or the summary's."""
    from matrixlib.runs import report

    losses = [row["loss"] for row in rows if math.isfinite(row.get("loss", math.nan))]
    parts = np.array_split(losses, min(CURVE_POINTS, len(losses))) if losses else []
    curve = [round(float(part.mean()), 4) for part in parts]
    whole = {"run": folder.name, "preset": preset, **summary, "runtime": runtime.to_dict(), "curve": curve}
    write_json(folder / "summary.json", whole | {"ended": files.utc_now()})
    if read_json(folder / "run.json").get("kind") in UNDRAWN:
        return folder / "summary.json"
    path = report.write_report(folder)
    report.write_index(folder.parent)
    return path
