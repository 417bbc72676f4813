"""Messages of a training: each kind once in an interval, then how often it came again."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from matrixlib.engine.state import State

WORDS = 8
"""First words of a message that make its kind, numbers apart."""
DECISIONS = ("halted", "rolled back", "update skipped")
"""How messages begin of what health decided."""


@dataclass
class Messages(State):
    """Which messages a run lets through. It goes into the checkpoint, so that a resumed run says the same.

    config: the interval, in updates. since: update at which a kind was let through last. again: how often it has come
    since then; latest: in which words.
    """

    config: int
    since: dict[str, int] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)
    latest: dict[str, str] = field(default_factory=dict)

    def sift(self, step: int, texts: Iterable[str], last: bool = False) -> list[str]:
        """What of an update's messages a person is told, with the counts of those whose interval is over.

        last: the run ends with this update, so that every count is told.
        """
        told = []
        for text in texts:
            kind = _kind(text)
            if kind in self.since:
                self.again[kind] = self.again.get(kind, 0) + 1
                self.latest[kind] = text
            else:
                self.since[kind] = step
                told.append(text)
        for kind, since in list(self.since.items()):
            if not last and step - since < self.config:
                continue
            del self.since[kind]
            if count := self.again.pop(kind, 0):
                told.append(f"{self.latest.pop(kind)} ({count:,} times more after update {since:,})")
                self.since[kind] = step
        return told


def is_decision(text: str) -> bool:
    """Whether a message is about what health decided: a skipped update, a rollback, the end."""
    return text.startswith(DECISIONS)


def _kind(text: str) -> str:
    words = re.sub(r"\S*\d\S*|\bnan\b|\binf\b", "#", text).split()
    return " ".join(words[:WORDS])
