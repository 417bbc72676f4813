"""The Melee task: what the engine trains, from stored rows to losses.

Terms are the parts of a controller: `buttons`, the axes of the sticks, `shoulder`. Items of each are the frames whose
next controller is known.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.task import Batch, Ungated
from matrixlib.tasks.melee import windows
from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.controller import HEADS, LOGITS, Statistics
from matrixlib.tasks.melee.losses import Objective, likeliest, log_likelihood
from matrixlib.tasks.melee.model import MeleeNet


@dataclass(frozen=True)
class MeleeTask(Ungated):
    """Imitating players as `config` describes it. Frozen and picklable, as the workers get a copy.

    statistics: of the training set; None where there is none, as for a network that is only used.
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
        """(8,) weight of each button in the loss where it is pressed."""
        rare = self.config.loss.rare
        if not rare or self.statistics is None:
            return [1.0] * len(BUTTONS)
        return [weight**rare for weight in self.statistics.weights()]

    def objective(self, model: Any) -> Objective:
        """What the losses are, and how probabilities follow from the logits of a network trained with them."""
        return Objective(model.heads.weights, self.config.loss.focal, self.config.loss.label_smoothing)

    @property
    def prior(self) -> list[float]:
        """(81,) logits of the constant predictor, from which a fresh network starts; a weight of a pressed button
        multiplies its odds."""
        logits = [0.0] * LOGITS if self.statistics is None else self.statistics.logits()
        return [x + math.log(w) for x, w in zip(logits, self.button_weights, strict=False)] + logits[len(BUTTONS) :]

    def build_model(self) -> MeleeNet:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return MeleeNet(self.config.model, self.config.data.window, self.prior, self.button_weights)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Valid frames, of every term the same."""
        return dict.fromkeys(self.weights, int(batch["valid"].sum()))

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums of the active terms over the valid frames, and their metrics.

        `nll` of the probabilities, whatever the loss, of the eight buttons the sum; `accuracy` of the likeliest class,
        or mean over the eight buttons; `repeat`, the accuracy of holding the controller as it is. Those of a part that
        is decided after others hold where their truth is given.
        """
        logits, objective = self._logits(model, batch), self.objective(model)
        target, previous, valid = batch["choices"].long(), batch["previous"].long(), batch["valid"].bool()
        sums: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}

        def total(value: Tensor) -> Tensor:
            return torch.where(valid, value.float(), 0.0).sum()

        for head in (head for head in HEADS if head.name in active):
            own, choices, before = logits[..., head.logits], target[..., head.choices], previous[..., head.choices]
            sums[head.name] = total(objective.losses(head, own, choices))
            with torch.no_grad():
                corrected = objective.correct(head, own)
                metrics[f"{head.name}/nll"] = total(-log_likelihood(head, corrected, choices))
                metrics[f"{head.name}/accuracy"] = total((likeliest(head, corrected) == choices).float().mean(-1))
                metrics[f"{head.name}/repeat"] = total((before == choices).float().mean(-1))
        return sums, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per term (chance, floor) as sums over the items of `counts`: chance is that of always saying `prior`."""
        loss, target, valid = self.config.loss, batch["choices"].long(), batch["valid"].bool()
        objective = Objective(torch.tensor(self.button_weights), loss.focal, loss.label_smoothing)
        logits, out = torch.tensor(self.prior).expand(*target.shape[:-1], -1), {}
        for head in HEADS:
            chance = objective.losses(head, logits[..., head.logits], target[..., head.choices])[valid].double().sum()
            out[head.name] = (chance.item(), int(valid.sum()) * objective.floor(head))
        return out

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Logits (B, T, 8 or classes) by term, NaN in frames that are not valid."""
        logits = self._logits(model, batch).masked_fill(~batch["valid"].bool()[..., None], torch.nan)
        return {head.name: logits[..., head.logits] for head in HEADS}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        whole = (batch[name].long() for name in ("action", "character", "previous", "choices"))
        return model(batch["numeric"], *whole)
