"""What is tried before a run: an update beside the CPU's, the dtype and the device that stand in for wrong ones, and
whether the compiler pays.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_task import ToyNet, ToyTask, toy_batch, toy_runtime

from matrixlib.config import Config
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.engine import compiler, self_test
from matrixlib.engine.self_test import compare
from matrixlib.hardware import machine
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.runtime import Runtime
from matrixlib.runs import autotune
from matrixlib.runs.data import RunError
from matrixlib.tasks import get_task, load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIG = Config(task="toy")
BF16 = toy_runtime(8, dtype="bf16")


class Faulty(torch.autograd.Function):
    """The identity, with a gradient that is not its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, fault: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fault = fault
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.fault(gradient), None


class FaultyNet(ToyNet):
    """Wrong in autocast alone, as a device is in one dtype."""

    forward_fault: Callable[[Tensor], Tensor] | None = None
    backward_fault: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if torch.is_autocast_enabled("cpu"):
            inner = self.inner(x)
            inner = inner if self.backward_fault is None else Faulty.apply(inner, self.backward_fault)
            hidden = torch.relu(self.norm(inner))
            plane = self.plane(hidden).squeeze(1)
            plane = plane if self.forward_fault is None else self.forward_fault(plane)
            return {"class": self.classes(hidden), "plane": plane}
        return super().forward(x)


@dataclass
class FaultyTask(ToyTask):
    faults: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def build_model(self) -> nn.Module:
        net = FaultyNet(self.width, self.dropout, self.norm)
        for name, fault in self.faults.items():
            setattr(net, name, fault)
        return net


def unsupported(value: Tensor) -> Tensor:
    raise TypeError("BFloat16 is not supported on MPS\nand more")


def test_an_update_that_is_right_has_no_problem_and_leaves_the_random_streams_alone() -> None:
    before = torch.get_rng_state()
    found = compare(ToyTask(dropout=0.5, norm="batch"), toy_batch(32), BF16, CONFIG)
    assert found == ("", 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("trunk", ["gru", "lstm"])
def test_recurrent_layers_are_tried_as_they_are_trained(trunk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN makes no gradients of a recurrent layer in evaluation mode, and CUDA no norm of mixed dtypes."""
    model = {"trunk": trunk, "dropout": 0.5}
    config = load_config("melee_demo", {"model": model, "data": {"workers": 0}})
    spec = get_task("melee")
    task, shards = spec.task(config), Catalogue(spec.folder(config)).shards("train")
    batch = next(iter(Loader(shards, spec.layout, 8, 0, task.prepare).batches(0, 1)))

    def of_one_dtype(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and not torch.is_autocast_enabled("cpu"):
            assert args[0].dtype == module.weight.dtype, "CUDA: expected scalar type BFloat16 but found Float"

    hook = nn.modules.module.register_module_forward_pre_hook(of_one_dtype)
    for kind in (nn.GRU, nn.LSTM):

        def forward(self: nn.RNNBase, *args: Any, plain: Any = kind.forward, **kwargs: Any) -> Any:
            assert self.training, "cudnn RNN backward can only be called in training mode"
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)
    try:
        assert compare(task, batch, BF16, config)[0] == ""
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"backward_fault": lambda gradient: 1000 * gradient}, "gradients are not the CPU's: .*item \\['inner'\\]"),
        ({"backward_fault": lambda gradient: gradient.flip(1)}, "gradients are not the CPU's: .*item \\['inner'\\]"),
        ({"backward_fault": lambda gradient: gradient * torch.nan}, "non-finite gradient|not finite"),
        ({"forward_fault": lambda value: value + 2}, "losses or gradients are not the CPU's: .*item \\['plane'\\]"),
        ({"forward_fault": unsupported}, "BFloat16 is not supported on MPS$"),
    ],
)
def test_each_fault_of_a_device_is_seen(fault: dict[str, Any], problem: str) -> None:
    task = FaultyTask(faults=fault)
    assert not compare(task, toy_batch(32), replace(BF16, dtype="fp32"), CONFIG)[0]
    found, _ = compare(task, toy_batch(32), BF16, CONFIG)
    assert re.search(problem, found), found


def test_a_fault_of_the_networks_own_is_raised() -> None:
    class Broken(ToyTask):
        def losses(self, *args: Any) -> Any:
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compare(Broken(), toy_batch(8), BF16, CONFIG)


# What stands in for a wrong dtype or device


@dataclass
class StubData:
    """What `checked_runtime` needs of a run's data."""

    runtime: Runtime
    config: Config
    task: ToyTask = field(default_factory=ToyTask)
    messages: list[str] = field(default_factory=list)

    def batch(self, number: int) -> dict[str, Tensor]:
        return toy_batch(4096)


def checked_runtime(monkeypatch: pytest.MonkeyPatch, wrong: str, **options: str) -> StubData:
    """On a made-up Mac where updates in these of fp32 and bf16 are wrong; with these options of the runtime."""
    mac = machine.DeviceFacts(platform="darwin", cores=8, mps=True, macos=(26, 0))
    monkeypatch.setattr(machine, "facts", lambda ranks=1: mac)
    monkeypatch.setattr(runtimes.speed, "bf16_gain", lambda device: (2.0, 2.0))
    monkeypatch.setattr(Runtime, "apply", lambda self: None)
    monkeypatch.setattr(autotune, "runtime_config", lambda config, runtime: config)

    def compared(task: object, batch: object, runtime: Runtime, config: object) -> tuple[str, int]:
        bad = runtime.dtype in wrong.split() and runtime.device == "mps"
        return "a gradient a thousand times too large" if bad else "", 64

    monkeypatch.setattr(self_test, "compare", compared)
    config = Config(task="toy", runtime=options, train={"batch_size": 4096, "micro_batch": 700})
    data: Any = StubData(runtimes.resolve(config.runtime, config.train, config.data), config)
    return autotune.checked_runtime(data, config)  # type: ignore[return-value]


def test_a_wrong_dtype_falls_back_to_fp32_and_a_wrong_device_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checked_runtime(monkeypatch, "")
    assert (right.runtime.device, right.runtime.dtype) == ("mps", "bf16")
    exact = checked_runtime(monkeypatch, "bf16")
    assert (exact.runtime.device, exact.runtime.dtype) == ("mps", "fp32")
    assert "bf16 was tried and is wrong here: a gradient a thousand times too large" in exact.runtime.table()
    assert any("dtype bf16 -> fp32" in message for message in exact.messages)
    assert checked_runtime(monkeypatch, "bf16", precision="fp32").runtime.dtype == "fp32"
    slow = checked_runtime(monkeypatch, "bf16 fp32")
    assert slow.runtime.device == "cpu"
    assert "mps was tried and is wrong here" in slow.runtime.table()


def test_what_the_user_named_is_refused_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"precision 'bf16' was asked for, but .* thousand times too large; use 'auto'"):
        checked_runtime(monkeypatch, "bf16", precision="bf16")
    for options in ({"device": "mps"}, {}):
        with pytest.raises(RunError, match="device 'mps' was asked for, but"):
            checked_runtime(monkeypatch, "bf16 fp32", **options)
        monkeypatch.setenv("MATRIXLIB_DEVICE", "mps")


def test_on_mps_no_pass_has_more_rows_of_a_linear_layer_than_its_gradients_bear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 squares of each position: 512 positions are 32,768 rows."""
    data = checked_runtime(monkeypatch, "")
    assert data.runtime.micro_batch == 512
    assert "177116" in data.runtime.table()


def test_on_cuda_a_run_starts_with_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with the size that is named; memory decides (`Step` halves it and the run keeps that)."""
    monkeypatch.setattr(self_test, "compare", lambda *_: ("", 1))
    monkeypatch.setattr(autotune, "runtime_config", lambda config, runtime: config)
    for named, rows in (("auto", 4096), (32, 256)):
        config = Config(task="toy", train={"batch_size": 4096, "micro_batch": named})
        data: Any = StubData(toy_runtime(256, device="cuda"), config)
        assert autotune.checked_runtime(data, config).runtime.micro_batch == rows


# The compiler


def test_gradients_that_a_recorded_graph_lends_are_taken_out_of_its_memory() -> None:
    for mode, own in (("reduce-overhead", True), ("default", False)):
        parameter = nn.Parameter(torch.zeros(3))
        lent = parameter.grad = torch.ones(3)
        compiler.keep_gradients(mode, [parameter, nn.Parameter(torch.zeros(2))])
        lent.fill_(7)
        assert (float(parameter.grad[0]) == 1) is own


def test_inductors_settings_arrive_where_it_trains_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: seen.append(options["options"]) or model)
    for network in (nn.Linear(2, 2), nn.Linear(2, 2).eval()):
        compiler.compiled(network, "default")
    assert seen == [{"cpp_wrapper": True}, None], "kernels are called from C++; inference takes torch's defaults"


PROGRAM = """
import json, sys, torch
from toy_task import ToyTask, toy_batch, toy_runtime
from torch._dynamo.utils import counters
from matrixlib.config import Config
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.engine.step import Step
torch.manual_seed(0)
plain = Step(ToyTask(), ToyTask().build_model(), toy_runtime(32), Config(task="toy"), 100)
torch.manual_seed(0)
step = Step(ToyTask(), ToyTask().build_model(), toy_runtime(32, compile=sys.argv[1]), Config(task="toy"), 100)
losses = [(step(toy_batch(32, i)).loss, plain(toy_batch(32, i)).loss) for i in range(3)]
assert all(abs(a - b) < 1e-4 for a, b in losses), losses
assert hasattr(step.model, "_orig_mod"), "went on without the compiler"
print(json.dumps({"broken": dict(counters["graph_break"]), **counters["inductor"]}))
"""


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compiled_updates_are_the_same_and_the_next_process_finds_the_code(tmp_path: Path, mode: str) -> None:
    """The real compiler, twice: the second process compiles nothing."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler on this machine")
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"MATRIXLIB_CACHE": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        counts.append(json.loads(done.stdout.splitlines()[-1]))
    assert counts[0]["fxgraph_cache_miss"] > 0
    assert counts[1].get("fxgraph_cache_miss", 0) == 0 < counts[1]["fxgraph_cache_hit"]
    assert not counts[0]["broken"]
    assert any((tmp_path / "compiled").iterdir())
