"""What search relies on, for every game: random games played through the Game and its batches."""

from collections import Counter

import numpy as np
import pytest

from matrixlib.play import game as games
from matrixlib.play.game import Game, GameRecord, States
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.tictactoe.spec import TicTacToe

GAMES: tuple[Game, ...] = (TicTacToe(), ChessGame())
BATCH, PLIES = 12, 160

pytestmark = pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)


def choose(rng: np.random.Generator, moves: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return moves[offsets[:-1] + rng.integers(np.diff(offsets))]


def positions(game: Game, seed: int = 0) -> list[States]:
    """Batches of states of random games, each batch as far as every game in it goes on."""
    rng = np.random.default_rng(seed)
    states, batches = game.initial(BATCH), []
    for _ in range(PLIES):
        batches.append(states)
        moves, offsets = game.legal(states)
        live = np.isnan(game.terminal(states, np.diff(offsets)))
        if not live.any():
            break
        states = states[live]
        moves, offsets = game.legal(states)
        states = game.play(states, choose(rng, moves, offsets))
    return batches


def test_legal_moves_ascend_and_batches_do_not_matter(game: Game) -> None:
    for states in positions(game):
        moves, offsets = game.legal(states)
        values, keys = game.terminal(states, np.diff(offsets)), game.key(states)
        assert (offsets[0], offsets[-1], len(offsets)) == (0, len(moves), len(states) + 1)
        assert moves.dtype == np.int32
        for i in range(len(states)):
            row = moves[offsets[i] : offsets[i + 1]]
            assert (np.diff(row) > 0).all()
            assert not len(row) or (row[0] >= 0 and row[-1] < game.actions)
            alone = states[i : i + 1]
            assert (game.legal(alone)[0] == row).all()
            assert np.array_equal(game.terminal(alone, np.array([len(row)])), values[i : i + 1], equal_nan=True)
            assert game.key(alone)[0] == keys[i]
            assert len(row) or not np.isnan(values[i]), "a game without a move must be over"


def test_sides_take_turns_and_play_leaves_its_input_alone(game: Game) -> None:
    rng = np.random.default_rng(1)
    for states in positions(game, seed=1):
        states = states[np.isnan(game.terminal(states, np.diff(game.legal(states)[1])))]
        before = states.copy()
        after = game.play(states, choose(rng, *game.legal(states)))
        assert (states == before).all()
        assert (game.to_move(after) == 1 - game.to_move(states)).all()
        assert (game.key(after) != game.key(states)).all()


def test_endings_are_those_that_playing_the_moves_finds(game: Game) -> None:
    """No ending is claimed that isn't one, and every win is recognised."""
    values: Counter[float] = Counter()
    for states in [batch for seed in range(5) for batch in positions(game, seed)]:
        states = states[np.isnan(game.terminal(states, np.diff(game.legal(states)[1])))]
        moves, offsets = game.legal(states)
        known = game.endings(states, moves, offsets)
        played = games.endings(game, states, moves, offsets)
        assert (known[~np.isnan(known)] == played[~np.isnan(known)]).all()
        assert ((known == 1) == (played == 1)).all()
        values.update(played[~np.isnan(played)].tolist())
    assert values[1] > 0


def test_keys_tell_positions_apart(game: Game) -> None:
    """Different states have different keys, but for what a repetition ignores."""
    states = np.concatenate(positions(game))
    plain = states.copy()
    for name in {"ply", "halfmove", "repetition"} & set(states.dtype.names):
        plain[name] = 0
    assert len(np.unique(game.key(states))) == len({row.tobytes() for row in plain})


def test_a_game_starts_alike_with_the_first_side_and_can_be_written(game: Game) -> None:
    states = game.initial(3)
    assert (states == states[0]).all()
    assert not game.to_move(states).any()
    assert np.isnan(game.proven(states)).all(), "nothing is known without tables"
    moves, states = [], game.initial(1)
    for _ in range(3):
        moves.append(int(game.legal(states)[0][0]))
        states = game.play(states, np.array(moves[-1:]))
    assert game.write(GameRecord(game.initial(1), moves, 0.0)).strip()
