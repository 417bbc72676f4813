"""Parameter groups, schedule, averaged weights, state by name."""

import pytest
import torch
from torch import nn
from toy_task import ToyNet

from matrixlib.config import OptimConfig
from matrixlib.engine import optim
from matrixlib.engine.averages import EMA
from matrixlib.engine.schedule import learning_rate
from matrixlib.tasks import load_config

CPU = torch.device("cpu")


def settings(**changes: object) -> OptimConfig:
    return load_config("demo").optim.model_copy(update=changes)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.bias = nn.Parameter(torch.zeros(2, 8, 8))
        self.position = nn.Parameter(torch.zeros(1, 4, 8, 8))
        self.scale = nn.Parameter(torch.ones(4))


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.layer_norm = nn.LayerNorm((4, 8, 8))  # an affine norm with three dimensions
        self.attention = Attention()
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
    assert decayed == {
        "convolution.weight",
        "attention.project.weight",
        "packed.in_proj_weight",
        "packed.out_proj.weight",
    }
    assert {"attention.bias", "attention.position", "embedding.weight", "layer_norm.weight"} <= plain
    assert decayed | plain == {name for name in names.values() if not name.startswith("frozen")}
    assert sum(len(group["params"]) for group in groups) == len(decayed | plain)


def test_adamw_is_fused_on_the_cpu() -> None:
    adamw = optim.optimiser(ToyNet(), settings(), CPU)
    assert (adamw.defaults["fused"], adamw.defaults["foreach"]) == (True, None)
    assert optim.optimiser(ToyNet().to("meta"), settings(), torch.device("meta")).defaults["foreach"] is True
    with pytest.raises(ValueError, match="requires_grad"):
        optim.optimiser(ToyNet().requires_grad_(False), settings(), CPU)


def test_names_are_plain_under_a_compiled_wrapper() -> None:
    model = ToyNet()
    wrapped = torch.compile(model)
    assert all(name.startswith("_orig_mod.") for name in wrapped.state_dict())  # the trap
    assert set(optim.named_tensors(wrapped)) == set(EMA(wrapped, 0.9).state_dict()) == set(model.state_dict())
    assert all(not name.startswith("_") for name, _ in optim.weights(wrapped))


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (100, 0), (100, 1), (2, 10), (1, 10), (7, 3), (60, 59)])
def test_schedule_shape(kind: str, steps: int, warmup: int) -> None:
    peak, final = 3e-3, 0.05
    schedule = learning_rate(
        settings(learning_rate=peak, schedule=kind, final_fraction=final, warmup_steps=warmup), steps
    )
    rates = [schedule(update) for update in range(steps)]
    assert all(0 < rate <= peak for rate in rates)
    assert max(rates) == peak
    if steps > 1:
        assert rates[-1] == (peak if kind == "constant" else peak * final)
    top = rates.index(peak)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert schedule(steps + 50) == rates[-1]


def test_warm_up_starts_at_one_part_of_the_peak() -> None:
    schedule = learning_rate(settings(learning_rate=1.0, warmup_steps=10), 100)
    assert [schedule(update) for update in range(10)] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert schedule(55) == pytest.approx(0.05 + 0.95 * 0.5, abs=0.02)  # half-way down, not at 0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_warm_restarts_begin_at_the_peak_and_the_last_ends_at_the_floor(kind: str) -> None:
    config = settings(learning_rate=1.0, schedule=kind, warmup_steps=11, final_fraction=0.1, restarts=2)
    schedule = learning_rate(config, 101)
    rates = [schedule(update) for update in range(101)]
    assert [update for update in range(10, 100) if rates[update] == 1.0] == [10, 40, 70]
    assert rates[39] == pytest.approx(0.1, abs=0.04)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[41:70] == sorted(rates[41:70], reverse=True)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_rate_stays_at_the_peak_until_the_last_part(kind: str) -> None:
    config = settings(learning_rate=1.0, schedule=kind, warmup_steps=11, final_fraction=0.0, decay_share=0.3)
    rates = [learning_rate(config, 111)(update) for update in range(111)]
    assert set(rates[10:81]) == {1.0}
    assert rates[81:] == sorted(set(rates[81:]), reverse=True)
    assert rates[95] == pytest.approx(0.5)
    assert rates[-1] == 0


def test_the_rate_grows_with_the_root_of_the_batch_where_that_is_asked_for() -> None:
    config = settings(learning_rate=0.01, warmup_steps=0, rate_batch=128)
    assert [learning_rate(config, 10, rows)(0) for rows in (128, 512, 32)] == pytest.approx([0.01, 0.02, 0.005])
    assert learning_rate(settings(learning_rate=0.01, warmup_steps=0), 10, 512)(0) == 0.01


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
    adamw = optim.optimiser(model, settings(), CPU)
    with pytest.raises(ValueError, match=r"trunk\.weight"):
        optim.load_optimiser(adamw, model, {"trunk.weight/exp_avg": torch.zeros(2)}, ())
    with pytest.raises(ValueError, match="state"):
        optim.load_optimiser(adamw, model, {"inner.weight/exp_avg": torch.zeros(2)}, ())
