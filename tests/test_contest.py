"""What a cycle asks of its games: ids by which games are held out, and perfect play as a measure."""

from __future__ import annotations

import numpy as np
import pytest

from matrixlib.play import match as matches
from matrixlib.play.game import uniform
from matrixlib.play.search import SearchOptions
from matrixlib.runs.cycle_config import load_cycle
from matrixlib.tasks import get_task
from matrixlib.tasks.chess.stockfish.packing import is_validation
from matrixlib.tasks.tictactoe import spec as contest
from matrixlib.tasks.tictactoe.game import TicTacToe
from matrixlib.tasks.tictactoe.solution import solve

GAME = TicTacToe()
SETTINGS = load_cycle("tictactoe").network


@pytest.mark.parametrize("preset", ["demo", "tictactoe"])
def test_every_game_has_an_id_of_its_own(preset: str) -> None:
    judge = get_task(load_cycle(preset).network.task).game
    names = [("c", str(generation), str(number)) for generation in (1, 2) for number in range(40)]
    ids = [judge.game_id(name, held_out=number % 2 == 0) for number, name in enumerate(names)]
    assert len(set(ids)) == len(ids)
    assert ids == [judge.game_id(name, held_out=number % 2 == 0) for number, name in enumerate(names)]
    if preset == "demo":  # the split follows from the id wherever these games are imported or merged
        assert is_validation(np.array(ids, np.uint64)).tolist() == [True, False] * 40


def test_nobody_knows_perfect_play_of_chess() -> None:
    judge = get_task("chess").game
    assert not judge.solved
    assert judge.checks({}) == []


def test_perfect_play_never_loses_and_is_the_same_again() -> None:
    one, other = contest.perfect_player(0), contest.perfect_player(1)
    draws = matches.play_pairs(GAME, one, other, GAME.initial(50))
    assert (draws.scores() == 0.5).all()
    assert len({tuple(game.moves) for game in draws.games}) > 50
    assert matches.play_pairs(GAME, one, other, GAME.initial(50)) == draws
    assert (
        matches.play_pairs(GAME, one, matches.random_player(GAME, 0), GAME.initial(50)).scores().mean() > 0.8
    )


def test_the_truth_of_an_evaluator_that_knows_all_and_of_one_that_knows_nothing() -> None:
    solved = solve()
    known = dict(zip(GAME.key(solved.states).tolist(), solved.moves, strict=True))

    def oracle(states: np.ndarray, moves: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.array([known[key] for key in GAME.key(states).tolist()])
        priors = np.exp(10.0 * rows[np.repeat(np.arange(len(rows)), np.diff(offsets)), moves])
        return priors.astype(np.float32), rows.max(1).astype(np.float32)

    judge = get_task(SETTINGS.task).game
    best = judge.perfection(oracle, matches.search_player(GAME, oracle, 8))
    assert list(best.values()) == [1.0, 1.0, 0.0, 0.0]
    assert [passed for _, passed, _ in judge.checks(best)] == [True]
    worst = judge.perfection(
        uniform, matches.search_player(GAME, uniform, 1, SearchOptions(look_ahead=False))
    )
    assert worst["policy: move does not lose"] < 0.8
    assert worst["policy: games lost"] > 0.2
    assert [passed for _, passed, _ in judge.checks(worst)] == [False]
