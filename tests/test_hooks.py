"""Faults planted in every place, and the first module that went bad named."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from matrixlib.config import dump, merge
from matrixlib.engine.hooks import FiniteChecks, finite_checks, first_nonfinite
from matrixlib.tasks import load_config as load
from matrixlib.tasks.chess.config import ModelConfig
from matrixlib.tasks.chess.model import PLANES, PolicyValueNet

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


def rows() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def square(outputs: list[Tensor]) -> Tensor:
    return torch.stack([output.float().square().sum() for output in outputs]).sum()


def found(
    model: nn.Module,
    x: Tensor | None = None,
    loss: Callable[[list[Tensor]], Tensor] = square,
    dtype: torch.dtype | None = None,
) -> str | None:
    def replay() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(rows() if x is None else x)["heads"]
        loss(outputs).backward()

    return first_nonfinite(replay, model)


OPTIONS = [{}, {"checkpointing": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_weight_that_is_nan(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    for name in ("trunk.0", "trunk.2", "policy.linear2", "value.norm", "value.linear2"):
        model = net(**options)
        assert found(model, dtype=dtype) is None
        with torch.no_grad():
            model.get_submodule(name).get_parameter("bias")[0] = torch.nan
        assert found(model, dtype=dtype) == f"{name} (forward output; its bias is not finite)"
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_parameter_outside_of_layers() -> None:
    model = net()
    with torch.no_grad():
        model.scale[2] = torch.inf
    # The network hands infinities on to its trunk, and is the one that made them.
    assert found(model) == "the network (forward output; its scale is not finite)"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_input_that_is_not_finite(bad: float, options: dict[str, Any]) -> None:
    x = rows()
    x[3, 2] = bad
    assert found(net(**options), x) == "the input is already not finite"
    model = net(**options)

    def masked() -> None:  # the outputs are finite again, but the gradient of the first layer is not
        torch.where(torch.arange(5)[:, None] == 3, 0.0, model(x)["heads"][0]).sum().backward()

    assert first_nonfinite(masked, model) == "the input is already not finite"


def test_a_function_between_two_layers_is_its_modules_fault() -> None:
    assert found(net(between=lambda x: x.abs().neg().log())) == "value (forward output)"
    assert found(net(after=lambda x: x / 0)) == "value (forward output)"


def root(x: Tensor) -> Tensor:
    return (x * 0).sqrt()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_in_the_backward_pass_alone(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    """The square root of 0 has an infinite slope."""
    assert found(net(after=root, **options), dtype=dtype, loss=total) == "value (gradient, SqrtBackward0)"
    assert found(net(between=root, **options), dtype=dtype) == "value (gradient, SqrtBackward0)"


def total(outputs: list[Tensor]) -> Tensor:
    return torch.stack([output.float().sum() for output in outputs]).sum()


def test_a_weights_gradient_alone() -> None:
    """What overflows on the way to a weight passes no module boundary."""
    model = net()
    with torch.no_grad():
        model.trunk[0].weight.zero_()
        model.trunk[0].bias.fill_(1.0)
    text = found(model, torch.full((5, 6), 3e38), loss=lambda outputs: 1e3 * square(outputs))
    assert text == "trunk.0 (gradient, AddmmBackward0)"


@pytest.mark.parametrize("options", OPTIONS)
def test_in_the_loss_itself(options: dict[str, Any]) -> None:
    def broken(outputs: list[Tensor]) -> Tensor:
        return square(outputs[:1]) + (outputs[1] * 0).sqrt().sum()

    assert found(net(**options), loss=broken) == "the loss (the gradient that it gives value)"
    target = torch.tensor(torch.nan)
    assert "the loss" in str(found(net(**options), loss=lambda outputs: square(outputs) * target))
    # An infinite loss with a finite gradient: nothing in the network is to blame.
    assert found(net(**options), loss=lambda outputs: square(outputs) + torch.inf) is None


def test_the_first_of_several_passes() -> None:
    """Micro-batches run one after the other: a fault in the second one's input comes after the first's."""
    model = net()

    def replay() -> None:
        for scale in (1.0, torch.nan):
            square(model(rows() * scale)["heads"]).backward()

    assert first_nonfinite(replay, model) == "the input is already not finite"


def test_parts_that_are_called_from_outside() -> None:
    model = net()

    def replay() -> None:
        with torch.no_grad():
            y = model.trunk(rows())
        model.value(y / 0)

    assert first_nonfinite(replay, model) == "the input of value is already not finite"


def test_fp16_gradients_that_overflow() -> None:
    """A loss scale too large: finite forward, and the layer whose gradient overflows is named."""
    model = net()
    text = found(model, loss=lambda outputs: outputs[1].float().sum() * 6e4, dtype=torch.float16)
    assert text is not None
    assert "gradient" in text


def test_numbers_stay_as_they_are() -> None:
    """Same bits with and without checks, under checkpointing and dropout too; and no hook is left."""
    results = []
    for checked in (False, True):
        for options in OPTIONS:
            model = net(**options)
            model.trunk.append(nn.Dropout(0.5))
            torch.manual_seed(3)
            if checked:
                with finite_checks(model) as checks:
                    square(model(rows())["heads"]).backward()
                assert checks.first() is None
            else:
                square(model(rows())["heads"]).backward()
            results.append([p.grad for p in model.parameters()])
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_hooks_go_when_the_pass_fails() -> None:
    model = net()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        first_nonfinite(lambda: model.trunk[2](torch.randn(2, 5)), model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_each_operation_is_watched_once_and_none_is_kept() -> None:
    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def save(tensor: Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    model = net()
    with finite_checks(model) as checks:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved.tensor):
            loss = square(model(rows())["heads"])
        assert alive
        del loss
        assert not alive  # a pass that is thrown away leaves no activations behind
        square(model(rows())["heads"]).backward()
    backward = [e for e in checks._events if e.what not in ("input", "output")]
    names = [event.module for event in backward if event.what == "NativeLayerNormBackward0"]
    assert sorted(names) == ["policy.norm", "value.norm"]
    relu = [event.module for event in backward if event.what == "ReluBackward0"]
    assert sorted(relu) == ["policy", "trunk.1", "value"]
    assert [event.module for event in backward if event.what == "MulBackward0"] == [""]


def test_nothing_is_read_before_the_end() -> None:
    """The checks wait for no device: on the meta device a read would raise."""
    model = net().to("meta")
    with finite_checks(model):
        square(model(torch.empty(5, 6, device="meta"))["heads"]).backward()


def test_compiled_models_are_refused() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="not compiled"), finite_checks(compiled):
        pass
    inner = net()
    inner.trunk.compile(backend="eager")
    with pytest.raises(ValueError, match="not compiled"), finite_checks(inner):
        pass


def test_a_replay_that_does_not_run_the_model() -> None:
    with pytest.raises(ValueError, match="never called"):
        first_nonfinite(lambda: None, net())
    with pytest.raises(ValueError, match="never called"):
        FiniteChecks(net()).first()


@pytest.mark.parametrize("every", [0, 2])
def test_a_chess_network(every: int) -> None:
    options = {
        "channels": 16,
        "blocks": 2,
        "checkpoint_every": every,
        "norm": {"blocks": "batch"},
        "policy": {"channels": 16},
        "value": {"channels": 16, "hidden": 16},
        "attention": {"every": 2},
        "ssl": ["pin"],
    }
    torch.manual_seed(0)
    model = PolicyValueNet(ModelConfig.model_validate(merge(dump(load("demo"))["model"], options))).train()
    x = torch.rand(4, PLANES, 8, 8, generator=torch.Generator().manual_seed(1))

    def replay() -> None:
        out = model(x, frozenset({"policy", "value", "ssl_pin"}))
        (out["policy"].sum() + out["value"].sum() + out["ssl"]["pin"].sum()).backward()

    assert first_nonfinite(replay, model) is None
    for name, key in (("tower.1.convs.0", "weight"), ("ssl_heads.pin.out", "weight"), ("tower.2", "bias")):
        weight = model.get_submodule(name).get_parameter(key)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[0] = torch.nan
        assert first_nonfinite(replay, model) == f"{name} (forward output; its {key} is not finite)"
        with torch.no_grad():
            weight.copy_(kept)
