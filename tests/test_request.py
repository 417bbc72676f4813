"""What an evaluation is asked for is looked at before it begins."""

from pathlib import Path
from typing import Any

import pytest

from matrixlib.tasks.chess.evaluate.request import check_request

COUNTS = {"sample": 2048, "games": 4}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"simulations": [16, 0]}, r"simulations: 0 is no whole number of at least 1; give a list such as -y"),
        ({"simulations": [-5]}, "simulations: -5"),
        ({"simulations": [1.5]}, r"simulations: 1\.5"),
        ({"simulations": ["a"]}, "simulations: 'a'"),
        ({"simulations": [True]}, "simulations: True"),
        ({"engine_elo": ["strong"]}, r"engine_elo: 'strong'.*-y 'engine_elo: \[1350"),
        ({"counts": {"games": -2}}, "games is -2; give a whole number from 0"),
        ({"counts": {"sample": -3}}, "sample is -3"),
        ({"counts": {"engine_nodes": 0}, "engine_elo": [1400]}, "engine_nodes is 0"),
        ({"inputs": {"game": "nowhere.pgn"}}, r"game: there is no file 'nowhere\.pgn'"),
        ({"inputs": {"suites": ["nowhere.epd"]}}, r"suites: there is no file 'nowhere\.epd'"),
        ({"inputs": {"suites": [None]}}, "suites: there is no file 'None'"),
        ({"inputs": {"suites": [1]}}, "suites: there is no file '1'"),
        ({"outputs": {"pgn": "nowhere/games.pgn"}}, "pgn: no folder 'nowhere' to write"),
        ({"outputs": {"onnx": "."}}, r"onnx: '\.' is a folder"),
        ({"outputs": {"onnx": "x" * 5000 + "/y"}}, "onnx: no folder 'xxx"),
        pytest.param(
            {"outputs": {"onnx": "/proc/model.onnx"}},
            "onnx: no file can be written in '/proc': No such file",
            marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here"),
        ),
        ({"inputs": {"game": "x" * 5000}}, "game: there is no file 'xxx"),
        ({"outputs": {"pgn": "a.pgn", "onnx": "model", "int8": "model"}}, "onnx and int8 name one file"),
        ({"outputs": {"onnx": "", "int8": "small.onnx"}}, "int8 is made of the file that `onnx` names"),
        ({"counts": {"games": 0}, "outputs": {"pgn": "games.pgn"}}, "pgn: there are no games to write"),
    ],
)
def test_what_cannot_be_done_is_named(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(**{"simulations": [16], "counts": COUNTS, **asked})


def test_what_can_be_done_is_let_through(tmp_path: Path) -> None:
    game = tmp_path / "game.pgn"
    game.write_text("1. e4 *\n")
    outputs = {"pgn": str(tmp_path / "games.pgn"), "onnx": "model.onnx", "int8": "small.onnx"}
    check_request([], COUNTS, [1350], {"game": str(game), "puzzles": "", "suites": []}, outputs)
