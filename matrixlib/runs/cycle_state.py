"""What has become of each generation of a cycle: one file a generation, which grows from stage to stage.

`generation_001.json` is rewritten whenever something is done for good: a chunk of games, the choice of what to learn
from, the training, a batch of a match, the decision. It appears whole or not at all, so a cycle that was killed goes on
behind the last thing that is in it. `generation_000.json` is there where a roll-back came before any decision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from matrixlib.config import Section
from matrixlib.files import read_json, write_json

Pairs = tuple[int, int, int, int, int]
"""Pairs that scored 0, 1/2, 1, 3/2 and 2 points of 2."""


class CycleError(ValueError):
    """A cycle that cannot be begun or continued; says what to do."""


def read_generations(folder: Path) -> dict[int, Generation]:
    """All that a cycle's folder holds, by number, in their order."""
    stored = []
    for path in folder.glob("generation_*.json"):
        try:
            stored.append(Generation.model_validate(read_json(path)))
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise CycleError(f"{path} is damaged ({reason}): bring it back, or begin another cycle") from error
    return {generation.number: generation for generation in sorted(stored, key=lambda g: g.number)}


class Tally(Section):
    """Games of self-play. wins, draws, losses: of the side that starts a game, unknown: those without a result;
    played_out: games that were played on although a side would have given up, wrong: those that it did not lose;
    seconds: of computing."""

    games: int
    positions: int
    plies: int
    wins: int
    draws: int
    losses: int
    unknown: int
    wrong: int
    played_out: int
    seconds: float


class Lesson(Section):
    """What a candidate learns from, settled when its training begins, whatever becomes of shards meanwhile.

    start: generation of its first weights; sources: weights of the latest generations' positions; decisions: how many
    there were about the best network.
    """

    start: int
    sources: dict[str, float]
    decisions: int


class Decision(Section):
    """Which network is the best one from then on. kind: what decided; after: the last generation before it."""

    kind: Literal["match", "rollback"]
    after: int
    best: int
    reason: str
    time: str


class Generation(Section):
    """One generation, as far as it has come.

    by: generation whose network plays the games and is the opponent; begun: UTC time; chunks: first game -> tally;
    top1: on held-out positions, None in a game that has no such figure; top1_new: on those of them that no game to
    learn from has; new: their share; match, anchor: results of the candidate against that network and against
    generation 0, batch by batch; rollbacks: those between this generation's decision and the next one's.
    """

    number: int
    by: int = 0
    begun: str = ""
    chunks: dict[str, Tally] = {}
    lesson: Lesson | None = None
    top1: float | None = None
    top1_new: float | None = None
    new: float | None = None
    match: tuple[Pairs, ...] = ()
    anchor: tuple[Pairs, ...] = ()
    decision: Decision | None = None
    rollbacks: tuple[Decision, ...] = ()

    def __str__(self) -> str:
        text = self.decision.reason if self.decision else "not decided yet"
        return f"generation {self.number}: {self.selfplay.games} games, {text}"

    @property
    def learned(self) -> bool:
        """Whether its network has been trained."""
        return self.new is not None or self.top1 is not None

    @property
    def selfplay(self) -> Tally:
        """All of its games."""
        names = Tally.model_fields
        return Tally(**{name: sum(getattr(t, name) for t in self.chunks.values()) for name in names})

    def pairs(self, kind: Literal["match", "anchor"]) -> tuple[int, ...]:
        """(5,) results of all batches."""
        return tuple(np.sum([(0, 0, 0, 0, 0), *getattr(self, kind)], axis=0).tolist())

    def write(self, folder: Path) -> Generation:
        """Replace its file; returns itself."""
        write_json(folder / f"generation_{self.number:03d}.json", self.model_dump())
        return self

    def grown(self, folder: Path, **changes: Any) -> Generation:
        """With these changes, and written."""
        return self.model_copy(update=changes).write(folder)
