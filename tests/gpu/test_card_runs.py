"""What a training on a card survives, and whether it learns what it learns on a CPU."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from card import CALM, DEVICE, DRY, QUIET, ROWS, batches_of, configured, half_precision, overrides, step_of
from saved import newest

from matrixlib.engine import self_test
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs.run import Run, open_run
from matrixlib.tasks import changed, get_task

LARGE = "matrix0_53m"


@pytest.mark.skipif(DEVICE != "cuda", reason="fp16 needs a loss scaler, which is trusted on CUDA alone")
def test_fp16_overflows_and_goes_through_a_resume(reports: Path) -> None:
    """A loss scale too large at first is lowered, a loss that is NaN leaves it as it is."""
    steps, bad = 300, 200
    changes = overrides(QUIET, {"runtime": {"precision": "fp16"}, "gating": {"freeze_steps": 0}})

    def opened() -> Run:
        return open_run("quick", run="half", steps=steps, overrides=changes)

    run = opened()
    run.trainer._step.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**19, growth_interval=100)
    rows = list(run.trainer.train(steps // 2))
    scale = run.trainer._step.scaler.get_scale()
    run.close()
    run = opened()
    scaler = run.trainer._step.scaler
    assert run.trainer.step == steps // 2
    assert scaler.get_scale() == scale == newest(run.folder).state["scaler"]["scale"]
    source = run.trainer._source.batches

    def spoiled(start: int, stop: int) -> Any:
        for number, batch in enumerate(source(start, stop), start):
            yield {**batch, "wdl": batch["wdl"] * torch.nan} if number == bad else batch

    run.trainer._source.batches = spoiled  # type: ignore[method-assign]
    before = scale
    for stats in run.trainer.train():
        if stats.step == bad + 1:
            assert (stats.overflow, stats.action, scaler.get_scale()) == (False, "skip", before)
        before = scaler.get_scale()
        rows.append(stats)
    assert rows[-1].overflows > 0
    assert rows[-1].skipped == 1
    losses = [row.loss for row in rows if row.finite]
    assert statistics.mean(losses[-8:]) < statistics.mean(losses[:8])


@pytest.mark.parametrize("share", [0.05, 0.15, 0.3] if DEVICE == "cuda" else [0.0])
def test_an_update_too_large_for_the_memory_is_repeated_in_smaller_passes(share: float) -> None:
    """It comes to the same loss. share: of the card that the process may take; on a CPU the network refuses rows."""
    rows = 8 * ROWS if DRY else 4096
    config = configured(LARGE, CALM, {"train": {"batch_size": rows, "micro_batch": rows}})
    (batch,) = batches_of(config)
    if share and share * torch.cuda.get_device_properties(0).total_memory < 4 * 2**30:
        pytest.skip(f"{share:.0%} of this card is too little for {LARGE}")
    step = step_of(config)

    def refuse(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if len(args[0]) > 40:
            raise torch.OutOfMemoryError(f"planted: no room for {len(args[0])} rows")

    if not share:
        step.model.register_forward_pre_hook(refuse)
    else:
        torch.cuda.set_per_process_memory_fraction(share)
    try:
        stats = step(batch)
        assert step.micro_batch < rows
        assert any("out of memory" in text for text in stats.messages)
        small = step_of(config)
        small.micro_batch = step.micro_batch
        assert small(batch).loss == pytest.approx(stats.loss, rel=1e-2)
    finally:
        if share:
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("trunk", ["mlp", "gru", "lstm", "transformer"])
def test_a_run_of_any_trunk_may_begin(trunk: str) -> None:
    """Its self-test, in evaluation mode, finds nothing wrong: cuDNN makes gradients of a recurrent layer in training
    mode alone."""
    for precision in ("fp32", half_precision()):
        changes = {"runtime": {"precision": precision}}
        config = configured("melee_demo", changes)
        config = changed(config, {"model": {"trunk": trunk, "layers": 2, "dropout": 0.3}})
        (batch,) = batches_of(config)
        runtime = runtimes.resolve(config.runtime, config.train, config.data)
        runtime.apply()
        assert self_test.compare(get_task("melee").task(config), batch, runtime, config)[0] == ""


def test_a_resumed_run_goes_on_with_the_same_losses_and_streams(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; on a card as far as its operations can repeat themselves."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    half, preset = (5, "demo") if DRY else (60, "small")
    model = {"model": {"dropout": 0.1, "droppath": 0.1}, "train": {"batch_size": ROWS if DRY else 256}}
    changes = overrides(QUIET, model, {"checkpoint": {"interval": half}})
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = open_run(preset, run="whole", steps=2 * half, overrides=changes)
        expected = [stats.loss for stats in whole.trainer.train()]
        end = newest(whole.folder)
        shutil.copytree(whole.folder, reports / "again")
        shutil.rmtree(reports / "again" / "checkpoints" / end.path.name)
        again = open_run(preset, run="again", steps=2 * half, overrides=changes)
        assert again.trainer.step == half
        losses = [stats.loss for stats in again.trainer.train()]
    finally:
        torch.use_deterministic_algorithms(False)
    other = newest(again.folder)
    assert end.state["rng"] == other.state["rng"]
    assert all(torch.equal(stream, other.tensors["rng"][name]) for name, stream in end.tensors["rng"].items())
    assert losses == pytest.approx(expected[half:], rel=0 if DRY else 1e-3)
    for group in ("model", "optimiser") if DRY else ():
        assert all(torch.equal(tensor, other.tensors[group][name]) for name, tensor in end.tensors[group].items())


SIZES = (1, 17, 40) if DRY else (1, 17, 300, 1024)
SAME = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.02}
"""Log-probabilities of a row alone and in a larger batch, which other kernels may work on."""


@pytest.mark.parametrize("preset", ["demo"] if DRY else ["quick", LARGE])
def test_inference_in_half_precision_and_in_batches_of_any_size_agrees(preset: str) -> None:
    from matrixlib.tasks.chess.evaluate import throughput

    out: dict[str, dict[str, np.ndarray]] = {}
    half = half_precision()
    for dtype in ("fp32", half):
        config: Any = configured(preset, {"runtime": {"precision": dtype}})
        step, spec = step_of(config), get_task(config.task)
        net: Any = spec.network(step.model.float(), config, step.runtime)
        batch = throughput.positions(net, SIZES[-1])
        legal = batch["policy_index"] >= 0
        out[dtype] = net.predict(batch)
        for rows in SIZES[:-1]:
            part = net.predict({key: array[:rows] for key, array in batch.items()})
            apart = float(np.abs(part["policy"] - out[dtype]["policy"][:rows])[legal[:rows]].max())
            assert apart < SAME[dtype], f"{rows} rows alone differ from the same among {SIZES[-1]}"
    full, low = (np.where(legal, out[dtype]["policy"], -np.inf) for dtype in ("fp32", half))
    divergence = (np.exp(full) * np.where(legal, full - np.where(legal, low, 0), 0)).sum(1).mean()
    assert divergence < 2e-3, "KL in nats"
    assert np.abs(out["fp32"]["value"] - out[half]["value"]).max() < 0.03


STEPS, TOP1, VALUE = 13_111, 0.323, 0.900
"""Held-out figures of `quick` with AdamW and a convolution for the policy after so many updates on two cores of an
EPYC; another run may lie from them by twice what other seeds make."""


@pytest.mark.skipif(DRY, reason="the reference is of a CPU")
@pytest.mark.timeout(1200)
def test_it_learns_what_it_learns_on_a_cpu(reports: Path) -> None:
    changes = {
        "runtime": {"device": DEVICE, "compile": False},
        "train": {"statistics_interval": 1000},
        "optim": {"optimiser": "adamw"},
        "model": {"policy": {"kind": "conv", "rank": 96}},
    }
    run = open_run("quick", run="learning", steps=STEPS, overrides=changes)
    for _ in run.train():
        pass
    figures = run.summary()["evaluation"]
    assert (figures["top1"], figures["value_correlation"]) == pytest.approx((TOP1, VALUE), abs=0.01)
