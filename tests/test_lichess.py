"""Lichess's puzzles and evaluations, every line accounted for; python-chess is the oracle."""

import csv
import json
import math
from pathlib import Path

import chess
import pytest
from readers import Whole, accounted, read_file, same

from matrixlib.data.shards import concat
from matrixlib.tasks.chess.importers import lichess
from matrixlib.tasks.chess.importers.lichess import Evaluations, Puzzles
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.stockfish.labels import wdl_of_score

HEADER = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags"
PUZZLES = (
    # White sets up, Black solves in two moves; a game of Lichess
    "00sHx,q3k1nr/1pp1nQpp/3p4/1P2p3/4P3/B1PP1b2/B5PP/5K2 b k - 0 17,e8d7 a2e6 d7d8 f7f8,1760,80,83,72,"
    "mate mateIn2 middlegame short,https://lichess.org/yyznGmXs/black#34,Italian_Game",
    # castling answers the set-up move; the same as king takes rook, from another move of the same game
    "castl,r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 0 20,h8h2 e1c1,900,80,83,72,short,https://lichess.org/yyznGmXs#20,",
    "rook1,r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 20,h1h2 e8a8,901,80,83,72,short castling,,",
    # en passant right after the set-up move; under-promotion
    "passa,4k3/3p4/8/4P3/8/8/8/4K3 b - - 0 30,d7d5 e5d6 e8d7 e1d2,1500,80,83,72,enPassant long,,",
    "promo,7k/5P2/8/8/8/8/8/K7 b - - 3 60,h8h7 f7f8n h7h6 f8e6,2100,80,83,72,underPromotion,,",
)
VARIANT_PUZZLE = "x,rk2r3/8/8/8/8/8/8/RK2R3 w EAea - 0 1,a1a2 a8a7,900,1,1,1,short,,"
BAD_PUZZLES = {
    "x,8/8/8/8,e2e4 e7e5,900,1,1,1,short,,": "not a FEN",
    "x,8/8/8/8/8/8/8/K7 w - - 0 1,a1a2 a2a3,900,1,1,1,short,,": "not a position of chess",
    f"x,{chess.STARTING_FEN},e2e5 e7e5,900,1,1,1,short,,": "illegal move",
    f"x,{chess.STARTING_FEN},e2e4 e7e5 g1f3 e8e6,900,1,1,1,short,,": "illegal move",
    f"x,{chess.STARTING_FEN},e2e4 nonsense,900,1,1,1,short,,": "illegal move",
    f"x,{chess.STARTING_FEN},e2e4,900,1,1,1,short,,": "no solution",
    f"x,{chess.STARTING_FEN}": "no solution",
}


def write(folder: Path, *lines: str, name: str = "puzzles.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([*([HEADER] if name == "puzzles.csv" else []), *lines]) + "\n", encoding="utf-8")
    return path


def check(whole: Whole, lines: list[tuple[str, str]], every: int = 1) -> None:
    """The solver's positions and moves of puzzles (FEN, moves), in order."""
    want = []
    for fen, moves in lines:
        board = chess.Board(fen)
        for number, uci in enumerate(moves.split()):
            move = board.parse_uci(uci)
            if number % 2:
                want.append((board.fen(en_passant="legal"), move.uci()))
            board.push(move)
    assert len(whole.batch["records"]) == len(want)
    boards = whole.boards()
    for row in range(0, len(want), every):
        assert boards[row].fen(en_passant="legal") == want[row][0]
        assert whole.policy(row) == {want[row][1]: 65535}
    assert (whole.batch["records"]["result"] == 2).all()
    assert (whole.batch["records"]["wdl"] == 0).all()


def facts(lines: list[str]) -> list[tuple[str, str]]:
    return [(line.split(",")[1], line.split(",")[2]) for line in lines]


def test_the_solver_moves_after_the_set_up_move_and_one_game_stays_together(tmp_path):
    whole = read_file(Puzzles(), write(tmp_path, *PUZZLES))
    check(whole, facts(list(PUZZLES)))
    game = whole.batch["records"]["game"].tolist()
    assert game[0] == game[1] == game[2]  # two positions of the first puzzle, and the second, of the same game
    assert len(set(game)) == 4  # the third is the mirror image of the second, but of no known game


def test_columns_in_any_order_with_a_mark_and_windows_line_ends(tmp_path):
    text = "\r\n".join(["Moves,GameUrl,FEN", *(f"{moves},,{fen}" for fen, moves in facts(list(PUZZLES)))])
    (tmp_path / "other.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    check(read_file(Puzzles(), tmp_path / "other.csv"), facts(list(PUZZLES)))


def test_every_puzzle_is_accounted_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lichess, "PART_BYTES", 300)
    lines = [PUZZLES[0], *BAD_PUZZLES, "", VARIANT_PUZZLE, *PUZZLES, "  ", *reversed(BAD_PUZZLES), PUZZLES[1]]
    whole = read_file(Puzzles(), write(tmp_path, *lines))
    check(whole, facts([line for line in lines if line in PUZZLES]))
    accounted(whole, [line for line in lines if line.strip()], BAD_PUZZLES, {VARIANT_PUZZLE: "Chess960 castling"})


def test_real_puzzles_in_parts_of_any_size(shared: Path, monkeypatch):
    path = shared / "puzzles" / "lichess_dev.csv"
    whole = read_file(Puzzles(), path)
    with path.open() as file:
        check(whole, [(row["FEN"], row["Moves"]) for row in csv.DictReader(file)], every=7)
    assert whole.entries == whole.stored
    monkeypatch.setattr(lichess, "PART_BYTES", 10_000)
    again = [Puzzles().read(part).batch for part in Puzzles().parts(path)]
    assert len(again) > 10
    assert same(concat(again, LAYOUT), whole.batch)


# Evaluations; as Lichess publishes them, variations cut to two moves: Black to move, a mate with several evaluations

BLACK = (
    '{"fen":"7r/1p3k2/p1bPR3/5p2/2B2P1p/8/PP4P1/3K4 b - -","evals":[{"pvs":[{"cp":69,"line":"f7g7 e6e2"},'
    '{"cp":163,"line":"h8d8 d1e1"}],"knodes":4189972,"depth":46}]}'
)
MATE = (
    '{"fen":"6k1/6p1/8/4K3/4NN2/8/8/8 w - -","evals":[{"pvs":[{"mate":20,"line":"e4g5 g8f8"}],"knodes":74318,'
    '"depth":34},{"pvs":[{"mate":15,"line":"e5e6 g8f8"},{"cp":900,"line":"e4g5 g8f8"}],"knodes":589893,"depth":95}]}'
)


def evaluation(fen: str = "4k3/8/8/8/8/8/8/4K3 w - -", **pv: object) -> str:
    return json.dumps({"fen": fen, "evals": [{"pvs": [pv] if pv else [], "depth": 9}]})


BAD = {
    "{": "not JSON",
    "[" * 100_000: "not JSON",
    "\u00e9": "not JSON",
    "[]": "fields are missing",
    '{"fen": "x"}': "fields are missing",
    '{"fen":"4k3/8/8/8/8/8/8/4K3 w - -","evals":[]}': "fields are missing",
    evaluation(): "fields are missing",
    evaluation(cp=1, line=""): "fields are missing",
    evaluation(line="e1e2"): "fields are missing",
    evaluation(cp=1.5, line="e1e2"): "fields are missing",
    evaluation(cp=1, line="e1e3"): "illegal move",
    evaluation("4k3/8/8/8/8/8/8/8 w - -", cp=1, line="e1e2"): "not a position of chess",
    evaluation("mate", cp=1, line="e1e2"): "not a FEN",
}
VARIANT = evaluation("rk2r3/8/8/8/8/8/8/RK2R3 w EAea -", cp=1, line="a1a2")


def evaluated(folder: Path, *lines: str) -> Whole:
    return read_file(Evaluations(), write(folder, *lines, name="evals.jsonl"))


def shares(**behind: float) -> dict[str, float]:
    """Softmax at 50 centipawns of moves that are so many centipawns behind the best."""
    weight = {uci: math.exp(-cp / 50) for uci, cp in behind.items()}
    return {uci: value / sum(weight.values()) for uci, value in weight.items()}


def near(found: dict[str, int], want: dict[str, float]) -> bool:
    return found.keys() == want.keys() and all(abs(found[uci] / 65535 - want[uci]) < 0.02 for uci in want)


def test_scores_are_whites_and_the_record_the_movers(tmp_path):
    whole = evaluated(tmp_path, BLACK)
    # +0.69 for White is the better one for Black, who loses by it.
    assert near(whole.policy(0), shares(f7g7=0, h8d8=94))
    assert whole.batch["records"]["wdl"].tolist() == wdl_of_score(-69).tolist()
    assert whole.batch["records"]["wdl"][0, 2] > whole.batch["records"]["wdl"][0, 0]
    assert whole.batch["records"]["result"].tolist() == [2]
    assert whole.boards()[0].fen().startswith("7r/1p3k2/p1bPR3/5p2/2B2P1p/8/PP4P1/3K4 b - - 0 1")


def test_mates_beat_scores_and_the_deepest_evaluation_counts(tmp_path):
    whole = evaluated(tmp_path, MATE)
    assert whole.policy(0) == {"e5e6": 65535}
    assert whole.batch["records"]["wdl"].tolist() == [[65535, 0, 0]]
    pvs = [{"mate": -3, "line": "f2f3"}, {"mate": -1, "line": "h2h4"}]
    line = {"fen": "6k1/8/8/8/8/8/r4PPP/6K1 w - -", "evals": [{"depth": 9, "pvs": pvs}]}
    whole = evaluated(tmp_path, json.dumps(line))
    assert whole.batch["records"]["wdl"].tolist() == [[0, 0, 65535]]
    assert near(whole.policy(0), shares(f2f3=0, h2h4=100))


@pytest.mark.parametrize("side, short, long", [("w", "e1h1", "e1a1"), ("b", "e8h8", "e8a8")])
def test_castling_is_written_as_king_takes_rook(tmp_path, side, short, long):
    pvs = [{"cp": 0, "line": short}, {"cp": 0, "line": long}]
    line = {"fen": f"r3k2r/p6p/8/8/8/8/P6P/R3K2R {side} KQkq -", "evals": [{"pvs": pvs, "depth": 22}]}
    rank = short[1]
    assert evaluated(tmp_path, json.dumps(line)).policy(0).keys() == {f"e{rank}g{rank}", f"e{rank}c{rank}"}


def test_every_line_is_accounted_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lichess, "PART_BYTES", 400)
    lines = [BLACK, *BAD, "", VARIANT, MATE, BLACK, *reversed(BAD), MATE]
    whole = evaluated(tmp_path, *lines)
    accounted(whole, [line for line in lines if line], BAD, {VARIANT: "Chess960 castling"})


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "", f"{chess.STARTING_FEN}\n", "FEN,eval\n"])
def test_a_file_of_another_kind_is_named(tmp_path, text):
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.csv is no Lichess puzzle CSV.*FEN and Moves"):
        list(Puzzles().parts(path))
    with pytest.raises(ValueError, match=r"other\.csv has no JSON object"):
        list(Evaluations().parts(path))
