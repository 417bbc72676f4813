"""Every option is read by the code that it is there for: sections of small runs tell which of their keys are used."""

import math
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from planted import spoil_output

from matrixlib.config import Config, Section, merge
from matrixlib.data.catalogue import Catalogue
from matrixlib.files import PACKAGE
from matrixlib.runs import run as runs
from matrixlib.runs.cycle import open_cycle
from matrixlib.runs.cycle_games import CycleConfig
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.chess.spec import TASK as CHESS_TASK
from matrixlib.tasks.chess.stockfish.sample import unpack_sample
from matrixlib.tasks.latin.spec import TASK as LATIN_TASK
from matrixlib.tasks.melee.spec import TASK as MELEE_TASK
from matrixlib.tasks.spec import given_folder
from matrixlib.tasks.tictactoe.spec import TASK as TICTACTOE

Keys = set[tuple[str, str]]
"""(class of a section, name of a key)."""
ON_DAMAGE = "max_lost"
"""Read of damaged data alone: test_run.py::test_a_run_says_what_it_lost_and_ends_above_the_limit."""
ENGINE: dict[str, Any] = {  # everything that is off by default, on
    "data": {"workers": 0},
    "train": {"steps": 10, "batch_size": 16, "statistics_interval": 2},
    "gating": {"freeze_steps": 1},
    "health": {"skips": 2, "rate_recovery": 2, "hooks": True},
    "validation": {"interval": 2, "full_every": 1, "limit": 64, "sample": 16, "batch_size": 64}
    | {"patience": 50, "plateau": 1, "min_delta": 9.0},
    "checkpoint": {"interval": 2},
    "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
}
CHESS: dict[str, Any] = {
    "data": {"limit": 512},
    "model": {
        "channels": 16,
        "blocks": 2,
        "block": "bottleneck",
        "ssl": ["piece", "threat", "pin", "fork", "control"],
        "attention": {"every": 1, "heads": 2, "mask": True, "unmasked_mix": 0.5, "bias": True},
        "policy": {"kind": "factored"},
    },
    "curriculum": {"kind": "adaptive", "metric": "policy/top1", "patience": 1, "dwell": 1},
    "validation": {"strength": {"every": 10, "pairs": 1, "simulations": 2, "plies": 4}},
}
LATIN: dict[str, Any] = {
    "optim": {"optimiser": "muon"},
    "model": {"width": 16, "layers": 1, "heads": 2, "feedforward": 2},
    "curriculum": {"kind": "adaptive", "metric": "cell/accuracy", "patience": 1, "dwell": 1},
}
MELEE: dict[str, Any] = {
    "optim": {"swa": 0.5},
    "data": {"delay": [0, 4]},
    "model": {"trunk": "transformer", "width": 16, "layers": 1, "heads": 2},
}
CYCLE: dict[str, Any] = {
    "generations": 1,
    "games": 20,
    "selfplay": {"parallel": 20, "num_simulations": 4, "num_quick_simulations": 2, "full_share": 0.5}
    | {"temperature_plies": 1, "adjudicate_plies": 2, "adjudicate_draw_ply": 1},
    "match": {"pairs": 2, "batch": 1, "num_simulations": 2, "anchor_pairs": 1},
    "network": ENGINE,
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Keys that code outside the schemas has read, as it fills."""
    keys: Keys = set()
    plain = Section.__getattribute__

    def noted(self: Section, name: str) -> Any:
        key = type(self).__name__, name
        if key not in keys and name in type(self).__pydantic_fields__:
            reader = Path(sys._getframe(1).f_code.co_filename)
            if reader.name != "config.py" and reader.is_relative_to(PACKAGE):
                keys.add(key)
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", noted)
    return keys


def keys_of(schema: type[Section]) -> Keys:
    """Every key of a schema that holds a value."""
    keys: Keys = set()
    for name, field in schema.model_fields.items():
        inner = field.annotation
        nested = isinstance(inner, type) and issubclass(inner, Section) and inner is not Config  # which stands for any
        keys |= keys_of(inner) if nested else {(schema.__name__, name)}
    return keys


def train(preset: str, *changes: Mapping[str, Any]) -> runs.Run:
    """A few updates to the end; the network's outputs of two of them are not finite."""
    overrides: dict[str, Any] = {}
    for change in (ENGINE, *changes):
        overrides = merge(overrides, change)
    run = runs.open_run(preset, overrides=overrides)
    calls = iter(range(10**9))
    run.model.register_forward_hook(spoil_output(math.nan, lambda: next(calls) in range(5, 9)))
    for _ in run.train():
        pass
    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_key_is_read(read: Keys, reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Catalogue(unpack_sample()).shards("train")[0].source
    stages = {"enabled": True, "stages": [{source: 1.0}, {}], "fractions": [0.5, 0.5]}
    first = train("demo", CHESS, {"curriculum": {"sources": stages}})
    runs.open_run("demo", overrides=merge(merge(ENGINE, CHESS), {"train": {"init": first.name}})).close()
    taught = [{"teacher": {"network": first.name, "schedule": s, "features": 0.1}} for s in ("linear", "learned")]
    for changes in (*taught, {"model": {"value": {"kind": "scalar"}}, "loss": {"scalar": "huber"}}):
        with closing(runs.open_run("demo", overrides=merge(merge(ENGINE, CHESS), changes))) as run:
            next(iter(run.train()))
    encoder: dict[str, Any] = {"trunk": "encoder", "channels": 16, "blocks": 1, "encoder": {"smolgen": 16, "dense": 1}}
    encoder |= {"policy": {"kind": "attention"}, "moves_left": {"channels": 1}}
    task: Any = get_task("chess").task(load_config("lc0_quick", {"model": encoder}))
    task.build_model()
    assert task.weights["moves_left"]
    train("latin_demo", LATIN, {"train": {"steps": "auto", "minutes": 0.001}, "validation": {"interval": "auto"}})
    train("melee_demo", MELEE)
    for _ in open_cycle("tictactoe", "cpu", "", CYCLE).train():
        pass
    for task in (CHESS_TASK, LATIN_TASK, MELEE_TASK, TICTACTOE):
        given_folder(task.config.model_fields["data"].annotation(source=f"file://{unpack_sample()}"))
    for schema in (CHESS_TASK.config, LATIN_TASK.config, MELEE_TASK.config, TICTACTOE.config, CycleConfig):
        unread = [(kind, key) for kind, key in keys_of(schema) - read if key != ON_DAMAGE]
        assert sorted(unread) == [], schema.__name__
