"""What a run survives on the device: overflows, too little memory, an end and a resume, saves, lost workers."""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from parts import ROWS, Skip, batches_of, check_that, configured, run_overrides, step_of

from matrixlib import files
from matrixlib.bench.workloads import LARGE, open_loader
from matrixlib.data.loader import Loader
from matrixlib.engine.checkpoint import Checkpoint
from matrixlib.engine.microbatch import tune_step
from matrixlib.engine.stats import Stats
from matrixlib.engine.step import Step
from matrixlib.hardware import backend
from matrixlib.hardware.benchmark import Figure, Plan
from matrixlib.runs import faults
from matrixlib.runs.run import Run, open_run

# Half precision


def half_precision(plan: Plan) -> Iterator[Figure | str]:
    """A run in fp16 whose loss scale is too large at first and grows too fast: overflows lower it, a loss that is NaN
    leaves it as it is, and it goes through a resume. On a CPU in fp32, with gradients rounded to fp16.
    """
    if plan.device == "mps":
        raise Skip("fp16 needs a loss scaler, which is trusted on CUDA alone")
    steps, at = (24, 16) if plan.brief else (300, 200)
    precision = {} if plan.brief else {"runtime": {"precision": "fp16"}}
    overrides = run_overrides(plan, precision, {"gating": {"freeze_steps": 0}})

    def opened() -> Run:
        run = open_run("demo" if plan.brief else "quick", run="half", steps=steps, overrides=overrides)
        faults.overflow(run, 20 if plan.brief else 100)
        return run

    rows: list[Stats] = []
    run = opened()
    for stats in run.trainer.train(steps // 2):
        rows.append(stats)
    saved, scale = newest(run).state["scaler"], scale_of(run)
    run.close()
    run = opened()
    faults.spoil(run, at, "inf_input")
    check_that(run.trainer.step == steps // 2, f"it goes on at update {run.trainer.step}, not {steps // 2}")
    resumed = scale_of(run)
    check_that(
        resumed == scale == saved["scale"],
        f"the loss scale was {scale:g}, is saved as {saved['scale']:g}, resumed as {resumed:g}",
    )
    before = resumed
    for stats in run.trainer.train():
        if stats.step == at + 1:
            words = f"an infinite input is judged as {'an overflow' if stats.overflow else stats.action}"
            check_that(not stats.overflow and stats.action == "skip", f"{words}, and is to be skipped")
            check_that(scale_of(run) == before, "an infinite input changed the loss scale")
        before = scale_of(run)
        rows.append(stats)
    check_that(rows[-1].step == steps, f"it ended after {rows[-1].step} of {steps} updates")
    check_that(rows[-1].overflows > 0, "no gradient overflowed at a loss scale of 2^19")
    check_that(rows[-1].skipped == 1, f"{rows[-1].skipped} updates were skipped, not the one with the infinite input")
    losses = [row.loss for row in rows if row.finite]
    first, last = statistics.mean(losses[:8]), statistics.mean(losses[-8:])
    check_that(
        plan.brief or last < first,
        f"the loss went from {first:.3f} to {last:.3f} in {steps} updates: it learned nothing",
    )
    yield (
        f"{rows[-1].overflows} overflows and one infinite input in {steps} updates; loss scale {scale_of(run):g} at "
        f"the end, loss {first:.3f} to {last:.3f}"
    )


def scale_of(run: Run) -> float:
    """The loss scale now."""
    scaler = run.trainer._step.scaler
    return float(scaler.get_scale())


def newest(run: Run) -> Checkpoint:
    """The newest checkpoint of a run."""
    checkpoint = run.trainer.checkpoints.newest()
    assert checkpoint is not None
    return checkpoint


# Memory

SHARES = (0.05, 0.15, 0.3)
"""Of the card's memory that the process may take."""
LOSS = 1e-2
"""Relative difference of the losses of an update that began too large and of one that did not."""
LEAST = 4 * 2**30
"""Bytes below which the large network cannot be trained at all."""


def little_memory(plan: Plan) -> Iterator[Figure | str]:
    """Updates too large for the memory are repeated with smaller passes and come to the same loss; the tuner finds what
    fits; a run that it began has no trouble with memory. On a CPU the network refuses more than a few rows.
    """
    rows = {"train": {"batch_size": 8 * ROWS if plan.brief else 4096, "micro_batch": 8 * ROWS if plan.brief else 4096}}
    calm = {"model": {"droppath": 0.0, "dropout": 0.0}}  # masks drawn for passes of another size are others
    preset = "demo" if plan.brief else LARGE
    config = configured(plan, preset, rows, calm)
    (batch,) = batches_of(config)
    for share in (0.0,) if plan.device != "cuda" else SHARES:
        if share:
            total = torch.cuda.get_device_properties(0).total_memory
            if share * total < LEAST:
                yield f"{share:.0%} of this card is too little for {preset}"
                continue
            torch.cuda.set_per_process_memory_fraction(share)
        step = step_of(config)
        room(plan, step)
        stats = step(batch)
        words = f"at {share:.0%} of the card" if share else "with room for 40 rows"
        check_that(
            step.micro_batch < config.train.batch_size,
            f"{words}: {config.train.batch_size} rows fit at once; nothing was tried",
        )
        check_that(any("out of memory" in text for text in stats.messages), f"{words}: halved without a word")
        small = step_of(config)
        small.micro_batch = step.micro_batch
        apart = abs(small(batch).loss / stats.loss - 1)
        check_that(apart < LOSS, f"{words}: the loss after running out of memory differs by {apart:.2g}")
        yield f"{words}: {config.train.batch_size:,} rows in passes of {step.micro_batch}, loss within {apart:.1g}"
        del step, small
        backend.empty_cache(plan.runtime.torch_device)
        tuned = step_of(config)
        room(plan, tuned)
        size = tune_step(tuned, batch, share).size
        tuned.micro_batch = size
        messages = tuned(batch).messages
        check_that(not messages, f"{words}: the tuner's {size} rows do not fit: {'; '.join(messages)}")
        yield f"{words}: the tuner takes {size} rows"
        del tuned
        backend.empty_cache(plan.runtime.torch_device)
        if share:
            yield tuned_run(plan, share)
    if plan.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def room(plan: Plan, step: Step) -> None:
    """Where no limit can be set, let a step's network refuse more than 40 rows as an allocator would."""
    if plan.device == "cuda":
        return

    def refuse(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if len(args[0]) > 40:
            raise torch.OutOfMemoryError(f"planted: no room for {len(args[0])} rows")

    step.model.register_forward_pre_hook(refuse)


def tuned_run(plan: Plan, share: float) -> str:
    """A run whose micro-batch the tuner chose: nothing to say about memory in its first updates."""
    changes = {"memory": {"limit": share}, "train": {"batch_size": 4096, "micro_batch": "auto"}}
    run = open_run(LARGE, run=f"memory-{share}", steps=30, overrides=run_overrides(plan, changes))
    texts: list[str] = []
    updates = run.train()
    for stats in updates:
        texts += stats.messages
        if stats.step == 25:
            break
    updates.close()
    wrong = [text for text in texts if "memory" in text]
    check_that(not wrong, f"at {share:.0%} of the card a tuned run says: {wrong[:1]}")
    return f"at {share:.0%} of the card: 25 updates in passes of {run.runtime.micro_batch} say nothing of memory"


# Ends and saves


def resume(plan: Plan) -> Iterator[Figure | str]:
    """A run that goes on from its middle makes the second half's updates again: losses, weights, moments, and every
    random stream. To the bit on a CPU and wherever torch says that its operations repeat themselves.
    """
    half = 5 if plan.brief else 60
    model = {"model": {"dropout": 0.1, "droppath": 0.1}}
    overrides = run_overrides(
        plan, model, {"checkpoint": {"interval": half}, "train": {"batch_size": ROWS if plan.brief else 256}}
    )
    preset = "demo" if plan.brief else "small"
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = open_run(preset, run="whole", steps=2 * half, overrides=overrides)
        expected = [stats.loss for stats in whole.trainer.train()]
        end = newest(whole)
        root = files.reports_root()
        shutil.copytree(whole.folder, root / "again")
        shutil.rmtree(root / "again" / "checkpoints" / end.path.name)
        again = open_run(preset, run="again", steps=2 * half, overrides=overrides)
        check_that(again.trainer.step == half, f"it goes on at update {again.trainer.step}, not {half}")
        losses = [stats.loss for stats in again.trainer.train()]
    varying = sorted({str(w.message).split(" does not")[0][:60] for w in caught if "determin" in str(w.message)})
    other = newest(again)
    for name, stream in end.tensors["rng"].items():
        check_that(
            torch.equal(stream, other.tensors["rng"][name]),
            f"the random stream of {name} is another one after the resume",
        )
    check_that(end.state["rng"] == other.state["rng"], "a random stream of the host is another one after the resume")
    apart = max(abs(one / two - 1) for one, two in zip(losses, expected[half:], strict=True))
    bits = all(
        torch.equal(tensor, other.tensors[group][name])
        for group, members in end.tensors.items()
        for name, tensor in members.items()
    )
    exact = plan.device == "cpu" or not varying
    check_that(apart == 0 if exact else apart < 1e-3, f"losses after the resume differ by {apart:.2g} of them")
    check_that(bits or not exact, "weights or moments after the resume have other bits")
    same = "the same" if bits else "other"
    yield f"{half} updates after the resume: losses within {apart:.1g}, {same} bits, the same streams"
    for text in varying:
        yield f"not repeatable, says torch: {text}"


def saving(plan: Plan) -> Iterator[Figure | str]:
    """What a save writes while training goes on are the bytes of the moment at which it was asked for."""
    before, during = (3, 3) if plan.brief else (20, 20)
    preset = "demo" if plan.brief else LARGE
    run = open_run(preset, run="saving", steps=before + during + 100, overrides=run_overrides(plan))
    updates = run.train()
    times: list[float] = []
    for number in range(2):  # the first save also makes its buffers
        quiet = [next(updates).seconds for _ in range(before)]
        tensors, _ = run.trainer._step.state_dict()
        clones = {
            group: {name: t.detach().clone() for name, t in members.items()} for group, members in tensors.items()
        }
        wait(plan)
        began = time.perf_counter()
        path = run.trainer.save()
        times.append(time.perf_counter() - began)
        beside = [next(updates).seconds for _ in range(during)]
        run.trainer.checkpoints.join()
        stored = run.trainer.checkpoints.load(path)
        for group, members in clones.items():
            for name, tensor in members.items():
                same = same_bytes(stored.tensors[group][name], tensor.cpu())
                check_that(same, f"save {number + 1}: {group}/{name} has other bytes than when it was asked for")
        size = sum(t.nbytes for members in clones.values() for t in members.values())
        del clones
        yield (
            f"save {number + 1} of {size / 1e6:,.0f} MB: training stood for {times[-1] * 1e3:.1f} ms; an update took "
            f"{statistics.median(quiet) * 1e3:.1f} ms before and {statistics.median(beside) * 1e3:.1f} ms beside it"
        )
    updates.close()
    yield Figure(f"{preset}, stall of a save", times[-1], "s")


def wait(plan: Plan) -> None:
    """Until the device has done its work, which a save would else be held to account for."""
    from matrixlib.hardware.backend import synchronize

    synchronize(plan.device)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaN equals itself here."""
    shapes = one.shape == other.shape and one.dtype == other.dtype
    return shapes and bytes(one.contiguous().view(-1).view(torch.uint8).numpy()) == bytes(
        other.contiguous().view(-1).view(torch.uint8).numpy()
    )


# Workers


def workers(plan: Plan) -> Iterator[Figure | str]:
    """The same batches from any number of workers, beside training; a killed worker is replaced, and shared memory
    holds what they make ahead.
    """
    preset, counts = ("demo", (0, 1)) if plan.brief else ("quick", (0, 1, 2, 4, 8))
    rows = {"train": {"batch_size": ROWS if plan.brief else 1024}}
    config = configured(plan, preset, rows)
    expected = batches_of(config, 3)
    size = sum(tensor.nbytes for tensor in expected[0].values())
    folder = "/dev/shm"
    if psutil.LINUX:
        free, needed = psutil.disk_usage(folder).free, size * counts[-1] * 6
        check_that(
            free > needed,
            f"{folder} has {free / 2**20:,.0f} MiB free, and {counts[-1]} workers need {needed / 2**20:,.0f}: give the "
            "container more (--shm-size)",
        )
        yield f"{folder}: {free / 2**20:,.0f} MiB free, {needed / 2**20:,.1f} needed by {counts[-1]} workers"
    for count in counts:
        if count and not plan.brief:
            stream = open_loader(config, config.train.batch_size, workers=count, pin=plan.runtime.pin).batches(0)
            for number, batch in enumerate(expected):
                got = next(stream)
                same = all(torch.equal(got[name], tensor) for name, tensor in batch.items())
                check_that(same, f"batch {number} of {count} workers differs from that of none")
            stream.close()  # type: ignore[attr-defined]
        updates, killed = (6, 3) if plan.brief else (150, 75)
        overrides = run_overrides(plan, rows, {"data": {"workers": count, "prefetch": 2}})
        run = open_run(preset, run=f"workers-{count}", steps=updates, overrides=overrides)
        plain = Loader.batches
        if count:
            faults.dead_worker(run, killed)
        rates, waited = [], []
        for stats in run.trainer.train():
            if stats.step < killed:
                rates.append(stats.seconds)
                waited.append(stats.times.get("wait", 0.0))
        Loader.batches = plain  # type: ignore[method-assign]
        lost = [text for text in run.messages if "started again" in text]
        check_that(run.trainer.step == updates, f"with {count} workers it ended after {run.trainer.step} updates")
        check_that(bool(lost) == bool(count), f"{count} workers, one killed: {len(lost)} were started again")
        if not plan.brief:
            late = sum(waited[20:]) / sum(rates[20:])
            yield Figure(
                f"{preset}, {count} workers", config.train.batch_size / statistics.median(rates[20:]), "positions/s"
            )
            yield f"{count} workers: training waited for data {late:.0%} of the time"
    yield f"with {', '.join(map(str, counts))} workers: the same batches, and on to the end after a killed one"
