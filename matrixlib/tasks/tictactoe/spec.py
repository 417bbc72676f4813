"""Tic-tac-toe as a task, and as a game of self-play that is solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixlib.play import match
from matrixlib.play.search import SearchOptions
from matrixlib.tasks.spec import Check, Overfit, TaskSpec
from matrixlib.tasks.tictactoe.config import TicTacToeConfig

if TYPE_CHECKING:
    from matrixlib.data.catalogue import Catalogue
    from matrixlib.data.loader import Loader
    from matrixlib.data.shards import Batch, Layout
    from matrixlib.play.game import Game, Trace
    from matrixlib.play.search import Evaluate
    from matrixlib.tasks.tictactoe.task import TicTacToeTask

PERFECT_GAMES = 200  # against perfect play, half of them as the side that begins
SAFE = "policy: move does not lose"
LOST_ALONE, LOST = "policy: games lost", "with search: games lost"


class TicTacToeGameSpec:
    """Tic-tac-toe as a game of self-play."""

    ending, solved = ".txt", True

    @property
    def game(self) -> Game:
        from matrixlib.tasks.tictactoe.game import TicTacToe

        return TicTacToe()

    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
        from matrixlib.tasks.tictactoe.records import training_batch

        return training_batch(traces, ids)

    def keys(self, records: np.ndarray) -> np.ndarray:
        return records["ours"].astype(np.uint64) << np.uint64(16) | records["theirs"]

    def perfection(self, evaluate: Evaluate, player: match.Player) -> dict[str, float]:
        """Of the positions that are not lost those in which the most probable move does not lose, of all positions
        those in which it keeps what they are worth; of the games against perfect play those that the player loses, and
        those that the most probable moves lose."""
        from matrixlib.tasks.tictactoe.solution import solve

        game, solution = self.game, solve()
        moves, offsets = game.legal(solution.states)
        priors = np.full(solution.moves.shape, -1.0)
        rows = np.repeat(np.arange(len(priors)), np.diff(offsets))
        priors[rows, moves] = evaluate(solution.states, moves, offsets)[0]
        worth = solution.moves[np.arange(len(priors)), priors.argmax(1)]
        start = game.initial(PERFECT_GAMES // 2)
        raw = match.search_player(game, evaluate, 0, SearchOptions(look_ahead=False))
        matches = [match.play_pairs(game, one, perfect_player(0), start) for one in (player, raw)]
        with_search, alone = (float((games.scores() == 0).mean()) for games in matches)
        return {
            SAFE: float((worth[solution.value >= 0] >= 0).mean()),
            "policy: move is one of the best": float((worth == solution.value).mean()),
            LOST_ALONE: alone,
            LOST: with_search,
        }

    def checks(self, perfection: Mapping[str, float]) -> list[Check]:
        lost, alone = (round(perfection[name] * PERFECT_GAMES) for name in (LOST, LOST_ALONE))
        text = (
            f"{lost} of {PERFECT_GAMES} games lost to a player that knows all, {alone} without a search; "
            f"the policy's move does not lose in {perfection[SAFE]:.2%} of the positions"
        )
        return [("loses to nobody", lost == 0, text)]


def perfect_player(seed: int) -> match.Player:
    """Plays any move of tic-tac-toe that keeps what the position is worth; in a game of a number always the same."""
    from matrixlib.tasks.tictactoe.solution import best_moves

    def play(turn: match.Turn) -> match.Choice:
        options = [best_moves(int(state["ours"]), int(state["theirs"]))[1] for state in turn.states]
        numbers = zip(turn.games, turn.history, options, strict=True)
        picks = [np.random.default_rng([seed, n, len(past)]).choice(moves) for n, past, moves in numbers]
        return match.Choice(np.array(picks, np.int32))

    return play


class TicTacToeSpec(TaskSpec[TicTacToeConfig]):
    """Positions of self-play."""

    name = "tictactoe"
    config = TicTacToeConfig
    objective_options = ("loss.",)
    measured_on_options = ("validation.limit",)
    held_out = "of a cycle's games one in twenty is held out"
    # The first positions of games come again and again, with other results: those can't be learned by heart.
    overfit = Overfit(overrides={"data": {"augment": False}}, gaps={"policy": 0.05})
    game = TicTacToeGameSpec()

    @property
    def layout(self) -> Layout:
        from matrixlib.tasks.tictactoe.records import LAYOUT

        return LAYOUT

    def task(self, config: TicTacToeConfig) -> TicTacToeTask:
        from matrixlib.tasks.tictactoe.task import TicTacToeTask

        return TicTacToeTask(config)

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        from matrixlib.engine.validation import validate
        from matrixlib.tasks.tictactoe.losses import chances

        task = net.task
        batches = list(held_out.sequential(task.config.validation.batch_size, sample=sample))
        result = validate(task, net.model, batches, net.runtime, frozenset(task.weights), "full")
        if result is None or not result.counts["policy"]:
            raise ValueError("the held-out positions have no policy target to evaluate on; play more games")
        uniform = sum(float(chances(batch["policy"], batch["squares"] == 0).sum()) for batch in batches)
        figures: dict[str, Any] = {
            "positions": sum(len(batch["squares"]) for batch in batches),
            "top1": result.metrics["policy/top1"],
            "policy_kl": result.metrics["policy/kl"],
        }
        if result.counts["value"]:
            figures["wdl_accuracy"] = result.metrics["value/accuracy"]
        return figures | {"baselines": {"uniform_top1": uniform / result.counts["policy"]}}

    def headline(self, figures: Mapping[str, Any]) -> str:
        text = (
            f"top-1 {figures['top1']:.1%} (uniform {figures['baselines']['uniform_top1']:.1%}), "
            f"KL {figures['policy_kl']:.2f}"
        )
        return text + (f", WDL {figures['wdl_accuracy']:.1%}" if "wdl_accuracy" in figures else "")

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        return [
            (
                "held-out moves better than a random one",
                figures["top1"] > figures["baselines"]["uniform_top1"],
                "top-1 agreement with the search above that of a random move",
            )
        ]


TASK = TicTacToeSpec()
