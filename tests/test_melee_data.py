"""Data of Melee: what ships, how rare each button is in the rows in use, and training on it; bad input is refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matrixlib.config import ConfigError, validated
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard, write_shard
from matrixlib.runs.run import open_run
from matrixlib.tasks.melee.columns import LAYOUT
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.controller import HEADS
from matrixlib.tasks.melee.sample_set import SAMPLE, decode, encode, unpack_sample
from matrixlib.tasks.melee.spec import TASK
from matrixlib.tasks.shipped import read_manifest


def config(**data: Any) -> MeleeConfig:
    return MeleeConfig.model_validate({"task": "melee", "data": data})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The sample set as a folder of one's own."""
    copied = shutil.copytree(unpack_sample(), tmp_path / "set")
    return Path(copied)


def test_what_ships_is_small_has_its_licence_and_says_where_it_is_from() -> None:
    manifest = read_manifest(SAMPLE)
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 3_000_000
    assert len(manifest["games"]) == 6
    for game in manifest["games"]:
        assert game["from"].startswith("https://github.com/")
        assert Path(game["file"]).stem in (SAMPLE / "LICENSE").read_text()
    assert "MIT License" in (SAMPLE / "LICENSE").read_text()


def test_what_ships_is_whole_and_split_by_game() -> None:
    data = (SAMPLE / read_manifest(SAMPLE)["file"]).read_bytes()
    games = decode(data)
    (again,) = decode(encode(games[4:5]))
    for name, value in vars(games[4]).items():  # bytes, as some of it is NaN
        assert np.asarray(getattr(again, name)).tobytes() == np.asarray(value).tobytes(), name
    split = {
        name: Shard(unpack_sample() / f"sample_{name}.npz", LAYOUT).arrays["records"]
        for name in ("train", "validation")
    }
    ids = {name: set(records["game"].tolist()) for name, records in split.items()}
    assert ids["train"].isdisjoint(ids["validation"])
    assert sum(int(records["own"].sum()) for records in split.values()) == sum(2 * len(game.number) for game in games)


# Rates


def held_buttons(folder: Path, rows: int) -> tuple[int, list[int]]:
    """Own frames of the first rows of the training shard, and how often each button is pressed in them, by hand."""
    shard = Shard(folder / "sample_train.npz", LAYOUT)
    pressed, frames = np.zeros(8, np.int64), 0
    for begin, own in zip(shard.arrays["frame_offset"], shard.arrays["records"]["own"][:rows].tolist(), strict=False):
        held = shard.arrays["frame_state"]["controller"]["buttons"][begin : begin + own]
        pressed += np.unpackbits(held[:, None], axis=1, bitorder="little").sum(0, dtype=np.int64)
        frames += own
    return frames, pressed.tolist()


def test_rates_are_those_of_the_rows_in_use(folder: Path) -> None:
    whole, part = TASK.statistics(config(source=str(folder))), TASK.statistics(config(source=str(folder), limit=100))
    assert whole is not None
    assert part is not None
    for counted, rows in ((whole, 1882), (part, 100)):
        assert (counted.frames, counted.held[:8]) == held_buttons(folder, rows)
        assert [sum(counted.held[head.logits]) for head in HEADS[1:]] == [counted.frames] * 5
    assert whole.weights() != part.weights()


def test_rates_are_made_again_where_the_split_changes(folder: Path, tmp_path: Path) -> None:
    before, other = TASK.statistics(config(source=str(folder))), tmp_path / "other"
    other.mkdir()
    for split, name in (("train", "validation"), ("validation", "train")):
        _move(folder / f"sample_{name}.npz", other / f"sample_{split}.npz", split)
    after = TASK.statistics(config(source=str(other)))
    assert before is not None
    assert after is not None
    assert (before.frames, after.frames) == (112572, 23904)
    Catalogue(other).quarantine("sample_train.npz", "by hand")
    assert TASK.statistics(config(source=str(other))) is None
    assert TASK.statistics(config(source=str(tmp_path / "nowhere"))) is None


def _move(path: Path, to: Path, split: str) -> None:
    shard = Shard(path, LAYOUT)
    own = ("source", "generator", "seed", "created", "quality")
    batch = shard.gather(np.arange(len(shard)))
    write_shard(to, LAYOUT, batch, {**{name: shard.meta[name] for name in own}, "split": split})


# Bad input


TINY = {"model": {"width": 8, "embedding": 4, "head_width": 4}, "runtime": {"precision": "fp32", "threads": 1}}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"window": 61}, "data.window"),
        ({"delay": [4, 2]}, "delay runs from the least to the greatest"),
        ({"delay": [0, 19]}, "data.delay"),
    ],
)
def test_options_that_cannot_be_are_refused(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validated(MeleeConfig, {"task": "melee", "data": data}, "mine")


@pytest.mark.filterwarnings("ignore:.*quarantined")
def test_data_that_cannot_be_trained_on_are_refused(folder: Path, reports: Path) -> None:
    (folder / "sample_validation.npz").unlink()
    problem = "holds nothing out, .*; add data: about one replay in ten is held out, and of several"
    for source, text in ((folder / "nowhere", "is no folder; use 'sample' or a folder of shards"), (folder, problem)):
        with pytest.raises(ValueError, match=text):
            list(open_run("melee_demo", "cpu", overrides={**TINY, "data": {"source": str(source)}}).train())
