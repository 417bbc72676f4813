"""Learning from a teacher: its losses and their traps, the frozen network beside a training, the temperature."""

import itertools
import math
import pickle
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lc0_files
import numpy as np
import pytest
import torch
from cells import definitions
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CPU, material_net, random_net, save_run
from test_chess_task import positions, stored
from test_task_contract import check_task
from torch import Tensor

from matrixlib.config import ConfigError
from matrixlib.data.shards import file_hash
from matrixlib.engine import checkpoint, validation
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.stats import Action
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, slice_batch
from matrixlib.files import read_json, write_json
from matrixlib.play.match import Player
from matrixlib.runs.data import RunError
from matrixlib.runs.run import Run, held_out_data, held_out_figures, open_run
from matrixlib.tasks import load, load_config
from matrixlib.tasks.chess.config import ChessConfig, TeacherConfig
from matrixlib.tasks.chess.distill import losses
from matrixlib.tasks.chess.distill.losses import LearnedTemperature, reversal_factor, scheduled_temperature
from matrixlib.tasks.chess.distill.teacher import ChessTeacher
from matrixlib.tasks.chess.evaluate import strength
from matrixlib.tasks.chess.evaluate.held_out import agreement, correlations, held_out
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.task import ChessTask

STUDENT: dict[str, Any] = {
    "model": {"channels": 8, "blocks": 1, "policy": {"channels": 8}, "value": {"channels": 8, "hidden": 16}},
    "data": {"limit": 256},
    "train": {"batch_size": 32, "statistics_interval": 4},
    "validation": {"interval": 4, "limit": 64, "sample": 32},
    "runtime": CPU,
}


def policies(seed: int, rows: int = 6, places: int = 12) -> dict[str, Tensor]:
    """Random students and teachers of rows with 0 to `places` legal moves; some rows are not to be counted."""
    rng = np.random.default_rng(seed)
    index = np.full((rows, places), -1, np.int16)
    for row in range(rows):
        n = rng.integers(0, places + 1)
        index[row, :n] = np.sort(rng.choice(4672, n, replace=False))
    teacher = torch.from_numpy(rng.normal(0, 4, (rows, places)).astype(np.float32))
    return {
        "logits": torch.from_numpy(rng.normal(0, 3, (rows, 4672)).astype(np.float32)),
        "index": torch.from_numpy(index),
        "teacher": torch.where(torch.from_numpy(index) >= 0, teacher, -1e9).log_softmax(1),
        "rows": torch.from_numpy(rng.random(rows) < 0.8),
        "temperature": torch.full((rows,), float(rng.uniform(1, 5))),
    }


def slow(case: dict[str, Tensor]) -> float:
    """The loss, move by move in float64."""
    loss = 0.0
    for row in case["rows"].nonzero()[:, 0].tolist():
        places = (case["index"][row] >= 0).nonzero()[:, 0]
        heat = float(case["temperature"][row])
        theirs = (case["teacher"][row, places].double() / heat).softmax(0)
        own = (case["logits"][row, case["index"][row, places].long()].double() / heat).softmax(0)
        loss += heat**2 * float((theirs * (theirs.log() - own.log())).sum())
    return loss


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 6))
def test_the_soft_loss_equals_a_slow_reference_and_adds_up(seed: int, cut: int) -> None:
    case = policies(seed)
    loss, metrics = losses.policy_loss(**case)
    assert float(loss) == pytest.approx(slow(case), rel=1e-4, abs=1e-4)
    parts = [losses.policy_loss(**{k: v[s] for k, v in case.items()}) for s in (slice(0, cut), slice(cut, 6))]
    assert float(sum(part for part, _ in parts)) == pytest.approx(float(loss), rel=1e-4, abs=1e-4)
    for name, value in metrics.items():
        assert float(sum(m[name] for _, m in parts)) == pytest.approx(float(value), rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("pad", [-math.inf, math.nan])
def test_nothing_comes_of_pads_and_illegal_moves(pad: float) -> None:
    """Neither in the loss nor in a gradient, that of a learned temperature included, whatever stands there; kl_div of
    masked logits with infinities is NaN, with log_target and without.
    """
    case = policies(3)
    case["index"][0] = -1  # a row without a move
    case["rows"][:] = True
    legal = torch.zeros(6, 4672, dtype=torch.bool)
    for row in range(6):
        legal[row, case["index"][row][case["index"][row] >= 0].long()] = True
    results = []
    for illegal, teacher in ((0.0, case["teacher"].clamp(min=-30)), (-math.inf, pad)):
        logits = torch.where(legal, case["logits"], illegal).requires_grad_()
        heat = case["temperature"].clone().requires_grad_()
        theirs = torch.where(case["index"] >= 0, case["teacher"], teacher)
        loss, metrics = losses.policy_loss(logits, case["index"], theirs, case["rows"], heat)
        loss.backward()
        assert logits.grad is not None
        assert heat.grad is not None
        assert (logits.grad[~legal] == 0).all()
        results.append([loss.detach(), logits.grad, heat.grad, metrics["kl"], metrics["top1"]])
    assert all(value.isfinite().all() for value in results[0])
    assert all(map(torch.equal, *results))


# The teacher beside a training


def sharpened(net: Net) -> Net:
    """A random network with opinions, which a fresh student does not have."""
    with torch.no_grad():
        for name in ("policy_head.planes", "value_head.fc3"):
            for parameter in net.model.get_submodule(name).parameters():
                parameter.mul_(30)
    return net


@pytest.fixture
def teacher(reports: Path) -> str:
    """The name of a run with a network to learn from."""
    save_run(reports / "somebody", sharpened(random_net()))
    return "somebody"


def student(teacher: str, name: str = "student", steps: int = 8, **options: Any) -> Run:
    changes = {**STUDENT, "teacher": {"network": teacher, **options}}
    return open_run("demo", run=name, steps=steps, overrides=changes)


def trained(run: Run, updates: int) -> list[dict[str, Any]]:
    """The rows of the first updates of a run, which is then saved and left."""
    with closing(run.train()) as stats:
        return [one.row() for one in itertools.islice(stats, updates)]


def batch_of(task: ChessTask) -> Batch:
    rows = stored(positions(48))
    rows["policy_weight"][:] = 1
    return {k: torch.from_numpy(v) for k, v in task.prepare_plain(rows, np.random.default_rng(0)).items()}


def test_only_the_student_is_trained_and_written(teacher: str, reports: Path) -> None:
    with closing(student(teacher)) as run:
        network = run.data.teacher
        assert isinstance(network, ChessTeacher)
        assert not network.net.training
        before = {name: value.clone() for name, value in network.net.model.state_dict().items()}
        rows = trained(run, 4)
        assert not any(p.requires_grad or p.grad is not None for p in network.net.model.parameters())
        after = network.net.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert len(pickle.dumps(run.task)) < 10_000, "loader workers get a copy of the task"
    first = rows[0]["initial"]["teacher_policy"]
    assert first["loss"] == pytest.approx(first["chance"], rel=0.15)
    assert first["chance"] < 0.7 * 4 * math.log(30), "T^2 (ln n - H), and not T^2 ln n"
    assert not [m for row in rows for m in row.get("messages", ()) if "chance" in m]
    stored = Checkpoints(reports / "student" / "checkpoints", 2).pick("newest")
    assert set(stored.tensors["model"]) == set(run.task.build_model().state_dict())
    assert stored.state["teacher"] == network.record
    assert rows[-1]["validation"]["losses"]["teacher_policy"] < rows[0]["initial"]["teacher_policy"]["loss"]


def test_a_run_goes_on_with_its_own_teacher_alone(teacher: str, reports: Path) -> None:
    """And with that as it was: in the layout and precision in which it began."""
    with closing(student(teacher)) as run:
        trained(run, 2)
        last = run.data.teacher.net.runtime.channels_last  # type: ignore[union-attr]
    shutil.copytree(reports / "somebody", reports / "moved")
    record = read_json(reports / "student" / "run.json")
    record["teacher"]["runtime"]["channels_last"] = not last  # as on another machine, which measured otherwise
    write_json(reports / "student" / "run.json", record)
    with closing(student("moved")) as again:
        assert again.trainer.resume() == 2
        assert again.data.teacher.net.runtime.channels_last is not last  # type: ignore[union-attr]
        assert [row["step"] for row in trained(again, 9)] == [3, 4, 5, 6, 7, 8]
    shutil.rmtree(reports / "somebody")
    save_run(reports / "somebody", random_net(channels=8))
    shutil.copytree(reports / "student", reports / "unfinished")
    (reports / "unfinished" / "summary.json").unlink()
    with pytest.raises(RunError, match="teacher 'somebody' holds other weights than when run 'unfinished' began"):
        student(teacher, "unfinished")
    before = read_json(reports / "student" / "summary.json")
    with pytest.raises(RunError, match="teacher 'somebody' holds other weights than when run 'student' began"):
        student(teacher, steps=16)
    assert read_json(reports / "student" / "summary.json") == before, "it has ended well"
    # Whatever has become of it, what it has taught can be looked at.
    with pytest.warns(UserWarning, match="'somebody' holds other weights than when it taught this network"):
        assert "teacher_kl" not in held_out_figures(load("student", device="cpu"), 32)


def test_weights_and_their_hash_are_of_one_checkpoint(
    teacher: str, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a teacher that is training still, too; the checkpoint is read once."""
    store, read, reads = Checkpoints(reports / teacher / "checkpoints", 2), checkpoint.read, []

    def moving(path: Path, *args: Any) -> checkpoint.Checkpoint:
        reads.append(file_hash(path / "model.safetensors"))
        stored = read(path, *args)
        store.save(8, {"model": random_net().model.state_dict()}, {}, wait=True)
        return stored

    monkeypatch.setattr(checkpoint, "read", moving)
    with closing(student(teacher)) as run:
        assert [run.data.teacher.record["sha256"]] == reads  # type: ignore[union-attr]


def test_a_teacher_that_cannot_teach_is_refused(teacher: str, reports: Path) -> None:
    with pytest.raises(ValueError, match="no run at 'nobody'"):
        student("nobody")
    save_run(reports / "scalar", random_net(value={"kind": "scalar"}))
    with pytest.raises(ValueError, match=r"teacher 'scalar' has no win-draw-loss to learn from: set teacher\.wdl"):
        student("scalar")
    with pytest.raises(ConfigError, match=r"set teacher\.wdl to 0"):
        load_config("demo", {"teacher": {"network": "x"}, "model": {"value": {"kind": "scalar"}}})


class Taught(ChessTask):
    """Its batches bring the teacher's outputs along."""

    network: ChessTeacher

    def _packed(self, batch: dict[str, np.ndarray], hidden: np.ndarray, past: Any) -> dict[str, np.ndarray]:
        arrays = super()._packed(batch, hidden, past)
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        rows = [self.network(slice_batch(batch, k, k + 1), 0.7) for k in range(len(arrays["pieces"]))]
        return {name: torch.cat([row[name] for row in rows]).numpy() for name in rows[0]}  # alike in any batch


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_the_terms_of_a_teacher_hold_the_contract(teacher: str, encoding: str) -> None:
    model = {**STUDENT["model"], "encoding": encoding, "ssl": ["piece"]}
    taught = {"network": teacher, "schedule": "learned", "temperature": 3.0}
    config = load_config("demo", {**STUDENT, "model": model, "teacher": taught})
    assert isinstance(config, ChessConfig)
    Taught.network = ChessTeacher(random_net(), config.teacher, "")
    rows = stored(positions(40))
    rows["records"]["wdl"] = 40000, 20000, 5535
    check_task(Taught(config), rows)


# The temperature


def learner(factor_at: float, decay: float = 0.0, seed: int = 0) -> tuple[Step, Batch]:
    """A step whose batches say that so much of the training is done."""
    changes = {**STUDENT, "teacher": {"network": "x", "schedule": "learned", "temperature": 2.0}}
    config = load_config("demo", {**changes, "seed": seed, "optim": {"weight_decay": decay, "warmup_steps": 0}})
    assert isinstance(config, ChessConfig)
    net, task = sharpened(random_net()), ChessTask(config)
    network = Fixed(net, config.teacher, "", (), factor_at)
    step = Step(task, task.build_model(), net.runtime, config, 100, network)
    return step, batch_of(task)


@dataclass(frozen=True)
class Fixed(ChessTeacher):
    """A teacher to which so much of a training is always done."""

    at: float = 0.0

    def __call__(self, batch: Batch, progress: float | None = None) -> Batch:
        return super().__call__(batch, self.at)


def raw(step: Step) -> float:
    temperature = step.model.get_submodule("temperature")
    assert isinstance(temperature, LearnedTemperature)
    return float(temperature.raw.detach())


def test_a_temperature_rests_until_its_factor_rises_and_moves_as_far_as_that_says() -> None:
    """Where weight decay reached it, T would leave 2 without a gradient: 2.00138 after 600 updates, as others saw. Adam
    would divide the factor away: a hundredth of the gradient moved a parameter as far as all of it.
    """
    assert [reversal_factor(p) for p in (0.0, 0.2, 0.6, 1.0)] == [0.0, 0.0, pytest.approx(0.5), 1.0]
    step, batch = learner(0.1, decay=0.5)
    before = raw(step)
    for _ in range(5):
        step(batch)
    assert raw(step) == before
    moves = {}
    for place in (0.4, 1.0):
        step, batch = learner(place)
        step(batch)
        moves[place] = raw(step) - before
    assert moves[1.0] != 0
    assert moves[0.4] == pytest.approx(reversal_factor(0.4) * moves[1.0], rel=1e-3)


def test_a_gradient_of_the_temperature_that_is_no_number_moves_nothing() -> None:
    step, batch = learner(1.0)
    temperature = step.model.get_submodule("temperature").get_parameter("raw")
    handle = temperature.register_hook(lambda gradient: gradient * math.nan)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    stats = step(batch)
    assert (stats.finite, stats.action) == (False, Action.SKIP)
    assert math.isfinite(stats.grad_norm), "that of the others"
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    handle.remove()
    temperature.register_hook(lambda gradient: gradient * 0 + 1e9)
    assert step(batch).finite
    moved = abs(raw(step) - float(before["temperature.raw"]))
    assert moved == pytest.approx(step.config.optim.clip_norm * 0.1, rel=1e-3), "clipped, times its rate"


def test_a_temperature_climbs_the_loss_that_the_student_descends() -> None:
    step, batch = learner(1.0)
    taught, active, before = step.taught(batch), frozenset({"teacher_policy"}), raw(step)
    step(batch)
    fresh = step.task.build_model()
    with torch.no_grad():
        low = step.task.losses(fresh, taught, active)[0]["teacher_policy"]
        fresh.temperature.raw.fill_(raw(step))
        assert raw(step) != before
        assert step.task.losses(fresh, taught, active)[0]["teacher_policy"] > low


def test_a_learned_temperature_is_logged_and_stays_off_the_rails(teacher: str) -> None:
    with closing(student(teacher, schedule="learned", temperature_rate=1.0)) as run:
        rows = trained(run, 7)
    heat = [row["metrics"]["teacher_policy/temperature"] for row in rows]
    assert heat[:2] == [pytest.approx(2.0)] * 2
    assert heat[-1] != pytest.approx(2.0, abs=1e-6)
    assert all(1.02 < t < 4.9 for t in heat)
    logit = math.log((heat[-1] - 1) / (5 - heat[-1]))
    assert rows[-1]["metrics"]["teacher_policy/raw"] == pytest.approx(logit, abs=1e-4)
    held_out = rows[3]["validation"]["metrics"]
    assert held_out["teacher_policy/temperature"] == 1.0, "held-out rows are always scored alike"


def test_a_scheduled_temperature() -> None:
    linear = TeacherConfig(schedule="linear", temperature=4.0, final_temperature=1.0)
    assert [scheduled_temperature(linear, p) for p in (0.0, 0.5, 1.0)] == [4.0, 2.5, 1.0]
    assert scheduled_temperature(TeacherConfig(temperature=3.0), 0.7) == 3.0
    with pytest.raises(ConfigError, match="starts between 1 and 5, not at 7"):
        load_config("demo", {"teacher": {"schedule": "learned", "temperature": 7.0}})


@pytest.mark.parametrize("changes", [{"best_move": True}, {"policy_temperature": 0.5}])
def test_another_target_of_the_policy_changes_what_is_learned_and_no_metric(changes: dict[str, Any]) -> None:
    plain, other = (ChessTask(load_config("demo", {"loss": own})) for own in ({}, changes))  # type: ignore[arg-type]
    batch = batch_of(plain)
    batch["policy_weight"][:, 0] *= 3
    (soft, metrics), (sharper, same) = (
        task.losses(plain.build_model(), batch, frozenset({"policy"})) for task in (plain, other)
    )
    assert metrics == same
    assert sharper["policy"] != soft["policy"]
    floors = [task.bounds(batch)["policy"][1] for task in (plain, other)]
    assert floors[1] == pytest.approx(0.0, abs=1e-6) if "best_move" in changes else 0 < floors[1] < floors[0]


# Features


def gram_alignment(x: np.ndarray, y: np.ndarray) -> float:
    """CKA of samples (N, C) and (N, D) by its definition: HSIC of the two Gram matrices over the root of their own."""
    centre = np.eye(len(x)) - 1 / len(x)
    k, m = (centre @ f @ f.T @ centre for f in (x, y))
    return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


def test_alignment_equals_its_definition_and_knows_no_turning() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(3, 2, (6, 4, 5)), rng.normal(-1, 1e4, (6, 7, 5))  # rows, channels, squares
    rows = np.array([1, 1, 0, 1, 1, 1], bool)
    x[2] = np.nan  # a row that does not count
    samples = [f[rows].transpose(0, 2, 1).reshape(25, -1) for f in (x, y)]
    ours = losses.linear_cka(*(torch.from_numpy(a) for a in (x, y, rows)))
    assert float(ours) == pytest.approx(gram_alignment(*samples), rel=1e-6)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    turned = 1e-3 * np.einsum("bcs,cd->bds", x, turn) + 5
    assert float(losses.linear_cka(*(torch.from_numpy(a) for a in (x, turned, rows)))) == pytest.approx(1)
    own, theirs = [torch.from_numpy(x), torch.from_numpy(x)], [torch.from_numpy(turned), torch.from_numpy(y)]
    loss = losses.feature_loss(own, theirs, torch.from_numpy(rows))
    assert float(loss) == pytest.approx(5 * (1 - gram_alignment(*samples)) / 2), "of five rows, the mean of two pairs"
    nothing = torch.zeros(6, 4, 5, requires_grad=True)
    losses.linear_cka(nothing, torch.from_numpy(y).float(), torch.from_numpy(rows)).backward()
    assert nothing.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_alignment_of_large_features_in_half_precision_is_finite(dtype: torch.dtype) -> None:
    """Sums and products of such features are far beyond 65,504, the largest number of fp16."""
    x, y = (30 + 2000 * torch.randn(losses.CKA_ROWS, 4, 64) for _ in range(2))
    rows = torch.ones(losses.CKA_ROWS, dtype=torch.bool)
    half = x.to(dtype).requires_grad_()
    found = losses.linear_cka(half, y.to(dtype), rows)
    assert float(found) == pytest.approx(float(losses.linear_cka(x.double(), y.double(), rows)), rel=0.02, abs=1e-4)
    found.backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


def test_the_gradient_of_the_alignment_does_not_depend_on_the_micro_batch() -> None:
    x, y = (torch.randn(2 * losses.CKA_ROWS, 3, 1) for _ in range(2))
    rows, gradients = torch.rand(len(x)) < 0.9, []
    for size in (len(x), losses.CKA_ROWS):
        own = x.clone().requires_grad_()
        for part in (slice(start, start + size) for start in range(0, len(x), size)):
            losses.feature_loss([own[part]], [y[part]], rows[part]).backward()
        gradients.append(own.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("squares", [False, True])
def test_features_are_those_of_the_board_in_any_encoding(squares: bool, tmp_path: Path) -> None:
    """What a block adds at a square stands at the same place whoever is to move, of both kinds of networks."""
    nets = {name: random_net(encoding=name, blocks=2) for name in ("oriented", "matrix0")}
    batch = batch_of(nets["oriented"].task)
    for name, net in nets.items():
        stream = [torch.zeros(48, 3, 8, 8) for _ in range(3)]
        board = torch.zeros(48, 3, 8, 8)
        for row, black in enumerate(batch["state"][:, 4]):  # a mark on e2 of the side to move
            board[row, 1, 1, 4] = 1
            stream[2][row, 1, 1 if name == "oriented" or black else 6, 4] = 1
        (added,) = net.task.residuals(stream, batch, [1], squares)
        assert torch.equal(added, board.flatten(2) if squares else board.mean((2, 3))[:, :, None])
    nets["lc0"] = load(lc0_files.save(tmp_path / "made.pb.gz", lc0_files.network()), device="cpu")  # type: ignore[assignment]
    for name, channels in (("oriented", 16), ("matrix0", 16), ("lc0", 4)):
        teacher = ChessTeacher(nets[name], TeacherConfig(squares=squares), "", (0,))
        out, plain = teacher.query(batch, teacher.blocks), teacher.query(batch)
        assert out.pop("teacher_features_0").shape == (48, channels, 64 if squares else 1)
        assert all(torch.equal(out[key], plain[key]) for key in plain.keys() | out.keys())


@pytest.mark.filterwarnings("ignore:update 8")
def test_features_are_switched_off_for_good_where_the_held_out_loss_gets_worse(
    teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "CLEARLY", 0.0)  # any loss is
    with closing(student(teacher, "whole", steps=20, features=0.5)) as whole:
        rows = trained(whole, 10)
    seen = [row["losses"]["teacher_features"] for row in rows[:8]]
    assert seen[-1] < seen[0] < 1, "a student of another width comes to add what its teacher adds"
    assert "teacher_features" not in rows[0]["initial"], "its chance level is not known"
    assert "teacher_features" not in rows[3]["validation"]["losses"]
    having = ["teacher_features" in row["losses"] for row in rows]
    assert having == [True] * 8 + [False] * 2, "of the first validation nothing was known"
    (text,) = [text for row in rows for text in row.get("messages", ()) if "off from now on" in text]
    assert text == "the held-out loss has become clearly worse: teacher_features is off from now on"
    with closing(student(teacher, "broken", steps=20, features=0.5)) as run:
        trained(run, 9)
    with closing(student(teacher, "broken", steps=20, features=0.5)) as again:
        (last,) = trained(again, 1)
    assert last["losses"] == rows[9]["losses"]
    ours, expected = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_features_that_cannot_be_had(teacher: str) -> None:
    with pytest.raises(ConfigError, match=r"the cache holds no features: set teacher\.cache to false"):
        load_config("demo", {"teacher": {"network": "x", "features": 0.1, "cache": True}})
    for layers, who in (([[0, 1]], "teacher has 1 blocks, .* no block 1"), ([[2, 0]], "student has 1 blocks")):
        with pytest.raises(ValueError, match=rf"teacher\.layers: the {who}"):
            student(teacher, features=0.1, layers=layers)
    net = random_net()
    net.model = torch.nn.Identity()  # as of an ONNX file
    config = load_config("demo", {"teacher": {"network": "x.onnx", "features": 0.1}})
    with pytest.raises(ValueError, match=r"teacher 'x\.onnx' is an ONNX file, without access to its blocks"):
        ChessTeacher.of(net, config)  # type: ignore[arg-type]


# Figures


def test_agreement_is_one_with_itself_and_knows_a_hand_computed_case(reports: Path) -> None:
    x = np.array([[1.0, 2, 3, 99], [5, 5, 5, 0], [1, 2, 9, 9]])
    y = np.array([[2.0, 4, 7, -9], [1, 2, 3, 0], [3, 1, 0, 0]])
    among = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]], bool)
    first = np.corrcoef([1, 2, 3], [2, 4, 7])[0, 1]
    np.testing.assert_allclose(correlations(x, y, among), [first, np.nan, np.nan])
    np.testing.assert_allclose(correlations(x + 50, 3 * y, among)[0], first), "means and scales are taken away"
    apart = np.array([[0.0, 1, 2], [50, 51, 52]]), np.array([[2.0, 1, 0], [52, 51, 50]])
    assert np.corrcoef(apart[0].ravel(), apart[1].ravel())[0, 1] > 0.99, "pooled, opposite policies seem to agree"
    np.testing.assert_allclose(correlations(*apart), -1)
    loader, net = held_out_data(load_config("demo", STUDENT)), random_net()
    own = agreement(net, net, loader, 100)
    assert own["teacher_top1"] == 1
    assert own["teacher_kl"] == pytest.approx(0, abs=1e-6)
    assert own["teacher_correlation"] == own["teacher_value_correlation"] == pytest.approx(1)
    other = agreement(net, sharpened(random_net(channels=8)), loader, 100)
    assert other["top1"] == own["top1"] == held_out(net, loader, 100)["top1"]
    assert other["teacher_kl"] > 0.1
    assert abs(other["teacher_correlation"]) < 0.5
    assert other["label_correlation"] == own["label_correlation"]


def test_arms_stand_beside_their_base_with_intervals_over_pairs_of_seeds() -> None:
    """Student's, of the differences: 0.1 +- 0.1 over three pairs is 0.1 +- 0.248."""
    cells = definitions("distill")
    figures = {"hard": [{"top1": 0.1 * k} for k in range(3)], "taught": [{"top1": 0.1 * k + 0.1 * k} for k in range(3)]}
    low, high = cells["interval"](figures, "taught", "hard", "top1")
    assert (low, high) == (pytest.approx(0.1 - 0.2484, abs=1e-4), pytest.approx(0.1 + 0.2484, abs=1e-4))
    row = cells["arms_table"](figures).loc["top1"]
    assert row.tolist() == ["0.1000 ± 0.1000", "0.2000 ± 0.2000", "+0.1000 (-0.1484 to +0.3484)"]
    one = {arm: rows[1:2] for arm, rows in figures.items()}
    assert cells["arms_table"](one).loc["top1", "taught - hard"] == "+0.1000", "one seed has no interval"


def test_a_teacher_is_judged_against_the_same_network_without_one() -> None:
    better = {"teacher_kl": -0.1, "teacher_top1": 0.1, "policy_kl": -0.1, "top1": 0.1}
    hard = [dict.fromkeys(better, 0.5 + 0.01 * k) for k in range(3)]
    agreed = {"teacher_correlation": 0.91, "teacher_value_correlation": 0.9}

    def failed(**changes: float) -> set[str]:
        gains = better | changes
        both = [{name: 1.02 * row[name] - 0.01 + gains[name] for name in better} for row in hard]  # noise: 0 to 0.0004
        arms = {"hard": hard, "both": both, "taught": [agreed] * 3}
        checks = list(definitions("distill")["acceptance"](arms))
        assert len(checks) == 6
        return {name.removeprefix("both beats hard labels in ") for name, passed, _ in checks if not passed}

    assert failed() == {"teacher_value_correlation of taught is above 0.9"}, "0.9 itself is not above it"
    assert {"top1", "policy_kl"} <= failed(top1=-0.001, policy_kl=0.1)


def test_a_duel_pools_pairs_of_networks_and_gives_each_side_its_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    players: list[tuple[torch.nn.Module, int]] = []
    real = strength.network_player

    def network_player(net: Net, simulations: int) -> Player:
        players.append((net.model, simulations))
        return real(net, simulations)

    monkeypatch.setattr(strength, "network_player", network_player)
    first, second = [material_net(), material_net()], [random_net(), random_net()]
    elo = strength.duel(first, second, games=2, simulations=(2, 0), plies=8)
    assert (elo.games, elo.score) == (4, 0.5), "drawn at the ply limit"
    pairs = zip(first, second, strict=True)
    assert players == [(net.model, count) for pair in pairs for net, count in zip(pair, (2, 0), strict=True)]
