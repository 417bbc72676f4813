"""Static boards with moves as arrows and maps as square colours."""

import html
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import chess
import chess.svg
import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from numpy.typing import NDArray
from torch import Tensor

from matrixlib.tasks.chess.planes import unpack_maps
from matrixlib.tasks.chess.records import move_from_index
from matrixlib.tasks.chess.task import boards_of

if TYPE_CHECKING:
    from IPython.display import HTML

CLASS_NAMES = {"piece": [*"PNBRQKpnbrqk", "."], "control": ["theirs", "even", "ours"]}
CLASS_COLOURMAPS = {"piece": "tab20", "control": "PRGn"}
HIDDEN_COLOUR = "#3a6ea5"  # of squares hidden from the network
PROBABILITY_COLOURMAP = "Oranges"  # white at 0, so that pieces stay visible
MAX_ARROWS = 5
BOARD_PIXELS = 220


class Card(NamedTuple):
    """A board, White below. moves: UCI -> probability, as arrows. fill: square -> `#rrggbb`. note: HTML below."""

    board: chess.Board
    title: str = ""
    moves: Mapping[str, float] = {}
    fill: Mapping[int, str] = {}
    note: str = ""


def boards(cards: Sequence[Card], size: int = BOARD_PIXELS, heading: str = "") -> "HTML":
    """Boards side by side as HTML for a cell, `size` pixels each. heading: HTML above them."""
    from IPython.display import HTML

    pieces = "".join(chess.svg.PIECES.values())
    pieces = f"<svg width='0' height='0' style='position:absolute'><defs>{pieces}</defs></svg>"
    figures = []
    for card in cards:
        picture = chess.svg.board(
            card.board,
            lastmove=card.board.peek() if card.board.move_stack else None,
            arrows=arrows(card.moves),
            fill=dict(card.fill),
            size=size,
            coordinates=False,
        )
        picture = re.sub("<defs>.*?</defs>", "", picture, flags=re.DOTALL)  # defined once for all boards
        title = f"<b>{html.escape(card.title)}</b>" if card.title else ""
        caption = f"<figcaption style='font-size:85%'>{card.note}</figcaption>"
        figures.append(f"<figure style='margin:6px;width:{size}px'>{title}{picture}{caption}</figure>")
    above = f"<p>{heading}</p>" if heading else ""
    return HTML(f"{above}<div style='display:flex;flex-wrap:wrap'>{pieces}{''.join(figures)}</div>")


def arrows(moves: Mapping[str, float]) -> list[chess.svg.Arrow]:
    """Arrows of the likeliest moves (UCI -> probability); opacity shows the probability."""
    found = []
    for uci, share in sorted(moves.items(), key=lambda item: item[1])[-MAX_ARROWS:]:
        move, alpha = chess.Move.from_uci(uci), round(255 * (0.3 + 0.6 * min(share, 1.0)))
        found.append(chess.svg.Arrow(move.from_square, move.to_square, color=f"#15406b{alpha:02x}"))
    return found


def target_moves(batch: Mapping[str, Tensor], row: int, board: chess.Board) -> dict[str, float]:
    """Policy target of a row as UCI -> probability. board: its position."""
    targets = zip(batch["policy_index"][row].tolist(), batch["policy_weight"][row].tolist(), strict=True)
    return {move_from_index(index, board).uci(): share for index, share in targets if share > 0}


def batch_boards(batch: Mapping[str, Tensor], rows: int) -> "HTML":
    """Boards of the first rows of a prepared batch with their targets; hidden squares are blue."""
    part = {name: tensor[:rows].cpu() for name, tensor in batch.items()}
    cards = []
    for row, board in enumerate(boards_of(part)):
        moves = target_moves(part, row, board)
        best = sorted(moves, key=moves.__getitem__, reverse=True)[:3]
        policy = ", ".join(f"{board.san(chess.Move.from_uci(uci))} {moves[uci]:.0%}" for uci in best)
        hidden = unpack_maps(part["hidden"][row : row + 1])[0].flatten().nonzero()[:, 0] if "hidden" in part else ()
        squares = [int(square) if board.turn else chess.square_mirror(int(square)) for square in hidden]
        wdl = part["wdl"][row].tolist()
        value = "win {:.0%}, draw {:.0%}, loss {:.0%}".format(*wdl) if sum(wdl) else "no value target"
        side = "White" if board.turn else "Black"
        note = f"{side}: {policy or 'no policy target'}<br>{value}"
        cards.append(Card(board, moves=moves, fill=dict.fromkeys(squares, HIDDEN_COLOUR), note=note))
    return boards(cards)


def map_fill(head: str, values: NDArray[Any], squares: NDArray[np.bool_] | None = None) -> dict[int, str]:
    """Square -> colour of a map (8, 8) on the real board. squares: mask of the coloured ones, default all."""
    keep = np.ones(64, bool) if squares is None else squares.ravel()
    return {square: colour for square, colour in enumerate(square_colours(head, values)) if keep[square]}


def map_legend(head: str) -> str:
    return " ".join(f"<span style='color:{colour}'>&#9632;</span>{word}" for word, colour in colour_legend(head))


def square_colours(head: str, values: NDArray[Any]) -> list[str]:
    """Colours (`#rrggbb`) of the squares a1, b1, ... h8 of a map (8, 8)."""
    shares = np.asarray(values, float).ravel()
    classes = len(CLASS_NAMES.get(head, ()))
    return _colours(head, (shares + 0.5) / classes if classes else shares)  # classes at the centre of their colour


def colour_legend(head: str) -> list[tuple[str, str]]:
    """Legend of a head's map: (label, colour) pairs."""
    names = CLASS_NAMES.get(head, ["0%", "50%", "100%"])
    labels = ["empty" if name == "." else name for name in names]
    return list(zip(labels, _colours(head, np.linspace(0, 1, len(names))), strict=True))


def _colours(head: str, places: NDArray[Any]) -> list[str]:
    names = CLASS_NAMES.get(head)
    colours = colormaps[CLASS_COLOURMAPS[head]].resampled(len(names)) if names else colormaps[PROBABILITY_COLOURMAP]
    return [to_hex(colour) for colour in colours(places)]
