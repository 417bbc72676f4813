"""One contract for every optimiser, on the toy task; the first update of each beside the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from test_trainer import Scaled, build, equal, poison, settings, weights
from torch import Tensor, nn
from toy_task import ToyNet, ToySource, toy_runtime

from matrixlib.config import Config, OptimConfig
from matrixlib.engine import optim
from matrixlib.engine.checkpoint import CheckpointError
from matrixlib.engine.muon import Muon, orthogonal
from matrixlib.tasks import get_task, load_config

CPU = torch.device("cpu")
NAMES = get_args(OptimConfig.model_fields["optimiser"].annotation)


def configured(name: str, **sections: dict[str, Any]) -> Config:
    return settings(optim={"optimiser": name}, **sections)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_and_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    """With dropout, batch norm, clipping and averaged weights."""
    config = configured(name)
    whole = build(tmp_path / "whole", config=config, steps=10)
    before = weights(whole)
    list(whole.train())
    list(build(tmp_path / "part", config=config, steps=10).train(4))
    part = build(tmp_path / "part", config=config, steps=10)
    assert part.resume() == 4
    list(part.train())
    assert equal(weights(part), weights(whole))
    assert not any(torch.equal(before[key], weights(whole)[key]) for key, _ in whole.model.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_rollback_past_planted_nans_leaves_nothing_of_them(tmp_path: Path, name: str) -> None:
    config = configured(name, health={"rate_factor": 1.0, "skips": 3})
    trainer = build(tmp_path / "bad", source=poison(6, 8), config=config, steps=14)
    actions = [stats.action for stats in trainer.train()]
    assert (actions.count("skip"), actions.count("rollback")) == (2, 1)
    clean = build(tmp_path / "clean", source=ToySource(20, skip=((6, 9),)), config=config, steps=14)
    list(clean.train())
    assert equal(weights(trainer), weights(clean))


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_scale_changes_nothing_but_its_overflows(tmp_path: Path, name: str) -> None:
    trainer = build(tmp_path, config=configured(name), runtime=Scaled(**toy_runtime(8).to_dict()), steps=8)
    stats = list(trainer.train())
    assert stats[-1].overflows > 0
    assert stats[-1].skipped == 0
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_another_optimiser_is_refused_by_name(tmp_path: Path, name: str) -> None:
    other = "adamw" if name != "adamw" else NAMES[-1]
    list(build(tmp_path, config=configured(other), steps=2).train())
    with pytest.raises(CheckpointError, match=rf"its optimiser is {other}.*optim\.optimiser {name}"):
        build(tmp_path, config=configured(name), steps=2).resume()


def matrix() -> nn.Module:
    """One hidden matrix between layers of its own; its gradient is set by hand."""

    class Net(nn.Sequential):
        def edges(self) -> list[nn.Module]:
            return [self[0], self[2]]

    torch.manual_seed(5)
    return Net(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2))


LIBRARY: dict[str, Any] = {
    "adamw": lambda own, o: torch.optim.AdamW(own, o.learning_rate, (o.beta1, o.beta2), o.eps, o.weight_decay),
    "muon": lambda own, o: torch.optim.Muon(
        own, o.learning_rate, o.weight_decay, o.momentum, adjust_lr_fn="match_rms_adamw"
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_first_updates_of_a_matrix_are_the_library_s(name: str) -> None:
    net, config = matrix(), load_config("demo", {"optim": {"optimiser": name, "weight_decay": 0.3}}).optim
    own, theirs = net.get_parameter("1.weight"), nn.Parameter(net.get_parameter("1.weight").detach().clone())
    ours, library = optim.optimiser(net, config, CPU), LIBRARY[name]([theirs], config)
    for seed in range(3):
        own.grad = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed))
        theirs.grad = own.grad.clone()
        ours.step()
        library.step()
    torch.testing.assert_close(own, theirs, rtol=2e-2 if name == "muon" else 1e-6, atol=1e-5)  # in bf16


def groups_of(net: nn.Module) -> dict[str, tuple[bool, bool]]:
    """Parameter name -> (orthogonal, decayed)."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {
        names[id(parameter)]: (group["orthogonal"], group["weight_decay"] > 0)
        for group in optim.parameter_groups(net, 0.1, muon=True)
        for parameter in group["params"]
    }


@pytest.mark.parametrize("preset", ["quick", "latin_demo", "melee_demo"])
def test_muon_moves_hidden_matrices_alone(preset: str) -> None:
    config = load_config(preset)
    net = get_task(config.task).task(config).build_model()
    groups = groups_of(net)
    hidden = {name for name, (orthogonal, _) in groups.items() if orthogonal}
    assert hidden
    assert groups.keys() == {name for name, p in net.named_parameters() if p.requires_grad}
    for name in hidden:
        assert net.get_parameter(name).ndim >= 2
        assert groups[name] == (True, True)
    edges = {id(p) for layer in net.edges() for p in layer.parameters()}
    assert not any(id(net.get_parameter(name)) in edges for name in hidden)
    if preset == "quick":
        assert "tower.0.convs.0.weight" in hidden
        assert {"stem.conv.weight", "policy_head.planes.weight", "value_head.fc3.weight"}.isdisjoint(hidden)
        assert {"policy_head.input.conv.weight", "value_head.fc1.weight"} <= hidden


def test_a_network_that_does_not_name_its_edges_is_told() -> None:
    config = settings(optim={"optimiser": "muon"}).optim
    with pytest.raises(ValueError, match=r"give Sequential a method `edges"):
        optim.optimiser(nn.Sequential(nn.Linear(2, 2)), config, CPU)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_orthogonal_matrices(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_kernel_is_a_matrix_of_its_outputs_in_any_memory_format() -> None:
    """The update of a kernel is that of its matrix, at the size of AdamW's."""
    gradient = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(2))
    start = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(3))

    def updated(kernel: Tensor, of: Tensor) -> Tensor:
        parameter = nn.Parameter(kernel)
        parameter.grad = of
        groups = [{"params": [parameter], "weight_decay": 0.0, "orthogonal": True}]
        Muon(groups, momentum=0.95, lr=0.1).step()
        return parameter.detach()

    flat = updated(start.clone().flatten(1), gradient.flatten(1)).view_as(start)
    last = updated(start.clone(memory_format=torch.channels_last), gradient)
    assert torch.equal(updated(start.clone(), gradient), flat)
    assert torch.equal(last, flat)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert (flat - start).square().mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.25)


def test_a_hidden_layer_without_a_gradient_stays() -> None:
    net = ToyNet()
    muon = optim.optimiser(net, settings(optim={"optimiser": "muon"}).optim, CPU)
    before = net.inner.weight.clone()
    net.plane.weight.grad = torch.ones_like(net.plane.weight)
    muon.step()
    assert torch.equal(net.inner.weight, before)
