"""Optimisers on the toy task, one contract for each; their groups, schedules and averages, state by name."""

import copy
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from saved import equal
from test_trainer import build, poison, settings, weights
from torch import Tensor, nn
from toy_task import Scaled, ToyNet, ToySource, toy_runtime

from matrixlib.config import Config, ConfigError, OptimConfig
from matrixlib.engine import optim
from matrixlib.engine.averages import EMA, average
from matrixlib.engine.checkpoint import CheckpointError
from matrixlib.engine.optim import Muon, _by_steps, orthogonal
from matrixlib.engine.schedule import learning_rate
from matrixlib.hardware.runtime import Runtime
from matrixlib.tasks import get_task, load_config

CPU = torch.device("cpu")
NAMES = get_args(OptimConfig.model_fields["optimiser"].annotation)


LIBRARIES = {"lamb": "pytorch_optimizer", "schedule_free": "schedulefree", "adamw_8bit": "bitsandbytes"}


def changes(name: str) -> dict[str, Any]:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    schedule = {"schedule": "constant"} if name == "schedule_free" else {}
    return {"optimiser": name, "learning_rate": 0.002 if name in ("sgd", "rmsprop") else 0.01, **schedule}


class Large(Runtime):
    def grad_scaler(self) -> torch.amp.GradScaler:
        """Exact in fp32, and without an overflow."""
        return torch.amp.GradScaler("cpu", init_scale=2.0**16)


def configured(name: str, **sections: dict[str, Any]) -> Config:
    return settings(optim=changes(name), **sections)


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
    for key, parameter in whole.model.named_parameters():  # a bias before a batch norm has no gradient
        assert parameter.ndim < 2 or not torch.equal(before[key], parameter)


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
    trainer = build(tmp_path, config=configured(name), runtime=Scaled(**toy_runtime(8).to_dict()), steps=14)
    stats = list(trainer.train())
    assert stats[-1].overflows > 0
    assert stats[-1].skipped == 0
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_the_state_of_another_optimiser_is_refused_by_name(tmp_path: Path) -> None:
    list(build(tmp_path, config=configured("adamw"), steps=2).train())
    with pytest.raises(CheckpointError, match="its optimiser is adamw, and muon cannot"):
        build(tmp_path, config=configured("muon"), steps=2).resume()


def matrix() -> nn.Module:
    """One hidden matrix between layers of its own; its gradient is set by hand."""

    class Net(nn.Sequential):
        def edges(self) -> list[nn.Module]:
            return [self[0], self[2]]

    torch.manual_seed(5)
    return Net(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2))


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_may_get_its_first_gradient_late(name: str) -> None:
    """As that of a head which is gated at first."""
    net = matrix()
    optimiser = optim.optimiser(net, load_config("demo", {"optim": changes(name)}).optim, CPU)
    for layers in (net[:2], net):
        optimiser.zero_grad()
        layers(torch.ones(1, 4)).sum().backward()
        before = copy.deepcopy(net[2].state_dict())
        optimiser.step()
        moved = not torch.equal(before["weight"], net[2].weight)
        assert moved is (layers is net)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_in_another_memory_format_stays_where_it_lies_and_is_averaged(name: str) -> None:
    """The average looks tensors up once: it would stay that of a kernel which has been left behind."""
    config = load_config("demo", {"optim": changes(name)}).optim
    torch.manual_seed(6)
    net = matrix()
    net[1] = nn.Conv2d(6, 8, 3)
    net.to(memory_format=torch.channels_last)
    kernel = net[1].weight
    optimiser = optim.optimiser(net, config, CPU)
    averaged = average(net, optimiser, config)
    assert averaged is not None
    start, place = kernel.detach().clone(), kernel.data_ptr()
    for _ in range(3):
        kernel.grad = torch.ones_like(kernel)
        optimiser.step()
        averaged.update()
    assert kernel.data_ptr() == place
    assert not torch.equal(averaged.state_dict()["1.weight"], start)


def library(name: str, own: list[Tensor], o: OptimConfig) -> torch.optim.Optimizer:
    """The plain optimiser, as its own documentation has it."""
    rate, decay = o.learning_rate, o.weight_decay
    adam: dict[str, Any] = {"lr": rate, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": decay}
    if name in ("lamb", "schedule_free"):
        kind = {"lamb": "Lamb", "schedule_free": "AdamWScheduleFree"}[name]
        foreign = getattr(pytest.importorskip(LIBRARIES[name]), kind)(own, **adam)
        getattr(foreign, "train", int)()
        return foreign
    plain: dict[str, Any] = {
        "adam": lambda: torch.optim.Adam(own, **adam),
        "sgd": lambda: torch.optim.SGD(own, rate, o.momentum, weight_decay=decay, nesterov=True),
        "rmsprop": lambda: torch.optim.RMSprop(own, rate, o.beta2, o.eps, decay),
        "radam": lambda: torch.optim.RAdam(own, decoupled_weight_decay=True, **adam),
        "nadam": lambda: torch.optim.NAdam(own, decoupled_weight_decay=True, **adam),
        "adafactor": lambda: torch.optim.Adafactor(own, rate, weight_decay=decay),
        "muon": lambda: torch.optim.Muon(own, rate, decay, o.momentum, adjust_lr_fn="match_rms_adamw"),
    }
    return plain.get(name, lambda: torch.optim.AdamW(own, **adam))()  # 8-bit moments of small tensors are in fp32


@pytest.mark.parametrize("name", sorted({*NAMES} - {"normuon"}))  # which no library has
def test_the_first_updates_of_a_matrix_are_the_library_s(name: str) -> None:
    net, config = matrix(), load_config("demo", {"optim": {**changes(name), "weight_decay": 0.3}}).optim
    own, theirs = net.get_parameter("1.weight"), nn.Parameter(net.get_parameter("1.weight").detach().clone())
    ours, plain = optim.optimiser(net, config, CPU), library(name, [theirs], config)
    for seed in range(3):
        own.grad = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed))
        theirs.grad = own.grad.clone()
        ours.step()
        plain.step()
    torch.testing.assert_close(own, theirs, rtol=2e-2 if name == "muon" else 1e-5, atol=1e-5)  # in bf16


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_updates_import_no_compiler(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Importing it takes as long as importing torch."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    net = matrix()
    ours = optim.optimiser(net, load_config("demo", {"optim": changes(name)}).optim, CPU)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    ours.step()
    optim.load_optimiser(ours, net, optim.optimiser_tensors(ours, net), optim.optimiser_counters(ours))
    ours.step()
    ours.zero_grad()


def test_8_bit_adamw_is_plain_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another optimiser is asked for."""
    monkeypatch.setattr(optim.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="bitsandbytes is not installed"):
        adamw = optim.optimiser(ToyNet(), settings(optim={"optimiser": "adamw_8bit"}).optim, CPU)
    assert type(adamw) is optim.AdamW
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ValueError, match=r"optimiser lamb needs pytorch-optimizer .*pip install"):
        optim.optimiser(ToyNet(), settings(optim={"optimiser": "lamb"}).optim, CPU)


def test_8_bit_moments_of_a_large_matrix_are_saved_bit_for_bit() -> None:
    config = settings(optim=changes("adamw_8bit")).optim

    def go(net: nn.Module, adamw: torch.optim.Optimizer, updates: range) -> None:
        for seed in updates:
            for parameter in net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            adamw.step()

    torch.manual_seed(0)
    whole = nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)
    part = copy.deepcopy(whole)
    adamw = optim.optimiser(whole, config, CPU)
    go(whole, adamw, range(6))
    first = optim.optimiser(part, config, CPU)
    go(part, first, range(3))
    saved = {key: value.clone().contiguous() for key, value in optim.optimiser_tensors(first, part).items()}
    assert saved["weight/state1"].dtype == torch.uint8
    held = sum(value.nbytes for key, value in saved.items() if key.startswith("weight/"))
    assert held < 0.4 * 2 * whole.weight.nbytes, "of what AdamW's two moments would take"
    second = optim.optimiser(part, config, CPU)
    optim.load_optimiser(second, part, saved, optim.optimiser_counters(first))
    go(part, second, range(3, 6))
    assert torch.equal(whole.weight, part.weight)


def test_schedule_free_is_evaluated_and_saved_at_its_averaged_point(tmp_path: Path) -> None:
    """That of the library's own `eval`; looking at it moves nothing."""
    trainer = build(tmp_path, config=configured("schedule_free"), steps=6)
    list(trainer.train())
    raw = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    point = trainer.evaluation_model().state_dict()
    saved = trainer.checkpoints.newest().tensors["ema"]
    assert equal(dict(point), saved)
    assert equal(dict(trainer.model.state_dict()), raw)
    trainer._step.optimiser.eval()
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(point[name], value.detach())
        assert not torch.equal(point[name], raw[name])


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"schedule": "constant", "restarts": 1}, r"optim\.restarts at 0 and decay_ratio at 1"),
        ({"schedule": "constant", "decay_ratio": 0.3}, r"optim\.restarts at 0 and decay_ratio at 1"),
        ({"optimiser": "schedule_free", "schedule": "cosine"}, r"optim\.schedule to constant"),
        ({"optimiser": "schedule_free", "schedule": "constant", "decay_ratio": 1.0, "swa": 0.2}, "swa to 0"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], way: str) -> None:
    with pytest.raises(ConfigError, match=way):
        load_config("demo", {"optim": options})


@pytest.mark.parametrize("preset", ["quick", "latin_demo", "melee_demo"])
def test_muon_moves_hidden_matrices_alone(preset: str) -> None:
    config = load_config(preset)
    net = get_task(config.task).task(config).build_model()
    names = {id(parameter): name for name, parameter in net.named_parameters() if parameter.requires_grad}
    groups = optim.parameter_groups(net, 0.1, muon=True)
    assert sorted(names[id(p)] for group in groups for p in group["params"]) == sorted(names.values())
    (moved,) = (group for group in groups if group["orthogonal"])
    hidden = {names[id(parameter)] for parameter in moved["params"]}
    assert moved["weight_decay"] > 0
    assert all(parameter.ndim >= 2 for parameter in moved["params"])
    assert {id(p) for layer in net.edges() for p in layer.parameters()}.isdisjoint(map(id, moved["params"]))
    if preset == "quick":
        assert {"stem.conv.weight", "policy_head.pairs.key.weight", "value_head.fc3.weight"}.isdisjoint(hidden)
        assert {"tower.0.convs.0.weight", "policy_head.pairs.query.weight", "value_head.fc1.weight"} <= hidden


def test_a_network_that_does_not_name_its_edges_is_told() -> None:
    config = settings(optim={"optimiser": "muon"}).optim
    with pytest.raises(ValueError, match=r"give Sequential a method `edges"):
        optim.optimiser(nn.Sequential(nn.Linear(2, 2)), config, CPU)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_orthogonal_matrices(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(shape, generator=generator)
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3
    wide = matrices if shape[1] < shape[2] else matrices.mT
    steps = _by_steps((wide / torch.linalg.matrix_norm(wide, keepdim=True)).bfloat16()).float()
    torch.testing.assert_close(orthogonal(wide), steps, rtol=0, atol=0.02)  # in bf16
    left, right = (torch.randn(*sizes, generator=generator) for sizes in ((*shape[:2], 3), (shape[0], 3, shape[2])))
    values = torch.linalg.svdvals(orthogonal(left @ right))
    assert values[:, 2].min() > 0.5
    assert values[:, 0].max() < 1.3
    assert values[:, 3].max() < 0.01, "what is nothing but rounding is not blown up"


def updated(kernel: Tensor, gradient: Tensor, even_rows: bool = False) -> Tensor:
    parameter = nn.Parameter(kernel)
    parameter.grad = gradient
    groups = [{"params": [parameter], "weight_decay": 0.0, "orthogonal": True}]
    Muon(groups, momentum=0.95, even_rows=even_rows, lr=0.1).step()
    return parameter.detach()


def test_a_kernel_is_a_matrix_of_its_outputs_in_any_memory_format() -> None:
    """The update of a kernel is that of its matrix, at the size of AdamW's."""
    gradient = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(2))
    start = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(3))
    flat = updated(start.clone().flatten(1), gradient.flatten(1)).view_as(start)
    last = updated(start.clone(memory_format=torch.channels_last), gradient)
    assert torch.equal(updated(start.clone(), gradient), flat)
    assert torch.equal(last, flat)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert (flat - start).square().mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.25)


def test_normuon_moves_all_outputs_alike_and_as_far_as_muon() -> None:
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(8, 4, 3, 3, generator=generator) * torch.logspace(-3, 0, 8).view(8, 1, 1, 1)

    plain, even = (updated(torch.zeros(8, 4, 3, 3), gradient, rows).flatten(1) for rows in (False, True))
    torch.testing.assert_close(even.norm(), plain.norm())
    torch.testing.assert_close(even.norm(dim=1), even.norm(dim=1).mean().expand(8), rtol=1e-3, atol=0)
    assert not torch.allclose(plain.norm(dim=1), plain.norm(dim=1).mean().expand(8), rtol=1e-3, atol=0)


def test_noise_has_its_variance_and_its_own_stream(tmp_path: Path) -> None:
    """In the gradients, whole or of any micro-batch; a resumed run draws the same; the global stream stays."""
    config = load_config("demo", {"optim": {"noise": 0.3}}).optim
    assert [optim.noise_variance(config, t) for t in (0, 3)] == pytest.approx([0.3, 0.3 / 4**0.55])
    gradient, before = torch.zeros(200, 100), torch.get_rng_state()
    optim.add_noise([gradient], 0.04, seed=1, update=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert gradient.std().item() == pytest.approx(0.2, rel=0.02)
    other = torch.zeros(200, 100)
    optim.add_noise([other], 0.04, seed=1, update=6)
    assert abs(float((gradient * other).mean())) < 0.002
    noisy = settings(optim={"noise": 0.1})
    whole = build(tmp_path / "whole", config=noisy, steps=8)
    stats = list(whole.train())
    quiet = next(iter(build(tmp_path / "quiet", steps=8).train()))
    assert stats[0].loss == quiet.loss
    assert stats[0].grad_norm > quiet.grad_norm, "before clipping, so that the norm counts it"
    scaled = build(tmp_path / "scaled", config=noisy, runtime=Large(**toy_runtime(8).to_dict()), steps=8)
    assert next(iter(scaled.train())).grad_norm == pytest.approx(stats[0].grad_norm), "not by the loss scale less"
    list(build(tmp_path / "part", config=noisy, steps=8).train(3))
    part = build(tmp_path / "part", config=noisy, steps=8)
    part.resume()
    list(part.train())
    assert equal(weights(part), weights(whole))


def test_a_plateau_cuts_the_rate_of_its_schedule_and_resumes(tmp_path: Path) -> None:
    """Every full validation counts as stale where nothing can improve by so much; those of a sample never."""
    rare = {"interval": 2, "full_every": 1, "min_delta": 100.0}
    config = settings(optim={"plateau": 2, "plateau_factor": 0.1}, validation=rare)
    whole = build(tmp_path / "whole", config=config, steps=13)
    stats = list(whole.train())
    factors = [round(s.learning_rate / whole._step.schedule(s.step - 1), 6) for s in stats]
    assert factors == [1.0] * 6 + [0.1] * 4 + [0.01] * 3
    assert any("0.1 times its schedule" in text for text in stats[5].messages)
    list(build(tmp_path / "part", config=config, steps=13).train(7))
    part = build(tmp_path / "part", config=config, steps=13)
    part.resume()
    assert next(iter(part.train())).learning_rate == stats[7].learning_rate
    sampled = settings(optim={"plateau": 1}, validation=rare | {"full_every": 9})
    samples = build(tmp_path / "samples", config=sampled, steps=8)
    assert [s.learning_rate for s in samples.train()] == [samples._step.schedule(i) for i in range(8)]


# Groups, schedule, averages, state by name


def of_optim(**changes: object) -> OptimConfig:
    return load_config("demo").optim.model_copy(update=changes)


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.layer_norm = nn.LayerNorm((4, 8, 8))  # an affine norm with three dimensions
        self.project = nn.Linear(4, 12)
        self.bias = nn.Parameter(torch.zeros(2, 8, 8))
        self.packed = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(5, 4)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


def test_weight_decay_only_on_matrices_and_kernels() -> None:
    model = Zoo()
    groups = optim.parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    plain = {names[id(p)] for group in groups if not group["weight_decay"] for p in group["params"]}
    assert decayed == {"convolution.weight", "project.weight", "packed.in_proj_weight", "packed.out_proj.weight"}
    assert {"bias", "embedding.weight", "layer_norm.weight"} <= plain
    assert decayed | plain == {name for name in names.values() if not name.startswith("frozen")}
    assert sum(len(group["params"]) for group in groups) == len(decayed | plain)


def test_adamw_is_fused_on_the_cpu() -> None:
    adamw = optim.optimiser(ToyNet(), of_optim(), CPU)
    assert (adamw.defaults["fused"], adamw.defaults["foreach"]) == (True, None)
    assert optim.optimiser(ToyNet().to("meta"), of_optim(), torch.device("meta")).defaults["foreach"] is True
    with pytest.raises(ValueError, match="requires_grad"):
        optim.optimiser(ToyNet().requires_grad_(False), of_optim(), CPU)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (100, 0), (100, 1), (2, 10), (1, 10), (7, 3), (60, 59)])
def test_schedule_shape(kind: str, steps: int, warmup: int) -> None:
    peak, final = 3e-3, 0.05
    options = of_optim(learning_rate=peak, schedule=kind, final_fraction=final, warmup_steps=warmup)
    schedule = learning_rate(options, steps)
    rates = [schedule(update) for update in range(steps)]
    assert all(0 < rate <= peak for rate in rates)
    assert max(rates) == peak
    if steps > 1:
        assert rates[-1] == (peak if kind == "constant" else peak * final)
    top = rates.index(peak)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert schedule(steps + 50) == rates[-1]
    if 2 * warmup <= steps:
        assert rates[:warmup] == pytest.approx([peak * (i + 1) / warmup for i in range(warmup)]), "it is never 0"


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_warm_restarts_and_a_rate_that_stays_at_the_peak_until_the_last_part(kind: str) -> None:
    peak = {"learning_rate": 1.0, "schedule": kind, "warmup_steps": 11}
    schedule = learning_rate(of_optim(**peak, final_fraction=0.1, restarts=2), 101)
    rates = [schedule(update) for update in range(101)]
    assert [update for update in range(10, 100) if rates[update] == 1.0] == [10, 40, 70]
    assert rates[39] == pytest.approx(0.1, abs=0.04)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[41:70] == sorted(rates[41:70], reverse=True)
    schedule = learning_rate(of_optim(**peak, final_fraction=0.0, decay_ratio=0.3), 111)
    rates = [schedule(update) for update in range(111)]
    assert set(rates[10:81]) == {1.0}
    assert rates[81:] == sorted(set(rates[81:]), reverse=True)
    assert (rates[95], rates[-1]) == (pytest.approx(0.5), 0)


def test_the_rate_grows_with_the_root_of_the_batch_where_that_is_asked_for() -> None:
    config = of_optim(learning_rate=0.01, warmup_steps=0, rate_batch=128)
    assert [learning_rate(config, 10, rows)(0) for rows in (128, 512, 32)] == pytest.approx([0.01, 0.02, 0.005])
    assert learning_rate(of_optim(learning_rate=0.01, warmup_steps=0), 10, 512)(0) == 0.01


def test_ema_by_hand_with_decay_warm_up() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    ema = EMA(model, 0.5)
    expected = 1.0
    for update, value in enumerate([2.0, 5.0, -1.0, 4.0, 0.0, 7.0, 7.0, 1.0, 1.0, 2.0]):
        nn.init.constant_(model.weight, value)
        ema.update()
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * value
    assert ema.state_dict()["weight"].item() == pytest.approx(expected, rel=1e-5)


def test_ema_averages_batchnorm_statistics_and_copies_integers() -> None:
    """torch's AveragedModel copies raw statistics, which do not belong to averaged weights."""
    model = ToyNet(norm="batch")
    ema = EMA(model, 0.9)
    mean, counter = model.norm.running_mean, model.norm.num_batches_tracked
    with torch.no_grad():
        for value in (1.0, 2.0):
            mean.fill_(value)
            counter.fill_(int(value))
            ema.update()
    second = 2 / 11
    expected = second * (0.1 * 0 + 0.9 * 1.0) + (1 - second) * 2.0
    assert ema.state_dict()["norm.running_mean"][0].item() == pytest.approx(expected)
    assert ema.state_dict()["norm.num_batches_tracked"].item() == 2


@pytest.mark.parametrize("name", ["inner.weight", "extra", "plane.bias"])
def test_loading_other_tensors_is_refused_and_changes_nothing(name: str) -> None:
    """One that is missing, unknown or of another shape."""
    model = ToyNet()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = {key: value + 1 for key, value in before.items() if key != "inner.weight" or name != key}
    tensors |= {name: torch.zeros(2)} if name != "inner.weight" else {}
    with pytest.raises(ValueError, match=name):
        optim.load_tensors(model, tensors)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_optimiser_state_of_another_model_is_refused() -> None:
    model = ToyNet()
    adamw = optim.optimiser(model, of_optim(), CPU)
    with pytest.raises(ValueError, match=r"trunk\.weight"):
        optim.load_optimiser(adamw, model, {"trunk.weight/exp_avg": torch.zeros(2)}, ())
    with pytest.raises(ValueError, match="state"):
        optim.load_optimiser(adamw, model, {"inner.weight/exp_avg": torch.zeros(2)}, ())
