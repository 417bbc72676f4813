"""mine.ipynb: one's own games become rows, a network learns them, and files that are none are refused."""

import io
import re
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import numpy as np
import pytest
from cells import Shown, definitions, run_notebook
from test_lc0_train import check_lc0

from matrixlib.data.shards import check
from matrixlib.runs.notebook import ParameterError
from matrixlib.tasks import load
from matrixlib.tasks.chess.records import LAYOUT, from_boards, legal_indices, policy_index

GAMES = """
[White "me"]
[Black "you"]
[Result "0-1"]

1. e4 {[%clk 0:03:00]} e5 {[%clk 0:02:59]} 2. Nf3 {[%clk 0:02:58]} d6 3. Bb5+ c6 0-1

[White "you"]
[Black "me"]
[Result "*"]
[SetUp "1"]
[FEN "7k/P7/8/8/8/8/1p6/7K b - - 0 40"]

1... bxa1=N *
"""


def functions() -> dict[str, Any]:
    cells = definitions("mine") | {"player": "me"}
    for function in ("positions", "stored"):
        cells[function].__globals__.update(cells)
    return cells


def test_the_board_says_who_won_where_the_game_ended_on_it() -> None:
    cells, game = (
        functions(),
        chess.pgn.read_game(io.StringIO('[White "me"]\n[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0')),
    )
    batch = cells["stored"](list(cells["positions"](0, game)), game)
    assert batch["records"]["result"].tolist() == [-1, 1, -1, 1]


def test_rows_are_those_of_the_game_in_order_with_my_moves_alone() -> None:
    cells = functions()
    file = io.StringIO(GAMES.replace("bxa1=N", "Kh7"))
    for number, white in enumerate((True, False)):
        game = chess.pgn.read_game(file)
        assert game is not None
        line = list(cells["positions"](number, game))
        batch = cells["stored"](line, game)
        check(batch, LAYOUT)
        board, rows = game.board(), []
        for row, move in enumerate(game.mainline_moves()):
            mine = board.turn == white
            start, stop = batch["policy_offset"][row : row + 2]
            played = {policy_index(move, board.turn): 65535} if mine else {}
            weights = zip(batch["policy_index"][start:stop], batch["policy_weight"][start:stop], strict=True)
            assert {int(index): int(weight) for index, weight in weights if weight} == played
            assert (line[row].mine, line[row].move, line[row].board.fen()) == (mine, move, board.fen())
            rows.append(board.copy())
            board.push(move)
        expected = from_boards(rows)
        for name in ("pieces", "castling", "en_passant", "halfmove", "repetition", "side", "ply"):
            assert (batch["records"][name] == expected[name]).all()
        assert np.array_equal(batch["policy_index"], legal_indices(expected)[0])
        results = [-1, 1] * 3 if white else [2]
        assert batch["records"]["result"].tolist() == results
        assert len(set(batch["records"]["game"])) == 1
        if white:
            assert [one.clock for one in line] == [None, None, 180, 179, 178, None], "before the move"


def test_unknown_dates_come_before_known_ones() -> None:
    dates = ({"Date": "2026.01.02"}, {"Date": "????.??.??"}, {"Date": "2026.??.??", "UTCDate": "2026.01.??"}, {})
    games = [chess.pgn.Game(headers) for headers in dates]
    assert [games.index(game) for game in sorted(games, key=definitions("mine")["date"])] == [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("content", "changes", "error", "message"),
    [
        (
            GAMES * 3,
            {},
            ValueError,
            r"player: 1 readable games of 'me' in .*, 3 broken and 2 repeated ones left out; at least 20 .* "
            r"are of me \(6\), you \(6\)",
        ),
        ("\x00not a game", {}, ValueError, "player: 0 readable games of 'me'"),
        (GAMES, {"player": "nobody"}, ValueError, "player: 0 readable games of 'nobody'.* are of me"),
        (
            GAMES,
            {"pgn": "", "player": "nobody"},
            ValueError,
            r"player: 0 readable games of 'nobody' in the demo \(give pgn\)",
        ),
        (GAMES, {"network": "nothing"}, ValueError, "no run at 'nothing'"),
        (GAMES, {"lc0": "mine.pb.gz"}, ParameterError, "a network for Lc0, which shipped must be"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_before_anything_is_trained(
    content: str, changes: dict[str, Any], error: Any, message: str, reports: Path, tmp_path: Path
) -> None:
    """The second game of GAMES is broken: no pawn can take on a1."""
    file = tmp_path / "games.pgn"
    file.write_text(content)
    with pytest.raises(error, match=message):
        run_notebook("mine", **{"pgn": str(file), **changes})
    assert not list(reports.iterdir())


@pytest.fixture(scope="module")
def learned(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shown]:
    """Maia has learned 30 games in a few updates: the folder with mine.pb.gz and reports/mine. The first game comes
    again as the newest, with other headers."""
    folder = tmp_path_factory.mktemp("mine")
    whole = (shared / "games" / "engine_matches.pgn").read_text(encoding="utf-8")
    games = "\n\n[Event ".join(whole.split("\n\n[Event ")[:30]) + "\n"  # Matrix0 against Stockfish
    copy = chess.pgn.read_game(io.StringIO(games))
    assert copy is not None
    copy.headers.update(Event="copy", Date="2026.01.02")
    (folder / "games.pgn").write_text(f"{games}\n{copy}\n", encoding="utf-8")
    frozen = {"train": {"freeze": ["stem", "tower"]}, "runtime": {"precision": "fp32"}, "validation": {"interval": 16}}
    given = {"pgn": "games.pgn", "player": "Matrix0", "network": str(shared / "maia" / "maia-1100.pb.gz"), "steps": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MATRIXLIB_REPORTS", str(folder / "reports"))
        return folder, run_notebook("mine", **given, device="cpu", lc0="mine.pb.gz", run="mine", overrides=frozen)


@pytest.mark.slow
def test_maia_learns_a_players_games_and_goes_to_lc0(shared: Path, learned: tuple[Path, Shown]) -> None:
    folder, shown = learned
    maia = str(shared / "maia" / "maia-1100.pb.gz")
    assert {"policy", "value"} <= shown.values["stats"].losses.keys(), "moves and results are learned"
    for part in ("opening", "middlegame", "unknown"):
        assert re.search(
            rf"{part} +(\d+\.\d% \[\d+%, \d+%\] +){{3}}-?\d+\.\d% \[-?\d+%, -?\d+%\] +\d+$", shown.text, re.M
        )
    assert re.search(
        r"^for Lc0: mine.pb.gz\npass  my moves are likelier than before +\d\.\d\d nats, before \d\.\d\d\n"
        r"pass  more of my moves are found than before +\+.*\nVERDICT: PASS$",
        shown.text,
        re.M,
    )
    row = shown.values["distance"].idxmax()
    asked = shown.values["asked"][row].board
    assert shown.values["cards"][0].board == asked
    new, old = (next(iter(net.evaluate_boards([asked]))).moves for net in shown.values["nets"].values())
    apart = sum(abs(new[move] - old[move]) for move in new) / 2
    assert shown.values["distance"][row] == pytest.approx(apart, abs=1e-4)
    own, base = (load(source, device="cpu") for source in (str(folder / "reports" / "mine"), maia))
    for name, tensor in base.model.state_dict().items():
        if name.startswith(("stem", "tower")):
            assert np.allclose(own.model.state_dict()[name], tensor)
    board = chess.Board()
    board.push_uci("a2a3")
    file = load(str(folder / "mine.pb.gz"), device="cpu")
    (before,), (after,), (tuned,) = (list(net.evaluate_boards([board])) for net in (base, file, own))
    assert after.moves == pytest.approx(tuned.moves, abs=2e-3)
    assert after.wdl == pytest.approx(tuned.wdl, abs=5e-3)
    assert after.moves != pytest.approx(before.moves, abs=2e-3)


@pytest.mark.slow
def test_no_game_is_trained_on_and_held_out(learned: tuple[Path, Shown]) -> None:
    assert "30 games, 0 broken and 1 repeated ones left out; trained on 24, held out 6" in learned[1].text
    (folder,) = (learned[0] / "reports").glob("mine-games-*")
    late = []
    for split in ("train", "validation"):
        rows = np.load(folder / f"{split}.npz")["records"]
        late.append({row.tobytes() for row in rows[rows["ply"] >= 20]["pieces"]})
    assert all(late)
    assert not late[0] & late[1]


@pytest.mark.slow
def test_lc0_plays_as_the_file_says(learned: tuple[Path, Shown], lc0: str) -> None:
    path, board = learned[0] / "mine.pb.gz", chess.Board()
    board.push_uci("a2a3")
    check_lc0([lc0, f"--weights={path}", "--backend=blas"], load(str(path), device="cpu"), [board])
