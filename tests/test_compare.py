"""A/B comparison: fair order, pairs of seeds, intervals, and a conclusion that claims no more than the numbers."""

import json
import math
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
from cells import Shown, definitions, run_notebook

from matrixlib import config
from matrixlib.engine.folder import newest_complete
from matrixlib.engine.metrics import MetricsLog
from matrixlib.files import read_json, write_json
from matrixlib.runs import compare
from matrixlib.runs import run as runs
from matrixlib.tasks import load_config

TINY: dict[str, Any] = {
    "model": {"channels": 8, "blocks": 0},
    "train": {"batch_size": 16},
    "validation": {"limit": 256},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
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
    with closing(MetricsLog(folder / "metrics.jsonl")) as log:
        for step in range(1, 11):
            row: dict[str, Any] = {"step": step, "loss": 4.0, "grad_norm": 1.0, "clip_share": 0.25}
            row |= {"skipped": 0, "overflows": 0, "seconds": 5.0 if step == 1 else 0.1}
            log.write(row | ({"validation": validation} | (last or {}) if step == 10 else {}))
    if complete:
        evaluation = {"positions": 100, "top1": 0.2, "policy_kl": loss / 3, "baselines": {"uniform_top1": 0.1}}
        write_json(folder / "summary.json", {"complete": True, "steps": 10, "evaluation": evaluation})
    return folder


def compared(root: Path, a: list[float], b: list[float], overrides: dict[str, Any] | None = None) -> Shown:
    """The notebook on fake runs with these final losses, seeds 0, 1 ... on both sides; overrides: of side B."""
    overrides = {"optim": {"learning_rate": 0.001}} if overrides is None else overrides
    for seed, loss in enumerate(a):
        fake(root, f"a{seed}", seed, loss)
    for seed, loss in enumerate(b):
        fake(root, f"b{seed}", seed, loss, overrides)
    return of_runs(",".join(f"a{seed}" for seed in range(len(a))), ", ".join(f"b{seed}" for seed in range(len(b))))


def of_runs(a: str, b: str) -> Shown:
    return run_notebook("compare", run_a=a, run_b=b)


def test_two_configurations_over_three_seeds_are_a_frame_of_numbers() -> None:
    index = pandas.MultiIndex.from_product([["base", "other"], [0, 1, 2]])
    values = pandas.DataFrame({"kl": [1.0, 2.0, 3.0, 0.9, 1.8, 2.7]}, index=index)
    row = compare.differences(values, "base").loc["kl"]
    assert row["other"].tolist() == pytest.approx([1.8, 0.9])
    ends = -0.2 - 4.303 * 0.1 / math.sqrt(3), -0.2 + 4.303 * 0.1 / math.sqrt(3)
    assert row["other - base"].tolist() == pytest.approx([-0.2, *ends], abs=1e-3)


def test_pairs_of_seeds_show_what_lies_below_the_spread_of_seeds(reports: Path) -> None:
    """Seeds differ by whole nats, the sides by 0.1 in every pair: the spread of the seeds must drop out."""
    shown = compared(reports, [3.0, 4.0, 5.0], [2.91, 3.90, 4.89])
    row = shown.values["differences"].loc["validation loss"]
    assert row["A"].tolist() == [4.0, 1.0]
    assert row["B - A", "difference"] == pytest.approx(-0.1)
    assert -0.13 < row["B - A", "from"] < row["B - A", "to"] < -0.07
    assert "over 3 seeds" in shown.text
    assert "0.1000 lower than A's" in shown.text
    assert "more than chance at this length on this data" in shown.text
    assert shown.pictures == 1
    assert shown.values["results"].loc[("B", 2), "validation loss"] == 4.89
    speeds = shown.values["results"].loc[("B", 2), ["updates/s", "positions/s"]].tolist()
    assert speeds == pytest.approx([10.0, 1280.0]), "of the median update: the first took fifty times as long"


def test_other_seeds_on_each_side_are_no_pairs(reports: Path) -> None:
    for name, seed in (("a0", 0), ("a1", 1), ("b2", 2), ("b3", 3)):
        fake(reports, name, seed, 3.0 - seed)
    shown = of_runs("a0,a1", "b2,b3")
    assert "the sides did not see the same positions" in shown.text
    assert "without pairs of seeds there is no interval" in shown.text
    assert "same seeds on both sides" in shown.failed


def test_same_data_is_claimed_only_when_it_is_true() -> None:
    cells = definitions("compare")
    one = SimpleNamespace(seed=0, rows=[{}])
    same = {"optim.learning_rate": True, "data.workers": True}
    same |= dict.fromkeys(("data.mirror", "data.limit", "train.batch_size"), False)
    for key, wanted in same.items():
        assert cells["same_data"]([one], [one], {key: (0, 1)}) is wanted
    assert not cells["same_data"]([one], [SimpleNamespace(seed=0, rows=[{"rollbacks": 1}])], {}), "another order"


def test_a_run_that_did_not_end_gives_no_conclusion_on_the_loss(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(reports, "a")
    last = {"skipped": 4, "loss": math.nan, "messages": ["x"], "rollbacks": 1}
    fake(reports, "b", complete=False, last=last)
    monkeypatch.setattr(runs, "finished_run", lambda name: reports / name)  # as of runs that are trained here
    shown = of_runs("a", "b")
    assert "No conclusion on the loss: b did not reach the end." in shown.text
    row = shown.values["stability"].loc[("B", 0)]
    assert row[["skipped", "rollbacks", "not finite", "warnings"]].tolist() == [4, 1, 1, 1]
    assert (bool(row["stable"]), bool(row["complete"])) == (False, False)
    assert "every run reached its end" in shown.failed
    assert math.isnan(shown.values["results"].loc[("B", 0), "validation loss"])
    assert "the sides did not see the same positions" in shown.text, "a rollback changes the order of the data"


@pytest.mark.parametrize(
    ("a", "b", "overrides", "conclusion"),
    [
        (
            [3.0],
            [2.0],
            {"optim": {"beta1": 0.8}},
            "(2.0000 against 3.0000); one seed gives no interval, so this may be",
        ),
        ([3.0, 3.1], [3.0, 3.1], {}, "Both sides end with the same validation loss, 3.0500."),
        ([3.0, 3.1], [2.9, 3.1], {"optim": {"beta1": 0.8}}, "-0.6853 to +0.5853, which includes 0: no difference can"),
        ([3.0, 3.1, math.nan], [math.inf, 2.9, 2.8], {}, "No conclusion: the validation loss is not finite"),
        ([3.0], [2.0], {"loss": {"value": 2.0}}, "Both sides end with the same top1"),
        ([3.0], [2.0], {"model": {"ssl": ["piece"]}}, "Both sides end with the same top1"),
    ],
)
def test_a_conclusion_claims_no_more_than_it_may(
    reports: Path, a: list[float], b: list[float], overrides: dict[str, Any], conclusion: str
) -> None:
    """On a held-out figure where the losses do not mean the same."""
    shown = compared(reports, a, b, overrides)
    assert conclusion in shown.text
    assert not shown.failed
    assert ("validation loss" in shown.values["differences"].index) is not ("top1" in conclusion)
    assert ("B is configured exactly as A" in shown.text) is (not overrides)


def test_a_loss_of_somebodys_own_is_a_difference(reports: Path) -> None:
    fake(reports, "a")
    record = read_json(fake(reports, "b", loss=2.0) / "run.json")
    write_json(reports / "b" / "run.json", record | {"parts": {"losses.value": {"source": "def loss(): ..."}}})
    shown = of_runs("a", "b")
    assert re.search(r"^  own losses\.value: None -> source [0-9a-f]{8}$", shown.text, re.MULTILINE)
    assert "their losses do not mean the same" in shown.text
    assert "exactly as A" not in shown.text


def test_sides_that_would_mislead_are_refused(reports: Path) -> None:
    fake(reports, "a")
    fake(reports, "again")
    fake(reports, "other", 1, overrides={"optim": {"beta1": 0.5}})
    fake(reports, "elsewhere", catalogue="other games")
    fake(reports, "fewer", overrides={"validation": {"limit": 64}})
    foreign = fake(reports, "foreign")
    (foreign / "config.yaml").write_text((foreign / "config.yaml").read_text().replace("chess", "my.module:TASK"))
    fake(reports, "cut", complete=False)
    for a, b, reason in (
        ("a", "", "both sides"),
        ("a", "cut", "no complete run 'cut'"),
        ("a,again", "other", "two runs of one seed"),
        ("a,other", "again", r"differ in more than the seed: optim\.beta1"),
        ("a", "elsewhere", "different data sets"),
        ("a", "fewer", r"validation\.limit, so they were measured on other held-out rows"),
        ("foreign", "a", r"'my\.module:TASK', somebody's own code: name a preset of it"),
    ):
        with pytest.raises(ValueError, match=reason):
            of_runs(a, b)
    (reports / "empty").mkdir()
    with pytest.raises(ValueError, match="'empty' is not a run"):
        compare.read_result(reports / "empty")


@pytest.mark.slow
def test_training_pairs_alternates_and_goes_on_under_its_name(reports: Path) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"seeds": 2, "seed": 3, "steps": 3, "run": "pair", "log": lines.append}
    folders = compare.train_arms(PAIR, **options)
    assert [line.split(":")[0] for line in lines] == ["A seed 3", "B seed 3", "B seed 4", "A seed 4"]
    names = [folder.name for side in folders.values() for folder in side]
    assert names == ["pair-a3", "pair-a4", "pair-b3", "pair-b4"]
    results = compare.results(folders)
    losses = results["validation loss"]
    assert losses["A"].tolist() == losses["B"].tolist(), "one configuration, one seed: the same bits on the CPU"
    assert losses["A", 3] != losses["A", 4], "another seed, another network"
    records = [json.loads((folder / "run.json").read_text()) for side in folders.values() for folder in side]
    assert {record["kind"] for record in records} == {"compare"}
    assert newest_complete("chess") is None, "evaluation picks up none of them"

    lines.clear()
    assert compare.train_arms(PAIR, **options) == folders
    assert all(line.endswith("already complete") for line in lines)


@pytest.mark.usefixtures("drawn")
@pytest.mark.slow
def test_a_side_that_blows_up_is_a_result(reports: Path) -> None:
    wild = config.merge(TINY, {"optim": {"learning_rate": 1e30, "warmup_steps": 0}})
    shown = run_notebook("compare", overrides_a=TINY, overrides_b=wild, steps=60)
    assert ", halted: " in shown.text
    assert shown.values["stability"]["complete"].tolist() == [True, False]
    assert "No conclusion on the loss" in shown.text
    assert shown.pictures == 1
