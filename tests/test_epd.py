"""EPD suites, also real ones with lost semicolons, and FENs for Stockfish to label."""

from pathlib import Path

import chess
import pytest
from readers import accounted, read_file

from matrixlib.tasks.chess.importers import epd
from matrixlib.tasks.chess.importers.epd import Epd, Labelled
from matrixlib.tasks.chess.stockfish.client import EngineError, Stockfish
from matrixlib.tasks.chess.stockfish.labels import wdl_of_score

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq -"
TWO_ROOKS = "4k3/8/8/8/8/8/8/R4R1K w - -"
GOOD = (
    f'{START} bm e4 d4; id "two; with a semicolon"; c0 "best by test"; ce 35;',
    f"{START} am f3 g4; ce -35;",
    "4k3/8/8/8/8/8/8/4K2R b K - ce 120;",
    '6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8#; dm 1; id "mate"; ce 9;',
    "7k/P7/8/8/8/8/8/K7 w - - hmvc 12; fmvn 70; bm a8=Q+ a8=R; ce +500;",
)
BAD = {
    f"{START} bm e5;": "illegal move",
    f"{TWO_ROOKS} bm Rd1;": "ambiguous move",
    f"{START} bm hello;": "not a move",
    f"{START} bm --;": "not a move",
    f"{START} ce much;": "bad number",
    f"{START} am a3 a4 b3 b4 c3 c4 d3 d4 e3 e4 f3 f4 g3 g4 h3 h4 Na3 Nc3 Nf3 Nh3;": "every move is avoided",
    "8/8/8/8/8/8/8/8 w - - bm e4;": "not a position of chess",
    "rubbish": "not a position of chess",
    "rk2r3/8/8/8/8/8/8/RK2R3 w EAea - bm Ra2;": "Chess960 castling",
}
LEFT_OUT = {
    "# a comment": "comment",
    f'{START} id "nothing to learn";': "neither bm, am, ce nor dm",
    "7k/5Q2/6K1/8/8/8/8/8 b - - ce 0;": "game over",
}


def write(folder, *lines):
    path = folder / "suite.epd"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_best_moves_share_the_policy_and_avoided_ones_have_none(tmp_path):
    whole = read_file(Epd(), write(tmp_path, *GOOD))
    assert whole.stored == len(GOOD)
    assert sorted(whole.policy(0).values()) == [32767, 32768]
    assert set(whole.policy(0)) == {"e2e4", "d2d4"}
    rest = whole.policy(1)
    assert set(rest) == {move.uci() for move in chess.Board().legal_moves} - {"f2f3", "g2g4"}
    assert max(rest.values()) - min(rest.values()) < 18
    assert whole.policy(2) == {}
    assert whole.policy(3) == {"d1d8": 65535}
    assert set(whole.policy(4)) == {"a7a8q", "a7a8r"}


def test_scores_are_the_movers(tmp_path):
    mates = [f"{START} dm {moves};" for moves in (-3, -40000, 40000)]
    whole = read_file(Epd(), write(tmp_path, *GOOD, f"{START} bm e4;", *mates))
    wdl = whole.batch["records"]["wdl"]
    assert wdl[[0, 1, 2, 4]].tolist() == wdl_of_score([35, -35, 120, 500]).tolist()
    assert wdl[3].tolist() == [65535, 0, 0]
    assert wdl[5].tolist() == [0, 0, 0]
    assert wdl[6:].tolist() == [[0, 0, 65535], [0, 0, 65535], [65535, 0, 0]]
    assert (whole.batch["records"]["result"] == 2).all()


def test_counters_come_from_operations_or_from_a_fen(tmp_path):
    fen = "7k/P7/8/8/8/8/8/K7 w - - 12 70 bm a8=Q;"
    found = read_file(Epd(), write(tmp_path, GOOD[4], fen, fen.replace("12 70 ", ""))).batch["records"]
    assert found["halfmove"].tolist() == [12, 12, 0]
    assert found["ply"].tolist() == [138, 138, 0]
    assert len(set(found["game"])) == 1


def test_a_lost_semicolon_is_mended_and_said(tmp_path):
    whole = read_file(Epd(), write(tmp_path, f'{START} bm e4 id "x"; am f3;', GOOD[0]))
    assert whole.warned == {"missing semicolon": 1}
    assert whole.policy(0) == {"e2e4": 65535}


@pytest.mark.parametrize("name, stored, semicolons", [("bk24", 24, 0), ("kaufman25", 25, 2), ("wac300", 300, 0)])
def test_real_suites(shared, name, stored, semicolons):
    whole = read_file(Epd(), shared / "puzzles" / f"{name}.epd")
    assert (whole.stored, whole.refused) == (stored, [])
    assert whole.warned["missing semicolon"] == semicolons
    with (shared / "puzzles" / f"{name}.epd").open() as file:
        lines = [line for line in file if line.strip() and not line.startswith("#")]
    for row, line in enumerate(lines):
        board = whole.boards()[row]
        assert board.epd() == " ".join(line.split()[:4])
        words = line.split("bm ")[1].split(";")[0].split(" id ")[0].split() if "bm " in line else []
        if words:
            assert set(whole.policy(row)) == {board.parse_san(word).uci() for word in words}


def test_a_file_of_another_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"suite\.epd has no line that starts like a FEN"):
        list(Epd().parts(write(tmp_path, "[Event x]", "1. e4 e5")))


def test_every_line_is_accounted_for(tmp_path, monkeypatch):
    monkeypatch.setattr(epd, "PART_BYTES", 150)
    lines = [GOOD[0], *BAD, "", *LEFT_OUT, *GOOD, *reversed(BAD)]
    accounted(read_file(Epd(), write(tmp_path, *lines)), [line for line in lines if line], BAD, LEFT_OUT)


# Labelled by Stockfish

BACK_RANK = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 5 40"
HANGING = "4k3/8/8/3q4/4P3/2N5/8/4K3 w - -"
POSITIONS = (
    BACK_RANK,
    f'{HANGING} bm exd5; id "queen";',
    chess.STARTING_FEN,
    chess.Board(BACK_RANK).mirror().fen(),
)
BAD_FENS = {"rubbish": "not a position of chess", "8/8/8/8/8/8/8/8 w - - 0 1": "not a position of chess"}
LEFT_OUT_FENS = {"# comment": "comment", "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1": "game over"}


def fens(folder: Path, *lines: str) -> Path:
    path = folder / "positions.fen"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_labels(tmp_path, engine: Stockfish, stockfish: Path):
    lines = [*BAD_FENS, *POSITIONS, *LEFT_OUT_FENS]
    whole = read_file(Labelled(str(stockfish)), fens(tmp_path, *lines))
    assert (whole.entries, whole.stored) == (len(lines), len(POSITIONS))
    assert [(item.entry, item.reason, item.text) for item in whole.refused] == [
        (number, reason, line) for number, (line, reason) in enumerate(BAD_FENS.items())
    ]
    assert whole.skipped == dict.fromkeys(LEFT_OUT_FENS.values(), 1)
    records = whole.batch["records"]
    assert [board.epd() for board in whole.boards()] == [" ".join(line.split()[:4]) for line in POSITIONS]
    assert max(whole.policy(0), key=whole.policy(0).get) == "d1d8"
    assert max(whole.policy(1), key=whole.policy(1).get) in ("e4d5", "c3d5")
    assert records["wdl"][0].tolist() == [65535, 0, 0]
    assert records["wdl"][2].argmax() == 1
    assert (records["result"] == 2).all()
    assert records["halfmove"].tolist() == [5, 0, 0, 5]


def test_without_an_engine_the_remedy_is_told(tmp_path):
    reader = Labelled(str(tmp_path / "no-such-stockfish"))
    with pytest.raises(EngineError, match="apt install stockfish"):
        list(reader.parts(fens(tmp_path, BACK_RANK)))
