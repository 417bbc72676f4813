"""Networks in files: Lc0's weights, checkpoints of Matrix0, and ONNX files that `evaluate.onnx.export` wrote."""

import warnings
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

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
    """The network in a file, by the end of its name; None for other names. ValueError names a file that is damaged.

    Those of Lc0 are in fp32: their half-move clock is a plane of up to 100, and the rounding of bf16 shows.
    """
    name, precision = path.name.lower(), "auto"
    if name.endswith(".onnx"):
        from matrixlib.tasks.chess.evaluate import onnx

        return onnx.open_network(path, "cpu" if isinstance(device, str) else device)
    task: ChessTask
    model: nn.Module
    if name.endswith((".pb.gz", ".pb")):
        (task, model), precision = open_weights(path), "fp32"
    elif name.endswith((".pt", ".pth")):
        task, model = _open_matrix0(path)
    else:
        return None
    runtime = runtime_for_use(task.config, device, precision)
    return Net(model, task, runtime, runtimes.serving(runtime.device, compile))


def _open_matrix0(path: Path) -> tuple[ChessTask, PolicyValueNet]:
    """What a file of Matrix0 does not say of its network is warned of. ValueError names a file that cannot be."""
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
    except (ValueError, IndexError, TypeError, RuntimeError) as error:  # a stranger's options and shapes are anything
        reason = " ".join(str(error).split())
        if isinstance(error, ValidationError):
            reason = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{path.name} is no network of Matrix0 that can be read: {reason}") from None
    if message:
        warnings.warn(f"{path.name}: {message}", stacklevel=3)
    return task, model
