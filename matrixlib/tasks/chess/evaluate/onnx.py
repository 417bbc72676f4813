"""Trained networks as ONNX files for other programs: written, proved to say the same, with 8-bit weights on demand.

Needs `onnx`, `onnxscript` and `onnxruntime`, which nothing else here needs: the extra `onnx` of pyproject.toml.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from matrixlib.tasks.chess.evaluate import held_out as evaluation
from matrixlib.tasks.chess.evaluate import throughput as inference
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.onnx_form import INPUTS, ForExport
from matrixlib.tasks.chess.planes import planes
from matrixlib.tasks.latin import export as latin
from matrixlib.tasks.latin.vocabulary import SIDE

if TYPE_CHECKING:
    from matrixlib.data.loader import Loader
    from matrixlib.tasks.latin.model import LatinNet

Module = TypeVar("Module", bound=nn.Module)
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # of an output, or of its size where it is above 1
COMPARED = 2048  # positions on which files are compared with their network, beyond the proof
ROWS = (1, 3, 32)  # of the batches that are compared


@dataclass(frozen=True)
class Exported:
    """A file and the largest difference between what it says and what the network says."""

    path: Path
    outputs: tuple[str, ...]
    difference: float
    positions: int

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.path.stat().st_size / 1e6:.1f} MB, outputs {', '.join(self.outputs)}; "
            f"differs from torch by {self.difference:.1e} at most, on {self.positions} positions"
        )


# Chess


def export(net: Net, path: Path | str) -> Exported:
    """Write a chess network as ONNX: `planes` (B, 19, 8, 8) to the outputs of `tasks.chess.export.ForExport`.

    The file's metadata say what planes and moves mean. Held-out positions of the sample set are put to both, in
    batches of 1, 3 and 32: ValueError, and no file, where they differ by more than 1e-4; ValueError without the
    packages.
    """
    module = ForExport(net.task, _plain(net.model)).eval()
    inputs = real_planes(net, sum(ROWS))
    given = [(inputs[a:b],) for a, b in itertools.pairwise(np.cumsum((0, *ROWS)))]
    with _draft(path) as draft:
        write(module, (inputs[:2],), INPUTS, draft, module.metadata())
        worst = _accepted([found.max() for found in differences(module, draft, INPUTS, given)])
    return Exported(Path(path), module.outputs, worst, len(inputs))


def report(net: Net, path: str, int8: str, held_out: Loader, sample: int = 0) -> str:
    """Write a chess network to `path`, and with 8-bit weights to `int8` unless that is empty; what became of it.

    Figures on `sample` held-out positions (0: all) of the network and of each file, how often a file's best move is the
    network's and how its value goes with the network's, and positions a second. Errors as of `export`.
    """
    lines = [str(export(net, path))]
    nets = {f"torch {net.runtime.dtype}": net, "ONNX fp32": opened(net, path)}
    if int8:
        quantise(path, int8)
        nets["ONNX int8"] = opened(net, int8)
        lines.append(f"{int8}: {Path(int8).stat().st_size / 1e6:.1f} MB")
    names = {"top1": "top-1", "policy_kl": "KL", "wdl_accuracy": "WDL", "value_correlation": "value corr."}
    lines += [
        "",
        f"{'':12}" + "".join(f"{title:>13}" for title in (*names.values(), "same move", "same value")),
    ]
    batch = inference.positions(net, COMPARED)
    own = net.predict(batch)
    for name, asked in nets.items():
        figures = evaluation.held_out(asked, held_out, sample)
        said = asked.predict(batch)
        numbers = [figures.get(key, float("nan")) for key in names]
        numbers.append(float(np.mean(said["policy"].argmax(1) == own["policy"].argmax(1))))
        numbers.append(float(np.corrcoef(said["value"], own["value"])[0, 1]))
        lines.append(f"{name:12}" + "".join(f"{number:>13.4f}" for number in numbers))
    return "\n".join(lines) + "\n\n" + inference.table(inference.measure(nets, (1, 32, 256), 0.5))


def real_planes(net: Net, count: int) -> np.ndarray:
    """Planes (count, 19, 8, 8) float32 of held-out positions of the sample set, as the network takes them."""
    batch = {name: torch.from_numpy(array) for name, array in inference.positions(net, count).items()}
    return planes(batch, net.task.config.model.encoding).numpy()


def opened(net: Net, path: Path | str) -> Net:
    """A network like `net` that asks an ONNX file of its own instead: for figures, searches and players.

    It has no self-supervised heads.
    """
    runtime = replace(net.runtime, device="cpu", dtype="fp32", channels_last=False)
    return Net(_Opened(path, runtime.threads), net.task, runtime)


class _Opened(nn.Module):
    """A chess ONNX file in the place of `PolicyValueNet`."""

    def __init__(self, path: Path | str, threads: int) -> None:
        super().__init__()
        self.session = session(path, threads)

    def forward(self, planes: Tensor, heads: frozenset[str]) -> dict[str, Tensor]:
        names = [output.name for output in self.session.get_outputs()][:2]
        policy, value = self.session.run(names, {"planes": planes.numpy()})
        said = torch.from_numpy(value)
        return {
            "policy": torch.from_numpy(policy),
            "value": said.clamp(min=1e-30).log() if names[1] == "wdl" else said,
        }


def _plain(model: Module) -> Module:
    """A copy on the CPU, in the usual layout and in fp32."""
    moved = copy.deepcopy(model).cpu().float()
    for tensor in (*moved.parameters(), *moved.buffers()):
        tensor.data = tensor.data.contiguous()
    return moved


# Latin squares


def export_latin(model: LatinNet, path: Path | str) -> Exported:
    """Write a network for Latin squares as ONNX; errors as of `export`.

    Compared inside the grids, over all sizes and modes and batches of 1 and 3.
    """
    module = latin.ForExport(_plain(model)).eval()
    cases = [(size, latin.puzzles(rows, size, seed=0)) for size in range(3, SIDE + 1) for rows in (1, 3)]
    with _draft(path) as draft:
        write(module, latin.puzzles(2, SIDE, seed=0), latin.INPUTS, draft, {"task": "latin"})
        found = differences(module, draft, latin.INPUTS, [given for _, given in cases])
        inside = [part[:, :, :size, :size].max() for (size, _), part in zip(cases, found, strict=True)]
        worst = _accepted(inside)
    return Exported(Path(path), module.outputs, worst, sum(len(given[0]) for _, given in cases))


# Any task


def write(
    module: nn.Module, example: Sequence[np.ndarray], inputs: Sequence[str], path: Path, notes: dict[str, str]
) -> None:
    """Write a module as one ONNX file with a free batch size; weights inside it, not in a file beside it.

    module: names what it gives in `outputs`. example: two rows or more of each input. notes: go into the metadata.
    """
    onnx = _need("onnx")
    _need("onnxscript")
    batch = torch.export.Dim("batch", min=1)
    with sdpa_kernel(SDPBackend.MATH), _quiet():  # the fused kernel's strides do not survive the exporter
        torch.onnx.export(
            module,
            tuple(torch.from_numpy(array) for array in example),
            str(path),
            input_names=list(inputs),
            output_names=list(module.outputs),  # type: ignore[arg-type]
            dynamic_shapes=[{0: batch}] * len(inputs),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    model = onnx.load(path)
    del model.graph.value_info[:]  # some shapes in it are wrong, which onnx's own inference refuses
    onnx.helper.set_model_props(model, notes)
    onnx.save(model, path)


def differences(
    module: nn.Module, path: Path, inputs: Sequence[str], given: Iterable[Sequence[np.ndarray]]
) -> Iterator[np.ndarray]:
    """How far the file is from the module, for every output of every batch: of its size where that is above 1."""
    asked = session(path)
    for arrays in given:
        with torch.inference_mode():
            said = module(*(torch.from_numpy(array) for array in arrays))
        ours = (said,) if isinstance(said, Tensor) else said
        theirs = asked.run(None, dict(zip(inputs, arrays, strict=True)))
        for one, other in zip(ours, theirs, strict=True):
            yield np.abs(one.numpy() - other) / np.maximum(np.abs(one.numpy()), 1)


def quantise(path: Path | str, out: Path | str) -> None:
    """Write an ONNX file again with 8-bit weights; activations become 8-bit as they come (dynamic quantisation).

    A quarter of the size. Unsigned weights, as onnxruntime convolves with signed ones four times more slowly.
    Measure what it loses before you use it, and whether it is faster at all. ValueError without the packages.
    """
    onnx = _need("onnx")
    quantization = _need("onnxruntime.quantization")
    with _draft(out) as draft, _quiet():
        quantization.quantize_dynamic(onnx.load(path), draft, weight_type=quantization.QuantType.QUInt8)


def session(path: Path | str, threads: int = 0) -> Any:
    """An onnxruntime session on the CPU; threads: 0 for all cores."""
    runtime = _need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def _draft(path: Path | str) -> Iterator[Path]:
    """A file to write and to look at, which gets its name only if nothing was wrong with it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"no folder '{path.parent}' to write {path.name} to")
    draft = path.with_name(path.name + ".tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _accepted(found: Sequence[float]) -> float:
    """The largest of these differences; ValueError where it is too large, or where one is not a number."""
    worst = float(np.max(found))
    if not worst <= TOLERANCE:
        raise ValueError(
            f"the ONNX file would differ from the network by {worst:.1e}, more than {TOLERANCE:.0e}; it is not "
            "written. Please report it with the run's config.yaml"
        )
    return worst


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say about other packages and themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise ValueError(
            f"'{package}' is not installed; `make install` brings it, or the extra: pip install '.[onnx]'"
        ) from None
