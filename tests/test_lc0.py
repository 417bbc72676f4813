"""Leela's training data, written here from its published description; python-chess is the oracle."""

import gzip
import io
import random
import re
import struct
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest
from positions import HARD, KIWIPETE
from readers import Whole, read_file

from matrixlib.tasks.chess.importers import planes as lc0
from matrixlib.tasks.chess.importers.planes import Lc0
from matrixlib.tasks.chess.lc0.moves import move_name

FULL = 2**64 - 1
SYMMETRIC = "8/8/8/3k4/8/2R5/5q2/K7 w - - 0 1"


# A small writer of the format, sharing nothing with the reader


def names() -> list[str]:
    """The 1,858 moves: those of a queen and a knight by squares, then promotions to queen, rook and bishop."""
    found = []
    for s in chess.SQUARES:
        board = chess.Board(None)
        board.set_piece_at(s, chess.Piece(chess.QUEEN, chess.WHITE))
        reach = board.attacks(s)
        board.set_piece_at(s, chess.Piece(chess.KNIGHT, chess.WHITE))
        found += [chess.SQUARE_NAMES[s] + chess.SQUARE_NAMES[t] for t in sorted(reach | board.attacks(s))]
    for file in range(8):
        for other in range(max(file - 1, 0), min(file + 1, 7) + 1):
            found += [f"{'abcdefgh'[file]}7{'abcdefgh'[other]}8{piece}" for piece in "qrb"]
    return found


NAMES = {name: number for number, name in enumerate(names())}


def moved(square: int, transform: int) -> int:
    file, rank = square % 8, square // 8
    if transform & 1:
        file = 7 - file
    if transform & 2:
        rank = 7 - rank
    if transform & 4:
        file, rank = 7 - rank, 7 - file
    return rank * 8 + file


def moved_mask(mask: int, transform: int) -> int:
    return sum(1 << moved(s, transform) for s in chess.scan_forward(mask))


def reversed_bytes(mask: int) -> int:
    """The bits of each byte the other way round, as planes stand in the file."""
    return sum(1 << (s ^ 7) for s in chess.scan_forward(mask))


def chosen_transform(board: chess.Board) -> int:
    """King of the mover to the right, without pawns also down and below the diagonal from h1 to a8."""
    if board.clean_castling_rights():
        return 0
    king = board.king(board.turn)
    assert king is not None
    king = king if board.turn else king ^ 56
    transform = 1 if king % 8 < 4 else 0
    if board.pawns:
        return transform
    transform |= 2 if king // 8 >= 4 else 0
    turned = moved(king, transform)
    return transform | (4 if turned // 8 > 7 - turned % 8 else 0)


def thirteen(board: chess.Board, us: chess.Color, repeated: bool, transform: int) -> list[int]:
    masks = [board.pieces_mask(kind, color) for color in (us, not us) for kind in range(1, 7)]
    masks = [mask if us else chess.flip_vertical(mask) for mask in masks]
    return [moved_mask(mask, transform) for mask in masks] + [FULL if repeated else 0]


def history(boards: list[chess.Board], form: int, transform: int) -> list[int]:
    """The 104 planes of the last board, of which those of more than one ply ago are not used; a game that starts from a
    FEN is filled up with that position."""
    now = boards[-1]
    planes = thirteen(now, now.turn, any(board.epd() == now.epd() for board in boards[:-1]), transform)
    before = boards[-2:][0].copy()
    if len(boards) == 1 and before.ep_square is not None:
        up = 8 if before.turn else -8
        before.remove_piece_at(before.ep_square - up)
        before.set_piece_at(before.ep_square + up, chess.Piece(chess.PAWN, not before.turn))
    if form < 3 and (len(boards) > 1 or now.fen() != chess.STARTING_FEN):
        planes += thirteen(before, now.turn, False, transform)
    return planes + [0] * (104 - len(planes))


def number_of(board: chess.Board, move: chess.Move, transform: int, legacy: bool) -> int:
    s, t = move.from_square, move.to_square
    if board.is_castling(move) and not legacy:
        t = chess.square(7 if chess.square_file(t) == 6 else 0, chess.square_rank(t))
    if not board.turn:
        s, t = s ^ 56, t ^ 56
    name = chess.SQUARE_NAMES[moved(s, transform)] + chess.SQUARE_NAMES[moved(t, transform)]
    return NAMES[name + {None: "", 2: "", 3: "b", 4: "r", 5: "q"}[move.promotion]]


def pack(
    boards: list[chess.Board],
    form: int,
    shares: dict[str, float],
    value: tuple[float, float] = (0.25, 0.5),
    best: tuple[float, float] = (0.5, 0.25),
    white: int = 0,
    flags: int = 0,
    legacy: bool = False,
) -> bytes:
    """One record of a game whose positions so far are `boards`; value and best are (q, d)."""
    board = boards[-1]
    transform = chosen_transform(board) if form >= 3 else 0
    probabilities = [-1.0] * 1858
    for move in board.legal_moves:
        probabilities[number_of(board, move, transform, legacy)] = shares.get(move.uci(), 0.0)
    us, them = board.turn, not board.turn
    rights = [
        board.has_queenside_castling_rights(us),
        board.has_kingside_castling_rights(us),
        board.has_queenside_castling_rights(them),
        board.has_kingside_castling_rights(them),
    ]
    castling = [int(right) << (7 * (k % 2) if form >= 2 else 0) for k, right in enumerate(rights)]
    side = int(not us)
    if form >= 3:
        flags |= transform | side << 7
        file = None if board.ep_square is None else board.ep_square % 8
        side = 0 if file is None else 1 << (7 - file if transform & 1 else file)
    planes = [reversed_bytes(plane) for plane in history(boards, form, transform)]
    result = white if us else -white
    nan = float("nan")
    return struct.pack(
        "<II1858f104Q8B15fIHHfI",
        *(6, form, *probabilities, *planes, *castling, side, min(board.halfmove_clock, 255), flags, 0),
        *(value[0], best[0], value[1], best[1], 10.0, 9.0, 30.0, float(result), float(result == 0)),
        *(0.0, 0.5, 8.0, nan, nan, nan, 800, 0, 0, 0.1, 0),
    )


def random_shares(board: chess.Board, rng: random.Random) -> dict[str, float]:
    visits = {move.uci(): rng.choice([0, 0, 1, 5, 300]) for move in board.legal_moves}
    visits[next(iter(visits))] += 1
    return {uci: count / sum(visits.values()) for uci, count in visits.items()}


def play(fen: str, plies: int, seed: int) -> tuple[list[chess.Board], list[dict[str, float]]]:
    """Positions of a random game that likes to go back and forth, and a policy for each."""
    rng = random.Random(seed)
    board = chess.Board(fen)
    boards, shares = [], []
    for _ in range(plies):
        moves = list(board.legal_moves)
        if not moves:
            break
        boards.append(board.copy(stack=False))
        shares.append(random_shares(board, rng))
        last = board.move_stack[-2] if len(boards) > 2 else chess.Move.null()
        back = [move for move in moves if (move.to_square, move.from_square) == (last.from_square, last.to_square)]
        board.push(rng.choice(back if back and rng.random() < 0.3 else moves))
    return boards, shares


Game = tuple[bytes, list[chess.Board], list[dict[str, float]]]


def game(fen: str, plies: int, seed: int, form: int, **options: Any) -> Game:
    boards, shares = play(fen, plies, seed)
    data = [pack(boards[: k + 1], form, shares[k], **options) for k in range(len(boards))]
    return b"".join(data), boards, shares


def write(folder: Path, data: bytes, name: str = "training.1.gz") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(data))
    return path


def check(whole: Whole, boards: list[chess.Board], shares: list[dict[str, float]], white: int = 0) -> None:
    records = whole.batch["records"]
    assert len(records) == len(boards), whole.refused[:2]
    seen: Counter[str] = Counter()
    for row, (board, found) in enumerate(zip(boards, whole.boards(), strict=True)):
        assert found.epd(en_passant="legal") == board.epd(en_passant="legal")
        assert found.halfmove_clock == min(board.halfmove_clock, 255)
        assert records["repetition"][row] == min(seen[board.epd()], 1)
        assert records["result"][row] == (white if board.turn else -white)
        seen[board.epd()] += 1
        want = {uci: share for uci, share in shares[row].items() if share}
        policy = whole.policy(row)
        assert policy.keys() == want.keys()
        assert all(abs(policy[uci] / 65535 - share) < 1e-3 for uci, share in want.items())


# The reader


def test_the_moves_are_leelas():
    assert len(NAMES) == 1858
    known = {"a1b1": 0, "a1h8": 22, "b1a1": 23, "h8g8": 1791, "a7a8q": 1792, "a7b8b": 1797, "h7h8b": 1857}
    assert {name: NAMES[name] for name in known} == known
    assert [move_name(number) for number in range(1858)] == list(NAMES)


@pytest.mark.parametrize("form", [1, 2, 3, 4, 5])
def test_games(tmp_path, form):
    data, boards, shares = game(chess.STARTING_FEN, 90, form, form, white=1)
    whole = read_file(Lc0(), write(tmp_path, data))
    check(whole, boards, shares, white=1)
    records = whole.batch["records"]
    assert len(set(records["game"])) == 1
    assert records["ply"].tolist() == list(range(len(boards)))
    assert records["repetition"].max() == 1
    assert (whole.entries, whole.refused, whole.skipped) == (len(boards), [], {})


@pytest.mark.parametrize("form", [1, 3, 5])
@pytest.mark.parametrize("fen", [KIWIPETE, *HARD[2:14:2], *HARD[25:30]])
def test_hard_positions(tmp_path, fen, form):
    for start in (chess.Board(fen), chess.Board(fen).mirror()):
        data, boards, shares = game(start.fen(), 12, form, form, white=-1)
        check(read_file(Lc0(), write(tmp_path, data)), boards, shares, white=-1)


def test_every_square_of_the_king_is_turned_back(tmp_path):
    boards, data = [], b""
    for king in chess.SQUARES:
        other = next(s for s in (0, 7, 63) if chess.square_distance(king, s) > 2)
        board = chess.Board(None)
        board.set_piece_map({king: chess.Piece.from_symbol("K"), other: chess.Piece.from_symbol("k")})
        knight = next(s for s in (17, 22, 41, 46) if s != king)
        board.set_piece_at(knight, chess.Piece.from_symbol("n"))
        board = board if king % 3 else board.mirror()
        boards.append(board)
        data += pack([board], 4, random_shares(board, random.Random(king)))
    shares = [random_shares(board, random.Random(king)) for king, board in enumerate(boards)]
    assert {chosen_transform(board) for board in boards} == set(range(8))
    check(read_file(Lc0(), write(tmp_path, data)), boards, shares)


def test_castling_as_older_programs_wrote_it(tmp_path):
    for fen in (KIWIPETE, chess.Board(KIWIPETE).mirror().fen()):
        data, boards, shares = game(fen, 1, 3, 1, legacy=True)
        shares[0] = dict.fromkeys(shares[0], 0.0) | {boards[0].parse_san("O-O-O").uci(): 1.0}
        data = pack(boards, 1, shares[0], legacy=True)
        check(read_file(Lc0(), write(tmp_path, data)), boards, shares)


def test_values_are_the_movers(tmp_path):
    boards, shares = play(chess.STARTING_FEN, 2, 1)
    data = b"".join(pack(boards[: k + 1], 1, shares[k], value=(0.2, 0.4), best=(-1.0, 0.0), white=1) for k in range(2))
    root = read_file(Lc0(), write(tmp_path, data)).batch["records"]
    assert np.allclose(root["wdl"] / 65535, [0.4, 0.4, 0.2], atol=1e-4)
    assert root["result"].tolist() == [1, -1]
    best = read_file(Lc0(value="best"), write(tmp_path, data)).batch["records"]
    assert best["wdl"].tolist() == [[0, 0, 65535]] * 2


def test_a_game_that_was_cut_off_has_no_result_and_deleted_records_are_counted(tmp_path):
    boards, shares = play(chess.STARTING_FEN, 2, 1)
    data = pack(boards[:1], 1, shares[0], flags=16 | 32) + pack(boards, 1, shares[1], flags=64)
    whole = read_file(Lc0(), write(tmp_path, data))
    assert whole.batch["records"]["result"].tolist() == [2]
    assert whole.skipped == {"marked for deletion": 1}


# What can't be used


def broken() -> dict[str, bytes]:
    """Records by what is wrong with each."""
    board = chess.Board()
    shares = random_shares(board, random.Random(1))
    good = pack([board], 1, shares)
    plain = pack([chess.Board(SYMMETRIC)], 3, {"a1b1": 1.0})

    def patched(record: bytes, at: int, form: str, *values: float) -> bytes:
        return record[:at] + struct.pack(form, *values) + record[at + struct.calcsize(form) :]

    first = 8 + 4 * NAMES["e2e4"]
    return {
        "unknown input format": patched(good, 4, "<I", 9),
        "Armageddon rules": patched(plain, 4, "<I", 133),
        "another version within the file": patched(good, 0, "<I", 5),
        "not a position of chess": patched(good, 8 + 7432 + 5 * 8, "<Q", 0),
        "transform is no symmetry": patched(pack([board], 3, shares), 8 + 7432 + 832 + 6, "<B", 1),
        "Chess960 castling": patched(pack([board], 3, shares), 8 + 7432 + 832, "<B", 2),
        "castling without king or rook": patched(pack([chess.Board(HARD[33])], 1, {}), 8 + 7432 + 832, "<B", 1),
        "several en-passant files": patched(plain, 8 + 7432 + 832 + 4, "<B", 3),
        "value is no probability": patched(good, 8280, "<f", 1.5),
        "result is neither win, draw nor loss": patched(good, 8280 + 7 * 4, "<f", 0.5),
        "policy does not sum to 1": patched(good, first, "<f", 0.9),
        "policy is not finite": patched(good, first, "<f", float("nan")),
        "legal moves differ": patched(good, 8 + 4 * NAMES["e2e5"], "<f", 0.0),
        "a legal move is missing": pack([board], 1, {"d2d4": 1.0})[: 8 + 4 * NAMES["e2e4"]]
        + struct.pack("<f", -1)
        + pack([board], 1, {"d2d4": 1.0})[12 + 4 * NAMES["e2e4"] :],
    }


BROKEN = broken()
SAID = {"policy is not finite": "policy does not sum to 1", "a legal move is missing": "legal moves differ"}


def test_every_record_is_accounted_for(tmp_path):
    good = pack([chess.Board()], 1, {"e2e4": 1.0})
    records = {"good": good, "deleted": good[: 8 + 7432 + 832 + 6] + b"\x40" + good[8 + 7432 + 832 + 7 :], **BROKEN}
    kinds = ["good", *BROKEN, "deleted", "good", "deleted", *reversed(BROKEN)]
    whole = read_file(Lc0(), write(tmp_path, b"".join(records[kind] for kind in kinds) + good[:100]))
    assert (whole.entries, whole.stored) == (len(kinds) + 1, 2)
    assert whole.skipped == {"marked for deletion": 2}
    want = {n: SAID.get(kind, kind) for n, kind in enumerate(kinds) if kind in BROKEN} | {len(kinds): "cut short"}
    assert {item.entry: item.reason for item in whole.refused} == want
    for item in whole.refused:
        if item.reason == "legal moves differ":
            assert re.search("in one list only: e2e[45]", item.detail)
            assert chess.Board(item.text).epd() == chess.Board().epd()


def test_a_file_that_is_cut_short_gives_what_is_whole(tmp_path):
    data, _, _ = game(chess.STARTING_FEN, 20, 2, 1)
    whole = read_file(Lc0(), write(tmp_path, data))
    path = tmp_path / "cut.gz"
    packed = gzip.compress(data)
    for length in range(30, len(packed), len(packed) // 9):
        path.write_bytes(packed[:length])
        cut = read_file(Lc0(), path)
        assert cut.reasons == {"cut short": 1}
        assert cut.entries == cut.stored + 1
        assert (cut.batch["policy_weight"] == whole.batch["policy_weight"][: len(cut.batch["policy_weight"])]).all()
    path.write_bytes(packed[:-8])  # every record is there, only the checksum is not
    assert read_file(Lc0(), path).reasons == {"cut short": 1}
    path.write_bytes(packed + bytes(100))  # padded
    assert (read_file(Lc0(), path).stored, read_file(Lc0(), path).reasons) == (20, {})
    path.write_bytes(packed + b"junk")
    assert (read_file(Lc0(), path).stored, read_file(Lc0(), path).reasons) == (20, {"cut short": 1})
    path.write_bytes(packed[:-8] + bytes(8))
    assert (read_file(Lc0(), path).stored, read_file(Lc0(), path).reasons) == (0, {"cut short": 1})


@pytest.mark.parametrize("version", [3, 4, 5, 7])
def test_other_versions_are_named(tmp_path, version):
    whole = read_file(Lc0(), write(tmp_path, struct.pack("<I", version) + bytes(8272)))
    assert whole.reasons == {f"version {version} of the format": 1}
    assert "rescorer" in whole.refused[0].detail


def test_files_of_another_kind_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"training\.1\.gz holds no training data of Lc0"):
        list(Lc0().parts(write(tmp_path, b"1. e4 e5 2. Nf3")))
    cut = tarred(tmp_path / "cut.tar", {"1.gz": gzip.compress(game(chess.STARTING_FEN, 30, 5, 1)[0], 0)})
    for data in (b"no archive" * 100, cut.read_bytes()[:50_000]):
        (tmp_path / "x.tar").write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.tar is cut short or no \.tar file"):
            list(Lc0().parts(tmp_path / "x.tar"))


def tarred(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        folder = tarfile.TarInfo("run")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members.items():
            info = tarfile.TarInfo(f"run/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_a_tar_holds_games(tmp_path):
    one, boards, _ = game(chess.STARTING_FEN, 30, 5, 1)
    two, more, _ = game(KIWIPETE, 30, 6, 4)
    old = gzip.compress(struct.pack("<I", 5) + bytes(8304))
    members = {"1.gz": gzip.compress(one), "LICENSE": b"free", "2.gz": old, "3.gz": gzip.compress(two), "4.gz": b"junk"}
    whole = read_file(Lc0(), tarred(tmp_path / "games.tar", members))
    assert whole.entries == len(boards) + 1 + 1 + len(more) + 1
    assert whole.skipped == {"not a game": 1}
    assert whole.reasons == {"version 5 of the format": 1, "cut short": 1}
    ids = whole.batch["records"]["game"]
    assert len(set(ids)) == 2
    assert [b.epd() for b in whole.boards()] == [b.epd(en_passant="legal") for b in boards + more]
    alone = read_file(Lc0(), write(tmp_path, one))
    assert alone.batch["records"]["game"][0] == ids[0]
    assert whole.parts == 5


def test_more_than_a_game_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lc0, "MAX_GAME_BYTES", 1 << 16)
    (tmp_path / "training.1.gz").write_bytes(gzip.compress(bytes(40_000)) * 3)
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("training.2.gz")
        member.size = 1 << 18
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    for name, message in (("training.1.gz", "holds more than"), ("a.tgz", r"'training\.2\.gz' in it has more than")):
        with pytest.raises(ValueError, match=rf"{name} {message} 0 MiB: no game"):
            list(Lc0().parts(tmp_path / name))
