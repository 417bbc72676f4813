"""A trained network that plays: one frame of the game in, the controller for the next one out."""

from collections import deque
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from matrixlib.engine.network import Network
from matrixlib.tasks.melee import features
from matrixlib.tasks.melee.columns import SCENE
from matrixlib.tasks.melee.controller import LOGITS, NEUTRAL, Controller, controllers
from matrixlib.tasks.melee.model import MeleeNet, State, gumbel


class Player:
    """Plays one game with a network (`tasks.load`): holds what that remembers, and what it has decided.

    seed: of its decisions; another game needs another player, and another seed.
    temperature: of the decisions, 1 as the players did; 0 takes the likeliest of each part, which hardly ever presses a
    rare button. delay: frames from a state to the decision on it, by default the least that the network was trained
    with; a bot takes what passes between what it sees and what the game takes from it. ValueError for a temperature
    below 0, or a delay that the network was not trained with.
    """

    def __init__(self, net: Network, seed: int = 0, temperature: float = 1.0, delay: int | None = None) -> None:
        task: Any = net.task
        least, most = task.config.data.delay
        delay = least if delay is None else delay
        if not least <= delay <= most:
            raise ValueError(f"delay {delay}: the network was trained with {least} to {most} frames (data.delay)")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature {temperature}: give 1, more for variety, less for certainty, or 0")
        self._model = cast(MeleeNet, net.model)
        self._correct = task.objective(self._model).correct
        self._device = net.runtime.torch_device
        self._stream, self._temperature = torch.Generator().manual_seed(seed), temperature
        self._remembered: State = self._model.trunk.initial(1)
        self._delay = delay
        self._waiting = deque([NEUTRAL] * delay)
        self.decision = NEUTRAL
        """(13,) what was decided last, as classes."""
        self.logits = np.zeros(LOGITS, np.float32)
        """(81,) what the network said of the last frame."""

    @torch.inference_mode()
    def act(self, frame: np.ndarray) -> Controller:
        """The controller to hold in the next frame, from the state after this one: SCENE (1, 1), as `features.live`
        makes it. What was decided last is its `previous`, whatever it says.

        A network that was trained with a delay decides so many frames ahead: until then the controller rests.
        ValueError for another number of frames.
        """
        if frame.dtype != SCENE or frame.shape != (1, 1):
            raise ValueError("give one frame at a time, as features.live makes it")
        frame = frame.copy()
        frame["previous"], frame["delay"] = controllers(self.decision), self._delay
        inputs = {name: self._row(array) for name, array in features.inputs(frame).items()}
        x, self._remembered = self._model.step(**inputs, state=self._remembered)
        noise = self._temperature * gumbel(torch.rand(1, LOGITS, generator=self._stream)).to(self._device)
        logits, choices = self._model.heads.decide(x, noise, self._correct)
        self.logits, self.decision = logits[0].cpu().numpy(), choices[0].cpu().numpy()
        self._waiting.append(self.decision)
        return Controller.of(self._waiting.popleft())

    def _row(self, array: np.ndarray) -> Tensor:
        row = torch.from_numpy(array.reshape(1, -1)).to(self._device)
        return row if row.is_floating_point() else row.long()
