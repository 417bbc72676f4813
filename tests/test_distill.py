"""Learning from a teacher: its losses and their traps, the frozen network beside a training, the temperature."""

from __future__ import annotations

import itertools
import math
import pickle
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import CPU, material_net, random_net, save_run
from test_chess_task import positions
from test_task_contract import check_task
from torch import Tensor
from torch.nn import functional as F

from matrixlib.config import ConfigError
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch
from matrixlib.runs.data import RunError
from matrixlib.runs.run import Run, held_out_data, open_run
from matrixlib.tasks import load_config
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.config import ChessConfig, TeacherConfig
from matrixlib.tasks.chess.distill import losses, sizes
from matrixlib.tasks.chess.distill.agreement import agreement, correlations
from matrixlib.tasks.chess.distill.teacher import ChessTeacher
from matrixlib.tasks.chess.distill.temperature import LearnedTemperature, reversal, scheduled
from matrixlib.tasks.chess.evaluate import strength
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
    teacher = torch.where(torch.from_numpy(index) >= 0, teacher, -1e9).log_softmax(1)
    return {
        "logits": torch.from_numpy(rng.normal(0, 3, (rows, 4672)).astype(np.float32)),
        "index": torch.from_numpy(index),
        "teacher": teacher,
        "rows": torch.from_numpy(rng.random(rows) < 0.8),
        "temperature": torch.full((rows,), float(rng.uniform(1, 5))),
    }


def slow(case: dict[str, Tensor]) -> tuple[float, float]:
    """(loss, what it is of a student that finds all moves alike), move by move in float64."""
    loss = start = 0.0
    for row in case["rows"].nonzero()[:, 0].tolist():
        places = (case["index"][row] >= 0).nonzero()[:, 0]
        if not len(places):
            continue
        heat = float(case["temperature"][row])
        theirs = (case["teacher"][row, places].double() / heat).softmax(0)
        own = (case["logits"][row, case["index"][row, places].long()].double() / heat).softmax(0)
        loss += heat**2 * float((theirs * (theirs.log() - own.log())).sum())
        start += heat**2 * (math.log(len(places)) + float((theirs * theirs.log()).sum()))
    return loss, start


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 6))
def test_the_soft_loss_equals_a_slow_reference_and_adds_up(seed: int, cut: int) -> None:
    case = policies(seed)
    loss, metrics = losses.policy_loss(**case)
    expected, start = slow(case)
    assert float(loss) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    bounds = {name: value for name, value in case.items() if name != "logits"}
    assert losses.policy_bounds(**bounds) == (pytest.approx(start, rel=1e-4, abs=1e-4), 0.0)
    parts = [losses.policy_loss(**{k: v[s] for k, v in case.items()}) for s in (slice(0, cut), slice(cut, 6))]
    assert float(sum(part for part, _ in parts)) == pytest.approx(float(loss), rel=1e-4, abs=1e-4)
    for name, value in metrics.items():
        assert float(sum(m[name] for _, m in parts)) == pytest.approx(float(value), rel=1e-4, abs=1e-4), name


def test_pads_and_illegal_moves_are_finite_numbers_times_zero() -> None:
    """kl_div of masked logits with infinities is NaN, with log_target and without."""
    masked = torch.tensor([[1.0, -math.inf]]).log_softmax(1)
    assert F.kl_div(masked, masked, reduction="sum", log_target=True).isnan()
    case = policies(3)
    case["index"][0] = -1  # a row without a move
    case["rows"][:] = True
    expected, _ = losses.policy_loss(**case)
    assert expected.isfinite()
    case["teacher"] = torch.where(case["index"] >= 0, case["teacher"], -math.inf)
    illegal = torch.ones(6, 4672, dtype=torch.bool)
    for row in range(6):
        illegal[row, case["index"][row][case["index"][row] >= 0].long()] = False
    logits = torch.where(illegal, -math.inf, case["logits"]).requires_grad_()
    loss, _ = losses.policy_loss(**{**case, "logits": logits})
    loss.backward()
    assert torch.equal(loss, expected)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[illegal] == 0).all()


def test_the_gradient_keeps_its_size_at_every_temperature() -> None:
    """Without T^2 that of T = 5 would be a twentieth of that of T = 1."""
    case = policies(0)
    norms = []
    for heat in (1.0, 5.0):
        logits = (0.1 * case["logits"]).requires_grad_()
        teacher = 0.1 * case["teacher"].clamp(min=-30)
        temperature = torch.full((6,), heat)
        losses.policy_loss(logits, case["index"], teacher, case["rows"], temperature)[0].backward()
        assert logits.grad is not None
        norms.append(float(logits.grad.norm()))
    assert norms[1] == pytest.approx(norms[0], rel=0.3)


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


def student(teacher: str, name: str = "student", **options: Any) -> Run:
    changes = {**STUDENT, "teacher": {"network": teacher, **options}}
    return open_run("demo", run=name, steps=8, overrides=changes)


def trained(run: Run, updates: int) -> list[dict[str, Any]]:
    """The rows of the first updates of a run, which is then saved and left."""
    with closing(run.train()) as stats:
        return [one.row() for one in itertools.islice(stats, updates)]


def batch_of(task: ChessTask, count: int = 48) -> Batch:
    boards = positions(count)
    rows = records.from_boards(boards)
    index, offset = records.legal_indices(rows)
    weight = np.ones(len(index), np.uint16)
    host = {"records": rows, "policy_index": index, "policy_weight": weight, "policy_offset": offset}
    return {k: torch.from_numpy(v) for k, v in task.prepare_plain(host, np.random.default_rng(0)).items()}


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
    with closing(student(teacher)) as run:
        trained(run, 2)
    shutil.copytree(reports / "somebody", reports / "moved")
    with closing(student("moved")) as again:
        assert again.trainer.resume() == 2
    shutil.rmtree(reports / "somebody")
    save_run(reports / "somebody", random_net(channels=8))
    with pytest.raises(RunError, match="teacher 'somebody' holds other weights than when run 'student' began"):
        student(teacher)


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

    def _packed(self, batch: dict[str, np.ndarray], hidden: np.ndarray) -> dict[str, np.ndarray]:
        arrays = super()._packed(batch, hidden)
        taught = self.network({name: torch.from_numpy(array) for name, array in arrays.items()}, 0.7)
        return {name: value.numpy() for name, value in taught.items()}


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_the_terms_of_a_teacher_hold_the_contract(teacher: str, encoding: str) -> None:
    config = load_config(
        "demo",
        {
            **STUDENT,
            "model": {**STUDENT["model"], "encoding": encoding, "ssl": ["piece"]},
            "teacher": {"network": teacher, "schedule": "learned", "temperature": 3.0},
        },
    )
    assert isinstance(config, ChessConfig)
    Taught.network = ChessTeacher(random_net(), config.teacher, "")
    rows = records.from_boards(positions(40))
    index, offset = records.legal_indices(rows)
    rows["wdl"] = 40000, 20000, 5535
    weight = np.random.default_rng(0).integers(0, 9, len(index)).astype(np.uint16)
    check_task(
        Taught(config), {"records": rows, "policy_index": index, "policy_weight": weight, "policy_offset": offset}
    )


# The temperature


def learner(factor_at: float, decay: float = 0.0, seed: int = 0) -> tuple[Step, Batch]:
    """A step whose batches say that so much of the training is done."""
    changes = {**STUDENT, "teacher": {"network": "x", "schedule": "learned", "temperature": 2.0}}
    config = load_config("demo", {**changes, "seed": seed, "optim": {"weight_decay": decay, "warmup_steps": 0}})
    assert isinstance(config, ChessConfig)
    net, task = sharpened(random_net()), ChessTask(config)
    network = ChessTeacher(net, config.teacher, "")
    step = Step(task, task.build_model(), net.runtime, config, 100, lambda batch, _: network(batch, factor_at))
    return step, batch_of(task)


def raw(step: Step) -> float:
    temperature = step.model.get_submodule("temperature")
    assert isinstance(temperature, LearnedTemperature)
    return float(temperature.raw.detach())


def test_a_temperature_rests_until_its_factor_rises() -> None:
    """Where weight decay reached it, T would leave 2 without a gradient: 2.00138 after 600 updates, as others saw."""
    step, batch = learner(0.1, decay=0.5)
    before = raw(step)
    for _ in range(5):
        step(batch)
    assert raw(step) == before
    assert [reversal(p) for p in (0.0, 0.2, 0.6, 1.0)] == [0.0, 0.0, pytest.approx(0.5), 1.0]


def test_the_factor_scales_how_far_a_temperature_moves() -> None:
    """Adam would divide it away: a hundredth of the gradient moved a parameter as far as all of it."""
    moves = {}
    for place in (0.4, 1.0):
        step, batch = learner(place)
        before = raw(step)
        step(batch)
        moves[place] = raw(step) - before
    assert moves[1.0] != 0
    assert moves[0.4] == pytest.approx(reversal(0.4) * moves[1.0], rel=1e-3)


def test_a_temperature_climbs_the_loss_that_the_student_descends() -> None:
    step, batch = learner(1.0)
    taught, task = step.taught(batch), step.task
    model, active = step.model, frozenset({"teacher_policy"})
    temperature = model.get_submodule("temperature")
    before = raw(step)
    step(batch)
    model.load_state_dict(task.build_model().state_dict() | {"temperature.raw": temperature.raw.detach()})
    with torch.no_grad():
        higher = task.losses(model, taught, active)[0]["teacher_policy"]
        temperature.raw.fill_(before)
        assert higher > task.losses(model, taught, active)[0]["teacher_policy"]


def test_a_learned_temperature_is_logged_and_stays_off_the_rails(teacher: str) -> None:
    with closing(student(teacher, schedule="learned", temperature_rate=1.0)) as run:
        rows = trained(run, 7)
    heat = [row["metrics"]["teacher_policy/temperature"] for row in rows]
    assert heat[:2] == [pytest.approx(2.0)] * 2
    assert heat[-1] != pytest.approx(2.0, abs=1e-6)
    assert all(1.02 < t < 4.9 for t in heat)
    assert rows[-1]["metrics"]["teacher_policy/raw"] == pytest.approx(
        math.log((heat[-1] - 1) / (5 - heat[-1])), abs=1e-4
    )
    held_out = rows[3]["validation"]["metrics"]
    assert held_out["teacher_policy/temperature"] == 1.0, "held-out rows are always scored alike"


def test_a_scheduled_temperature() -> None:
    linear = TeacherConfig(schedule="linear", temperature=4.0, final_temperature=1.0)
    assert [scheduled(linear, p) for p in (0.0, 0.5, 1.0)] == [4.0, 2.5, 1.0]
    assert scheduled(TeacherConfig(temperature=3.0), 0.7) == 3.0
    with pytest.raises(ConfigError, match="begins between 1 and 5, not at 7"):
        load_config("demo", {"teacher": {"schedule": "learned", "temperature": 7.0}})


def test_a_hard_label_is_the_best_move(reports: Path) -> None:
    """`loss.best_move` changes what is learned, and no metric."""
    plain, hard = (ChessTask(load_config("demo", {"loss": {"best_move": on}})) for on in (False, True))  # type: ignore[arg-type]
    batch = batch_of(plain)
    batch["policy_weight"][:, 0] *= 3
    model, active = plain.build_model().eval(), frozenset({"policy"})
    with torch.no_grad():
        (soft, metrics), (best, same) = plain.losses(model, batch, active), hard.losses(model, batch, active)
    assert metrics == same
    assert hard.bounds(batch)["policy"][1] == pytest.approx(0.0, abs=1e-6)
    assert plain.bounds(batch)["policy"][1] > 1.0
    assert best["policy"] != soft["policy"]


# Figures


def test_agreement_is_one_with_itself_and_knows_a_hand_computed_case(teacher: str, reports: Path) -> None:
    x, y = (
        np.array([[1.0, 2, 3, 99], [5, 5, 5, 0], [1, 2, 9, 9]]),
        np.array([[2.0, 4, 7, -9], [1, 2, 3, 0], [3, 1, 0, 0]]),
    )
    among = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]], bool)
    first = np.corrcoef([1, 2, 3], [2, 4, 7])[0, 1]
    np.testing.assert_allclose(correlations(x, y, among), [first, np.nan, np.nan])
    np.testing.assert_allclose(correlations(x + 50, 3 * y, among)[0], first), "means and scales are taken away"
    config = load_config("demo", STUDENT)
    loader = held_out_data(config)
    net = random_net()
    own = agreement(net, net, loader, 100)
    assert own["teacher_top1"] == 1
    assert own["teacher_kl"] == pytest.approx(0, abs=1e-6)
    assert own["teacher_correlation"] == own["teacher_value_correlation"] == pytest.approx(1)
    other = agreement(net, sharpened(random_net(channels=8)), loader, 100)
    assert other["teacher_kl"] > 0.1
    assert abs(other["teacher_correlation"]) < 0.5
    assert other["label_correlation"] == own["label_correlation"]


def test_networks_side_by_side() -> None:
    table = sizes.side_by_side({"student": random_net(channels=8), "teacher": random_net()}, onnx=False, seconds=0.0)
    assert list(table.index) == ["student", "teacher"]
    assert table.loc["student", "parameters"] < table.loc["teacher", "parameters"]
    assert (table[["1 at once [1/s]", "256 at once [1/s]"]] > 0).all().all()


def test_a_duel_pools_pairs_of_networks() -> None:
    elo = strength.duel([material_net(), material_net()], [random_net(), random_net()], games=2, plies=8)
    assert (elo.games, elo.score) == (4, 0.5), "drawn at the ply limit"
