"""The contract every task keeps. Other test files call `check_task` with their task and stored rows."""

from typing import Any

import numpy as np
import pytest
import torch
from melee_games import game, melee_task
from torch import nn
from toy_task import ToyTask, toy_records

from matrixlib.data.order import RankSlice
from matrixlib.data.shards import Layout, select
from matrixlib.engine.task import Batch, Task, active_terms, rows, slice_batch
from matrixlib.engine.validation import evaluating
from matrixlib.play.game import uniform
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.runs.cycle_games import load_cycle
from matrixlib.tasks import load_config as load
from matrixlib.tasks.latin import pool
from matrixlib.tasks.latin.config import LatinConfig
from matrixlib.tasks.latin.spec import LatinTask
from matrixlib.tasks.melee.windows import stretches
from matrixlib.tasks.tictactoe.spec import TASK as TICTACTOE
from matrixlib.tasks.tictactoe.spec import UNKNOWN, TicTacToe, TicTacToeTask

FORBIDDEN = (np.uint16, np.uint32, np.uint64)


def check_task(task: Task, host_batch: dict[str, np.ndarray], tolerance: float = 1e-4) -> None:
    """Assert everything that the engine relies on. host_batch: stored rows, as the loader gathers them.

    tolerance: relative, for sums over slices against the whole (fp32).
    """
    batch = check_prepare(task, host_batch)
    active = active_terms(task)
    assert active, "no term has a weight"
    assert set(task.counts(batch)) == set(task.weights) >= set(task.bounds(batch))
    assert all(weight >= 0 for weight in task.weights.values())
    torch.manual_seed(0)
    model = task.build_model()
    check_evaluation(task, model, batch, active)
    check_sums(task, model, batch, active, tolerance)
    check_gradients(task, model, batch, active)
    check_bounds(task, batch, active)
    check_nothing_valid(task, model, batch)


def check_prepare(task: Task, host_batch: dict[str, np.ndarray]) -> Batch:
    count = len(host_batch["records"])
    for prepare in (task.prepare, task.prepare_plain):
        arrays = prepare(host_batch, np.random.default_rng(5))
        for name, array in arrays.items():
            assert len(array) == count, f"{name}: leading dimension {len(array)}, not {count}"
            assert array.dtype.names is None, f"{name} is structured"
            assert array.dtype not in FORBIDDEN, f"{name} is {array.dtype}, which torch can't collate or shift"
        again = prepare(host_batch, np.random.default_rng(5))
        assert all(np.array_equal(array, again[name], equal_nan=True) for name, array in arrays.items())
        for rank in range(3):  # each row gets the same numbers, whoever makes it
            own = share_of(host_batch, RankSlice(rank, 3))
            part = prepare(own, RankSlice(rank, 3).stream(np.random.default_rng(5), count))
            for name, array in part.items():
                assert_rows(array, arrays[name][rank::3], name)
    plain = task.prepare_plain(host_batch, np.random.default_rng(5))
    other = task.prepare_plain(host_batch, np.random.default_rng(6))
    assert plain.keys() == arrays.keys() == other.keys()
    return {name: torch.from_numpy(array) for name, array in plain.items()}


def share_of(batch: dict[str, np.ndarray], share: RankSlice) -> dict[str, np.ndarray]:
    """The stored rows of a share."""
    groups: dict[str, Any] = {name.removesuffix("_offset"): {} for name in batch if name.endswith("_offset")}
    for name in batch.keys() - {"records", *(f"{group}_offset" for group in groups)}:
        group, _, member = name.partition("_")
        groups[group][member] = batch[name].dtype
    rows = share.rows(np.arange(len(batch["records"])))
    return select(batch, rows, Layout("toy", 1, batch["records"].dtype, groups))


def assert_rows(part: np.ndarray, whole: np.ndarray, name: str) -> None:
    """Equal but for pads, of which a batch with a longer row has more."""
    shared = tuple(slice(min(a, b)) for a, b in zip(part.shape, whole.shape, strict=True))
    assert part.shape[0] == whole.shape[0]
    assert np.array_equal(part[shared], whole[shared], equal_nan=True), name


def check_evaluation(task: Task, model: nn.Module, batch: Batch, active: frozenset[str]) -> None:
    """Deterministic in eval mode; tensors of the right kind; nothing kept that would poison training later."""
    with evaluating(model):
        one, metrics = task.losses(model, batch, active)
        two, _ = task.losses(model, batch, active)
        outputs = task.outputs(model, batch)
    assert set(one) == set(two) == active
    for term, loss in one.items():
        assert loss.ndim == 0
        assert loss.dtype == torch.float32
        assert torch.equal(loss, two[term]), f"{term} is not deterministic in eval mode"
        assert torch.isfinite(loss)
    for name, value in metrics.items():
        assert value.ndim == 0
        assert name.split("/")[0] in active, f"metric {name} is not named term/name"
        assert not value.requires_grad, f"metric {name} carries a gradient"
    assert outputs
    for name, value in outputs.items():
        shown = value[~value.isnan()]
        assert shown.numel(), f"output {name} is masked out whole"
        assert shown.abs().max() < 1e6, f"output {name} holds masked entries"


def check_sums(task: Task, model: nn.Module, batch: Batch, active: frozenset[str], tolerance: float) -> None:
    """Losses, metrics, counts and bounds of slices (a ragged last one) add up to those of the whole."""
    size = rows(batch)
    parts = [slice_batch(batch, start, min(start + 5, size)) for start in range(0, size, 5)]
    model.eval()

    def sums(part: Batch) -> dict[str, float]:
        losses, metrics = task.losses(model, part, active)
        bounds = task.bounds(part)
        found = {f"loss {name}": value.item() for name, value in losses.items()}
        found |= {f"metric {name}": value.item() for name, value in metrics.items()}
        found |= {f"count {name}": float(value) for name, value in task.counts(part).items()}
        found |= {f"chance {name}": pair[0] for name, pair in bounds.items()}
        return found | {f"floor {name}": pair[1] for name, pair in bounds.items()}

    whole = sums(batch)
    pieces = [sums(part) for part in parts]
    for name, value in whole.items():
        assert sum(piece[name] for piece in pieces) == pytest.approx(value, rel=tolerance, abs=1e-4), name
    for term in active:  # only what is asked for is computed, and it is the same
        losses, metrics = task.losses(model, batch, frozenset({term}))
        assert set(losses) == {term}
        assert {name.split("/")[0] for name in metrics} <= {term}
        assert losses[term].item() == pytest.approx(whole[f"loss {term}"], rel=tolerance, abs=1e-4)


def check_gradients(task: Task, model: nn.Module, batch: Batch, active: frozenset[str]) -> None:
    """The active terms together reach every parameter; also after an evaluation in inference mode."""
    model.train()
    torch.stack(list(task.losses(model, batch, active)[0].values())).sum().backward()
    cut = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not cut, f"no gradient reaches {cut}"
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.zero_grad()


def check_bounds(task: Task, batch: Batch, active: frozenset[str]) -> None:
    for term, (chance, floor) in task.bounds(batch).items():
        assert 0 <= floor < chance or task.counts(batch)[term] == 0, f"{term}: floor {floor}, chance {chance}"


def check_nothing_valid(task: Task, model: nn.Module, batch: Batch) -> None:
    """Rows of `batch` in which a term has no item give a zero with a graph."""
    for term in active_terms(task):
        bare = [i for i in range(rows(batch)) if not task.counts(slice_batch(batch, i, i + 1))[term]]
        if not bare:
            continue
        part = {name: value[bare] for name, value in batch.items()}
        loss = task.losses(model, part, frozenset({term}))[0][term]
        assert loss.item() == 0, f"{term} counts no item but its sum is {loss.item()}"
        assert loss.requires_grad, f"{term}: a zero without a graph"
        loss.backward()
        model.zero_grad()


@pytest.mark.parametrize("task", [ToyTask(), ToyTask(norm="batch", dropout=0.3)])
def test_toy_task_keeps_the_contract(task: ToyTask) -> None:
    check_task(task, {"records": toy_records(23)})


@pytest.mark.parametrize("options", [{"relations": False}, {"causal": True, "repeats": 2, "dropout": 0.2}])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_latin_task_keeps_the_contract(options: dict[str, Any], smoothing: float) -> None:
    model = {"width": 16, "layers": 1, "heads": 2, **options}
    config = load("latin_quick", {"model": model, "loss": {"label_smoothing": smoothing}})
    assert isinstance(config, LatinConfig)
    records = np.concatenate([pool.pack(pool.generate(size, 8, seed=size)) for size in (3, 4, 5)])
    check_task(LatinTask(config), {"records": records})


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"trunk": "transformer", "dropout": 0.1}, "data": {"delay": [0, 3]}},
        {"model": {"trunk": "gru", "autoregressive": False}, "loss": {"focal": 2.0, "rare": 0.5}},
        {"model": {"trunk": "residual", "norm": "rms"}, "loss": {"label_smoothing": 0.1}},
    ],
)
def test_melee_keeps_the_contract(sections: dict[str, Any]) -> None:
    check_task(melee_task(**sections), stretches(game(200), held_out=False))


def test_tic_tac_toe_keeps_the_contract() -> None:
    config = load_cycle("tictactoe").network
    games = list(play_games(TicTacToe(), uniform, range(6), SelfPlayOptions(parallel=6, num_simulations=8)))
    batch = TICTACTOE.game.batch(games, {number: number for number in range(6)})
    batch["records"]["result"][::5] = UNKNOWN
    batch["records"]["policy"][::7] = 0
    check_task(TicTacToeTask(config), batch)


def _cached(self: ToyTask, model: nn.Module, batch: Batch, active: frozenset[str]) -> Any:
    if not hasattr(self, "cache"):
        self.cache = torch.ones(6)  # an inference tensor, if made there
    return ToyTask.losses(self, model, {**batch, "x": batch["x"] * self.cache}, active)


def test_a_cache_made_in_inference_mode_is_found() -> None:
    """An inference tensor saved for backward stops training with a RuntimeError much later."""

    task = type("Learned", (ToyTask,), {"losses": _cached})()
    model = task.build_model()
    batch = check_prepare(task, {"records": toy_records(8)})
    batch["x"].requires_grad_()
    with evaluating(model):
        task.losses(model, batch, frozenset({"class"}))
    with pytest.raises(RuntimeError, match="Inference tensors"):
        task.losses(model, batch, frozenset({"class"}))
