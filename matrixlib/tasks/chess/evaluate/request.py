"""What an evaluation is asked for, looked at before it begins: what ends a match after an hour is said at its start."""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def check_numbers(name: str, values: Sequence[object], example: str) -> None:
    """ValueError unless all are whole numbers of at least 1."""
    wrong = [value for value in values if not isinstance(value, int) or isinstance(value, bool) or value < 1]
    if wrong:
        raise ValueError(f"{name}: {wrong[0]!r} is no whole number of at least 1; give a list such as {example}")


def check_counts(counts: Mapping[str, int]) -> None:
    """ValueError for a count below 0; 0 means all or none."""
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} is {count}; give a whole number from 0")


def check_outputs(paths: Mapping[str, str]) -> None:
    """ValueError for a path that no file can be written to, or that is given twice; empty ones are not asked for."""
    given = {name: path for name, path in paths.items() if path}
    for name, path in given.items():
        if os.path.isdir(path):
            raise ValueError(f"{name}: '{path}' is a folder; give the path of a file in it")
        if not os.path.isdir(Path(path).parent):
            raise ValueError(f"{name}: no folder '{Path(path).parent}' to write {Path(path).name} to; make it first")
        try:
            with tempfile.TemporaryFile(dir=Path(path).parent):
                pass
        except OSError as error:
            raise ValueError(f"{name}: no file can be written in '{Path(path).parent}': {error.strerror}") from error
    if same := [name for name, path in given.items() if list(given.values()).count(path) > 1]:
        raise ValueError(f"{' and '.join(same)} name one file: give each a path of its own")


def check_inputs(paths: Mapping[str, str | Iterable[str]]) -> None:
    """ValueError for a file that is not there; empty ones are not asked for."""
    for name, given in paths.items():
        for path in ([given] if given else []) if isinstance(given, str) else given:
            if not isinstance(path, str) or not os.path.isfile(path):
                raise ValueError(f"{name}: there is no file '{path}'")


def check_request(
    simulations: Sequence[int],
    counts: Mapping[str, int],
    engine_elo: Sequence[int] = (),
    inputs: Mapping[str, str | Iterable[str]] | None = None,
    outputs: Mapping[str, str] | None = None,
) -> None:
    """ValueError for what the eval notebook cannot do, naming the parameter. counts: sample, games, puzzle_limit, ...;
    outputs: paths by parameter; `int8` is made of `onnx`."""
    check_numbers("simulations", simulations, "-y 'simulations: [16, 64]'")
    check_numbers("engine_elo", engine_elo, "-y 'engine_elo: [1350, 1800]'")
    check_counts(counts)
    if engine_elo and not counts.get("engine_nodes", 1):
        raise ValueError("engine_nodes is 0, with which an engine thinks without an end; give a whole number from 1")
    check_inputs(inputs or {})
    check_outputs(outputs or {})
    if outputs and outputs.get("int8") and not outputs.get("onnx"):
        raise ValueError("int8 is made of the file that `onnx` names: give -p onnx model.onnx, too")
    if outputs and outputs.get("pgn") and not counts.get("games"):
        raise ValueError("pgn: there are no games to write: give -p games 20, too")
