"""Networks for tests: random ones, one that counts material, runs made of them without training, Matrix0's names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matrixlib import config as configuration
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.hardware.runtime import resolve
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.matrix0 import ALIAS_PREFIX, ORIGINAL_PREFIX, POINTWISE, matrix0_name
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.task import ChessTask

CPU = {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False}
MATRIX0 = {"encoding": "matrix0", "value": {"kind": "scalar"}}


class Material(nn.Module):
    """Every move alike; the value is that of the pieces: a queen up wins seven times of eight."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding
        worth = torch.tensor([1.0, 3, 3, 5, 9, 0])
        self.register_buffer("worth", torch.cat([worth, -worth]))

    def forward(self, planes: Tensor, active: frozenset[str]) -> dict[str, Tensor]:
        balance = (planes[:, :12].sum((2, 3)) * self.worth).sum(1) / 4
        if self.encoding == "matrix0":  # White's and Black's; plane 12 says who is to move
            balance = balance * (2 * planes[:, 12, 0, 0] - 1)
        zero = torch.zeros_like(balance)
        return {
            "policy": zero[:, None].expand(-1, 4672),
            "value": torch.stack([balance / 2, zero - 9, -balance / 2], dim=1),
        }


def random_net(options: Mapping[str, Any] | None = None, **model: Any) -> Net:
    """A small network with random weights, in fp32 on the CPU. options: over the demo's, beside those of the model."""
    small = {"model": {"channels": 16, "blocks": 1, **model}, "runtime": CPU}
    settings = load_config("demo", configuration.merge(small, options or {}))
    task = ChessTask(settings)
    return Net(task.build_model(), task, resolve(settings.runtime, settings.train, settings.data))


def material_net(encoding: str = "oriented") -> Net:
    """`Material` in place of a network."""
    net = random_net(encoding=encoding)
    return Net(Material(encoding), net.task, net.runtime)


def save_run(folder: Path, net: Net) -> Path:
    """A run's folder with this network as its only checkpoint; returns the checkpoint's folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(configuration.to_yaml(net.task.config), encoding="utf-8")
    store = Checkpoints(folder / "checkpoints", 2)
    return store.save(7, {"model": net.model.state_dict()}, {}, wait=True)


def matrix0_state(model: PolicyValueNet) -> dict[str, Tensor]:
    """The model's state dict under Matrix0's keys and shapes, aliases included (474 keys for the 53M network)."""
    state = {}
    for name, tensor in model.state_dict().items():
        state[matrix0_name(name)] = tensor[:, :, None, None] if POINTWISE.fullmatch(name) else tensor
    state |= {
        key.replace(ORIGINAL_PREFIX, ALIAS_PREFIX): state[key] for key in list(state) if key.startswith(ORIGINAL_PREFIX)
    }
    return state
