"""Sweeps: spaces, what is tried next, pruning, failures, and a sweep that is really killed."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from matrixlib import config
from matrixlib.config import ConfigError, read_yaml_file
from matrixlib.engine import storage
from matrixlib.engine.metrics import MetricsLog
from matrixlib.files import PARAMS, FolderError, read_json, write_json
from matrixlib.hardware import machine
from matrixlib.runs import (
    processes,
    proposals,
    record,
    sizes,
    studies,
    sweep,
    sweep_config,
    sweep_figures,
    sweep_tables,
    trial,
)
from matrixlib.runs import run as runs
from matrixlib.runs.processes import Processes
from matrixlib.runs.proposals import Told
from matrixlib.runs.sweep_config import Dimension, SweepConfig, load_sweep, request
from matrixlib.runs.trial import Job, Outcome
from matrixlib.tasks import get_task, load_config

RATE = "optim.learning_rate"
BUDGET = "every complete trial has the same budget"
Curve = Callable[[Mapping[str, Any], int, int], float]
"""(overrides, seed, update) -> validation loss."""


class Fake:
    """A fleet whose trainings are a function: it leaves runs of 12 updates as they lie on disk, and obeys limits."""

    slots = 1

    def __init__(self, root: Path, loss: Curve) -> None:
        self.root, self.loss = root, loss
        self.jobs: list[Job] = []
        self.ended: list[tuple[int, Outcome]] = []

    def share(self, value: Any) -> Any:
        return value

    def submit(self, key: Any, part: Any, *handles: Any) -> None:
        self.jobs.append(job := part.args[0])
        outcome = Outcome("complete")
        for seed, name in job.names.items():
            curve = {step: self.loss(job.overrides, seed, step) for step in range(1, 13)}
            above = [step for step, limit in job.limits.get(seed, {}).items() if curve[step] > limit]
            last = min(above, default=12)
            folder = self.root / name
            folder.mkdir()
            requested = load_config(job.preset, config.merge(job.overrides, {"seed": seed}))
            data = {"preset": job.preset, "requested": config.dump(requested), "catalogue": ""}
            write_json(folder / "run.json", data)
            (folder / "config.yaml").write_text(config.to_yaml(requested))
            with MetricsLog(folder / "metrics.jsonl") as log:
                for step in range(1, last + 1):
                    validation = {"kind": "full", "loss": curve[step], "losses": {}}
                    log.write({"step": step, "loss": 1.0, "seconds": 0.1, "validation": validation})
            if above:
                outcome = Outcome("pruned", "above the median")
                break
            evaluation = {"top1": 1 / curve[12], "policy_kl": curve[12]}
            size = 100 * requested.model.channels**2
            summary = {"complete": True, "seconds": 1.2, "parameters": size, "evaluation": evaluation}
            write_json(folder / "summary.json", summary)
        self.ended.append((job.number, outcome))

    def collect(self) -> list[tuple[int, Outcome]]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        pass


def by_rate(overrides: Mapping[str, Any], seed: int, step: int) -> float:
    """Least at 0.003; every seed shifts all rates alike."""
    return 2 + abs(math.log10(overrides["optim"]["learning_rate"] / 0.003)) + 0.1 * seed + 1 / step


def fake_sweep(reports: Path, loss: Curve, **options: Any) -> tuple[sweep.Sweep, Fake]:
    """A sweep whose trainings are a function, trained."""
    options = {"steps": 12, "overrides": {"validation": {"interval": 1}}} | options
    current = sweep.open_sweep("demo", "cpu", "s", options)
    backend = Fake(reports, loss)
    list(current.train(backend))
    return current, backend


# Spaces

EQUAL = {
    "overrides": {"model": {"channels": 48, "blocks": 4}},
    "equal": "flops",
    "arms": {"plain": {}, "deeper": {"model.blocks": 6}},
}


@given(
    low=st.floats(1e-6, 1e3),
    factor=st.floats(1.01, 1e4),
    log=st.booleans(),
    places=st.lists(st.floats(0, 1), max_size=9),
)
def test_a_range_gives_numbers_in_it_in_order(low: float, factor: float, log: bool, places: list[float]) -> None:
    text = f"{'log ' * log}{low:.6g}..{low * factor:.6g}"
    if float(f"{low:.6g}") >= float(f"{low * factor:.6g}"):
        return
    dimension = Dimension.parse("x", text)
    values = [dimension.at(place) for place in sorted(places)]
    assert values == sorted(values)
    assert all(dimension.low <= value <= dimension.high for value in values)
    assert all(isinstance(value, int) == dimension.whole for value in values)
    assert (dimension.at(0.0), dimension.at(1.0)) == (dimension.tidy(dimension.low), dimension.tidy(dimension.high))


@given(low=st.integers(-50, 50), width=st.integers(1, 40), places=st.lists(st.floats(0, 1), max_size=9))
def test_a_range_of_whole_numbers_gives_whole_numbers(low: int, width: int, places: list[float]) -> None:
    dimension = Dimension.parse("x", f"{low}..{low + width}")
    assert dimension.grid() == tuple(range(low, low + width + 1))
    assert all(type(dimension.at(place)) is int and low <= dimension.at(place) <= low + width for place in places)


@given(
    values=st.lists(st.integers() | st.sampled_from("abc"), min_size=1, max_size=6, unique=True), place=st.floats(0, 1)
)
def test_a_list_gives_its_values(values: list[Any], place: float) -> None:
    dimension = Dimension.parse("x", values)
    assert dimension.at(place) in values
    assert dimension.grid() == tuple(values)


def test_a_logarithmic_grid() -> None:
    assert Dimension.parse(RATE, "log 1e-4..1e-2 in 5").grid() == (0.0001, 0.0003162, 0.001, 0.003162, 0.01)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"space": {"optim.learing_rate": [1.0]}}, "did you mean 'learning_rate'"),
        ({"space": {RATE: "1e-2 to 1e-4"}}, "a range such as 0..0.3"),
        ({"space": {RATE: "1e-2..1e-4"}}, "the first must be less"),
        ({"space": {RATE: "log 0..1 in 3"}}, "begin above 0"),
        ({"space": {RATE: "1e-4..1e-2"}}, "a grid needs the number of points of 'optim.learning_rate'"),
        ({"space": {RATE: [0.1, 0.1]}}, "values that differ"),
        ({"space": {"seed": [0, 1]}}, "'seed' is the same for all trials"),
        ({"space": {"validation.limit": [64, 128]}}, "measured on other rows"),
        ({"space": {"data.source": ["a", "b"]}}, "with another data.source trials would be measured on other rows"),
        ({"space": {"loss.label_smoothing": [0.0, 0.1]}}, "the losses do not mean the same; set `measure`"),
        ({"space": {"preset": ["demo", "latin_demo"]}}, "trials of chess and of latin cannot be compared"),
        (
            {"space": {"preset": ["demo", "small"]}, "steps": 0, "overrides": {"validation": {"limit": 64}}},
            "losses do not mean the same",
        ),
        (
            {"space": {"preset": ["demo", "small"]}, "steps": 0, "measure": "policy_kl"}
            | {"overrides": {"validation": {"limit": 64}}},
            "the presets have other budgets",
        ),
        ({"space": {"validation.interval": [5, 10]}, "prune": True}, "pruning compares at the same updates"),
        ({"space": {"validation.full_every": [1, 2]}, "prune": True}, "and all trials the same `validation`"),
        ({"prune": True, "steps": 9, "overrides": {"validation": {"interval": 2, "plateau": 1}}}, "plateau 0"),
        ({"measure": "top1"}, "Give `highest: true` or `highest: false`"),
        ({**EQUAL, "space": {"model.channels": [16, 32]}}, "equal: flops sets 'model.channels'"),
        ({**EQUAL, "space": {"model.blocks": [1, 4]}}, "what changes the size goes into the arms"),
        ({"space": {}}, "nothing varies"),
        ({"method": "random"}, "needs the number of `trials`"),
        ({"minutes": 1.0}, "give one budget"),
        ({"arms": {"a+b": {}}}, "no arm's name may hold a '+'"),
        ({"mesure": "loss"}, "unknown key 'mesure', did you mean 'measure'"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_trained(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_sweep("demo", {"overrides": {}, **options})
    assert reason in str(error.value)


def test_a_trial_is_preset_arm_and_values_in_this_order() -> None:
    arms = {"wide": {"preset": "small", "model.channels": 96}, "plain": {}}
    options = SweepConfig(arms=arms, overrides={"model": {"channels": 16, "blocks": 1}}, minutes=2.0)
    preset, changes = request(options, {"arm": "wide", "model.blocks": 3})
    assert preset == "small"
    assert changes["model"] == {"channels": 96, "blocks": 3}
    assert changes["train"] == {"steps": "auto", "minutes": 2.0, "on_time": True}
    assert request(options, {"arm": "plain"})[0] == "demo"


# What is tried, and how it ends


def test_every_trial_has_the_same_seeds_and_differences_have_intervals(reports: Path) -> None:
    current, backend = fake_sweep(reports, by_rate, space={RATE: [0.001, 0.003, 0.01]}, seed=5, seeds=3)
    assert [list(job.names) for job in backend.jobs] == [[5, 6, 7]] * 3
    frame = sweep_tables.table(current).set_index(RATE)
    assert list(frame.index) == [0.003, 0.001, 0.01]
    row = frame.loc[0.001]
    expected = math.log10(3)
    assert (row[sweep_tables.LEFT], row["from"], row["to"]) == pytest.approx((expected,) * 3)  # seeds shift all alike
    assert row["deviation"] == pytest.approx(0.1)
    assert current.best() == current.result(current.trials[1])


def test_nothing_is_pruned_before_a_third_and_the_median_decides(reports: Path) -> None:
    rates = [0.003, 0.004, 0.002, 0.005, 0.1, 0.0029]
    current, backend = fake_sweep(reports, by_rate, space={RATE: rates}, prune=True)
    assert [sorted(job.limits[0]) for job in backend.jobs[:4]] == [[]] * 4
    for job in backend.jobs[4:]:
        assert sorted(job.limits[0]) == list(range(4, 12))
    fourth = [by_rate({"optim": {"learning_rate": rate}}, 0, 4) for rate in rates[:4]]
    assert backend.jobs[4].limits[0][4] == pytest.approx(np.median(fourth))
    assert [row.state for row in current.trials.values()] == ["complete"] * 4 + ["pruned", "complete"]
    assert current.result(current.trials[4]).updates == 4
    assert all(passed for _, passed, _ in sweep_tables.checks(current))
    assert sweep_tables.table(current).iloc[-1]["reason"] == "above the median"


def test_a_third_is_one_of_the_updates_asked_for_also_where_rivals_stopped_early(reports: Path) -> None:
    rates = [0.003, 0.004, 0.002, 0.005, 0.1]
    current, backend = fake_sweep(reports, by_rate, space={RATE: rates}, prune=True, steps=36)
    assert [sorted(job.limits[0]) for job in backend.jobs] == [[]] * 4 + [[12]]
    name = "no trial was pruned before a third of the updates"
    assert (name, True, "1 pruned") in sweep_tables.checks(current)
    current.config = current.config.model_copy(update={"steps": 60})
    assert (name, False, "1 pruned") in sweep_tables.checks(current)


def test_a_loss_that_is_not_finite_is_the_worst_of_a_median(reports: Path) -> None:
    rates = [0.001, 0.002, 0.003, 0.004, 0.005]

    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        number = rates.index(overrides["optim"]["learning_rate"])
        return math.nan if (number, step) in {(0, 6), (0, 7), (1, 7)} else 1.0 + number

    current, backend = fake_sweep(reports, loss, space={RATE: rates}, prune=True)
    assert backend.jobs[4].limits[0] == {step: 3.5 if step == 6 else 2.5 for step in range(4, 12) if step != 7}
    assert current.trials[4].state == "pruned"


def test_a_trial_whose_run_is_gone_has_failed_and_the_others_go_on(reports: Path) -> None:
    options = {"space": {RATE: "log 1e-3..1e-2"}, "method": "random", "seeds": 2, "prune": True}
    fake_sweep(reports, lambda *_: 1.0, **options, trials=5)
    shutil.rmtree(reports / "s-000-s1")
    current, backend = fake_sweep(reports, lambda *_: 1.0, **options, trials=6)
    assert current.results()[0].trial.reason == "its run is gone"
    assert (current.told([0])[0].state, current.told([0])[0].losses) == ("failed", ())
    assert [len(job.limits[1]) for job in backend.jobs] == [8], "by the four that are left"
    (reports / "s-001-s0" / "summary.json").write_text("{")
    current, _ = fake_sweep(reports, lambda *_: 1.0, **options, trials=6)
    assert "summary.json is damaged" in current.results()[1].trial.reason


@pytest.mark.parametrize("workers", [(1, 2), (2, 1)])
def test_threads_and_loader_processes_are_divided_anew_but_for_a_run_that_has_begun(
    reports: Path, monkeypatch: pytest.MonkeyPatch, workers: tuple[int, int]
) -> None:
    monkeypatch.setattr(sweep, "suggest", lambda *_: {"workers": (4, "")})
    taken: list[tuple[int | str, int | str]] = []
    for count in workers:
        options = {"space": {RATE: [0.001, 0.003, 0.01]}, "steps": 12, "workers": count}
        options["overrides"] = {"data": {"workers": "auto"}}
        current = sweep.open_sweep("demo", "cpu", "s", options)
        trials = [current._next(set(range(number))) for number in range(3)]
        jobs = [current._job(trial) for trial in trials if trial is not None]
        configs = [load_config(job.preset, job.overrides) for job in jobs]
        taken += [(one.runtime.threads, one.data.workers) for one in configs]
        if not (reports / jobs[0].names[0]).exists():
            killed = partial(trial.train, jobs[0])  # its process, so the sweep has not heard of it
            Fake(reports, by_rate).submit(0, killed)
    part = {1: ("auto", "auto"), 2: (max(1, machine.facts().threads // 2), 2)}
    first, second = (part[count] for count in workers)
    assert taken == [first] * 3 + [first, second, second]


def test_a_misspelt_measure_is_told_and_can_be_mended(reports: Path) -> None:
    options = {"space": {RATE: [0.001, 0.003]}, "highest": True}
    current, _ = fake_sweep(reports, by_rate, **options, measure="top_1")
    assert list(sweep_tables.table(current)["outcome"]) == ["failed"] * 2
    assert "did you mean 'top1'? (top1, policy kl)" in sweep_tables.table(current)["reason"][0]
    current, backend = fake_sweep(reports, by_rate, **options, measure="top1")
    assert not backend.jobs
    best = current.best()
    assert best is not None
    assert best.trial.values == {RATE: 0.003}


def test_with_several_workers_a_trial_knows_of_none_that_train_beside_it(reports: Path) -> None:
    options = {"space": {RATE: [0.003, 0.004, 0.002, 0.005, 0.1, 0.0029]}, "prune": True, "workers": 2}
    _, backend = fake_sweep(reports, by_rate, **options)
    assert [bool(job.limits[0]) for job in backend.jobs] == [False] * 5 + [True]


def test_a_measure_where_more_is_better(reports: Path) -> None:
    space = {RATE: [0.001, 0.003, 0.01], "loss.value": [0.5, 1.0]}
    current, _ = fake_sweep(reports, by_rate, space=space, measure="top1", highest=True)
    best = current.best()
    assert best is not None
    assert best.trial.values[RATE] == 0.003
    shares = sweep_tables.importance(current)["share"]
    assert shares[RATE] > 0.9 > 0.1 > shares["loss.value"]
    for figure in (sweep_figures.curves_figure(current), sweep_figures.dimensions_figure(current)):
        assert figure.axes


def test_another_request_under_the_same_name_is_refused(reports: Path) -> None:
    sweep.open_sweep("demo", "cpu", "s", {"steps": 5})
    with pytest.raises(sweep.SweepError, match="begun with other options"):
        sweep.open_sweep("demo", "cpu", "s", {"steps": 6})
    current = sweep.open_sweep("demo", "cpu", "s", {"steps": 5, "workers": 2})
    with FileLock(current.folder / "lock"), pytest.raises(sweep.SweepError, match="another"):
        next(current.train())


# Methods


def told(values: Mapping[str, Any], *losses: float, state: str = "complete") -> Told:
    return Told(values, state, losses, {})


def test_random_values_depend_on_seed_and_number_alone() -> None:
    space = [Dimension.parse("x", "log 1e-4..1"), Dimension.parse("y", [1, 2, 3])]
    assert proposals.draw(space, 0, 3) == proposals.draw(space, 0, 3)
    assert len({proposals.draw(space, seed, number)["x"] for seed in range(5) for number in range(5)}) == 25


def test_optuna_learns_from_what_it_is_told_and_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    options = SweepConfig(method="tpe", trials=40, space={"x": "log 1e-4..1", "y": [1, [2], "c"], "z": "1..5"})
    propose, count = proposals.method(options)
    history: list[Told] = []
    for number in range(count):
        values = propose(number, history)
        assert values == proposals.method(options)[0](number, list(history))
        state = "failed" if number == 3 else "pruned" if number == 5 else "complete"
        loss = abs(math.log10(values["x"]) + 3) + (values["y"] != [2]) + abs(values["z"] - 4)
        history.append(Told(values, state, (loss,) if state == "complete" else (), {1: loss}))
    losses = [one.loss if one.losses else 9.0 for one in history]
    assert np.mean(losses[-15:]) < 0.6 * np.mean(losses[:10])
    proposals.write_journal(tmp_path / "optuna.log", options, history)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna.log")))
    (study,) = optuna.study.get_all_study_summaries(storage)
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert study.best_trial.value == min(one.loss for one in history if one.losses)
    kept = optuna.load_study(study_name=study.study_name, storage=storage).trials
    assert [one.state.name.lower().replace("fail", "failed") for one in kept] == [one.state for one in history]


def test_a_journal_of_a_figure_where_more_is_better_is_least_at_the_best(reports: Path) -> None:
    optuna = pytest.importorskip("optuna")
    options = {"space": {RATE: [0.001, 0.003, 0.01]}, "method": "tpe", "trials": 6, "measure": "top1", "highest": True}
    current, _ = fake_sweep(reports, by_rate, **options)
    best = current.best()
    assert best is not None
    journal = optuna.storages.journal.JournalFileBackend(str(sweep_tables.write_report(current) / "optuna.log"))
    storage = optuna.storages.JournalStorage(journal)
    (study,) = optuna.study.get_all_study_summaries(storage)
    assert study.best_trial.number == best.trial.number


@pytest.mark.parametrize(("named", "seen"), [("", ["0", "1", "2", "0"]), ("3,5,7", ["3", "5", "7", "3"])])
def test_each_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, named: str, seen: list[str]) -> None:
    monkeypatch.setattr(processes, "DRIVERS", [os.curdir])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for slot, gpu in enumerate(seen):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        processes._take_gpu(slot)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu


def test_without_optuna_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(proposals.OptunaError, match=r"pip install .*sweep"):
        proposals.method(SweepConfig(method="tpe", trials=3, space={RATE: "0..1"}))


def test_stages_keep_what_helps_and_are_based_anew() -> None:
    arms = ["a", "b", "c", "d"]
    history = [told({}, 3.0, 3.1), told({}, 2.0, 2.1), told({}, 2.5, 1.0), told({}, 1.9, 2.0)]
    named = [proposals.stage(arms, number, history[:number])["arm"] for number in range(5)]
    assert named == ["", "a", "a+b", "a+c", "a+c+d"], "b helps with one seed and not with the other: chance"


def test_the_share_of_a_dimension_by_hand() -> None:
    ranks = np.array([1.0, 2.0, 3.0, 4.0])
    assert sweep_tables.epsilon_squared(ranks, "aabb") == pytest.approx(1 - (1.0 / 2) / (5.0 / 3))
    assert sweep_tables.epsilon_squared(ranks, "abab") == 0.0
    assert math.isnan(sweep_tables.epsilon_squared(ranks, "aaaa"))


# Studies


def test_every_preset_is_a_sweep_and_arms_are_made_equal() -> None:
    for name in config.presets(PARAMS / "sweep"):
        assert sweep_config.dimensions(load_sweep(name))
    arms = load_sweep("architectures").arms
    configs = {arm: load_config(*request(load_sweep("architectures"), {"arm": arm})) for arm in arms}
    counts = {arm: sizes.parameters(one) for arm, one in configs.items()}
    for arm, one in configs.items():
        model = get_task("chess").task(one).build_model()
        assert counts[arm] == sum(parameter.numel() for parameter in model.parameters())
        assert counts[arm] == pytest.approx(counts["plain"], rel=sizes.TOLERANCE)
    assert arms["attention"]["model.channels"] < 48
    equal = load_sweep("architectures", {"equal": "flops", "arms": {"plain": {}, "deeper": {"model.blocks": 6}}})
    flops = [sizes.flops(load_config(*request(equal, {"arm": arm}))) for arm in equal.arms]
    assert flops[1] == pytest.approx(flops[0], rel=sizes.TOLERANCE)


def test_arms_are_compared_each_at_its_best_rate(reports: Path) -> None:
    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        narrow = overrides["model"]["channels"] == 8
        rate = overrides["optim"]["learning_rate"]
        return 2.0 - 0.3 * narrow + abs(math.log10(rate / (0.01 if narrow else 0.001))) + 0.1 * seed * (1 + narrow)

    arms = {"wide": {"model.channels": 16}, "narrow": {"model.channels": 8}}
    options = {"space": {RATE: [0.001, 0.01]}, "seeds": 2, "arms": arms}
    current, _ = fake_sweep(reports, loss, **options)
    frame = studies.arms_table(current)
    assert list(frame[RATE]) == [0.001, 0.01]
    assert frame.loc["narrow", "difference to first"] == pytest.approx(-0.25)
    assert frame.loc["narrow", "from"] < -0.25 < frame.loc["narrow", "to"]
    assert frame.loc["wide", "parameters"] == 25600
    assert "At the edge of what was tried: wide, narrow" in studies.rate_note(current)
    current.trials |= {number: replace(current.trials[number], state="failed") for number in (0, 1)}
    current._results.clear()
    assert "difference to first" not in studies.arms_table(current), "the first has no result"
    assert list(studies.compared(current, None).index) == ["wide", "narrow"]
    current.config = SweepConfig(space=options["space"])
    assert studies.compared(current, None) is None, "no empty table where there are no arms"
    current.config = SweepConfig(arms=arms)
    assert "was not searched for each arm (it was the same for all arms)" in studies.rate_note(current)


def test_a_rate_beyond_which_others_failed_is_at_no_edge(reports: Path) -> None:
    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        rate = overrides["optim"]["learning_rate"]
        return math.nan if rate > 0.02 else by_rate(overrides, seed, step)

    options = {"space": {RATE: [0.001, 0.003, 0.03]}, "arms": {"one": {}, "two": {"model.channels": 8}}}
    current, _ = fake_sweep(reports, loss, **options)
    assert [row.trial.state for row in current.results()] == ["complete", "complete", "failed"] * 2
    assert studies.rate_note(current) == "The learning rate was searched for each arm."


def test_a_power_law_comes_back_with_its_interval() -> None:
    x = [1e12, 3e12, 1e13, 3e13, 1e14]
    exact = studies.power_law(x, [30 * c**-0.05 for c in x])
    assert (exact.factor, exact.exponent) == pytest.approx((30, -0.05))
    assert exact.interval == pytest.approx((-0.05, -0.05))
    noise = [1.01, 0.99, 1.0, 1.01, 0.99]
    law = studies.power_law(x, [30 * c**-0.05 * n for c, n in zip(x, noise, strict=True)])
    assert law.interval is not None
    assert law.interval[0] < -0.05 < law.interval[1]
    assert studies.power_law(x[:2], [2.0, 1.0]).interval is None
    with pytest.raises(ValueError, match="two different points"):
        studies.power_law(x[:1], [2.0])


def test_the_best_size_lies_between_worse_ones_or_is_called_an_edge() -> None:
    counts = [1e4, 1e5, 1e6, 1e7]
    size, inside = studies.best_size(counts, [(math.log10(n) - 5.3) ** 2 + 2 for n in counts])
    assert inside
    assert size == pytest.approx(10**5.3)
    assert studies.best_size(counts, [4.0, 3.0, 2.0, 1.0]) == (pytest.approx(1e7), False)


def test_sizes_at_fixed_budgets_give_both_laws(reports: Path) -> None:
    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        spent = costs[overrides["model"]["channels"]] * overrides["train"]["steps"]
        best = 16 if spent < 2 * budget else 32
        return 2 + abs(math.log2(overrides["model"]["channels"] / best)) + budget / spent

    widths = (8, 16, 32, 64)
    configs = {width: load_config("demo", {"model": {"channels": width}}) for width in widths}
    costs = {width: 3 * sizes.flops(one) * one.train.batch_size for width, one in configs.items()}  # of an update
    budget = 1000 * costs[16]
    options = {"space": {"model.channels": list(widths)}, "compute": [budget, 4 * budget], "steps": 0}
    current, backend = fake_sweep(reports, loss, **options)
    for one in backend.jobs:
        values = current.trials[one.number].values
        assert one.overrides["train"]["steps"] == round(values["compute"] / costs[values["model.channels"]])
    study = studies.scaling(current)
    assert study is not None
    assert list(study.table["sizes"]) == [4, 4]
    assert study.loss is not None
    assert study.loss.exponent == pytest.approx(math.log(2.25 / 3) / math.log(4), rel=0.01)
    assert study.size is not None
    assert 0.6 < study.size.exponent < 1.1, "four times the parameters at four times the budget"
    assert len(studies.scaling_figure(study).axes) == 2
    assert str(study).startswith("loss = ")
    assert "was not searched for each size (it was the same for all sizes)" in studies.rate_note(current)


def test_a_staged_sweep_keeps_what_helped(reports: Path) -> None:
    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        good = 0.5 * (overrides["optim"].get("warmup_steps") == 5) - 0.2 * (overrides["optim"].get("beta1") == 0.5)
        return 3 - good + 0.1 * seed + 0.01 * seed * good

    arms = {"warm": {"optim.warmup_steps": 5}, "slow": {"optim.beta1": 0.5}, "decay": {"optim.weight_decay": 0.1}}
    options = {"method": "staged", "arms": arms, "space": {}, "seeds": 3}
    overrides = {"optim": {"eps": 1e-8}, "validation": {"interval": 1}}
    current, _ = fake_sweep(reports, loss, **options, overrides=overrides)
    frame = studies.stages_table(current)
    assert list(frame["kept"]) == ["base", "yes", "no", "no"]
    assert list(frame["added to"][1:]) == ["base", "warm", "warm"]
    assert len(sweep_figures.dimensions_figure(current).axes) == 1


def test_a_staged_sweep_whose_base_failed_ends_with_its_reason(reports: Path) -> None:
    options = {"method": "staged", "arms": {"warm": {"optim.warmup_steps": 5}}, "space": {}}
    with pytest.raises(sweep.SweepError, match=r"base of sweep 's' failed, .* its loss is not finite"):
        fake_sweep(reports, lambda *_: math.nan, **options)


@pytest.mark.parametrize(("minutes", "kept"), [(0.02, True), (0.018, False), (0.05, False)])
def test_trials_of_equal_minutes_took_them(reports: Path, minutes: float, kept: bool) -> None:
    """Each of these took 1.2 seconds."""
    current, _ = fake_sweep(reports, by_rate, space={RATE: [0.001, 0.003]}, steps=0, minutes=minutes)
    assert (BUDGET, kept) in [check[:2] for check in sweep_tables.checks(current)]


def test_trials_at_a_budget_of_operations_made_the_updates_that_it_pays(reports: Path) -> None:
    config = load_config("demo")
    compute = 12 * get_task("chess").training_flops(config) * config.train.batch_size
    current, _ = fake_sweep(reports, by_rate, space={RATE: [0.001, 0.003]}, steps=0, compute=[compute])
    assert (BUDGET, True) in [check[:2] for check in sweep_tables.checks(current)]
    current.config = current.config.model_copy(update={"compute": (2 * compute,)})
    current.trials = {k: replace(t, values={**t.values, "compute": 2 * compute}) for k, t in current.trials.items()}
    current._results.clear()
    assert (BUDGET, False) in [check[:2] for check in sweep_tables.checks(current)]


# Real trainings


def job(reports: Path, **changes: Any) -> Job:
    preset, overrides = request(load_sweep("demo"), {RATE: 0.001})
    return replace(Job(0, {0: "one"}, preset, overrides), **changes)


def test_a_trial_above_the_median_ends_there_also_when_it_goes_on(reports: Path) -> None:
    outcome = trial.train(job(reports, limits={0: {10: 0.5}}))
    assert outcome.state == "pruned"
    assert "after 10 updates, above the median of 0.5" in outcome.reason
    assert trial.train(job(reports, limits={0: {10: 0.5}})) == outcome
    assert read_json(reports / "one" / "heartbeat.json")["step"] == 10


def test_a_reason_of_any_length_becomes_a_short_one(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("x" * 100_000)

    monkeypatch.setattr(runs, "open_run", fail)
    outcome = trial.train(job(reports))
    assert outcome.reason.startswith("ValueError: xxx")
    assert len(outcome.reason) == trial.LONGEST


@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_ends_the_sweep_and_the_trial_goes_on_with_room(
    reports: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    def full(*_: Any) -> Any:
        if before:
            return SimpleNamespace(free=1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(*((shutil, "disk_usage") if before else (storage, "write")), full)
        with pytest.raises(FolderError, match="no room for this run" if before else "No space left"):
            trial.train(job(reports))
    assert trial.train(job(reports)) == Outcome("complete")


def test_a_run_that_another_node_still_writes_is_waited_for(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = reports / "one"
    folder.mkdir(parents=True)
    lock = FileLock(folder / "lock", thread_local=False)
    lock.acquire()
    monkeypatch.setattr(record, "ORPHAN_SECONDS", 0.01)
    monkeypatch.setattr(trial, "PATIENCE", 0.3)
    with pytest.raises(FolderError, match="end that process"), pytest.warns(UserWarning, match="waiting until"):
        trial.train(job(reports))
    monkeypatch.setattr(trial, "PATIENCE", 30.0)
    opened: list[bool] = []

    def open_run(*_: Any) -> Any:
        opened.append(lock.is_locked)
        return SimpleNamespace(complete=True, close=lambda: None)

    monkeypatch.setattr(runs, "open_run", open_run)
    threading.Timer(0.2, lock.release).start()
    with pytest.warns(UserWarning, match="waiting until"):
        assert trial.train(job(reports)) == Outcome("complete")
    assert opened == [False]


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_what_happens_to_a_process_is_the_outcome_of_its_job(reports: Path) -> None:
    with closing(Processes(2, reports / "log.txt")) as workers:
        workers.submit(0, partial(trial.train, job(reports, preset="no_such_preset")))
        workers.submit(1, partial(trial.train, job(reports, number=1)))
        pids = {number: worker.process.pid for number, worker in workers._busy.values()}
        os.kill(pids[1] or 0, signal.SIGKILL)
        ended: dict[int, Outcome] = {}
        while len(ended) < 2:
            ended |= {number: trial.outcome_of(result) for number, result in workers.collect()}
    assert ended[0].state == "failed"
    assert "unknown preset 'no_such_preset'" in ended[0].reason
    assert ended[1] == Outcome("failed", "its process was killed by signal 9, perhaps out of memory")


FOUR = {"space": {RATE: [0.001, 0.01], "optim.optimiser": ["adamw", "muon"]}}


def sweep_four(reports: Path) -> None:
    """In a process of its own: a sweep of four trials."""
    os.environ["MATRIXLIB_REPORTS"] = str(reports)
    list(sweep.open_sweep("demo", "cpu", "", FOUR).train())


def test_killed_it_goes_on_to_the_same_table_and_the_best_preset_trains(
    reports: Path, tmp_path: Path, forkserver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sweep.open_sweep("demo", "cpu", "", FOUR)
    list(whole.train())
    sweep_tables.write_report(whole)

    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(other))
    process = forkserver.Process(target=sweep_four, args=(other,))
    process.start()
    while process.is_alive() and not list(other.glob("sweep-demo-001-s0/checkpoints/step_00000005")):
        time.sleep(0.01)
    process.kill()
    process.join()
    killed = sweep.open_sweep("demo", "cpu", "", FOUR)
    assert [row.state for row in killed.trials.values()] == ["complete", "running"]
    first = (other / "sweep-demo-000-s0" / "summary.json").read_bytes()
    assert len(list(killed.train())) == 3
    sweep_tables.write_report(killed)
    assert (other / "sweep-demo-000-s0" / "summary.json").read_bytes() == first, "what had ended stays"
    for name in ("table.csv", "table.json", "best.yaml"):
        assert (killed.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    assert not list(killed.train()), "everything has ended"

    best = killed.best()
    assert best is not None
    pages = {path.parent.name for path in other.glob("*/report.html")}
    assert pages == set(killed.run_names(best.trial.number).values()), "only they are looked at as the sweep ends"
    preset = read_yaml_file(killed.folder / "best.yaml", "best")
    assert preset["train"] == {"steps": 15, "minutes": 1.0, "batch_size": 32, "statistics_interval": 20}, "no default"
    record = read_json(other / killed.run_names(best.trial.number)[0] / "run.json")["requested"]
    requested = config.dump(load_config(str(killed.folder / "best.yaml")))
    assert requested == record
    with closing(runs.open_run(str(killed.folder / "best.yaml"))) as current:
        assert next(iter(current.train())).step == 1


@pytest.mark.parametrize("budget", [{"steps": 12}, {"steps": 0, "compute": [1e11]}])
def test_a_trial_that_fails_is_a_row_with_its_reason(reports: Path, budget: dict[str, Any]) -> None:
    class Backend(Fake):
        def submit(self, key: Any, part: Any, *handles: Any) -> None:
            if key < 3:
                super().submit(key, part)
            else:
                self.ended.append((key, part()))

    space = {"model.channels": [24, 16], "model.attention.heads": [2, 3]}
    options = {"space": space, "overrides": {"model": {"attention": {"every": 1}}}} | budget
    current = sweep.open_sweep("demo", "cpu", "s", options)
    trials = list(current.train(Backend(reports, lambda overrides, seed, step: 1.0)))
    assert [row.state for row in trials] == ["complete"] * 3 + ["failed"]
    assert "ConfigError" in trials[3].reason
    assert sweep_tables.table(current)["reason"][3] == trials[3].reason
    assert not list(sweep.open_sweep("demo", "cpu", "s", options).train()), "everything has ended"
