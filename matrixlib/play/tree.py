"""Search trees as arrays: kernels that select, expand and back up, for hundreds of trees in one pool.

Edge statistics are the mover's. Besides its mean an edge has bounds [low, high] on its exact value (score-bounded MCTS,
Cazenave and Saffidine 2010); if low = high it is proven: it counts with that value in all means above it, is not tried
again if lost, and ends the search at the root. All kernels are in this file: numba's cache does not notice changes
elsewhere.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from matrixlib.hardware.kernels import kernel

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Int: TypeAlias = Any  # a scalar inside a kernel

FAR = 10_000  # distance of a proven end at unknown depth
VISITS_PER_LEAF = 64  # visits of a tree for each leaf of a growing batch


class Pool(NamedTuple):
    """Nodes (M,) and edges (E,) of all trees, see KINDS. Edges 0 .. trees - 1 lead to the roots; a node's edges are
    adjacent."""

    first_edge: Any  # of a node
    num_edges: Any
    parent: Any  # the node before it, -1 at a root
    parent_edge: Any  # the edge that leads to it
    key: Any  # of its state, for repetitions
    mark: Any  # hash of its tree and all of its state, for transpositions
    value: Any  # the evaluator's, for the side to move
    move: Any  # of an edge: the game's move
    child: Any  # its node, -1 if not expanded or not needed
    prior: Any
    visits: Any
    pending: Any  # pending visits
    total: Any  # sum of values
    low: Any  # bounds of the exact value
    high: Any
    distance: Any  # plies to the end of the game, where low = high


KINDS = ["i4", "i4", "i4", "i4", "u8", "u8", "f4", "i4", "i4", "f4", "i4", "i4", "f8", "f4", "f4", "i4"]
OF_NODES = Pool._fields.index("move")  # columns before it


def empty_pool(nodes: int, edges: int) -> Pool:
    """A pool with this capacity."""
    return Pool(*(np.zeros(nodes if i < OF_NODES else edges, kind) for i, kind in enumerate(KINDS)))


@kernel
def quality(p: Pool, e: Int) -> float:
    """Value of a visited or proven edge."""
    average = p.total[e] / p.visits[e] if p.visits[e] > 0 else 0.0
    return min(max(average, p.low[e]), p.high[e])


@kernel
def puct(p: Pool, node: Int, pb_c_init: float, pb_c_base: float, fpu_reduction: float, loss: float) -> Int:
    """The edge to follow from a node (the edge into it counts as pending)."""
    into, first = p.parent_edge[node], p.first_edge[node]
    last = first + p.num_edges[node]
    n = p.visits[into] + p.pending[into] - 1
    explore = (pb_c_init + math.log((1 + n + pb_c_base) / pb_c_base)) * math.sqrt(n)
    tried = 0.0
    for e in range(first, last):
        if p.visits[e] + p.pending[e] > 0:
            tried += p.prior[e]
    untried = -p.total[into] / p.visits[into] - fpu_reduction * math.sqrt(tried)
    best, best_score = first, -np.inf
    for e in range(first, last):
        if p.high[e] <= -1:
            continue
        visits, pending = p.visits[e], p.pending[e]
        value = p.total[e] / visits if visits > 0 else untried
        if pending > 0:
            value -= loss * pending / (visits + pending)
        value = min(max(value, p.low[e]), p.high[e])
        score = value + explore * p.prior[e] / (1 + visits + pending)
        if score > best_score:
            best, best_score = e, score
    return best


@kernel
def gumbel_scores(p: Pool, node: Int, logits: F64, most: float, scale: float, scores: F64) -> None:
    """logits + sigma(completed q) of a root's moves; unvisited ones have the mixed value (appendix D of the paper)."""
    first, count = p.first_edge[node], p.num_edges[node]
    weight = average = 0.0
    visits = top = 0
    for e in range(first, first + count):
        if p.visits[e] > 0:
            weight += p.prior[e]
            average += p.prior[e] * quality(p, e)
            visits += p.visits[e]
            top = max(top, p.visits[e])
    mixed = float(p.value[node])
    if weight > 0:
        mixed = (mixed + visits * average / weight) / (1 + visits)
    for j in range(count):
        e = first + j
        known = p.visits[e] > 0 or p.low[e] == p.high[e]
        value = quality(p, e) if known else min(max(mixed, p.low[e]), p.high[e])
        scores[j] = logits[j] + (most + top) * scale * (value + 1) / 2


@kernel
def update_bounds(p: Pool, node: Int) -> bool:
    """Propagate a node's bounds from its edges to the edge into it; True if changed."""
    into, first = p.parent_edge[node], p.first_edge[node]
    last = first + p.num_edges[node]
    low = high = np.float32(-1)
    for e in range(first, last):
        low, high = max(low, p.low[e]), max(high, p.high[e])
    if p.low[into] == -high and p.high[into] == -low:
        return False
    p.low[into], p.high[into] = -high, -low
    if low == high:  # shortest win, longest loss
        distance = FAR if low > 0 else 0
        for e in range(first, last):
            if p.low[e] == p.high[e] == low:
                distance = min(distance, p.distance[e]) if low > 0 else max(distance, p.distance[e])
        p.distance[into] = min(distance + 1, FAR)
    return True


@kernel
def backward(p: Pool, edge: Int, node: Int, value: float, changed: bool) -> None:
    """Back up a value from an edge of a node (-1: a root's edge). changed: its bounds changed."""
    while True:
        p.pending[edge] -= 1
        p.visits[edge] += 1
        if p.low[edge] == p.high[edge]:  # earlier visits get the exact value, too
            value = p.low[edge] * p.visits[edge] - p.total[edge]
        p.total[edge] += value
        if node < 0:
            return
        changed = changed and update_bounds(p, node)
        edge, node, value = p.parent_edge[node], p.parent[node], -value


@kernel
def decided(p: Pool, node: Int, visits: Int) -> bool:
    """Whether none of a node's moves can overtake the one with most visits by so many more; lost ones do not count."""
    most = second = 0
    for e in range(p.first_edge[node], p.first_edge[node] + p.num_edges[node]):
        n = p.visits[e] + p.pending[e] if p.high[e] > -1 else 0
        if n > most:
            most, second = n, most
        elif n > second:
            second = n
    return most - second > visits or p.num_edges[node] == 1


@kernel
def simulate(
    p: Pool,
    trees: I32,
    roots: I32,
    budget: I64,
    done: I64,
    best_alone: bool,
    leaves: tuple[int, int],
    weights: tuple[float, float, float, float],
    sigma: tuple[float, float],
    schedule: I32,
    logits: F64,
    base: I32,
    out: I32,
) -> Int:
    """Select leaves in each tree; writes (edge, node, tree) to out (L, 3), returns their number.

    best_alone: stop where the best move is `decided`. leaves: fewest and most of a tree; between them one for every
    VISITS_PER_LEAF visits. Visits that end at a proven edge finish here. schedule (trees, simulations): required visit
    count of the root move to try, for Gumbel; no columns for PUCT.
    """
    pb_c_init, pb_c_base, fpu_reduction, loss = weights
    scores = np.empty(logits.shape[1], np.float64)
    n = 0
    for i in range(len(trees)):
        t = trees[i]
        waiting, round_visits = 0, 0
        room = max(leaves[0], min(leaves[1], p.visits[t] // VISITS_PER_LEAF))
        while done[i] < budget[i] and waiting < room and p.low[t] != p.high[t]:
            node = roots[t]
            if best_alone and decided(p, node, budget[i] - done[i]):
                break
            p.pending[t] += 1
            if schedule.shape[1] > 0:
                tried = schedule[i, done[i]]
                if waiting > 0 and tried != round_visits:  # the next halving needs this round's values
                    p.pending[t] -= 1
                    break
                round_visits = tried
                gumbel_scores(p, node, logits[i], sigma[0], sigma[1], scores)
                edge, top = -1, -np.inf
                for j in range(p.num_edges[node]):
                    e = p.first_edge[node] + j
                    if p.visits[e] + p.pending[e] - base[i, j] == round_visits and scores[j] > top:
                        edge, top = e, scores[j]
            else:
                edge = puct(p, node, pb_c_init, pb_c_base, fpu_reduction, loss)
            while True:
                p.pending[edge] += 1
                if p.low[edge] == p.high[edge] or p.child[edge] < 0:
                    break
                node = p.child[edge]
                edge = puct(p, node, pb_c_init, pb_c_base, fpu_reduction, loss)
            if p.low[edge] == p.high[edge]:
                backward(p, edge, node, float(p.low[edge]), False)
            elif p.pending[edge] > 1:  # already pending: wait
                while node >= 0:
                    p.pending[edge] -= 1
                    edge, node = p.parent_edge[node], p.parent[node]
                p.pending[edge] -= 1
                break
            else:
                out[n, 0], out[n, 1], out[n, 2] = edge, node, t
                n += 1
                waiting += 1
            done[i] += 1
    return n


@kernel
def settle(p: Pool, leaf: I32, values: F32, distances: I32) -> None:
    """Prove edges of leaves (edge, node, tree) by exact values for the sides to move there."""
    for i in range(len(leaf)):
        edge = leaf[i, 0]
        p.low[edge] = p.high[edge] = -values[i]
        p.distance[edge] = distances[i]
        backward(p, edge, leaf[i, 1], -values[i], True)


@kernel
def mark(states: U8, trees: I32) -> U64:
    """Hash (L,) of states, as bytes (L, size), in their trees: FNV-1a."""
    out = np.empty(len(states), np.uint64)
    for i in range(len(states)):
        value = (np.uint64(0xCBF29CE484222325) ^ np.uint64(trees[i])) * np.uint64(0x100000001B3)
        for byte in states[i]:
            value = (value ^ np.uint64(byte)) * np.uint64(0x100000001B3)
        out[i] = value
    return out


@kernel
def slot(p: Pool, table: I32, mark: Int) -> Int:
    """Where the open hash table `table`, whose length is a power of two, has or would have the node with a mark."""
    at = mark & np.uint64(len(table) - 1)
    while table[at] >= 0 and p.mark[table[at]] != mark:
        at = (at + np.uint64(1)) & np.uint64(len(table) - 1)
    return at


@kernel
def find(p: Pool, table: I32, marks: U64) -> I32:
    """The node (L,) with each mark, -1 for none."""
    out = np.empty(len(marks), np.int32)
    for i in range(len(marks)):
        out[i] = table[slot(p, table, marks[i])]
    return out


@kernel
def fill(p: Pool, table: I32, nodes: Int) -> None:
    """Put all nodes into an empty table."""
    for node in range(nodes):
        table[slot(p, table, p.mark[node])] = node


@kernel
def expand(
    p: Pool,
    table: I32,
    node: Int,
    used: Int,
    leaf: I32,
    keys: U64,
    marks: U64,
    values: F32,
    moves: I32,
    offsets: I64,
    priors: F32,
    endings: F32,
) -> None:
    """Create nodes of leaves, numbered from `node`, with edges from `used`, and back up their values."""
    for i in range(len(leaf)):
        edge, parent = leaf[i, 0], leaf[i, 1]
        p.child[edge] = node
        p.first_edge[node], p.num_edges[node] = used, offsets[i + 1] - offsets[i]
        p.parent[node], p.parent_edge[node] = parent, edge
        p.key[node], p.mark[node], p.value[node] = keys[i], marks[i], values[i]
        table[slot(p, table, marks[i])] = node
        for k in range(offsets[i], offsets[i + 1]):
            p.move[used], p.prior[used], p.child[used] = moves[k], priors[k], -1
            p.visits[used], p.pending[used], p.total[used], p.distance[used] = 0, 0, 0.0, 1
            p.low[used], p.high[used] = -1.0, 1.0
            if not np.isnan(endings[k]):
                p.low[used] = p.high[used] = endings[k]
            used += 1
        changed = update_bounds(p, node)
        backward(p, edge, parent, -values[i], changed)
        node += 1


@kernel
def occurrences(p: Pool, leaf: I32, keys: U64, history: U64, plies: I64) -> I32:
    """Earlier occurrences of each leaf's state: on its path from the root, and in the game's history."""
    out = np.zeros(len(leaf), np.int32)
    for i in range(len(leaf)):
        node, tree, key = leaf[i, 1], leaf[i, 2], keys[i]
        while node >= 0:
            out[i] += p.key[node] == key
            node = p.parent[node]
        for k in range(plies[tree]):
            out[i] += history[tree, k] == key
    return out


@kernel
def ancestors(p: Pool, leaf: I32, depth: Int) -> I32:
    """The nodes (L, depth) before each leaf, nearest first, -1 before the root."""
    out = np.full((len(leaf), depth), -1, np.int32)
    for i in range(len(leaf)):
        node, ply = leaf[i, 1], 0
        while node >= 0 and ply < depth:
            out[i, ply] = node
            node, ply = p.parent[node], ply + 1
    return out


@kernel
def compact(p: Pool, trees: Int, roots: I32, nodes: Int, moved: I32, visits: Int) -> tuple[Int, Int]:
    """Keep only what is reachable from the roots by edges with at least `visits` visits, in order; `moved` (nodes,)
    gets new numbers or -1."""
    shift = np.zeros(nodes, np.int32)
    moved[:nodes] = -1
    for t in range(trees):
        if roots[t] >= 0:
            moved[roots[t]] = 0
            into = p.parent_edge[roots[t]]
            if into != t:
                p.visits[t], p.total[t], p.pending[t] = p.visits[into], p.total[into], 0
                p.low[t], p.high[t], p.distance[t] = p.low[into], p.high[into], p.distance[into]
                p.parent_edge[roots[t]], p.parent[roots[t]] = t, -1
    new, used = 0, trees
    for old in range(nodes):
        parent = p.parent[old]
        gone = parent < 0 or moved[parent] < 0 or p.visits[p.parent_edge[old] + shift[parent]] < visits
        if gone and moved[old] < 0:
            continue
        moved[old] = new
        first, count = p.first_edge[old], p.num_edges[old]
        shift[old] = used - first
        if parent >= 0:
            p.parent[new], p.parent_edge[new] = moved[parent], p.parent_edge[old] + shift[parent]
        else:
            p.parent[new], p.parent_edge[new] = -1, p.parent_edge[old]
        p.child[p.parent_edge[new]] = new
        p.first_edge[new], p.num_edges[new] = used, count
        p.key[new], p.mark[new], p.value[new] = p.key[old], p.mark[old], p.value[old]
        for j in range(count):
            a, b = used + j, first + j
            p.move[a], p.child[a], p.prior[a], p.visits[a] = p.move[b], -1, p.prior[b], p.visits[b]
            p.pending[a], p.total[a], p.distance[a] = p.pending[b], p.total[b], p.distance[b]
            p.low[a], p.high[a] = p.low[b], p.high[b]
        new, used = new + 1, used + count
    for t in range(trees):
        roots[t] = moved[roots[t]] if roots[t] >= 0 else -1
    return new, used


@kernel
def prefer_proven(p: Pool, node: Int, choice: Int) -> Int:
    """An edge of a node (-1: none), or a provably better one: the shortest win, the longest loss."""
    sure, sure_value = -1, -2.0
    for e in range(p.first_edge[node], p.first_edge[node] + p.num_edges[node]):
        value = p.low[e] * (1 - p.distance[e] / (4 * FAR)) if p.low[e] == p.high[e] else p.low[e]
        if value > sure_value:
            sure, sure_value = e, value
    if choice < 0 or p.low[sure] >= 1 or p.low[sure] > quality(p, choice):
        return sure
    return choice


@kernel
def best_edge(p: Pool, node: Int) -> Int:
    """The edge to play: most visits, then value, then prior; never provably worse than another."""
    best = -1
    for e in range(p.first_edge[node], p.first_edge[node] + p.num_edges[node]):
        if p.high[e] > -1 and (
            best < 0 or (p.visits[e], quality(p, e), p.prior[e]) > (p.visits[best], quality(p, best), p.prior[best])
        ):
            best = e
    return prefer_proven(p, node, best)


@kernel
def principal_variation(p: Pool, edge: Int, out: I32) -> Int:
    """Write the principal variation from an edge; returns its length."""
    n = 0
    while n < len(out):
        out[n] = p.move[edge]
        n += 1
        node = p.child[edge]
        if node < 0:
            break
        edge = best_edge(p, node)
        if p.visits[edge] == 0 and p.low[edge] != p.high[edge]:
            break
    return n


@lru_cache(maxsize=4096)
def considered_visits(moves: int, simulations: int) -> tuple[int, ...]:
    """For each simulation the visit count of the root move to try next (sequential halving, as in mctx).

    `moves` are tried in rounds of equal visits; after each round the better half remains, at least two.
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
