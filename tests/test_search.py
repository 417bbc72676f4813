"""The search on trees small enough to follow by hand, on solvable ones, and on tic-tac-toe."""

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

import chess
import numpy as np
import pytest

from matrixlib.play.game import Moves, Offsets, States, Values, endings, uniform
from matrixlib.play.search import Search, SearchOptions, SearchResult
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.tictactoe.spec import TicTacToe

NODE = np.dtype([("node", "<i4"), ("side", "u1"), ("repetition", "u1")])
# Exploration c = 1 whatever the visits, nothing taken off untried moves, one leaf at a time.
PLAIN = SearchOptions(leaves=1, pb_c_init=1.0, pb_c_base=1e12, fpu_reduction=0.0, look_ahead=False)


def plain(**changes: Any) -> SearchOptions:
    return SearchOptions(**{**PLAIN.model_dump(), **changes})


@dataclass(frozen=True)
class Graph:
    """A game given by hand. moves: node -> the nodes that its moves 0, 1, ... lead to; priors likewise (uniform
    unless given); values: what the evaluator says (0 unless given) and over: the value where the game is over,
    both for the side to move; known: what `proven` says."""

    moves: Mapping[int, Sequence[int]]
    priors: Mapping[int, Sequence[float]] = field(default_factory=dict)
    values: Mapping[int, float] = field(default_factory=dict)
    over: Mapping[int, float] = field(default_factory=dict)
    known: Mapping[int, float] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    name = "graph"
    actions = 16

    def initial(self, n: int) -> States:
        return np.zeros(n, NODE)

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        rows = [range(0 if int(s["node"]) in self.over else len(self.moves.get(int(s["node"]), ()))) for s in states]
        offsets = np.cumsum([0, *map(len, rows)])
        return np.array([m for row in rows for m in row], np.int32), offsets

    def play(self, states: States, moves: Moves) -> States:
        after = np.zeros(len(states), NODE)
        after["node"] = [self.moves[int(s["node"])][int(m)] for s, m in zip(states, moves, strict=True)]
        after["side"] = 1 - states["side"]
        return after

    def terminal(self, states: States, counts: np.ndarray) -> Values:
        values = np.array([self.over.get(int(s["node"]), np.nan) for s in states], np.float32)
        return np.where(states["repetition"] >= 2, 0, values).astype(np.float32)

    def to_move(self, states: States) -> np.ndarray:
        return states["side"]

    def key(self, states: States) -> np.ndarray:
        return (2 * states["node"] + states["side"]).astype(np.uint64)

    def repeat(self, states: States, counts: np.ndarray) -> States:
        states = states.copy()
        states["repetition"] = counts
        return states

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        return endings(self, states, moves, offsets)

    def proven(self, states: States) -> Values:
        return np.array([self.known.get(int(s["node"]), np.nan) for s in states], np.float32)

    def write(self, game: object) -> str:
        raise NotImplementedError

    def evaluate(self, states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
        self.batches.append(len(states))
        counts = np.diff(offsets)
        rows = [self.priors.get(int(s["node"]), [1 / n] * n) for s, n in zip(states, counts, strict=True)]
        values = [self.values.get(int(s["node"]), 0.0) for s in states]
        return np.array([x for row in rows for x in row], np.float32), np.array(values, np.float32)


def search(game: Graph, options: SearchOptions = PLAIN) -> Search:
    return Search(game, game.evaluate, options)


def consistent(tree: Search) -> None:
    """Nothing is under way, and an unproven position's sum is its evaluation and its moves' sums, sign turned."""
    p = tree.pool
    assert not p.pending[: tree.edges].any()
    for node in range(tree.nodes):
        into, edges = p.parent_edge[node], slice(p.first_edge[node], p.first_edge[node] + p.num_edges[node])
        if p.low[into] == p.high[into]:
            assert p.total[into] == pytest.approx(p.low[into] * p.visits[into])
        else:
            assert p.visits[into] == 1 + p.visits[edges].sum()
            assert -p.total[into] == pytest.approx(p.value[node] + p.total[edges].sum(), abs=1e-5)


# 0 -> 1, 2; 2 -> 3, 4; 4 -> 5
GOLDEN = Graph(
    moves={0: [1, 2], 1: [6], 2: [3, 4], 3: [7], 4: [5], 5: [8]},
    priors={0: [0.6, 0.4], 2: [0.5, 0.5]},
    values={0: 0.1, 1: 0.5, 2: -0.2, 3: 0.8, 4: -0.3, 5: 0.6},
)
# simulation: visits of the two root moves, sum of their values, and the sum at the root (with its own 0.1)
STEPS = (
    # untried moves count as the root, 0.1: 0.1 + 0.6 against 0.1 + 0.4. Node 1 is worth 0.5 to the opponent.
    ((1, 0), (-0.5, 0.0), -0.4),
    # -0.5 + sqrt 2 * 0.6 / 2 = -0.08 against -0.4 / 2 + sqrt 2 * 0.4 = 0.37
    ((1, 1), (-0.5, 0.2), -0.2),
    # -0.5 + sqrt 3 * 0.3 = 0.02 against 0.2 + sqrt 3 * 0.2 = 0.55; in 2 a tie: its first move; 3 is worth 0.8 to us
    ((1, 2), (-0.5, 1.0), 0.6),
    # 0.1 against 0.5 + 2 * 0.4 / 3 = 0.77; in 2: -0.8 + sqrt 2 / 4 = -0.45 against -1 / 2 + sqrt 2 / 2 = 0.21: 4, -0.3
    ((1, 3), (-0.5, 0.7), 0.3),
    # 0.17 against 0.7 / 3 + sqrt 5 * 0.4 / 4 = 0.46; in 2: -0.37 against 0.3 + sqrt 3 / 4 = 0.73; 5: 0.6, not to us
    ((1, 4), (-0.5, 0.1), -0.3),
)


def test_golden_tree() -> None:
    """Simulations one after the other, which are those at once."""
    tree = search(GOLDEN)
    for simulations, (visits, sums, total) in enumerate(STEPS, 1):
        result = tree.run(1)[0]
        values = [s / n if n else np.nan for s, n in zip(sums, visits, strict=True)]
        assert result.visits.tolist() == list(visits)
        np.testing.assert_allclose(result.values, values, atol=1e-6)
        assert result.value == pytest.approx(total / (simulations + 1))
        np.testing.assert_allclose(result.policy, np.array(visits) / simulations)
        consistent(tree)
    assert (result.best, result.line, result.proven) == (1, (1, 1, 0), False)
    assert result.prior.tolist() == pytest.approx([0.6, 0.4])
    assert equal(search(GOLDEN).run(5)[0], replace(result, simulations=5))


def test_first_play_urgency_and_exploration_that_grows_with_visits() -> None:
    """After move 0 (prior 0.64): 0 + sqrt 2 * 0.32 = 0.45 against 0 - 0.8 r + sqrt 2 * 0.36 = 0.51 - 0.8 r for a
    reduction r. And c = c_init + ln((1 + N + c_base) / c_base); c_base 1 and N = 2: ln 4 = 1.39, which tips the second:
    -0.5 + c * sqrt 2 * 0.4 against -0.25 + c * sqrt 2 * 0.2, after N = 1: c = ln 3, either way move 0.
    """
    moves = {0: [1, 2], 1: [3], 2: [4], 3: [5]}
    game = Graph(moves, priors={0: [0.64, 0.36]})
    for reduction, visits in ((0.0, [1, 1]), (0.06, [1, 1]), (0.08, [2, 0])):
        assert search(game, plain(fpu_reduction=reduction)).run(2)[0].visits.tolist() == visits
    game = Graph(moves, priors={0: [0.8, 0.2]}, values={1: 0.5})
    assert search(game, plain(pb_c_init=0.0, pb_c_base=1.0)).run(2)[0].visits.tolist() == [2, 0]
    assert search(game, plain(pb_c_init=0.8)).run(2)[0].visits.tolist() == [1, 1]


def test_a_proven_loss_corrects_the_averages_above() -> None:
    """Move 0 looks well (0.9), until the opponent's winning reply is tried."""
    game = Graph(
        moves={0: [1, 2], 1: [3, 4], 2: [5], 3: [6]},
        priors={0: [0.7, 0.3], 1: [0.2, 0.8]},
        values={1: -0.9, 2: 0.5},
        over={4: -1.0},
    )
    tree = search(game)
    # 0.9 + sqrt 2 * 0.35 against 0.45 + sqrt 2 * 0.3: move 0, reply 1 (-0.9 + 0.8), which wins: 2 visits of -1
    second = tree.run(2)[0]
    assert (second.visits.tolist(), second.values[0]) == ([2, 0], -1.0)
    assert second.value == pytest.approx(-2 / 3)
    assert second.best == 1, "a lost move is never played while there is another"
    assert second.policy.tolist() == [0, 1]
    third = tree.run(1)[0]
    assert (third.visits.tolist(), third.value) == ([2, 1], pytest.approx(-2.5 / 4)), "it is not tried again"
    consistent(tree)


def test_endings_are_recognised_at_expansion_and_tables_need_no_evaluation() -> None:
    """The winning move is known when the root is expanded; without looking ahead a prior of 0.001 hides it."""
    game = Graph({0: [1, 2], 1: [3], 3: [4]}, priors={0: [0.999, 0.001]}, over={2: -1.0})
    result = search(game, plain(look_ahead=True)).run(100)[0]
    assert (result.best, result.proven, result.value, result.simulations) == (1, True, 1.0, 0)
    assert result.policy.tolist() == [0, 1]
    assert search(game).run(1)[0].best == 0
    game = Graph({0: [1, 2], 1: [3], 2: [4]}, known={1: 1.0, 2: -1.0})
    result = search(game).run(10)[0]
    assert (result.best, result.proven, result.value, game.batches) == (1, True, 1.0, [1])


def test_the_third_occurrence_is_a_draw() -> None:
    """0 1 2 3 0 1 2 3 0: the third time at ply 8. With the same cycle behind it, at ply 4; and move by move."""
    game = Graph({n: [(n + 1) % 4] for n in range(4)}, values=dict.fromkeys(range(4), 0.7))
    tree = search(game)
    assert not tree.run(7)[0].proven
    result = tree.run(1)[0]
    assert (result.proven, result.value) == (True, 0.0)
    tree.reset(0, game.initial(1), history=np.array([0, 3, 4, 7], np.uint64))  # keys: 2 * node + side
    assert tree.states["repetition"][0] == 1
    assert not tree.run(3)[0].proven
    assert tree.run(1)[0].proven
    tree = search(game)
    tree.run(4)
    for _ in range(3):
        tree.advance([0], [0])
        assert not tree.run(1)[0].proven  # one ply deeper each: up to ply 7
    assert tree.run(1)[0].proven
    for _ in range(5):
        tree.advance([0], [0])
    assert tree.states["repetition"][0] == 2
    with pytest.raises(ValueError, match="is over"):
        tree.run(1)


def minimax(game: Graph, node: int) -> float:
    if node in game.over:
        return game.over[node]
    return max(-minimax(game, child) for child in game.moves[node])


def random_tree(seed: int) -> Graph:
    """Up to five plies deep, two to four moves, endings of 1, 0 and -1, misleading values."""
    rng = np.random.default_rng(seed)
    moves: dict[int, list[int]] = {}
    over: dict[int, float] = {}
    level, count = [0], 1
    for ply in range(6):
        below: list[int] = []
        for node in level:
            if ply == 5 or (ply > 0 and rng.random() < 0.25):
                over[node] = float(rng.choice([-1, -1, 0, 1]))
                continue
            moves[node] = list(range(count, count + int(rng.integers(2, 5))))
            count += len(moves[node])
            below += moves[node]
        level = below
    values = dict(enumerate(rng.uniform(-0.9, 0.9, count).tolist()))
    return Graph(moves, values=values, over=over)


OPTIONS = [
    PLAIN,
    plain(look_ahead=True),
    SearchOptions(leaves=8),
    SearchOptions(leaves=32, virtual_loss=3.0, look_ahead=False),
    SearchOptions(max_num_considered_actions=3),
    SearchOptions(max_num_considered_actions=16, look_ahead=False),
]


@pytest.mark.parametrize(("options", "beside"), [*((options, 1) for options in OPTIONS), (OPTIONS[2], 3)])
def test_small_trees_are_solved(options: SearchOptions, beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proven value is the minimax value, with whatever options, and the move played keeps it."""
    monkeypatch.setattr("matrixlib.play.search.VISITS_PER_BATCH", 1)
    solved = 0
    for seed in range(25):
        game = random_tree(seed)
        tree = Search(game, game.evaluate, options, beside=beside)
        result = tree.run(3000)[0]
        expected = minimax(game, 0)
        consistent(tree)
        assert -tree.pool.high[0] <= expected <= -tree.pool.low[0], seed
        if result.proven:
            solved += 1
            assert result.value == expected, seed
            assert -minimax(game, game.moves[0][result.best]) == expected, seed
    assert solved >= 20


@pytest.mark.parametrize("value", [0.0, 0.8])
def test_virtual_loss_spreads_the_leaves_of_a_batch(value: float) -> None:
    """Priors 0.9, 0.1, equal values. One by one: 0 + sqrt 2 * 0.45 beats sqrt 2 * 0.1. In a batch of two the visit that
    is pending counts as 1 less: -1 + sqrt 2 * 0.45 = -0.36 does not."""
    values = {0: value, 1: -value, 2: -value, 3: value}
    game = Graph({0: [1, 2], 1: [3], 2: [4], 3: [5]}, priors={0: [0.9, 0.1]}, values=values)
    assert search(game).run(2)[0].visits.tolist() == [2, 0]
    assert game.batches == [1, 1, 1]
    game.batches.clear()
    tree = search(game, plain(leaves=2, virtual_loss=1.0))
    assert tree.run(2)[0].visits.tolist() == [1, 1]
    assert game.batches == [1, 2]
    consistent(tree)


def test_a_batch_grows_with_its_tree_and_with_nothing_else() -> None:
    """A leaf for every 64 visits from `leaves` to `most_leaves`, at most: a collision ends a batch early."""
    sizes = list[int]()

    def evaluate(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
        sizes.append(len(states))
        return uniform(states, moves, offsets)

    (alone,) = Search(ChessGame(), evaluate, SearchOptions(leaves=2, most_leaves=8)).run(600)
    visits = np.cumsum(sizes) - sizes
    assert (np.array(sizes) <= np.clip(visits // 64, 2, 8)).all()
    assert sizes[:2] == [1, 2]
    assert (max(sizes), sum(sizes)) == (8, 601)
    both = Search(ChessGame(), uniform, SearchOptions(leaves=2, most_leaves=8), trees=2).run([600, 90])
    assert equal(both[0], alone)


def test_a_search_for_the_best_move_alone_stops_when_it_is_decided() -> None:
    """The move is that of the whole search; a tie up to the last visit saves nothing, a forced move needs none."""

    def peaked(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
        keys = np.repeat(ChessGame().key(states), np.diff(offsets)) ^ moves.astype(np.uint64) * np.uint64(0x9E3779B9)
        weights = np.exp(keys % 97 / 8)
        sums = np.repeat(np.add.reduceat(weights, offsets[:-1]), np.diff(offsets))
        return (weights / sums).astype(np.float32), np.zeros(len(states), np.float32)

    tree = Search(ChessGame(), peaked, SearchOptions(leaves=1), trees=40)
    board = chess.Board()
    for row in range(40):
        tree.reset(row, from_boards([board]))
        board.push(list(board.legal_moves)[row % board.legal_moves.count()])
    whole = tree.run(100)
    for row in range(40):
        tree.reset(row, tree.states[row : row + 1])
    alone = tree.run(100, best_alone=True)
    assert [result.best for result in alone] == [result.best for result in whole]
    assert sum(result.simulations for result in alone) < 90 * 40
    for few, many in zip(alone, whole, strict=True):
        top = np.sort(few.visits)
        assert few.simulations == 100 or top[-1] - top[-2] > 100 - few.simulations
        assert few.visits.max() <= many.visits.max()
    equally = Graph({0: [1, 2], 1: [3], 2: [4], 3: [5], 4: [6]})
    assert search(equally).run(2, best_alone=True)[0].simulations == 2
    assert search(Graph({0: [1], 1: [2, 3]})).run(9, best_alone=True)[0].simulations == 0


def test_visits_of_a_refuted_move_do_not_decide() -> None:
    """Move 0 is refuted after 46 of 100 visits; 1 is ahead of 2 until its 13th."""
    moves = {0: [1, 200, 400], 1: [10, 5]}
    values = {1: -0.5}
    for k in range(150):
        sign = -1 if k % 2 == 0 else 1
        moves |= {first + k: [first + k + 1] for first in (10, 200, 400)}
        values |= {10 + k: -0.5 * sign, 200 + k: (0.3 if k < 12 else -0.9) * sign, 400 + k: 0.3 * sign}
    game = Graph(moves, priors={0: [0.9, 0.05, 0.05], 1: [0.978, 0.022]}, values=values, over={5: -1})
    (whole,), (alone,) = search(game).run(100), search(game).run(100, best_alone=True)
    assert whole.visits.tolist() == [46, 13, 41]
    assert alone.best == whole.best == 2
    assert alone.simulations < 100


class Unlike(ChessGame):
    """Chess in which no two states are equal."""

    states = 0

    def play(self, states: States, moves: Moves) -> States:
        after = super().play(states, moves)
        after["game"] = self.states + np.arange(len(after))
        self.states += len(after)
        return after


def test_a_state_met_again_is_not_evaluated_again_and_the_tree_is_the_same() -> None:
    """Also after a move, and once the tree has lost half its nodes; in each of two trees."""
    seen = list[bytes]()

    def evaluate(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
        seen.extend(bytes(state) for state in states)
        keys = ChessGame().key(states) + states["halfmove"] + states["repetition"]
        return uniform(states, moves, offsets)[0], (keys % 201 / 1000 - 0.1).astype(np.float32)

    def play(game: ChessGame, trees: int = 1) -> tuple[list[SearchResult], int]:
        seen.clear()
        tree, rows = Search(game, evaluate, SearchOptions(leaves=1), trees=trees), range(trees)
        for row in rows:
            tree.reset(row, from_boards([chess.Board("4k3/8/8/8/8/8/4P3/4K3 w - - 0 1")]))
        results = tree.run(300)
        before = len(seen)
        assert before == trees * len(set(seen))
        tree.advance(rows, [result.best for result in results])
        results += tree.run(200)
        consistent(tree)
        tree.trim()
        results += tree.run(200)
        assert all(map(equal, results[::trees], results[trees - 1 :: trees])), "whatever the other tree has met"
        return results[::trees], before // trees

    results, evaluated = play(ChessGame())
    unlike, more = play(Unlike())
    both, each = play(ChessGame(), trees=2)
    assert evaluated == each < 0.95 * more
    assert all(map(equal, results, unlike))
    assert all(map(equal, results, both))


def test_batches_beside_each_other_are_under_way_at_once_and_a_tree_is_the_same_whoever_evaluates() -> None:
    calls, started = iter(range(1000)), [threading.Event() for _ in range(400)]

    def evaluate(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
        number = next(calls)
        started[number].set()
        if number == 90:
            assert started[91].wait(60), "the next batch is selected only after this one"
        if number == 40:
            assert not started[41].wait(0.1), "beside others in a tree of less than 256 visits"
        return uniform(states, moves, offsets)

    options = SearchOptions(leaves=4)
    with ThreadPoolExecutor(2) as threads:
        tree = Search(ChessGame(), evaluate, options, beside=2, executor=threads)
        (result,) = tree.run(500)
    consistent(tree)
    assert (result.simulations, result.visits.sum()) == (500, 500)
    assert equal(result, Search(ChessGame(), uniform, options, beside=2).run(500)[0])
    gumbel = SearchOptions(leaves=4, max_num_considered_actions=4)  # whose halvings need all values before
    assert equal(*(Search(ChessGame(), uniform, gumbel, beside=beside).run(300)[0] for beside in (1, 2)))


def equal(a: SearchResult, b: SearchResult) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name), equal_nan=True) for f in fields(SearchResult))


@pytest.mark.parametrize("gumbel", [0, 4])
def test_a_tree_does_not_depend_on_its_neighbours(gumbel: int) -> None:
    """Games with noise and reuse, searched together and each alone: the same numbers, and other ones by seed. States of
    two trees that differ in a byte as the trees' numbers do are not one."""
    game, options = TicTacToe(), SearchOptions(max_num_considered_actions=gumbel, look_ahead=False)
    budgets = [200, 17, 90, 200]

    def varied(states: np.ndarray, moves: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        priors, _ = uniform(states, moves, offsets)
        return priors, np.sin(game.key(states).astype(np.float64)).astype(np.float32)

    def play(trees: list[int], seed: int = 5) -> dict[int, list[SearchResult]]:
        history: dict[int, list[SearchResult]] = {tree: [] for tree in trees}
        run = Search(game, varied, options, trees=len(trees), seed=seed)
        for slot, tree in enumerate(trees):
            run.reset(slot, game.initial(1), stream=tree)
        for _ in range(5):
            results = run.run([budgets[tree] for tree in trees], noise=True)
            consistent(run)
            for tree, result in zip(trees, results, strict=True):
                history[tree].append(result)
            run.advance(range(len(trees)), [result.best for result in results])
        return history

    together = play([0, 1, 2, 3])
    for tree in range(4):
        alone = play([tree])[tree]
        assert all(equal(a, b) for a, b in zip(alone, together[tree], strict=True))
    other = play([0], seed=6)[0]
    assert not all(equal(a, b) for a, b in zip(other, together[0], strict=True))


def test_subtrees_are_kept() -> None:
    game = TicTacToe()
    tree = Search(game, uniform, plain(look_ahead=True), trees=2)
    before = tree.run(300)[0]
    nodes = tree.nodes
    tree.advance([0], [before.best])
    after = tree.run(0)
    assert tree.nodes < nodes, "what no root leads to is dropped"
    best = before.visits.max()
    assert after[0].visits.sum() == best - 1  # its first visit evaluated the position itself
    assert after[0].value == pytest.approx(-before.values[before.visits.argmax()], abs=1e-6)
    assert after[0].line == before.line[1:]
    assert equal(after[1], replace(before, simulations=0)), "the other tree was left alone"
    consistent(tree)
    tree.advance([0], [int(after[0].moves[0])])
    tree.run(5, trees=[0])
    consistent(tree)


def test_a_trimmed_tree_keeps_what_its_moves_were_worth_and_goes_on() -> None:
    game = ChessGame()
    tree, whole = (Search(game, uniform, SearchOptions(leaves=2)) for _ in range(2))
    before, _ = tree.run(400)[0], whole.run(400)
    nodes, size = tree.nodes, tree.bytes
    tree.trim()
    assert tree.nodes < nodes / 2
    assert tree.bytes < size / 2
    (kept,) = tree.run(0)
    assert (kept.visits == before.visits).all()
    assert np.array_equal(kept.values, before.values, equal_nan=True)
    (after,), (untrimmed,) = tree.run(200), whole.run(200)
    assert after.visits.sum() == untrimmed.visits.sum() == before.visits.sum() + 200
    assert not tree.pool.pending[: tree.edges].any()


def test_noise_is_mixed_once_into_the_root_alone() -> None:
    game = TicTacToe()
    tree = Search(game, uniform, SearchOptions(leaves=1, dirichlet_fraction=0.9, dirichlet_alpha_total=1.0), seed=3)
    for _ in range(5):
        result = tree.run(40, noise=True)[0]
        assert (result.prior == result.prior[0]).all(), "priors come back without noise"
    assert (tree.pool.prior[1 : tree.edges] >= 1 / 9 - 1e-6).all()
    plain = Search(game, uniform, SearchOptions(leaves=1), seed=3).run(200)[0]
    again = Search(game, uniform, SearchOptions(leaves=1), seed=4).run(200)[0]
    assert equal(plain, again), "without noise nothing is random"
    assert result.visits.max() > 2 * plain.visits.max(), "noise of 0.9 draws the visits to a few moves"


def test_gumbel_golden_root() -> None:
    """Four moves, 8 simulations: each once, the best two three times; sigma(q) = (1 + most visits) * (q + 1) / 2."""
    chain = {n: [n + 4] for n in range(1, 40)}
    values = {
        n + 4 * k: (-1) ** k * v for n, v in zip(range(1, 5), (0.2, -0.4, 0.5, -0.6), strict=True) for k in range(9)
    }
    game = Graph({0: [1, 2, 3, 4], **chain}, values=values, priors={0: [0.4, 0.1, 0.3, 0.2]})
    options = plain(max_num_considered_actions=4, maxvisit_init=1.0)
    result = search(game, options).run(8)[0]
    # After the first round: ln prior + 2 * (q + 1) / 2 with q = -0.2 0.4 -0.5 0.6:
    # -0.916 + 0.8 = -0.116, -2.303 + 1.4 = -0.903, -1.204 + 0.5 = -0.704, -1.609 + 1.6 = -0.009: moves 3 and 0.
    assert result.visits.tolist() == [3, 1, 1, 3]
    np.testing.assert_allclose(result.values, [-0.2, 0.4, -0.5, 0.6], atol=1e-6)
    # At the end (1 + 3) * (q + 1) / 2 = 1.6 2.8 1.0 3.2.
    scores = np.log([0.4, 0.1, 0.3, 0.2]) + np.array([1.6, 2.8, 1.0, 3.2])
    np.testing.assert_allclose(result.policy, np.exp(scores) / np.exp(scores).sum(), rtol=1e-5)
    assert result.best == 3


def test_gumbel_completes_the_value_of_untried_moves() -> None:
    """v_mix = (v + visits * sum(prior * q) / sum(prior)) / (1 + visits), sums over tried moves."""
    game = Graph(
        {0: [1, 2, 3], 1: [4], 2: [4], 3: [4]}, priors={0: [0.5, 0.3, 0.2]}, values={0: 0.1, 1: -0.2, 2: 0.1, 3: 0.9}
    )
    result = search(game, plain(max_num_considered_actions=2, maxvisit_init=1.0)).run(2)[0]
    assert result.visits.tolist() == [1, 1, 0]
    mixed = (0.1 + 2 * (0.5 * 0.2 + 0.3 * -0.1) / 0.8) / 3
    scores = np.log([0.5, 0.3, 0.2]) + (np.array([0.2, -0.1, mixed]) + 1)
    np.testing.assert_allclose(result.policy, np.exp(scores) / np.exp(scores).sum(), rtol=1e-5)
    assert math.isnan(result.values[2])


def test_gumbel_noise_samples_moves_by_their_prior() -> None:
    """One considered move and one simulation: the Gumbel-max trick draws from the prior."""
    game = Graph({0: [1, 2, 3], 1: [4], 2: [4], 3: [4], 4: [5]}, priors={0: [0.6, 0.3, 0.1]})
    tree = Search(game, game.evaluate, SearchOptions(max_num_considered_actions=1), trees=1500, seed=1)
    best = np.array([f.best for f in tree.run(1, noise=True)])
    np.testing.assert_allclose(np.bincount(best, minlength=3) / 1500, [0.6, 0.3, 0.1], atol=0.04)
    assert {f.best for f in tree.run(1)} <= {0, 1, 2}


def test_gumbel_batches_do_not_cross_a_halving() -> None:
    """Many leaves at once give what one at a time gives, where no tree below the root has a choice; and where there
    is one, a batch still is no more than a round: of the 4 moves, then twice of the best 2."""
    chain = {n: [n + 4] for n in range(1, 80)}
    game = Graph({0: [1, 2, 3, 4], **chain}, values={n: 0.1 * (n % 4) for n in range(1, 80)})
    one = search(game, plain(max_num_considered_actions=4)).run(16)[0]
    many = search(game, plain(max_num_considered_actions=4, leaves=16)).run(16)[0]
    assert equal(one, many)
    bushy = Graph({n: [4 * n + k for k in range(1, 5)] for n in range(400)})
    search(bushy, plain(max_num_considered_actions=4, leaves=16)).run(8)
    assert bushy.batches == [1, 4, 2, 2]


@pytest.mark.parametrize("beside", [1, 2])
def test_an_interrupted_search_can_be_used_again_and_one_can_be_stopped(
    beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluator that fails once, in the midst of a batch: afterwards as if nothing had been."""
    monkeypatch.setattr("matrixlib.play.search.VISITS_PER_BATCH", 1)
    game, calls = TicTacToe(), iter(range(1000))

    def fails(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
        if next(calls) == 4:
            raise MemoryError
        return uniform(states, moves, offsets)

    tree = Search(game, fails, seed=2, beside=beside)
    with pytest.raises(MemoryError):
        tree.run(200, noise=True)
    result = tree.run(200)[0]
    consistent(tree)
    assert equal(result, Search(game, uniform, seed=2, beside=beside).run(200)[0])
    with pytest.raises(ValueError, match="not finite"):
        search(Graph({0: [1], 1: [2]}, values={0: math.nan})).run(1)
    rounds = iter([False, False, True])
    stopped = Search(GOLDEN, GOLDEN.evaluate, PLAIN, beside=beside)
    assert stopped.run(100, until=lambda: next(rounds))[0].simulations == 2
    consistent(stopped)


def test_the_plies_to_a_proven_end_are_those_of_best_play() -> None:
    """Move 0 wins at once; after move 1 the other side can lose in three plies or, as it will, in five."""
    game = Graph(moves={0: [1, 2], 2: [3, 4], 3: [5], 4: [6], 6: [7], 7: [8]}, over={1: -1, 5: -1, 8: -1})
    search = Search(game, game.evaluate, PLAIN)
    result = search.run(60)[0]
    assert result.plies.tolist() == [1, 0], "nothing more is tried once the win is sure"
    search.reset(0, game.initial(1), only=[1])
    result = search.run(60)[0]
    assert (result.moves.tolist(), result.plies.tolist(), result.value) == ([1], [5], 1.0)
    assert search.line(0, 1) == result.line


def test_only_the_moves_to_consider_are_searched() -> None:
    game = TicTacToe()
    search = Search(game, uniform, SearchOptions(), trees=2)
    search.reset(0, game.initial(1), only=[8, 2])
    first, second = search.run(40)
    assert (first.moves.tolist(), first.prior.tolist()) == ([2, 8], [0.5, 0.5])
    assert len(second.moves) == 9, "the other tree has all"
    search.advance([0, 1], [4, 4])
    first, second = search.run(40)
    assert first.moves.tolist() == [0, 1, 2, 3, 5, 6, 7, 8], "after a move that was not considered too"
    assert first.visits.sum() == 40 <= second.visits.sum()
    search.reset(0, game.initial(1), only=[9])
    with pytest.raises(ValueError, match="none of the moves"):
        search.run(1)
