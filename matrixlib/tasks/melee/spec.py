"""The Melee task: imitating players of recorded games.

Terms are the parts of a controller: `buttons`, stick axes, `shoulder`. Items are frames whose next controller is known.
"""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.config import ConfigError
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.reader import kept_rows
from matrixlib.data.remote import local_path
from matrixlib.data.shards import Shard, select
from matrixlib.engine.onnx import OnnxFile
from matrixlib.engine.task import Batch, Sums, Ungated
from matrixlib.tasks.melee import imitation, windows
from matrixlib.tasks.melee.columns import BUTTONS, LAYOUT
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.controller import HEADS, LOGITS, Statistics
from matrixlib.tasks.melee.importer import unpack_sample
from matrixlib.tasks.melee.model import MeleeNet, Objective, likeliest, log_likelihood
from matrixlib.tasks.melee.player import export
from matrixlib.tasks.melee.windows import count
from matrixlib.tasks.spec import Check, Overfit, TaskSpec, by_source, given_folder


@dataclass(frozen=True)
class MeleeTask(Ungated):
    """Imitating players. Frozen and picklable, for loader workers.

    statistics: of the training set; None without one, for networks only used.
    """

    config: MeleeConfig
    statistics: Statistics | None = None

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return windows.augment(batch, self.config.data, rng)

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return windows.plain(batch, self.config.data)

    @property
    def weights(self) -> dict[str, float]:
        loss = self.config.loss
        parts = (loss.buttons, loss.main, loss.main, loss.c, loss.c, loss.shoulder)
        return {head.name: weight for head, weight in zip(HEADS, parts, strict=True)}

    @property
    def button_weights(self) -> list[float]:
        """(8,) loss weight of each pressed button."""
        rare = self.config.loss.rare
        if not rare or self.statistics is None:
            return [1.0] * len(BUTTONS)
        return [weight**rare for weight in self.statistics.weights()]

    def frame_weights(self, batch: Batch) -> Tensor | float:
        """(B, T) loss weight of each frame by the player's character; 1 unless `loss.characters`."""
        if self._character_weights is None:
            return 1.0
        own = batch["character"][..., 0].long()
        return self._character_weights.to(own.device, non_blocking=True)[own]

    @functools.cached_property
    def _character_weights(self) -> Tensor | None:
        strength = self.config.loss.characters
        return torch.tensor(self.statistics.character_weights(strength)) if strength and self.statistics else None

    def objective(self, model: Any) -> Objective:
        """The losses, and how probabilities follow from the trained logits."""
        return Objective(model.heads.weights, self.config.loss.focal, self.config.loss.label_smoothing)

    @property
    def prior(self) -> list[float]:
        """(81,) initial logits: the constant predictor's; button weights multiply odds."""
        logits = [0.0] * LOGITS if self.statistics is None else self.statistics.logits()
        return [x + math.log(w) for x, w in zip(logits, self.button_weights, strict=False)] + logits[len(BUTTONS) :]

    def build_model(self) -> MeleeNet:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return MeleeNet(self.config.model, self.config.data.window, self.prior, self.button_weights)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Valid frames, equal for every term."""
        return dict.fromkeys(self.weights, int(batch["valid"].sum()))

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> tuple[Sums, Sums]:
        """Sums of the active terms over valid frames, weighted by `frame_weights`, and metrics, which are not.

        `nll`: of corrected probabilities, summed over buttons; `accuracy`: of the most probable class, mean over
        buttons; `repeat`: accuracy of holding the last input. Autoregressive parts are conditional on true earlier
        parts.
        """
        logits, objective = self._logits(model, batch), self.objective(model)
        target, previous, valid = batch["choices"].long(), batch["previous"].long(), batch["valid"].bool()
        frame_weights = self.frame_weights(batch)
        sums, metrics = Sums(), Sums()

        def total(value: Tensor) -> Tensor:
            return torch.where(valid, value.float(), 0.0).sum()

        for head in (head for head in HEADS if head.name in active):
            own, choices, before = logits[..., head.logits], target[..., head.choices], previous[..., head.choices]
            sums[head.name] = total(frame_weights * objective.losses(head, own, choices))
            with torch.no_grad():
                corrected = objective.correct(head, own)
                metrics[f"{head.name}/nll"] = total(-log_likelihood(head, corrected, choices))
                metrics[f"{head.name}/accuracy"] = total((likeliest(head, corrected) == choices).float().mean(-1))
                metrics[f"{head.name}/repeat"] = total((before == choices).float().mean(-1))
        return sums, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """(chance, floor) of each term as sums over the items of `counts`: chance is that of `prior`."""
        loss, target, valid = self.config.loss, batch["choices"].long(), batch["valid"].bool()
        objective = Objective(torch.tensor(self.button_weights), loss.focal, loss.label_smoothing)
        logits, out = torch.tensor(self.prior).expand(*target.shape[:-1], -1), {}
        weights = self.frame_weights(batch) * torch.ones(valid.shape, dtype=torch.float64)
        for head in HEADS:
            chance = weights * objective.losses(head, logits[..., head.logits], target[..., head.choices])
            out[head.name] = (chance[valid].double().sum().item(), weights[valid].sum().item() * objective.floor(head))
        return out

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Logits (B, T, 8 or classes) by term, NaN in invalid frames."""
        logits = self._logits(model, batch).masked_fill(~batch["valid"].bool()[..., None], torch.nan)
        return {head.name: logits[..., head.logits] for head in HEADS}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        whole = (batch[name].long() for name in ("action", "character", "previous", "choices"))
        return model(batch["numeric"], *whole)


MAX_LEAK = 3.0
"""Largest ratio of action changes at onsets to those anywhere: it was 7.6 with states after their targets, a third of
that paired as here."""


class MeleeSpec(TaskSpec[MeleeConfig]):
    name, demo = "melee", "melee_demo"
    config, layout = MeleeConfig, LAYOUT
    objective_options = ("loss.",)
    measured_on_options = ("validation.limit", "data.delay")
    held_out = "about one replay in ten is held out, and of several at least one"
    overfit = Overfit(
        overrides={
            "data": {"mirror": 0.0, "noise": 0.0, "random_start": False, "delay": [0, 0]},
            "model": {"dropout": 0.0},
            "optim": {"learning_rate": 0.003, "clip_norm": 1.0},
            "train": {"steps": 150},
            "loss": {"label_smoothing": 0.0, "focal": 0.0, "rare": 0.0},
        },
        inputs=("numeric", "action", "character"),
        labels=("choices",),
    )
    small = {"model": {"width": 16}, "train": {"batch_size": 16}, "runtime": {"precision": "fp32", "threads": 1}}

    def task(self, config: MeleeConfig) -> MeleeTask:
        return MeleeTask(config, self.statistics(config))

    def statistics(self, config: MeleeConfig) -> Statistics | None:
        """Class frequencies of a configuration's training rows; None if the data are not on this machine.

        Summed from the catalogue's counts over the shards in use, so splits, limits and quarantine matter; if a limit
        cuts a shard, its rows are counted. ShardError for an unreadable shard.
        """
        try:
            rows = Catalogue(self.folder(config)).shards("train")
        except ConfigError:
            return None
        kept = kept_rows([row.count for row in rows], [row.source for row in rows], config.data.limit)
        parts = []
        for row, rows_kept in zip(rows, kept, strict=True):
            known = row.quality.get("classes", {})  # of older imports without characters
            if rows_kept == row.count and known and (known.get("characters") or not config.loss.characters):
                parts.append(Statistics(**known))
            elif rows_kept:
                parts.append(count(select(Shard(local_path(row), LAYOUT).arrays, np.arange(rows_kept), LAYOUT)))
        return functools.reduce(operator.add, parts) if parts else None

    def folder(self, config: MeleeConfig) -> Path:
        return unpack_sample() if config.data.source == "sample" else given_folder(config.data, "sample")

    def export(self, net: Any, path: Path | str) -> OnnxFile:
        return export(net.model, net.task, path)

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Log-likelihoods and onsets of held-out frames, with repeating as baseline."""
        config = net.task.config

        def figures(rows: Loader) -> dict[str, Any]:
            batches = rows.sequential(config.validation.batch_size, sample=sample)
            return imitation.figures(imitation.judge(net, batches, config.seed))

        return by_source(figures, held_out)

    def headline(self, figures: Mapping[str, Any]) -> str:
        total, onsets = figures["total"], figures["onsets"]
        return (
            f"{total['nll']:.3f} nats a frame (repeating {total['repeating']:.3f}, constant {total['constant']:.3f}), "
            f"{total['change_nll']:.2f} where the controller changes (repeating {total['change_repeating']:.2f}), "
            f"{onsets['recall']:.1%} of the onsets (repeating 0 %, other frames {onsets['false']:.1%})"
        )

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        """Checks that a network learned something, from data without a leak."""
        total, leak = figures["total"], figures["leak"]
        better, honest = total["nll"] < total["constant"], leak["at_onsets"] <= MAX_LEAK * leak["anywhere"]
        nats = f"{total['nll']:.3f} nats a frame, {total['constant']:.3f}"
        text = f"the action has just changed at {leak['at_onsets']:.1%} of the onsets, in {leak['anywhere']:.1%} of all"
        return [("held-out log-loss below a constant predictor's", better, nats), ("no leak", honest, text)]


TASK = MeleeSpec()
