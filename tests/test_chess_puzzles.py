"""Puzzles and EPD suites: files, baselines, whole lines, intervals; python-chess is the oracle."""

import gzip
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import chess
import pytest
import zstandard
from networks import material_net, random_net
from positions import random_positions

from matrixlib.tasks.chess.evaluate import puzzles
from matrixlib.tasks.chess.evaluate.puzzles import Puzzle

MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1"
FREE_QUEEN = "4k3/8/8/3q4/4P3/2N5/8/4K3 w - - 0 1"


def test_one_ply_takes_the_queen_prefers_mate_and_knows_stalemate() -> None:
    """The value is the opponent's: a search that maximises it hangs the queen."""
    boards = [chess.Board(FREE_QUEEN), chess.Board(FREE_QUEEN).mirror(), chess.Board(MATE_IN_ONE)]
    trap = chess.Board("k7/8/1Q6/8/8/8/8/7K w - - 0 1")
    moves = puzzles.one_ply(material_net(), [*boards, trap, chess.Board("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1")])
    assert moves[0] in ("e4d5", "c3d5")
    assert moves[1] in ("e5d4", "c6d4")
    assert moves[2] == "d1d8"
    trap.push_uci(moves[3] or "")
    assert not trap.is_stalemate()
    assert moves[4] is None


def test_any_mate_counts_where_the_answer_mates() -> None:
    board = chess.Board("6k1/5ppp/8/8/8/8/5PPP/2RR2K1 w - - 0 1")
    puzzle = Puzzle(board, (chess.Move.from_uci("c1c8"),), 600)
    tries = ["d1d8", "c1c7", None]
    assert [puzzles.is_correct(board, puzzle, 0, move) for move in tries] == [True, False, False]


def test_best_capture_takes_the_most_valuable_piece() -> None:
    assert puzzles.best_capture(chess.Board(FREE_QUEEN)) in ("c3d5", "e4d5")
    assert puzzles.best_capture(chess.Board()) is None
    assert puzzles.best_capture(chess.Board("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 1")) == "e5d6"


def puzzle(line: str, rating: int = 1200, themes: tuple[str, ...] = ()) -> Puzzle:
    """From the start of the game."""
    return Puzzle(chess.Board(), tuple(chess.Move.from_uci(uci) for uci in line.split()), rating, themes)


def player(answers: dict[str, str]) -> puzzles.Solver:
    """Plays by the position's placement of men, the first legal move elsewhere."""

    def solve(boards: Sequence[chess.Board]) -> list[str | None]:
        return [answers.get(board.board_fen(), next(iter(board.legal_moves)).uci()) for board in boards]

    return solve


def test_a_line_needs_all_of_its_moves() -> None:
    start, second = chess.Board(), chess.Board()
    for uci in ("e2e4", "e7e5"):
        second.push_uci(uci)
    long, short, other = puzzle("e2e4 e7e5 g1f3"), puzzle("e2e4"), puzzle("d2d4")
    half = player({start.board_fen(): "e2e4"})
    first, whole = puzzles.grade(half, [long, short, other])
    assert (first.tolist(), whole.tolist()) == ([True, True, False], [False, True, False])
    full = player({start.board_fen(): "e2e4", second.board_fen(): "g1f3"})
    assert puzzles.grade(full, [long, short, other])[1].tolist() == [True, True, False]
    assert long.board == chess.Board(), "the puzzles stay as they are"


def test_shares_by_rating_and_theme() -> None:
    items = [puzzle("e2e4", 900, ("fork",)) for _ in range(25)] + [puzzle("d2d4", 1600, ("pin", "fork"))]
    solver = player({chess.Board().board_fen(): "e2e4"})
    table = puzzles.solve_rates({"one": solver}, items).droplevel("solver")
    assert table["first move"].to_dict() == {  # without pins: one puzzle says nothing about a theme
        "all": 96.2,
        "1-1000": 100.0,
        "1500-2000": 0.0,
        "fork": 96.2,
    }
    assert table.loc["all", ["first move low", "first move high"]].tolist() == [81.1, 99.3], "Wilson's"
    assert list(table["puzzles"]) == [26, 25, 1, 26]
    assert puzzles.solve_rates({"one": solver}, []).empty


def test_a_search_solves_more_with_more_simulations() -> None:
    net = material_net()
    by = puzzles.solvers(net, [0, 64])
    assert list(by) == ["best capture", "policy", "one-ply value", "search 0", "search 64"]
    items = [
        Puzzle(board, (chess.Move.from_uci(uci),), 1000)
        for board, uci in ((chess.Board(MATE_IN_ONE), "d1d8"), (chess.Board(FREE_QUEEN), "c3d5"))
    ]
    result = puzzles.solve_rates(by, items).loc["all", "first move"]
    assert result["search 64"] == 100
    assert result["best capture"] <= 50
    drawn = chess.Board("4k3/8/8/3q4/8/8/5N2/4K2R w - - 100 90")
    with pytest.raises(ValueError, match=r"over in '4k3.* 100 90': 1/2-1/2"):
        puzzles.searcher(random_net(), 8)([chess.Board(), drawn])


def test_many_trees_are_searched_one_leaf_at_a_time() -> None:
    """Virtual loss costs strength: of 300 puzzles maia-1900 solves 65 % at 16 simulations, with 8 leaves 60 %."""
    net, sizes = random_net(), list[int]()
    net.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    puzzles.searcher(net, 16)([chess.Board(FREE_QUEEN), chess.Board(), chess.Board(MATE_IN_ONE).mirror()])
    assert max(sizes) <= 3
    assert len(sizes) >= 16


def test_threads_search_puzzles_beside_each_other_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puzzles, "FEWEST_TREES", 4)
    net, boards, beside = random_net(), random_positions(8, seed=5), threading.Barrier(2)
    alone = puzzles.searcher(net, 16)(boards)
    net.runtime = replace(net.runtime, threads=2)
    net.model.register_forward_pre_hook(lambda *_: [beside.wait(60)].clear())
    assert puzzles.searcher(net, 16)(boards) == alone


def test_suites_are_read_and_solved(tmp_path: Path, shared: Path) -> None:
    assert len(puzzles.read_epd(shared / "puzzles" / "wac300.epd")) == 300
    path = tmp_path / "own.epd"
    path.write_text(
        "# a comment\n\n"
        '6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8+; id "mate";\n'
        "4k3/8/8/3q4/4P3/2N5/8/4K3 w - - bm exd5 Nxd5;\n"
        "4k3/8/8/3q4/4P3/2N5/8/4K3 w - - am Nxd5;\n"
    )
    items = puzzles.read_epd(path)
    assert len(items) == 3
    assert {move.uci() for move in items[1].answers} == {"e4d5", "c3d5"}
    table = puzzles.solve_rates(puzzles.solvers(material_net(), [64]), items)
    assert table.loc[("all", "search 64"), "first move"] > 60


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_files_that_can_be_imported_are_read(tmp_path: Path, ending: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[ending]
    csv, epd = tmp_path / f"a.csv{ending}", tmp_path / f"a.epd{ending}"
    csv.write_bytes(pack(f"FEN,Moves,Rating\n{chess.STARTING_FEN},e2e4 e7e5,900\n".encode("utf-8-sig")))
    assert len(puzzles.read_puzzles(csv)) == 1
    epd.write_bytes(pack(b'\xef\xbb\xbf4k3/8/8/8/8/8/4P3/4K3 w - - bm e4; id "M\xfcller";\n'))
    assert len(puzzles.read_epd(epd)) == 1
    if ending:
        csv.write_bytes(csv.read_bytes()[:-3])
        with pytest.raises(ValueError, match=f"{csv.name}: damaged or cut short"):
            puzzles.read_puzzles(csv)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "a,b\n1,2\n", "lacks the columns .*FEN"),
        ("a.csv", "", r"'a\.csv' is no CSV of puzzles"),
        ("a.csv", "FEN,Moves,Rating\n", r"'a\.csv' has no puzzle"),
        ("a.csv", f"FEN,Moves,Rating\n{chess.STARTING_FEN},e2e4,1500\n", "line 2: no move to find"),
        ("a.csv", f"FEN,Moves,Rating\n{chess.STARTING_FEN},e2e4 e7e5,high\n", "line 2: .*'high'"),
        ("a.csv", "FEN,Moves,Rating\n8/8/8/8/8/8/4P3/8 w - - 0 1,e2e4 e4e5,900\n", "line 2.*NO_WHITE_KING"),
        ("a.epd", "# a comment alone\n\n", r"'a\.epd' has no exercise"),
        ("a.epd", "4k3/8/8/8/8/8/8/4K3 w - - bm Qd5;", "line 1"),
        ("a.epd", "4k3/8/8/8/8/8/8/4K3 w - -", "neither"),
        ("none.epd", None, "no puzzle file"),
        ("x" * 5000, None, "no puzzle file"),
    ],
)
def test_what_is_no_puzzle_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    read = puzzles.read_epd if name.endswith(".epd") else puzzles.read_puzzles
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)
