"""Dropout that changes in the course of a training, in stages: a compiled network is compiled anew at each."""

import warnings
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


class Dropout:
    """The rates of a network's dropout, times a factor.

    Those are `p` of torch's own modules, and the float `dropout` that attention and recurrent layers hand to a kernel.
    """

    def __init__(self, model: nn.Module, stages: Sequence[float]) -> None:
        """stages: factors, each for an equal part of the run; none: nothing is ever changed."""
        self._stages, self.factor = stages, 1.0
        self._rates: list[tuple[nn.Module, str, float]] = []
        for module in model.modules():
            name = "p" if isinstance(module, _DropoutNd) else "dropout"
            rate = getattr(module, name, None)
            if isinstance(rate, float) and rate:
                self._rates.append((module, name, rate))
        if stages and not self._rates:
            text = "train.dropout_stages changes nothing, as the network has no dropout; set model.dropout above 0"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def enter(self, progress: float) -> bool:
        """Set the rates of the stage in force, where it is another one; whether they are other ones now.

        progress: share of the run that is done; by it alone a resumed run has the same.
        """
        last = len(self._stages) - 1
        factor = self._stages[min(int(progress * len(self._stages)), last)] if self._stages else 1.0
        if factor == self.factor:
            return False
        self.factor = factor
        for module, name, rate in self._rates:
            setattr(module, name, factor * rate)
        return bool(self._rates)
