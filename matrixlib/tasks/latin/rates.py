"""How good a network is, by size, mode and fill: in one pass, cell by cell and by beam, beside its baselines."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.tasks.latin import decode, squares
from matrixlib.tasks.latin.losses import violations
from matrixlib.tasks.latin.task import LatinTask
from matrixlib.tasks.latin.vocabulary import MODES
from matrixlib.tasks.spec import Check

FILLS = ((0.0, 0.0), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7))
ONE_PASS = {4: 0.9, 5: 0.7}
"""Size -> share of the exact probabilities' valid grids that is demanded in one pass."""
EXACT_SIZE, EXACT_FILL = 5, 0.5  # up to this size and from this fill on, all completions can be counted


@dataclass(frozen=True)
class Rate:
    """Figures of `grids` held-out puzzles of one size, mode and range of fill; shares lie in 0..1.

    valid: completed by the best digits of one pass. exact: the same with the exact probabilities in the network's
    place, which no network can beat by much; None where they cannot be counted. accuracy: hidden cells whose best digit
    is the square's (1 cannot be reached where a puzzle has several completions). violations: repeated digits a grid
    after one pass. iterative, beam: valid by decoding; *_baseline: the same without a network.
    """

    size: int
    mode: str
    fill: tuple[float, float]
    grids: int
    valid: float
    exact: float | None
    accuracy: float
    violations: float
    iterative: float
    iterative_baseline: float
    beam: float
    beam_baseline: float

    @property
    def of_exact(self) -> float | None:
        """`valid` as a share of `exact`."""
        return self.valid / self.exact if self.exact else None

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)


def measure(
    task: LatinTask,
    model: nn.Module,
    held_out: Mapping[int, np.ndarray],
    *,
    grids: int,
    seed: int = 0,
    fills: Sequence[tuple[float, float]] = FILLS,
    modes: Iterable[str] | None = None,
    width: int = 4,
) -> list[Rate]:
    """Rates of `model` (on any device, left in eval mode) on `grids` puzzles of each kind.

    held_out: size -> (count, n, n) digit indices, drawn from with repetition. modes: default those of the task's
    stage. width: of the beam. The same seed makes the same puzzles and the same baseline.
    """
    model.eval()
    kinds = [(s, m, f) for s in held_out for m in (modes or task.modes) for f in fills]
    with torch.inference_mode():
        return [_rate(task, model, held_out[s], m, f, grids, seed, width) for s, m, f in kinds]


def _rate(
    task: LatinTask,
    model: nn.Module,
    pool: np.ndarray,
    mode: str,
    fill: tuple[float, float],
    grids: int,
    seed: int,
    width: int,
) -> Rate:
    side = pool.shape[1]
    device = next(model.parameters()).device
    # All modes get the same puzzles, so that their rates can be compared.
    rng = np.random.default_rng([seed, side, round(1000 * fill[0])])
    square = pool[rng.integers(0, len(pool), grids)].astype(np.int64)
    revealed = rng.uniform(*fill, grids)
    hidden = rng.random(square.shape) >= revealed[:, None, None]
    size = torch.full((grids,), side, device=device)
    predict = decode.network(task, model, size, torch.full_like(size, MODES.index(mode)))
    wide = decode.network(
        task, model, size.repeat_interleave(width), torch.full_like(size, MODES.index(mode)).repeat(width)
    )
    target, gap = torch.from_numpy(square).to(device), torch.from_numpy(hidden).to(device)
    cells = decode.puzzle(target, gap, size)
    filled = decode.one_pass(cells, size, predict)
    wrong = violations(filled, size)
    stream = torch.Generator(device).manual_seed(seed)
    return Rate(
        size=side,
        mode=mode,
        fill=fill,
        grids=grids,
        valid=_share(wrong == 0),
        exact=exact_rate(square, hidden) if side <= EXACT_SIZE and fill[0] >= EXACT_FILL else None,
        accuracy=_share((filled == target)[gap]),
        violations=wrong.cpu().double().mean().item(),
        iterative=_share(decode.iterative(cells, size, predict, stream).valid),
        iterative_baseline=_share(decode.iterative(cells, size, None, stream).valid),
        beam=_share(decode.beam(cells, size, wide, stream, width).valid),
        beam_baseline=_share(decode.beam(cells, size, None, stream, width).valid),
    )


def _share(hits: Tensor) -> float:
    return hits.cpu().double().mean().item() if hits.numel() else 1.0  # MPS has no float64


def exact_rate(square: np.ndarray, hidden: np.ndarray) -> float:
    """Share of puzzles (G, n, n) that are valid when each hidden cell gets its most frequent digit of all
    completions: what one pass of a perfect network reaches.
    """
    cells = np.where(hidden, -1, square)
    best = np.stack([squares.marginals(puzzle)[0].argmax(2) for puzzle in cells])
    return float(squares.is_latin(np.where(hidden, best, square)).mean())


def rates(figures: Mapping[str, Any]) -> list[Rate]:
    """The rates by size, mode and fill of a run's evaluation."""
    return [Rate(**{**row, "fill": tuple(row["fill"])}) for row in figures["rates"]]


def targets(figures: Mapping[str, Any]) -> list[Check]:
    """What a network that had its time has to reach in STANDARD: checks by size.

    In one pass at 50 to 70 % fill, a share of what the exact probabilities reach; decoded from the empty grid, more
    valid grids than without a network, where that leaves room.
    """
    checks: list[Check] = []
    for rate in rates(figures):
        if rate.mode != "standard":
            continue
        share, least = rate.of_exact, ONE_PASS.get(rate.size)
        if rate.fill == (0.5, 0.7) and share is not None and least is not None:
            text = f"{rate.valid:.1%} valid, {share:.0%} of what the exact probabilities reach, {least:.0%} demanded"
            checks.append((f"size {rate.size} in one pass", share >= least, text))
        if rate.fill == (0.0, 0.0):
            baseline, valid = rate.iterative_baseline, rate.iterative
            text = f"{valid:.1%} valid, {baseline:.1%} without a network, {rate.grids} grids"
            checks.append((f"size {rate.size} from the empty grid", valid > baseline or valid == 1, text))
    return checks
