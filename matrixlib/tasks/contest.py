"""What a cycle asks of a game beyond its rules: a `Contest`, one for each task that is a game for two."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from matrixlib.config import Config, TicTacToeConfig
from matrixlib.play import match as matches
from matrixlib.play.game import Game
from matrixlib.play.search import Evaluate, SearchOptions
from matrixlib.tasks.spec import Check

if TYPE_CHECKING:
    from matrixlib.data.shards import Batch
    from matrixlib.play.game import Trace

PERFECT_GAMES = 200  # against perfect play, half of them as the side that begins
SAFE = "policy: move does not lose"
LOST_ALONE, LOST = "policy: games lost", "with search: games lost"


class Contest(Protocol):
    """One game, as a cycle plays and learns it; what is trained is its `Subject`."""

    @property
    def game(self) -> Game:
        """The rules."""
        ...

    @property
    def ending(self) -> str:
        """Of the name of a file that holds what `Game.write` gives."""
        ...

    def game_id(self, name: Sequence[str], held_out: bool) -> int:
        """A 64-bit id of the game of this name, for its records."""
        ...

    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
        """What there is to learn from games; ids: number of a game -> its id."""
        ...

    @property
    def solved(self) -> bool:
        """Whether perfect play is known."""
        ...

    def truth(self, evaluate: Evaluate, player: matches.Player) -> dict[str, float]:
        """A network, and a player with it, beside perfect play: shares by name. Only of a game that is solved."""
        ...

    def checks(self, truth: Mapping[str, float]) -> list[Check]:
        """What must hold of the best network, by these figures."""
        ...


def of(config: Config) -> Contest:
    """The contest of a configuration."""
    return TicTacToe() if isinstance(config, TicTacToeConfig) else Chess()


class Chess:
    """Chess."""

    ending, solved = ".pgn", False

    @property
    def game(self) -> Game:
        from matrixlib.tasks.chess.game import ChessGame

        return ChessGame()

    def game_id(self, name: Sequence[str], held_out: bool) -> int:
        """One by which every other tool holds the game out, or does not."""
        from matrixlib.tasks.chess.importers.parsing import game_id
        from matrixlib.tasks.chess.stockfish.packing import is_validation

        ids = (game_id(*name, str(draw)) for draw in itertools.count())
        return next(i for i in ids if bool(is_validation(np.array([i], np.uint64))[0]) == held_out)

    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
        from matrixlib.tasks.chess.game import training_batch
        from matrixlib.tasks.chess.importers.parsing import SOURCES

        return training_batch(traces, ids, SOURCES["selfplay"])

    def truth(self, evaluate: Evaluate, player: matches.Player) -> dict[str, float]:
        raise NotImplementedError("nobody knows perfect play")

    def checks(self, truth: Mapping[str, float]) -> list[Check]:
        return []


class TicTacToe:
    """Tic-tac-toe."""

    ending, solved = ".txt", True

    @property
    def game(self) -> Game:
        from matrixlib.tasks.tictactoe.game import TicTacToe as Rules

        return Rules()

    def game_id(self, name: Sequence[str], held_out: bool) -> int:
        _, generation, number = name
        return int(generation) << 32 | int(number)

    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
        from matrixlib.tasks.tictactoe.records import training_batch

        return training_batch(traces, ids)

    def truth(self, evaluate: Evaluate, player: matches.Player) -> dict[str, float]:
        """Of the positions that are not lost those in which the most probable move does not lose, of all positions
        those in which it keeps what they are worth; of the games against perfect play those that the player loses, and
        those that the most probable moves lose."""
        from matrixlib.tasks.tictactoe.solution import solve

        game, solved = self.game, solve()
        moves, offsets = game.legal(solved.states)
        priors = np.full(solved.moves.shape, -1.0)
        priors[np.repeat(np.arange(len(priors)), np.diff(offsets)), moves] = evaluate(
            solved.states, moves, offsets
        )[0]
        chosen = solved.moves[np.arange(len(priors)), priors.argmax(1)]
        start = game.initial(PERFECT_GAMES // 2)
        raw = matches.search_player(game, evaluate, 0, SearchOptions(look_ahead=False))
        results = [matches.play_pairs(game, one, perfect_player(0), start) for one in (player, raw)]
        searched, unsearched = (float((match.scores() == 0).mean()) for match in results)
        return {
            SAFE: float((chosen[solved.value >= 0] >= 0).mean()),
            "policy: move is one of the best": float((chosen == solved.value).mean()),
            LOST_ALONE: unsearched,
            LOST: searched,
        }

    def checks(self, truth: Mapping[str, float]) -> list[Check]:
        lost, alone = (round(truth[name] * PERFECT_GAMES) for name in (LOST, LOST_ALONE))
        said = (
            f"{lost} of {PERFECT_GAMES} games lost to a player that knows all, {alone} without a search; "
            f"the policy's move does not lose in {truth[SAFE]:.2%} of the positions"
        )
        return [("loses to nobody", lost == 0, said)]


def perfect_player(seed: int) -> matches.Player:
    """Plays any move of tic-tac-toe that keeps what the position is worth; in a game of a number always the same."""
    from matrixlib.tasks.tictactoe.solution import best_moves

    def play(turn: matches.Turn) -> matches.Choice:
        options = [best_moves(int(state["ours"]), int(state["theirs"]))[1] for state in turn.states]
        numbers = zip(turn.games, turn.history, options, strict=True)
        picks = [np.random.default_rng([seed, n, len(past)]).choice(moves) for n, past, moves in numbers]
        return matches.Choice(np.array(picks, np.int32))

    return play
