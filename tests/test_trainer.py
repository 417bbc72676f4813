"""The training loop: exact resume, validation, best, stops, interrupts, checks at the start."""

import errno
import itertools
import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved import equal, history
from torch import Tensor, nn
from toy_task import (
    Compiled,
    Hungry,
    Scaled,
    ToyData,
    ToySource,
    ToyTask,
    toy_batch,
    toy_held_out,
    toy_runtime,
    toy_trainer,
)

from matrixlib import config as configuration
from matrixlib.config import Config
from matrixlib.engine import diagnostics
from matrixlib.engine import metrics as metrics_module
from matrixlib.engine.checkpoint import CheckpointError
from matrixlib.engine.curriculum import Curriculum, Phase, StagesConfig
from matrixlib.engine.health import TrainingHalted
from matrixlib.engine.heartbeat import Heartbeat
from matrixlib.engine.memory import Monitor
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.signals import Terminated
from matrixlib.engine.stats import Action, Event, Stats
from matrixlib.engine.task import Batch
from matrixlib.engine.trainer import Trainer
from matrixlib.tasks import load_config

STEPS = 12
CHANGES: dict[str, Any] = {
    "optim": {"warmup_steps": 3, "ema_decay": 0.9, "learning_rate": 0.01},
    "train": {"batch_size": 20, "statistics_interval": 4, "heartbeat_seconds": 100},
    "validation": {"interval": 3, "full_every": 2, "sample": 24, "batch_size": 16, "min_delta": 0.0},
    "checkpoint": {"interval": 5, "keep": 2},
}


def settings(**sections: dict[str, Any]) -> Config:
    return load_config("demo", configuration.merge(CHANGES, sections))


def build(
    folder: Path,
    task: ToyTask | None = None,
    config: Config | None = None,
    source: ToySource = ToySource(20),  # noqa: B008 - frozen
    validation: Callable[[str], Iterable[Batch]] = toy_held_out,
    data: ToyData | None = None,
    **more: Any,
) -> Trainer:
    data = data or ToyData(task or ToyTask(dropout=0.3, norm="batch"), source, validation)
    given = {"steps": STEPS, "state_extra": {"config": {"name": "toy"}}, **more}
    return toy_trainer(folder, config or settings(), data, **given)


def train(folder: Path, stop: int | None = None, **more: Any) -> tuple[Trainer, list[Stats]]:
    """A run that begins or goes on in `folder`, after its updates."""
    trainer = build(folder, **more)
    trainer.resume()
    return trainer, list(trainer.train(stop))


def killed(trainer: Trainer, updates: int, copy: Path) -> Path:
    """The run's folder as a process leaves it that is killed after so many updates, with every checkpoint written that
    was begun.
    """
    running = trainer.train()
    for _ in range(updates):
        next(running)
    trainer.checkpoints.join()
    shutil.copytree(trainer.metrics.path.parent, copy)
    running.close()
    return copy


def state(trainer: Trainer) -> dict[str, Any]:
    """That of the newest checkpoint."""
    return trainer.checkpoints.newest().state


def weights(trainer: Trainer) -> dict[str, Tensor]:
    averages = {f"ema.{name}": value.clone() for name, value in trainer.ema.state_dict().items()} if trainer.ema else {}
    return {name: value.clone() for name, value in trainer.model.state_dict().items()} | averages


class NoisySource(ToySource):
    """A DataLoader draws its base seed from torch's global stream when it starts: a resumed run starts one more."""

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        torch.rand(3)
        yield from super().batches(start, stop)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Trainer], None]:
    """Asserts that a run is bit for bit the uninterrupted one."""
    folder = tmp_path_factory.mktemp("whole")
    trainer, stats = train(folder)
    assert [s.step for s in stats] == list(range(1, STEPS + 1))

    def check(other: Trainer) -> None:
        assert equal(weights(other), weights(trainer))
        assert history(other.metrics.path.parent) == history(folder)

    return check


def test_weights_may_be_given_before_the_first_update_and_not_after(tmp_path: Path) -> None:
    given = {name: torch.full_like(t, 0.5) for name, t in ToyTask(norm="batch").build_model().state_dict().items()}
    trainer = build(tmp_path)
    trainer.start_from(given)
    got = [value for value in weights(trainer).values() if value.is_floating_point()]
    assert all((value == 0.5).all() for value in got), "the averaged ones too"
    messages = [text for stats in trainer.train(2) for text in stats.messages]
    assert not any("chance level" in text for text in messages), "they are not expected to be there"
    assert trainer.initial is not None
    with pytest.raises(ValueError, match="has made 2 updates"):
        trainer.start_from(given)
    with pytest.raises(ValueError, match="unknown"):
        build(tmp_path / "other").start_from({**given, "unknown": torch.zeros(1)})


@pytest.mark.parametrize("stop", [1, 5, 6, 11, 12])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, whole: Any, stop: int) -> None:
    train(tmp_path, stop)
    second = build(tmp_path, source=NoisySource(20))
    nn.init.zeros_(second.model.inner.weight)  # so that it must really be loaded
    assert second.resume() == stop
    for _ in second.train():
        torch.rand(1)  # what the caller draws between updates changes nothing
        random.random()
    whole(second)
    assert second.micro_step == 3 * STEPS


def signalling(at: int, number: signal.Signals) -> ToySource:
    """A signal while the batch of update `at` is being made."""
    return ToySource(20, change=lambda raw, batch: signal.raise_signal(number) if raw == at else None)


class Failing(ToyTask):
    """Fails in the middle of update 7 (from 0), once."""

    error: BaseException | None = None

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> Any:
        out = super().losses(model, batch, active)
        if model.training and self.error is not None and self.trainer.step == 7:
            error, self.error = self.error, None
            raise error
        return out


ENDINGS: dict[str, type[BaseException] | None] = {
    "SIGTERM in an update": SystemExit,
    "SIGINT in an update": KeyboardInterrupt,
    "SIGTERM between updates": SystemExit,
    "SIGINT between updates": KeyboardInterrupt,
    "a bug": RuntimeError,
    "leaving the loop": None,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_error_in_an_update_leaves_an_emergency_checkpoint_from_before_it(
    tmp_path: Path, whole: Any, ending: str
) -> None:
    """However it ends, the state after the last whole update is saved, and the same command ends in the same bits."""
    error, (kind, _, when) = ENDINGS[ending], ending.partition(" ")
    number = signal.Signals[kind] if kind.startswith("SIG") else signal.SIGINT
    before, task = signal.getsignal(number), Failing(dropout=0.3, norm="batch")
    source = signalling(6, number) if when == "in an update" else ToySource(20)
    task.trainer = trainer = build(tmp_path, task, source=source)
    task.error = RuntimeError("a bug") if error is RuntimeError else None

    def loop() -> None:
        for stats in trainer.train():
            if stats.step == 7 and when == "between updates":
                signal.raise_signal(number)  # while a plot is drawn, say
            if stats.step == 7 and error is None:
                break

    if error is None:
        loop()
    else:
        with pytest.raises(error) as caught:
            loop()
        assert caught.value.__notes__ == [
            "stopped after 7 updates; rerun the same command or notebook to resume from the checkpoint of update 7"
        ]
        assert getattr(caught.value, "code", 143) == 143
    assert signal.getsignal(number) == before
    assert trainer.checkpoints.newest().step == 7
    assert json.loads((tmp_path / "heartbeat.json").read_text())["phase"] == "stopped"
    again, stats = train(tmp_path)
    assert stats[0].step == 8
    whole(again)


def failing_at(trainer: Trainer, update: int, patch: pytest.MonkeyPatch) -> None:
    """An error in the middle of `update` (from 0): the weights have moved and their averages have not."""
    average = trainer.ema.update

    def failing() -> None:
        average()
        if trainer.step == update:
            patch.undo()
            raise RuntimeError("half-way")

    patch.setattr(trainer.ema, "update", failing)


def test_an_error_while_weights_move_saves_nothing_half_made(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same trainer is entered again, as a notebook's cell is: what was half-made is not trained on."""
    trainer, early = build(tmp_path), build(tmp_path / "early")
    failing_at(trainer, 7, monkeypatch)
    with pytest.raises(RuntimeError, match="half-way") as caught:
        list(trainer.train())
    assert "checkpoint of update 6" in caught.value.__notes__[0]
    assert trainer.checkpoints.newest().step == 6
    assert next(iter(trainer.train())).step == 7
    list(trainer.train())
    whole(trainer)
    failing_at(early, 2, monkeypatch)
    with pytest.raises(RuntimeError, match="half-way"):
        list(early.train())
    with pytest.raises(ValueError, match="no checkpoint yet: reopen the run"):
        list(early.train())


@pytest.mark.parametrize("part", ["save", "join"])
def test_what_fails_while_saving_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The emergency checkpoint fails, or an earlier one did, which does not stop it."""
    task = Failing()
    task.error, task.trainer = RuntimeError("a bug"), (trainer := build(tmp_path, task))
    original = getattr(trainer.checkpoints, part)

    def failing(*arguments: Any, **more: Any) -> Any:
        if trainer.step == 7 and not task.error:
            monkeypatch.undo()
            raise CheckpointError("the disk is full")
        return original(*arguments, **more)

    monkeypatch.setattr(trainer.checkpoints, part, failing)
    with pytest.raises(RuntimeError, match="a bug") as caught:
        list(trainer.train())
    assert caught.value.__notes__[0] == "the disk is full"
    assert trainer.checkpoints.newest().step == (7 if part == "join" else 6)


def test_a_disk_that_is_full_ends_the_run_with_that_error_and_nothing_over_it(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(stats: Stats, batch: Batch) -> None:
        monkeypatch.setattr(MetricsLog, "write", full)
        monkeypatch.setattr("matrixlib.engine.heartbeat.write_json", full)

    with pytest.raises(OSError, match="No space left on device") as caught:
        train(tmp_path, hooks=[(fill, 8)])
    first, last = caught.value.__notes__
    assert (
        first == "stopped after 8 updates; rerun the same command or notebook to resume from the checkpoint of update 6"
    )
    assert "heartbeat.json could not be written" in last
    monkeypatch.undo()
    again, stats = train(tmp_path)
    assert stats[0].step == 7
    whole(again)


def test_a_loader_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = ToySource.batches
    monkeypatch.setattr(ToySource, "batches", lambda self, start, stop: batches(self, start, 3))
    with pytest.raises(ValueError, match="after 3 of 12"):
        train(tmp_path)


def test_stats_say_what_happened(tmp_path: Path) -> None:
    _, stats = train(tmp_path)
    assert [s.micro_step for s in stats] == [3 * n for n in range(1, STEPS + 1)]
    kinds = {s.step: s.validation["kind"] for s in stats if s.validation}
    assert kinds == {3: "sample", 6: "full", 9: "sample", 12: "full"}
    assert [s.step for s in stats if s.statistics] == [4, 8, 12]
    assert set(stats[3].statistics["outputs"]) == {"class", "plane"}
    assert set(stats[3].statistics["gradient_norm"]) == {"median", "p95", "clip"}
    assert all(s.throughput > 0 and s.seconds > 0 and s.action == "ok" for s in stats)
    assert stats[0].learning_rate == pytest.approx(0.01 / 3)
    rows = history(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[5]["validation"]["losses"] == stats[5].validation["losses"]


def test_first_losses_are_compared_with_chance_and_gradients_looked_at(tmp_path: Path) -> None:
    task = ToyTask(plane_weight=0.0)
    trainer, (first,) = train(tmp_path / "good", 1, task=task)
    assert first.initial["class"] == pytest.approx({"loss": math.log(3), "chance": math.log(3), "floor": 0.0})
    assert trainer.gradients.missing == ("plane.weight", "plane.bias")
    assert not any("plane" in text for text in first.messages), "a head without a weight is idle, which is no fault"
    model = task.build_model()
    model.orphan = nn.Linear(2, 2)
    nn.init.normal_(model.classes.weight, std=5.0)
    _, (first,) = train(tmp_path / "bad", 1, task=task, model=model)
    assert first.messages[0] == "first update: no gradient: orphan.weight, orphan.bias"
    assert any("class loss" in message and "chance level is 1.0986" in message for message in first.messages)


def test_a_parameter_is_dead_that_no_row_uses_and_not_one_that_few_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "DEAD_ROWS", 100)
    model, passes = ToyTask().build_model(), itertools.count()
    model.dead, model.rare = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    model.plane.register_forward_hook(
        lambda head, _, out: out + 0 * model.dead + (head.training and next(passes) == 8) * model.rare
    )
    trainer, stats = train(tmp_path, 2, model=model)
    assert {"dead", "rare"} <= set(trainer.gradients.zero)
    stats += train(tmp_path, model=model)[1]  # resumed
    told = {one.step: text for one in stats for text in one.messages if "gradient" in text}
    text = "dead in the first 100 rows, an all-zero gradient: dead; look at initialisation and loss"
    assert told == {5: text}, "no sooner than after so many rows"


@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_match_that_fails_costs_the_match_and_no_update(tmp_path: Path, number: int, end: type) -> None:
    figures = {"elo": 1.0, "low": 0.0, "high": 2.0, "score": 0.5, "games": 2.0}

    def match(model: nn.Module, step: int, beat: Callable[[], None]) -> dict[str, float] | None:
        if step == 4:
            raise torch.OutOfMemoryError("no memory for 2 GiB\nmore")
        if step == 6:
            signal.raise_signal(number)
            beat()  # ends the match
        return figures if step else None

    sections = {"validation": {"strength": {"every": 2}}, "train": {"statistics_interval": 2}}
    config = settings(**sections, checkpoint={"interval": 100})
    trainer = build(tmp_path / "run", config=config, strength=match)
    with pytest.raises(end):
        list(trainer.train())
    trainer.checkpoints.join()
    assert trainer._signals.interrupts == (number == signal.SIGINT), "counted once"
    assert (trainer.step, trainer.checkpoints.newest().step) == (6, 6)
    rows = history(tmp_path / "run")
    assert {row["step"]: row.get("strength") for row in rows} == {1: None, 2: figures} | dict.fromkeys(range(3, 7))
    assert [row["step"] for row in rows if "match" in row.get("events", {})] == [4, 6]
    assert "no match: OutOfMemoryError: no memory for 2 GiB" in trainer.messages
    after, _ = train(tmp_path / "run", config=config, strength=match)
    whole, _ = train(tmp_path / "plain")
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(after).items())


def test_validation_uses_the_averaged_weights_and_gives_the_raw_ones_back(tmp_path: Path) -> None:
    trainer, stats = train(tmp_path, 4, config=settings(validation={"interval": 4, "full_every": 1}))
    assert trainer.model.training
    copy = trainer.evaluation_model()
    assert not copy.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert torch.equal(copy.inner.weight, trainer.ema.state_dict()["inner.weight"])
    assert not torch.equal(copy.inner.weight, trainer.model.inner.weight)
    batch, task = toy_batch(50, seed=77), trainer.task
    losses, _ = task.losses(copy, batch, frozenset({"class"}))
    expected = losses["class"].item() / task.counts(batch)["class"]
    assert stats[3].validation["losses"]["class"] == pytest.approx(expected, rel=1e-5)


def test_best_is_kept_across_a_resume(tmp_path: Path) -> None:
    config = settings(validation={"interval": 2, "full_every": 1}, optim={"learning_rate": 0.05})
    stats = train(tmp_path, 6, config=config)[1]
    again, more = train(tmp_path, config=config)
    losses = {s.step: s.validation["loss"] for s in stats + more if s.validation}
    best = min(losses, key=losses.__getitem__)
    assert (again.checkpoints.best.step, again.checkpoints.best.value) == (best, losses[best])
    assert again.checkpoints.pick("best").step == best


def test_early_stop_and_its_memory(tmp_path: Path) -> None:
    validation = {"interval": 2, "full_every": 1, "patience": 2}
    config = settings(validation=validation, optim={"learning_rate": 0.0})
    trainer, stats = train(tmp_path, task=ToyTask(), config=config)
    assert stats[-1].step == trainer.checkpoints.newest().step == 6
    assert "no improvement" in trainer.stop_reason
    assert train(tmp_path, task=ToyTask(), config=config)[1] == []
    _, stats = train(tmp_path, task=ToyTask(), config=settings(validation=validation | {"patience": 0}))
    assert [s.step for s in stats] == list(range(7, 13))


def test_target_loss_stops_or_is_refused_at_once(tmp_path: Path) -> None:
    config = settings(validation={"target_loss": 100.0, "strength": {"every": 4}})
    easy, stats = train(tmp_path / "easy", config=config, strength=lambda model, step, beat: {"elo": step})
    assert stats[-1].step == 6  # the first full validation
    assert [(one.step, one.strength) for one in stats if one.strength] == [(4, {"elo": 4}), (6, {"elo": 6})]
    assert "target loss" in easy.stop_reason
    hard = build(tmp_path / "hard", config=settings(validation={"target_loss": 0.004}))
    with pytest.raises(ValueError, match=r"0\.0050"):  # half of the noise's variance
        hard.train()


def changing(first: int, last: int, change: Callable[[Batch], object]) -> ToySource:
    """The raw batches first..last are changed."""
    return ToySource(20, change=lambda raw, batch: change(batch) if first <= raw <= last else None)


def poison(first: int, last: int) -> ToySource:
    """NaN in the raw batches first..last."""
    return changing(first, last, lambda batch: batch["x"][0].fill_(torch.nan))


def test_updates_that_stay_non_finite_go_back_and_pass_the_bad_batches(tmp_path: Path) -> None:
    _, stats = train(tmp_path, source=poison(6, 15), steps=40)
    (back,) = [i for i, s in enumerate(stats) if s.action == "rollback"]
    assert stats[back].step == 16
    assert "checkpoint of update 6" in stats[back].messages[-1]
    assert "batches 6 to 15 are left out" in stats[back].messages[-1]
    assert (stats[back + 1].step, stats[back + 1].action) == (7, "ok")
    assert stats[back + 1].learning_rate == pytest.approx(0.5 * stats[6].learning_rate)
    assert (stats[-1].step, stats[-1].rollbacks, stats[-1].skipped) == (40, 1, 10)
    assert [row["step"] for row in history(tmp_path)] == list(range(1, 41)), "the rows are those of the run as it is"
    folder = tmp_path / "evidence" / "rollback_1_update_00000016"
    evidence = json.loads((folder / "evidence.json").read_text())
    assert evidence["batches"] == json.loads((folder / "batches.txt").read_text()) == list(range(6, 16))
    assert evidence["rows"][-1]["verdict"] == "rollback"
    assert "not finite" in evidence["last"]


@pytest.mark.parametrize("stop", [8, 14, 20])
def test_a_run_with_a_rollback_resumes_bit_for_bit(tmp_path: Path, stop: int) -> None:
    bad: dict[str, Any] = {"source": poison(6, 15), "steps": 30}
    whole, _ = train(tmp_path / "whole", **bad)
    folder = killed(build(tmp_path / "part", **bad), stop, tmp_path / "killed")
    second, _ = train(folder, **bad)
    assert equal(weights(second), weights(whole))
    assert history(folder) == history(tmp_path / "whole"), "rows after the checkpoint are cut and written again"


SPIKES: dict[str, Any] = {
    "health": {"window": 20, "patience": 3, "rollbacks": 2, "rate_recovery": 4},
    "checkpoint": {"interval": 5, "keep": 3},
    "validation": {"interval": 1000},
}


def spiking(first: int, last: int) -> ToySource:
    """Targets a thousand times too large in the raw batches first..last."""
    return changing(first, last, lambda batch: batch["target"].mul_(1000))


def test_a_loss_spike_is_rolled_back(tmp_path: Path) -> None:
    trainer, stats = train(tmp_path, source=spiking(31, 36), config=settings(**SPIKES), steps=60)
    assert [s.action for s in stats].count("rollback") == 2, "three bad batches are left out at a time"
    first = next(s for s in stats if s.action == "rollback")
    assert first.step == 34
    assert "loss above" in first.messages[-1]
    assert "checkpoint of update 30" in first.messages[-1]
    _, calm = train(tmp_path / "calm", config=settings(**SPIKES), steps=60)
    assert stats[-1].loss == pytest.approx(calm[-1].loss, rel=0.3)
    assert all(value.abs().max() < 20 for value in trainer.model.parameters())


@pytest.mark.parametrize("interval", [5, 1000])
def test_a_short_spike_that_leaves_damage_is_rolled_back(tmp_path: Path, interval: int) -> None:
    """Two bad batches, then targets that are a little off: the loss stays inside the band, but above its old level."""

    def change(raw: int, batch: Batch) -> None:
        batch["target"] *= 1000 if raw in (31, 32) else 1
        batch["target"] += 1.5 if raw > 32 else 0

    more = {"checkpoint": {"interval": interval}, "health": {"band": 1000.0, "patience": 9}}
    config = settings(**configuration.merge(SPIKES, more))
    trainer, stats = train(tmp_path, source=ToySource(20, change=change), config=config, steps=45)
    back = [s for s in stats if s.action != "ok"]
    assert "settled" in state(trainer)["health"]["last"]
    if interval == 5:
        assert back[0].action == "rollback"
        assert "checkpoint of update 30" in back[0].messages[-1]
    else:
        assert [s.action for s in back] == ["skip"], "nowhere to go back to: no reason to stop"
        assert [message.event for message in back[0].messages] == [Event.SKIP], "told, and counted"
        assert (back[0].skipped, history(tmp_path)[-1]["skipped"]) == (1, 1)


def test_the_checkpoint_of_the_interval_waits_while_the_loss_is_up(tmp_path: Path) -> None:
    config = settings(**configuration.merge(SPIKES, {"health": {"patience": 9}}))
    trainer = build(tmp_path, source=spiking(33, 35), config=config, steps=60)
    for stats in trainer.train():
        newest = trainer.checkpoints.steps()[-1:]
        if stats.step == 36:
            assert newest == [30], "35 was in the middle of it"
        if stats.step > 36 and newest > [30]:
            break
    assert newest[0] < 45, "the first steady update makes up for it"
    assert not any(state(trainer)["health"][name] for name in ("outliers", "nonfinite", "before"))


def test_trouble_without_end_halts_with_evidence(tmp_path: Path) -> None:
    diagnosis = r"10 updates in a row.*rolled back 3 times.*optim\.learning_rate.*evidence"
    with pytest.raises(TrainingHalted, match=diagnosis):
        train(tmp_path, source=poison(6, 999), steps=400)
    assert history(tmp_path)[-1]["verdict"] == "halt"
    assert build(tmp_path).checkpoints.newest().step == 6
    kept = sorted(path.name.split("_update")[0] for path in (tmp_path / "evidence").iterdir())
    assert kept == ["halt_4", "rollback_1", "rollback_2", "rollback_3"]
    early = build(tmp_path / "early", source=poison(1, 99), steps=40, config=settings(checkpoint={"interval": 10}))
    with pytest.raises(TrainingHalted, match="no checkpoint from before it"):
        list(early.train())
    assert early.step == 11


def test_a_smaller_micro_batch_is_stored_with_the_run(tmp_path: Path) -> None:
    _, stats = train(tmp_path, task=Hungry(room=4))
    assert stats[0].micro_step == 5
    assert any("micro-batch of 8" in message for message in stats[0].messages)
    again, more = train(tmp_path, task=Hungry(room=4), steps=STEPS + 1)
    assert not any("out of memory" in message for s in stats[1:] + more for message in s.messages)
    assert more[-1].micro_step == 5 * (STEPS + 1)
    assert again.adapted, "another machine would not get these bits"
    train(tmp_path / "whole", 2)
    _, stats = train(tmp_path / "whole", 3, runtime=toy_runtime(20))
    assert stats[0].micro_step == 7, "what was not halved may be another number"


def test_every_checkpoint_damaged_or_of_another_model_is_an_error(tmp_path: Path) -> None:
    train(tmp_path, 3)
    for other in (ToyTask(width=13, norm="batch"), ToyTask(norm="layer")):
        with pytest.raises(CheckpointError, match="another name"):
            build(tmp_path, other).resume()
    checkpoint = build(tmp_path).checkpoints.newest()
    for strange in ({"gate": None}, {"gate": 3}, {"chunk": []}, {"skip": [[1]]}, {"saves_by_clock": "x"}):
        again = build(tmp_path)
        again.checkpoints.newest = lambda before=None, own=strange: replace(checkpoint, state=checkpoint.state | own)
        with pytest.raises(CheckpointError, match=r"does not fit this run .*another name"):
            again.resume()


def test_names_in_a_checkpoint_are_plain_although_the_model_is_compiled(tmp_path: Path) -> None:
    task = ToyTask()
    trainer, _ = train(tmp_path, task=task, model=Compiled(task.build_model(), good=999))
    newest = trainer.checkpoints.newest()
    names = set(task.build_model().state_dict())
    assert set(newest.tensors["model"]) == set(newest.tensors["ema"]) == names
    assert {name.rpartition("/")[0] for name in newest.tensors["optimiser"]} == names
    assert newest.state["config"] == {"name": "toy"}
    plain = build(tmp_path, task)
    assert plain.resume() == STEPS
    assert equal(weights(plain), weights(trainer))


def test_the_loss_scale_is_resumed(tmp_path: Path) -> None:
    scaled: dict[str, Any] = {"runtime": Scaled(**toy_runtime(8).to_dict()), "steps": 20}
    whole, stats = train(tmp_path / "whole", **scaled)
    assert (stats[-1].overflows > 0, stats[-1].skipped) == (True, 0)
    assert stats[3].statistics["loss_scale"] > 1
    train(tmp_path / "part", 9, **scaled)
    part, stats = train(tmp_path / "part", **scaled)
    assert stats[0].step == 10
    assert equal(weights(part), weights(whole))


def in_phases(
    folder: Path, kind: str = "fractions", source: type[ToySource] = ToySource, **more: Any
) -> tuple[Trainer, ToyData]:
    """A run whose second half (or whose phase after two good validations) gets other batches."""
    config = load_config("latin_quick").curriculum.model_copy(
        update={"kind": kind, "metric": "class/hits", "up": 0.2, "down": 0.0, "patience": 2, "dwell": 1}
    )
    halves = {"half": StagesConfig(stages=("first", "second"), fractions=(0.5, 0.5))}
    task = ToyTask(dropout=0.3, norm="batch")

    def stages(phase: Phase) -> tuple[ToyTask, ToySource]:
        return task, source(20, seed=phase.number)

    data = ToyData(task, source(20), stages=stages)
    return build(folder, task, curriculum=Curriculum(config, halves), data=data, **more), data


@pytest.mark.parametrize("kind", ["fractions", "adaptive"])
@pytest.mark.parametrize("stop", [5, 6, 7])
def test_phases_change_at_their_update_and_resume_bit_for_bit(tmp_path: Path, kind: str, stop: int) -> None:
    whole, data = in_phases(tmp_path / "whole", kind)
    stats = list(whole.train())
    assert [s.phase for s in stats] == [0] * 6 + [1] * 6
    assert [phase.values["half"] for phase in data.entered] == ["first", "second"]
    assert state(whole)["health"]["losses"] == [s.loss for s in stats[6:]], "the band starts anew with the phase"
    part = tmp_path / "part"
    list(in_phases(part, kind)[0].train(stop))
    again, _ = in_phases(part, kind)
    assert again.resume() == stop
    list(again.train())
    assert equal(weights(again), weights(whole))
    assert history(part) == history(tmp_path / "whole")
    assert again.curriculum.history == [(0, 0), (6, 1)]


def test_a_rollback_over_a_phase_change_goes_back_to_the_old_phase(tmp_path: Path) -> None:
    class Bad(ToySource):
        def batches(self, start: int, stop: int) -> Iterator[Batch]:
            for i, batch in enumerate(super().batches(start, stop), start):
                if self.seed == 1 and self.unskipped_index(i) in range(6, 12):
                    batch["x"][:] = torch.nan
                yield batch

    config = settings(health={"skips": 2, "rollbacks": 9}, checkpoint={"interval": 5, "keep": 2})
    trainer, _ = in_phases(tmp_path, source=Bad, config=config)
    stats = list(trainer.train())
    assert [s.action for s in stats].count("rollback") == 3
    assert (stats[-1].step, stats[-1].phase) == (STEPS, 1)
    assert state(trainer)["skip"] == [[6, 8], [8, 10], [10, 12]]


def test_tight_memory_cuts_the_chunk_and_the_checkpoint_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk of the self-supervised terms follows the memory, and a resumed run goes on with it."""
    figures = {"rss_mib": 95.0, "rss_peak_mib": 95.0, "total_mib": 100.0}
    monkeypatch.setattr("matrixlib.engine.trainer.Monitor", partial(Monitor, read=lambda device: figures))
    trainer, stats = train(tmp_path, task=ToyTask(gate_plane=True))
    words = "the self-supervised heads work on 4 of 8 rows at once after update 10"
    assert any(words in message for s in stats for message in s.messages)
    assert trainer.model.chunk == 4
    again = build(tmp_path, ToyTask(gate_plane=True), steps=STEPS + 1)
    again.resume()
    assert again.model.chunk == 4
    ungated, _ = train(tmp_path / "ungated")
    assert state(ungated)["chunk"]["changes"] == 0


def test_chunks_that_have_begun_on_mps_can_grow_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the cache of the allocator counts as used, so what is used never falls by itself."""
    cache = [0.0]

    def read(device: torch.device) -> dict[str, float]:
        cache[0] = max(cache[0], 95.0 if not trainer.model.chunk else 70.0)
        return {"rss_mib": 9.0, "allocated_mib": 9.0, "driver_mib": cache[0], "device_total_mib": 100.0}

    monkeypatch.setattr("matrixlib.hardware.backend.empty_cache", lambda device: cache.__setitem__(0, 0.0))
    trainer = build(tmp_path, ToyTask(gate_plane=True))
    trainer.model.chunk = 0
    trainer._memory = Monitor(torch.device("mps"), trainer.config.memory, read)
    sizes = []
    for _ in range(12):
        trainer._check_memory()
        sizes.append(trainer.model.chunk)
    assert sizes == [4] * 10 + [0, 4]


def test_a_checkpoint_comes_by_the_clock_too(tmp_path: Path) -> None:
    """With updates of seconds an interval in updates may be hours."""
    trainer = build(tmp_path, config=settings(checkpoint={"interval": 1000, "minutes": 1e-9}))
    assert build(killed(trainer, 4, tmp_path / "copy")).resume() == 4
    assert not trainer.adapted, "no rollback went to one of them"
    auto, stats = train(tmp_path / "auto", config=settings(validation={"interval": "auto"}))
    assert [s.step for s in stats if s.validation] == [STEPS], "the first is due later than this run is long"
    assert auto.adapted


def test_a_run_without_room_for_its_checkpoints_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match="no room for this run: up to 4 checkpoints"):
        build(tmp_path).train()


def test_rows_are_safe_from_a_power_loss_before_the_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, order = build(tmp_path), list[str]()
    save = trainer.checkpoints.save

    def saved(step: int, *args: Any, **more: Any) -> Path:
        order.append(f"checkpoint {step}")
        return save(step, *args, **more)

    monkeypatch.setattr(trainer.metrics, "sync", lambda: order.append(f"log {history(tmp_path)[-1]['step']}"))
    monkeypatch.setattr(trainer.checkpoints, "save", saved)
    list(trainer.train())
    assert order == [f"{kind} {step}" for step in (5, 6, 10, 12) for kind in ("log", "checkpoint")]


def test_interrupts_in_the_middle_of_trouble_keep_the_last_good_checkpoint(tmp_path: Path) -> None:
    """Each saves a checkpoint; two of them would else push out the one that a rollback goes to."""
    config = settings(health={"skips": 6}, checkpoint={"interval": 4}, validation={"interval": 100})
    bad: dict[str, Any] = {"source": poison(5, 99), "steps": 40, "config": config}
    for stop in (6, 7, 8):
        assert 4 in train(tmp_path, stop, **bad)[0].checkpoints.steps()
    trainer = build(tmp_path, **bad)
    trainer.resume()
    action = next(stats for stats in trainer.train() if stats.action is Action.ROLLBACK)
    assert "checkpoint of update 4" in action.messages[-1]


def test_own_numbers_are_logged_in_the_next_row_and_those_after_the_last_update_in_its_own(tmp_path: Path) -> None:
    trainer = build(tmp_path, hooks=[(lambda stats, batch: trainer.log("rows", len(batch["x"])), 4)])
    for stats in trainer.train():
        if stats.step in (2, STEPS):
            trainer.log("norm", stats.step)
    found = {row["step"]: row["extra"] for row in metrics_module.read(trainer.metrics.path) if "extra" in row}
    assert found == {3: {"norm": 2}, 4: {"rows": 20}, 8: {"rows": 20}, STEPS: {"rows": 20, "norm": STEPS}}


def test_a_long_run_logs_every_kth_update_and_whatever_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_ROWS", 4)
    log = MetricsLog(tmp_path / "metrics.jsonl", metrics_module.interval(STEPS * 2))
    config = settings(validation={"interval": 100}, train={"statistics_interval": 100})
    _, stats = train(tmp_path, source=poison(8, 9), steps=STEPS * 2, config=config, metrics=log)
    rows = metrics_module.read(log.path)
    assert [row["step"] for row in rows] == [1, 6, 9, 10, 12, 18, 24]
    assert [row.get("updates", 1) for row in rows] == [1, 5, 3, 1, 2, 6, 6]
    seconds = sum(row["seconds"] * row.get("updates", 1) for row in rows)
    assert seconds == pytest.approx(sum(s.seconds for s in stats))


def test_the_heartbeat_is_written_at_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    trainer = build(tmp_path, config=settings(train={"heartbeat_seconds": 5}))
    monkeypatch.setattr("matrixlib.engine.trainer.time", SimpleNamespace(monotonic=lambda: now[0]))

    def beat(at: float, step: int, phase: str = "training", force: bool = False) -> dict[str, Any]:
        now[0], trainer.step = at, step
        trainer.write_heartbeat(phase, force)
        return json.loads((tmp_path / "heartbeat.json").read_text())

    first = beat(0.0, 1)
    assert {"step": 1, "steps": STEPS, "phase": "training", "pid": os.getpid(), "interval": 5}.items() <= first.items()
    assert Heartbeat.model_validate(first).process_lives(), "what reads it is what wrote it"
    assert 10 < first["rss_mib"] <= first["rss_peak_mib"] < 1e6
    assert [beat(4.9, 2)["step"], beat(4.9, 2, "validation", force=True)["step"], beat(10.0, 3)["step"]] == [1, 2, 3]
