"""Chess as a `play.game.Game`: states are records, moves are policy indices 0-4671 of the oriented board.

Threefold repetition and the fifty-move rule (unless the move mates) end a game without a claim.
"""

import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import chess.syzygy
import numpy as np
from numpy.typing import NDArray

from matrixlib.data.shards import Batch, concat, select
from matrixlib.play.game import GameRecord, Moves, Offsets, States, Trace, Values
from matrixlib.tasks.chess import bitboard, records

_DARK = np.uint64(chess.BB_DARK_SQUARES)


def open_tablebases(folder: str | Path) -> chess.syzygy.Tablebase:
    """Open the Syzygy tablebases of a folder; ValueError if it has none."""
    tables = chess.syzygy.Tablebase()
    try:
        tables.add_directory(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"no Syzygy tables: '{folder}' cannot be read ({error})") from error
    if not tables.wdl:
        raise ValueError(f"no Syzygy tables (*.rtbw) in '{folder}'")
    return tables


class ChessGame:
    """The rules of chess. tables: Syzygy tablebases for positions of at most `pieces` pieces."""

    name = "chess"
    actions = bitboard.POLICY_SIZE

    def __init__(self, tables: Any = None, pieces: int = 5) -> None:
        self.tables, self.pieces = tables, pieces

    def initial(self, n: int) -> States:
        return np.repeat(records.from_boards([chess.Board()]), n)

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        indices, offsets = records.legal_indices(states)
        return indices.astype(np.int32), offsets

    def play(self, states: States, moves: Moves) -> States:
        code = bitboard.POLICY_MOVE[moves]
        classes = records.piece_classes(states["pieces"])
        piece = np.take_along_axis(classes, (code & 63).astype(np.int64)[:, None], axis=1)[:, 0]
        queens = (piece == bitboard.PAWN) & (code & 0xFFF >= 56 << 6) & (code >> 12 == 0)
        return records.play(states, code | queens.astype(np.uint16) << np.uint16(14))

    def terminal(self, states: States, counts: NDArray[np.int64]) -> Values:
        """Values (N,) of finished games for the side to move, NaN for others."""
        values = np.full(len(states), np.nan, np.float32)
        values[(states["halfmove"] >= 100) | (states["repetition"] >= 2) | insufficient_material(states["pieces"])] = 0
        stuck = np.flatnonzero(counts == 0)
        values[stuck] = np.where(bitboard.in_check(states["pieces"][stuck]), -1, 0)
        return values

    def to_move(self, states: States) -> NDArray[np.uint8]:
        return states["side"]

    def key(self, states: States) -> NDArray[np.uint64]:
        """Repetition keys (N,): hashes of pieces, side, castling rights and legal en passant."""
        return records.position_hashes(states) ^ states["side"] * records.HASH_MULTIPLIER

    def repeat(self, states: States, counts: NDArray[np.int32]) -> States:
        states = states.copy()
        states["repetition"] = np.minimum(counts, 2)
        return states

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        """1 for each move (K,) that mates, else NaN; draws are recognised after the move."""
        ends = np.full(len(moves), np.nan, np.float32)
        ends[bitboard.mates(states["pieces"], states["castling"], states["en_passant"], moves, offsets)] = 1
        return ends

    def proven(self, states: States) -> Values:
        """Tablebase values (N,), NaN where unknown; only right after a capture or pawn move, where they are exact.
        Cursed wins and blessed losses are draws."""
        values = np.full(len(states), np.nan, np.float32)
        if self.tables is None:
            return values
        men = np.bitwise_count(bitboard.bitboards(states["pieces"])).sum(1)
        for i in np.flatnonzero((men <= self.pieces) & (states["halfmove"] == 0) & (states["castling"] == 0)):
            try:
                wdl = self.tables.get_wdl(records.to_board(states[i]))
            except (OSError, LookupError, ValueError, AssertionError, struct.error) as error:
                self.tables = None  # e.g. a truncated download
                warnings.warn(f"Syzygy tables are damaged and no longer used: {error}", stacklevel=2)
                break
            if wdl is not None:
                values[i] = {-2: -1, 2: 1}.get(wdl, 0)
        return values

    def without_clock(self, states: States) -> Values:
        """`proven` as if the last move had been a capture: for games cut off, where the clock says little."""
        states = states.copy()
        states["halfmove"] = 0
        return self.proven(states)

    def write(self, game: GameRecord) -> str:
        board = records.to_board(game.start)
        written = chess.pgn.Game()
        written.setup(board)
        result = "*"
        if game.result is not None:
            white = game.result if board.turn == chess.WHITE else -game.result
            result = {1: "1-0", 0: "1/2-1/2", -1: "0-1"}[int(white)]
        white_name, black_name = game.players
        written.headers.update({"White": white_name, "Black": black_name, **game.tags, "Result": result})
        node: chess.pgn.GameNode = written
        for i, index in enumerate(game.moves):
            move = records.move_from_index(int(index), board)
            node = node.add_variation(move, comment=game.comments[i] if game.comments else "")
            board.push(move)
        return str(written)


def check_not_over(game: ChessGame, states: States) -> None:
    """ValueError naming the first state in which the game is over, including draws by repetition and fifty moves."""
    values = game.terminal(states, np.diff(game.legal(states)[1]))
    for i in np.flatnonzero(~np.isnan(values))[:1]:
        board = records.to_board(states[i])
        result = board.result() if board.is_game_over() else "1/2-1/2"
        raise ValueError(f"the game is over in '{board.fen()}': {result}")


def training_batch(traces: Iterable[Trace], ids: Mapping[int, int], source: int) -> Batch:
    """Fully searched positions of games as records, with the search's policy and the game's result.

    ids: game number -> game id. source: see `records.SOURCES`. Win-draw-loss is the search's value; as it does not tell
    the draw rate, the draw has all that it leaves.
    """
    parts = []
    for trace in traces:
        rows, result = trace.states.copy(), trace.results()
        rows["result"] = np.where(np.isnan(result), records.UNKNOWN, result)
        sure = np.rint(records.WDL_SUM * trace.targets[:, None] * (1, -1)).clip(0)
        rows["wdl"] = np.insert(sure, 1, records.WDL_SUM - sure.sum(1), axis=1)
        rows["source"], rows["game"] = source, ids[trace.number]
        batch = {
            "records": rows,
            "policy_offset": trace.offsets.astype("<i8"),
            "policy_index": trace.moves.astype("<u2"),
            "policy_weight": np.rint(trace.policy * 65535).astype("<u2"),
        }
        parts.append(select(batch, np.repeat(np.arange(len(rows)), trace.copies), records.LAYOUT))
    return concat(parts, records.LAYOUT)


def by_material(states: States, margin: float) -> Values:
    """(N,) 1 or -1 where the side to move is at least `margin` pawns ahead or behind (PIECE_VALUES), else 0."""
    men = np.bitwise_count(bitboard.bitboards(states["pieces"])).astype(np.float32)
    lead = (men[:, :6] - men[:, 6:]) @ np.array(records.PIECE_VALUES, np.float32)
    return np.where(np.abs(lead) >= margin, np.sign(lead), np.float32(0))


def insufficient_material(pieces: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mask (N,) of positions without mating material, as python-chess's `is_insufficient_material`."""
    boards = bitboard.bitboards(pieces)
    majors = (boards[:, [0, 3, 4, 6, 9, 10]] != 0).any(1)
    knights = np.bitwise_count(boards[:, 1]) + np.bitwise_count(boards[:, 7])
    bishops = boards[:, 2] | boards[:, 8]
    one_colour = ((bishops & _DARK) == 0) | ((bishops & ~_DARK) == 0)
    return ~majors & np.where(knights == 0, one_colour, (knights == 1) & (bishops == 0))
