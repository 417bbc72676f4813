"""Blocks with their gradients and updates; dead units, planted and found exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.config import dump, merge
from matrixlib.engine.anatomy import (
    DEAD_ROWS,
    DeadUnits,
    block_of,
    block_statistics,
    block_warnings,
    dead_units,
    snapshot,
)
from matrixlib.engine.task import Batch
from matrixlib.tasks import load_config as load
from matrixlib.tasks.chess.blocks import ResidualBlock
from matrixlib.tasks.chess.config import ModelConfig
from matrixlib.tasks.chess.model import PLANES, PolicyValueNet


def chess_net(**changes: Any) -> PolicyValueNet:
    small = {"channels": 16, "blocks": 2, "policy": {"channels": 16}, "value": {"channels": 16, "hidden": 16}}
    model = merge(dump(load("demo"))["model"], merge(small, changes))
    torch.manual_seed(0)
    net = PolicyValueNet(ModelConfig.model_validate(model))
    blocks = [block for block in net.tower if isinstance(block, ResidualBlock)]
    for layer in (net.value_head.fc1, net.value_head.fc2, *(block.se.reduce for block in blocks)):
        # Behind an average over the board, noise alone does not excite every unit.
        nn.init.constant_(layer.bias, 5.0)
        nn.init.uniform_(layer.weight)
    return net


class Outputs(ToyTask):
    """`outputs` of any model over rows of `x`."""

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        assert not model.training
        out = model(batch["x"])
        return out if isinstance(out, dict) else {"out": out}


def normal(shape: tuple[int, ...], batches: int = 1) -> Iterator[Batch]:
    stream = torch.Generator().manual_seed(1)
    for _ in range(batches):
        yield {"x": torch.randn(shape, generator=stream)}


def blocks(model: nn.Module) -> list[str]:
    return list(dict.fromkeys(block_of(model, name) for name, _ in model.named_parameters()))


def test_blocks_of_a_chess_network() -> None:
    net = chess_net(
        blocks=3, ssl=["piece", "pin"], chess_features=True, auxiliary=True, attention={"every": 2}
    )
    tower = [f"tower.{index}" for index in range(4)]
    heads = ["policy_head", "value_head", "ssl_heads.piece", "ssl_heads.pin"]
    auxiliary = ["auxiliary.from_square", "auxiliary.move_type"]
    assert blocks(net) == ["stem", "features", *tower, *heads, *auxiliary]
    assert list(block_statistics(net)) == ["stem", "features", *tower, *heads]  # the frozen ones do not count


def test_blocks_of_other_models() -> None:
    assert blocks(ToyTask().build_model()) == ["inner", "norm", "classes", "plane"]
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))) == ["0", "2.0"]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.offsets = nn.ParameterList([torch.ones(1), torch.ones(1)])

    assert blocks(Odd()) == ["scale", "offsets"]
    assert block_statistics(nn.ReLU()) == {}


def test_norms_and_ratio_of_one_update() -> None:
    model = ToyTask().build_model()
    model.plane.requires_grad_(False)
    before = snapshot(model)
    assert set(before) == {name for name, p in model.named_parameters() if p.requires_grad}
    x = torch.randn(8, 6)
    model(x)["class"].logsumexp(1).sum().backward()
    model.norm.bias.grad = None
    with torch.no_grad():
        for name in ("weight", "bias"):
            model.inner.get_parameter(name).mul_(1.03)
        model.classes.weight.fill_(0.5)
    found = block_statistics(model, before)
    assert set(found) == {"inner", "norm", "classes"}
    flat = torch.cat([before["inner.weight"].flatten(), before["inner.bias"]])
    gradient = torch.cat([model.inner.weight.grad.flatten(), model.inner.bias.grad])
    assert found["inner"]["ratio"] == pytest.approx(0.03, rel=1e-4)
    assert found["inner"]["update"] == pytest.approx(0.03 * flat.norm().item(), rel=1e-4)
    assert found["inner"]["weight"] == pytest.approx(1.03 * flat.norm().item(), rel=1e-4)
    assert found["inner"]["gradient"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert found["norm"]["gradient"] == pytest.approx(model.norm.weight.grad.norm().item())
    assert "ratio" not in found["classes"]  # it starts at zero
    assert found["classes"]["update"] == pytest.approx(0.5 * math.sqrt(36))
    assert all(set(row) <= {"gradient", "weight"} for row in block_statistics(model).values())
    model.zero_grad()
    assert all(set(row) == {"weight"} for row in block_statistics(model).values())
    assert len(block_statistics(torch.compile(model), snapshot(torch.compile(model)))) == 3


def test_warnings_about_blocks_that_stand_still_or_jump() -> None:
    row = {"weight": 1.0, "gradient": 1.0, "update": 0.01, "ratio": 0.01}
    still, jump = row | {"update": 0.0, "ratio": 0.0}, row | {"ratio": 0.2}
    assert block_warnings({"a": row}) == []
    assert block_warnings({"a": {"weight": 1.0}, "b": {"weight": 1.0, "gradient": 1.0}}) == []  # not measured
    assert block_warnings({"a": still | {"gradient": 0.0}}) == []
    messages = block_warnings({"a": row, "b": still, "c": jump})
    assert len(messages) == 2
    assert "move b," in messages[0]
    assert "c (20%)" in messages[1]
    assert block_warnings({"c": jump}, warming_up=True) == []
    many = block_warnings({str(i): jump for i in range(8)})
    assert "4 (20%) and 3 more" in many[0]


def test_a_weight_that_the_optimiser_does_not_hold_is_named() -> None:
    model = ToyTask().build_model()
    optimiser = torch.optim.AdamW(model.inner.parameters(), lr=1e-3)
    before = snapshot(model)
    model(torch.randn(8, 6))["class"].logsumexp(1).sum().backward()
    optimiser.step()
    assert any("classes" in message for message in block_warnings(block_statistics(model, before)))


def plant_relu(norm: nn.Module, channels: tuple[int, ...]) -> None:
    with torch.no_grad():
        norm.get_parameter("weight")[list(channels)] = 0
        norm.get_parameter("bias")[list(channels)] = -1e3


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_dead_relu_channels_are_found_exactly(norm: str) -> None:
    value = {"activation": "relu"}
    net = chess_net(activation="relu", norm={"blocks": norm, "stem_heads": norm}, value=value).train()
    plant_relu(net.policy_head.input.norm, (2, 5))
    plant_relu(net.tower[1].norms[1], (0, 7, 11))  # the second activation of this block
    with torch.no_grad():
        net.value_head.fc1.weight[3], net.value_head.fc1.bias[3] = 0, -1e3
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    found = dead_units(Outputs(), net, normal((256, PLANES, 8, 8), 3), toy_runtime(), minimum=512)
    assert found.rows == 512
    assert {name: units for name, units in found.dead.items() if units} == {
        "policy_head.input.relu": (2, 5),
        "tower.1.relu.2": (0, 7, 11),
        "value_head.relu": (3,),
    }
    assert found.widths["policy_head.input.relu"] == 16
    assert found.widths["tower.0.se.relu"] == 8
    assert found.shares["policy_head.input.relu"] == 2 / 16
    assert found.share == 6 / sum(found.widths.values())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] == hooks
    assert net.training
    if norm == "batch":
        assert net.stem.norm.num_batches_tracked == 0


@pytest.mark.parametrize("name", ["silu", "gelu", "mish"])
def test_dead_smooth_channels_are_found_exactly(name: str) -> None:
    net = chess_net(activation=name)
    with torch.no_grad():
        net.stem.norm.weight[[1, 9]] = 0
        net.stem.norm.bias[9] = 3.0  # constant, and far from 0: a difference of squares would miss it
        net.stem.norm.weight[4] = 1e-3  # weak, not dead
    for dtype in ("fp32", "bf16"):
        runtime = toy_runtime(dtype=dtype)
        found = dead_units(Outputs(), net, normal((32, PLANES, 8, 8), 3), runtime, minimum=96)
        assert {key: units for key, units in found.dead.items() if units} == {f"stem.{name}": (1, 9)}
        assert set(found.widths) >= {f"tower.0.{name}", f"tower.0.{name}.2", f"tower.0.se.{name}"}


def test_small_deviations_beside_a_large_mean() -> None:
    """A unit is dead below a deviation of 1e-4, also where fp32 sums of squares could not tell."""
    deviations = torch.tensor([0.0, 0.5e-4, 2e-4, 1.0])
    drift = iter(torch.tensor([0.0, 0.0, 0.0, 1e-3]))

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values = 20 + deviations * x / x.std(0)
            values[:, 0] += next(drift)  # constant within a batch, but not over them
            return F.silu(values)

    batches = list(normal((2000, 4), 4))
    found = dead_units(Outputs(), Fixed(), batches[:3], toy_runtime())
    assert found.dead == {"silu": (0, 1)}
    drift = iter(torch.tensor([0.0, 0.0, 1e-3]))
    assert dead_units(Outputs(), Fixed(), batches[:3], toy_runtime()).dead == {"silu": (1,)}


def test_a_single_batch_counts_too_many() -> None:
    """A unit that only one row in a thousand excites is alive; over a few rows it looks dead."""

    class Rare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x - torch.tensor([0.0, 2.5]))

    few = dead_units(Outputs(), Rare(), normal((64, 2), 1), toy_runtime())
    assert few.dead == {"relu": (1,)}
    assert few.rows == 64
    assert few.warnings() == []  # too few rows for a verdict
    many = dead_units(Outputs(), Rare(), normal((64, 2), 100), toy_runtime())
    assert many.rows == DEAD_ROWS
    assert many.dead == {"relu": ()}


def test_every_way_of_writing_an_activation_and_every_layout() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x).relu() + torch.relu_(x[:, :4] + 0)
            tokens = nn.functional.relu6(x[:, None, :].expand(-1, 7, -1))  # (B, tokens, C)
            return F.gelu(tokens).sum((1, 2)).relu()  # a vector over rows has no units

    found = dead_units(Outputs(), Mixed(), normal((16, 6)), toy_runtime())
    assert found.widths == {"inner.1.relu": 4, "relu": 4, "relu.2": 4, "relu6": 4, "gelu": 4}


def test_models_without_activations_and_models_that_fail() -> None:
    found = dead_units(Outputs(), nn.Linear(6, 2), normal((4, 6)), toy_runtime())
    assert found == DeadUnits(4, {}, {})
    assert found.share == 0
    assert dead_units(Outputs(), nn.Linear(6, 2), [], toy_runtime()).rows == 0
    model = nn.Sequential(nn.Linear(6, 2), nn.ReLU(), nn.Linear(3, 1)).train()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        dead_units(Outputs(), model, normal((4, 6)), toy_runtime())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_toy_task_and_a_compiled_model() -> None:
    model = torch.compile(ToyTask(norm="batch").build_model(), backend="eager")
    found = dead_units(ToyTask(), model, [toy_batch(64)], toy_runtime())
    assert found.widths == {"relu": 12}


def test_dead_warning_names_the_worst() -> None:
    widths = {"a": 100, "b": 100, "c": 100}
    units = {"a": tuple(range(5)), "b": tuple(range(6)), "c": tuple(range(50))}
    assert DeadUnits(DEAD_ROWS - 1, widths, units).warnings() == []
    assert DeadUnits(DEAD_ROWS, widths, units).warnings() == [
        "more than 5% of the units are dead over 4096 rows: c (50 of 100), b (6 of 100)"
    ]
