"""PGN as python-chess understands it, and every trap of the format."""

import bz2
import gzip
import io
import random
import tracemalloc
from itertools import islice
from pathlib import Path

import chess
import chess.pgn
import pytest
import zstandard
from readers import check_batch

from matrixlib.data.imports import ParseResult, Part
from matrixlib.tasks.chess.importers import notation, pgn
from matrixlib.tasks.chess.importers.import_files import reader_of
from matrixlib.tasks.chess.importers.pgn import CONTRADICTED, Pgn, split_games
from matrixlib.tasks.chess.records import from_boards, move_from_index, policy_index, to_board
from matrixlib.tasks.chess.stockfish.labels import wdl_of_score

BOARD = ("pieces", "castling", "en_passant", "halfmove", "repetition", "side", "ply")
FOOLS = "1. f3 e5 2. g4 Qh4# 0-1"


def read(text: str | bytes, **options: bool) -> ParseResult:
    """Text, in one part."""
    result = Pgn(**options).read(Part(0, 0, text.encode() if isinstance(text, str) else text))
    check_batch(result.batch, "pgn")
    return result


def played(result: ParseResult) -> list[int]:
    """The policy index with weight of each position."""
    weight = result.batch["policy_weight"]
    assert set(weight.tolist()) <= {0, 65535}
    return result.batch["policy_index"][weight > 0].tolist()


def assert_like_python_chess(result: ParseResult, games: list[chess.pgn.Game]) -> None:
    """The records and moves are those of the boards along the main lines."""
    nodes = [list(game.mainline()) for game in games]
    assert result.rows.tolist() == list(map(len, nodes))
    boards = [node.parent.board() for line in nodes for node in line]
    moves = [node.move for line in nodes for node in line]
    expected = from_boards(boards)
    for name in BOARD:
        assert (result.batch["records"][name] == expected[name]).all(), name
    assert played(result) == [policy_index(move, board.turn) for move, board in zip(moves, boards, strict=True)]


def parsed(text: str) -> list[chess.pgn.Game]:
    file = io.StringIO(text)
    return list(iter(lambda: chess.pgn.read_game(file), None))


# Real files


@pytest.mark.parametrize(("name", "count"), [("masters.pgn", 40), ("engine_matches.pgn", 40)])
def test_real_games_as_python_chess_reads_them(shared: Path, name: str, count: int) -> None:
    whole = (shared / "games" / name).read_bytes()
    text = b"".join(tags + moves for tags, moves in list(split_games(io.BytesIO(whole)))[:count])
    result = read(text, repair=True)
    games = [game for game in parsed(text.decode()) if game.variations]
    assert result.entries == count
    assert result.skipped == ({"no moves": count - len(games)} if len(games) < count else {})
    assert_like_python_chess(result, games)


def test_parts_are_the_same_games_whatever_the_compression(shared: Path, tmp_path: Path) -> None:
    data = (shared / "games" / "masters.pgn").read_bytes()
    files = {
        "a.pgn": data,
        "b.pgn.gz": gzip.compress(data),
        "c.pgn.bz2": bz2.compress(data),
        "d.pgn.zst": zstandard.compress(data[:300_000]) + zstandard.compress(data[300_000:]),
    }
    found = []
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        parts = list(Pgn().parts(tmp_path / name))
        assert [(part.number, part.first) for part in parts] == [(0, 0), (1, 500), (2, 1000)]
        assert b"".join(part.data for part in parts) == data
        found.append([part.data for part in parts])
    assert found.count(found[0]) == len(found)
    assert [len(list(split_games(io.BytesIO(part)))) for part in found[0]] == [500, 500, 200]


TEXTS = {
    "a.pgn.gz": b"1. e4 {",
    "a.csv.bz2": b"FEN,Moves,Rating,Themes\n",
    "a.epd.zst": chess.STARTING_FEN.encode() + b" c0 ",
    "a.jsonl.gz": b"{",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_line_that_no_text_has_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(notation, "MAX_LINE_BYTES", 1 << 12)
    data = TEXTS[name] + b"x" * 10_000
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}[Path(name).suffix]
    (tmp_path / name).write_bytes(pack(data))
    with pytest.raises(ValueError, match=rf"{name}: .*has a line of more than 0 MiB"):
        list(reader_of(tmp_path / name).parts(tmp_path / name))


@pytest.mark.parametrize("ending", ["gz", "bz2", "zst"])
def test_a_file_cut_short_is_an_error_and_not_a_short_file(tmp_path: Path, ending: str) -> None:
    data = b"".join(
        b'[Event "%d"]\n\n1. e4 e5 {%d} *\n\n' % (i, random.Random(i).getrandbits(500)) for i in range(2000)
    )
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.compress}[ending]
    path = tmp_path / f"a.pgn.{ending}"
    path.write_bytes(compress(data)[:-2000])
    with pytest.raises(ValueError, match=r"a\.pgn.*damaged or cut short"):
        list(Pgn().parts(path))


# Results


def test_result_is_seen_from_the_side_to_move() -> None:
    records = read(f'[Result "0-1"]\n\n{FOOLS}\n').batch["records"]
    assert records["result"].tolist() == [-1, 1, -1, 1]
    assert records["side"].tolist() == [0, 1, 0, 1]
    assert records["wdl"].sum() == 0
    assert len(set(records["game"].tolist())) == 1


@pytest.mark.parametrize(
    ("tag", "token", "expected"),
    [
        ("1-0", "1-0", 1),
        ("1-0", "*", 1),
        ("1-0", "", 1),
        ("*", "1/2-1/2", 0),
        ("", "0-1", -1),
        ("", "", 2),
        ("??", "*", 2),
        ("1-0", "0-1", 2),
    ],
)
def test_result_from_header_or_text(tag: str, token: str, expected: int) -> None:
    header = f'[Result "{tag}"]\n\n' if tag else ""
    result = read(f"{header}1. e4 {token}\n")
    assert result.batch["records"]["result"].tolist() == [expected]
    assert sum(result.warned.values()) == ((tag, token) == ("1-0", "0-1"))


STALEMATE = ("7k/8/6K1/8/8/8/8/5Q2 w - - 0 1", "Qf7", "stalemate", "1/2-1/2")
BARE = ("7k/8/8/8/8/8/6p1/6K1 w - - 0 1", "Kxg2", "insufficient material", "1/2-1/2")
MATED = ("7k/8/6K1/8/8/8/8/5Q2 w - - 0 1", "Qf8#", "mate", "1-0")
OLD = ("7k/8/6K1/8/8/8/p7/5Q2 w - - 149 120", "Qe1", "seventy-five moves", "1/2-1/2")
FIFTH = (chess.STARTING_FEN, "Nf3 Nf6 Ng1 Ng8 " * 4, "fivefold repetition", "1/2-1/2")


@pytest.mark.parametrize(("fen", "moves", "why", "right"), [STALEMATE, BARE, MATED, OLD, FIFTH])
def test_the_board_decides_when_the_game_is_over(fen: str, moves: str, why: str, right: str) -> None:
    def game(result: str) -> str:
        return f'[SetUp "1"]\n[FEN "{fen}"]\n[Result "{result}"]\n\n{moves} {result}\n'

    wrong = read(game("0-1"))
    assert wrong.stored == 0
    assert wrong.refused[0].reason == CONTRADICTED
    assert wrong.refused[0].detail == f"claimed result 0-1, on the board {right}: {why}"
    points = {"1-0": 1, "1/2-1/2": 0}[right]
    for result in (read(game("0-1"), repair=True), read(game("*")), read(game(right))):
        assert result.batch["records"]["result"][0] == points
    almost = read(f'[FEN "{fen}"]\n[Result "0-1"]\n\n{" ".join(moves.split()[:-1])} 0-1\n')
    assert almost.refused == []


# Evaluations


def test_evaluations_become_win_draw_loss_of_the_position_after_the_move() -> None:
    text = (
        "{[%eval 0.2]} 1. e4 { [%eval 0.31] [%clk 0:01:00] } e5 (1... c5 {[%eval 9.0]}) {[%eval #-3]} 2. Nf3 {x} d5 *\n"
    )
    wdl = read(text).batch["records"]["wdl"].astype(int)
    assert wdl.sum(axis=1).tolist() == [65535, 65535, 65535, 0]
    assert wdl[0].tolist() == wdl_of_score([20])[0].tolist()
    assert wdl[1, 0] < wdl[1, 2], "0.31 pawns for White are bad for Black, who is to move"
    assert wdl[2].tolist() == [0, 0, 65535]


# Traps of the format


def moves_of(text: str) -> list[str]:
    """The games' moves as UCI, one string a game."""
    result = read(text)
    assert not result.refused, result.refused
    assert result.rows is not None
    rows = zip(result.batch["records"], played(result), strict=True)
    moves = (move_from_index(index, to_board(record)).uci() for record, index in rows)
    return [" ".join(islice(moves, length)) for length in result.rows]


@pytest.mark.parametrize(
    ("text", "games"),
    [
        ('[Event "a"]\r\n\r\n1. e4 e5\r\n2. d4 *\r\n\r\n[Event "b"]\r\n\r\n1. d4 *\r\n', ["e2e4 e7e5 d2d4", "d2d4"]),
        ('\ufeff[Event "a"]\n\n1. e4 *\n\n\ufeff[Event "b"]\n\n1. d4 *\n', ["e2e4", "d2d4"]),
        ("1. e4 e5 1-0\n\n1. d4 d5 0-1\n\n1. c4 *\n", ["e2e4 e7e5", "d2d4 d7d5", "c2c4"]),
        ("1. e4\n\ne5\n\n2. d4 *", ["e2e4 e7e5 d2d4"]),
        ("%escape\n; remark\n1. e4 ; rest } ( {\n%1. a4\ne5 *\n", ["e2e4 e7e5"]),
        ('1. e4 {\n[Event "x"]\n\n[Site "y"]\n1. d4 1-0\n\n} e5 *\n', ["e2e4 e7e5"]),
        (f"{'1.' * 5000}e4 {'1.' * 5000}1... e5 *", ["e2e4 e7e5"]),
        ('1. e4 {; not a remark} e5 ; {not a comment\n2. d4 *\n[Event "b"]\n\n1. c4 *', ["e2e4 e7e5 d2d4", "c2c4"]),
        ("1.e4 e5 *", ["e2e4 e7e5"]),
        ("1.e4 1...e5 2.Nf3$1 $2 Nc6!? 3. Ba6+! +- = *", ["e2e4 e7e5 g1f3 b8c6 f1a6"]),
        ("1. e4 d5 2. e5 f5 3. exf6e.p. *", ["e2e4 d7d5 e4e5 f7f5 e5f6"]),
        ("1. e4 d5 2. e5 f5 3. exf6 e.p. gxf6 *", ["e2e4 d7d5 e4e5 f7f5 e5f6 g7f6"]),
        ("e2e4 e7e5 g1f3 b8c6 f1b5 a7a6 e1g1 *", ["e2e4 e7e5 g1f3 b8c6 f1b5 a7a6 e1g1"]),
        ("1. e2-e4 e7-e5 2. Ng1-f3 Nb8-c6 3. Bf1xa6 bxa6 4. 0-0 *", ["e2e4 e7e5 g1f3 b8c6 f1a6 b7a6 e1g1"]),
        ("1. g4 h5 2. gxh5 a6 3. h6 a5 4. hxg7 a4 5. gxh8N *", ["g2g4 h7h5 g4h5 a7a6 h5h6 a6a5 h6g7 a5a4 g7h8n"]),
        ("1. e4 (1. d4 {) ;} d5 (1... Nf6 2. c4 (2. Nf3 1-0)) 2. c4) (1. c4) 1... e5 *", ["e2e4 e7e5"]),
        ("1. e4 e5 1-0 {White won\n\non time} $10\n\n1. d4 *", ["e2e4 e7e5", "d2d4"]),
        ('[Event "a"]\n[Site "b"]\n\n[Result "*"]\n\n1. e4 *\n', ["e2e4"]),
        ('[Event "one"]\n[Event "two"]\n\n1. e4 *\n', ["e2e4"]),
        ('  [Event "a"]\n\n  1. e4 *\n\n  [Event "b"]\n 1. d4 *\n', ["e2e4", "d2d4"]),
        ('[SetUp "0"]\n[FEN "8/8/8/8/8/8/8/8 w - - 0 1"]\n\n1. e4 *\n', ["e2e4"]),
        ('[Variant "From Position"]\n\n1. e4 *\n[Variant "Standard"]\n\n1. d4 *\n', ["e2e4", "d2d4"]),
        ("1. e4 \u2026 e5 2\u2026 d4 \u00bd-\u00bd\n", ["e2e4 e7e5 d2d4"]),
    ],
)
def test_traps(text: str, games: list[str]) -> None:
    assert moves_of(text) == games


def test_a_comment_that_is_never_closed_costs_one_game(tmp_path: Path) -> None:
    good = '[Event "b"]\n\n1. d4 {fine} d5 *\n\n'
    text = '[Event "a"]\n\n1. e4 {open e5 *\n\n' + good * (pgn.PART_GAMES + 1)
    (tmp_path / "a.pgn").write_text(text)
    parts = list(Pgn().parts(tmp_path / "a.pgn"))
    assert [part.first for part in parts] == [0, pgn.PART_GAMES]
    assert b"".join(part.data for part in parts) == text.encode()
    results = [Pgn().read(part) for part in parts]
    assert [result.entries for result in results] == [pgn.PART_GAMES, 2]
    assert [result.stored for result in results] == [pgn.PART_GAMES - 1, 2]
    (entry,) = results[0].refused
    assert (entry.reason, entry.detail) == ("broken move text", "a comment is not closed")
    assert entry.text == '[Event "a"]\n\n1. e4 {open e5 *\n\n'


def test_latin_1_bytes() -> None:
    text = '[White "M\u00fcller"]\n\n1. e4 {g\u00fcnstig} e5 \u00bd-\u00bd\n'.encode("latin-1")
    result = read(text)
    assert result.batch["records"]["result"].tolist() == [0, 0]
    refused = read(text.replace(b"e5", b"e6??x")).refused[0]
    assert "M\u00fcller" in refused.text


def test_games_that_are_left_out_are_counted_by_reason() -> None:
    atomic, chess960 = '[Variant "Atomic"]\n\n1. e4 *\n\n', '[Variant "Chess960"]\n\n1. e4 *\n\n'
    empty = '[Event "no moves"]\n[Result "1-0"]\n\n1-0\n\n[Event "nothing at all"]\n\n'
    null = '[Event "null"]\n\n1. e4 -- 2. d4 *\n\n[Event "null"]\n\n1. e4 Z0 *\n'
    result = read(atomic + chess960 + atomic + empty + null)
    assert result.skipped == {"variant Atomic": 2, "variant Chess960": 1, "no moves": 2, "null move": 2}
    assert (result.stored, result.entries, len(result.batch["records"])) == (0, 7, 0)


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("1. e4 e5 2. Ke3 *", "illegal move", "2. Ke3 is not legal"),
        ("1. e4 e4 *", "illegal move", "1... e4 is not legal"),
        ('[FEN "3k4/8/8/8/8/8/8/K3R3 w - - 0 1"]\n\n1. O-O *', "illegal move", "1. O-O is not legal"),
        ("1. Nf3 d5 2. Nc3 d4 3. Ne4 c5 4. Ng5 *", "ambiguous move", "4. Ng5 fits 2 legal moves"),
        ("1. e4 foo *", "broken move text", "'foo' is no move"),
        ("1. e4 {open", "broken move text", "a comment is not closed"),
        ("1. e4 (1. d4", "broken move text", "a variation is not closed"),
        ("1. e4 ) e5 *", "broken move text", "a variation is closed that was never opened"),
        ("1. e4 {a {b} c} e5 *", "broken move text", "a comment is closed that was never opened"),
        ("1. e4 1-0 e5 *", "broken move text", "moves go on after the result"),
        ('[FEN "8/8/8/8/8/8/8/8 w - - 0 1"]\n\n1. e4 *', "start that can't be played", "not a position"),
        ('[FEN "nonsense"]\n\n1. e4 *', "start that can't be played", "not a FEN"),
        ('[FEN "8/P6k/8/8/8/8/8/K7 w - - 0 1"]\n\n1. a8 *', "illegal move", "1. a8 is not legal"),
    ],
)
def test_faulty_games_are_refused_and_the_rest_is_stored(text: str, reason: str, detail: str) -> None:
    result = read(f'[Event "a"]\n\n1. d4 d5 1-0\n\n[Event "b"]\n{text}\n')
    assert result.stored == 1
    assert len(result.batch["records"]) == 2
    (entry,) = result.refused
    assert (entry.entry, entry.reason) == (1, reason)
    assert detail in entry.detail
    assert entry.text == f'[Event "b"]\n{text}\n'


def test_the_id_of_a_game_follows_from_its_start_and_its_moves_alone() -> None:
    one = read('[Event "a"]\n[Result "1-0"]\n\n1. e4 e5 1-0\n').batch["records"]["game"]
    other = read("e2e4 {x} e7e5 *\n").batch["records"]["game"]
    assert one.tolist() == other.tolist()
    more = read("1. e4 e5 2. d4 *\n").batch["records"]["game"]
    assert one[0] != more[0]
    black = read('[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 1"]\n\n1... Kd8 *').batch["records"]
    assert (black["side"][0], black["ply"][0]) == (1, 1)


def test_lines_that_end_with_cr_alone_are_told(tmp_path: Path) -> None:
    (tmp_path / "mac.pgn").write_bytes(b'[Event "x"]\r\r1. e4 e5 1-0\r\r')
    with pytest.raises(ValueError, match=r"mac\.pgn: its lines end with CR alone; convert it"):
        list(Pgn().parts(tmp_path / "mac.pgn"))


def test_a_game_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgn, "MAX_GAME_BYTES", 1 << 20)
    with gzip.open(tmp_path / "endless.pgn.gz", "wb", compresslevel=1) as file:
        file.write(b'[Event "x"]\n\n1. e4 e5\n')
        for _ in range(10):
            file.write((b"{ nothing at all }" * 10 + b"\n") * 5_000)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"endless\.pgn\.gz.*it has a game of more than 1 MiB, so it is no PGN"):
        list(Pgn().parts(tmp_path / "endless.pgn.gz"))
    assert tracemalloc.get_traced_memory()[1] < 5 << 20
    tracemalloc.stop()
