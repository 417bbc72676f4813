"""Quality figures against the slow, obvious way."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_shards import LAYOUT, META, toy_batch

from matrixlib.data.shards import Shard, write_shard
from matrixlib.data.stats import figures, robust_z, row_entropy


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=6), min_size=1, max_size=20))
def test_entropy_of_rows(rows: list[list[int]]) -> None:
    offset = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    entropy, has_weight = row_entropy(np.array([w for row in rows for w in row], np.uint16), offset)
    for row, got, has in zip(rows, entropy, has_weight, strict=True):
        p = np.array([w for w in row if w], float)
        assert has == (len(p) > 0)
        p = p / p.sum() if len(p) else p
        assert got == pytest.approx(-(p * np.log(p)).sum(), abs=1e-9)


def test_known_figures() -> None:
    batch = toy_batch(4, longest=0) | {
        "target_offset": np.array([0, 4, 6, 6, 9], "<i8"),
        "target_index": np.zeros(9, "<u2"),
        "target_weight": np.array([5, 5, 5, 5, 0, 7, 0, 0, 0], "<u2"),
    }
    keys = np.array([3, 9, 3, 3], np.uint64)
    found = figures(batch, LAYOUT, keys=keys, weight="target_weight")
    assert found == {
        "records": 4,
        "duplicates": 2,
        "target_min": 0,
        "target_max": 4,
        "target_mean": 2.25,
        "target_weight_entropy_mean": pytest.approx(np.log(4) / 2),
        "target_weight_entropy_std": pytest.approx(np.log(4) / 2),
        "target_weight_zero": 0.5,
    }


def test_figures_of_a_mapped_shard_are_json(tmp_path: Path) -> None:
    batch = toy_batch(300)
    write_shard(tmp_path / "a.npz", LAYOUT, batch, META)
    arrays = Shard(tmp_path / "a.npz", LAYOUT).arrays
    found = figures(arrays, LAYOUT, keys=arrays["records"]["row"], weight="target_weight")
    assert json.loads(json.dumps(found)) == found == figures(
        batch, LAYOUT, keys=batch["records"]["row"], weight="target_weight"
    )  # fmt: skip
    assert found["duplicates"] == 0
    assert "duplicates" not in figures(batch, LAYOUT)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="has target_index, target_weight"):
        figures(toy_batch(3), LAYOUT, weight="weight")
    with pytest.raises(ValueError, match="2 keys for 3 records"):
        figures(toy_batch(3), LAYOUT, keys=np.zeros(2))
    with pytest.raises(ValueError, match="nothing to measure"):
        figures(toy_batch(0), LAYOUT)


def test_robust_z_is_not_moved_by_an_outlier_and_has_a_least_scale() -> None:
    others = np.array([10.0, 11, 12, 13, 14, 1000])
    assert robust_z(12.5, others) == 0
    assert robust_z(12.5 + 3 * 1.4826 * 1.5, others) == pytest.approx(3)
    assert robust_z(52, np.full(8, 50.0)) == pytest.approx(2), "two per cent of the median"
    assert robust_z(0.05, np.zeros(8)) == pytest.approx(5), "and 0.01"
