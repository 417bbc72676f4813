"""Tic-tac-toe: its solution, its records, symmetries, and a network as an evaluator."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cells import run_notebook
from torch import nn

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import check, write_shard
from matrixlib.engine.network import Network
from matrixlib.hardware.runtime import Serving, resolve
from matrixlib.play.game import GameRecord, uniform
from matrixlib.play.match import play_pairs, random_player, search_player
from matrixlib.play.search import Evaluator, SearchOptions
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.runs.cycle_games import load_cycle
from matrixlib.tasks.tictactoe.spec import (
    LAYOUT,
    SYMMETRIES,
    UNKNOWN,
    TicTacToe,
    TicTacToeTask,
    best_moves,
    perfect_player,
    solve,
)
from matrixlib.tasks.tictactoe.spec import TASK as SPEC

GAME = TicTacToe()
SETTINGS = load_cycle("tictactoe").network
TASK = TicTacToeTask(SETTINGS)


def network(serving: Serving | None = None) -> Network:
    runtime = resolve(SETTINGS.runtime, SETTINGS.train, SETTINGS.data)
    return Network(TASK.build_model(), TASK, runtime, serving)


def test_the_solution_has_every_position_that_the_rules_reach() -> None:
    states, found, (solved, values) = GAME.initial(1), 0, solve()
    keys = set(GAME.key(solved).tolist())
    while len(states):
        assert all(int(key) in keys for key in GAME.key(states))
        found += len(states)
        moves, offsets = GAME.legal(states)
        states = GAME.play(np.repeat(states, np.diff(offsets)), moves)
        states = states[np.unique(GAME.key(states), return_index=True)[1]]
        states = states[np.isnan(GAME.terminal(states, np.diff(GAME.legal(states)[1])))]
    assert found == len(keys) == 4520
    assert (values[0] == 0).all(), "every first move draws"
    assert best_moves(0b011, 0b011000) == (1, (2,)), "two in a row are completed"
    assert best_moves(0b010000, 0b011) == (0, (2,)), "a threat is met"


def test_augmentation_turns_the_policy_with_the_board() -> None:
    """Best moves as policy: they stay those of the turned board."""
    assert len({tuple(row) for row in SYMMETRIES.tolist()}) == 8
    states, values = solve()
    rows = np.zeros(len(states), LAYOUT.record)
    for name in ("ours", "theirs", "side"):
        rows[name] = states[name]
    rows["policy"] = values == values.max(1)[:, None]
    seen = TASK.prepare({"records": rows}, np.random.default_rng(0))
    assert (seen["squares"] != TASK.prepare_plain({"records": rows}, np.random.default_rng(0))["squares"]).any()
    for squares, policy in zip(seen["squares"], seen["policy"], strict=True):
        ours, theirs = (sum(1 << s for s in range(9) if squares[s] == who) for who in (1, -1))
        assert tuple(np.flatnonzero(policy)) == best_moves(ours, theirs)[1]
    plain = TicTacToeTask(SETTINGS.model_copy(update={"data": SETTINGS.data.model_copy(update={"augment": False})}))
    same = plain.prepare({"records": rows}, np.random.default_rng(0))["squares"]
    assert (same == plain.prepare_plain({"records": rows}, np.random.default_rng(0))["squares"]).all()


def test_records_hold_what_was_searched_and_who_won() -> None:
    options = SelfPlayOptions(parallel=8, num_simulations=16, num_quick_simulations=4, full_share=0.7, plies=7)
    traces = list(play_games(GAME, uniform, range(20), options))
    ids = {number: 100 + number for number in range(20)}
    batch = SPEC.game.batch(traces, ids)
    check(batch, LAYOUT)
    assert len(batch["records"]) == sum(trace.full.sum() for trace in traces)
    for trace in traces:
        rows = batch["records"][batch["records"]["game"] == ids[trace.number]]
        assert (GAME.key(rows) == GAME.key(trace.states[trace.full])).all()
        x = np.where(rows["side"] == 0, rows["result"], -rows["result"].astype(int))
        assert set(x.tolist()) <= ({UNKNOWN, -UNKNOWN} if trace.result is None else {trace.result})
    taken = batch["records"]["ours"] | batch["records"]["theirs"]
    assert not (batch["records"]["policy"] * (taken[:, None] >> np.arange(9) & 1)).any()
    assert (np.abs(batch["records"]["policy"].sum(1, dtype=np.int64) - 65535) < 9).all()
    assert len(SPEC.game.batch([], {})["records"]) == 0


@pytest.mark.parametrize("fill", [False, True])
def test_a_network_evaluates_legal_moves_alone(fill: bool) -> None:
    """Whatever the sizes of the batches, and whether they are filled up."""
    states = solve()[0][::37]
    moves, offsets = GAME.legal(states)
    priors, values = Evaluator(network(Serving((8, 50), fill, False)))(states, moves, offsets)
    np.testing.assert_allclose(np.add.reduceat(priors, offsets[:-1]), 1, atol=1e-5)
    assert (np.abs(values) < 1).all()


def test_games_are_written_with_players_and_points() -> None:
    game = GameRecord(GAME.initial(1), [4, 0, 8], 1.0, players=("one", "two"))
    assert GAME.write(game) == "one - two: ......... 4 0 8 1-0"
    assert GAME.write(replace(game, result=None)).endswith(" *")
    after = GAME.play(GAME.initial(1), np.array([2]))  # O is to move, and wins
    assert GAME.write(replace(game, start=after)) == "one - two: ..x...... 4 0 8 0-1"


class Blank(nn.Module):
    """A network that says nothing: all logits are 0."""

    def forward(self, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(squares), 9), torch.zeros(len(squares), 3)


@pytest.mark.parametrize("result", [1, UNKNOWN])
def test_a_network_that_says_nothing_passes_no_check(result: int) -> None:
    """Of moves that tie each one is a hit, for the network as for a random move; results may all be unknown."""
    records = np.zeros(3, LAYOUT.record)
    records["policy"][0] = 65535 // 9  # all moves of the empty board are as good
    records["ours"][1:], records["theirs"][1:] = 0b1, 0b1000
    records["policy"][1, [1, 2]] = 32767  # the third has no policy
    records["result"] = result
    net: Any = SimpleNamespace(task=TASK, model=Blank(), runtime=replace(network().runtime, dtype="fp32"))

    def figures() -> dict[str, Any]:
        tensors = TASK.prepare_plain({"records": records}, np.random.default_rng(0))
        batch = {name: torch.from_numpy(array) for name, array in tensors.items()}
        held_out: Any = SimpleNamespace(sequential=lambda size, sample: iter([batch]), of_sources=dict)
        return SPEC.evaluate(net, held_out, None)  # type: ignore[arg-type]

    found = figures()
    assert found["top1"] == 1
    assert found["baselines"]["uniform_top1"] == pytest.approx((1 + 2 / 7) / 2)
    assert ("wdl_accuracy" in found) == (result != UNKNOWN)
    records["policy"][1] = 0
    assert [passed for _, passed, _ in SPEC.checks(figures())] == [False]
    records["policy"] = 0
    with pytest.raises(ValueError, match="play more games"):
        figures()


def test_perfect_play_never_loses_and_is_the_same_again() -> None:
    one, other = perfect_player(0), perfect_player(1)
    draws = play_pairs(GAME, one, other, GAME.initial(50))
    assert (draws.scores() == 0.5).all()
    assert len({tuple(game.moves) for game in draws.games}) > 50
    assert play_pairs(GAME, one, other, GAME.initial(50)) == draws
    assert play_pairs(GAME, one, random_player(GAME, 0), GAME.initial(50)).scores().mean() > 0.8


def test_figures_beside_perfect_play_of_an_evaluator_that_knows_all_and_of_one_that_knows_nothing() -> None:
    solved, values = solve()
    known = dict(zip(GAME.key(solved).tolist(), values, strict=True))

    def oracle(states: np.ndarray, moves: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.array([known[key] for key in GAME.key(states).tolist()])
        priors = np.exp(10.0 * rows[np.repeat(np.arange(len(rows)), np.diff(offsets)), moves])
        return priors.astype(np.float32), rows.max(1).astype(np.float32)

    rules = SPEC.game
    best = rules.perfection(oracle, search_player(GAME, oracle, 8))
    assert list(best.values()) == [1.0, 1.0, 0.0, 0.0]
    assert [passed for _, passed, _ in rules.checks(best)] == [True]
    worst = rules.perfection(uniform, search_player(GAME, uniform, 1, SearchOptions(look_ahead=False)))
    assert worst["policy: move does not lose"] < 0.8
    assert worst["policy: games lost"] > 0.2
    assert [passed for _, passed, _ in rules.checks(worst)] == [False]


def test_it_learns_a_few_positions_by_heart(tmp_path: Path, reports: Path) -> None:
    """The overfit check takes a game, whose first positions come again with other results."""
    options = SelfPlayOptions(num_simulations=16, random_plies=(3, 4))
    traces = sorted(play_games(GAME, uniform, range(40), options, SearchOptions(), 0), key=lambda t: t.number)
    batch = SPEC.game.batch(traces, {number: number for number in range(40)})
    for split in ("train", "validation"):
        meta = {"source": "games", "generator": "test", "seed": 0, "split": split}
        write_shard(tmp_path / f"{split}.npz", LAYOUT, batch, meta)
    Catalogue(tmp_path)
    preset = {"task": "tictactoe", "data": {"source": str(tmp_path)}, "runtime": {"precision": "fp32", "threads": 1}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(preset), encoding="utf-8")
    assert not run_notebook("overfit", preset=str(tmp_path / "mine.yaml"), device="cpu", seed=0).failed
