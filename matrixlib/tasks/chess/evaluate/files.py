"""Networks in files: Lc0's weights, checkpoints of Matrix0, and ONNX files that `evaluate.onnx.export` wrote."""

import warnings
from pathlib import Path

import torch
from pydantic import ValidationError

from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.runtime import Runtime
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.lc0.network import open_weights
from matrixlib.tasks.chess.matrix0 import config_of, fitting, read_checkpoint
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.task import ChessTask
from matrixlib.tasks.spec import runtime_for_use


def open_file(path: Path, device: str | Runtime = "auto", compile: bool | str = "auto") -> Net | None:
    """The network in a file, by the end of its name; None for other names. ValueError names a file that is damaged."""
    name = path.name.lower()
    if name.endswith((".pb.gz", ".pb")):
        return open_lc0(path, device, compile)
    if name.endswith((".pt", ".pth")):
        return open_matrix0(path, device, compile)
    if name.endswith(".onnx"):
        from matrixlib.tasks.chess.evaluate import onnx

        return onnx.open_network(path, "cpu" if isinstance(device, str) else device)
    return None


def open_lc0(path: Path, device: str | Runtime = "auto", compile: bool | str = "auto") -> Net:
    """A network of Lc0, in fp32: its half-move clock is a plane of up to 100, and the rounding of bf16 shows."""
    task, model = open_weights(path)
    runtime = runtime_for_use(task.config, device, "fp32")
    return Net(model, task, runtime, runtimes.serving(runtime.device, compile))


def open_matrix0(path: Path, device: str | Runtime = "auto", compile: bool | str = "auto") -> Net:
    """A network of Matrix0; what its file does not say of it is warned of. ValueError names a file that cannot be."""
    data = read_checkpoint(path)
    try:
        model_config, message = config_of(data)
        task = ChessTask(ChessConfig(task="chess", model=model_config))
        with torch.device("meta"):  # before a network of the sizes that a file claims takes memory
            empty = PolicyValueNet(model_config)
        weights = fitting(data, empty.state_dict())
        empty.load_state_dict(weights, assign=True)
        model = task.build_model()
        model.load_state_dict(weights)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{path.name} describes no network that can be built: {'; '.join(problems)}") from None
    except (
        ValueError,
        IndexError,
        TypeError,
        RuntimeError,
    ) as error:  # a stranger's options and shapes may be anything
        reason = " ".join(str(error).split())
        raise ValueError(f"{path.name} is no network of Matrix0 that can be read: {reason}") from None
    if message:
        warnings.warn(f"{path.name}: {message}", stacklevel=2)
    runtime = runtime_for_use(task.config, device)
    return Net(model, task, runtime, runtimes.serving(runtime.device, compile))
