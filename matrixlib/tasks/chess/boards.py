"""Training rows as boards that a notebook displays."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import chess
import chess.svg
from torch import Tensor

from matrixlib.tasks.chess.planes import unpack_maps
from matrixlib.tasks.chess.records import move_from_index
from matrixlib.tasks.chess.task import boards_of

if TYPE_CHECKING:
    from IPython.display import HTML

ARROWS = 3  # moves of a policy target that are drawn
SIZE = 220  # pixels


def batch_boards(batch: Mapping[str, Tensor], rows: int) -> "HTML":
    """The first `rows` of a prepared batch: the likeliest moves of the policy target as arrows, win-draw-loss below.

    Squares that the piece head has to guess are blue.
    """
    from IPython.display import HTML

    part = {name: tensor[:rows].cpu() for name, tensor in batch.items()}
    cells = []
    for row, board in enumerate(boards_of(part)):
        weight, best = part["policy_weight"][row].topk(ARROWS)
        moves = [
            (move_from_index(int(part["policy_index"][row, k]), board), float(share))
            for share, k in zip(weight, best, strict=True)
            if share > 0
        ]
        hidden = unpack_maps(part["hidden"][row : row + 1])[0].flatten().nonzero()[:, 0] if "hidden" in part else ()
        squares = [int(square) if board.turn else chess.square_mirror(int(square)) for square in hidden]
        svg = chess.svg.board(
            board,
            orientation=board.turn,
            size=SIZE,
            arrows=[chess.svg.Arrow(move.from_square, move.to_square, color="#15781b80") for move, _ in moves],
            fill=dict.fromkeys(squares, "#3a6ea5c0"),
        )
        policy = ", ".join(f"{board.san(move)} {share:.0%}" for move, share in moves) or "no policy target"
        wdl = part["wdl"][row].tolist()
        value = "win {:.0%}, draw {:.0%}, loss {:.0%}".format(*wdl) if sum(wdl) else "no value target"
        side = "White" if board.turn else "Black"
        caption = f"<figcaption>{side}: {policy}<br>{value}</figcaption>"
        cells.append(f"<figure style='margin:8px;width:{SIZE}px'>{svg}{caption}</figure>")
    return HTML(f"<div style='display:flex;flex-wrap:wrap'>{''.join(cells)}</div>")
