"""ONNX export; needs the extra `onnx`."""

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
TOLERANCE = 1e-4  # absolute, relative above 1

Inputs = Sequence[np.ndarray]  # an array for each input of a network, with the same leading dimension


class OnnxModule(nn.Module):
    """A network with one tensor for each of `inputs` in, and for each of `outputs` out."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def metadata(self) -> dict[str, str]:
        """What consumers must know, for the file's metadata."""
        raise NotImplementedError

    def meaningful(self, output: np.ndarray, inputs: Inputs) -> np.ndarray:
        """The part of an output that must match in the file."""
        return output


@dataclass(frozen=True)
class OnnxFile:
    """An exported file, and the largest difference of its outputs from the network's over `examples` examples."""

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
    return all(map(importlib.util.find_spec, PACKAGES))


def export(module: OnnxModule, path: Path | str, batches: Sequence[Inputs]) -> OnnxFile:
    """Write a network as one ONNX file with a dynamic batch size. batches: test inputs, one with at least two rows.
    ValueError, and no file, if an output differs by more than `TOLERANCE`, or without the packages."""
    onnx = _need("onnx")
    _need("onnxscript")
    module = copy.deepcopy(module).cpu().float().eval()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.contiguous()
    example = max(batches, key=lambda inputs: len(inputs[0]))
    with _draft(path) as draft:
        with sdpa_kernel(SDPBackend.MATH), _quiet():  # fused kernels' strides break the export
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
        del model.graph.value_info[:]  # some shapes are wrong, which onnx's shape inference rejects
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
                worst = float(np.maximum(worst, module.meaningful(apart, inputs).max()))  # NaN stays
        if not worst <= TOLERANCE:
            raise ValueError(
                f"the ONNX file would differ from the network by {worst:.1e}, more than {TOLERANCE:.0e}; it is not "
                "written. Please report it with the run's config.yaml"
            )
    return OnnxFile(Path(path), module.outputs, worst, sum(len(inputs[0]) for inputs in batches))


def quantise(path: Path | str, out: Path | str) -> None:
    """Rewrite an ONNX file with unsigned 8-bit weights: onnxruntime's convolutions with signed ones are four times
    slower. Measure the loss in accuracy, and whether it is faster at all."""
    onnx = _need("onnx")
    quantization = _need("onnxruntime.quantization")
    with _draft(out) as draft, _quiet():
        quantization.quantize_dynamic(onnx.load(path), draft, weight_type=quantization.QuantType.QUInt8)


def session(path: Path | str, threads: int = 0) -> Any:
    """An onnxruntime CPU session; threads: 0 = all cores."""
    runtime = _need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def _draft(path: Path | str) -> Iterator[Path]:
    """A temporary file that is renamed on success."""
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
