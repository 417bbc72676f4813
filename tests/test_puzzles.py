"""Lichess puzzles: the solver's positions, nothing lost between the lines; python-chess plays them as the oracle."""

import bz2
import csv
import gzip
from pathlib import Path

import chess
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from readers import Whole, read_file, same

from matrixlib.data.shards import concat
from matrixlib.tasks.chess.importers import puzzles
from matrixlib.tasks.chess.importers.puzzles import COLUMNS, Puzzles
from matrixlib.tasks.chess.records import LAYOUT

HEADER = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags"
LINES = (
    # White sets up, Black solves in two moves; a game of Lichess
    "00sHx,q3k1nr/1pp1nQpp/3p4/1P2p3/4P3/B1PP1b2/B5PP/5K2 b k - 0 17,e8d7 a2e6 d7d8 f7f8,1760,80,83,72,"
    "mate mateIn2 middlegame short,https://lichess.org/yyznGmXs/black#34,Italian_Game",
    # castling answers the set-up move; the same as king takes rook, from another move of the same game
    "castl,r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 0 20,h8h2 e1c1,900,80,83,72,short,https://lichess.org/yyznGmXs#20,",
    "rook1,r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 20,h1h2 e8a8,901,80,83,72,short castling,,",
    # en passant right after the set-up move; under-promotion
    "passa,4k3/3p4/8/4P3/8/8/8/4K3 b - - 0 30,d7d5 e5d6 e8d7 e1d2,1500,80,83,72,enPassant long,,",
    "under,8/5P1k/8/8/8/8/K7/7q b - - 3 60,h1g1 f7f8n h7h6 f7b3,2000,80,83,72,underPromotion,,",
    "promo,7k/5P2/8/8/8/8/8/K7 b - - 3 60,h8h7 f7f8n h7h6 f8e6,2100,80,83,72,underPromotion,,",
)
BAD = {
    "x,8/8/8/8,e2e4 e7e5,900,1,1,1,short,,": "not a FEN",
    "x,8/8/8/8/8/8/8/K7 w - - 0 1,a1a2 a2a3,900,1,1,1,short,,": "not a position of chess",
    f"x,{chess.STARTING_FEN},e2e5 e7e5,900,1,1,1,short,,": "illegal move",
    f"x,{chess.STARTING_FEN},e2e4 e7e5 g1f3 e8e6,900,1,1,1,short,,": "illegal move",
    f"x,{chess.STARTING_FEN},e2e4,900,1,1,1,short,,": "no solution",
    f"x,{chess.STARTING_FEN}": "missing columns",
    "x": "missing columns",
    f"x,{chess.STARTING_FEN},e2e4 nonsense,900,1,1,1,short,,": "illegal move",
    "x,rk2r3/8/8/8/8/8/8/RK2R3 w EAea - 0 1,a1a2 a8a7,900,1,1,1,short,,": "Chess960 castling",
}


def write(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "puzzles.csv"
    path.write_text("\n".join([*([header] if header else []), *lines]) + "\n")
    return path


def solved(lines: list[str]) -> list[tuple[str, str]]:
    """(FEN, move) of every position in which the solver moves."""
    found = []
    for line in lines:
        _, fen, moves, *_ = line.split(",")
        board = chess.Board(fen)
        for number, uci in enumerate(moves.split()):
            move = board.parse_uci(uci)
            if number % 2:
                found.append((board.fen(en_passant="legal"), move.uci()))
            board.push(move)
    return found


def check(whole: Whole, lines: list[str]) -> None:
    want = solved(lines)
    assert len(whole.batch["records"]) == len(want)
    for row, (fen, move) in enumerate(want):
        assert whole.boards()[row].fen(en_passant="legal") == fen
        assert whole.policy(row) == {move: 65535}
    assert (whole.batch["records"]["result"] == 2).all()
    assert (whole.batch["records"]["wdl"] == 0).all()


def legal_lines() -> list[str]:
    return [line for line in LINES if not line.startswith("under,")]


def test_the_solver_moves_after_the_set_up_move(tmp_path):
    whole = read_file(Puzzles(), write(tmp_path, *LINES))
    check(whole, legal_lines())
    assert (whole.entries, whole.stored) == (6, 5)
    refused = whole.refused[0]
    assert (refused.entry, refused.reason, refused.positions, refused.text) == (4, "illegal move", 2, LINES[4])
    assert "move 4, 'f7b3'" in refused.detail


def test_puzzles_of_one_game_belong_together(tmp_path):
    game = read_file(Puzzles(), write(tmp_path, *LINES)).batch["records"]["game"].tolist()
    assert game[0] == game[1] == game[2]  # two positions of the first puzzle, and the second, of the same game
    assert len(set(game)) == 4  # the third is the mirror image of the second, but of no known game
    assert game[4] == game[5]


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".zst"])
def test_compressed_files_and_files_without_a_header(tmp_path, ending):
    text = "\n".join(legal_lines()).encode() + b"\n"
    packers = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}
    path = tmp_path / f"puzzles.csv{ending}"
    path.write_bytes(packers[ending](text))
    check(read_file(Puzzles(), path), legal_lines())


def test_columns_in_any_order_with_a_mark_and_windows_line_ends(tmp_path):
    rows = [dict(zip(COLUMNS, line.split(","), strict=False)) for line in legal_lines()]
    names = ("Moves", "GameUrl", "FEN")
    text = "\r\n".join([",".join(names), *(",".join(row[name] for name in names) for row in rows)])
    path = tmp_path / "other.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    check(read_file(Puzzles(), path), legal_lines())


def test_rating_and_themes_choose(tmp_path):
    path = write(tmp_path, *legal_lines())
    whole = read_file(Puzzles(min_rating=901, max_rating=1760), path)
    check(whole, [line for line in legal_lines() if line[:5] in ("00sHx", "rook1", "passa")])
    assert whole.skipped == {"rating out of range": 2}
    whole = read_file(Puzzles(themes=("enPassant", "castling")), path)
    check(whole, [line for line in legal_lines() if line[:5] in ("rook1", "passa")])
    assert whole.skipped == {"other themes": 3}
    bad = read_file(Puzzles(min_rating=5), write(tmp_path, LINES[0].replace("1760", "?")))
    assert bad.reasons == {"bad rating": 1}


def test_a_file_of_another_kind_is_named(tmp_path):
    for text in ("a,b\n1,2\n", "", f"{chess.STARTING_FEN}\n"):
        path = tmp_path / "other.csv"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"other\.csv is no Lichess puzzle CSV .*FEN, Moves"):
            list(Puzzles().parts(path))
    path.write_text("FEN,Moves\n")
    with pytest.raises(ValueError, match="Rating"):
        list(Puzzles(min_rating=1000).parts(path))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(legal_lines() + list(BAD) + ["", "  "]), max_size=12), st.booleans())
def test_every_line_is_accounted_for(tmp_path_factory, lines, header):
    first = [] if header else [LINES[0]]
    path = write(tmp_path_factory.mktemp("mixed"), *first, *lines, header=HEADER if header else "")
    entries = [line for line in (*first, *lines) if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(puzzles, "PART", 300)
        whole = read_file(Puzzles(), path)
    check(whole, [line for line in entries if line in legal_lines()])
    assert whole.entries == len(entries)
    assert {item.entry: item.reason for item in whole.refused} == {
        number: BAD[line] for number, line in enumerate(entries) if line in BAD
    }
    assert [item.text for item in whole.refused] == [line for line in entries if line in BAD]


def test_real_puzzles_of_lichess(shared: Path, monkeypatch):
    path = shared / "puzzles" / "lichess_dev.csv"
    whole = read_file(Puzzles(), path)
    with path.open() as file:
        lines = [f"x,{row['FEN']},{row['Moves']}" for row in csv.DictReader(file)]
    assert (whole.entries, whole.stored) == (len(lines), len(lines))
    check_sample(whole, lines)
    monkeypatch.setattr(puzzles, "PART", 10_000)
    again = [Puzzles().read(part).batch for part in Puzzles().parts(path)]
    assert len(again) > 10
    assert same(concat(again, LAYOUT), whole.batch)


def check_sample(whole: Whole, lines: list[str]) -> None:
    want = solved(lines)
    assert len(want) == len(whole.batch["records"])
    boards = whole.boards()
    for row in range(0, len(want), 7):
        assert boards[row].fen(en_passant="legal") == want[row][0]
        assert whole.policy(row) == {want[row][1]: 65535}
