"""Elo with confidence intervals from game pairs, a sequential test, and rating tables.

The two games of a pair share an opening with colours swapped and are not independent: statistics count pairs
(pentanomial model). Scores are the first player's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from matrixlib.config import Real, Section, option

if TYPE_CHECKING:
    import pandas as pd

PAIR_SCORES = np.array([0, 0.25, 0.5, 0.75, 1])  # of a pair: mean of its games
DRAWN_PAIR = np.array([0, 0, 1, 0, 0])
Counts: TypeAlias = Sequence[int] | NDArray[np.int64]  # pairs (5,) that scored 0, 1/2, 1, 3/2 and 2 points of 2
CONFIDENCE = 0.95  # of intervals


def expected_score(elo: float) -> float:
    """Expected points a game for a player stronger by `elo` (logistic)."""
    return 1 / (1 + 10 ** (-elo / 400))


def elo_of(score: float) -> float:
    """Inverse of `expected_score`; infinite at 0 and 1."""
    if not 0 < score < 1:
        return math.inf if score >= 1 else -math.inf
    return 400 * math.log10(score / (1 - score))


def rating(pairs: Counts) -> Rating:
    """The first player's rating from pair results; ValueError without any.

    Wilson's interval (1927, https://doi.org/10.1080/01621459.1927.10502953) with Student's quantile, for as many
    decisive games as have the pairs' variance plus one pair of decisive games, so that a few equal pairs do not look
    certain. Biased away from 0 if a sequential test ended the match.
    """
    from scipy.stats import t  # takes a second to import

    counts = _counts(pairs)
    n = int(counts.sum())
    score = float(counts @ PAIR_SCORES) / n
    decided = score * (1 - score)  # variance of a decided game
    variance = (float(counts @ (PAIR_SCORES - score) ** 2) + decided / 2) / (n + 1) / n  # of the score
    effective = decided / variance if decided > 0 else 2.0 * n
    z = float(t.ppf((1 + CONFIDENCE) / 2, n))
    wide = 1 + z * z / effective
    centre = (score + z * z / (2 * effective)) / wide
    half = z * math.sqrt(decided / effective + z * z / (4 * effective**2)) / wide
    return Rating(
        games=2 * n,
        score=score,
        elo=elo_of(score),
        low=elo_of(centre - half) if score > 0 else -math.inf,
        high=elo_of(centre + half) if score < 1 else math.inf,
    )


def rating_table(
    matches: Mapping[tuple[str, str], Counts], samples: int = 500, seed: int = 0, zero: str = ""
) -> pd.DataFrame:
    """Ratings of several players, best first, from the pair results (5,) of each match (first player, second player).

    A row a player: games, score, elo against the mean (or the player `zero`), low and high of its 95 % interval
    (Bayesian bootstrap over pairs, Rubin 1981). Bradley-Terry strengths (draws are half points), with one drawn pair
    added to each match, so that all is finite and a match of wins alone does not look certain. ValueError if matches do
    not connect all players.
    """
    import pandas as pd

    names = sorted({name for players in matches for name in players})
    row = {name: i for i, name in enumerate(names)}
    rng = np.random.default_rng(seed)
    points = np.zeros((samples + 1, len(names), len(names)))  # of i against j: observed, then resampled
    for (one, other), pairs in matches.items():
        counts = _counts(pairs) + DRAWN_PAIR
        n = counts.sum()
        drawn = rng.standard_gamma(counts, (samples, len(counts)))
        won = np.concatenate([counts[None], n * drawn / drawn.sum(1, keepdims=True)]) @ PAIR_SCORES
        points[:, row[one], row[other]] += 2 * won
        points[:, row[other], row[one]] += 2 * (n - won)
    met = points[0] + points[0].T > 0
    played, score = (points[0] + points[0].T - 2 * met).sum(1), (points[0] - met).sum(1)
    if not np.linalg.matrix_power(met + np.eye(len(names)), len(names)).all():
        raise ValueError(f"no chain of matches links all of {', '.join(names)}: they have no common scale")
    games, strength = points + points.transpose(0, 2, 1), np.ones(points.shape[:2])
    for _ in range(5000):  # minorisation-maximisation (Hunter 2004)
        update = points.sum(2) / (games / (strength[:, :, None] + strength[:, None, :])).sum(2)
        update /= np.exp(np.log(update).mean(1, keepdims=True))
        converged = np.abs(np.log(update / strength)).max() < 1e-7
        strength = update
        if converged:
            break
    elo = 400 * np.log10(strength)
    elo -= elo[:, [row[zero]]] if zero else 0
    low, high = np.quantile(elo[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    columns = {"games": played.astype(int), "score": score / played, "elo": elo[0], "low": low, "high": high}
    frame = pd.DataFrame(columns, index=names)
    return frame.sort_values("elo", ascending=False)


def _counts(pairs: Counts) -> NDArray[np.float64]:
    counts = np.asarray(pairs, np.float64)
    if counts.shape != (5,) or (counts < 0).any() or not counts.any():
        raise ValueError(f"expected how many pairs scored 0, 1/2, 1, 3/2 and 2 points, at least one, not {pairs}")
    return counts


def _likeliest(counts: NDArray[np.float64], elo: float) -> NDArray[np.float64]:
    """Log of the maximum-likelihood probabilities (5,) whose mean is that of an Elo difference: p_i = f_i / (1 + x *
    d_i), with observed frequencies f, score distances d from the mean, and x by bisection of sum(d_i * p_i) = 0."""
    shares, distance = counts / counts.sum(), PAIR_SCORES - expected_score(elo)
    low, high = -1 / distance[-1], -1 / distance[0]
    for _ in range(100):
        x = (low + high) / 2
        if float((shares * distance / (1 + x * distance)).sum()) > 0:
            low = x
        else:
            high = x
    return np.log(shares / (1 + x * distance))


@dataclass(frozen=True)
class Rating:
    """Elo difference of the first to the second player with its 95 % interval; infinite at scores 0 and 1.

    score: points a game.
    """

    games: int
    score: float
    elo: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.elo:+.1f} Elo [{self.low:+.1f}, {self.high:+.1f}], {self.games} games, score {self.score:.1%}"


class Sprt(Section):
    """Sequential probability ratio test of elo1 (H1) against elo0 (H0), Wald 1945, with pairs as observations."""

    elo0: Real = option(0.0, "SPRT: H0, no stronger than this")
    elo1: Real = option(50.0, "SPRT: H1, at least this much stronger")
    alpha: Annotated[Real, Field(gt=0, lt=0.5)] = option(0.05, "SPRT: rate of false promotions")
    beta: Annotated[Real, Field(gt=0, lt=0.5)] = option(0.05, "SPRT: rate of false rejections")

    @model_validator(mode="after")
    def _ordered(self) -> Sprt:
        if self.elo0 >= self.elo1:
            raise ValueError(f"elo0 {self.elo0:g} must be below elo1 {self.elo1:g}")
        return self

    def ratio(self, pairs: Counts) -> float:
        """Log-likelihood ratio of H1 to H0, each with its maximum-likelihood distribution (generalised SPRT)."""
        counts = np.maximum(_counts(pairs), 1e-3)  # unseen outcomes are not impossible
        return float(counts @ (_likeliest(counts, self.elo1) - _likeliest(counts, self.elo0)))

    def decision(self, pairs: Counts) -> bool | None:
        """True: H1, False: H0, None: undecided (or no pairs)."""
        if not np.sum(pairs):
            return None
        low, high = math.log(self.beta / (1 - self.alpha)), math.log((1 - self.beta) / self.alpha)
        ratio = self.ratio(pairs)
        return True if ratio >= high else False if ratio <= low else None
