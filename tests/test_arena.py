"""Statistics of matches against simulation and plain formulas; matches of tic-tac-toe and chess."""

from __future__ import annotations

import io
import math

import chess
import chess.pgn
import numpy as np
import pytest

from matrixlib.play.game import Played, uniform
from matrixlib.play.match import (
    PAIR_SCORES,
    Choice,
    Match,
    Sprt,
    Turn,
    elo_of,
    expected_score,
    play_match,
    play_pairs,
    random_openings,
    random_player,
    rating,
    rating_table,
    search_player,
)
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards, policy_index
from matrixlib.tasks.tictactoe.game import TicTacToe
from matrixlib.tasks.tictactoe.solution import best_moves

GAME = TicTacToe()


def shares(elo: float, draws: float = 0.4, opening: float = 0.05) -> np.ndarray:
    """Probabilities (5,) of pair results: games with these draws, in which an opening may favour one side."""
    total = np.zeros(5)
    for bias in (-opening, opening):
        win = [expected_score(elo) + side * bias - draws / 2 for side in (1, -1)]
        games = [np.array([1 - draws - w, draws, w]) for w in win]
        total += np.convolve(*games) / 2
    return total


# --- statistics -----------------------------------------------------------------------------------


def test_elo_and_score_are_inverse() -> None:
    assert expected_score(0) == 0.5
    assert expected_score(400) == pytest.approx(10 / 11)
    assert elo_of(0.75) == pytest.approx(190.85, abs=0.01)
    for elo in (-300.0, -1.0, 0.0, 37.0):
        assert elo_of(expected_score(elo)) == pytest.approx(elo)
    assert (elo_of(0), elo_of(1)) == (-math.inf, math.inf)


def test_rating_of_many_pairs_is_the_plain_pentanomial_one() -> None:
    """score +- 1.96 sqrt(variance / pairs), mapped to Elo."""
    counts = np.array([200, 900, 2000, 1200, 300])
    n = counts.sum()
    score = counts @ PAIR_SCORES / n
    half = 1.959964 * math.sqrt(counts @ (PAIR_SCORES - score) ** 2 / n / n)
    found = rating(counts)
    assert (found.games, found.score) == (2 * n, score)
    assert found.elo == pytest.approx(elo_of(score))
    assert found.low == pytest.approx(elo_of(score - half), abs=0.1)
    assert found.high == pytest.approx(elo_of(score + half), abs=0.1)
    assert found.superiority > 0.999
    assert str(found).startswith("+")


def test_pairs_say_more_than_games_where_openings_decide() -> None:
    """Every pair 1 : 1 by an opening that wins: as games half win and half lose, as pairs nothing varies."""
    decided = rating([0, 0, 100, 0, 0])
    assert decided.elo == 0
    assert decided.superiority == 0.5
    mixed = rating([25, 0, 50, 0, 25])
    assert 0 < decided.high < mixed.high / 5


@pytest.mark.parametrize("elo, pairs", [(0.0, 30), (40.0, 100), (-250.0, 40)])
def test_intervals_hold_the_truth(elo: float, pairs: int) -> None:
    rng = np.random.default_rng(7)
    samples = rng.multinomial(pairs, shares(elo, draws=0.25), size=1000)
    held = np.mean([r.low <= elo <= r.high for r in map(rating, samples)])
    assert 0.93 <= held <= 0.985


def test_one_sided_and_tiny_matches() -> None:
    lost, won = rating([4, 0, 0, 0, 0]), rating([0, 0, 0, 0, 4])
    assert (won.elo, won.high) == (math.inf, math.inf)
    assert 0 < won.low < 400
    assert (lost.high, lost.superiority) == (pytest.approx(-won.low), pytest.approx(1 - won.superiority))
    even = rating([0, 0, 1, 0, 0])
    assert even.low < -100
    assert even.high > 100
    with pytest.raises(ValueError, match="at least one"):
        rating([0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="at least one"):
        rating([1, 2, 3])


def test_swapping_the_players_turns_every_sign() -> None:
    counts = [3, 9, 20, 14, 6]
    a, b = rating(counts), rating(counts[::-1])
    assert (a.elo, a.low, a.high) == pytest.approx((-b.elo, -b.high, -b.low))
    assert a.superiority == pytest.approx(1 - b.superiority)
    one = Sprt(-5, 15).ratio(counts)
    assert one == pytest.approx(-Sprt(-15, 5).ratio(counts[::-1]), abs=1e-6)


def test_sprt_ratio_near_its_approximation() -> None:
    """Small differences: (s1 - s0)(2 s - s0 - s1) n / (2 variance), Wald's ratio of normal means."""
    counts = np.array([60, 250, 600, 290, 80])
    n, sprt = counts.sum(), Sprt(0, 5)
    score = counts @ PAIR_SCORES / n
    variance = counts @ (PAIR_SCORES - score) ** 2 / n
    s0, s1 = expected_score(sprt.elo0), expected_score(sprt.elo1)
    assert sprt.ratio(counts) == pytest.approx(
        (s1 - s0) * (2 * score - s0 - s1) * n / (2 * variance), rel=0.02
    )
    assert sprt.bounds() == pytest.approx((-2.944, 2.944), abs=1e-3)


@pytest.mark.parametrize("elo, expected", [(0.0, False), (60.0, True)])
def test_sprt_is_wrong_as_rarely_as_it_promises(elo: float, expected: bool) -> None:
    rng, sprt, wrong, runs = np.random.default_rng(3), Sprt(0, 60), 0, 80
    for _ in range(runs):
        counts = np.zeros(5, np.int64)
        while (decision := sprt.decision(counts)) is None:
            counts += rng.multinomial(8, shares(elo))
        wrong += decision != expected
    assert wrong <= 9  # 5 % of 80 are 4


def test_sprt_checks_its_hypotheses() -> None:
    assert Sprt().decision([0, 0, 0, 0, 0]) is None
    with pytest.raises(ValueError, match="below"):
        Sprt(5, 0)


def test_rating_table_of_two_is_their_rating() -> None:
    counts = [100, 300, 800, 500, 200]
    both = rating_table({("old", "new"): counts[::-1], ("new", "old"): counts})
    assert both[0].elo - both[1].elo == pytest.approx(rating(counts).elo, rel=0.01)
    best, other = rating_table({("new", "old"): counts})
    alone = rating(counts)
    assert (best.name, best.games, best.score) == ("new", 3800, pytest.approx(alone.score))
    assert best.elo - other.elo == pytest.approx(alone.elo, rel=0.01)
    assert best.elo + other.elo == pytest.approx(0, abs=1e-6)
    assert 2 * (best.high - best.low) == pytest.approx(alone.high - alone.low, rel=0.15)


def test_rating_table_finds_strengths_through_common_opponents() -> None:
    """A chain of matches: 0, 80, 160, 240 Elo, neighbours only; and an intransitive circle is even."""
    rng = np.random.default_rng(5)
    matches = {(f"p{i + 1}", f"p{i}"): rng.multinomial(2000, shares(80)) for i in range(3)}
    table = rating_table(matches)
    assert [s.name for s in table] == ["p3", "p2", "p1", "p0"]
    np.testing.assert_allclose([s.elo for s in table], [120, 40, -40, -120], atol=15)
    assert all(s.low < truth < s.high for s, truth in zip(table, (120, 40, -40, -120), strict=True))
    wins = [0, 1, 4, 5, 10]
    circle = rating_table({("a", "b"): wins, ("b", "c"): wins, ("c", "a"): wins})
    assert [s.elo for s in circle] == pytest.approx([0, 0, 0], abs=1e-3)
    swept = rating_table({("a", "b"): [0, 0, 0, 0, 10]})
    assert 100 < swept[0].elo - swept[1].elo < 1000
    with pytest.raises(ValueError, match="common scale"):
        rating_table({("a", "b"): wins, ("c", "d"): wins})


# --- matches --------------------------------------------------------------------------------------


def perfect(turn: Turn) -> Choice:
    moves = [best_moves(int(s["ours"]), int(s["theirs"]))[1][0] for s in turn.states]
    return Choice(np.array(moves, np.int32), ["perfect"] * len(moves))


def openings() -> np.ndarray:
    """The nine positions after one move, and the empty board."""
    return np.concatenate([GAME.initial(1), GAME.play(GAME.initial(9), np.arange(9, dtype=np.int32))])


def test_random_openings_are_different_and_the_game_goes_on() -> None:
    game = ChessGame()
    found = random_openings(game, 40, seed=1, plies=6)
    assert len(set(game.key(found).tolist())) == 40
    assert np.isnan(game.terminal(found, np.diff(game.legal(found)[1]))).all()
    assert (found["ply"] == 6).all()
    assert (found == random_openings(game, 40, seed=1, plies=6)).all()
    with pytest.raises(ValueError, match=r"tic-tac-toe has hardly 10 different positions.*\(found: 9\)"):
        random_openings(GAME, 10, seed=0, plies=1)
    assert len(random_openings(game, 0, seed=1, plies=6)) == 0


def test_results_are_those_of_the_games_replayed() -> None:
    match = play_pairs(GAME, random_player(GAME, 1), random_player(GAME, 2), openings(), names=("one", "two"))
    assert len(match.games) == 20
    seen = set()
    for i, played in enumerate(match.games):
        assert played.start == openings()[i // 2]
        state = played.start
        for j, move in enumerate(played.moves):
            moves, offsets = GAME.legal(state)
            assert move in moves, (i, j)
            assert np.isnan(GAME.terminal(state, np.diff(offsets)))
            state = GAME.play(state, np.array([move]))
        value = GAME.terminal(state, np.diff(GAME.legal(state)[1]))[0]
        assert played.result == (value if len(played.moves) % 2 == 0 else -value)
        seen.add(played.result)
        # The first player starts the first game of a pair; the side that starts tic-tac-toe is named first.
        starter = ("one", "two")[i % 2]
        assert played.players[int(played.start["side"][0])] == starter
        assert played.tags["Round"] == f"{i // 2 + 1}.{i % 2 + 1}"
    assert seen == {-1, 0, 1}
    points = match.scores()
    for i, played in enumerate(match.games):
        assert points[i] == ((1 + played.result) / 2 if i % 2 == 0 else (1 - played.result) / 2)
    assert match.pairs().sum() == 10
    assert match.pairs() @ np.arange(5) / 2 == points.sum()


def test_the_better_player_wins_from_both_sides() -> None:
    match = play_pairs(GAME, perfect, random_player(GAME, 0), openings())
    assert not (match.scores() == 0).any()
    assert rating(match.pairs()).low > 0
    turned = play_pairs(GAME, random_player(GAME, 0), perfect, openings())
    assert rating(turned.pairs()).high < 0
    assert match.games[0].comments[::2] == ["perfect"] * len(match.games[0].comments[::2])
    assert set(match.games[0].comments[1::2]) == {""}


def test_a_search_does_not_lose_to_perfect_play() -> None:
    player = search_player(GAME, uniform, 2000)
    match = play_pairs(GAME, player, perfect, openings()[:1])
    assert match.pairs().tolist() == [0, 0, 1, 0, 0]
    again = play_pairs(GAME, player, perfect, openings()[:1])
    assert again.games[0].moves == match.games[0].moves, "no noise in matches"
    value, _, simulations = match.games[0].comments[0].partition("/")
    assert -1 <= float(value) <= 1
    assert 0 <= int(simulations) <= 2000


def test_a_match_stops_when_sprt_decides() -> None:
    many = np.tile(openings(), 20)
    stop = Sprt(0, 100)
    steps = list(play_match(GAME, perfect, random_player(GAME, 0), many, batch=5, stop=stop))
    assert [len(step.games) for step in steps] == [10 * (i + 1) for i in range(len(steps))]
    assert [stop.decision(step.pairs()) for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert stop.decision(steps[-1].pairs()) is True
    assert len(steps[-1].games) < 2 * len(many)
    whole = list(play_match(GAME, perfect, random_player(GAME, 0), many[:12], batch=5))
    assert len(whole[-1].games) == 24
    at_once = play_pairs(GAME, perfect, random_player(GAME, 0), many[:12])
    assert [g.moves for g in whole[-1].games] == [g.moves for g in at_once.games], "batches do not matter"
    assert whole[-1].games[-1].tags["Round"] == "12.2"


def test_errors_and_limits() -> None:
    def cheat(turn: Turn) -> Choice:
        return Choice(np.zeros(len(turn.states), np.int32))

    with pytest.raises(ValueError, match="'first' played move 0 in game"):
        play_pairs(GAME, cheat, perfect, openings()[1:2])
    over = np.zeros(1, GAME.initial(1).dtype)
    over["theirs"] = 0o7
    with pytest.raises(ValueError, match="opening 0 is the end"):
        play_pairs(GAME, perfect, perfect, over)
    cut = play_pairs(GAME, perfect, perfect, openings()[:1], plies=3)
    assert [len(g.moves) for g in cut.games] == [3, 3]
    assert [g.tags["Termination"] for g in cut.games] == ["ply limit"] * 2
    assert cut.pairs().tolist() == [0, 0, 1, 0, 0]


def test_chess_games_are_read_back_with_the_same_result() -> None:
    """Random games to their natural end, against python-chess's idea of it."""
    game = ChessGame()
    starts = from_boards(
        [
            chess.Board(),
            chess.Board("8/8/8/4k3/8/8/3QK3/8 b - - 90 100"),
            chess.Board("8/7k/8/8/8/8/8/K5R1 w - - 0 1"),
        ]
    )
    match = play_pairs(game, random_player(game, 5), random_player(game, 6), starts, plies=600)
    for played in match.games:
        read = chess.pgn.read_game(io.StringIO(game.write(played)))
        assert read is not None
        assert not read.errors
        board = read.end().board()
        if played.tags["Termination"] == "normal":
            outcome = board.outcome(claim_draw=True)
            assert outcome is not None
            assert outcome.result() == read.headers["Result"]
            white = {"1-0": 1, "0-1": -1, "1/2-1/2": 0}[outcome.result()]
            assert played.result == (white if read.board().turn == chess.WHITE else -white)
        assert len(list(read.mainline_moves())) == len(played.moves)
        assert {read.headers["White"], read.headers["Black"]} == {"first", "second"}


def test_shuffling_pieces_ends_by_repetition() -> None:
    game = ChessGame()
    cycle = [chess.Move.from_uci(uci) for uci in ("g1f3", "g8f6", "f3g1", "f6g8")]

    def shuffle(turn: Turn) -> Choice:
        plies = [len(past) for past in turn.history]
        return Choice(np.array([policy_index(cycle[p % 4], p % 2 == 0) for p in plies], np.int32))

    match = play_pairs(game, shuffle, shuffle, game.initial(1))
    assert [len(g.moves) for g in match.games] == [8, 8]
    assert [(g.result, g.tags["Termination"]) for g in match.games] == [(0, "normal")] * 2


def test_scores_of_a_match_by_hand() -> None:
    """Win as first, win as second; loss, draw; draw, loss: 2, 1/2 and 1/2 points."""
    results = [1, -1, -1, 0, 0, 1]
    match = Match(tuple(Played(GAME.initial(1), [], float(r)) for r in results))
    assert match.scores().tolist() == [1, 1, 0, 0.5, 0.5, 0]
    assert match.pairs().tolist() == [0, 2, 0, 0, 1]
