"""Validation of eval.ipynb's parameters before the evaluation starts."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

MINIMUM = {"simulations": 1, "engine_elo": 1, "engine_nodes": 1, "sample": 0, "puzzle_limit": 0, "games": 0}


def check_request(parameters: Mapping[str, Any]) -> None:
    """Check the parameters of eval.ipynb; ValueError names the invalid one. Empty paths are skipped."""
    for name, least in MINIMUM.items():
        if (worst := np.min(parameters.get(name, least), initial=least)) < least:
            raise ValueError(f"'{name}' must be {least} or more, not {worst}")
    for name in ("game", "puzzles", "suites"):
        for path in np.atleast_1d(parameters.get(name, "")):
            if path and not os.path.isfile(path):
                raise ValueError(f"'{name}': there is no file '{path}'")
    outputs = {name: path for name in ("pgn", "onnx", "int8") if (path := parameters.get(name))}
    for name, path in outputs.items():
        place = path if os.path.exists(path) else os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.access(place, os.W_OK):
            raise ValueError(f"'{name}': '{path}' cannot be written: give a file in an existing, writable folder")
    if len(set(outputs.values())) < len(outputs):
        raise ValueError("pgn, onnx and int8 must be different files")
    if "int8" in outputs and "onnx" not in outputs:
        raise ValueError("int8 needs the ONNX file: also give -p onnx model.onnx")
    if "pgn" in outputs and not parameters.get("games"):
        raise ValueError("pgn needs games: also give -p games 20")
