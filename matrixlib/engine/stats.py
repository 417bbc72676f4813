"""Numbers and messages of one update; plain checkpointable state."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from statistics import median
from typing import Any, Self

WINDOW = 500  # updates over which gradient statistics are computed
UNLOGGED: Any = {"logged": False}


class Event(StrEnum):
    """Id of a message. metrics.jsonl stores it with the text; code never parses text."""

    HALT = "halt"
    ROLLBACK = "rollback"
    SKIP = "skip"
    OUT_OF_MEMORY = "out_of_memory"
    MEMORY = "memory"
    CACHE_CLEARED = "cache_cleared"
    CHUNK = "chunk"
    COMPILER = "compiler"
    LOSS_SCALE = "loss_scale"
    NO_TARGET = "no_target"
    UNUSABLE_TARGETS = "unusable_targets"
    GATED = "gated"
    PLATEAU = "plateau"
    AUXILIARY_OFF = "auxiliary_off"
    VALIDATION = "validation"
    MATCH = "match"
    FIRST_UPDATE = "first_update"
    CLIPPING = "clipping"
    UPDATE_SIZE = "update_size"
    DEAD_UNITS = "dead_units"
    COLLAPSE = "collapse"
    WAITING_FOR_DATA = "waiting_for_data"


DECISIONS = (Event.HALT, Event.ROLLBACK, Event.SKIP)  # decisions of `Health`, most severe first


class Message(str):
    """Text with the id of its event. subject: separates messages of one event (the name of a term)."""

    event: Event
    subject: str

    def __new__(cls, event: Event, text: str, subject: str = "") -> Self:
        message = super().__new__(cls, text)
        message.event, message.subject = event, subject
        return message

    def __getnewargs__(self) -> tuple[Event, str, str]:  # type: ignore[override]
        return self.event, str(self), self.subject


class Action(StrEnum):
    OK = "ok"
    SKIP = "skip"
    ROLLBACK = "rollback"
    HALT = "halt"


@dataclass(frozen=True)
class Stats:
    """Numbers of one update, on the host.

    step: updates done, this one included; steps: of the whole run; epoch: passes over the training positions so far.
    micro_step: forward passes done. loss: weighted total of `losses`, the means over items by term, in training mode,
    before the update. metrics: means by "term/name". grad_norm: global norm before clipping (unscaled). clip_share:
    share of recent gradients that were clipped, after the warm-up. action: "verdict" in metrics.jsonl. skipped,
    overflows: updates so far that moved no weight, because of non-finite values or the loss scale. rollbacks: so far,
    before this update. seconds: data wait plus update. times: seconds by phase (`timing.PHASES`), on a GPU possibly one
    update late. loader: `Source.prefetch_stats`. throughput: rows/s. share_of_peak: of the device's matrix rate (MFU).
    gate, dropout: factors on SSL weights and dropout rates. left_out: rows without SSL terms because of
    `gating.seconds`. phase: of the curriculum. validation: fields of `Validation`. strength: of a match against the
    anchor, see `Context`. memory: since the last row that has it. statistics: "outputs", "gradient_norm", "blocks",
    "dead_units". initial: at the first update, by term "loss", "chance", "floor". extra: the user's own numbers
    (`Trainer.log`). messages: for people. None or (): not in this update.

    Not logged: main_loss: `loss` without SSL terms, whose weights change. counts: items by term; terms without items
    are in `empty`, not in `losses`; gated ones are in neither. finite: all terms and gradients are finite; detail:
    which are not. overflow: the loss is finite and the loss scale explains the rest. clipped: the norm exceeded the
    threshold. warming_up: before the peak learning rate. passes: forward passes of this update. rows: of all ranks.
    """

    step: int
    loss: float
    grad_norm: float
    micro_step: int = 0
    steps: int | None = None
    losses: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    learning_rate: float = 0.0
    epoch: float | None = None
    clip_share: float = 0.0
    action: Action = field(default=Action.OK, metadata={"key": "verdict"})
    skipped: int = 0
    overflows: int = 0
    rollbacks: int = 0
    seconds: float = 0.0
    throughput: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    loader: dict[str, float] | None = None
    share_of_peak: float | None = None
    gate: float | None = None
    dropout: float | None = None
    left_out: int | None = None
    phase: int | None = None
    validation: dict[str, Any] | None = None
    strength: dict[str, float] | None = None
    memory: dict[str, Any] | None = None
    statistics: dict[str, Any] | None = None
    initial: dict[str, dict[str, float]] | None = None
    extra: dict[str, float] | None = None
    messages: tuple[Message, ...] = ()
    main_loss: float = field(default=0.0, metadata=UNLOGGED)
    counts: dict[str, int] = field(default_factory=dict, metadata=UNLOGGED)
    empty: tuple[str, ...] = field(default=(), metadata=UNLOGGED)
    finite: bool = field(default=True, metadata=UNLOGGED)
    overflow: bool = field(default=False, metadata=UNLOGGED)
    clipped: bool = field(default=False, metadata=UNLOGGED)
    warming_up: bool = field(default=False, metadata=UNLOGGED)
    detail: str = field(default="", metadata=UNLOGGED)
    passes: int = field(default=1, metadata=UNLOGGED)
    rows: int = field(default=0, metadata=UNLOGGED)

    @property
    def update(self) -> int:
        """Index of the update, from 0."""
        return self.step - 1

    def row(self) -> dict[str, Any]:
        """The row of metrics.jsonl, without empty fields."""
        logged = [f for f in fields(self) if f.metadata.get("logged", True)]
        values = {f.metadata.get("key", f.name): getattr(self, f.name) for f in logged}
        values["events"] = tuple(message.event for message in self.messages)
        return {key: value for key, value in values.items() if value is not None and value != ()}


def from_row(row: Mapping[str, Any]) -> Stats:
    """Stats of a metrics.jsonl row; `Stats.row` gives the row back, without its time."""
    names = {f.metadata.get("key", f.name): f.name for f in fields(Stats) if f.metadata.get("logged", True)}
    values = {names[key]: value for key, value in row.items() if key in names}
    told = zip(row.get("events", ()), row.get("messages", ()), strict=True)
    messages = tuple(Message(Event(event), text) for event, text in told)
    return Stats(**values | {"action": Action(row["verdict"]), "messages": messages})


@dataclass
class State:
    """Base of dataclasses whose fields, except `config`, are checkpointed as plain data."""

    config: Any

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; from_dict(s.config, s.to_dict()) == s."""
        return copy.deepcopy({f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"})

    @classmethod
    def from_dict(cls, config: Any, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; `config` may differ. ValueError names missing or unknown keys."""
        if odd := sorted({f.name for f in fields(cls)} - {"config"} ^ data.keys()):
            raise ValueError(f"{cls.__name__} of the checkpoint is of another version: {', '.join(odd)}")
        return cls(config, **copy.deepcopy(dict(data)))


@dataclass
class RateLimiter(State):
    """Passes one message of each kind in `config` updates, and counts repeats (`again`)."""

    config: int
    since: dict[str, int] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)

    def filter(self, step: int, messages: Iterable[Message]) -> list[Message]:
        passed = []
        for message in messages:
            kind = f"{message.event}:{message.subject}"
            since = self.since.get(kind, step - self.config)
            if step - since < self.config:
                self.again[kind] = self.again.get(kind, 0) + 1
                continue
            if count := self.again.pop(kind, 0):
                text = f"{message} ({count:,} more since update {since:,})"
                message = Message(message.event, text, message.subject)
            self.since[kind] = step
            passed.append(message)
        return passed


def listed(names: Sequence[str], most: int = 5) -> str:
    """At most so many names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def norm_quantiles(norms: Sequence[float]) -> dict[str, float]:
    """median and p95 (nearest rank) of gradient norms; empty without values."""
    ordered = sorted(norms)
    return {"median": median(ordered), "p95": ordered[math.ceil(0.95 * len(ordered)) - 1]} if ordered else {}
