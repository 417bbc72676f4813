"""Using a trained network frame by frame: a player, an ONNX file."""

import copy
import json
from collections import deque
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from matrixlib.engine import onnx
from matrixlib.engine.network import Network
from matrixlib.tasks.melee import windows
from matrixlib.tasks.melee.columns import BUTTONS, CHARACTERS, DELAYS, SCENE
from matrixlib.tasks.melee.controller import AXES, LOGITS, NEUTRAL, Controller, controllers
from matrixlib.tasks.melee.model import MeleeNet, State, gumbel


class Player:
    """Plays one game with a network (`tasks.load`); holds its memory and pending decisions.

    seed: of its samples; use a new player, with another seed, for each game. temperature: 1 samples as players did; 0
    takes modes, which almost never press rare buttons. delay: frames from a state to its decision, default the fewest
    it was trained with; for a bot, the frames between what it sees and when its input counts. ValueError for a negative
    temperature or an untrained delay.
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
        self.decision = NEUTRAL  # (13,) what was decided last, as classes
        self.logits = np.zeros(LOGITS, np.float32)  # (81,) what the network said of the last frame

    @torch.inference_mode()
    def act(self, frame: np.ndarray) -> Controller:
        """The controller for the next frame, from the state after this one: SCENE (1, 1) from `windows.live`. Its
        `previous` is replaced by the last decision.

        With a delay decisions come so many frames ahead, neutral ones until then. ValueError for several frames.
        """
        if frame.dtype != SCENE or frame.shape != (1, 1):
            raise ValueError("give one frame at a time, as windows.live makes it")
        frame = frame.copy()
        frame["previous"], frame["delay"] = controllers(self.decision), self._delay
        rows = {name: torch.from_numpy(a.reshape(1, -1)).to(self._device) for name, a in windows.inputs(frame).items()}
        inputs = {name: row if row.is_floating_point() else row.long() for name, row in rows.items()}
        x, self._remembered = self._model.step(**inputs, state=self._remembered)
        noise = self._temperature * gumbel(torch.rand(1, LOGITS, generator=self._stream)).to(self._device)
        logits, choices = self._model.heads.decide(x, noise, self._correct)
        self.logits, self.decision = logits[0].cpu().numpy(), choices[0].cpu().numpy()
        self._waiting.append(self.decision)
        return Controller.of(self._waiting.popleft())


class MeleeOnnx(onnx.OnnxModule):
    """One frame of the network for export: memory goes in as `memory_0`, ... and out as `next_memory_0`, ...; zeros
    before the first frame. `noise` (b, 81) decides: zeros give modes, `gumbel` samples."""

    def __init__(self, model: MeleeNet, task: Any) -> None:
        super().__init__()
        self.model, self._correct, self._delays = model, task.objective(model).correct, task.config.data.delay
        names = [f"memory_{number}" for number in range(len(model.trunk.initial(1)))]
        self.inputs = ("numeric", "action", "character", "previous", "noise", *names)
        self.outputs = ("logits", "choices", *(f"next_{name}" for name in names))

    def forward(
        self,
        numeric: Tensor,
        action: Tensor,
        character: Tensor,
        previous: Tensor,
        noise: Tensor,
        memory_0: Tensor | None = None,
        memory_1: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """(b, N), (b, 2), (b, 2), (b, 13), (b, 81), the trunk's memories -> (b, 81), (b, 13), memories."""
        memory = tuple(one for one in (memory_0, memory_1) if one is not None)
        x, after = self.model.step(numeric, action, character, previous, memory)
        logits, choices = self.model.heads.decide(x, noise, self._correct)
        return logits, choices, *after

    def metadata(self) -> dict[str, str]:
        """JSON: meaning of `numeric` and `choices`; range of `delay` in frames, an input in `delay_unit`."""
        choices = [*BUTTONS, *AXES, "shoulder"]
        facts = {"numeric": windows.INPUTS, "choices": choices, "delay": self._delays, "delay_unit": DELAYS}
        return {"task": "melee"} | {name: json.dumps(value) for name, value in facts.items()}


def export(model: MeleeNet, task: Any, path: Path | str) -> onnx.OnnxFile:
    """Write a Melee network as ONNX; errors as `engine.onnx.export`. Compared over random games of three frames."""
    module = MeleeOnnx(copy.deepcopy(model).cpu().float().eval(), task)
    return onnx.export(module, path, [inputs for rows in (1, 4) for inputs in frames(module, rows, 3)])


@torch.inference_mode()
def frames(module: MeleeOnnx, rows: int, count: int, seed: int = 0) -> list[onnx.Inputs]:
    """Random inputs of `count` consecutive frames of `rows` games."""
    rng = np.random.default_rng([seed, rows])
    memory, out = module.model.trunk.initial(rows), list[onnx.Inputs]()
    for number in range(count):
        noise = gumbel(torch.from_numpy(rng.random((rows, LOGITS), np.float32))) * (number % 2)
        arrays = (
            rng.standard_normal((rows, len(windows.INPUTS)), np.float32),
            rng.integers(0, windows.ACTIONS, (rows, 2)),
            rng.integers(0, CHARACTERS, (rows, 2)),
            np.tile(NEUTRAL, (rows, 1)),
        )
        inputs: list[np.ndarray] = [*arrays, noise.numpy(), *(one.numpy() for one in memory)]
        out.append(inputs)
        memory = module(*(torch.from_numpy(array) for array in inputs))[2:]
    return out
