"""Blocks with their gradients and updates; outputs; dead units, planted and found exactly; what went bad first."""

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.config import dump, merge
from matrixlib.engine.diagnostics import (
    DEAD_ROWS,
    block_of,
    block_statistics,
    block_warnings,
    collapse_warnings,
    compare_with_chance,
    dead_units,
    dead_warnings,
    first_nonfinite,
    output_statistics,
    snapshot,
)
from matrixlib.engine.stats import Stats
from matrixlib.engine.task import Batch
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.blocks import ResidualBlock
from matrixlib.tasks.chess.config import ModelConfig
from matrixlib.tasks.chess.model import PLANES, PolicyValueNet


def chess_net(**changes: Any) -> PolicyValueNet:
    small = {"channels": 16, "blocks": 2, "policy": {"channels": 16}, "value": {"channels": 16, "hidden": 16}}
    model = merge(dump(load_config("demo"))["model"], merge(small, changes))
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


def test_blocks_of_a_chess_network() -> None:
    net = chess_net(blocks=3, ssl=["piece", "pin"], chess_features=True, auxiliary=True, attention={"every": 2})
    tower = [f"tower.{index}" for index in range(4)]
    heads = ["policy_head", "value_head", "ssl_heads.piece", "ssl_heads.pin"]
    auxiliary = ["auxiliary.from_square", "auxiliary.move_type"]
    blocks = dict.fromkeys(block_of(net, name) for name, _ in net.named_parameters())
    assert list(blocks) == ["stem", "features", *tower, *heads, *auxiliary]
    assert list(block_statistics(net, snapshot(net))) == ["stem", "features", *tower, *heads], "no frozen ones"


def test_norms_and_ratio_of_one_update() -> None:
    model = ToyTask().build_model()
    model.plane.requires_grad_(False)
    before = snapshot(model)
    model(torch.randn(8, 6))["class"].logsumexp(1).sum().backward()
    model.norm.bias.grad = None
    with torch.no_grad():
        for name in ("weight", "bias"):
            model.inner.get_parameter(name).mul_(1.03)
        model.classes.weight.fill_(0.5)
    found = block_statistics(model, before)
    assert set(found) == {"inner", "norm", "classes"}
    size = torch.cat([before["inner.weight"].flatten(), before["inner.bias"]]).norm().item()
    gradient = torch.cat([model.inner.weight.grad.flatten(), model.inner.bias.grad]).norm().item()
    expected = {"weight": 1.03 * size, "gradient": gradient, "update": 0.03 * size, "ratio": 0.03}
    assert found["inner"] == pytest.approx(expected, rel=1e-4)
    assert found["norm"]["gradient"] == pytest.approx(model.norm.weight.grad.norm().item())
    assert "ratio" not in found["classes"]  # it starts at zero
    model.zero_grad()
    assert all("gradient" not in row for row in block_statistics(model, before).values())
    assert len(block_statistics(torch.compile(model), snapshot(torch.compile(model)))) == 3


def test_warnings_about_blocks_that_stand_still_or_jump() -> None:
    row = {"weight": 1.0, "gradient": 1.0, "update": 0.01, "ratio": 0.01}
    still, jump = row | {"update": 0.0, "ratio": 0.0}, row | {"ratio": 0.2}
    assert block_warnings({"a": row}, 0.1) == []
    assert block_warnings({"a": still | {"gradient": 0.0}}, 0.1) == []
    first, second = block_warnings({"a": row, "b": still, "c": jump}, 0.1)
    assert "move b," in first
    assert "c (20%)" in second
    assert block_warnings({"c": jump}, 0.2) == []
    assert "4 (20%) and 3 more" in block_warnings({str(i): jump for i in range(8)}, 0.1)[0]


def numbers(dead: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Of the dead units, by activation that has any."""
    return {name: tuple(flags.nonzero().flatten().tolist()) for name, flags in dead.items() if flags.any()}


def test_units_are_looked_at_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes as long as importing torch. Before the other tests of dead units, as a function remembers."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    assert numbers(dead_units(Outputs(), nn.Linear(4, 2), normal((64, 4)), toy_runtime())[1]) == {}


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_dead_relu_channels_are_found_exactly(norm: str) -> None:
    value = {"activation": "relu"}
    net = chess_net(activation="relu", norm={"blocks": norm, "stem_heads": norm}, value=value).train()
    second = net.tower[1].norms[1]  # of the activations of this block
    with torch.no_grad():
        for layer, units in (net.policy_head.input.norm, [2, 5]), (second, [0, 7, 11]), (net.value_head.fc1, [3]):
            layer.weight[units], layer.bias[units] = 0, -1e3
    rows, dead = dead_units(Outputs(), net, normal((256, PLANES, 8, 8), 3), toy_runtime(), minimum=512)
    assert rows == 512
    expected = {"policy_head.input.relu": (2, 5), "tower.1.relu.2": (0, 7, 11), "value_head.relu": (3,)}
    assert numbers(dead) == expected
    assert (len(dead["policy_head.input.relu"]), len(dead["tower.0.se.relu"])) == (16, 8)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
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
        _, dead = dead_units(Outputs(), net, normal((32, PLANES, 8, 8), 3), runtime, minimum=96)
        assert numbers(dead) == {f"stem.{name}": (1, 9)}
        assert set(dead) >= {f"tower.0.{name}", f"tower.0.{name}.2", f"tower.0.se.{name}"}


def test_dead_units_are_counted_once_where_memory_runs_out_half_way() -> None:
    """The activations before the one that had no room have been looked at already."""

    class Hungry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = F.silu(x)
            if len(x) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return out

    # alive by a hair over these rows, and dead where the first six count twice
    batch = {"x": torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 3 + [[1.0, 3e-4], [-1.0, -3e-4]] * 3)}
    rows, dead = dead_units(Outputs(), Hungry(), [batch], toy_runtime())
    assert (rows, numbers(dead)) == (12, {})


def test_small_deviations_beside_a_large_mean() -> None:
    """A unit is dead below a deviation of 1e-4, also where fp32 sums of squares could not tell."""
    deviations, drift = torch.tensor([0.0, 0.5e-4, 2e-4, 1.0]), iter([0.0, 0.0, 1e-3] * 2)

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values = 20 + deviations * x / x.std(0)
            values[:, 0] += next(drift)  # constant within a batch, but not over them
            return F.silu(values)

    assert numbers(dead_units(Outputs(), Fixed(), normal((2100, 4), 3), toy_runtime())[1]) == {"silu": (0, 1)}
    next(drift)
    assert numbers(dead_units(Outputs(), Fixed(), normal((1400, 4), 3), toy_runtime())[1]) == {"silu": (1,)}


def test_a_single_batch_counts_too_many() -> None:
    """A unit that only one row in a thousand excites is alive; over a few rows it looks dead."""

    class Rare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x - torch.tensor([0.0, 2.5]))

    rows, dead = dead_units(Outputs(), Rare(), normal((64, 2), 1), toy_runtime())
    assert (rows, numbers(dead)) == (64, {"relu": (1,)})
    assert dead_warnings(rows, dead, 0.05) == [], "too few rows to tell"
    assert "are dead over 4096 rows: relu (1 of 2)" in dead_warnings(DEAD_ROWS, dead, 0.05)[0]
    rows, dead = dead_units(Outputs(), Rare(), normal((64, 2), 100), toy_runtime())
    assert (rows, numbers(dead)) == (DEAD_ROWS, {})


def test_every_way_of_writing_an_activation_and_every_layout() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x).relu() + torch.relu_(x[:, :4] + 0)
            tokens = nn.functional.relu6(x[:, None, :].expand(-1, 7, -1))  # (B, tokens, C)
            return F.gelu(tokens).sum((1, 2)).relu()  # a vector over rows has no units

    _, dead = dead_units(Outputs(), Mixed(), normal((16, 6)), toy_runtime())
    names = ["inner.1.relu", "relu", "relu.2", "relu6", "gelu"]
    assert {name: len(flags) for name, flags in dead.items()} == dict.fromkeys(names, 4)


# Outputs, first losses


def test_masked_entries_do_not_count_and_infinities_do() -> None:
    values = torch.tensor([1.0, -5.0, torch.nan, 2.0, torch.inf, torch.nan])

    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            nothing = torch.full((3,), torch.nan)
            return {"head": values, "half": values[:2].half(), "none": nothing, "empty": values[:0]}

    table = output_statistics(Outputs(), Fixed(1, 1), toy_batch(4), toy_runtime())
    finite = np.array([1.0, -5.0, 2.0])
    assert set(table) == {"head", "half"}
    expected = {"mean": finite.mean(), "std": finite.std(), "max": 5.0, "infinite": 1 / 4}
    assert {name: table["head"][name] for name in expected} == pytest.approx(expected)
    assert table["half"]["infinite"] == 0


def test_an_output_that_says_the_same_for_every_row_is_told() -> None:
    task = ToyTask()
    model = task.build_model()
    nn.init.normal_(model.classes.weight)
    table = output_statistics(task, model, toy_batch(16), toy_runtime())
    assert collapse_warnings(table, task.weights, 16, 1e-4) == []
    model.classes.weight.data.zero_()  # what is left is the bias
    model.classes.bias.data.copy_(torch.tensor([3.0, 0.0, -3.0]))
    table = output_statistics(task, model, toy_batch(16), toy_runtime())
    assert table["class"]["std"] > 2
    (message,) = collapse_warnings(table, task.weights, 16, 1e-4)
    assert "is said by class: collapsed" in message
    assert collapse_warnings(table, {"class": 0.0}, 16, 1e-4) == [], "an idle head"
    assert collapse_warnings(table, task.weights, 1, 1e-4) == []


def test_first_losses_beside_chance() -> None:
    task, batch = ToyTask(), toy_batch(64)
    counts = task.counts(batch)
    chance = task.bounds(batch)["plane"][0] / counts["plane"]
    losses = {"class": 1.2, "plane": chance * 1.1}
    table, messages = compare_with_chance(task, batch, Stats(1, 1.0, 1.0, losses=losses, counts=counts), 0.15)
    assert messages == []
    assert table["class"] == {"loss": 1.2, "chance": pytest.approx(math.log(3)), "floor": 0.0}
    for bad in (math.log(3) * 1.16, math.log(3) * 0.84, math.nan):
        _, (message,) = compare_with_chance(task, batch, Stats(1, bad, 1.0, losses={"class": bad}, counts=counts), 0.15)
        assert "class" in message
        assert "1.0986" in message


# The first module that went bad


Change = Callable[[Tensor], Tensor]


class Head(nn.Module):
    """Two linear layers; `between` is a function of its own, `after` another."""

    def __init__(self, between: Change = torch.relu, after: Change = torch.clone) -> None:
        super().__init__()
        self.linear1, self.norm, self.linear2 = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.linear2(self.norm(self.between(self.linear1(x)))))


class Net(nn.Module):
    """A trunk, in place activations, two heads, a dictionary of outputs."""

    def __init__(self, checkpointing: bool = False, **functions: Change) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Tanh())
        self.policy, self.value = Head(), Head(**functions)
        self.scale = nn.Parameter(torch.ones(6))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, heads: tuple[str, ...] = ("policy", "value")) -> dict[str, Any]:
        x = x * self.scale
        y = checkpoint(self.trunk, x, use_reentrant=False) if self.checkpointing else self.trunk(x)
        return {"heads": [self.get_submodule(head)(y) for head in heads]}


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).train()


def inputs() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def square(outputs: list[Tensor], power: int = 2) -> Tensor:
    return torch.stack([(output.float() ** power).sum() for output in outputs]).sum()


def fault(
    model: nn.Module,
    x: Tensor | None = None,
    loss: Callable[[list[Tensor]], Tensor] = square,
    dtype: torch.dtype | None = None,
) -> str | None:
    def replay() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(inputs() if x is None else x)["heads"]
        loss(outputs).backward()

    return first_nonfinite(replay, model)


OPTIONS = [{}, {"checkpointing": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_weight_that_is_nan(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    for name in ("trunk.0", "trunk.2", "policy.linear2", "value.norm", "value.linear2"):
        model = net(**options)
        assert fault(model, dtype=dtype) is None
        with torch.no_grad():
            model.get_submodule(name).get_parameter("bias")[0] = torch.nan
        assert fault(model, dtype=dtype) == f"{name} (forward output; its bias is not finite)"
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("options", OPTIONS)
def test_an_input_that_is_not_finite(options: dict[str, Any]) -> None:
    x = inputs()
    x[3, 2] = torch.inf
    assert fault(net(**options), x) == "the input is already not finite"
    model = net(**options)

    def masked() -> None:  # the outputs are finite again, but the gradient of the first layer is not
        torch.where(torch.arange(5)[:, None] == 3, 0.0, model(x)["heads"][0]).sum().backward()

    assert first_nonfinite(masked, model) == "the input is already not finite"


def test_a_function_between_two_layers_is_its_modules_fault() -> None:
    assert fault(net(between=lambda x: x.abs().neg().log())) == "value (forward output)"
    model = net(after=lambda x: x / 0)
    assert fault(model) == "value (forward output)"
    with torch.no_grad():
        model.scale[2] = torch.inf  # a parameter outside of layers, handed on to the trunk
    assert fault(model) == "the network (forward output; its scale is not finite)"


def root(x: Tensor) -> Tensor:
    return (x * 0).sqrt()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_in_the_backward_pass_alone(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    """The square root of 0 has an infinite slope."""
    after = fault(net(after=root, **options), dtype=dtype, loss=lambda outputs: square(outputs, power=1))
    assert after == fault(net(between=root, **options), dtype=dtype) == "value (gradient, SqrtBackward0)"


def test_a_weights_gradient_alone() -> None:
    """What overflows on the way to a weight passes no module boundary."""
    model = net()
    with torch.no_grad():
        model.trunk[0].weight.zero_()
        model.trunk[0].bias.fill_(1.0)
    text = fault(model, torch.full((5, 6), 3e38), loss=lambda outputs: 1e3 * square(outputs))
    assert text == "trunk.0 (gradient, AddmmBackward0)"


@pytest.mark.parametrize("options", OPTIONS)
def test_in_the_loss_itself(options: dict[str, Any]) -> None:
    def broken(outputs: list[Tensor]) -> Tensor:
        return square(outputs[:1]) + root(outputs[1]).sum()

    assert fault(net(**options), loss=broken) == "the loss (the gradient that it gives value)"
    target = torch.tensor(torch.nan)
    assert "the loss" in str(fault(net(**options), loss=lambda outputs: square(outputs) * target))
    # An infinite loss with a finite gradient: nothing in the network is to blame.
    assert fault(net(**options), loss=lambda outputs: square(outputs) + torch.inf) is None


@pytest.mark.parametrize("options", OPTIONS)
def test_numbers_stay_as_they_are(options: dict[str, Any]) -> None:
    """Same bits with and without checks, under dropout too; and no hook is left."""
    results = []
    for checked in (False, True):
        model = net(**options)
        model.trunk.append(nn.Dropout(0.5))
        torch.manual_seed(3)

        def replay(model: nn.Module = model) -> None:
            square(model(inputs())["heads"]).backward()

        assert (first_nonfinite(replay, model) if checked else replay()) is None  # type: ignore[func-returns-value]
        results.append([p.grad for p in model.parameters()])
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
