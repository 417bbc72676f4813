"""A run from its parameters to its end: identity, resume, lock, damaged data and checkpoints; kills: test_kills.py."""

from __future__ import annotations

import html
import json
import shutil
import signal
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from saved import assert_same, history, newest

from matrixlib import config as configuration
from matrixlib.config import ConfigError, merge
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import MIN_WORKER_BATCHES, Loader, LoaderError
from matrixlib.data.shards import Shard, select, write_shard
from matrixlib.engine import metrics
from matrixlib.engine.health import TrainingHalted
from matrixlib.engine.trainer import Trainer
from matrixlib.hardware import speed
from matrixlib.runs import report, watch
from matrixlib.runs import run as runs
from matrixlib.tasks import load, load_config
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.stockfish.sample import unpack_sample
from matrixlib.tasks.melee.importer import unpack_sample as melee_sample
from matrixlib.tasks.spec import figures_table

TINY: dict[str, Any] = {
    "data": {"limit": 1024},
    "model": {"channels": 16, "blocks": 1, "dropout": 0.1, "droppath": 0.1},
    "train": {"steps": 12, "batch_size": 64, "micro_batch": 32},
    "validation": {"interval": 6, "sample": 128, "limit": 512},
    "checkpoint": {"interval": 4, "keep": 2},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
}


def train(name: str = "", until: int = 0, **more: Any) -> runs.Run:
    """A run, whose loop is left after so many updates, if any, which saves them."""
    current = runs.open_run(run=name, overrides={**TINY, **more})
    for stats in current.train():
        if stats.step == until:
            break
    current.close()
    return current


@pytest.mark.usefixtures("drawn")
def test_a_run_ends_with_summary_report_baselines_and_share_of_peak(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = train("one")
    summary, folder = current.summary(), current.folder
    assert current.complete
    assert (summary["complete"], summary["steps"], summary["positions"]) == (True, 12, 12 * 64)
    assert set(summary["evaluation"]["baselines"]) >= {"uniform_top1", "best_capture_top1", "majority_wdl"}
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    assert "auto" not in (stored["runtime"]["device"], stored["runtime"]["precision"], stored["data"]["workers"])
    share, gflops = summary["share_of_peak"], summary["peak_gflops"]
    flops = current.spec.training_flops(current.config)
    assert flops is not None
    row = metrics.read(folder / "metrics.jsonl")[-1]
    assert row["share_of_peak"] == pytest.approx(row["throughput"] * flops / (gflops * 1e9), abs=1e-4)
    assert 0 < share < 2
    assert f"share of peak {share:.0%}" in (folder / "report.html").read_text()
    monkeypatch.setattr(speed, "matrix_rate", lambda *given: 1.0)
    for dtype, rate in (("fp32", gflops), ("fp16", 1.0)):  # measured once for each dtype
        runs.autotune.measure_peak(folder, replace(current.runtime, dtype=dtype), flops)
        assert json.loads((folder / "run.json").read_text())["peak"]["gflops"] == rate


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(("error", "word", "updates"), [(OSError, "failed", 4), (TrainingHalted, "halted", 6)])
def test_a_run_that_fails_leaves_its_curves_and_a_report_and_goes_on(
    reports: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], word: str, updates: int
) -> None:
    validate = Trainer._validate

    def fail(trainer: Trainer, messages: list[str]) -> Any:
        if trainer.step == 5 and word == "failed":
            raise OSError("the disk is gone")
        for parameter in trainer.model.parameters() if trainer.step == 5 else ():
            parameter.data.fill_(torch.nan)
        return validate(trainer, messages)

    monkeypatch.setattr(Trainer, "_validate", fail)
    health = {"skips": 1, "rollbacks": 0}
    with pytest.raises(error) as caught:
        train("one", health=health)
    folder = reports / "one"
    assert f"curves and report: {folder / 'report.html'}" in caught.value.__notes__
    assert (folder / "training.png").stat().st_size > 5_000
    if word == "halted":
        kept = Shard(next(folder.rglob("records.npz")), LAYOUT)
        assert len(kept) == 64 * len(kept.meta["batches"]) > 0
    reason = f"{word} after {updates} updates: {error.__name__}: {' '.join(str(caught.value).split())}"
    assert reason in html.unescape((folder / "report.html").read_text())
    assert f'<span class="fail">{word}</span>' in (reports / "index.html").read_text()
    assert watch.run_status(folder).word == word
    monkeypatch.undo()
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(reports))
    assert train("one", health=health).complete
    assert watch.run_status(folder).word == "complete"


def test_the_finished_run_is_the_one_that_ended_last_whatever_was_written_later(reports: Path) -> None:
    for name, ended in (("first", "2026-01-02T00:00:00Z"), ("last", "2026-01-03T00:00:00Z"), ("old", "")):
        (reports / name).mkdir()
        summary = {"complete": True, "steps": 2} | ({"ended": ended} if ended else {})
        (reports / name / "summary.json").write_text(json.dumps(summary))
        record = {"kind": "train", "preset": "demo", "requested": configuration.dump(load_config("demo"))}
        (reports / name / "run.json").write_text(json.dumps(record | {"started": "2026-01-01T00:00:00Z"}))
        (reports / name / "config.yaml").write_text("")
    report.add_verdict(reports / "first", {"passed": True, "checks": []})  # judged again, much later
    assert runs.finished_run().name == "last"


def test_an_interrupt_before_the_loop_is_left_reaches_who_leaves_it(reports: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    current = runs.open_run(run="left", overrides=TINY)
    updates = current.train()
    next(updates)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        updates.close()
    assert signal.getsignal(signal.SIGINT) is before
    assert newest(current.folder).step == 1
    assert not current.lock.is_locked


def test_a_busy_run_another_task_and_a_trace_beyond_the_end_are_refused(reports: Path) -> None:
    with pytest.raises(runs.RunError, match=r"preset 'demo' is of the task chess, not latin: give one with"):
        runs.open_run("demo", task="latin")
    assert not list(reports.iterdir())
    first = runs.open_run(run="busy", overrides=TINY)
    with pytest.raises(runs.RunError, match="another process"):
        runs.open_run(run="busy", overrides=TINY)
    unnamed = runs.open_run(overrides=TINY)
    assert unnamed.name != "busy", "a live run is not picked up"
    unnamed.close()
    for trace in (-1, 12):
        with pytest.raises(runs.RunError, match=f"trace is {trace}: give an update before the last one, 12, or 0"):
            next(first.train(trace))
    assert not (first.folder / "metrics.jsonl").exists()
    first.close()


def test_an_empty_name_resumes_the_newest_incomplete_run_with_the_same_configuration(reports: Path) -> None:
    runs.open_run(run="compare-a0", overrides=TINY, kind="compare").close()
    first = train(until=5)
    assert first.name.startswith("demo-"), "an unfinished run of another kind is left alone"
    other = runs.open_run(overrides={**TINY, "seed": 5})
    assert other.name != first.name
    other.close()
    again = runs.open_run(overrides=TINY)
    assert again.name == first.name
    assert again.resumed
    assert [stats.step for stats in again.train()][:1] == [6], "leaving the loop saved update 5"
    again.close()
    fresh = runs.open_run(overrides=TINY)
    assert fresh.name != first.name, "a complete run is not resumed"
    fresh.close()
    with closing(runs.open_run(run=first.name, overrides=TINY, steps=13)) as longer:
        assert [stats.step for stats in longer.train()] == [13], "but where it is named, with more updates"


def test_a_new_run_beside_an_unfinished_one_says_how_to_resume_that(reports: Path) -> None:
    """Other steps with an empty name begin a new run, which looked as if the first had been resumed."""
    first = train(until=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.open_run(overrides={**TINY, "seed": 5}).close()  # could not be resumed so
        runs.open_run(overrides=TINY, steps=3).close()  # it has made more
    words = f"'{first.name}' of this preset is unfinished, at update 5, with other train.steps: name it as `run` to"
    with pytest.warns(UserWarning, match=words):
        other = runs.open_run(overrides=TINY, steps=20)
    other.close()
    assert other.name != first.name
    before = (first.folder / "config.yaml").read_bytes()
    with pytest.raises(runs.RunError, match=r"has made 5 updates, more than train\.steps: 3; name another run"):
        runs.open_run(run=first.name, overrides=TINY, steps=3)
    assert (first.folder / "config.yaml").read_bytes() == before
    with closing(runs.open_run(run=first.name, overrides=TINY, steps=20)) as again:
        assert (again.resumed, again.trainer.step, again.steps) == (True, 5, 20)


def test_other_values_under_the_same_name_are_refused_by_name(reports: Path) -> None:
    runs.open_run(run="mine", overrides=TINY).close()
    with pytest.raises(runs.RunError, match=r"optim\.learning_rate 0\.003 -> 0\.5"):
        runs.open_run(run="mine", overrides={**TINY, "optim": {"learning_rate": 0.5}})
    for before, steps in ((12, 20), (20, 12)):  # what was changed on resume can be changed back
        longer = runs.open_run(run="mine", steps=steps, overrides=TINY)
        assert (longer.steps, longer.resumed) == (steps, True)
        assert f"train.steps {before} -> {steps}" in longer.describe()
        longer.close()
    for size, compiled, mode in ((16, True, "default"), (48, "auto", "default"), (32, False, "")):
        changes = {"train": {"micro_batch": size}, "runtime": {"compile": compiled}}
        run = runs.open_run(run="mine", overrides=merge(TINY, changes))
        assert (run.runtime.micro_batch, run.data.runtime.compile) == (size, mode)
        assert "changed on resume" in run.runtime.reasons["micro_batch"] or size == 32
        run.close()


def test_explicit_parameters_beat_overrides_which_beat_the_preset(reports: Path) -> None:
    with pytest.raises(ConfigError, match="'seed': Input should be greater than or equal to 0, got -5"):
        runs.open_run(seed=-5)
    current = runs.open_run(run="layers", seed=7, steps=3, overrides={**TINY, "seed": 5})
    assert (current.config.seed, current.steps, current.config.train.batch_size) == (7, 3, 64)
    assert current.config.optim.beta2 == 0.98
    current.close()


def test_steps_auto_is_fixed_at_the_start(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def seconds_of(work: Callable[[], object], *_: object) -> float:
        timed.append(work)
        return 5.0 if len(timed) <= 4 else 0.05  # the first ones compile kernels

    monkeypatch.setattr(runs.autotune.speed, "seconds_of", seconds_of)
    monkeypatch.setattr(runs.autotune, "time", SimpleNamespace(monotonic=lambda: 0.0))  # making batches takes no time
    override = {**TINY, "train": {**TINY["train"], "steps": "auto", "minutes": 0.05}}
    for begins in (True, False):
        current = runs.open_run(run="timed", overrides=override)
        assert current.steps == int(3 / (runs.autotune.OVERHEAD * 0.05))
        assert (len(timed) > 20) == begins, "it is stored with the run"
        current.close()
        timed.clear()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_data_set_without_a_healthy_shard_is_refused_in_one_line(reports: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(unpack_sample(), data, ignore=shutil.ignore_patterns("catalogue*"))
    for shard in data.glob("*.npz"):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(ValueError, match="no healthy training shard") as caught:
        runs.open_run(overrides=TINY | {"data": {"source": str(data)}})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_is_timed_before_a_run_has_its_micro_batch(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator: the number of updates in a time, and the memory, depend on it."""
    resolve, trials = runs.runtimes.resolve, []

    def timed(data: Any) -> int:
        trials.append((data.runtime.micro_batch, data.config.train.micro_batch))
        return 40

    monkeypatch.setattr(runs.runtimes, "resolve", lambda *sections: replace(resolve(*sections), device="mps"))
    monkeypatch.setattr("matrixlib.engine.self_test.compare", lambda *_: ("", 2048))
    monkeypatch.setattr(runs.autotune, "fit_steps", timed)
    run = runs.open_run("demo", "cpu", run="tuned", overrides={"train": {"steps": "auto"}})
    run.close()
    assert trials == [(16, 16)], "2,048 rows of a linear layer for each position, 32,768 at most"
    assert (run.runtime.micro_batch, run.data.runtime.micro_batch, run.steps) == (16, 16, 40)


@pytest.fixture
def two_sources(tmp_path: Path, reports: Path) -> Path:
    """Positions of the sample set as shards of two sources; "few" holds nothing out."""
    folder = tmp_path / "shards"
    folder.mkdir()
    found = Catalogue(unpack_sample())
    batch = Shard(found.shards("train")[0].path, LAYOUT).gather(np.arange(1200))
    held = Shard(found.shards("validation")[0].path, LAYOUT).gather(np.arange(200))
    about = {"generator": "test", "seed": 0}
    for name, part, source, split in (
        ("few", select(batch, np.arange(200), LAYOUT), "few", "train"),
        ("many", select(batch, np.arange(200, 1200), LAYOUT), "many", "train"),
        ("held", held, "many", "validation"),
    ):
        write_shard(folder / f"{name}.npz", LAYOUT, part, {**about, "source": source, "split": split})
    return folder


def mixing(folder: Path, *stages: dict[str, float]) -> dict[str, Any]:
    share = [1 / len(stages)] * len(stages)
    sources = {"enabled": True, "stages": list(stages), "fractions": share}
    return {"data": {"source": str(folder), "limit": 0}, "curriculum": {"sources": sources}}


def test_a_curriculum_over_sources_mixes_each_batch_and_goes_on_where_it_was(two_sources: Path) -> None:
    """Half a batch from a sixth of the data, then all by their size; a run cut in two ends with the same bits."""
    more = mixing(two_sources, {"few": 1.0, "many": 1.0}, {})
    whole = train("whole", **more)
    assert whole.trainer.curriculum is not None
    phases = [(start, stop, str(phase)) for start, stop, phase in whole.trainer.curriculum.spans(12)]
    assert phases == [(0, 6, "sources few 50%, many 50%"), (6, 12, "sources all")]
    current = train("cut", 4, **more)
    train("cut", **more)
    assert_same(whole.folder, current.folder)
    assert history(whole.folder) == history(current.folder)


def test_several_data_sets_are_mixed_by_weight_and_told_apart(two_sources: Path, tmp_path: Path) -> None:
    """Three quarters of each batch from the small one; a run cut in two ends with the same bits."""
    found = Catalogue(unpack_sample())
    other = tmp_path / "other"
    other.mkdir()
    about = {"generator": "test", "seed": 0, "source": "engine"}
    for split in ("train", "validation"):
        rows = Shard(found.shards(split)[-1].path, LAYOUT).gather(np.arange(300, 600))
        write_shard(other / f"{split}.npz", LAYOUT, rows, about | {"split": split})
    more = {"data": {"source": {str(two_sources): 1, str(other): 3}, "limit": 0}}
    whole = train("whole", **more)
    places = whole.data.training._batches().rows(5)
    assert whole.data.training.of_sources()[str(other)][places].sum() == 48
    figures = whole.summary()["evaluation"]
    assert {name: own["positions"] for name, own in figures["by_source"].items()} == {
        str(two_sources): 200,
        str(other): 300,
    }
    assert figures["positions"] == 500
    assert figures_table(figures)["value"][f"positions of {other}"] == "300"
    current = train("cut", 4, **more)
    train("cut", **more)
    assert_same(whole.folder, current.folder)
    assert runs.held_out_figures(load(whole.folder))["by_source"].keys() == figures["by_source"].keys()
    with pytest.raises(ConfigError, match="'nowhere' is no folder"):
        runs.open_run(overrides=TINY | {"data": {"source": {"sample": 1, "nowhere": 1}}})
    for source in ({"sample": 0}, {"sample": "much"}):
        with pytest.raises(ConfigError, match=r"data\.source"):
            runs.open_run(overrides=TINY | {"data": {"source": source}})
    with pytest.raises(ConfigError, match="names no data set"):
        runs.open_run(overrides=TINY | {"data": {"source": {}}})
    with pytest.raises(LoaderError, match="data of task 'melee'"):
        train("melee", data={"source": {"sample": 1, str(melee_sample()): 1}})


def test_figures_of_another_task_are_told_by_source_too(tmp_path: Path) -> None:
    copied = str(shutil.copytree(melee_sample(), tmp_path / "set"))
    small = {"train": {"steps": 1, "batch_size": 8}, "validation": {"limit": 32, "sample": 16}}
    run = runs.open_run("melee_demo", overrides=small | {"data": {"source": {"sample": 1, copied: 1}}})
    for _ in run.train():
        pass
    assert {own["frames"] > 0 for own in run.summary()["evaluation"]["by_source"].values()} == {True}


def test_epochs_are_a_number_of_updates(two_sources: Path) -> None:
    more = {"data": {"source": str(two_sources), "limit": 0}, "train": TINY["train"] | {"steps": "auto", "epochs": 0.5}}
    run = train("half", **more)
    assert run.steps == round(0.5 * 1200 / 64)
    assert [row["epoch"] for row in metrics.read(run.folder / "metrics.jsonl")][-1] == round(run.steps * 64 / 1200, 4)


def test_phases_without_their_data_are_named_before_anything_is_trained(two_sources: Path) -> None:
    """A misspelt source; and "few" holds nothing out by which its phase could be judged."""
    more = mixing(two_sources, {}, {"few": 1.0, "mny": 1.0})
    with pytest.raises(runs.RunError, match=r"asks for source 'mny'.* has few, many"):
        runs.open_run(run="typo", overrides={**TINY, **more})
    more = mixing(two_sources, {}, {"few": 1.0})
    more["curriculum"] |= {"kind": "adaptive", "metric": "policy/top1", "up": 0.9, "down": 0.1}
    with pytest.raises(runs.RunError, match=r"of which nothing is held out \(few\)"):
        runs.open_run(run="judged", overrides={**TINY, **more})


def test_a_run_says_what_it_lost_and_ends_above_the_limit(two_sources: Path) -> None:
    """A shard of 200 of the 1,200 training rows is one block, and damaged."""
    path = two_sources / "few.npz"
    Catalogue(two_sources)  # which has seen it whole
    data = bytearray(path.read_bytes())
    data[data.index(Shard(path, LAYOUT).arrays["records"][:1].tobytes())] ^= 1
    path.write_bytes(data)
    options = {"data": {"source": str(two_sources), "limit": 0, "max_lost": 0.17}}
    current = train("some", **merge(TINY, options))
    assert current.summary()["lost_rows"] == {"train": pytest.approx(1 / 6, abs=1e-6), "validation": 0.0}
    assert any("16.67% of the training rows are lost so far" in message for message in current.messages)
    options["data"]["max_lost"] = 0.16
    with pytest.raises(runs.RunError, match=r"16\.7% of the training rows are damaged, more than data.max_lost"):
        train("many", **merge(TINY, options))


def test_a_run_goes_on_without_workers_that_do_not_work(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "try_workers", lambda loader: "no shared memory")
    current = train("alone", 1, data={"workers": 2})
    assert current.data.runtime.workers == 0
    assert any("do not work here (no shared memory)" in message for message in current.messages)


def test_what_the_policy_derives_reaches_the_loaders_processes(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is printed and applied nowhere is the specification's own fault."""
    many = {"batch_size": 1, "limit": MIN_WORKER_BATCHES}  # batches of a pass over what is held out
    run = runs.open_run(run="derived", overrides=merge(TINY, {"data": {"timeout": 3.0}, "validation": many}))
    run.close()
    given: list[Any] = []

    class Started:
        def __init__(self, source: bytes, numbers: range, *how: Any) -> None:
            given[:] = how

        def take(self, timeout: float) -> Any:
            given.append(timeout)
            raise InterruptedError

        def close(self) -> None:
            pass

    monkeypatch.setattr("matrixlib.data.loader.Workers", Started)
    data = replace(run.data, runtime=replace(run.runtime, device="cuda", workers=8, prefetch=6))  # of the V-Cache rule
    for batches in (data.training.batches(0), iter(data.held_out("full"))):
        with pytest.raises(LoaderError):
            next(batches)
        assert given == [8, 6, 3.0], "workers, prefetch, timeout"


def test_suspicious_shards_are_named_and_left_out_where_that_is_asked_for(two_sources: Path) -> None:
    """What an import found far from the other shards of its source."""
    catalogue = Catalogue(two_sources)
    catalogue.quarantine("few.npz", "looked odd")
    run = runs.open_run(run="quarantined", overrides=merge(TINY, {"data": {"source": str(two_sources)}}))
    run.close()
    assert f"1 shard is quarantined, {200 / 1400:.2%} of the rows; few.npz: looked odd" in run.describe()
    catalogue.release("few.npz")
    first, *others = catalogue.shards("train")
    catalogue.set_quality(first.name, {**first.quality, "outliers": {"men": 8.04, "draw": -7}})
    more = {**TINY, "data": {"source": str(two_sources)}}
    used, left_out = "used; data.suspicious: quarantine leaves them out", "left out of this run"
    for use, fate, kept in (("use", used, [first, *others]), ("quarantine", left_out, others)):
        current = runs.open_run(run=use, overrides=merge(more, {"data": {"suspicious": use}}))
        assert current.messages.count(f"suspicious shards, {fate}: {first.name} (draw z -7.0, men z +8.0)") == 1
        assert current.data.training.count == sum(row.count for row in kept)
        current.close()


def test_the_targets_of_every_head_are_written_where_that_is_asked_for(reports: Path) -> None:
    heads = ["piece", "threat", "control"]
    more = {"model": {**TINY["model"], "ssl": heads}, "train": {**TINY["train"], "steps": 4, "targets_interval": 2}}
    train("looked-at", **more)
    rows = [json.loads(line) for line in (reports / "looked-at" / "targets.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert row["targets"].keys() == {f"ssl_{head}" for head in heads}
        figures = row["targets"]["ssl_control"]
        assert (figures["shape"], sum(figures["histogram"].values())) == ([64, 8, 8], 64 * 64)
        assert figures["histogram"].keys() <= {"0", "1", "2"}
