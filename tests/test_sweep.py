"""Sweeps: options, what is tried next, pruning, failures, and a sweep that is really killed."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from cells import Shown, definitions, run_notebook
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from matrixlib import config
from matrixlib.config import ConfigError
from matrixlib.engine.metrics import MetricsLog
from matrixlib.files import PARAMS, FolderError, read_json, write_json
from matrixlib.hardware import machine
from matrixlib.runs import figures, fleet, record, sweep
from matrixlib.runs import run as runs
from matrixlib.runs.sweep import SweepConfig, load_sweep, request
from matrixlib.tasks import get_task, load_config

pytest.importorskip("optuna")
RATE = "optim.learning_rate"
points_of = definitions("sweep")["points_of"]
Curve = Callable[[Mapping[str, Any], int, int], float]
"""(overrides, seed, update) -> validation loss."""


def by_rate(overrides: Mapping[str, Any], seed: int, step: int) -> float:
    """Least at 0.003; seeds shift all rates, nearly alike."""
    rate = overrides["optim"]["learning_rate"]
    return 2 + abs(math.log10(rate / 0.003)) + (0.1 + rate / 1000) * seed + 1 / step


@pytest.fixture
def swept(reports: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Shown, list[str]]]:
    """The notebook over trainings that are a function: runs as they lie on disk, each update with a validation; and the
    names of those that it has begun."""

    def run(loss: Curve, sweep: str = "s", stop_in: str = "", **options: Any) -> tuple[Shown, list[str]]:
        begun: list[str] = []

        def open_run(
            preset: str, device: str, seed: int, name: str, steps: int, overrides: Mapping[str, Any], kind: str
        ) -> Any:
            requested = load_config(preset, config.merge(overrides, {"seed": seed}))
            (reports / name).mkdir(exist_ok=True)
            begun.append(name)
            record = {"preset": preset, "requested": config.dump(requested), "catalogue": "", "kind": kind}
            write_json(reports / name / "run.json", record)
            (reports / name / "config.yaml").write_text(json.dumps(config.dump(requested)))
            return SimpleNamespace(close=lambda: None, train=lambda: train(reports / name, overrides, seed, requested))

        def train(folder: Path, overrides: Mapping[str, Any], seed: int, requested: Any) -> Iterator[Any]:
            if (folder / "summary.json").exists():
                return
            updates = requested.train.steps if isinstance(requested.train.steps, int) else 12
            with closing(MetricsLog(folder / "metrics.jsonl")) as log:
                for step in range(1, min(updates, 12) + 1):
                    if folder.name == stop_in and step == 6:
                        raise KeyboardInterrupt
                    validation = {"kind": "full", "loss": loss(overrides, seed, step), "losses": {}}
                    yield SimpleNamespace(step=step, validation=validation)
                    log.write({"step": step, "loss": 1.0, "seconds": 0.1, "validation": validation})
            last = validation["loss"]
            summary = {"complete": True, "seconds": 1.2, "steps": updates, "parameters": 100}
            summary["parameters"] *= requested.model.channels**2
            summary["evaluation"] = {"top1": 1 / last if last else 0.0, "policy_kl": last}
            write_json(folder / "summary.json", summary)

        monkeypatch.setattr(runs, "open_run", open_run)
        monkeypatch.setattr(fleet, "compute", lambda parts, **_: ((key, part()) for key, part in parts))
        monkeypatch.setattr(figures, "png", lambda figure: b"PNG")  # those of real trainings are drawn
        options = {"steps": 12, "overrides": {"validation": {"interval": 1}}} | options
        return run_notebook("sweep", preset="demo", device="cpu", sweep=sweep, overrides=options), begun

    return run


def states(shown: Shown) -> list[str]:
    return [trial.state.name for trial in shown.values["study"].trials]


# Options


@given(low=st.integers(-50, 50), width=st.integers(1, 40), points=st.integers(2, 9))
def test_a_range_gives_points_in_it_in_order(low: int, width: int, points: int) -> None:
    assert points_of("x", sweep.parse("x", f"{low}..{low + width}")) == list(range(low, low + width + 1))
    values = points_of("x", sweep.parse("x", f"{low}.0..{low + width}.0 in {points}"))
    assert (values[0], values[-1], len(values)) == (low, low + width, points)
    assert values == sorted(values)


def test_a_logarithmic_grid_has_few_digits_and_every_preset_is_a_sweep() -> None:
    assert points_of(RATE, sweep.parse(RATE, "log 1e-4..1e-2 in 5")) == [0.0001, 0.0003162, 0.001, 0.003162, 0.01]
    with pytest.raises(ConfigError, match=r"a grid needs the number of points of 'optim\.learning_rate'"):
        points_of(RATE, sweep.parse(RATE, "1e-4..1e-2"))
    for name in config.presets(PARAMS / "sweep"):
        assert sweep.search_space(load_sweep(name))


EQUAL = {"equal": "flops", "arms": {"plain": {}, "deeper": {"model.blocks": 6}}}
BUDGETS = {"space": {"preset": ["demo", "small"]}, "steps": 0, "measure": "policy_kl"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"space": {"optim.learing_rate": [1.0]}}, "did you mean 'learning_rate'"),
        ({"space": {RATE: "1e-2..1e-4"}}, "the first number must be less"),
        ({"space": {RATE: "log 0..1 in 3"}}, "begin above 0"),
        ({"space": {"validation.limit": [64, 128]}}, "measured on other rows"),
        ({"space": {"loss.label_smoothing": [0.0, 0.1]}}, "the losses do not mean the same; set `measure`"),
        ({"space": {"preset": ["demo", "latin_demo"]}}, "trials of chess and of latin cannot be compared"),
        (BUDGETS | {"overrides": {"validation": {"limit": 64}}}, "the presets have other budgets"),
        ({"space": {"validation.interval": [5, 10]}, "prune": True}, "pruning compares at the same updates"),
        ({"measure": "top1"}, "Give `highest: true` or `highest: false`"),
        ({**EQUAL, "space": {"model.channels": [16, 32]}}, "equal: flops sets 'model.channels'"),
        ({"method": "random"}, "needs the number of `trials`"),
        ({"tolerance": 0.1}, "`tolerance` is for a staged sweep"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_trained(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_sweep("demo", {"overrides": {}, **options})
    assert reason in str(error.value)


def test_a_trial_is_preset_arm_and_values_in_this_order() -> None:
    arms = {"wide": {"preset": "small", "model.channels": 96}, "plain": {}}
    space = {"model.blocks": [3]}
    options = SweepConfig(arms=arms, space=space, overrides={"model": {"channels": 16, "blocks": 1}}, minutes=2.0)
    preset, changes = request(options, {"arm": "wide", "model.blocks": 3})
    assert preset == "small"
    assert changes["model"] == {"channels": 96, "blocks": 3}
    assert changes["train"] == {"steps": "auto", "minutes": 2.0}
    assert request(options, {"arm": "plain"})[0] == "demo"


def test_another_request_under_the_same_name_is_refused(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder = definitions("sweep")["open_folder"]
    options = load_sweep("demo", {"steps": 5})
    open_folder("s", options)
    with pytest.raises(sweep.SweepError, match=r"begun with other options \(steps: "):
        open_folder("s", load_sweep("demo", {"steps": 6}))
    folder = open_folder("s", load_sweep("demo", {"steps": 5, "workers": 2}))
    with FileLock(folder / "lock"), pytest.raises(sweep.SweepError, match="another process"):
        run_notebook("sweep", sweep="s", overrides={"steps": 5})
    (folder / "optuna.log").write_text('{"op_code":0,"worker_\n{}\n')
    with pytest.raises(sweep.SweepError, match=r"optuna\.log is damaged .*restore it"):
        run_notebook("sweep", sweep="s", overrides={"steps": 5})
    (reports / "victim").mkdir()
    write_json(reports / "victim" / "run.json", {})
    with pytest.raises(sweep.SweepError, match=r"^sweep name 'victim' is that of a training: take another"):
        open_folder("victim", options)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(sweep.SweepError, match=r"pip install .*sweep"):
        load_sweep("demo")


@pytest.mark.parametrize("workers", [1, 2])
def test_threads_and_loader_processes_are_divided_but_for_a_run_that_has_begun(reports: Path, workers: int) -> None:
    cells = definitions("sweep")
    cells |= {"suggest": lambda *_: {"workers": (4, "")}, "options": load_sweep("demo", {"workers": workers})}
    part_of_machine = cells["part_of_machine"]
    part = {"runtime": {"threads": max(1, machine.facts().threads // 2)}, "data": {"workers": 2}}
    auto = {"data": {"workers": "auto"}}
    assert part_of_machine(["one"], "demo", auto) == (part if workers == 2 else {})
    begun = {"runtime": {"threads": 7}, "data": {"workers": 3}}
    (reports / "one").mkdir()
    write_json(reports / "one" / "run.json", {"requested": begun})
    assert part_of_machine(["one"], "demo", auto) == begun


# What is tried, and how it ends


def test_every_trial_has_the_same_seeds_and_differences_have_intervals(swept: Any) -> None:
    shown, begun = swept(by_rate, space={RATE: [0.001, 0.003, 0.01]}, seed=5, seeds=3)
    assert begun == [f"s-{number:03d}-s{seed}" for number in range(3) for seed in (5, 6, 7)]
    table = shown.values["table"].set_index(RATE)
    assert list(table.index) == [0.003, 0.001, 0.01]
    row = table.loc[0.001]
    assert row["difference to the best"] == pytest.approx(math.log10(3), abs=1e-4)
    assert row["from"] < row["difference to the best"] < row["to"] < row["from"] + 1e-4, "seeds shift all alike"
    assert row["deviation"] == pytest.approx(0.1, abs=1e-4)
    assert shown.values["best"].number == 1
    assert "VERDICT: PASS" in shown.text
    assert shown.pictures == 2


def test_nothing_is_pruned_before_a_third_and_the_median_decides(swept: Any) -> None:
    shown, _ = swept(by_rate, space={RATE: [0.003, 0.004, 0.002, 0.005, 0.1, 0.0029]}, prune=True)
    assert states(shown) == ["COMPLETE"] * 4 + ["PRUNED", "COMPLETE"]
    assert shown.values["study"].trials[4].last_step == 4
    assert "VERDICT: PASS" in shown.text
    assert shown.values["table"].iloc[-1]["reason"] == "validation loss above the median after 4 updates"


@pytest.mark.parametrize(("workers", "last"), [(1, "PRUNED"), (2, "COMPLETE")])
def test_with_several_workers_a_trial_knows_of_none_that_trains_beside_it(swept: Any, workers: int, last: str) -> None:
    """Three are complete before the last two, and it takes four for a median."""

    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        return math.nan if overrides["optim"]["learning_rate"] == 0.005 else by_rate(overrides, seed, step)

    shown, _ = swept(loss, space={RATE: [0.003, 0.004, 0.002, 0.005, 0.0029, 0.1]}, prune=True, workers=workers)
    assert states(shown) == ["COMPLETE"] * 3 + ["FAIL", "COMPLETE", last]


def test_a_measure_where_more_is_better_and_a_misspelt_one_that_is_mended(swept: Any) -> None:
    options: dict[str, Any] = {"space": {RATE: [0.001, 0.003], "loss.value": [0.5, 1.0]}, "highest": True}
    with pytest.raises(ConfigError, match=r"did you mean 'top1'\?"):
        swept(by_rate, **options, measure="top_1")
    shown, begun = swept(by_rate, **options, measure="top1")
    assert begun == [f"s-{number:03d}-s0" for number in range(4)]
    assert shown.values["best"].params[RATE] == shown.values["table"].iloc[0][RATE] == 0.003
    assert shown.values["shares"][RATE] > 0.9 > 0.1 > shown.values["shares"]["loss.value"]


@pytest.mark.parametrize("method", ["grid", pytest.param("random", marks=pytest.mark.soak), "tpe"])
def test_stopped_it_goes_on_to_the_same_table(swept: Any, reports: Path, method: str) -> None:
    options: dict[str, Any] = {"method": method, "seeds": 1 if method == "tpe" else 2, "prune": True}
    options["space"] = {RATE: "log 1e-4..1e-1 in 3", "model.blocks": "0..1"}
    options["trials"] = {"grid": 0, "random": 6, "tpe": 13}[method]
    whole, _ = swept(by_rate, "whole", **options)
    for stop in ["s-011-s0"] if method == "tpe" else ["s-002-s1", "s-005-s0"]:
        with suppress(KeyboardInterrupt):
            swept(by_rate, "s", stop, **options)
    again, begun = swept(by_rate, "s", **options)
    assert "s-000-s0" not in begun, "what has ended stays"
    for name in ("table.csv", "table.json"):
        assert (reports / "s" / name).read_bytes() == (reports / "whole" / name).read_bytes()
    assert again.values["trials"][3].params == whole.values["trials"][3].params
    if method == "tpe":
        losses = [trial.value or 9.0 for trial in whole.values["study"].trials]
        assert min(losses[10:]) < 2.4


def test_a_trial_that_fails_is_a_row_with_its_reason_and_one_where_all_fail_says_so(swept: Any) -> None:
    space = {"model.channels": [24, 16], "model.attention.heads": [2, 3]}
    overrides = {"validation": {"interval": 1}, "model": {"attention": {"every": 1}}}
    shown, _ = swept(lambda *_: 1.0, space=space, overrides=overrides)
    assert states(shown) == ["COMPLETE"] * 3 + ["FAIL"]
    assert "ConfigError" in shown.values["table"].iloc[-1]["reason"]
    shown, _ = swept(lambda *_: math.nan, "t", space={RATE: [0.001, 0.003]})
    assert states(shown) == ["FAIL"] * 2
    assert "its loss is not finite" in shown.text
    assert "there is a best one (none)" in shown.failed
    staged = {"method": "staged", "arms": {"warm": {"optim.warmup_steps": 5}}, "space": {}}
    with pytest.raises(sweep.SweepError, match=r"base failed, .* its loss is not finite"):
        swept(lambda *_: math.nan, "u", **staged)


# Studies


def test_arms_are_made_equal_and_compared_each_at_its_best_rate(swept: Any) -> None:
    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        deeper = overrides["model"].get("blocks") == 6
        rate = overrides["optim"]["learning_rate"]
        return 2.0 - 0.3 * deeper + abs(math.log10(rate / (0.01 if deeper else 0.001))) + 0.1 * seed * (1 + deeper)

    arms = {"plain": {}, "deeper": {"model.blocks": 6}, "attention": {"model.attention.every": 2}}
    overrides = {"model": {"channels": 48, "blocks": 4, "attention": {"heads": 4}}}
    options = {"space": {RATE: [0.001, 0.01]}, "seeds": 2, "arms": arms, "equal": "parameters"}
    shown, _ = swept(loss, **options, overrides=overrides)
    page = (shown.values["folder"] / "report.html").read_text()
    assert all(
        f"<h2>{heading}</h2>" in page for heading in ("Trials", "Arms, sizes, stages", "Curves", "What mattered")
    )
    equal = shown.values["options"]
    assert equal.arms["attention"]["model.channels"] < 48
    configs = {arm: load_config(*request(equal, {"arm": arm})) for arm in arms}
    counts = {}
    for arm, one in configs.items():
        counts[arm] = sum(weight.numel() for weight in get_task("chess").task(one).build_model().parameters())
    assert list(counts.values()) == pytest.approx([counts["plain"]] * 3, rel=0.1)
    table = shown.values["rows_of_arms"]
    assert [table[arm][RATE] for arm in ("plain", "deeper")] == [0.001, 0.01]
    assert table["deeper"]["difference"] == pytest.approx(-0.25)
    assert table["deeper"]["from"] < -0.25 < table["deeper"]["to"]
    assert "The learning rate was searched for each arm." in shown.text
    assert "a wider range may change the order: plain, deeper" in shown.text
    unequal = {"arms": {"a": {}, "b": {"model.attention.every": 1}}, "equal": "parameters"}
    with pytest.raises(sweep.SweepError, match="the arms are not equal in parameters"):
        swept(loss, "t", space={"model.blocks": [1, 6]}, **unequal)


def test_a_power_law_comes_back_with_its_interval() -> None:
    power_law, best_size = (definitions("sweep")[name] for name in ("power_law", "best_size"))
    x = [1e12, 3e12, 1e13, 3e13, 1e14]
    exact = power_law(x, [30 * c**-0.05 for c in x])
    assert list(exact.values()) == pytest.approx([30, -0.05, -0.05, -0.05])
    law = power_law(x, [30 * c**-0.05 * n for c, n in zip(x, [1.01, 0.99, 1.0, 1.01, 0.99], strict=True)])
    assert law["from"] < -0.05 < law["to"]
    assert math.isnan(power_law(x[:2], [2.0, 1.0])["from"])
    sizes = [1e4, 1e5, 1e6, 1e7]
    assert best_size(sizes, [(math.log10(n) - 5.3) ** 2 + 2 for n in sizes]) == (pytest.approx(10**5.3), True)
    assert best_size(sizes, [4.0, 3.0, 2.0, 1.0]) == (pytest.approx(1e7), False), "an edge"


def test_sizes_at_fixed_budgets_give_both_laws(swept: Any) -> None:
    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        spent = costs[overrides["model"]["channels"]] * overrides["train"]["steps"]
        best = 16 if spent < 2 * budget else 32
        return 2 + abs(math.log2(overrides["model"]["channels"] / best)) + budget / spent

    configs = {width: load_config("demo", {"model": {"channels": width}}) for width in (8, 16, 32, 64)}
    costs = {w: get_task("chess").training_flops(one) * one.train.batch_size for w, one in configs.items()}
    budget = 1000 * costs[16]
    space = {"model.channels": list(costs)}
    shown, _ = swept(loss, space=space, compute=[budget, 4 * budget], steps=0, overrides={})
    for trial in shown.values["trials"]:
        assert trial.user_attrs["updates"] == round(trial.params["compute"] / costs[trial.params["model.channels"]])
    laws = shown.values["laws"]
    assert laws["least loss"]["exponent"] == pytest.approx(math.log(2.25 / 3) / math.log(4), rel=0.01)
    assert 0.6 < laws["best size"]["exponent"] < 1.1, "four times the parameters at four times the budget"
    assert shown.pictures == 3
    assert "VERDICT: PASS" in shown.text, "each made the updates that its budget pays"


def test_a_staged_sweep_keeps_what_helped(swept: Any) -> None:
    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        optim = overrides["optim"]
        good = 0.5 * (optim.get("warmup_steps") == 5) - 0.2 * (optim.get("beta1") == 0.5)
        return 3 - good + 0.1 * seed + 0.01 * seed * good + 0.3 * (seed - 1) * ("weight_decay" in optim)

    arms = {"warm": {"optim.warmup_steps": 5}, "slow": {"optim.beta1": 0.5}, "decay": {"optim.weight_decay": 0.1}}
    overrides = {"optim": {"eps": 1e-8}, "validation": {"interval": 1}}
    shown, _ = swept(loss, method="staged", arms=arms, space={}, seeds=3, overrides=overrides)
    rows = shown.values["rows_of_arms"]
    assert [row["kept"] for row in rows.values()] == ["yes", "no", "no"], "decay helps with one seed: chance"
    assert [row["added to"] for row in rows.values()] == ["base", "warm", "warm"]
    on = [[arm for arm in arms if trial.params[arm]] for trial in shown.values["trials"]]
    assert on == [[], ["warm"], ["warm", "slow"], ["warm", "decay"]]


def test_a_network_is_made_smaller_where_that_is_shown_to_cost_little(swept: Any) -> None:
    """The shipped arms in their order; each is compared with what the earlier ones left, over the same seeds."""
    shipped = load_sweep("reduce")
    assert [*shipped.arms] == ["rank", "value", "narrower"]
    assert 0 < shipped.tolerance < 0.1

    def loss(overrides: Mapping[str, Any], seed: int, step: int) -> float:
        model = overrides["model"]
        narrow, pooled = model["channels"] == 32, model["value"]["pool"] == "pooled"
        noisy = 0.02 * (seed - 1) * (model["policy"]["rank"] == 16)  # an interval of +-0.05 about 0: not shown
        return 3 + noisy + pooled * (0.01 + 0.001 * seed) + narrow * (0.03 if pooled else 0.0) + 0.1 * seed

    overrides = shipped.overrides | {"validation": {"interval": 1}}
    more = {"arms": shipped.arms, "tolerance": shipped.tolerance}
    shown, _ = swept(loss, method="staged", space={}, seeds=3, overrides=overrides, **more)
    rows = shown.values["rows_of_arms"]
    assert [row["kept"] for row in rows.values()] == ["no", "yes", "no"], (
        "cheap alone, the third is not beside the second"
    )
    assert [row["added to"] for row in rows.values()] == ["base", "base", "value"]
    sizes = [trial.user_attrs["parameters"] for trial in shown.values["trials"]]
    assert [row["parameters"] for row in rows.values()] == sizes[1:]


# What a process makes of a trial


def fail(number: int) -> tuple[str, str]:
    raise FolderError(errno.ENOSPC, "No space left on device") if number else ValueError("x" * 100_000)


def test_a_configuration_that_fails_is_told_in_short_and_a_full_disk_ends_the_sweep() -> None:
    state, reason = sweep.attempt(cloudpickle.dumps(fail), 0)
    assert (state, reason[:15], len(reason)) == ("failed", "ValueError: xxx", sweep.REASON_CHARACTERS)
    with pytest.raises(FolderError, match="No space left"):
        sweep.attempt(cloudpickle.dumps(fail), 1)


def test_a_run_that_another_node_still_writes_is_waited_for(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for = definitions("sweep")["wait_for"]
    monkeypatch.setattr(record, "ORPHAN_SECONDS", 0.01)
    (reports / "one").mkdir(parents=True)
    with FileLock(reports / "one" / "lock", thread_local=False) as lock:
        with pytest.raises(FolderError, match="end it"):
            wait_for("one", 0.3)
        threading.Timer(0.2, lock.release).start()
        wait_for("one")
        assert not lock.is_locked


# Real trainings

TWO = {"space": {RATE: [0.001], "optim.optimiser": ["adamw", "muon"]}}


def sweep_two(reports: Path) -> None:
    """In a process of its own: a sweep of two trials."""
    os.environ["MATRIXLIB_REPORTS"] = str(reports)
    run_notebook("sweep", device="cpu", overrides=TWO)


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_table_and_the_best_preset_trains(
    reports: Path, tmp_path: Path, forkserver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_notebook("sweep", device="cpu", overrides=TWO).values["folder"]
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(other))
    process = forkserver.Process(target=sweep_two, args=(other,))
    process.start()
    while process.is_alive() and not list(other.glob("sweep-demo-001-s0/checkpoints/step_00000005")):
        time.sleep(0.01)
    process.kill()
    process.join()
    first = (other / "sweep-demo-000-s0" / "summary.json").read_bytes()
    values = run_notebook("sweep", device="cpu", overrides=TWO).values
    assert (other / "sweep-demo-000-s0" / "summary.json").read_bytes() == first, "what had ended stays"
    for name in ("table.csv", "table.json", "best.yaml"):
        assert (values["folder"] / name).read_bytes() == (whole / name).read_bytes(), name
    best, name = str(values["folder"] / "best.yaml"), values["names"](values["best"].number)[0]
    assert config.dump(load_config(best)) == read_json(other / name / "run.json")["requested"]
    with closing(runs.open_run(best)) as current:
        assert next(iter(current.train())).step == 1
