"""What an evaluation is asked for is looked at before it begins."""

from pathlib import Path
from typing import Any

import pytest

from matrixlib.tasks.chess.evaluate.request import check_request


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"simulations": [16, 0]}, "'simulations' must be 1 or more, not 0"),
        ({"game": "nowhere.pgn"}, r"'game': there is no file 'nowhere\.pgn'"),
        ({"suites": ["nowhere.epd"]}, r"'suites': there is no file 'nowhere\.epd'"),
        ({"pgn": "nowhere/games.pgn"}, "'pgn': 'nowhere/games.pgn' cannot be written"),
        ({"onnx": "."}, r"'onnx': '\.' cannot be written"),
        ({"onnx": "x" * 5000 + "/y"}, "'onnx': 'xxx.*cannot be written"),
        ({"pgn": "a.pgn", "onnx": "model", "int8": "model"}, "pgn, onnx and int8 must be different files"),
        ({"int8": "small.onnx"}, "int8 needs the ONNX file"),
        ({"pgn": "games.pgn"}, "pgn needs games"),
    ],
)
def test_what_cannot_be_done_is_named(asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(ValueError, match=message):
            check_request(asked)
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_done_is_let_through(tmp_path: Path) -> None:
    game, games = tmp_path / "game.pgn", tmp_path / "games.pgn"
    game.write_text("1. e4 *\n")
    outputs = {"pgn": str(games), "onnx": str(tmp_path / "model.onnx"), "int8": ""}
    asked = {"sample": 0, "games": 4, "engine_elo": [1350], "engine_nodes": 500, "game": str(game), "device": "cpu"}
    check_request({**asked, **outputs, "simulations": [], "suites": []})
    assert not games.exists()
