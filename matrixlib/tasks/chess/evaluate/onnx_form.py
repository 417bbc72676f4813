"""The chess network as other programs call it: planes in, and what it says in the units of `ChessTask.predict`."""

from __future__ import annotations

import json

from torch import Tensor, nn

from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.planes import move_map
from matrixlib.tasks.chess.task import ChessTask

INPUTS = ("planes",)
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
}
BOARDS = {
    "oriented": "the board of the side to move: row 0 is its rank 1, column 0 the a-file; for Black the ranks are "
    "turned and the colours swapped",
    "matrix0": "White's board: row 0 is rank 8, column 0 the a-file",
}


class ForExport(nn.Module):
    """A network with everything that follows from the planes (B, 19, 8, 8) float32.

    Gives a tensor for each of `outputs`: `policy` (B, 4672) logits, illegal moves not masked; `wdl` (B, 3)
    probabilities of win, draw and loss, or `value` (B,) in -1..1; `ssl_<head>` (B, c, 8, 8) probabilities.
    """

    def __init__(self, task: ChessTask, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model
        self.scalar = task.config.model.value.kind == "scalar"
        self.heads = tuple(f"ssl_{name}" for name in task.config.model.ssl)
        self.outputs = ("policy", "value" if self.scalar else "wdl", *self.heads)

    def forward(self, planes: Tensor) -> tuple[Tensor, ...]:
        said = self.model(planes, frozenset({"policy", "value", *self.heads}))
        value = said["value"] if self.scalar else said["value"].softmax(1)
        maps = (self.task.shares(name, logits) for name, logits in said.get("ssl", {}).items())
        return said["policy"], value, *maps

    def metadata(self) -> dict[str, str]:
        """What a consumer must know, as text; `planes` and `moves` are lists in JSON."""
        encoding = self.task.config.model.encoding
        return {
            "task": "chess",
            "encoding": encoding,
            "board": BOARDS[encoding],
            "planes": json.dumps(PLANE_NAMES[encoding]),
            "policy": "logits by move, see moves; leave out illegal moves, then softmax",
            "moves": json.dumps(moves(encoding)),
            "value": "expected result of the side to move, -1 to 1"
            if self.scalar
            else "wdl: probabilities of win, draw and loss for the side to move",
            "maps": "ssl_<head>: probabilities by class and square, on the board of the planes",
        }


def moves(encoding: str) -> list[str]:
    """The move of each policy index in UCI, on the side to move's board (`oriented`) or on White's; "" where there is
    none. A pawn that reaches the last rank by a move without a letter becomes a queen.
    """
    named = [""] * bitboard.POLICY_SIZE
    black = move_map(encoding)[1].tolist()
    for index, code in enumerate(bitboard.POLICY_MOVE.tolist()):
        if code == bitboard.NO_MOVE:
            continue
        start, to, letter = code & 63, code >> 6 & 63, ("", "n", "b", "r")[code >> 12]
        named[index] = _square(start) + _square(to) + letter
        if encoding == "matrix0":
            named[black[index]] = _square(start ^ 56) + _square(to ^ 56) + letter
    return named


def _square(number: int) -> str:
    return "abcdefgh"[number & 7] + "12345678"[number >> 3]
