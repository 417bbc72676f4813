"""What a run begins with: the weights of a run, a checkpoint or a file; and a complete checkpoint before any update."""

import hashlib
import json
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import CPU, random_net, save_run

import matrixlib
from matrixlib import config as configuration
from matrixlib.engine import checkpoint as checkpoints
from matrixlib.runs import run as runs
from matrixlib.runs.data import RunError
from matrixlib.tasks import get_task, load
from matrixlib.tasks.chess.matrix0 import infer_config, read_checkpoint

SMALL = {"channels": 16, "blocks": 1, "ssl": []}


def opened(init: Path | str, name: str, model: Any = (), teacher: Any = (), **train: Any) -> runs.Run:
    options = {"init": str(init), "steps": 2, "batch_size": 8} | train
    overrides = {"model": SMALL | dict(model), "runtime": CPU, "data": {"workers": 0}, "train": options}
    overrides |= {"validation": {"limit": 64, "sample": 64, "batch_size": 64}, "teacher": dict(teacher)}
    return runs.open_run("demo", run=name, overrides=overrides)


@pytest.fixture
def source(reports: Path) -> Path:
    """A run with random weights of another seed."""
    net = random_net(**SMALL)
    with torch.no_grad():
        for parameter in net.model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return save_run(reports / "source", net)


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    return checkpoints.read(checkpoint).tensors["model"]


def test_a_run_begins_with_the_weights_of_another(source: Path, reports: Path) -> None:
    for given in (source, "source"):
        run = opened(given, f"from-{Path(given).name}")
        for name, tensor in run.trainer.evaluation_model().state_dict().items():
            assert torch.equal(tensor, weights_in(source)[name]), name
        record = json.loads((run.folder / "run.json").read_text())["init"]
        sha256 = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
        assert record == {"source": str(given), "sha256": sha256, "new": [], "left_out": []}
        run.close()


def test_it_goes_on_as_any_run_does(source: Path, reports: Path) -> None:
    """Also when the source is no longer there; a broken-off run ends where one does that was not."""
    whole, broken = opened(source, "whole", steps=3), opened(source, "broken", steps=3)
    assert [stats.step for stats in islice(whole.train(), 2)] == [1, 2]
    assert [stats.step for stats in islice(broken.train(), 1)] == [1]
    broken.close()
    opened(source, "once").trainer.checkpoints.join()  # killed before its first update, it has the weights already
    (reports / "source").rename(reports / "elsewhere")
    with closing(opened(source, "once")) as once:
        given = weights_in(reports / "elsewhere" / "checkpoints" / source.name)
        assert all(torch.equal(tensor, given[name]) for name, tensor in once.model.state_dict().items())
    again = opened(source, "broken", steps=3)
    assert again.resumed
    assert [stats.step for stats in islice(again.train(), 1)] == [2]
    ours, expected = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert "far from chance" not in " ".join(again.messages)


def test_one_process_goes_on_where_another_one_stopped(source: Path, reports: Path) -> None:
    first = opened(source, "both", steps=3)
    assert [stats.step for stats in islice(first.train(), 1)] == [1]
    second = opened(source, "both", steps=3)
    assert [stats.step for stats in islice(second.train(), 1)] == [2]
    second.close()
    assert [stats.step for stats in first.train()] == [3]


def test_what_does_not_fit_is_refused_by_name_or_listed(source: Path, reports: Path) -> None:
    other = {"ssl": ["threat"], "value": {"hidden": 48}}
    with pytest.raises(RunError, match=r"value_head.fc1.weight.*ssl \(\) -> |new, so random: .*init_partial"):
        opened(source, "strict", other)
    assert not (reports / "strict").exists()
    run = opened(source, "partial", other, init_partial=True)
    record = json.loads((run.folder / "run.json").read_text())["init"]
    assert {"ssl_heads.threat.out.weight", "value_head.fc1.weight"} <= set(record["new"])
    assert "value_head.fc1.weight" in record["left_out"]
    assert not {name for name in record["new"] if name.startswith(("stem", "tower", "policy_head"))}
    assert torch.equal(run.model.state_dict()["stem.conv.weight"], weights_in(source)["stem.conv.weight"])
    run.close()


def test_a_learned_temperature_is_no_part_of_the_network(source: Path, reports: Path) -> None:
    """A run with one begins with the weights of a run without, and the other way round; what differs else is told."""
    teacher = {"network": str(source), "schedule": "learned", "temperature": 3.0}
    taught = opened(source, "taught", teacher=teacher)
    begins = float(taught.model.state_dict()["temperature.raw"])
    with torch.no_grad():
        taught.model.get_parameter("temperature.raw").fill_(-2.0)
    taught.trainer.save()
    taught.trainer.checkpoints.join()
    taught.close()
    for name, options in (("plain", {}), ("again", teacher)):
        run = opened("taught", name, teacher=options)
        state, own = run.model.state_dict(), load("taught").model.state_dict()
        assert all(torch.equal(state[key], own[key]) for key in state if key != "temperature.raw")
        assert float(state.get("temperature.raw", begins)) == begins, "as its own option says"
        assert "of the training, not of the network" in " ".join(run.messages)
        run.close()
    with pytest.raises(RunError, match=r"so it counts for nothing: 1 \(temperature.raw\)"):
        opened("taught", "other", {"value": {"hidden": 48}})


def test_other_weights_under_the_same_name_are_noticed(source: Path, reports: Path) -> None:
    opened(source, "twice").close()  # nothing trained, nothing saved
    net = random_net(**SMALL)
    (reports / "source" / "checkpoints").rename(reports / "old")
    (reports / "source").rename(reports / "older")
    save_run(reports / "source", net)
    with pytest.raises(RunError, match="holds other weights than when run 'twice' began"):
        opened(source, "twice")


def test_sources_that_are_of_no_use(source: Path, reports: Path, tmp_path: Path) -> None:
    text, latin = tmp_path / "notes.txt", reports / "latin"
    text.write_text("x")
    latin.mkdir()
    (latin / "config.yaml").write_text(configuration.to_yaml(get_task("latin").config(task="latin")))
    refusals = {
        "nowhere": "no run at 'nowhere'",
        text: "no network that can be read",
        latin: "is of the task latin, not",
    }
    for given, refusal in refusals.items():
        with pytest.raises(ValueError, match=refusal):
            opened(given, "a")
        assert not (reports / "a").exists()


@pytest.mark.filterwarnings("ignore:small_ckpt.pt")
def test_training_goes_on_from_a_checkpoint_of_matrix0(shared: Path, reports: Path) -> None:
    """Its first held-out figures are those of the loaded network."""
    checkpoint = shared / "parity" / "small_ckpt.pt"
    model = configuration.dump(infer_config(read_checkpoint(checkpoint))[0])
    run = opened(checkpoint, "tuned", model, steps=1)
    net = get_task("chess").network(run.trainer.evaluation_model(), run.config, run.runtime)
    loaded = matrixlib.load(checkpoint)
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(net.model.state_dict()[name], tensor), name
    same = type(loaded)(loaded.model, loaded.task, run.runtime)
    figures, expected = (run.spec.evaluate(one, run.data.validation, run.catalogue) for one in (net, same))
    assert figures.pop("reliability").keys() == expected.pop("reliability").keys() == {"score"}
    assert figures.pop("baselines") == expected.pop("baselines")
    assert figures == pytest.approx(expected, abs=1e-4)
    assert next(run.train()).step == 1


def test_a_base_checkpoint_is_whole_and_can_be_begun_with(reports: Path) -> None:
    with closing(runs.open_run("demo", "cpu", run="base", kind="base")) as base:
        folder = base.trainer.save()
        base.trainer.checkpoints.join()
    net = matrixlib.load(folder)
    fresh = net.task.build_model().state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in net.model.state_dict().items())
    run = runs.open_run("demo", run="next", init="base", seed=5)
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in run.model.state_dict().items())
    run.close()
