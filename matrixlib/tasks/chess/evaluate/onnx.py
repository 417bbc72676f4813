"""Chess networks in other formats: ONNX export and import (extra `onnx`), import of Lc0 and Matrix0 files."""

import itertools
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import chess
import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from matrixlib.config import validated
from matrixlib.engine import onnx
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.runtime import Runtime
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.evaluate import throughput
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.lc0 import moves as lc0
from matrixlib.tasks.chess.lc0.network import Lc0Task, open_weights
from matrixlib.tasks.chess.matrix0 import convert_weights, infer_config, read_checkpoint
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.planes import move_map
from matrixlib.tasks.chess.task import HISTORY_PLIES, ChessTask
from matrixlib.tasks.spec import runtime_for_use

ROWS = (1, 3, 32)  # batch sizes that `export` verifies
PIECES = "PNBRQK"
PLANE_NAMES = {
    "oriented": (
        *(f"our {piece}" for piece in PIECES),
        *(f"their {piece}" for piece in PIECES),
        "earlier occurrences of the position / 2",
        *("we may castle, king's side", "we may castle, queen's side"),
        *("they may castle, king's side", "they may castle, queen's side"),
        "en-passant square, where the capture is legal",
        "half-move clock / 100",
    ),
    "matrix0": (
        *(f"White {piece}" for piece in PIECES),
        *(f"Black {piece}" for piece in PIECES),
        "White to move",
        *("White may castle, king's side", "White may castle, queen's side"),
        *("Black may castle, king's side", "Black may castle, queen's side"),
        "half-move clock / 99, at most 1",
        "full move / 199, at most 1",
    ),
    "lc0": (
        *(
            f"{name}, {age} plies ago"
            for age in range(1 + HISTORY_PLIES)
            for name in (*(f"our {piece}" for piece in PIECES), *(f"their {piece}" for piece in PIECES), "repeated")
        ),
        *("we may castle, queen's side", "we may castle, king's side"),
        *("they may castle, queen's side", "they may castle, king's side"),
        *("Black is to move", "half-move clock / 100", "zeros", "ones"),
    ),
}
BOARDS = {
    "oriented": "the board of the side to move: row 0 is its rank 1, column 0 the a-file; for Black the ranks are "
    "turned and the colours swapped",
    "lc0": "as `oriented`, all of them from the side to move now",
    "matrix0": "White's board: row 0 is rank 8, column 0 the a-file",
}


class ChessOnnx(onnx.OnnxModule):
    """A network from planes (B, C, 8, 8) float32 to `policy` (B, M) logits of all moves, `wdl` (B, 3) probabilities or
    `value` (B,) in [-1, 1], and `ssl_<head>` (B, c, 8, 8) probabilities. C, M: 19, 4672; of Lc0 networks 112 or without
    history 21, 1858."""

    inputs = ("planes",)

    def __init__(self, task: ChessTask, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model
        self.scalar = task.config.model.value.kind == "scalar"
        self.heads = tuple(f"ssl_{name}" for name in task.config.model.ssl)
        self.outputs = ("policy", "value" if self.scalar else "wdl", *self.heads)

    def forward(self, planes: Tensor) -> tuple[Tensor, ...]:
        out = self.model(planes, frozenset({"policy", "value", *self.heads}))
        value = out["value"] if self.scalar else out["value"].softmax(1)
        maps = (self.task.ssl_probabilities(name, logits) for name, logits in out.get("ssl", {}).items())
        return out["policy"], value, *maps

    def metadata(self) -> dict[str, str]:
        """Metadata for users of the file as text; `planes` and `moves` are JSON lists."""
        encoding = self.task.config.model.encoding
        return {
            "task": "chess",
            "encoding": encoding,
            "board": BOARDS[encoding],
            "planes": json.dumps(plane_names(self.task)),
            "model": self.task.config.model.model_dump_json(),
            "policy": "logits by move, see moves; leave out illegal moves, then softmax",
            "moves": json.dumps(moves(encoding)),
            "value": "expected result of the side to move, -1 to 1"
            if self.scalar
            else "wdl: probabilities of win, draw and loss for the side to move",
            "maps": "ssl_<head>: probabilities by class and square, on the board of the planes",
        }


class _OnnxModel(nn.Module):
    """An exported ONNX file behind the interface of `PolicyValueNet`, without self-supervised heads."""

    def __init__(self, path: Path | str, threads: int) -> None:
        super().__init__()
        self.path, self.session = path, onnx.session(path, threads)

    def with_threads(self, threads: int) -> "_OnnxModel":
        """The same file with so many threads."""
        return _OnnxModel(self.path, threads)

    def forward(self, planes: Tensor, heads: frozenset[str]) -> dict[str, Tensor]:
        names = [output.name for output in self.session.get_outputs()][:2]
        policy, value = map(torch.from_numpy, self.session.run(names, {"planes": planes.numpy()}))
        return {"policy": policy, "value": value.clamp(min=1e-30).log() if names[1] == "wdl" else value}


def plane_names(task: ChessTask) -> tuple[str, ...]:
    """Names of the network's input planes."""
    names = PLANE_NAMES[task.config.model.encoding]
    newest_alone = task.config.model.encoding == "lc0" and not task.history
    return (*names[:13], *names[-8:]) if newest_alone else names


def moves(encoding: str) -> list[str]:
    """UCI move of each policy index on the board of the side to move (`oriented`, `lc0`) or White's (`matrix0`), "" for
    none. A pawn move to the last rank without a letter promotes to a queen, of Lc0 to a knight."""
    if encoding == "lc0":
        return [lc0.move_name(number) for number in range(lc0.POLICY_SIZE)]
    square, names = chess.SQUARE_NAMES, [""] * bitboard.POLICY_SIZE
    black = move_map(encoding)[1].tolist()
    for index, code in enumerate(bitboard.POLICY_MOVE.tolist()):
        if code == bitboard.NO_MOVE:
            continue
        start, to, letter = code & 63, code >> 6 & 63, ("", "n", "b", "r")[code >> 12]
        names[index] = square[start] + square[to] + letter
        if encoding == "matrix0":
            names[black[index]] = square[start ^ 56] + square[to ^ 56] + letter
    return names


def export(net: Net, path: Path | str) -> onnx.OnnxFile:
    """Export a chess network as ONNX, see `ChessOnnx`, with planes and moves described in the metadata.

    Verified on held-out positions. ValueError for ONNX files; others as in `engine.onnx.export`.
    """
    if isinstance(net.model, _OnnxModel):
        raise ValueError("the network of an ONNX file is not written as ONNX: copy its file")
    batch = {name: torch.from_numpy(array) for name, array in throughput.positions(net, sum(ROWS)).items()}
    inputs = net.task.planes(batch).numpy()
    batches = [(inputs[a:b],) for a, b in itertools.pairwise(np.cumsum((0, *ROWS)))]
    return onnx.export(ChessOnnx(net.task, net.model), path, batches)


def load(net: Net, path: Path | str) -> Net:
    """The network `net` computed by its ONNX file, on the CPU, without self-supervised heads."""
    runtime = replace(net.runtime, device="cpu", dtype="fp32", channels_last=False)
    return Net(_OnnxModel(path, runtime.threads), net.task, runtime)


def _open_onnx(path: Path, device: str | Runtime) -> Net:
    """Open a file written by `export`, on the CPU, without self-supervised heads; ValueError for other files."""
    runtime = runtime_for_use(ChessConfig(task="chess"), device, "fp32")
    try:
        model = _OnnxModel(path, runtime.threads)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ValueError(f"{path.name} cannot be read as ONNX: {error}") from error
    facts = model.session.get_modelmeta().custom_metadata_map
    if not {"task", "encoding"} <= facts.keys():
        raise ValueError(f"{path.name} was not written by `export` of a chess network: give its run instead")
    value = "wdl" if "wdl" in [output.name for output in model.session.get_outputs()] else "scalar"
    try:
        options = json.loads(facts.get("model", "{}")) | {"encoding": facts["encoding"], "ssl": [], "moves_left": {}}
        options["value"] = options.get("value", {}) | {"kind": value}
        config = validated(ChessConfig, {"task": facts["task"], "model": options}, "options", context={"file": path})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: export its run by this version, which refuses its metadata: {error}") from None
    task = Lc0Task(config) if facts["encoding"] == "lc0" else ChessTask(config)
    return Net(model, task, replace(runtime, channels_last=False))


def open_file(path: Path, device: str | Runtime = "auto", compile: bool | str = "auto") -> Net | None:
    """Open a network file by its extension; None for an unknown one. ValueError names a damaged file.

    Lc0 networks run in fp32: bf16 would round their half-move plane, which goes up to 100.
    """
    name = path.name.lower()
    if name.endswith(".onnx"):
        return _open_onnx(path, "cpu" if isinstance(device, str) else device)
    of_lc0 = name.endswith((".pb.gz", ".pb"))
    if not of_lc0 and not name.endswith((".pt", ".pth")):
        return None
    data = {} if of_lc0 else read_checkpoint(path)
    try:
        task, model = open_weights(path) if of_lc0 else _matrix0(data, path.name)
    except (OSError, ValueError, IndexError, TypeError, RuntimeError) as error:  # untrusted options and shapes
        reason = " ".join(str(error).split())
        if isinstance(error, ValidationError):
            reason = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        kind = "an Lc0" if of_lc0 else "a Matrix0"
        raise ValueError(f"{path.name} cannot be read as {kind} network: {reason}") from None
    runtime = runtime_for_use(task.config, device, "fp32" if of_lc0 else "auto")
    return Net(model, task, runtime, runtimes.serving(runtime.device, compile))


def _matrix0(data: Mapping[str, Any], name: str) -> tuple[ChessTask, nn.Module]:
    """Task and network of a Matrix0 checkpoint's dict, with a warning about assumed options."""
    model_config, message = infer_config(data)
    task = ChessTask(ChessConfig(task="chess", model=model_config))
    with torch.device("meta"):
        empty = PolicyValueNet(model_config)
    model = task.network_with(convert_weights(data, empty.state_dict()))
    if message:
        warnings.warn(f"{name}: {message}", stacklevel=3)
    return task, model


def backends(net: Net, folder: Path, compiled: bool = True) -> dict[str, Net]:
    """The network on every backend, by a name that ends with the dtype; on the CPU also as ONNX files in `folder`."""
    nets = {}
    for name, serving in {"torch": None, "compiled": runtimes.serving(net.runtime.device, compiled)}.items():
        for dtype in ("fp32", "bf16") if serving is None or compiled else ():
            nets[f"{name} {dtype}"] = Net(net.model, net.task, replace(net.runtime, dtype=dtype), serving)
    if net.runtime.device == "cpu" and onnx.installed():
        export(net, folder / "model.onnx")
        onnx.quantise(folder / "model.onnx", folder / "model.int8.onnx")
        nets["ONNX fp32"] = load(net, folder / "model.onnx")
        nets["ONNX int8"] = load(net, folder / "model.int8.onnx")
    return nets
