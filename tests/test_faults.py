"""Faults planted on purpose, each by itself; test_injection.py trains with them."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import BLOCK, DamagedBlock, Shard
from matrixlib.runs import faults, injection
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.latin.pool import LAYOUT as SQUARES


def test_faults_are_selected_by_name() -> None:
    known = faults.faults_of(get_task("chess"))
    assert faults.parse_names("all", known) == list(faults.FAULTS) == list(known)
    assert faults.parse_names("kill, sigterm", known) == ["kill", "sigterm"]
    with pytest.raises(ValueError, match="unknown fault 'sigtrem', did you mean 'sigterm'"):
        faults.parse_names("kill,sigtrem", known)
    with pytest.raises(ValueError, match="no fault is named"):
        faults.parse_names(" , ", known)


def test_the_data_set_is_a_part_of_the_source_and_really_damaged(tmp_path: Path) -> None:
    config = load_config("demo", injection.overrides_of(40))
    injection.copy_data(config, tmp_path / "data")
    train, held_out = (Catalogue(tmp_path / "data").shards(split) for split in ("train", "validation"))
    assert (train[0].count, held_out[0].count) == (8 * BLOCK, 512)
    faults.flip_bytes(tmp_path / "data", LAYOUT)
    assert Catalogue(tmp_path / "data").shards("train") == train, "it looks healthy from outside"
    shard = Shard(train[0].path, LAYOUT)
    shard.gather(np.arange(100))
    with pytest.raises(DamagedBlock):
        shard.gather(np.array([BLOCK]))
    small = load_config("demo", {"data": {"limit": 100}})
    injection.copy_data(small, tmp_path / "small")
    with pytest.raises(ValueError, match="8,192 training positions"):
        faults.flip_bytes(tmp_path / "small", LAYOUT)


def test_a_data_set_for_a_curriculum_keeps_its_sources_and_their_shares(tmp_path: Path) -> None:
    """Squares of size 3 repeat, so bytes that are searched for would be found in another block."""
    changes = dict(get_task("latin").small) | {"data": {"squares": 5 * BLOCK, "limit": 6 * BLOCK}}
    injection.copy_data(load_config("latin_demo", changes), tmp_path / "data")
    catalogue = Catalogue(tmp_path / "data")
    train, held_out = catalogue.shards("train"), catalogue.shards("validation")
    assert [(row.source, row.count) for row in train] == [("size 3", 3 * BLOCK), ("size 4", 3 * BLOCK)]
    assert [(row.source, row.count) for row in held_out] == [("size 3", 128), ("size 4", 128)]
    faults.flip_bytes(tmp_path / "data", SQUARES)
    shard = Shard(train[0].path, SQUARES)
    shard.gather(np.array([0, 2 * BLOCK]))
    with pytest.raises(DamagedBlock):
        shard.gather(np.array([BLOCK]))


def test_a_task_without_faults_of_its_own_has_the_others() -> None:
    known = faults.faults_of(get_task("tictactoe"))
    assert set(faults.FAULTS) - set(known) == {"nan_target", "inf_input", "no_policies"}
    assert faults.faults_of(get_task("latin"))["no_policies"].title == "no cell hidden"


def test_half_precision_overflows_where_it_does() -> None:
    gradient = faults.in_half_precision(torch.tensor([65504.0, 65536.0, -1e9]))
    assert gradient.tolist() == [65504.0, float("inf"), float("-inf")]


def test_a_disk_of_its_own_or_none(tmp_path: Path) -> None:
    with faults.small_disk(tmp_path / "disk", 2**20) as disk:
        if disk is None:
            pytest.skip("this machine mounts no file system for its users")
        assert os.path.ismount(disk)
        with pytest.raises(OSError, match="No space left"):
            (disk / "large").write_bytes(bytes(2**21))
    assert not disk.exists()
    assert not list((tmp_path / "disk").iterdir())
