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
from matrixlib.tasks.melee import losses, windows
from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.controller import AXES, HEADS, LOGITS
from matrixlib.tasks.melee.losses import Objective
from matrixlib.tasks.melee.model import MeleeNet
from matrixlib.tasks.melee.statistics import Statistics


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
        """Weight of each term."""
        loss = self.config.loss
        axes = dict(zip(AXES, (loss.main, loss.main, loss.c, loss.c), strict=True))
        return {"buttons": loss.buttons, **axes, "shoulder": loss.shoulder}

    @property
    def button_weights(self) -> list[float]:
        """(8,) weight of each button in the loss where it is pressed."""
        rare = self.config.loss.rare
        if not rare or self.statistics is None:
            return [1.0] * len(BUTTONS)
        return [weight**rare for weight in self.statistics.weights()]

    def objective(self, model: nn.Module) -> Objective:
        """What the losses are, and how probabilities follow from the logits of a network trained with them."""
        heads: Any = model.heads
        return self._objective(heads.weights)

    def _objective(self, weights: Tensor) -> Objective:
        return Objective(weights, self.config.loss.focal, self.config.loss.label_smoothing)

    @property
    def prior(self) -> list[float]:
        """(81,) logits of the constant predictor, from which a fresh network starts; a weight of a pressed button
        multiplies its odds."""
        logits = [0.0] * LOGITS if self.statistics is None else self.statistics.logits()
        return [x + math.log(w) for x, w in zip(logits, self.button_weights, strict=False)] + logits[len(BUTTONS) :]

    def build_model(self) -> MeleeNet:
        """A fresh fp32 network on the CPU, the same for the same seed; torch's random streams are left untouched."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return MeleeNet(self.config.model, self.config.data.window, self.prior, self.button_weights)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Valid frames, of every term the same."""
        return dict.fromkeys(self.weights, int(batch["valid"].sum()))

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums of the active terms over the valid frames, and their metrics (see losses.py)."""
        logits = self._logits(model, batch)
        with torch.autocast(logits.device.type, enabled=False):
            return losses.losses(self.objective(model), logits, batch, active)

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per term (chance, floor) as sums over the items of `counts`: chance is a constant predictor's."""
        return losses.bounds(self._objective(torch.tensor(self.button_weights)), self.prior, batch)

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Logits (B, T, 8 or classes) by term, NaN in frames that are not valid."""
        logits = self._logits(model, batch).masked_fill(~batch["valid"].bool()[..., None], torch.nan)
        return {head.name: logits[..., head.logits] for head in HEADS}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(
            batch["numeric"],
            batch["action"].long(),
            batch["character"].long(),
            batch["previous"].long(),
            batch["choices"].long(),
        )
