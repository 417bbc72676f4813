"""What is looked at between updates: the memory; outputs, gradients, blocks and dead units of the model in training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from matrixlib.engine import diagnostics
from matrixlib.engine.distributed import unsharded
from matrixlib.engine.memory import Chunk, Monitor
from matrixlib.engine.optim import unwrap
from matrixlib.engine.stats import Stats, norm_quantiles
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, Task, rows, slice_batch
from matrixlib.engine.validation import HeldOut

COLLAPSE = 1e-4
"""Deviation between the rows of an output, in logits, below which it says the same for every input."""


def first_update(
    task: Task, step: Step, batch: Batch, stats: Stats, fresh: bool
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Of the first update: its losses beside chance level (`Stats.initial`), and messages about gradients that look
    wrong and, of a fresh network, about losses far from chance.
    """
    initial, messages = diagnostics.compare_with_chance(task, step.taught(batch), stats)
    messages = messages if fresh else []  # weights of another run have learned something
    model = unwrap(step.model)
    with unsharded(model):
        report = diagnostics.without_idle_heads(step.gradients, task, model, batch, stats, step.runtime)
    return initial, [f"first update: {report}", *messages] if any(report) else messages


def inspect(
    step: Step, batch: Batch, before: Mapping[str, Tensor], held_out: HeldOut, norms: Sequence[float]
) -> tuple[dict[str, Any], list[str]]:
    """Figures (`Stats.statistics`) after an update and the warnings that follow from them.

    batch: that of the update, on the host. before: the weights before it (`diagnostics.snapshot`). held_out: its sample
    tells dead units. norms: the latest gradient norms.
    """
    model, runtime = unwrap(step.model), step.runtime
    part = slice_batch(batch, 0, min(rows(batch), step.micro_batch))
    blocks = diagnostics.block_statistics(model, before)
    with unsharded(model):
        outputs = diagnostics.output_statistics(step.task, model, part, runtime)
        dead = diagnostics.dead_units(step.task, model, held_out.batches("sample"), runtime, passes=held_out.passes)
    quantiles = norm_quantiles(norms)
    health, warming_up = step.config.health, step.update <= step.schedule.warmup
    messages = [
        *diagnostics.block_warnings(blocks, math.inf if warming_up else health.update_warning),
        *dead.warnings(health.dead_warning),
        *(collapse_warnings(outputs, step.task.weights, rows(part)) if not warming_up else ()),
        *step.health.clip_warning(quantiles.get("p95", math.nan), step.config.optim.clip_norm),
    ]
    figures = {"outputs": outputs, "gradient_norm": quantiles, "blocks": blocks, "dead_units": dead.shares}
    return figures | ({"loss_scale": step.scaler.get_scale()} if step.scaler is not None else {}), messages


def collapse_warnings(outputs: Mapping[str, Mapping[str, float]], weights: Mapping[str, float], rows: int) -> list[str]:
    """Warnings about a `diagnostics.output_statistics` over so many rows: outputs that do not depend on their input,
    those of terms without a weight apart."""
    alike = [name for name, row in outputs.items() if row["across"] < COLLAPSE and weights.get(name, 1.0)]
    if not alike or rows < 2:
        return []
    return [
        f"for every input the same is said by {', '.join(alike)}: collapsed; lower optim.learning_rate, look at the "
        "targets and at the dead units"
    ]


def tighten(monitor: Monitor, chunk: Chunk, step: Step, update: int) -> list[str]:
    """Look at the memory after an update; where it is tight, the self-supervised terms work on fewer rows at once.
    What a person should know.
    """
    messages, size = monitor.check(update), step.micro_batch
    if step.task.gated and chunk.look(max(step.ranks.gather(monitor.needed)), step.config.memory.warn, size):
        present = step.task.set_chunk(unwrap(step.model), chunk.rows)
        if step.runtime.device == "mps":  # whose allocator's cache counts as used: it would never seem enough
            monitor.clear()
        if present or not chunk.rows:
            messages.append(
                f"memory: the self-supervised heads work on {present or size} of {size} rows at once after "
                f"update {update}"
            )
    return messages
