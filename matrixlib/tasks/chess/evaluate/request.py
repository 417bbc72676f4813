"""What an evaluation is asked for, checked before it begins: what ends a match after an hour is said at its start."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from matrixlib.config import Count, CountOrZero, Section, validated


def _readable(path: str) -> str:
    if path and not os.path.isfile(path):
        raise ValueError(f"there is no file '{path}'")
    return path


def _writable(path: str) -> str:
    new = bool(path) and not os.path.exists(path)
    try:
        if path:
            open(path, "ab").close()
    except OSError as error:
        raise ValueError(f"'{path}' cannot be written: {error.strerror}") from error
    if new:
        os.remove(path)
    return path


Input = Annotated[str, AfterValidator(_readable)]
Output = Annotated[str, AfterValidator(_writable)]


class EvalRequest(Section):
    """Parameters of eval.ipynb; empty paths are not asked for, 0 means all or none."""

    simulations: tuple[Count, ...] = ()
    sample: CountOrZero = 0
    puzzle_limit: CountOrZero = 0
    games: CountOrZero = 0
    engine_elo: tuple[Count, ...] = ()
    engine_nodes: Count = 1
    game: Input = ""
    puzzles: Input = ""
    suites: tuple[Input, ...] = ()
    pgn: Output = ""
    onnx: Output = ""
    int8: Output = ""


def check_request(parameters: Mapping[str, Any]) -> EvalRequest:
    """The request of a notebook's parameters, others left out. ValueError names what cannot be done."""
    names = EvalRequest.model_fields
    request = validated(EvalRequest, {name: value for name, value in parameters.items() if name in names}, "eval")
    given = [path for path in (request.pgn, request.onnx, request.int8) if path]
    if len(set(given)) < len(given):
        raise ValueError("two of pgn, onnx and int8 name one file: give each a path of its own")
    if request.int8 and not request.onnx:
        raise ValueError("int8 is made of the file that `onnx` names: give -p onnx model.onnx, too")
    if request.pgn and not request.games:
        raise ValueError("pgn: there are no games to write: give -p games 20, too")
    return request
