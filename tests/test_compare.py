"""A/B comparison: fair order, pairs of seeds, intervals, and a conclusion that claims no more than the numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from matrixlib import config
from matrixlib.config import ConfigError
from matrixlib.engine.metrics import MetricsLog
from matrixlib.files import write_json
from matrixlib.runs import compare
from matrixlib.runs import run as runs
from matrixlib.runs.run import RunError
from matrixlib.tasks import load_config

TINY: dict[str, Any] = {
    "data": {"limit": 1024},
    "model": {"channels": 8, "blocks": 0},
    "train": {"batch_size": 16, "statistics_interval": 1000},
    "validation": {"interval": 1000, "sample": 64, "limit": 256},
    "checkpoint": {"interval": 1000},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
}
PAIR = {"A": ("demo", TINY), "B": ("demo", TINY)}


def fake(
    root: Path,
    name: str,
    seed: int = 0,
    loss: float = 3.0,
    overrides: dict[str, Any] | None = None,
    complete: bool = True,
    catalogue: str = "games",
    last: dict[str, Any] | None = None,
) -> Path:
    """A run as it lies on disk: ten updates of 0.1 s, the first of 5 s, the last with `last` over it."""
    folder = root / name
    folder.mkdir()
    requested = load_config("demo", config.merge({"train": {"steps": 10}, **(overrides or {})}, {"seed": seed}))
    write_json(folder / "run.json", {"preset": "demo", "requested": config.dump(requested), "catalogue": catalogue})
    (folder / "config.yaml").write_text(config.to_yaml(requested))
    validation = {"kind": "full", "loss": loss, "losses": {"policy": loss - 1, "value": 1.0}}
    with MetricsLog(folder / "metrics.jsonl") as log:
        for step in range(1, 11):
            row: dict[str, Any] = {"step": step, "loss": 4.0, "grad_norm": 1.0, "clip_share": 0.25}
            row |= {"skipped": 0, "overflows": 0, "seconds": 5.0 if step == 1 else 0.1}
            log.write(row | ({"validation": validation} | (last or {}) if step == 10 else {}))
    if complete:
        evaluation = {"positions": 100, "top1": 0.2, "policy_kl": loss / 3, "baselines": {"uniform_top1": 0.1}}
        write_json(folder / "summary.json", {"complete": True, "steps": 10, "evaluation": evaluation})
    return folder


def sides(root: Path, a: list[float], b: list[float], b_overrides: dict[str, Any] | None = None) -> Any:
    """Comparison of fake runs with these final losses, seeds 0, 1 ... on both sides."""
    overrides = {"optim": {"learning_rate": 0.001}} if b_overrides is None else b_overrides
    return compare.compare(
        [fake(root, f"a{seed}", seed, loss) for seed, loss in enumerate(a)],
        [fake(root, f"b{seed}", seed, loss, overrides) for seed, loss in enumerate(b)],
    )


def test_the_interval_is_students() -> None:
    low, high = compare.t_interval([1.0, 2.0, 3.0]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert compare.t_interval([1.0]) is None
    assert compare.t_interval([0.5] * 40) == (0.5, 0.5)


def test_pairs_of_seeds_show_what_lies_below_the_spread_of_seeds(reports: Path) -> None:
    """Seeds differ by whole nats, the sides by 0.1 in every pair: the spread of the seeds must drop out."""
    comparison = sides(reports, [3.0, 4.0, 5.0], [2.91, 3.90, 4.89])
    headline = comparison.figures[0]
    assert headline.name == "validation loss"
    assert headline.difference == pytest.approx(-0.1)
    low, high = headline.interval
    assert -0.13 < low < high < -0.07
    assert "3 seeds" in comparison.conclusion
    assert "lower" in comparison.conclusion
    assert "more than chance at this length on this data" in comparison.conclusion
    row = comparison.table().loc["validation loss"]
    assert list(row.index) == ["A", "B", "B - A", "95 % interval of B - A"]
    assert row["A"] == "4.0000 ± 1.0000"


def test_one_seed_claims_nothing(reports: Path) -> None:
    comparison = sides(reports, [3.0], [2.0])
    assert comparison.figures[0].interval is None
    assert comparison.conclusion == (
        "After 10 updates B's validation loss is 1.0000 lower than A's (2.0000 against 3.0000); "
        "one seed gives no interval, so this may be chance."
    )
    assert list(comparison.table().columns) == ["A", "B", "B - A"]


def test_other_seeds_on_each_side_are_no_pairs(reports: Path) -> None:
    a = [fake(reports, "a0", 0), fake(reports, "a1", 1)]
    comparison = compare.compare(a, [fake(reports, "b2", 2, 2.0), fake(reports, "b3", 3, 2.1)])
    assert comparison.figures[0].interval is None
    assert not comparison.same_data
    assert "without pairs of seeds there is no interval" in comparison.conclusion


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ({"optim": {"learning_rate": 0.001}}, True),
        ({"model": {"blocks": 1}}, True),
        ({"data": {"workers": 1}}, True),
        ({"data": {"mirror": False}}, False),
        ({"data": {"limit": 100}}, False),
        ({"train": {"batch_size": 64, "steps": 10}}, False),
    ],
)
def test_same_data_is_claimed_only_when_it_is_true(reports: Path, overrides: dict[str, Any], same: bool) -> None:
    comparison = sides(reports, [3.0], [2.0], overrides)
    assert comparison.same_data is same
    assert ("same seed, same data order" in comparison.describe()) is same
    assert "B differs from A in:" in comparison.describe()


def test_a_rollback_changes_the_order_of_the_data(reports: Path) -> None:
    b = fake(reports, "b", last={"rollbacks": 1})
    comparison = compare.compare([fake(reports, "a")], [b])
    assert not comparison.same_data
    assert not comparison.b[0].stable


@pytest.mark.parametrize(
    "overrides", [{"loss": {"value": 2.0}}, {"model": {"value": {"kind": "scalar"}}}, {"model": {"ssl": ["piece"]}}]
)
def test_losses_of_other_weights_are_not_compared(reports: Path, overrides: dict[str, Any]) -> None:
    comparison = sides(reports, [3.0], [2.0], overrides)
    assert comparison.figures[0].name == "top1"
    assert "validation loss" not in comparison.table().index
    assert "their losses do not mean the same, so the conclusion is on the top1" in comparison.describe()


def test_equal_sides_end_the_same(reports: Path) -> None:
    comparison = sides(reports, [3.0, 3.1], [3.0, 3.1], {})
    assert comparison.conclusion == "Both sides end with the same validation loss, 3.0500."
    assert "B is configured exactly as A" in comparison.describe()


def test_a_run_that_did_not_end_gives_no_conclusion_on_the_loss(reports: Path) -> None:
    b = fake(reports, "b", complete=False, last={"skipped": 4, "loss": math.nan, "messages": ["x"]})
    comparison = compare.compare([fake(reports, "a")], [b])
    assert comparison.conclusion == "No conclusion on the loss: b did not reach the end."
    assert (comparison.a[0].stable, comparison.b[0].stable) == (True, False)
    assert comparison.b[0].events == {"skipped": 4, "overflows": 0, "rollbacks": 0, "not finite": 1}
    assert comparison.stability().loc["B seed 0", ["warnings", "complete"]].tolist() == [1, "no"]


@pytest.mark.parametrize(
    ("a", "b", "conclusion", "interval"),
    [
        ([3.0, 3.1], [2.9, 3.1], "no difference can be told from chance", "-0.6853 to +0.5853"),
        ([3.0, 3.1, math.nan], [math.nan, 2.9, 2.8], "No conclusion: the validation loss is not fin", "+nan to +nan"),
        ([3.0, 3.1, math.inf], [math.inf, 2.9, 2.8], "No conclusion: the validation loss is not fin", "+nan to +nan"),
    ],
)
def test_what_proves_nothing_is_shown_and_concludes_nothing(
    reports: Path, a: list[float], b: list[float], conclusion: str, interval: str
) -> None:
    comparison = sides(reports, a, b)
    assert conclusion in comparison.conclusion
    assert comparison.table().loc["validation loss"].iloc[-1] == interval


def test_a_side_that_did_not_end_is_still_shown(reports: Path) -> None:
    a = [fake(reports, "a0", 0), fake(reports, "a1", 1)]
    b = [fake(reports, "b0", 0), fake(reports, "b1", 1, complete=False)]
    comparison = compare.compare(a, b)
    assert comparison.conclusion == "No conclusion on the loss: b1 did not reach the end."
    assert [figure.name for figure in comparison.figures] == ["validation loss", "updates/s", "positions/s"]
    assert "nan" in comparison.table().loc["validation loss", "B"]


def test_speeds_are_those_of_the_median_update(reports: Path) -> None:
    """The first update, fifty times slower, must not count."""
    speeds = sides(reports, [3.0], [2.0]).a[0].speeds
    assert speeds == pytest.approx({"updates/s": 10.0, "positions/s": 1280.0})


def test_sides_that_would_mislead_are_refused(reports: Path) -> None:
    a, again = fake(reports, "a"), fake(reports, "again")
    other = fake(reports, "other", 1, overrides={"optim": {"beta1": 0.5}})
    elsewhere = fake(reports, "elsewhere", catalogue="other games")
    fewer = fake(reports, "fewer", overrides={"validation": {"limit": 64}})
    empty = reports / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="side B has no runs"):
        compare.compare([a], [])
    with pytest.raises(ValueError, match="two runs of one seed"):
        compare.compare([a, again], [other])
    with pytest.raises(ValueError, match=r"differ in more than the seed: optim\.beta1"):
        compare.compare([a, other], [again])
    with pytest.raises(ValueError, match="different data sets"):
        compare.compare([a], [elsewhere])
    with pytest.raises(ValueError, match=r"validation\.limit, so they were measured on other held-out rows"):
        compare.compare([a], [fewer])
    foreign = fake(reports, "foreign")
    (foreign / "config.yaml").write_text((foreign / "config.yaml").read_text().replace("chess", "my.module:TASK"))
    with pytest.raises(ValueError, match=r"'my\.module:TASK', somebody's own code: name a preset of it"):
        compare.compare([foreign], [a], ["demo"])
    with pytest.raises(ValueError, match="'empty' is no run"):
        compare.compare([a], [empty])


def test_finished_runs_are_named_for_both_sides(reports: Path) -> None:
    a, b = fake(reports, "a"), fake(reports, "b")
    fake(reports, "cut", complete=False)
    assert compare.finished("a", " b ") == ([a], [b])
    with pytest.raises(ValueError, match="both sides"):
        compare.finished("a", "")
    with pytest.raises(RunError, match="no complete run 'cut'"):
        compare.finished("a,b", "cut")


def test_the_figure_has_both_sides(reports: Path) -> None:
    figure = sides(reports, [3.0, 3.1], [2.0, 2.1]).figure()
    loss, norm, speed = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A", "B"]
    assert len(loss.collections) == len(norm.collections) == 2, "a band for each side"
    assert [bar.get_height() for bar in speed.patches] == pytest.approx([10.0, 10.0])


@pytest.mark.slow
def test_training_pairs_alternates_and_goes_on_under_its_name(reports: Path) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"seeds": 2, "seed": 3, "steps": 3, "run": "pair", "log": lines.append}
    a, b = compare.train_arms(PAIR, **options).values()
    assert [line.split(":")[0] for line in lines] == ["A seed 3", "B seed 3", "B seed 4", "A seed 4"]
    assert [folder.name for folder in (*a, *b)] == ["pair-a3", "pair-a4", "pair-b3", "pair-b4"]
    comparison = compare.compare(a, b)
    assert comparison.same_data
    assert [r.stable for r in comparison.runs] == [True] * 4
    assert comparison.figures[0].a == comparison.figures[0].b, "one configuration, one seed: the same bits on the CPU"
    assert comparison.figures[0].a[0] != comparison.figures[0].a[1], "another seed, another network"
    records = [json.loads((folder / "run.json").read_text()) for folder in (*a, *b)]
    assert {record["kind"] for record in records} == {"compare"}

    lines.clear()
    assert compare.train_arms(PAIR, **options) == {"A": a, "B": b}
    assert all(line.endswith("already complete") for line in lines)


def test_eval_does_not_pick_up_a_compared_run(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake(reports, "a")
    record = json.loads((folder / "run.json").read_text())
    write_json(folder / "run.json", record | {"kind": "compare"})

    def refuse(preset: str, overrides: object = None) -> runs.Run:
        raise RunError("would train afresh")

    monkeypatch.setattr(runs, "open_run", refuse)
    with pytest.raises(RunError, match="would train afresh"):
        runs.finished_run()


@pytest.mark.usefixtures("drawn")
@pytest.mark.slow
def test_a_side_that_blows_up_is_a_result(reports: Path) -> None:
    lines: list[str] = []
    wild = config.merge(TINY, {"optim": {"learning_rate": 1e30, "warmup_steps": 0}})
    a, b = compare.train_arms(PAIR | {"B": ("demo", wild)}, steps=60, log=lines.append).values()
    assert ", halted: " in lines[1]
    comparison = compare.compare(a, b)
    assert (comparison.a[0].complete, comparison.b[0].complete) == (True, False)
    assert comparison.conclusion.startswith("No conclusion on the loss")
    comparison.figure()


def test_a_fault_of_b_is_found_before_a_is_trained(reports: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        compare.train_arms(PAIR | {"B": ("demo", {"optim": {"learing_rate": 1.0}})})
    with pytest.raises(ValueError, match="seeds of at least 1"):
        compare.train_arms(PAIR, seeds=0)
    assert list(reports.iterdir()) == []


def test_arms_beside_their_base() -> None:
    figures = {"base": [{"kl": 1.0}, {"kl": 2.0}, {"kl": 3.0}], "other": [{"kl": 0.9}, {"kl": 1.8}, {"kl": 2.7}]}
    low, high = compare.arms_interval(figures["other"], figures["base"], "kl")
    assert (low, high) == pytest.approx((-0.2 - 0.2484, -0.2 + 0.2484), abs=1e-3), "4.303 * 0.1 / sqrt 3"
    row = compare.arms_table(figures, "base").loc["kl"]
    assert list(row.index) == ["base", "other", "other - base"]
    assert row["other"] == "1.8000 ± 0.9000"
    assert row["other - base"] == f"-0.2000 ({low:+.4f} to {high:+.4f})"
