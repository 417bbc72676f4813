"""Networks as ONNX files for other programs; needs the extra `onnx` of pyproject.toml."""

import copy
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # of an output, or of its size where it is above 1

Inputs = Sequence[np.ndarray]  # an array for each input of a network, with the same leading dimension


class OnnxModule(nn.Module):
    """A network as other programs call it: a tensor for each of `inputs` in, one for each of `outputs` out."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def metadata(self) -> dict[str, str]:
        """What a consumer must know, for the metadata of the file."""
        raise NotImplementedError

    def meaningful(self, output: np.ndarray, inputs: Inputs) -> np.ndarray:
        """The part of an output that must be the same in the file."""
        return output


@dataclass(frozen=True)
class OnnxFile:
    """A file and the largest difference between its outputs and the network's, over so many examples."""

    path: Path
    outputs: tuple[str, ...]
    difference: float
    examples: int

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.path.stat().st_size / 1e6:.1f} MB, outputs {', '.join(self.outputs)}; "
            f"differs from torch by {self.difference:.1e} at most, on {self.examples} examples"
        )


def installed() -> bool:
    """Whether all packages of the extra are there."""
    return all(map(importlib.util.find_spec, PACKAGES))


def export(module: OnnxModule, path: Path | str, batches: Sequence[Inputs]) -> OnnxFile:
    """Write a network as one ONNX file with a free batch size. batches: given to both, one of two rows or more.
    ValueError, and no file, where an output differs by more than `TOLERANCE`; ValueError without the packages."""
    onnx = _need("onnx")
    _need("onnxscript")
    module = copy.deepcopy(module).cpu().float().eval()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.contiguous()
    example = max(batches, key=lambda inputs: len(inputs[0]))
    with _draft(path) as draft:
        with sdpa_kernel(SDPBackend.MATH), _quiet():  # the fused kernel's strides do not survive the exporter
            torch.onnx.export(
                module,
                tuple(torch.from_numpy(array) for array in example),
                str(draft),
                input_names=list(module.inputs),
                output_names=list(module.outputs),
                dynamic_shapes=[{0: torch.export.Dim("batch", min=1)}] * len(module.inputs),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        model = onnx.load(draft)
        del model.graph.value_info[:]  # some shapes in it are wrong, which onnx's own inference refuses
        onnx.helper.set_model_props(model, module.metadata())
        onnx.save(model, draft)
        worst, file = 0.0, session(draft)
        for inputs in batches:
            with torch.inference_mode():
                outputs = module(*(torch.from_numpy(array) for array in inputs))
            ours = (outputs,) if isinstance(outputs, Tensor) else outputs
            theirs = file.run(None, dict(zip(module.inputs, inputs, strict=True)))
            for one, other in zip(ours, theirs, strict=True):
                apart = np.abs(one.numpy() - other) / np.maximum(np.abs(one.numpy()), 1)
                worst = float(np.maximum(worst, module.meaningful(apart, inputs).max()))  # or not a number
        if not worst <= TOLERANCE:
            raise ValueError(
                f"the ONNX file would differ from the network by {worst:.1e}, more than {TOLERANCE:.0e}; it is not "
                "written. Please report it with the run's config.yaml"
            )
    return OnnxFile(Path(path), module.outputs, worst, sum(len(inputs[0]) for inputs in batches))


def quantise(path: Path | str, out: Path | str) -> None:
    """Write an ONNX file again with 8-bit weights, unsigned: onnxruntime convolves with signed ones four times more
    slowly. Measure what it loses, and whether it is faster at all."""
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
    """A file that gets its name only if nothing was wrong with it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"no folder '{path.parent}' to write {path.name} to")
    draft = path.with_name(path.name + ".tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say about other packages and themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        text = f"'{name.partition('.')[0]}' is not installed; `make install` brings it, or the extra"
        raise ValueError(f"{text}: pip install '.[onnx]'") from None
