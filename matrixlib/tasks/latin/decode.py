"""Filling a grid cell by cell, for many grids at once: one by one, or by beam search, always by the rules.

Both work with the network's probabilities or, as the baseline, with none (a random digit). A digit is only ever put
where its row and column lack it, so a rate of valid grids says something about the network only beside the rate of
the baseline, which has the same rules and the same order of cells.

Arrays: G grids, N side, K = N digit indices; `cells` (G, N, N) int64 digit indices, -1 where empty or outside.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from matrixlib.engine.task import Batch
from matrixlib.tasks.latin.augment import inside
from matrixlib.tasks.latin.losses import digit_log_probabilities
from matrixlib.tasks.latin.task import LatinTask

NEVER = -1e9
Predict = Callable[[Tensor], Tensor]
"""cells (G, N, N) -> log-probabilities (G, N, N, K) of the digit indices."""


@dataclass(frozen=True)
class Decoded:
    """Outcome of decoding. cells: (G, N, N), -1 where none was possible; valid (G,) bool: filled by the rules;
    steps: cells after each step, if they were asked for.
    """

    cells: Tensor
    valid: Tensor
    steps: tuple[Tensor, ...] = ()


def network(task: LatinTask, model: nn.Module, size: Tensor, mode: Tensor) -> Predict:
    """The network as a predictor for grids of these sizes and modes (G,)."""

    def predict(cells: Tensor) -> Tensor:
        batch: Batch = {"square": cells.clamp(min=0), "hidden": cells < 0, "size": size, "mode": mode}
        logits = model(task.tokens(batch, batch["square"]), size, mode)
        return digit_log_probabilities(logits, task.digit_tokens(batch))

    return predict


def puzzle(square: Tensor, hidden: Tensor, size: Tensor) -> Tensor:
    """`cells` of squares (G, N, N) with the `hidden` ones emptied."""
    return torch.where(hidden | ~inside(size, square.shape[1]), -1, square.long())


def candidates(cells: Tensor, size: Tensor) -> Tensor:
    """(G, N, N, K) bool: digits that may be put into each empty cell of the grid; none into others."""
    side = cells.shape[1]
    placed = functional.one_hot(cells + 1, side + 1)[..., 1:].bool()
    used = placed.any(1)[:, None] | placed.any(2)[:, :, None]
    known = torch.arange(side, device=cells.device) < size[:, None]
    empty = (cells < 0) & inside(size, side)
    return ~used & known[:, None, None] & empty[..., None]


def one_pass(cells: Tensor, size: Tensor, predict: Predict) -> Tensor:
    """(G, N, N): every empty cell filled with the network's best digit at once, whatever the others are."""
    best = predict(cells).argmax(3)
    return torch.where((cells < 0) & inside(size, cells.shape[1]), best, cells)


def iterative(
    cells: Tensor, size: Tensor, predict: Predict | None, generator: torch.Generator, keep_steps: bool = False
) -> Decoded:
    """Fill the cell with the fewest candidates with the best of them, again and again.

    Ties between cells go to the one that the network is surest of. predict None: ties and digits at random. A
    grid with a cell that has no candidate stays as it is. generator: on the device of `cells`.
    """
    steps = [cells.clone()]
    while True:
        possible = candidates(cells, size)
        number = possible.sum(3).flatten(1)
        empty = ((cells < 0) & inside(size, cells.shape[1])).flatten(1)
        alive = empty.any(1) & ~(empty & (number == 0)).any(1)
        if not alive.any():
            return Decoded(cells, ~empty.any(1), tuple(steps) if keep_steps else ())
        scores = _scores(cells, possible, predict, generator)
        place = _cell(number, empty, scores)
        digit = _at(scores, place).argmax(1)
        filled = cells.flatten(1).scatter(1, place[:, None], digit[:, None]).view_as(cells)
        cells = torch.where(alive[:, None, None], filled, cells)
        steps.append(cells)


def beam(cells: Tensor, size: Tensor, predict: Predict | None, generator: torch.Generator, width: int) -> Decoded:
    """Beam search: `width` partial grids for each grid, ranked by the sum of their log-probabilities.

    Every partial grid is extended in its cell with the fewest candidates by each of them; those without one
    are dropped. predict None: ranked at random. `predict` gets G * width grids, those of one grid together.
    """
    count, side = len(cells), cells.shape[1]
    beams = cells.repeat_interleave(width, 0)
    sizes = size.repeat_interleave(width)
    total = torch.full((count, width), NEVER, device=cells.device)
    total[:, 0] = 0.0
    for _ in range(int((candidates(cells, size).any(3)).flatten(1).sum(1).max())):
        possible = candidates(beams, sizes)
        empty = ((beams < 0) & inside(sizes, side)).flatten(1)
        scores = _scores(beams, possible, predict, generator)
        place = _cell(possible.sum(3).flatten(1), empty, scores)
        extended = total.view(-1, 1) + _at(scores, place)
        done = ~empty.any(1)
        # A finished grid goes on as itself, by way of digit 0.
        extended = torch.where(done[:, None], torch.full_like(extended, NEVER), extended)
        extended[:, 0] = torch.where(done, total.flatten(), extended[:, 0])
        total, best_extensions = extended.clamp(min=NEVER).view(count, -1).topk(width, 1)
        parent = (best_extensions // side + width * torch.arange(count, device=cells.device)[:, None]).flatten()
        digit = (best_extensions % side).flatten()
        keep = done[parent] | (total.flatten() <= NEVER / 2)
        beams = beams[parent].flatten(1)
        changed = beams.scatter(1, place[parent][:, None], digit[:, None])
        beams = torch.where(keep[:, None], beams, changed).view(-1, side, side)
    dead = total <= NEVER / 2
    best = beams.view(count, width, side, side)[torch.arange(count), total.argmax(1)]
    empty = ((best < 0) & inside(size, side)).flatten(1)
    return Decoded(best, ~empty.any(1) & ~dead.all(1))


def _scores(cells: Tensor, possible: Tensor, predict: Predict | None, generator: torch.Generator) -> Tensor:
    """(G, N, N, K) log-probabilities of the candidates, NEVER elsewhere; without a network random ones."""
    if predict is None:
        scores = torch.rand(possible.shape, device=cells.device, generator=generator).log()
    else:
        scores = predict(cells)
    return scores.masked_fill(~possible, NEVER)


def _cell(number: Tensor, empty: Tensor, scores: Tensor) -> Tensor:
    """(G,) flat index of the empty cell with the fewest candidates; of several, that with the best score."""
    surest = scores.amax(3).flatten(1).clamp(min=-1e3).exp()  # in 0..1: never outweighs a candidate
    rank = number + 1 - surest
    return rank.masked_fill(~empty, torch.inf).argmin(1)


def _at(scores: Tensor, place: Tensor) -> Tensor:
    """(G, K) scores of the cell with flat index `place` (G,)."""
    flat = scores.flatten(1, 2)
    return flat[torch.arange(len(flat), device=flat.device), place]
