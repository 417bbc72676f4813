"""The mean of the weights over the last part of a run, and batch norms that fit averaged weights."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import equal, history
from test_trainer import build, poison, settings, weights
from torch import Tensor
from toy_task import ToyNet, ToySource

from matrixlib.config import Config
from matrixlib.engine import checkpoint as checkpoints
from matrixlib.engine.averages import BATCHES, SWA
from matrixlib.engine.task import Batch, slice_batch
from matrixlib.tasks import load_config

FREE = {"optimiser": "schedule_free", "schedule": "constant"}
SWA_HALF = {"swa": 0.5, "swa_interval": 2}
SWA_TWO = {"swa": 0.5, "swa_interval": 4}


def averaged(optim: dict[str, Any], **sections: dict[str, Any]) -> Config:
    if "optimiser" in optim:
        pytest.importorskip("schedulefree")
    return settings(optim=optim, **sections)


def test_it_is_the_mean_of_the_saved_weights(tmp_path: Path) -> None:
    """Those after updates 12, 10 and 8 of 12; before, the raw weights are judged and saved."""
    trainer = build(tmp_path, config=averaged(SWA_HALF, checkpoint={"interval": 1, "keep": 20}))
    list(trainer.train())
    saved = {step: checkpoints.read(tmp_path / f"checkpoints/step_{step:08d}") for step in range(1, 13)}
    parameters = [name for name, _ in trainer.model.named_parameters()]
    last, early = saved[12].tensors, saved[7].tensors
    for name in parameters:
        mean = torch.stack([saved[step].tensors["model"][name].double() for step in (8, 10, 12)]).mean(0)
        torch.testing.assert_close(last["ema"][name].double(), mean, rtol=0, atol=1e-7)
        assert torch.equal(early["ema"][name], early["model"][name])
    assert equal(dict(trainer.evaluation_model().state_dict()), last["ema"])
    assert not torch.equal(last["ema"]["norm.running_mean"], last["model"]["norm.running_mean"])
    kinds = {step: saved[step].state["ema_averages"] for step in (7, 8, 11, 12)}
    assert kinds == {7: 0, 8: 1, 11: 2, 12: 3}


@dataclass(frozen=True)
class Failing(ToySource):
    """The data are gone from batch 8 of the training on: after the first weights of the mean, before a validation."""

    gone: list[int] = field(default_factory=list)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        for number, batch in enumerate(super().batches(start, stop), start):
            if self.gone or (number, stop) == (8, 12):
                self.gone.append(number)
                raise RuntimeError("no batch")
            yield batch


@pytest.mark.parametrize(("optim", "stop"), [(SWA_TWO, 9), (SWA_TWO, None), (FREE, 5)], ids=["swa", "error", "free"])
def test_it_resumes_bit_for_bit(tmp_path: Path, optim: dict[str, Any], stop: int | None) -> None:
    """The validations too, also after an emergency checkpoint, for which nothing is made of the data."""
    config = averaged(optim, validation={"interval": 3})
    whole = build(tmp_path / "whole", config=config)
    list(whole.train())
    if stop is None:
        with pytest.raises(RuntimeError, match="no batch"):
            list(build(tmp_path / "part", config=config, source=Failing(20)).train())
    else:
        list(build(tmp_path / "part", config=config).train(stop))
    part = build(tmp_path / "part", config=config)
    assert part.resume() == (8 if stop is None else stop)
    list(part.train())
    assert equal(weights(part), weights(whole))
    assert history(tmp_path / "part") == history(tmp_path / "whole")


class Early(ToyNet):
    """Dropout stands before the batch norm, too: it would be in the statistics."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(self.dropout(x))


@pytest.mark.parametrize("optim", [SWA_HALF, FREE], ids=["swa", "free"])
def test_batch_norms_get_the_statistics_of_training_rows_and_nothing_else_moves(
    tmp_path: Path, optim: dict[str, Any]
) -> None:
    """Those that torch's own function makes without dropout; a run that is judged more often is the same run."""
    network = Early(dropout=0.3, norm="batch")
    often = build(tmp_path / "often", config=averaged(optim, validation={"interval": 1}), model=copy.deepcopy(network))
    list(often.train())
    seldom = build(tmp_path / "seldom", config=averaged(optim, validation={"interval": 100}), model=network)
    list(seldom.train())
    assert equal(weights(often), weights(seldom))
    model = often.evaluation_model()
    made = {name: value.clone() for name, value in model.named_buffers()}
    oracle: ToyNet = copy.deepcopy(model)  # type: ignore[assignment]
    oracle.dropout.p = 0.0
    batches = ToySource(20).batches(0, BATCHES)
    rows = [slice_batch(batch, start, start + 8)["x"] for batch in batches for start in (0, 8, 16)]
    torch.optim.swa_utils.update_bn(rows, oracle)
    assert made["norm.num_batches_tracked"] == len(rows)
    for name, value in oracle.named_buffers():
        torch.testing.assert_close(made[name], value)


def test_bad_rows_leave_no_trace_in_the_statistics(tmp_path: Path) -> None:
    trainer = build(tmp_path, config=averaged(SWA_HALF, health={"skips": 5}), source=poison(3, 3))
    stats = list(trainer.train())
    assert stats[-1].skipped == 1
    assert all(value.isfinite().all() for value in trainer.evaluation_model().buffers())
    assert stats[-1].validation is not None
    assert math.isfinite(stats[-1].validation["loss"])


def test_the_last_part_of_a_run_is_averaged_of_a_longer_one_too() -> None:
    """The weights are the numbers of the updates."""
    config = load_config("demo", {"optim": {"swa": 0.25, "swa_interval": 4}}).optim
    model = torch.nn.Linear(1, 1, bias=False)
    swa = SWA(model, config.swa, config.swa_interval)

    def go(steps: int, start: int = 0) -> list[int]:
        taken = []
        for update in range(start, steps):
            torch.nn.init.constant_(model.weight, update + 1)
            before = swa.averages
            swa.after(steps, update, moved=update % 3 > 0)  # an update that is skipped has its weights, too
            taken += [update + 1] if swa.averages > before else []
        assert swa.state_dict()["weight"].item() == pytest.approx(sum(taken[-swa.averages :]) / swa.averages)
        return taken

    assert go(80) == [64, 68, 72, 76, 80]
    assert go(160, start=80)[-1] == 160
    assert swa.averages == 10, "those of the end that it no longer is have left"
    swa = SWA(model, 0.001, 4)
    assert go(80) == [80]
