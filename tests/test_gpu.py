"""The check of a card: its dry run on this CPU, what becomes of parts that end badly, faults that it has to find."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path
from typing import Any

import kernels
import parity
import processes
import psutil
import pytest
import torch
import warm
import wheels
from parts import BRIEF_SECONDS, PARTS, ROWS, Part, batches_of, configured, make_plan, step_of
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]


MAIN = runpy.run_path(str(ROOT / "tests" / "gpu" / "__main__.py"), run_name="check")["main"]


@pytest.mark.slow
def test_the_dry_run_passes_and_leaves_a_record(
    reports: Path, forkserver: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: its parts are forked from where those of other tests are."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # it is changed, for what parts start
    code, shown = MAIN(["--device", "cpu"]), capsys.readouterr().out
    assert code == 0, shown[-4000:]
    (path,) = (reports / "bench").glob("*/*.json")
    record = json.loads(path.read_text())
    assert [part["part"] for part in record["parts"]] == list(range(1, 17))
    assert {part["verdict"] for part in record["parts"]} == {"ok"}
    assert record["brief"]
    assert record["runtime"]["device"] == "cpu"
    assert "positions/s" in shown
    assert sorted(reports.iterdir()) == [reports / "bench"], "its runs lie elsewhere"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_does_not_begin(tmp_path: Path) -> None:
    done = warm.run(ROOT / "tests" / "gpu", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"device 'cuda' was asked for" in done.stderr
    assert b"DEVICE=cpu makes a dry run" in done.stderr


def test_a_part_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert MAIN(["--part", "3,17"]) == 2
    assert capsys.readouterr() == ("", "--part 3,17: there are parts 1 to 16\n")


def test_each_part_has_its_number_and_its_function() -> None:
    assert [part.number for part in PARTS] == list(range(1, 17))
    assert all(part.work().__doc__ for part in PARTS)


# Parts that end badly


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with parts that crash, hang and find no memory."""
    text = """
    import os, subprocess, time

    def crash(plan):
        print("before the end", flush=True)
        os.abort()

    def hang(plan):
        print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        time.sleep(60)

    def short(plan):
        import torch
        yield "so far"
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    """
    (tmp_path / "planted_parts.py").write_text(textwrap.dedent(text))
    paths = [str(tmp_path), str(ROOT), str(ROOT / "tests" / "gpu")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "PRELOAD", ("torch", "processes"))
    return "planted_parts"


def running(process: int) -> bool:
    """Whether a process does anything; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_part_that_crashes_hangs_or_finds_no_memory_fails_with_its_reason(planted: str, tmp_path: Path) -> None:
    results = {
        name: processes.run_part(Part(99, planted, name, name), "cpu", tmp_path / name, limit)
        for name, limit in (("crash", 60.0), ("hang", 4.0), ("short", 60.0))
    }
    assert {result["verdict"] for result in results.values()} == {"failed"}
    assert "killed by SIGABRT; it last said: " in results["crash"]["reason"]
    assert processes.ending(-9) == "killed by SIGKILL, as the system does where memory runs out"
    assert results["hang"]["reason"].startswith("no end after 4 s")
    assert not running(int(results["hang"]["reason"].split()[-1])), "what it started ends with it"
    assert "OutOfMemoryError: CUDA out of memory" in results["short"]["reason"]
    assert results["short"]["facts"] == ["so far"]
    assert (tmp_path / "short" / processes.RESULT).read_text().count("\n") == 1


def test_a_part_that_a_device_cannot_do_is_skipped_with_its_reason(tmp_path: Path) -> None:
    part = Part(99, "nowhere", "nothing", "nothing", {"cpu": "only cards have it"})
    result = processes.run_part(part, "cpu", tmp_path / "part")
    assert (result["verdict"], result["reason"]) == ("skipped", "only cards have it")


# Faults that it has to find


@pytest.fixture(scope="module")
def plan() -> Any:
    return make_plan("cpu")


def attend(rows: int, **options: Any) -> Any:
    """Forward and backward pass of one attention, with 64 tokens."""
    query, key, value = (torch.randn(rows, 2, 64, 16, requires_grad=True) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value, **options).sum().backward()


def test_attention_by_plain_products_is_found() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert kernels.MATH in kernels.attention_of(attend(2))
    fused = kernels.attention_of(attend(2))
    assert kernels.MATH not in fused
    assert any("flash" in name for name in fused)


def test_a_host_read_in_a_loss_is_found(plan: Any) -> None:
    config = configured(plan, "demo")
    step, (batch,) = step_of(config), batches_of(config)
    assert kernels.reads_of_losses(step, batch) == []
    for read, name in (
        (lambda value: value.sum().item(), "_local_scalar_dense"),
        (lambda value: value[value > 0], "index"),
        (torch.nonzero, "nonzero"),
    ):

        def hook(module: nn.Module, args: Any, out: Any, read: Any = read) -> None:
            read(out["value"])

        handle = step.model.register_forward_hook(hook)
        assert kernels.reads_of_losses(step, batch) == [name]
        handle.remove()


def test_waits_are_told_from_other_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at a.cpp:1.)", stacklevel=1)
    assert len(kernels.waits(caught)) == 1
    assert kernels.waits(caught)[0].startswith("test_gpu.py:")


def test_gaps_are_what_the_card_idles_between_the_read_and_the_next_batch() -> None:
    times = [
        (0.0, 1.0, "conv"),
        (1.0, 1.1, "Memcpy DtoH (Device -> Pinned)"),
        (1.3, 1.6, "adamw"),  # 0.2 idle before it
        (1.5, 1.7, "ema, beside it"),
        (1.8, 1.9, "Memcpy HtoD (Pinned -> Device)"),  # 0.1 idle before it
        (1.9, 2.0, "Memset (Device)"),
        (2.4, 3.0, "conv"),  # 0.4 idle before it
        (5.0, 5.1, "Memcpy DtoH (Device -> Pinned)"),  # the last one: no batch comes after it
    ]
    spans = [kernels.Span(*time) for time in times]
    assert kernels.gaps(spans) == [pytest.approx(0.7)]
    assert kernels.busy(spans)[:2] == [(0.0, 1.1), (1.3, 1.7)]
    assert kernels.idle(kernels.busy(spans), 0.0, 3.0) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: g * 1000, "should be"),
        (lambda g: g.flip(0), "cosine"),
        (lambda g: g * float("nan"), "not finite"),
    ],
)
def test_wrong_gradients_are_found(change: Any, words: str) -> None:
    right = {"stem": torch.randn(50, dtype=torch.float64), "head": torch.randn(9, dtype=torch.float64)}
    nearly = {name: gradient + 1e-4 * torch.randn_like(gradient) for name, gradient in right.items()}
    assert parity.compare("x", right, nearly, 0.9999, 0.01)[0] > 0.9999
    with pytest.raises(AssertionError, match=f"x: .*head.*{words}"):
        parity.compare("x", right, {**nearly, "head": change(right["head"])}, 0.9999, 0.01)


def test_a_recomputed_block_that_counts_its_batch_twice_is_found(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import checkpoint

    from matrixlib.tasks.chess import model

    plain = lambda block, x: checkpoint(block, x, use_reentrant=False)  # noqa: E731
    monkeypatch.setattr(model, "recomputed", plain)
    with pytest.raises(AssertionError, match=r"it took in a batch twice"):
        list(parity.recomputation(plan))


@pytest.mark.soak
def test_a_network_that_breaks_its_graph_is_found(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from matrixlib.tasks.chess.blocks import ResidualBlock

    forward = ResidualBlock.forward

    def broken(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(ResidualBlock, "forward", broken)
    with pytest.raises(AssertionError, match=r"broke the network's graph|graphs, not one"):
        list(parity.compilation(plan))


def test_the_dry_run_is_small() -> None:
    assert ROWS <= 32
    assert BRIEF_SECONDS < 0.1


# Wheels


def wheel(folder: Path, name: str, tags: str = "py3-none-any") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"TAGS = {tags!r}\n")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_what_is_missing_comes_from_a_folder_of_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "wheels").mkdir()
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = os.uname().machine
    wheel(tmp_path / "wheels", "planted_one")
    wheel(tmp_path / "wheels", "planted_two", f"{ours}-{ours}-manylinux_2_17_{machine}.manylinux2014_{machine}")
    wheel(tmp_path / "wheels", "planted_two", f"cp39-cp39-manylinux_2_17_{machine}")
    wheel(tmp_path / "wheels", "planted_three", f"cp38-abi3-manylinux_2_17_{machine}")
    wheel(tmp_path / "wheels", "planted_four", f"{ours}-{ours}-win_amd64")
    wheel(tmp_path / "wheels", "torch")  # is here: the machine's own stays
    names = wheels.unpack(tmp_path / "wheels", tmp_path / "unpacked")
    assert sorted(names) == ["planted-one", "planted-three", "planted-two"]
    found = subprocess.run(
        [sys.executable, "-c", "import planted_one, planted_two; print(planted_two.TAGS)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(ours)
    assert not (tmp_path / "unpacked" / "torch.py").exists()
    with pytest.raises(ValueError, match="no wheel in"):
        wheels.unpack(tmp_path, tmp_path / "unpacked")


def test_dependencies_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wheels.missing() == []
    monkeypatch.setattr(wheels, "installed", lambda name: name not in ("chess", "papermill"))
    assert wheels.missing() == ["chess"], "notebooks are not needed"
