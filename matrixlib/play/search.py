"""Monte-Carlo tree search over a Game, hundreds of trees in lock-step, on arrays.

`Search` holds the trees. In each round every tree selects up to `leaves` leaves (with virtual loss, so that
they differ), all their positions are made and evaluated in one batch, and the values are backed up. Inside a
tree moves are selected by PUCT (Silver et al. 2018), at the root either so or, with `gumbel` > 0, by sequential
halving over Gumbel-perturbed moves (Danihelka et al. 2022, which improves the policy from 2 simulations on).

Whatever an edge holds is seen from the side that makes its move, so a value changes its sign once a ply, in
`_backup`. Besides its average an edge has bounds [low, high] on its exact value (score-bounded MCTS, Cazenave
and Saffidine 2010): endings, repetitions and table values have low = high; a position's bounds are the maxima
over its moves. An edge with low = high is proven: it counts with that value from then on, also in all averages
above it. Lost edges are no longer tried, and a tree whose root is proven stops.

The kernels and all they call stay in this file, because numba's cache does not see changes made elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from matrixlib.play.game import Game, Moves, Offsets, States, Values

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Int: TypeAlias = Any  # a scalar inside a kernel
Evaluate: TypeAlias = Callable[[States, Moves, Offsets], tuple[Values, Values]]
"""(states (N,), legal moves (K,), offsets (N + 1,)) -> (priors (K,), sum 1 in each state, and the values (N,)
in [-1, 1] for the sides to move)."""

FAR = 10_000  # distance of an end that is known to exist, but not where
MOST_LINE = 256  # plies of a principal variation


@dataclass(frozen=True)
class SearchOptions:
    """How a tree is searched.

    leaves: of one tree in a batch; 1 is sequential search. c_init, c_base: exploration, PUCT's c is
    c_init + ln((1 + N + c_base) / c_base). fpu: how much less than its parent an untried move is held to be
    worth, times the root of the prior tried already. virtual_loss: taken off for each visit under way.
    noise_alpha: Dirichlet parameter, summed over the legal moves; noise_weight: its share in the root's priors.
    gumbel: root moves considered at first, 0 for PUCT; gumbel_visits and gumbel_scale: sigma(q) =
    (gumbel_visits + most visits of a move) * gumbel_scale * q, with q scaled to [0, 1].
    look_ahead: whether moves that end the game are recognised when their position is expanded.
    """

    leaves: int = 8
    c_init: float = 1.25
    c_base: float = 19652.0
    fpu: float = 0.3
    virtual_loss: float = 1.0
    noise_alpha: float = 10.0
    noise_weight: float = 0.25
    gumbel: int = 0
    gumbel_visits: float = 50.0
    gumbel_scale: float = 1.0
    look_ahead: bool = True

    def __post_init__(self) -> None:
        if self.leaves < 1 or self.gumbel < 0:
            raise ValueError(
                f"leaves must be 1 or more and gumbel 0 or more, not {self.leaves}, {self.gumbel}"
            )
        if not 0 <= self.noise_weight <= 1 or self.noise_alpha <= 0 or self.c_base <= 0:
            raise ValueError("noise_weight must be in [0, 1], noise_alpha and c_base above 0")


@dataclass(frozen=True)
class Found:
    """What a search found, from the side to move. Arrays (K,) over the legal moves, ascending.

    prior: the evaluator's, without noise. visits: with those of reused subtrees. values: average or proven value
    of each move, NaN if it was never tried. plies: to the end of the game where that is proven, else 0. policy: what
    the search makes of the prior, a training target: visits (PUCT) or the improved policy (Gumbel), nothing on lost
    moves, all on the best one where it wins for sure. value: of the position. proven: whether that is exact. line:
    principal variation, the best move first.
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


class Pool(NamedTuple):
    """The nodes (M,) and edges (E,) of all trees, see KINDS. Edges 0 .. trees - 1 lead to the roots; the edges of a
    node are adjacent."""

    first: Any  # of a node: its first edge
    size: Any  # its number of edges
    parent: Any  # the node before it, -1 at a root
    into: Any  # the edge that leads to it
    key: Any  # of its state, for repetitions
    value: Any  # what the evaluator said, for the side to move
    move: Any  # of an edge: the game's move
    child: Any  # the node it leads to, -1 before that is expanded or where it needs none
    prior: Any
    visits: Any
    pending: Any  # visits under way
    total: Any  # sum of values
    low: Any  # bounds of the exact value
    high: Any
    distance: Any  # plies to the end of the game, where low = high


KINDS = ["i4", "i4", "i4", "i4", "u8", "f4", "i4", "i4", "f4", "i4", "i4", "f8", "f4", "f4", "i4"]
OF_NODES = Pool._fields.index("move")  # the columns before it


# --- kernels --------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _quality(p: Pool, e: Int) -> float:
    """Value of an edge that has visits or is proven."""
    average = p.total[e] / p.visits[e] if p.visits[e] > 0 else 0.0
    return min(max(average, p.low[e]), p.high[e])


@njit(cache=True, nogil=True)
def _puct(p: Pool, node: Int, c_init: float, c_base: float, fpu: float, loss: float) -> Int:
    """The edge to follow from a node, on the way through its own edge (which counts as pending)."""
    into, first = p.into[node], p.first[node]
    last = first + p.size[node]
    n = p.visits[into] + p.pending[into] - 1
    explore = (c_init + math.log((1 + n + c_base) / c_base)) * math.sqrt(n)
    tried = 0.0
    for e in range(first, last):
        if p.visits[e] + p.pending[e] > 0:
            tried += p.prior[e]
    untried = -p.total[into] / p.visits[into] - fpu * math.sqrt(tried)
    best, best_score = first, -np.inf
    for e in range(first, last):
        if p.high[e] <= -1:
            continue
        visits, pending = p.visits[e], p.pending[e]
        value = (p.total[e] - loss * pending) / (visits + pending) if visits + pending > 0 else untried
        value = min(max(value, p.low[e]), p.high[e])
        score = value + explore * p.prior[e] / (1 + visits + pending)
        if score > best_score:
            best, best_score = e, score
    return best


@njit(cache=True, nogil=True)
def _gumbel_scores(p: Pool, node: Int, logits: F64, most: float, scale: float, scores: F64) -> None:
    """logits + sigma(completed q) of each move of a root; an untried move has the mixed value (appendix D there)."""
    first, count = p.first[node], p.size[node]
    weight = average = 0.0
    visits = top = 0
    for e in range(first, first + count):
        if p.visits[e] > 0:
            weight += p.prior[e]
            average += p.prior[e] * _quality(p, e)
            visits += p.visits[e]
            top = max(top, p.visits[e])
    mixed = float(p.value[node])
    if weight > 0:
        mixed = (mixed + visits * average / weight) / (1 + visits)
    for j in range(count):
        e = first + j
        known = p.visits[e] > 0 or p.low[e] == p.high[e]
        value = _quality(p, e) if known else min(max(mixed, p.low[e]), p.high[e])
        scores[j] = logits[j] + (most + top) * scale * (value + 1) / 2


@njit(cache=True, nogil=True)
def _bounds(p: Pool, node: Int) -> bool:
    """Take the bounds of a node from its edges to the edge into it; whether they changed."""
    into, first = p.into[node], p.first[node]
    last = first + p.size[node]
    low = high = np.float32(-1)
    for e in range(first, last):
        low, high = max(low, p.low[e]), max(high, p.high[e])
    if p.low[into] == -high and p.high[into] == -low:
        return False
    p.low[into], p.high[into] = -high, -low
    if low == high:  # the winner takes the shortest way, the loser the longest
        distance = FAR if low > 0 else 0
        for e in range(first, last):
            if p.low[e] == p.high[e] == low:
                distance = min(distance, p.distance[e]) if low > 0 else max(distance, p.distance[e])
        p.distance[into] = min(distance + 1, FAR)
    return True


@njit(cache=True, nogil=True)
def _backup(p: Pool, edge: Int, node: Int, value: float, changed: bool) -> None:
    """End a visit of an edge of a node (-1: of a root's edge) with a value; changed: its bounds are new."""
    while True:
        p.pending[edge] -= 1
        p.visits[edge] += 1
        if p.low[edge] == p.high[edge]:  # earlier visits count with the exact value too
            value = p.low[edge] * p.visits[edge] - p.total[edge]
        p.total[edge] += value
        if node < 0:
            return
        changed = changed and _bounds(p, node)
        edge, node, value = p.into[node], p.parent[node], -value


@njit(cache=True, nogil=True)
def _collect(
    p: Pool,
    trees: I32,
    roots: I32,
    budget: I64,
    done: I64,
    leaves: Int,
    weights: tuple[float, float, float, float],
    sigma: tuple[float, float],
    schedule: I32,
    logits: F64,
    base: I32,
    out: I32,
) -> Int:
    """Select leaves in each of the trees; write (edge, node, tree) of each to out (L, 3), return their number.

    Visits that end at a proven edge are finished here. schedule (trees, simulations): how often the move to try
    at the root has been tried in this search, for Gumbel; no columns for PUCT.
    """
    c_init, c_base, fpu, loss = weights
    scores = np.empty(logits.shape[1], np.float64)
    n = 0
    for i in range(len(trees)):
        t = trees[i]
        waiting, wanted = 0, 0
        while done[i] < budget[i] and waiting < leaves and p.low[t] != p.high[t]:
            node = roots[t]
            p.pending[t] += 1
            if schedule.shape[1] > 0:
                tried = schedule[i, done[i]]
                if waiting > 0 and tried != wanted:  # the next halving needs the values of this one
                    p.pending[t] -= 1
                    break
                wanted = tried
                _gumbel_scores(p, node, logits[i], sigma[0], sigma[1], scores)
                edge, top = -1, -np.inf
                for j in range(p.size[node]):
                    e = p.first[node] + j
                    if p.visits[e] + p.pending[e] - base[i, j] == wanted and scores[j] > top:
                        edge, top = e, scores[j]
            else:
                edge = _puct(p, node, c_init, c_base, fpu, loss)
            while True:
                p.pending[edge] += 1
                if p.low[edge] == p.high[edge] or p.child[edge] < 0:
                    break
                node = p.child[edge]
                edge = _puct(p, node, c_init, c_base, fpu, loss)
            if p.low[edge] == p.high[edge]:
                _backup(p, edge, node, float(p.low[edge]), False)
            elif p.pending[edge] > 1:  # a leaf that is under way already: wait for it
                while node >= 0:
                    p.pending[edge] -= 1
                    edge, node = p.into[node], p.parent[node]
                p.pending[edge] -= 1
                break
            else:
                out[n, 0], out[n, 1], out[n, 2] = edge, node, t
                n += 1
                waiting += 1
            done[i] += 1
    return n


@njit(cache=True, nogil=True)
def _settle(p: Pool, leaf: I32, values: F32, distances: I32) -> None:
    """Prove the edges of leaves (edge, node, tree) by the exact values for the sides to move there."""
    for i in range(len(leaf)):
        edge = leaf[i, 0]
        p.low[edge] = p.high[edge] = -values[i]
        p.distance[edge] = distances[i]
        _backup(p, edge, leaf[i, 1], -values[i], True)


@njit(cache=True, nogil=True)
def _expand(
    p: Pool,
    node: Int,
    used: Int,
    leaf: I32,
    keys: U64,
    values: F32,
    moves: I32,
    offsets: I64,
    priors: F32,
    endings: F32,
) -> None:
    """Make nodes of leaves, from numbers `node` and, for their edges, `used` on, and back their values up."""
    for i in range(len(leaf)):
        edge, parent = leaf[i, 0], leaf[i, 1]
        p.child[edge] = node
        p.first[node], p.size[node] = used, offsets[i + 1] - offsets[i]
        p.parent[node], p.into[node] = parent, edge
        p.key[node], p.value[node] = keys[i], values[i]
        for k in range(offsets[i], offsets[i + 1]):
            p.move[used], p.prior[used], p.child[used] = moves[k], priors[k], -1
            p.visits[used], p.pending[used], p.total[used], p.distance[used] = 0, 0, 0.0, 1
            p.low[used], p.high[used] = -1.0, 1.0
            if not np.isnan(endings[k]):
                p.low[used] = p.high[used] = endings[k]
            used += 1
        changed = _bounds(p, node)
        _backup(p, edge, parent, -values[i], changed)
        node += 1


@njit(cache=True, nogil=True)
def _occurrences(p: Pool, leaf: I32, keys: U64, history: U64, plies: I64) -> I32:
    """How often the state of each leaf has occurred before: on its way from the root, and in the game's history."""
    out = np.zeros(len(leaf), np.int32)
    for i in range(len(leaf)):
        node, tree, key = leaf[i, 1], leaf[i, 2], keys[i]
        while node >= 0:
            out[i] += p.key[node] == key
            node = p.parent[node]
        for k in range(plies[tree]):
            out[i] += history[tree, k] == key
    return out


@njit(cache=True, nogil=True)
def _compact(p: Pool, trees: Int, roots: I32, nodes: Int, moved: I32) -> tuple[Int, Int]:
    """Keep only what hangs on the roots, in the same order; `moved` (nodes,) gets new numbers or -1."""
    shift = np.zeros(nodes, np.int32)
    moved[:nodes] = -1
    for t in range(trees):
        if roots[t] >= 0:
            moved[roots[t]] = 0
            into = p.into[roots[t]]
            if into != t:
                p.visits[t], p.total[t], p.pending[t] = p.visits[into], p.total[into], 0
                p.low[t], p.high[t], p.distance[t] = p.low[into], p.high[into], p.distance[into]
                p.into[roots[t]], p.parent[roots[t]] = t, -1
    new, used = 0, trees
    for old in range(nodes):
        parent = p.parent[old]
        if moved[old] < 0 and (parent < 0 or moved[parent] < 0):
            continue
        moved[old] = new
        first, count = p.first[old], p.size[old]
        shift[old] = used - first
        if parent >= 0:
            p.parent[new], p.into[new] = moved[parent], p.into[old] + shift[parent]
        else:
            p.parent[new], p.into[new] = -1, p.into[old]
        p.child[p.into[new]] = new
        p.first[new], p.size[new], p.key[new], p.value[new] = used, count, p.key[old], p.value[old]
        for j in range(count):
            a, b = used + j, first + j
            p.move[a], p.child[a], p.prior[a], p.visits[a] = p.move[b], -1, p.prior[b], p.visits[b]
            p.pending[a], p.total[a], p.distance[a] = p.pending[b], p.total[b], p.distance[b]
            p.low[a], p.high[a] = p.low[b], p.high[b]
        new, used = new + 1, used + count
    for t in range(trees):
        roots[t] = moved[roots[t]] if roots[t] >= 0 else -1
    return new, used


@njit(cache=True, nogil=True)
def _rather(p: Pool, node: Int, choice: Int) -> Int:
    """The chosen edge of a node (-1: none), or one that makes sure of more: the shortest win, the longest loss."""
    sure, sure_value = -1, -2.0
    for e in range(p.first[node], p.first[node] + p.size[node]):
        value = p.low[e] * (1 - p.distance[e] / (4 * FAR)) if p.low[e] == p.high[e] else p.low[e]
        if value > sure_value:
            sure, sure_value = e, value
    if choice < 0 or p.low[sure] >= 1 or p.low[sure] > _quality(p, choice):
        return sure
    return choice


@njit(cache=True, nogil=True)
def _best(p: Pool, node: Int) -> Int:
    """The edge to play: most visits, then value, then prior; but not below what another one makes sure of."""
    best = -1
    for e in range(p.first[node], p.first[node] + p.size[node]):
        if p.high[e] > -1 and (
            best < 0
            or (p.visits[e], _quality(p, e), p.prior[e]) > (p.visits[best], _quality(p, best), p.prior[best])
        ):
            best = e
    return _rather(p, node, best)


@njit(cache=True, nogil=True)
def _line(p: Pool, edge: Int, out: I32) -> Int:
    """Write the principal variation from an edge on; return its length."""
    n = 0
    while n < len(out):
        out[n] = p.move[edge]
        n += 1
        node = p.child[edge]
        if node < 0:
            break
        edge = _best(p, node)
        if p.visits[edge] == 0 and p.low[edge] != p.high[edge]:
            break
    return n


# --- sequential halving ---------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def considered_visits(moves: int, simulations: int) -> tuple[int, ...]:
    """For each simulation, how many visits the root move to try next has (sequential halving, as in mctx).

    `moves` are tried in rounds of equal visits; after each round the better half goes on, at least two.
    """
    if moves <= 1:
        return tuple(range(simulations))
    rounds = math.ceil(math.log2(moves))
    visits, sequence, left = [0] * moves, list[int](), moves
    while len(sequence) < simulations:
        for _ in range(max(1, simulations // (rounds * left))):
            sequence.extend(visits[:left])
            visits[:left] = [v + 1 for v in visits[:left]]
        left = max(2, left // 2)
    return tuple(sequence[:simulations])


# --- trees ----------------------------------------------------------------------------------------


def _pool(nodes: int, edges: int) -> Pool:
    return Pool(*(np.zeros(nodes if i < OF_NODES else edges, kind) for i, kind in enumerate(KINDS)))


def _longer(array: Any, size: int) -> Any:
    """The array with room for more."""
    out = np.empty(size, array.dtype)
    out[: len(array)] = array
    return out


def _rows(keep: NDArray[np.bool_], moves: Moves, offsets: Offsets) -> tuple[Moves, Offsets]:
    """The ragged rows (N,) to keep."""
    counts = np.diff(offsets)
    return moves[np.repeat(keep, counts)], np.concatenate([[0], counts[keep].cumsum()])


class Search:
    """Trees over one game and one evaluator, numbered from 0, searched together.

    What a tree finds is a pure function of its state, the history and moves it was given, `seed`, its `stream`
    and the options: the other trees in the batch do not matter (as far as the evaluator does not mind).
    """

    def __init__(
        self,
        game: Game,
        evaluate: Evaluate,
        options: SearchOptions | None = None,
        trees: int = 1,
        seed: int = 0,
    ) -> None:
        self.game, self.evaluate, self.options, self.seed = game, evaluate, options or SearchOptions(), seed
        self.trees = trees
        self.states = game.initial(trees)
        self._pool = _pool(1024, 32_768 + trees)
        self._nodes, self._edges = 0, trees
        self._node_states = game.initial(1024)
        self._roots = np.full(trees, -1, np.int32)
        self._history = np.zeros((trees, 64), np.uint64)  # keys of the states before the root
        self._plies = np.zeros(trees, np.int64)
        self._streams = np.arange(trees)
        self._only: list[tuple[int, ...]] = [()] * trees
        self._stale = False  # whether there may be nodes that no root leads to

    def reset(
        self,
        tree: int,
        state: States,
        history: NDArray[np.uint64] | None = None,
        stream: int | None = None,
        only: Sequence[int] = (),
    ) -> None:
        """Put a tree at a state (1,) without what it knew. history: keys of the game's states before it.

        Without a history the state is taken as it is, and only positions from it on are seen to repeat. stream: number
        of the random stream, such as that of the game; the tree's own number unless given. only: the legal moves to
        consider in this state; all unless given.
        """
        past = np.zeros(0, np.uint64) if history is None else history
        if len(past):
            state = self.game.repeat(state, np.array([(past == self.game.key(state)).sum()], np.int32))
        self.states[tree] = state[0]
        self._roots[tree], self._stale = -1, True
        self._only[tree] = tuple(only)
        self._streams[tree] = tree if stream is None else stream
        self._plies[tree] = len(past)
        self._lengthen(len(past))
        self._history[tree, : len(past)] = past

    def advance(self, trees: Sequence[int], moves: Sequence[int]) -> None:
        """Play a move in each of the trees and keep what is known about the position that arises."""
        chosen, played = np.asarray(trees, np.int64), np.asarray(moves, np.int32)
        self._lengthen(int(self._plies[chosen].max(initial=0)) + 1)
        self._history[chosen, self._plies[chosen]] = self.game.key(self.states[chosen])
        self._plies[chosen] += 1
        after = self.game.play(self.states[chosen], played)
        past = self._history[chosen] == self.game.key(after)[:, None]
        past &= np.arange(past.shape[1]) < self._plies[chosen][:, None]
        self.states[chosen] = self.game.repeat(after, past.sum(1).astype(np.int32))
        self._stale = True
        for tree, move in zip(chosen, played, strict=True):
            self._only[tree] = ()
            if self._roots[tree] >= 0:
                edges = self._edges_of(tree)
                child = self._pool.child[edges][self._pool.move[edges] == move]
                self._roots[tree] = child[0] if len(child) else -1  # a root of chosen moves may lack this one

    def run(
        self,
        simulations: int | Sequence[int],
        trees: Sequence[int] | None = None,
        noise: bool | Sequence[bool] = False,
        until: Callable[[], bool] | None = None,
    ) -> list[Found]:
        """Search the trees (all unless given), each for a number of further simulations, and say what was found.

        noise: explore at the root (Dirichlet or Gumbel noise), for self-play; without it nothing is random.
        until: asked before every round whether to stop early. ValueError if a tree's game is over. What interrupts a
        search otherwise, such as an error of the evaluator, costs the trees what they knew.
        """
        chosen = np.arange(self.trees, dtype=np.int32) if trees is None else np.asarray(trees, np.int32)
        budget = np.zeros(len(chosen), np.int64) + np.asarray(simulations, np.int64)
        noisy = np.broadcast_to(np.asarray(noise, np.bool_), chosen.shape)
        self._prune()
        self._plant(chosen[self._roots[chosen] < 0])
        p, o = self._pool, self.options
        clean = [p.prior[self._edges_of(t)].copy() for t in chosen]
        width = max((len(prior) for prior in clean), default=0)
        logits, base = np.zeros((len(chosen), width)), np.zeros((len(chosen), width), np.int32)
        schedule = np.zeros((len(chosen), int(budget.max(initial=0)) if o.gumbel else 0), np.int32)
        for i, tree in enumerate(chosen):
            self._prepare(i, int(tree), clean[i], int(budget[i]), bool(noisy[i]), logits, base, schedule)
        done = np.zeros(len(chosen), np.int64)
        out = np.zeros((len(chosen) * o.leaves, 3), np.int32)
        weights = (o.c_init, o.c_base, o.fpu, o.virtual_loss)
        sigma = (o.gumbel_visits, o.gumbel_scale)
        try:
            while until is None or not until():
                p = self._pool
                n = _collect(
                    p,
                    chosen,
                    self._roots,
                    budget,
                    done,
                    o.leaves,
                    weights,
                    sigma,
                    schedule,
                    logits,
                    base,
                    out,
                )
                if n == 0:
                    break
                self._visit(out[:n])
        except BaseException:
            self._roots[chosen], self._stale = -1, True  # visits are under way, and the priors have noise
            raise
        for i, tree in enumerate(chosen):
            self._pool.prior[self._edges_of(tree)] = clean[i]
        return [self._found(int(t), clean[i], logits[i], base[i], int(done[i])) for i, t in enumerate(chosen)]

    def line(self, tree: int, move: int) -> tuple[int, ...]:
        """Principal variation that starts with a move of the tree's root; for a tree that was searched."""
        edges = self._edges_of(tree)
        return self._line_from(edges.start + int((self._pool.move[edges] == move).argmax()))

    def _edges_of(self, tree: int) -> slice:
        """The edges of a tree's root."""
        root = self._roots[tree]
        first = int(self._pool.first[root])
        return slice(first, first + int(self._pool.size[root]))

    def _lengthen(self, plies: int) -> None:
        missing = plies - self._history.shape[1]
        if missing > 0:
            self._history = np.pad(self._history, ((0, 0), (0, max(missing, self._history.shape[1]))))

    def _prune(self) -> None:
        """Drop what no root leads to any more."""
        if not self._stale:
            return
        self._stale = False
        before, moved = self._nodes, np.empty(self._nodes, np.int32)
        self._nodes, self._edges = _compact(self._pool, self.trees, self._roots, before, moved)
        self._node_states[: self._nodes] = self._node_states[:before][moved >= 0]

    def _plant(self, trees: I32) -> None:
        """Expand roots, always with the evaluator's opinion."""
        if not len(trees):
            return
        states = self.states[trees]
        moves, offsets = self.game.legal(states)
        over = ~np.isnan(self.game.terminal(states, np.diff(offsets)))
        if over.any():
            raise ValueError(
                f"the game of tree {trees[over.argmax()]} is over: nothing to search, reset the tree"
            )
        if any(self._only[tree] for tree in trees):
            moves, offsets = self._considered(trees, moves, offsets)
        p = self._pool
        p.visits[trees], p.total[trees], p.pending[trees], p.child[trees] = 0, 0, 1, -1
        p.low[trees], p.high[trees] = -1, 1
        leaf = np.stack([trees, np.full_like(trees, -1), trees], 1)
        self._add(leaf, states, self.game.key(states), moves, offsets, self._endings(states, moves, offsets))
        self._roots[trees] = self._pool.child[trees]

    def _considered(self, trees: I32, moves: Moves, offsets: Offsets) -> tuple[Moves, Offsets]:
        """The moves of roots that were asked for."""
        rows = [
            row[np.isin(row, self._only[tree])] if self._only[tree] else row
            for tree, row in zip(trees, np.split(moves, offsets[1:-1]), strict=True)
        ]
        if not all(len(row) for row in rows):
            raise ValueError("none of the moves to consider is legal")
        return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

    def _prepare(
        self, i: int, tree: int, prior: F32, budget: int, noisy: bool, logits: F64, base: I32, schedule: I32
    ) -> None:
        """Noise of a root, and what Gumbel needs."""
        o, count, edges = self.options, len(prior), self._edges_of(tree)
        if noisy:
            rng = np.random.default_rng([self.seed, self._streams[tree], self._plies[tree]])
        if o.gumbel:
            logits[i, :count] = np.log(np.maximum(prior, np.finfo(np.float32).tiny))
            if noisy:
                logits[i, :count] += rng.gumbel(size=count)
            base[i, :count] = self._pool.visits[edges]
            schedule[i, :budget] = considered_visits(min(o.gumbel, count), budget)
        elif noisy and count > 1:
            noise = rng.dirichlet(np.full(count, o.noise_alpha / count))
            self._pool.prior[edges] = (1 - o.noise_weight) * prior + o.noise_weight * noise

    def _visit(self, leaf: I32) -> None:
        """Make the positions of selected leaves; settle those whose value is exact, evaluate and expand the others."""
        game, p = self.game, self._pool
        states = game.play(self._node_states[leaf[:, 1]], p.move[leaf[:, 0]])
        keys = game.key(states)
        counts = _occurrences(p, leaf, keys, self._history, self._plies)
        if counts.any():
            states = game.repeat(states, counts)
        moves, offsets = game.legal(states)
        exact = game.terminal(states, np.diff(offsets))
        distances = np.where(np.isnan(exact), FAR, 1).astype(np.int32)
        exact = np.where(np.isnan(exact), game.proven(states), exact)
        live = np.isnan(exact)
        moves, offsets = _rows(live, moves, offsets)
        endings = self._endings(states[live], moves, offsets)
        if not np.isnan(endings).all():
            # A move that wins, or the best where every move ends the game, is the value of the position.
            best, whole = (f.reduceat(endings, offsets[:-1]) for f in (np.fmax, np.maximum))
            known = (best >= 1) | ~np.isnan(whole)
            ahead = np.flatnonzero(live)[known]
            exact[ahead], distances[ahead], live[ahead] = best[known], 2, False
            endings = endings[np.repeat(~known, np.diff(offsets))]
            moves, offsets = _rows(~known, moves, offsets)
        _settle(p, leaf[~live], exact[~live].astype(np.float32), distances[~live])
        if live.any():
            self._add(leaf[live], states[live], keys[live], moves, offsets, endings)

    def _endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        if not self.options.look_ahead or not len(states):
            return np.full(len(moves), np.nan, np.float32)
        return self.game.endings(states, moves, offsets)

    def _add(
        self, leaf: I32, states: States, keys: U64, moves: Moves, offsets: Offsets, endings: Values
    ) -> None:
        """Evaluate states, which have legal moves, and make nodes of them."""
        priors, values = self.evaluate(states, moves, offsets)
        if priors.shape != moves.shape or values.shape != leaf[:, 0].shape:
            raise ValueError(f"the evaluator must return {moves.shape} priors and {len(leaf)} values")
        if not (np.isfinite(priors).all() and np.isfinite(values).all()):
            raise ValueError("the evaluator returned a value that is not finite: the network is broken")
        self._reserve(self._nodes + len(leaf), self._edges + len(moves))
        self._node_states[self._nodes : self._nodes + len(leaf)] = states
        arrays = (values.astype(np.float32), moves, offsets, priors.astype(np.float32), endings)
        _expand(self._pool, self._nodes, self._edges, leaf, keys, *arrays)
        self._nodes += len(leaf)
        self._edges += len(moves)

    def _reserve(self, nodes: int, edges: int) -> None:
        p = self._pool
        if nodes > len(p.first) or edges > len(p.move):
            nodes, edges = max(2 * nodes, len(p.first)), max(2 * edges, len(p.move))
            self._pool = Pool(*(_longer(a, nodes if i < OF_NODES else edges) for i, a in enumerate(p)))
            self._node_states = _longer(self._node_states, nodes)

    def _found(self, tree: int, prior: F32, logits: F64, base: I32, done: int) -> Found:
        p, o, edges = self._pool, self.options, self._edges_of(tree)
        root, visits, low, high = self._roots[tree], p.visits[edges].copy(), p.low[edges], p.high[edges]
        known = (visits > 0) | (low == high)
        values = np.clip(p.total[edges] / np.maximum(visits, 1), low, high)
        best = _best(p, root) - edges.start
        if o.gumbel:
            scores = np.empty(len(prior))
            _gumbel_scores(p, root, logits, o.gumbel_visits, o.gumbel_scale, scores)
            rank = np.where(high > -1, visits - base[: len(prior)], -1)
            choice = int(np.where(rank == rank.max(), scores, -np.inf).argmax())
            best = _rather(p, root, edges.start + choice if rank[choice] >= 0 else -1) - edges.start
            plain = np.log(np.maximum(prior, np.finfo(np.float32).tiny)).astype(np.float64)
            _gumbel_scores(p, root, plain, o.gumbel_visits, o.gumbel_scale, scores)
            policy = np.exp(scores - scores.max())
        else:
            policy = visits.astype(np.float64) if visits.any() else prior.astype(np.float64)
        if p.low[tree] == p.high[tree] == -1:  # won for sure
            policy = np.zeros(len(prior))
            policy[best] = 1
        elif high.max() > -1:
            policy = np.where(high > -1, policy, 0)
            policy = policy if policy.any() else (high > -1).astype(np.float64)
        return Found(
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
        line = np.zeros(MOST_LINE, np.int32)
        return tuple(int(move) for move in line[: _line(self._pool, edge, line)])
