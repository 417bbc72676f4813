"""Decoding grids with a network: one pass, cell by cell, beam search; and rates of valid grids.

Cell-by-cell and beam decoding only place digits that row and column lack, so rates of valid grids need their baseline:
random digits by the same rules in the same order.

Arrays: G grids, N side, K = N digit indices; `cells` (G, N, N) int64 digit indices, -1 where empty or outside.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.tasks.latin import pool
from matrixlib.tasks.latin.losses import digit_log_probabilities, inside, tokens, violations
from matrixlib.tasks.latin.vocabulary import MODES, token_table

NEVER = -1e9
FILLS = ((0.0, 0.0), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7))
EXACT_SIZE, EXACT_FILL = 5, 0.5  # up to this size, from this fill on, completions are countable
WIDTH = 4  # beam width
Predict = Callable[[Tensor], Tensor]  # cells (G, N, N) -> log-probabilities (G, N, N, K) of the digit indices


def network(model: nn.Module, mode: str, size: int) -> Predict:
    """The network as a predictor for grids of one mode and size."""
    digits = torch.from_numpy(token_table()[MODES.index(mode), size, :size])

    def predict(cells: Tensor) -> Tensor:
        def each(value: Tensor) -> Tensor:
            return value.to(cells.device).expand(len(cells), *value.shape)

        batch = {"square": cells.clamp(min=0), "hidden": cells < 0, "size": each(torch.tensor(size))}
        batch |= {"digits": each(digits), "mode": each(torch.tensor(MODES.index(mode)))}
        return digit_log_probabilities(model(tokens(batch), batch["size"], batch["mode"]), batch["digits"])

    return predict


def empty(cells: Tensor, size: Tensor) -> Tensor:
    """(G, N, N) bool: empty cells inside the grids; a decoded grid without any is valid."""
    return (cells < 0) & inside(size, cells.shape[1])


def candidates(cells: Tensor, size: Tensor) -> Tensor:
    """(G, N, N, K) bool: digits allowed in each empty cell; none elsewhere."""
    side = cells.shape[1]
    placed = nn.functional.one_hot(cells + 1, side + 1)[..., 1:].bool()
    used = placed.any(1)[:, None] | placed.any(2)[:, :, None]
    known = torch.arange(side, device=cells.device) < size[:, None]
    return ~used & known[:, None, None] & empty(cells, size)[..., None]


def one_pass(cells: Tensor, size: Tensor, predict: Predict) -> Tensor:
    """(G, N, N): every empty cell filled at once with the network's best digit."""
    return torch.where(empty(cells, size), predict(cells).argmax(3), cells)


def fill_one(cells: Tensor, size: Tensor, predict: Predict | None, generator: torch.Generator) -> Tensor:
    """Fill one cell of each grid: the most constrained one (ties: the network's most confident) with its best
    candidate. predict None: random ties and digits.

    Grids with a hopeless cell are unchanged; returns `cells` itself if no grid changes. generator: on their device.
    """
    possible, left = candidates(cells, size), empty(cells, size)
    alive = left.flatten(1).any(1) & ~(left & ~possible.any(3)).flatten(1).any(1)
    if not alive.any():
        return cells
    place, scores = _next_cell(cells, size, possible, predict, generator)
    filled = cells.flatten(1).scatter(1, place[:, None], scores.argmax(1, keepdim=True)).view_as(cells)
    return torch.where(alive[:, None, None], filled, cells)


def iterative(cells: Tensor, size: Tensor, predict: Predict | None, generator: torch.Generator) -> Tensor:
    """(G, N, N): `fill_one` until no grid changes."""
    while (after := fill_one(cells, size, predict, generator)) is not cells:
        cells = after
    return cells


def beam(cells: Tensor, size: Tensor, predict: Predict | None, generator: torch.Generator, width: int) -> Tensor:
    """(G, N, N) by beam search with `width` partial grids a grid, ranked by total log-probability.

    Each partial grid is extended in its most constrained cell by every candidate; dead ends are dropped. predict None:
    random ranks. `predict` gets G * width grids, those of one grid adjacent.
    """
    count, side = len(cells), cells.shape[1]
    beams = cells.repeat_interleave(width, 0)
    sizes = size.repeat_interleave(width)
    total = torch.full((count, width), NEVER, device=cells.device)
    total[:, 0] = 0.0
    for _ in range(int((candidates(cells, size).any(3)).flatten(1).sum(1).max())):
        place, scores = _next_cell(beams, sizes, candidates(beams, sizes), predict, generator)
        extended = total.view(-1, 1) + scores
        done = ~empty(beams, sizes).flatten(1).any(1)
        # A finished grid continues unchanged, as digit 0.
        extended = torch.where(done[:, None], torch.full_like(extended, NEVER), extended)
        extended[:, 0] = torch.where(done, total.flatten(), extended[:, 0])
        total, best_extensions = extended.clamp(min=NEVER).view(count, -1).topk(width, 1)
        parent = (best_extensions // side + width * torch.arange(count, device=cells.device)[:, None]).flatten()
        digit = (best_extensions % side).flatten()
        keep = done[parent] | (total.flatten() <= NEVER / 2)
        beams = beams[parent].flatten(1)
        changed = beams.scatter(1, place[parent][:, None], digit[:, None])
        beams = torch.where(keep[:, None], beams, changed).view(-1, side, side)
    return beams.view(count, width, side, side)[torch.arange(count), total.argmax(1)]


def _next_cell(
    cells: Tensor, size: Tensor, possible: Tensor, predict: Predict | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(G,) flat index of the cell to fill, and (G, K) log-probabilities of its candidates, NEVER for others."""
    if predict is None:
        scores = torch.rand(possible.shape, device=cells.device, generator=generator).log()
    else:
        scores = predict(cells)
    scores = scores.masked_fill(~possible, NEVER)
    surest = scores.amax(3).flatten(1).clamp(min=-1e3).exp()  # in 0..1: never outweighs a candidate
    rank = possible.sum(3).flatten(1) + 1 - surest
    place = rank.masked_fill(~empty(cells, size).flatten(1), torch.inf).argmin(1)
    return place, scores.flatten(1, 2)[torch.arange(len(scores), device=cells.device), place]


@torch.inference_mode()
def rates(
    model: nn.Module, pools: Mapping[int, np.ndarray], modes: Sequence[str], grids: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Figures of a network (any device, eval mode) on `grids` held-out puzzles of each size, mode and fill range; rates
    in 0..1. Equal seeds give equal puzzles in all modes, and equal baselines.

    pools: size -> (count, n, n) digit indices, sampled with repetition. valid: solved in one pass; exact: the same with
    exact probabilities, None if not countable. accuracy: hidden cells with the square's digit. violations: repeated
    digits a grid after one pass. iterative, beam: solved by decoding; *_baseline: without a network.
    """
    model.eval()
    kinds = itertools.product(pools, modes, FILLS)
    return [_rate(model, pools[size], mode, fill, grids, seed) for size, mode, fill in kinds]


def _rate(
    model: nn.Module, squares: np.ndarray, mode: str, fill: tuple[float, float], grids: int, seed: int
) -> dict[str, Any]:
    side, device = squares.shape[1], next(model.parameters()).device
    rng = np.random.default_rng([seed, side, round(1000 * fill[0])])
    square = squares[rng.integers(0, len(squares), grids)].astype(np.int64)
    revealed = rng.uniform(*fill, grids)
    hidden = rng.random(square.shape) >= revealed[:, None, None]
    target, gap = torch.from_numpy(square).to(device), torch.from_numpy(hidden).to(device)
    cells, size = torch.where(gap, -1, target), torch.full((grids,), side, device=device)
    predict, stream = network(model, mode, side), torch.Generator(device).manual_seed(seed)
    filled = one_pass(cells, size, predict)
    wrong, exact = violations(filled, size), None
    if side <= EXACT_SIZE and fill[0] >= EXACT_FILL:  # the most frequent digit over all completions
        best = np.stack([pool.marginals(puzzle)[0].argmax(2) for puzzle in np.where(hidden, -1, square)])
        exact = float(pool.is_latin(np.where(hidden, best, square)).mean())
    rate = {
        "size": side,
        "mode": mode,
        "fill": fill,
        "grids": grids,
        "valid": _share(wrong == 0),
        "exact": exact,
        "accuracy": _share((filled == target)[gap]),
        "violations": wrong.cpu().double().mean().item(),
    }
    for name, decoder in (("iterative", iterative), ("beam", partial(beam, width=WIDTH))):
        for suffix, predictor in (("", predict), ("_baseline", None)):
            decoded = decoder(cells, size, predictor, stream)
            rate[f"{name}{suffix}"] = _share(~empty(decoded, size).flatten(1).any(1))
    return rate


def _share(hits: Tensor) -> float:
    return hits.cpu().double().mean().item() if hits.numel() else 1.0  # MPS has no float64
