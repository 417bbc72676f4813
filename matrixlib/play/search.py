"""Monte-Carlo tree search over a Game, hundreds of trees in lock-step.

In each round every tree selects up to `leaves` leaves (virtual loss separates them); all are evaluated in one batch,
and values are backed up. A state that its tree has already is not evaluated again, whatever the history before it: it
takes over what the evaluator said (Lc0's default, too). Selection is PUCT (Silver et al. 2018); at the root optionally
sequential halving with Gumbel noise (Danihelka et al. 2022). Options are named as in mctx.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from matrixlib.config import Count, CountOrZero, Fraction, NonNegative, Positive, Real, Section, option
from matrixlib.play import tree as kernels
from matrixlib.play.game import Game, Moves, Offsets, Past, States, Values
from matrixlib.play.tree import F32, F64, FAR, I32, OF_NODES, U64, Pool

Evaluate: TypeAlias = Callable[..., tuple[Values, Values]]
"""(states (N,), legal moves (K,), offsets (N + 1,)) -> (priors (K,), sum 1 in each state, and the values (N,)
in [-1, 1] for the sides to move). One with an attribute `history` above 0 is also given, as the fourth argument, the
`Past` of so many plies before each state."""

Result: TypeAlias = Callable[[], tuple[Values, Values]]  # waits for the evaluator's

MOST_PLIES = 256  # longest principal variation
VISITS_PER_BATCH = 128  # of a tree, for each batch that is evaluated beside others


def _table(nodes: int) -> I32:
    """An empty hash table, at most half full with so many nodes."""
    return np.full(1 << nodes.bit_length() + 1, -1, np.int32)


def _longer(array: NDArray[Any], size: int) -> NDArray[Any]:
    """A copy with room for `size` entries."""
    out = np.empty(size, array.dtype)
    out[: len(array)] = array
    return out


def _rows(keep: NDArray[np.bool_], moves: Moves, offsets: Offsets) -> tuple[Moves, Offsets]:
    """Ragged rows (N,) to keep."""
    counts = np.diff(offsets)
    return moves[np.repeat(keep, counts)], np.concatenate([[0], counts[keep].cumsum()])


class Evaluator:
    """Network evaluation of game states: priors are the softmax over legal moves, the value is the expected result for
    the side to move. history: number of earlier plies the network needs.

    net: an `engine.network.Network`. Its task's `inputs(states, moves, offsets)` gives the arrays of its `predict`,
    including `policy_index` (B, L); if the task has a `history`, `inputs` also takes a `Past`.
    """

    def __init__(self, net: Any) -> None:
        assert not net.training, "the network must be in eval mode"
        self.net = net
        self.history: int = getattr(net.task, "history", 0)

    def __call__(
        self, states: States, moves: Moves, offsets: Offsets, past: Past | None = None
    ) -> tuple[Values, Values]:
        """Priors (K,) and values (N,) of states (N,) with legal moves (K,) at offsets (N + 1,).

        past: history; without it the network fills it by its own rule.
        """
        if not len(states):
            return np.empty(0, np.float32), np.empty(0, np.float32)
        known = () if past is None else (past,)
        batch = self.net.task.inputs(states, moves, offsets, *known)
        out = self.net.predict(batch)
        return np.exp(out["policy"][batch["policy_index"] >= 0]), out["value"]


class SearchOptions(Section):
    """How a tree is searched.

    PUCT explores with pb_c_init + ln((1 + N + pb_c_base) / pb_c_base); a Gumbel search scales values q in [0, 1] to
    (maxvisit_init + most visits of a move) * value_scale * q. An untried move is worth its parent's value less
    `fpu_reduction` times the root of the prior tried already.
    """

    leaves: Count = option(8, "leaves of one tree in a batch; 1 is sequential search")
    most_leaves: Count = option(1, "a batch grows up to so many leaves, one for every 64 visits of its tree")
    pb_c_init: Real = option(1.25, "exploration of PUCT")
    pb_c_base: Positive = option(19652.0, "visits at which exploration starts to grow")
    fpu_reduction: Real = option(
        0.3, "first-play urgency (FPU): value of an untried move below its parent's, per square root of the prior tried"
    )
    virtual_loss: NonNegative = option(
        0.25, "virtual loss: what a pending visit is worth less than the others of its move"
    )
    dirichlet_alpha_total: Positive = option(
        10.0, "Dirichlet noise at the root: mctx's `dirichlet_alpha` times the number of legal moves"
    )
    dirichlet_fraction: Fraction = option(0.25, "share of noise in the root's priors")
    max_num_considered_actions: CountOrZero = option(0, "root moves considered by a Gumbel search; 0 = PUCT")
    maxvisit_init: NonNegative = option(
        50.0, "visits added to the most visited move's in a Gumbel search's value scale"
    )
    value_scale: NonNegative = option(1.0, "factor of the value scale: the smaller, the softer the policy")
    look_ahead: bool = option(True, "detect moves that end the game when their position is expanded")


@dataclass(frozen=True)
class SearchResult:
    """Search result for a position, for the side to move. Arrays (K,) over the legal moves, ascending.

    prior: the evaluator's, without noise. visits: including reused subtrees. values: mean or proven value of each move,
    NaN if unvisited. plies: to the end of the game if proven, else 0. policy: training target: visits (PUCT) or the
    improved policy (Gumbel), 0 on lost moves, all on the best move of a proven win. value: of the position. proven:
    whether it is exact. line: principal variation, best move first.
    """

    moves: I32
    prior: F32
    visits: I32
    values: F32
    plies: I32
    policy: F32
    value: float
    proven: bool
    best: int
    line: tuple[int, ...]
    simulations: int


class Leaves(NamedTuple):
    """Leaves (edge, node, tree) of trees, their states, keys and marks (see `Pool`), legal moves and known endings."""

    leaf: I32
    states: States
    keys: U64
    marks: U64
    moves: Moves
    offsets: Offsets
    endings: Values

    def rows(self, keep: NDArray[np.bool_]) -> "Leaves":
        """The leaves to keep (N,)."""
        moves, offsets = _rows(keep, self.moves, self.offsets)
        endings = self.endings[np.repeat(keep, np.diff(self.offsets))]
        return Leaves(self.leaf[keep], self.states[keep], self.keys[keep], self.marks[keep], moves, offsets, endings)


class Search:
    """Trees over one game and one evaluator, by number from 0, searched together. A result is a pure function of state,
    history, moves, `seed`, `stream`, options and `beside`, whatever the other trees are.

    beside: most batches of one tree that threads of `executor` evaluate at once, one for every 128 visits; virtual loss
    separates them too. Several trees and Gumbel searches evaluate one at a time.
    """

    def __init__(
        self,
        game: Game,
        evaluate: Evaluate,
        options: SearchOptions | None = None,
        trees: int = 1,
        seed: int = 0,
        beside: int = 1,
        executor: Executor | None = None,
    ) -> None:
        self.game, self.evaluate, self.options, self.seed = game, evaluate, options or SearchOptions(), seed
        self.trees, self.executor = trees, executor
        self.beside = 1 if trees > 1 or self.options.max_num_considered_actions else beside
        self.states = game.initial(trees)
        self.pool = kernels.empty_pool(1024, 32_768 + trees)
        self.nodes, self.edges = 0, trees
        self._table = _table(1024)  # nodes by mark
        self._node_states = game.initial(1024)
        self._roots = np.full(trees, -1, np.int32)
        self._history = np.zeros((trees, 64), np.uint64)  # keys of the states before the root
        depth: int = getattr(evaluate, "history", 0)
        self._past = Past(game.initial(trees * depth).reshape(trees, depth), np.zeros(trees, np.int64))
        self._plies = np.zeros(trees, np.int64)
        self._streams = np.arange(trees)
        self._only: list[tuple[int, ...]] = [()] * trees
        self._stale = False  # whether unreachable nodes may exist

    def reset(
        self,
        tree: int,
        state: States,
        history: NDArray[np.uint64] | None = None,
        stream: int | None = None,
        only: Sequence[int] = (),
        past: States | None = None,
    ) -> None:
        """Set a tree to a state (1,), dropping its nodes. history: keys of the game's earlier states; without it
        repetitions count from this position on. stream: number of the random stream, default the tree's. only: legal
        moves to consider at the root, default all. past: latest earlier states in game order, for evaluators with
        history."""
        keys = np.zeros(0, np.uint64) if history is None else history
        if len(keys):
            state = self.game.repeat(state, np.array([(keys == self.game.key(state)).sum()], np.int32))
        self.states[tree] = state[0]
        depth = self._past.states.shape[1]
        last = self._past.states[tree, :0] if past is None else past[::-1][:depth]
        self._past.states[tree, : len(last)], self._past.known[tree] = last, len(last)
        self._roots[tree], self._stale = -1, True
        self._only[tree] = tuple(only)
        self._streams[tree] = tree if stream is None else stream
        self._plies[tree] = len(keys)
        self._lengthen(len(keys))
        self._history[tree, : len(keys)] = keys

    def advance(self, trees: Sequence[int], moves: Sequence[int]) -> None:
        """Play a move in each of the trees, keeping the subtree."""
        rows = np.asarray(trees, np.int64)
        self._lengthen(int(self._plies[rows].max(initial=0)) + 1)
        self._history[rows, self._plies[rows]] = self.game.key(self.states[rows])
        self._plies[rows] += 1
        depth = self._past.states.shape[1]
        if depth:
            self._past.states[rows, 1:] = self._past.states[rows, :-1]
            self._past.states[rows, 0] = self.states[rows]
            self._past.known[rows] = np.minimum(self._past.known[rows] + 1, depth)
        after = self.game.play(self.states[rows], np.asarray(moves, np.int32))
        past = self._history[rows] == self.game.key(after)[:, None]
        past &= np.arange(past.shape[1]) < self._plies[rows][:, None]
        self.states[rows] = self.game.repeat(after, past.sum(1).astype(np.int32))
        self._stale = True
        for tree, move in zip(rows, moves, strict=True):
            self._only[tree] = ()
            if self._roots[tree] >= 0:
                edges = self._root_edges(tree)
                child = self.pool.child[edges][self.pool.move[edges] == move]
                self._roots[tree] = child[0] if len(child) else -1  # a restricted root may lack this move

    def run(
        self,
        simulations: int | Sequence[int],
        trees: Sequence[int] | None = None,
        noise: bool | Sequence[bool] = False,
        until: Callable[[], bool] | None = None,
        best_alone: bool = False,
    ) -> list[SearchResult]:
        """Search the trees (default all), each for a number of further simulations.

        noise: exploration at the root (Dirichlet or Gumbel), for self-play; without it nothing is random. best_alone:
        of a PUCT search only the best move is of interest; stop when no other can get as many visits. until: called
        before every round; True stops early. ValueError if a tree's game is over. After other errors, such as the
        evaluator's, trees are empty.
        """
        rows = np.arange(self.trees, dtype=np.int32) if trees is None else np.asarray(trees, np.int32)
        budget = np.zeros(len(rows), np.int64) + np.asarray(simulations, np.int64)
        noisy = np.broadcast_to(np.asarray(noise, np.bool_), rows.shape)
        self._prune()
        self._plant(rows[self._roots[rows] < 0])
        o = self.options
        priors = [self.pool.prior[self._root_edges(t)].copy() for t in rows]
        width = max((len(prior) for prior in priors), default=0)
        rounds = int(budget.max(initial=0)) if o.max_num_considered_actions else 0
        logits, base = np.zeros((len(rows), width)), np.zeros((len(rows), width), np.int32)
        schedule = np.zeros((len(rows), rounds), np.int32)
        for i, tree in enumerate(rows):
            self._prepare(i, int(tree), priors[i], int(budget[i]), bool(noisy[i]), logits, base, schedule)
        done = np.zeros(len(rows), np.int64)
        out = np.zeros((len(rows) * max(o.leaves, o.most_leaves), 3), np.int32)
        explore = (o.pb_c_init, o.pb_c_base, o.fpu_reduction, o.virtual_loss)
        scale = (o.maxvisit_init, o.value_scale)
        gumbel = (scale, schedule, logits, base)
        leaves = o.leaves, o.most_leaves
        waiting: deque[tuple[Leaves, Result]] = deque()  # selected, being evaluated
        try:
            while until is None or not until():
                n = kernels.simulate(
                    self.pool, rows, self._roots, budget, done, best_alone, leaves, explore, *gumbel, out
                )
                if n and len((new := self._visit(out[:n].copy())).keys):
                    waiting.append(self._submit(new))
                beside = min(self.beside, self.pool.visits[rows].max(initial=0) // VISITS_PER_BATCH)
                if waiting and (len(waiting) >= beside or not n):
                    self._finish(*waiting.popleft())
                elif not n:
                    break
            for batch in waiting:
                self._finish(*batch)
        except BaseException:
            self._roots[rows], self._stale = -1, True  # pending visits, and noisy priors
            raise
        for tree, prior in zip(rows, priors, strict=True):
            self.pool.prior[self._root_edges(tree)] = prior
        return [self._result(int(t), priors[i], logits[i], base[i], int(done[i])) for i, t in enumerate(rows)]

    def line(self, tree: int, move: int) -> tuple[int, ...]:
        """Principal variation starting with a move of a searched tree's root."""
        edges = self._root_edges(tree)
        return self._line_from(edges.start + int((self.pool.move[edges] == move).argmax()))

    @property
    def bytes(self) -> int:
        """Upper bound of the trees' memory: twice the need, as arrays double when full."""
        sizes = [array.itemsize for array in self.pool]
        node = sum(sizes[: kernels.OF_NODES]) + self._node_states.itemsize + 4 * self._table.itemsize
        return 2 * (self.nodes * node + self.edges * sum(sizes[kernels.OF_NODES :]))

    def trim(self) -> None:
        """Drop about the less visited half of the nodes; their statistics stay in their edges."""
        self._prune()
        visits = self.pool.visits[self.pool.parent_edge[: self.nodes]]
        self._stale = True
        self._prune(int(np.median(visits)) + 1)

    def _root_edges(self, tree: int) -> slice:
        """Edges of a tree's root."""
        root = self._roots[tree]
        first = int(self.pool.first_edge[root])
        return slice(first, first + int(self.pool.num_edges[root]))

    def _lengthen(self, plies: int) -> None:
        missing = plies - self._history.shape[1]
        if missing > 0:
            self._history = np.pad(self._history, ((0, 0), (0, max(missing, self._history.shape[1]))))

    def _prune(self, visits: int = 0) -> None:
        """Drop nodes not reachable from roots by edges with at least `visits` visits."""
        if not self._stale:
            return
        self._stale = False
        before, moved = self.nodes, np.empty(self.nodes, np.int32)
        self.nodes, self.edges = kernels.compact(self.pool, self.trees, self._roots, before, moved, visits)
        self._table.fill(-1)
        kernels.fill(self.pool, self._table, self.nodes)
        self._node_states[: self.nodes] = self._node_states[:before][moved >= 0]

    def _plant(self, trees: I32) -> None:
        """Expand roots; evaluates even where tables know the value."""
        if not len(trees):
            return
        states = self.states[trees]
        moves, offsets = self.game.legal(states)
        over = ~np.isnan(self.game.terminal(states, np.diff(offsets)))
        if over.any():
            raise ValueError(f"the game of tree {trees[over.argmax()]} is over: nothing to search, reset the tree")
        if any(only := [self._only[tree] for tree in trees]):
            rows = zip(np.split(moves, offsets[1:-1]), only, strict=True)
            considered = [row[np.isin(row, some)] if some else row for row, some in rows]
            if not all(len(row) for row in considered):
                raise ValueError("none of the moves to consider is legal")
            moves, offsets = np.concatenate(considered), np.cumsum([0, *map(len, considered)])
        p = self.pool
        p.visits[trees], p.total[trees], p.pending[trees], p.child[trees] = 0, 0, 1, -1
        p.low[trees], p.high[trees] = -1, 1
        leaf = np.stack([trees, np.full_like(trees, -1), trees], 1)
        self._finish(*self._submit(self._leaves(leaf, states, self.game.key(states), moves, offsets)))
        self._roots[trees] = self.pool.child[trees]

    def _prepare(
        self, i: int, tree: int, prior: F32, budget: int, noisy: bool, logits: F64, base: I32, schedule: I32
    ) -> None:
        """Noise of a root, and row i of the Gumbel search's state."""
        o, count, edges = self.options, len(prior), self._root_edges(tree)
        if noisy:
            rng = np.random.default_rng([self.seed, self._streams[tree], self._plies[tree]])
        if o.max_num_considered_actions:
            logits[i, :count] = np.log(np.maximum(prior, np.finfo(np.float32).tiny))
            if noisy:
                logits[i, :count] += rng.gumbel(size=count)
            base[i, :count] = self.pool.visits[edges]
            schedule[i, :budget] = kernels.considered_visits(min(o.max_num_considered_actions, count), budget)
        elif noisy and count > 1:
            noise = rng.dirichlet(np.full(count, o.dirichlet_alpha_total / count))
            self.pool.prior[edges] = (1 - o.dirichlet_fraction) * prior + o.dirichlet_fraction * noise

    def _visit(self, leaf: I32) -> Leaves:
        """Create the positions of selected leaves, settle exact ones, expand known ones; those left to evaluate."""
        game, p = self.game, self.pool
        states = game.play(self._node_states[leaf[:, 1]], p.move[leaf[:, 0]])
        keys = game.key(states)
        counts = kernels.occurrences(p, leaf, keys, self._history, self._plies)
        if counts.any():
            states = game.repeat(states, counts)
        moves, offsets = game.legal(states)
        exact = game.terminal(states, np.diff(offsets))
        distances = np.where(np.isnan(exact), FAR, 1).astype(np.int32)
        exact = np.where(np.isnan(exact), game.proven(states), exact)
        live = np.isnan(exact)
        new = self._leaves(leaf[live], states[live], keys[live], *_rows(live, moves, offsets))
        if not np.isnan(new.endings).all():
            # A winning move, or the best if every move ends the game, gives the position's value.
            best, whole = (f.reduceat(new.endings, new.offsets[:-1]) for f in (np.fmax, np.maximum))
            known = (best >= 1) | ~np.isnan(whole)
            ahead = np.flatnonzero(live)[known]
            exact[ahead], distances[ahead], live[ahead] = best[known], 2, False
            new = new.rows(~known)
        kernels.settle(p, leaf[~live], exact[~live].astype(np.float32), distances[~live])
        found = kernels.find(p, self._table, new.marks)
        if (again := found >= 0).any():
            old, found = new.rows(again), found[again]
            edges = np.repeat(p.first_edge[found] - old.offsets[:-1], np.diff(old.offsets)) + np.arange(len(old.moves))
            self._expand(old, p.prior[edges], p.value[found])
            new = new.rows(~again)
        return new

    def _leaves(self, leaf: I32, states: States, keys: U64, moves: Moves, offsets: Offsets) -> Leaves:
        rows = np.ascontiguousarray(states).view(np.uint8).reshape(len(states), states.itemsize)
        marks = kernels.mark(rows, leaf[:, 2])
        endings = np.full(len(moves), np.nan, np.float32)
        if self.options.look_ahead and len(states):
            endings = self.game.endings(states, moves, offsets)
        return Leaves(leaf, states, keys, marks, moves, offsets, endings)

    def _submit(self, new: Leaves) -> tuple[Leaves, Result]:
        """Leaves, and their evaluation, which begins."""
        past = (self._before(new.leaf),) if self._past.states.shape[1] else ()
        call = partial(self.evaluate, new.states, new.moves, new.offsets, *past)
        return new, self.executor.submit(call).result if self.executor else call

    def _finish(self, new: Leaves, result: Result) -> None:
        """Create the nodes of leaves once they are evaluated."""
        priors, values = result()
        if priors.shape != new.moves.shape or values.shape != new.keys.shape:
            raise ValueError(f"the evaluator must return {new.moves.shape} priors and {len(new.keys)} values")
        if not (np.isfinite(priors).all() and np.isfinite(values).all()):
            raise ValueError("the evaluator returned a value that is not finite: the network is broken")
        self._expand(new, priors.astype(np.float32), values.astype(np.float32))

    def _expand(self, new: Leaves, priors: F32, values: F32) -> None:
        """Create the nodes of leaves."""
        self._reserve(self.nodes + len(new.keys), self.edges + len(new.moves))
        self._node_states[self.nodes : self.nodes + len(new.keys)] = new.states
        arrays = (new.leaf, new.keys, new.marks, values, new.moves, new.offsets, priors, new.endings)
        kernels.expand(self.pool, self._table, self.nodes, self.edges, *arrays)
        self.nodes += len(new.keys)
        self.edges += len(new.moves)

    def _before(self, leaf: I32) -> Past:
        """History of leaves: nodes on the path from the root, then the game's."""
        depth, tree = self._past.states.shape[1], leaf[:, 2]
        node = kernels.ancestors(self.pool, leaf, depth)
        ways, states = (node >= 0).sum(1), self._node_states[node]
        row, ply = np.nonzero(node < 0)
        states[row, ply] = self._past.states[tree[row], ply - ways[row]]
        return Past(states, np.minimum(ways + self._past.known[tree], depth))

    def _reserve(self, nodes: int, edges: int) -> None:
        p = self.pool
        if nodes > len(p.first_edge) or edges > len(p.move):
            nodes, edges = max(2 * nodes, len(p.first_edge)), max(2 * edges, len(p.move))
            pool = Pool(*(_longer(a, nodes if i < OF_NODES else edges) for i, a in enumerate(p)))
            states, table = _longer(self._node_states, nodes), _table(nodes)
            kernels.fill(pool, table, self.nodes)
            self.pool, self._node_states, self._table = pool, states, table  # all of them, or none without memory

    def _result(self, tree: int, prior: F32, logits: F64, base: I32, done: int) -> SearchResult:
        p, o, edges = self.pool, self.options, self._root_edges(tree)
        root, visits, low, high = self._roots[tree], p.visits[edges].copy(), p.low[edges], p.high[edges]
        known = (visits > 0) | (low == high)
        values = np.clip(p.total[edges] / np.maximum(visits, 1), low, high)
        best = kernels.best_edge(p, root) - edges.start
        if o.max_num_considered_actions:
            scores = np.empty(len(prior))
            kernels.gumbel_scores(p, root, logits, o.maxvisit_init, o.value_scale, scores)
            rank = np.where(high > -1, visits - base[: len(prior)], -1)
            choice = int(np.where(rank == rank.max(), scores, -np.inf).argmax())
            best = kernels.prefer_proven(p, root, edges.start + choice if rank[choice] >= 0 else -1) - edges.start
            plain = np.log(np.maximum(prior, np.finfo(np.float32).tiny)).astype(np.float64)
            kernels.gumbel_scores(p, root, plain, o.maxvisit_init, o.value_scale, scores)
            policy = np.exp(scores - scores.max())
        else:
            policy = visits.astype(np.float64) if visits.any() else prior.astype(np.float64)
        if p.low[tree] == p.high[tree] == -1:  # proven win
            policy = np.zeros(len(prior))
            policy[best] = 1
        elif high.max() > -1:
            policy = np.where(high > -1, policy, 0)
            policy = policy if policy.any() else (high > -1).astype(np.float64)
        return SearchResult(
            moves=p.move[edges].copy(),
            prior=prior,
            visits=visits,
            values=np.where(known, values, np.nan).astype(np.float32),
            plies=np.where((low == high) & (p.distance[edges] < FAR), p.distance[edges], 0).astype(np.int32),
            policy=(policy / policy.sum()).astype(np.float32),
            value=float(-p.total[tree] / p.visits[tree]),
            proven=bool(p.low[tree] == p.high[tree]),
            best=int(p.move[edges][best]),
            line=self._line_from(edges.start + best),
            simulations=done,
        )

    def _line_from(self, edge: int) -> tuple[int, ...]:
        line = np.zeros(MOST_PLIES, np.int32)
        return tuple(line[: kernels.principal_variation(self.pool, edge, line)].tolist())
