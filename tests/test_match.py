"""Matches of tic-tac-toe and chess: results, sides and rounds against the games replayed."""

import io
import threading
from functools import partial

import chess
import chess.pgn
import numpy as np
import pytest

from matrixlib.play.elo import rating
from matrixlib.play.game import uniform
from matrixlib.play.match import Choice, Turn, play_pairs, random_openings, random_player, search_player
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.tictactoe.spec import TicTacToe, best_moves

GAME = TicTacToe()


def perfect(turn: Turn) -> Choice:
    moves = [best_moves(int(s["ours"]), int(s["theirs"]))[1][0] for s in turn.states]
    return Choice(np.array(moves, np.int32), ["perfect"] * len(moves))


def openings() -> np.ndarray:
    """The nine positions after one move, and the empty board."""
    return np.concatenate([GAME.initial(1), GAME.play(GAME.initial(9), np.arange(9, dtype=np.int32))])


def test_random_openings_are_different_and_the_game_goes_on() -> None:
    game = ChessGame()
    starts = random_openings(game, 40, seed=1, plies=6)
    assert len(set(game.key(starts).tolist())) == 40
    assert np.isnan(game.terminal(starts, np.diff(game.legal(starts)[1]))).all()
    assert (starts["ply"] == 6).all()
    assert (starts == random_openings(game, 40, seed=1, plies=6)).all()
    with pytest.raises(ValueError, match=r"tic-tac-toe has hardly 10 different positions.*\(only 9\)"):
        random_openings(GAME, 10, seed=0, plies=1)
    assert len(random_openings(game, 0, seed=1, plies=6)) == 0


def test_results_are_those_of_the_games_replayed() -> None:
    match = play_pairs(GAME, random_player(GAME, 1), random_player(GAME, 2), openings(), names=("one", "two"))
    assert len(match.games) == 20
    results = set()
    for i, record in enumerate(match.games):
        assert record.start == openings()[i // 2]
        state = record.start
        for j, move in enumerate(record.moves):
            moves, offsets = GAME.legal(state)
            assert move in moves, (i, j)
            assert np.isnan(GAME.terminal(state, np.diff(offsets)))
            state = GAME.play(state, np.array([move]))
        value = GAME.terminal(state, np.diff(GAME.legal(state)[1]))[0]
        assert record.result == (value if len(record.moves) % 2 == 0 else -value)
        results.add(record.result)
        # The first player starts the first game of a pair; the side that starts tic-tac-toe is named first.
        starter = ("one", "two")[i % 2]
        assert record.players[int(record.start["side"][0])] == starter
        assert record.tags["Round"] == f"{i // 2 + 1}.{i % 2 + 1}"
    assert results == {-1, 0, 1}
    points = [(1 + record.result * (-1) ** i) / 2 for i, record in enumerate(match.games)]
    assert match.scores().tolist() == points
    assert (match.pairs().sum(), match.pairs() @ np.arange(5) / 2) == (10, sum(points))


def test_the_better_player_wins_from_both_sides() -> None:
    match = play_pairs(GAME, perfect, random_player(GAME, 0), openings())
    assert not (match.scores() == 0).any()
    assert rating(match.pairs()).low > 0
    turned = play_pairs(GAME, random_player(GAME, 0), perfect, openings())
    assert rating(turned.pairs()).high < 0
    assert set(match.games[0].comments[::2]) == {"perfect"}
    assert set(match.games[0].comments[1::2]) == {""}


def test_a_search_does_not_lose_to_perfect_play() -> None:
    player = search_player(GAME, uniform, 2000)
    match = play_pairs(GAME, player, perfect, openings()[:1])
    assert match.pairs().tolist() == [0, 0, 1, 0, 0]
    again = play_pairs(GAME, player, perfect, openings()[:1])
    assert again.games[0].moves == match.games[0].moves, "no noise in matches"
    value, simulations = map(float, match.games[0].comments[0].split("/"))
    assert (-1 <= value <= 1, 0 <= simulations <= 2000) == (True, True)


def test_a_match_in_parts_is_the_match_at_once() -> None:
    """Of which a cycle's sequential test looks at each part."""
    starts, other = openings(), random_player(GAME, 0)
    whole = play_pairs(GAME, perfect, other, starts)
    parts = [play_pairs(GAME, perfect, other, starts[i : i + 5], start=2 * i) for i in (0, 5)]
    assert [game.moves for part in parts for game in part.games] == [game.moves for game in whole.games]
    assert parts[1].games[-1].tags["Round"] == "10.2"


def test_threads_ask_both_players_at_once_and_their_number_changes_no_game() -> None:
    """Groups depend on the games alone, as an output may depend on the rest of its batch."""
    starts, asked, games = random_openings(ChessGame(), 20, seed=1, plies=6), list[int](), set[str]()

    def player(beside: threading.Barrier, turn: Turn) -> Choice:
        beside.wait(60)
        asked.append(len(turn.games))
        return random_player(ChessGame(), 1)(turn)

    for threads in (1, 2, 4):
        one = partial(player, threading.Barrier(threads))
        games.add(str([game.moves for game in play_pairs(ChessGame(), one, one, starts, 2, threads=threads).games]))
    assert (len(games), sorted(asked)) == (1, [4] * 12 + [16] * 12)


def test_errors_and_limits() -> None:
    with pytest.raises(ValueError, match="'first' plays move 0 in game"):
        play_pairs(GAME, lambda turn: Choice(np.zeros(len(turn.states), np.int32)), perfect, openings()[1:2])
    over = np.zeros(1, GAME.initial(1).dtype)
    over["theirs"] = 0o7
    with pytest.raises(ValueError, match="opening 0 is the end"):
        play_pairs(GAME, perfect, perfect, over)
    cut = play_pairs(GAME, perfect, perfect, openings()[:1], plies=3)
    assert [(len(g.moves), g.tags["Termination"]) for g in cut.games] == [(3, "ply limit")] * 2
    assert cut.pairs().tolist() == [0, 0, 1, 0, 0]


def test_chess_games_are_read_back_with_the_same_result() -> None:
    """Random games to their natural end, against python-chess's idea of it."""
    game = ChessGame()
    starts = from_boards(
        [chess.Board(), chess.Board("8/8/8/4k3/8/8/3QK3/8 b - - 90 100"), chess.Board("8/7k/8/8/8/8/8/K5R1 w - - 0 1")]
    )
    match = play_pairs(game, random_player(game, 5), random_player(game, 6), starts, plies=600)
    for record in match.games:
        read = chess.pgn.read_game(io.StringIO(game.write(record)))
        assert not read.errors
        board = read.end().board()
        if record.tags["Termination"] == "normal":
            result = board.result(claim_draw=True)
            assert result == read.headers["Result"]
            white = {"1-0": 1, "0-1": -1, "1/2-1/2": 0}[result]
            assert record.result == (white if read.board().turn == chess.WHITE else -white)
        assert {read.headers["White"], read.headers["Black"]} == {"first", "second"}
