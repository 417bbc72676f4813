"""The network that comes with the package: found where no run is, refused where it is damaged, never overwritten."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from shipping import ship_network

from matrixlib import files
from matrixlib.runs import browse
from matrixlib.runs import run as runs
from matrixlib.runs.cycle import open_cycle
from matrixlib.tasks import load

TINY = {
    "data": {"limit": 512, "workers": 0},
    "model": {"channels": 16, "blocks": 1},
    "train": {"steps": 4, "batch_size": 32},
    "validation": {"limit": 256},
}


def weights(net: object) -> dict[str, torch.Tensor]:
    return net.model.state_dict()  # type: ignore[attr-defined, no-any-return]


def test_it_is_small_and_its_card_has_its_figures() -> None:
    assert sum(file.stat().st_size for file in files.SHIPPED.rglob("*") if file.is_file()) < 3_000_000
    card = (files.SHIPPED / "README.md").read_text()
    summary = json.loads((files.SHIPPED / "summary.json").read_text())
    found = summary["evaluation"]
    assert f"{summary['parameters']:,} weights" in card
    assert f"top-1 | {found['top1']:.1%}".replace("%", " %") in card
    assert f"value correlation | {found['value_correlation']:.3f}" in card


def test_it_plays_where_there_is_no_run_and_steps_back_for_one(reports: Path) -> None:
    assert runs.finished_run() == runs.finished_run("shipped") == files.SHIPPED
    net = load("shipped", device="cpu")
    assert net.evaluate("startpos moves f2f3 e7e5 g2g4")[0].best == "d8h4"  # type: ignore[attr-defined]
    assert browse.known_runs() == ["shipped"]
    run = runs.open_run("demo", run="own", overrides=TINY)
    for _ in run.train():
        pass
    assert runs.finished_run().name == "own"
    shutil.copytree(run.folder, reports / "shipped")  # of a time before the name was taken
    assert load("shipped", device="cpu").sha256 == load("own", device="cpu").sha256


def test_training_and_cycles_begin_with_it(reports: Path) -> None:
    expected = weights(load("shipped", device="cpu"))
    network = yaml.safe_load(re.findall('overrides: (.*)"', (files.SHIPPED / "README.md").read_text())[0])
    overrides = network | {name: TINY[name] for name in ("data", "train")}
    run = runs.open_run("quick", run="more", init="shipped", overrides=overrides)
    assert all(torch.equal(value, expected[name]) for name, value in run.model.state_dict().items())
    run.close()
    cycle = open_cycle("demo", "cpu", "c", {"start": "shipped"})
    assert all(torch.equal(value, expected[name]) for name, value in weights(cycle.network(0)).items())
    for opened in (lambda: runs.open_run("demo", run="shipped"), lambda: open_cycle("demo", "cpu", "shipped")):
        with pytest.raises(ValueError, match="'shipped' is that of the network that comes with the package"):
            opened()


def test_a_run_that_is_shipped_says_the_same_and_damage_is_named(
    reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.open_run("demo", run="own", overrides=TINY)
    for _ in run.train():
        pass
    folder = tmp_path / "shipped"
    monkeypatch.setattr("matrixlib.files.SHIPPED", folder)
    monkeypatch.setattr("matrixlib.tasks.spec.SHIPPED", folder)
    ship_network("own", folder)
    one, other = (weights(load(name, device="cpu")) for name in ("own", "shipped"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    (file,) = folder.glob("checkpoints/*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"the network of the package is damaged .*: install the package again"):
        load("shipped", device="cpu")
    with pytest.raises(ValueError, match="no checkpoint 'step_7'"):
        load("shipped", "step_7", "cpu")
