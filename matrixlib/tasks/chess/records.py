"""The chess record: a position with its targets in 55 bytes, on the oriented board, the side to move's.

For Black the ranks are mirrored and the colours swapped (`chess.Board.mirror`). Policy indices are on that board:
from-square * 73 + plane; planes 0-55 rays (N S E W NE NW SE SW by 1-7 steps), 56-63 knight moves, 64-72
under-promotions.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import chess
import numpy as np
from numpy.typing import NDArray

from matrixlib.data.shards import Layout
from matrixlib.play.game import Past
from matrixlib.tasks.chess import bitboard

RECORD = np.dtype(
    [
        ("pieces", "u1", 32),  # square s: nibble s & 1 (low first) of byte s >> 1; 0-5 ours, 6-11 theirs, 12 empty
        ("castling", "u1"),  # 1 our king's side, 2 our queen's side, 4 and 8 theirs
        ("en_passant", "i1"),  # file 0-7 if a capture is legal, else -1
        ("halfmove", "u1"),  # half moves since a capture or pawn move, max. 255
        ("repetition", "u1"),  # earlier occurrences of the position: 0, 1, 2 (or more)
        ("side", "u1"),  # 0 White to move, 1 Black
        ("result", "i1"),  # of the game, from the side to move: 1 win, 0 draw, -1 loss, 2 unknown
        ("ply", "<u2"),  # half moves since the start of the game
        ("wdl", "<u2", 3),  # win, draw, loss of the side to move, sum 65535; all 0 unknown
        ("source", "u1"),
        ("game", "<u8"),  # game id, for splits by game
    ]
)
LAYOUT = Layout("chess", 1, RECORD, {"policy": {"index": np.dtype("<u2"), "weight": np.dtype("<u2")}})
UNKNOWN = 2  # result
WDL_SUM = 65535
PIECE_VALUES = (1, 3, 3, 5, 9, 0)  # P N B R Q K, in pawns
POLICY_SIZE = bitboard.POLICY_SIZE

_NAMES = "unknown stockfish pgn puzzles evaluations epd lc0 matrix0 labelled selfplay"
SOURCES = {name: number for number, name in enumerate(_NAMES.split())}  # origin of a position
FEN_CHARACTERS = 256  # at most
VALIDATION_PER_MILLE = 50  # of the games
SHARD_RECORDS = 32768
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Batch = dict[str, np.ndarray]
Records = NDArray[np.void]

_SIDES = np.repeat(np.eye(2, dtype=np.uint8), 6, axis=0)
_CORNERS = (chess.BB_H1, chess.BB_A1, chess.BB_H8, chess.BB_A8)


# Positions


def parse_fen(fen: str) -> chess.Board:
    """Parse a FEN; ValueError for an invalid one, an illegal position, and castling rights of Chess960."""
    if len(fen) > FEN_CHARACTERS:
        raise ValueError(f"not a FEN: {len(fen):,} characters, beginning with '{fen[:40]}'")
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise ValueError(f"not a FEN: '{fen}' ({error})") from error
    from_boards([board])
    if board.castling_rights & board.rooks & ~board.clean_castling_rights():
        raise ValueError(f"king or rook of a castling right is not where standard chess has it: '{fen}' (Chess960?)")
    return board


def _castling(board: chess.Board) -> int:
    rights = board.clean_castling_rights()
    if not rights:
        return 0
    if board.chess960:
        raise ValueError(f"Chess960 castling is not supported: '{board.fen()}'; set board.chess960 = False")
    own, other = (_CORNERS[:2], _CORNERS[2:]) if board.turn else (_CORNERS[2:], _CORNERS[:2])
    return sum(1 << bit for bit, corner in enumerate((*own, *other)) if rights & corner)


def from_boards(boards: Iterable[chess.Board], **fields: Any) -> Records:
    """Records (N,) of N boards. fields: values of other columns, scalar or (N,).

    Defaults: unknown result and wdl, source and game 0; ply from the full-move number, repetition from the move stack.
    ValueError names the FEN of an illegal position.
    """
    boards = list(boards)
    records = np.zeros(len(boards), RECORD)
    if not boards:
        return records
    masks = np.array(
        [(b.pawns, b.knights, b.bishops, b.rooks, b.queens, b.kings, *b.occupied_co) for b in boards], np.uint64
    )
    black = np.array([not b.turn for b in boards])
    own, other = np.where(black, (masks[:, 6], masks[:, 7]), (masks[:, 7], masks[:, 6]))
    oriented = np.concatenate([masks[:, :6] & own[:, None], masks[:, :6] & other[:, None]], axis=1)
    oriented[black] = oriented[black].byteswap()  # a byte per rank
    if not (good := valid_positions(oriented)).all():
        board = boards[int(good.argmin())]
        raise ValueError(f"FEN '{board.fen()}' is not a position of chess: {board.status()!r}")
    records["pieces"] = bitboard.pieces_of(oriented)
    records["castling"] = [_castling(b) for b in boards]
    square = np.array([-1 if b.ep_square is None else b.ep_square ^ (0 if b.turn else 56) for b in boards])
    records["en_passant"] = bitboard.legal_en_passant(records["pieces"], np.where(square >> 3 == 5, square & 7, -1))
    records["halfmove"] = [min(b.halfmove_clock, 255) for b in boards]
    records["side"] = black
    records["ply"] = [min(b.ply(), 65535) for b in boards]
    records["repetition"] = [b.is_repetition(2) + b.is_repetition(3) for b in boards]
    for name, value in {"result": UNKNOWN, **fields}.items():
        records[name] = value
    return records


def positions_before(board: chess.Board, plies: int) -> Records:
    """Up to `plies` positions before a board in game order, from its move stack. If that starts with an en-passant
    square, the position before it fills the remaining plies."""
    walk, past = board.copy(), list[chess.Board]()
    while walk.move_stack and len(past) < plies:
        walk.pop()
        past.append(walk.copy())
    records = from_boards(past[::-1])
    root = walk.ep_square is not None and not walk.move_stack and len(past) < plies
    return np.concatenate([np.repeat(_before_double_step(walk), plies - len(past)), records]) if root else records


def reversible_history(board: chess.Board) -> Records:
    """Positions before a board back to the last irreversible move, latest first."""
    return positions_before(board, min(board.halfmove_clock, len(board.move_stack)))[::-1]


def batch_history(boards: Sequence[chess.Board], plies: int) -> Past:
    """History of boards (N,), up to `plies` positions each, see `positions_before`."""
    states, known = np.zeros((len(boards), plies), RECORD), np.zeros(len(boards), np.int64)
    for row, board in enumerate(boards):
        past = positions_before(board, plies)[::-1]
        states[row, : len(past)], known[row] = past, len(past)
    return Past(states, known)


def stored_history(batch: Batch) -> Past | None:
    """History of the `records` (B,) of a batch in the rows `before` each (B, H), None if it has none: back to where the
    row before is not of the same game, a ply and a move earlier. Zeros for what is unknown."""
    if "before" not in batch:
        return None
    line = np.concatenate([batch["records"][:, None], batch["before"]], axis=1)
    new, states = line[:, :-1], line[:, 1:].copy()
    linked = (states["game"] == new["game"]) & (states["ply"] + np.uint16(1) == new["ply"])
    linked &= _one_move_apart(bitboard.bitboards(line["pieces"].reshape(-1, 32)).reshape(*line.shape, 12))
    linked = np.logical_and.accumulate(linked, axis=1)
    states[~linked] = np.zeros((), RECORD)
    return Past(states, linked.sum(1))


def moves_left(batch: Batch) -> NDArray[np.float32]:
    """Plies (B,) to the end of each row's game, 0 unknown: to the move from its `last` position in the shard. Unknown
    without a result and without `last`."""
    rows, last = batch["records"], batch.get("last", np.zeros(len(batch["records"]), RECORD))
    known = (rows["result"] != UNKNOWN) & last["pieces"].any(1) & (last["ply"] >= rows["ply"])
    return np.where(known, last["ply"].astype(np.float32) - rows["ply"] + 1, np.float32(0))


def _one_move_apart(boards: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether boards of lines (B, H + 1, 12), newest first, can have come from the next ones by a move, (B, H): one or
    two (castling) of the mover's men stand elsewhere, at most one of the others is gone. A position and its image with
    swapped colours, which have one id (`position_ids`), are not."""
    old, new = boards[:, 1:].byteswap(), np.roll(boards[:, :-1], 6, axis=2)  # the mover's first
    gone, come = (np.bitwise_count(men) @ _SIDES for men in (old & ~new, new & ~old))
    moved: NDArray[np.bool_] = (gone[..., 0] == come[..., 0]) & (gone[..., 0] - 1 < 2)
    return moved & (gone[..., 1] < 2) & (come[..., 1] == 0)


def _before_double_step(board: chess.Board) -> Records:
    """Position (1,) before the double step of an en-passant square; (0,) if no pawn can have made it."""
    (row,) = records = from_boards([board], repetition=0)
    assert board.ep_square is not None
    file = chess.square_file(board.ep_square)
    squares = piece_classes(records["pieces"]).reshape(8, 8)
    if (squares[4:7, file] != (6, 12, 12)).any():
        return records[:0]
    squares[4:7, file] = 12, 12, 6
    squares = np.where(squares == 12, 12, (squares + 6) % 12)[::-1].reshape(32, 2)
    records["pieces"] = squares[:, 0] | squares[:, 1] << 4
    records["castling"] = row["castling"] >> 2 | (row["castling"] & 3) << 2
    records["side"], records["en_passant"], records["halfmove"] = 1 - row["side"], -1, 0
    records["ply"] = max(int(row["ply"]) - 1, 0)
    return records


def valid_positions(boards: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mask (N,) of legal positions among oriented bitboards (N, 12): one king per side, no pawns on the back ranks, one
    piece per square, side not to move not in check."""
    kings = np.bitwise_count(boards[:, [5, 11]])
    good = (kings == 1).all(1) & ((boards[:, 0] | boards[:, 6]) & np.uint64(chess.BB_BACKRANKS) == 0)
    pieces = np.bitwise_count(boards).sum(1, dtype=np.int64)
    good &= pieces == np.bitwise_count(np.bitwise_or.reduce(boards, axis=1))
    turned = np.concatenate([boards[:, 6:], boards[:, :6]], axis=1).byteswap()
    return good & ~bitboard.in_check(bitboard.pieces_of(turned))


def piece_classes(pieces: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Piece classes (N, 64) by oriented square, 12 empty, from nibbles (N, 32)."""
    return np.stack([pieces & 15, pieces >> 4], axis=2).reshape(-1, 64)


def to_board(record: np.void | Records) -> chess.Board:
    """The board of one record in real colours, without move stack; full-move number from ply."""
    row = np.atleast_1d(record)[0]
    masks = bitboard.bitboards(row["pieces"][None])[0]
    black, castling, file = bool(row["side"]), int(row["castling"]), int(row["en_passant"])
    if black:
        masks = np.concatenate([masks[6:], masks[:6]]).byteswap()
    values = [int(m) for m in masks]
    white, dark = values[:6], values[6:]
    board = chess.Board(None)
    board.pawns, board.knights, board.bishops, board.rooks, board.queens, board.kings = (
        a | b for a, b in zip(white, dark, strict=True)
    )
    board.occupied_co[chess.WHITE], board.occupied_co[chess.BLACK] = sum(white), sum(dark)
    board.occupied = sum(values)
    board.turn = not black
    corners = _CORNERS[2:] + _CORNERS[:2] if black else _CORNERS
    board.castling_rights = sum(corner for bit, corner in enumerate(corners) if castling >> bit & 1)
    board.ep_square = None if file < 0 else chess.square(file, 2 if black else 5)
    board.halfmove_clock = int(row["halfmove"])
    board.fullmove_number = int(row["ply"]) // 2 + 1
    return board


# Moves


def policy_index(move: chess.Move, turn: chess.Color) -> int:
    """Policy index 0-4671 of a move by `turn`; ValueError for a move that no piece can make."""
    flip = 0 if turn else 56
    promotion = (move.promotion or 1) - 1
    code = (move.from_square ^ flip) | (move.to_square ^ flip) << 6 | promotion << 12
    index = -1 if move.drop else int(bitboard.POLICY_INDEX[code])
    if index < 0:
        raise ValueError(f"move '{move.uci()}' of {chess.COLOR_NAMES[turn]} has no policy index")
    return index


def move_from_index(index: int, board: chess.Board) -> chess.Move:
    """The legal move of a policy index on a board; ValueError if there is none."""
    code = int(bitboard.POLICY_MOVE[index]) if 0 <= index < POLICY_SIZE else bitboard.NO_MOVE
    if code == bitboard.NO_MOVE:
        raise ValueError(f"policy index {index} is no move")
    flip = 0 if board.turn else 56
    origin, target, promotion = code & 63, code >> 6 & 63, code >> 12
    queens = not promotion and target >= 56 and board.pawns & chess.BB_SQUARES[origin ^ flip]
    piece = promotion + 1 if promotion else chess.QUEEN if queens else None
    move = chess.Move(origin ^ flip, target ^ flip, piece)
    if not board.is_legal(move):
        raise ValueError(f"policy index {index}, move '{move.uci()}', is not legal in '{board.fen()}'")
    return move


def legal_indices(records: np.void | Records) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Policy indices (K,) uint16 of all legal moves, ascending per row, and offsets (N + 1,) int64."""
    rows = np.atleast_1d(records)
    return bitboard.legal_moves(rows["pieces"], rows["castling"], rows["en_passant"])[1:]


def captured_value(pieces: NDArray[np.uint8], index: NDArray[Any]) -> NDArray[np.int64]:
    """Value (B, L) by PIECE_VALUES of the piece captured by each policy index (B, L). pieces: nibbles (B, 32).

    0 without a capture, for en passant and for negative indices.
    """
    value = np.array([*[0] * 6, *PIECE_VALUES, *[0] * 4])[piece_classes(pieces)]
    to = bitboard.POLICY_MOVE[np.maximum(index, 0)] >> 6 & 63
    return np.where(index >= 0, np.take_along_axis(value, to.astype(np.int64), axis=1), 0)


def play(records: Records, moves: NDArray[np.uint16]) -> Records:
    """Positions after one legal move (N,) per record (`bitboard.legal_moves` codes).

    Repetition and wdl are reset to 0; result is that of the new side to move.
    """
    after = records.copy()
    state = bitboard.make_moves(
        records["pieces"], records["castling"], records["en_passant"], records["halfmove"], moves
    )
    for name, column in zip(("pieces", "castling", "en_passant", "halfmove"), state, strict=True):
        after[name] = column
    after["repetition"], after["wdl"] = 0, 0
    after["side"] = 1 - records["side"]
    after["ply"] = np.minimum(records["ply"].astype(np.int64) + 1, 65535)
    after["result"] = np.where(records["result"] == UNKNOWN, UNKNOWN, -records["result"])
    return after


# Policy indices under symmetries


def _symmetry_table(files: int, ranks: int, square: int) -> NDArray[np.uint16]:
    """Policy index (4672,) after multiplying files and ranks of moves by 1 or -1 and XORing squares."""
    rays, jumps, under, plane = bitboard.RAYS, bitboard.JUMPS, bitboard.UNDER_FILES, np.arange(bitboard.PLANES)
    for d, (file, rank) in enumerate(rays):
        plane[d * 7 : d * 7 + 7] = rays.index((files * file, ranks * rank)) * 7 + np.arange(7)
    for j, (file, rank) in enumerate(jumps):
        plane[56 + j] = 56 + jumps.index((files * file, ranks * rank))
    for piece in range(3):
        for direction, file in enumerate(under):
            plane[64 + piece * 3 + direction] = 64 + piece * 3 + under.index(files * ranks * file)
    squares = np.arange(64)[:, None] ^ square
    return (squares * bitboard.PLANES + plane).reshape(-1).astype(np.uint16)


absolute_index = _symmetry_table(1, -1, 56)
"""(4672,): Black's oriented policy index -> Matrix0's on absolute squares; its own inverse. Under-promotion directions,
which are the mover's, swap."""
mirror_index = _symmetry_table(-1, 1, 7)  # (4672,): policy index after left-right mirroring; its own inverse


# Left-right mirror


def mirror_pieces(pieces: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Nibbles (..., 32) with mirrored files."""
    ranks = pieces.reshape(-1, 8, 4)[:, :, ::-1]
    swapped: NDArray[np.uint8] = (ranks >> np.uint8(4)) | (ranks << np.uint8(4))
    return swapped.reshape(pieces.shape)


def mirror_files(files: NDArray[np.int8]) -> NDArray[np.int8]:
    """Mirrored en-passant files (N,); -1 stays."""
    return np.where(files >= 0, 7 - files, files)


def mirror_records(records: Records, rows: NDArray[np.bool_]) -> Records:
    """Records (B, ...) with those of a mask (B,) mirrored."""
    records = records.copy()
    records["pieces"][rows] = mirror_pieces(records["pieces"][rows])
    records["en_passant"][rows] = mirror_files(records["en_passant"][rows])
    return records


def mirror(batch: Batch, rows: NDArray[np.bool_]) -> Batch:
    """Mirror the rows of a mask (B,) left-right: pieces, en-passant file, policy (with `policy_teacher` if present).

    Returns a new batch with sorted policy indices. ValueError for a row with castling rights: it has no mirror image.
    """
    refused = np.flatnonzero(rows & (batch["records"]["castling"] != 0))
    if len(refused):
        raise ValueError(f"row {refused[0]} has castling rights and cannot be mirrored: exclude it from rows")
    index, weight = batch["policy_index"].copy(), batch["policy_weight"].copy()
    offset = batch["policy_offset"]
    bitboard.mirror_policy(index, weight, offset, rows, mirror_index)
    records = mirror_records(batch["records"], rows)
    mirrored = {**batch, "records": records, "policy_index": index, "policy_weight": weight}
    if "policy_teacher" in batch:
        start = np.repeat(offset[:-1], np.diff(offset))
        place = (np.arange(len(index)) - start).astype(np.uint16)
        bitboard.mirror_policy(batch["policy_index"].copy(), place, offset, rows, mirror_index)
        mirrored["policy_teacher"] = batch["policy_teacher"][start + place]
    return mirrored


# Keys, ids and the split: stable for ever, as resumed runs and stored data rely on them


def position_keys(records: Records) -> list[bytes]:
    """128-bit key of each position, the same for swapped colours and, without castling rights, for mirror images."""
    pieces, files = records["pieces"], records["en_passant"]
    images, image_files = mirror_pieces(pieces), mirror_files(files)
    keys = []
    rows = zip(pieces, images, files, image_files, records["castling"], strict=True)
    for plain, image, file, image_file, castling in rows:
        key = plain.tobytes() + bytes((castling, file + 1))
        if not castling:
            key = min(key, image.tobytes() + bytes((0, image_file + 1)))
        keys.append(hashlib.blake2b(key, digest_size=16).digest())
    return keys


def position_hashes(records: Records, mirrored: bool = False) -> NDArray[np.uint64]:
    """64-bit hashes (N,) of oriented positions, `mirrored`: the same for mirror images. They may collide."""
    plain = _hash_columns(records["pieces"], records["castling"], records["en_passant"])
    if not mirrored:
        return plain
    image = _hash_columns(mirror_pieces(records["pieces"]), records["castling"], mirror_files(records["en_passant"]))
    return np.where(records["castling"] == 0, np.minimum(plain, image), plain)


def _hash_columns(
    pieces: NDArray[np.uint8], castling: NDArray[np.uint8], files: NDArray[np.int8]
) -> NDArray[np.uint64]:
    state = castling.astype(np.uint64) << np.uint64(8) | (files + 1).astype(np.uint64)
    key = np.zeros(len(pieces), np.uint64)
    for word in (*np.ascontiguousarray(pieces).view("<u8").T, state):
        key = (key ^ word) * HASH_MULTIPLIER
        key ^= key >> np.uint64(29)
    return key


def position_ids(records: Records) -> NDArray[np.uint64]:
    """Ids (N,) uint64 of positions that belong to no game, in place of game ids; equal positions share one."""
    return np.array([int.from_bytes(key[:8], "little") for key in position_keys(records)], "<u8")


def game_id(*facts: str | bytes) -> int:
    """64-bit game id, a hash of identifying facts (text, URL of a puzzle's game)."""
    digest = hashlib.blake2b(digest_size=8)
    for fact in facts:
        data = fact.encode() if isinstance(fact, str) else fact
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def in_validation(records: Records) -> NDArray[np.bool_]:
    """Mask (N,) of the validation split: records of one game in twenty, by hashed game id."""
    chosen: NDArray[np.bool_] = records["game"] // np.uint64(1 << 20) % np.uint64(1000) < VALIDATION_PER_MILLE
    return chosen
