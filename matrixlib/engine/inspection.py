"""What is measured beside the updates: outputs, gradients, blocks, dead units, memory by part, targets."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine import diagnostics
from matrixlib.engine.distributed import unsharded
from matrixlib.engine.health import Health
from matrixlib.engine.memory import MEBI
from matrixlib.engine.optim import unwrap
from matrixlib.engine.stats import Action, Event, Message, Stats, norm_quantiles
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, Data, Task, rows, slice_batch
from matrixlib.engine.validation import HeldOut
from matrixlib.files import plain, utc_now, write_json

EVIDENCE_UPDATES = 16
"""Updates at most whose records are kept as evidence, and rows of metrics from before the trouble."""
TARGET_BINS = 16
"""Of a histogram of targets that are not classes."""
COLLAPSE = 1e-4
"""Deviation between the rows of an output, in logits, below which it says the same for every input."""


def first_update(
    task: Task, step: Step, batch: Batch, stats: Stats, fresh: bool
) -> tuple[dict[str, dict[str, float]], list[Message]]:
    """Of the first update: its losses beside chance level (`Stats.initial`), and messages about gradients that look
    wrong and, of a fresh network, about losses far from chance.
    """
    initial, messages = diagnostics.compare_with_chance(task, step.taught(batch), stats)
    messages = messages if fresh else []  # weights of another run have learned something
    model = unwrap(step.model)
    with unsharded(model):
        report = diagnostics.without_idle_heads(step.gradients, task, model, batch, stats, step.runtime)
    texts = [f"first update: {report}", *messages] if any(report) else messages
    return initial, [Message(Event.FIRST_UPDATE, text, str(number)) for number, text in enumerate(texts)]


def inspect(
    step: Step, batch: Batch, before: Mapping[str, Tensor], held_out: HeldOut, norms: Sequence[float]
) -> tuple[dict[str, Any], list[Message]]:
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
    health, warming_up = step.config.health, step.update <= step.warmup
    clipping = step.health.clip_warning(quantiles.get("p95", math.nan), step.config.optim.clip_norm)
    warnings = {
        Event.UPDATE_SIZE: diagnostics.block_warnings(blocks, math.inf if warming_up else health.update_warning),
        Event.DEAD_UNITS: dead.warnings(health.dead_warning),
        Event.COLLAPSE: collapse_warnings(outputs, step.task.weights, rows(part)) if not warming_up else [],
        Event.CLIPPING: [clipping] if clipping else [],
    }
    messages = [Message(event, "; ".join(texts)) for event, texts in warnings.items() if texts]
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


def keep_evidence(
    run: Path, action: Action, step: int, health: Health, rows: Iterable[Mapping[str, Any]], source: Any, data: Data
) -> Path:
    """Write down in the run's folder what led to `action` at the update that made `step`; the folder of it.

    rows: the latest ones of metrics. source: of its batches (`Data.batches`), whose records are kept too.
    """
    folder = run / "evidence" / f"{action}_{health.rollbacks + 1}_update_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    batches = [source.unskipped_index(i) for i in range(max(health.onset, step - EVIDENCE_UPDATES), step)]
    rows = [row for row in rows if row["step"] > health.onset - EVIDENCE_UPDATES]
    record = {"verdict": action, "last": health.last, "batches": batches, "health": health.to_dict(), "rows": rows}
    write_json(folder / "evidence.json", record)
    data.records(source, batches, folder)
    return folder


def memory_by_part(
    update: Callable[[], object], model: nn.Module, optimiser: torch.optim.Optimizer
) -> dict[str, float]:
    """Where the memory of one update goes, in MiB: what each part of `model` keeps for its backward pass; weights,
    gradients and the optimiser's state are a row each. A part is a child, or one of a child's list of modules.

    update: makes one with the model and optimiser.
    """
    blocks = {name: diagnostics.block_of(model, f"{name}._") for name, _ in model.named_modules() if name}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    running, kept, seen = list[str](), Counter[str](), set[int]()

    def enter(name: str, *_: Any) -> None:
        running.append(blocks.get(name, ""))

    def leave(*_: Any) -> None:
        running.pop()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if running and running[-1] and storage.data_ptr() not in own | seen:
            seen.add(storage.data_ptr())
            kept[running[-1]] += storage.nbytes()
        return tensor

    with diagnostics.hooked(model, enter, leave), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        update()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    state = [value for entry in optimiser.state.values() for value in entry.values() if isinstance(value, Tensor)]
    table = {**kept, "weights": weights, "their gradients": weights, "optimiser": sum(value.nbytes for value in state)}
    return {name: round(size / MEBI, 2) for name, size in table.items()}


def target_figures(target: Tensor) -> dict[str, Any]:
    """dtype, shape, least and greatest value, values that are not finite, and a histogram: value -> how often, or the
    lower bounds of 16 equal bins -> how often where there are more different values than that."""
    values = target.detach().cpu().double().numpy().ravel()
    finite = values[np.isfinite(values)]
    figures: dict[str, Any] = {"dtype": str(target.dtype).removeprefix("torch."), "shape": list(target.shape)}
    figures["not_finite"] = len(values) - len(finite)
    if not len(finite):
        return figures | {"histogram": {}}
    bounds, counts = np.unique(finite, return_counts=True)
    if len(bounds) > TARGET_BINS:
        counts, bounds = np.histogram(finite, TARGET_BINS)
    histogram = {f"{bound:g}": int(count) for bound, count in zip(bounds, counts, strict=False)}
    return figures | {"least": finite.min(), "greatest": finite.max(), "histogram": histogram}


class TargetLog:
    """targets.jsonl of a run, a hook: a row of `target_figures` by term; an update that is repeated after a rollback
    stands twice."""

    def __init__(self, path: Path, targets: Callable[[Batch], Mapping[str, Tensor]]) -> None:
        """targets: of a batch on the host, by term."""
        self._path, self._targets = path, targets

    def __call__(self, stats: Stats, batch: Batch) -> None:
        figures = {name: target_figures(target) for name, target in self._targets(batch).items()}
        row = {"time": utc_now(), "step": stats.step, "targets": figures}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(row)) + "\n")
