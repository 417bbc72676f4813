"""The network for Melee as an ONNX file: one frame in, the logits of all parts and the decisions out."""

import copy
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from matrixlib.engine.onnx import Inputs, OnnxFile, OnnxModule
from matrixlib.engine.onnx import export as write
from matrixlib.tasks.melee.columns import BUTTONS, DELAYS
from matrixlib.tasks.melee.controller import AXES, LOGITS, NEUTRAL
from matrixlib.tasks.melee.features import ACTIONS, CHARACTERS, INPUTS
from matrixlib.tasks.melee.model import MeleeNet, gumbel
from matrixlib.tasks.melee.task import MeleeTask


class MeleeOnnx(OnnxModule):
    """A frame of the network as a bot calls it: what is remembered comes in as `memory_0`, ... and goes out as
    `next_memory_0`, ...; zeros before the first frame. `noise` (b, 81) decides: zeros for the likeliest, `gumbel` for a
    sample.
    """

    def __init__(self, model: MeleeNet, task: MeleeTask) -> None:
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
        """(b, N), (b, 2), (b, 2), (b, 13), (b, 81), as many memories as the trunk has -> (b, 81), (b, 13), memories."""
        memory = tuple(one for one in (memory_0, memory_1) if one is not None)
        x, after = self.model.step(numeric, action, character, previous, memory)
        logits, choices = self.model.heads.decide(x, noise, self._correct)
        return logits, choices, *after

    def metadata(self) -> dict[str, str]:
        """As JSON: what each number of `numeric` and of `choices` is, the least and the greatest `delay` in frames that
        the network was trained with (its input is in units of `delay_unit`)."""
        choices = [*BUTTONS, *AXES, "shoulder"]
        facts = {"numeric": INPUTS, "choices": choices, "delay": self._delays, "delay_unit": DELAYS}
        return {"task": "melee"} | {name: json.dumps(value) for name, value in facts.items()}


def export(model: MeleeNet, task: MeleeTask, path: Path | str) -> OnnxFile:
    """Write a network for Melee as ONNX, with the delays that it was trained with; errors as of `engine.onnx.export`.

    Compared over games of three frames at random, one and four at a time, sampled and not.
    """
    module = MeleeOnnx(copy.deepcopy(model).cpu().float().eval(), task)
    return write(module, path, [inputs for rows in (1, 4) for inputs in frames(module, rows, 3)])


@torch.inference_mode()
def frames(module: MeleeOnnx, rows: int, count: int, seed: int = 0) -> list[Inputs]:
    """Inputs of `count` frames at random that follow each other, of `rows` games."""
    rng = np.random.default_rng([seed, rows])
    memory, out = module.model.trunk.initial(rows), list[Inputs]()
    for number in range(count):
        noise = gumbel(torch.from_numpy(rng.random((rows, LOGITS), np.float32))) * (number % 2)
        arrays = (
            rng.standard_normal((rows, len(INPUTS)), np.float32),
            rng.integers(0, ACTIONS, (rows, 2)),
            rng.integers(0, CHARACTERS, (rows, 2)),
            np.tile(NEUTRAL, (rows, 1)),
        )
        inputs: list[np.ndarray] = [*arrays, noise.numpy(), *(one.numpy() for one in memory)]
        out.append(inputs)
        memory = module(*(torch.from_numpy(array) for array in inputs))[2:]
    return out
