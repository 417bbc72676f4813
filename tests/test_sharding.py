"""A network that is cut over ranks trains as a whole one does, and what it leaves knows nothing of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_runs import results_of
from shard_runs import member
from test_ranks import IN_PARTS, toy_preset

from matrixlib.engine.distributed import SHARDED_OPTIMISERS
from matrixlib.runs import autotune
from matrixlib.runs import run as runs

UNMEASURED = {"time", "seconds", "times", "throughput", "memory", "loader", "messages", "micro_step"}
UNMEASURED |= {"outputs", "dead_units", "chance", "floor"}
"""Keys of a row that hang on the clock, the machine, or which rows rank 0 has."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> list[dict[str, Any]]:
    """What ranks 0 and 1 report; the first check ends rank 2, the last one leaves rank 0 alone."""
    return results_of(forkserver, member, tmp_path_factory.mktemp("shards"), [0, 0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", SHARDED_OPTIMISERS)
def test_weights_averages_and_moments_are_those_of_a_whole_network(
    results: list[dict[str, Any]], optimiser: str
) -> None:
    assert 0 < results[0][optimiser] < 1e-12
    assert results[0]["init"] == 0, "those that rank 0 was given, too"


def test_each_rank_keeps_a_part(results: list[dict[str, Any]]) -> None:
    shares = [result["share"] for result in results]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) < 0.6


def test_what_is_told_of_each_update_is_the_same(results: list[dict[str, Any]]) -> None:
    one, two = results[0]["rows"]
    assert len(one) == len(two) == 10
    assert any("validation" in row for row in one)
    assert any("statistics" in row for row in one)
    for before, after in zip(one, two, strict=True):
        before, after = leaves(before), leaves(after)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert after[name] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value), name


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """What can be compared of a row, by its place in it."""
    if not isinstance(value, dict):
        return {name: value}
    kept = {key: inner for key, inner in value.items() if key not in UNMEASURED}
    return {place: leaf for key, inner in kept.items() for place, leaf in leaves(inner, f"{name}.{key}").items()}


def test_a_run_goes_on_whole_and_cut_again(results: list[dict[str, Any]]) -> None:
    """Its checkpoints do not tell that the network was cut."""
    one, two = results[0]["layouts"]
    assert one == two
    assert {"model.safetensors", "ema.safetensors", "optimiser.safetensors"} <= one["files"].keys()
    assert results[0]["resumed"] < 1e-12
    assert results[0]["network"] < 1e-6, "rank 0 gets the averaged network at the end"
    assert results[1]["network"] is None


def test_what_is_not_finite_on_one_rank_is_skipped_by_both(results: list[dict[str, Any]]) -> None:
    """And both roll back at once."""
    for name, health in {"poison": [1, 0], "ruin": [3, 1]}.items():
        assert 0 < results[0][name] < 1e-12
        assert [result[f"{name} health"] for result in results] == [[health, health], [health]]
    assert [*results[0]["idle"], *results[1]["idle"]] == [True] * 3, "a parameter without gradients is left alone"
    (text,), other = ([text for text in result["poison messages"] if "skipped" in text] for result in results)
    assert "first: " in text, "the rank that met it names the module"
    assert other == [text]
    first, second = (result["bad weight"] for result in results)
    assert first == second
    assert first.endswith("first: inner (forward output; its weight is not finite)"), "on one rank alone"


def test_a_rank_that_is_gone_while_the_network_is_looked_at_is_named(results: list[dict[str, Any]]) -> None:
    for text, step, seconds, _ in (result["lost"] for result in results):
        assert text.startswith("rank 2 of 3 does not answer")
        assert step == 3
        assert seconds < 30


def test_a_signal_to_one_rank_saves_what_both_have(results: list[dict[str, Any]]) -> None:
    assert [result["told"] for result in results] == [[4, [4]], [4, []]]


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_blocks_in_bf16_give_what_autocast_gives(results: list[dict[str, Any]], norm: str) -> None:
    for result in results:
        assert result[f"mixed {norm}"] < 0.05
        assert result[f"gathered {norm}"] == ("torch.bfloat16" if norm == "group" else "torch.float32")


def test_out_of_memory_on_one_rank_ends_both_and_names_it(results: list[dict[str, Any]]) -> None:
    (first, *_), (second, step) = (result["short"] for result in results)
    assert second.startswith("rank 1 of 2 ran out of memory")
    assert first.startswith("rank 1 of 2 does not answer")
    assert step >= 1


def test_nothing_is_begun_of_a_run_that_is_refused(tmp_path: Path, reports: Path) -> None:
    options = {"optim": {"optimiser": "muon", "swa": 0.5, "noise": 0.1}, "gating": {"seconds": 1.0}}
    preset = toy_preset(tmp_path, **options, runtime=IN_PARTS)
    wrong = r"optimiser muon: take one of adamw.*; nor with optim\.swa.*optim\.noise.*gating\.seconds"
    with pytest.raises(ValueError, match=f"shard does not go with .*{wrong}"):
        runs.open_run(preset, run="two", ranks=2)
    assert not (reports / "two").exists()
    runs.open_run(preset, run="one").close()
    preset = toy_preset(tmp_path / "few", runtime=IN_PARTS)
    with pytest.raises(ValueError, match="33 rows for 2 ranks in passes of 1"):
        runs.open_run(preset, run="two", ranks=2, overrides={"train": {"micro_batch": 1}})
    assert not (reports / "two").exists()


def test_nothing_is_tried_of_a_network_that_one_device_may_not_hold(tmp_path: Path, reports: Path) -> None:
    run = runs.open_run(toy_preset(tmp_path, runtime=IN_PARTS), run="two", ranks=2)
    data = replace(run.data, runtime=replace(run.runtime, device="cuda"))
    assert autotune.checked_runtime(data, run.requested) is data
    run.close()
