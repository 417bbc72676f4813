"""The Latin-square task: puzzles, losses, bounds, network; the mistakes of its specification."""

import json
import math
import pickle
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import definitions

from matrixlib.config import merge
from matrixlib.engine import onnx
from matrixlib.engine.task import Batch
from matrixlib.engine.validation import check_target_loss
from matrixlib.runs.run import open_run
from matrixlib.tasks import load_config as load
from matrixlib.tasks.latin import losses, model, pool
from matrixlib.tasks.latin.losses import tokens
from matrixlib.tasks.latin.model import LatinNet
from matrixlib.tasks.latin.spec import LatinTask
from matrixlib.tasks.latin.vocabulary import EMPTY, MODES, PAD, TOKENS, digits, token

SMALL = {"model": {"width": 16, "layers": 2, "heads": 2, "feedforward": 2}}


def latin_task(**sections: Any) -> LatinTask:
    """`latin_quick` with a network of a few thousand parameters."""
    config: Any = load("latin_quick", merge(SMALL, sections))
    return LatinTask(config)


def at(task: LatinTask, size: tuple[int, int], fill: tuple[float, float], *modes: str) -> LatinTask:
    """The task in a stage of the curriculum."""
    return replace(task, stage={"size": size, "fill": fill, "mode": modes or ("standard",)})


def records(sizes: tuple[int, ...] = (3, 4, 5), each: int = 8, seed: int = 0) -> np.ndarray:
    """Training squares of several sizes, mixed."""
    found = [pool.pack(_training(size, each, seed)) for size in sizes]
    return np.random.default_rng(seed).permutation(np.concatenate(found))


def _training(size: int, count: int, seed: int) -> np.ndarray:
    made = pool.generate(size, 4 * count, seed)
    return made[~pool.held_out(made)][:count]


def batch(task: LatinTask, rows: np.ndarray, seed: int = 0, plain: bool = False) -> Batch:
    make = task.prepare_plain if plain else task.prepare
    arrays = make({"records": rows}, np.random.default_rng(seed))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def logits_for(target: torch.Tensor, n: int, sharp: float = 50.0) -> torch.Tensor:
    """Log-probabilities of a network that is sure of `target` (B, N, N)."""
    return (sharp * torch.nn.functional.one_hot(target, n).float()).log_softmax(3)


# Puzzles


def test_the_stage_decides_size_mode_and_fill() -> None:
    task = latin_task(data={"easy_share": 0.0})
    rows = pool.pack(np.resize(pool.every(4), (4000, 4, 4)))
    found = batch(at(task, (4, 4), (0.5, 0.7), "standard", "negative", "zero_inclusive"), rows)
    assert found["square"].shape == (4000, 4, 4)
    shares = torch.bincount(found["mode"], minlength=3) / 4000
    assert torch.allclose(shares, torch.tensor([0.5, 0.25, 0.25]), atol=0.03)
    assert abs(found["hidden"].double().mean() - 0.4) < 0.02
    mean = found["hidden"].flatten(1).double().mean(1)
    assert abs(mean.var() - (0.2**2 / 12 + 0.4 * 0.6 / 16)) < 0.003  # one fill a puzzle, then cell by cell
    assert batch(at(task, (4, 4), (0.5, 0.7), "negative"), rows)["mode"].unique().tolist() == [2]
    with pytest.raises(ValueError, match="squares of size 4 to 4, but the stage has 3 to 3"):
        batch(at(task, (3, 3), (0.5, 0.7)), rows)


def test_some_puzzles_stay_easy() -> None:
    """With next to nothing revealed no identity can be learned."""
    rows = pool.pack(np.resize(pool.every(4), (4000, 4, 4)))
    empty = at(latin_task(data={"easy_share": 0.5}), (4, 4), (0.0, 0.0))
    hidden = batch(empty, rows)["hidden"].flatten(1).all(1).double().mean()
    assert 0.5 <= hidden < 0.56
    assert batch(empty, rows, plain=True)["hidden"].all()


def test_validation_sees_every_fill_and_the_last_sizes_and_modes() -> None:
    rows = records(each=300)
    found = batch(latin_task(), rows, plain=True)
    assert set(found["size"].tolist()) == {3, 4, 5}
    assert set(found["mode"].tolist()) == {0, 1, 2}
    assert np.array_equal(found["square"], pool.unpack(rows, 5)), "as stored"
    share = found["hidden"].flatten(1).sum(1) / found["size"].square()
    assert share.min() < 0.3
    assert share.max() == 1


def test_each_square_of_each_batch_is_permuted_in_its_own_way() -> None:
    """A generator kept in the dataset gives every worker and every epoch the same permutations."""
    task = pickle.loads(pickle.dumps(latin_task()))  # noqa: S301 - what the loader does for its workers
    rows = np.repeat(records(each=1), 8)
    one, other = batch(task, rows, 1)["square"], batch(task, rows, 2)["square"]
    assert not torch.equal(one, other)
    assert len(one.flatten(1).unique(dim=0)) > 12
    assert np.array_equal(batch(latin_task(data={"augment": False}), rows)["square"], pool.unpack(rows, 5))


@pytest.mark.parametrize("mode", MODES)
def test_tokens_show_the_revealed_digits_of_the_mode(mode: str) -> None:
    """The specification's test fed PAD for empty cells and compared tokens with digits: always 0 %."""
    found = batch(at(latin_task(), (3, 5), (0.3, 0.7), mode), records())
    for shown, square, hidden, size in zip(
        tokens(found), *(found[n] for n in ("square", "hidden", "size")), strict=True
    ):
        names = digits(mode, int(size))
        for (row, column), value in np.ndenumerate(square):
            if row >= size or column >= size:
                expected = PAD
            else:
                expected = EMPTY if hidden[row, column] else token(names[value])
            assert shown[row, column] == expected


# Losses


def test_only_hidden_cells_count() -> None:
    """In a mean over all 256 cells a random guess on an empty 3 x 3 costs 0.039."""
    task = latin_task()
    found = batch(task, records(), plain=True)
    count, size = task.counts(found), found["size"]
    target, hidden = found["square"].long(), found["hidden"]
    assert count["cell"] == hidden.sum() < hidden.numel()
    right = logits_for(target, 5)
    for log_p in (right, torch.where(hidden[..., None], right, right.roll(1, 3))):
        loss, metrics = losses.cell_loss(log_p, target, hidden, size, 0.0)
        assert (loss.item(), metrics["accuracy"]) == (pytest.approx(0, abs=1e-6), hidden.sum())
        loss, metrics = losses.constraint_loss(log_p, target, hidden, size)
        assert (loss.item(), metrics["valid"]) == (pytest.approx(0, abs=1e-6), count["constraint"])
        assert metrics["violations"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_constraint_is_that_of_the_mode_s_own_digits(mode: str) -> None:
    """Over the tokens of 1..n the term says nothing about the other modes."""
    task = at(latin_task(), (4, 4), (0.0, 0.4), mode)
    found = batch(task, pool.pack(_training(4, 6, 0)), plain=True)
    logits = task.build_model()(tokens(found), found["size"], found["mode"])
    log_p = losses.digit_log_probabilities(logits, found["digits"])
    assert torch.allclose(log_p.exp().sum(3), torch.ones(6, 4, 4))
    same = torch.zeros_like(found["square"].long())
    twice = losses.constraint_loss(logits_for(same, 4), same, torch.ones(6, 4, 4).bool(), found["size"])
    # Every line has one digit four times: (4 - 1)^2 for one of four digits, rows and columns.
    assert twice[0].item() == pytest.approx(6 * 2 * 9 / 4, rel=1e-4)
    assert twice[1]["violations"] == 6 * 2 * 4 * 3


def test_uniform_predictions_satisfy_the_constraint_on_an_empty_grid() -> None:
    """So the term cannot break the symmetry; with givens it costs something."""
    size = torch.tensor([4, 3])
    target = torch.from_numpy(pool.unpack(pool.pack(pool.every(4)[:2]), 4)).long()
    empty = torch.ones(2, 4, 4, dtype=torch.bool)
    empty[1, 3] = empty[1, :, 3] = False
    possible = torch.arange(4) < size[:, None, None, None]
    uniform = torch.where(possible, 0.0, losses.IMPOSSIBLE).expand(-1, 4, 4, -1).log_softmax(3)
    assert losses.constraint_loss(uniform, target, empty, size)[0] == pytest.approx(0, abs=1e-9)
    half = empty.clone()
    half[:, ::2] = False
    assert losses.constraint_loss(uniform, target, half, size)[0] > 0.1


def test_smoothing_has_a_floor_and_a_target_below_it_is_refused() -> None:
    """Mistake 2: the specification's target of 0.09 lies below the floor of its own loss, 0.661 over 35."""
    share, classes = 0.1, 35
    top, rest = 1 - share + share / classes, share / classes
    assert -(top * math.log(top) + 34 * rest * math.log(rest)) == pytest.approx(0.661, abs=1e-3)
    task = latin_task(loss={"label_smoothing": share}, data={"augment": False})
    found = batch(task, records(), plain=True)
    target, hidden, size = found["square"].long(), found["hidden"], found["size"]
    chance, floor = task.bounds(found)["cell"]
    n = size.double()[:, None, None, None]
    smoothed = share / n + (1 - share) * torch.nn.functional.one_hot(target, 5)
    known = torch.where(torch.arange(5) < n, smoothed.log(), losses.IMPOSSIBLE).float()
    best = losses.cell_loss(known, target, hidden, size, share)[0].item()
    assert best == pytest.approx(floor, rel=1e-4)
    assert chance == pytest.approx((hidden.flatten(1).sum(1) * size.double().log()).sum().item())
    with pytest.raises(ValueError, match=r"target_loss 0\.09 is below"):
        check_target_loss(0.09, task, [found], frozenset({"cell", "constraint"}))
    bare = latin_task()
    check_target_loss(0.09, bare, [found], frozenset({"cell", "constraint"}))


# Sinkhorn


def test_sinkhorn_lines_and_cells_sum_to_one_with_the_givens() -> None:
    """Over grids of several sizes and modes. Slowly: a digit may fit a cell and stand there in no completion."""
    found = batch(latin_task(), records(), plain=True)
    shown, digit, hidden = tokens(found), found["digits"], found["hidden"]
    logits = torch.randn(*shown.shape, TOKENS, generator=torch.Generator().manual_seed(0))
    grid, known = losses.inside(found["size"], 5), (digit != PAD).float()
    given = torch.nn.functional.one_hot(found["square"].long(), 5) * grid[..., None]
    far = []
    for iterations in (3, 300):
        out = losses.sinkhorn(logits, shown, digit, iterations)
        assert torch.equal(out[~hidden], logits[~hidden])
        p = torch.where(hidden[..., None], losses.digit_log_probabilities(out, digit).exp(), given)
        assert torch.allclose(p.sum(3), grid.float(), atol=1e-5)
        far.append(max((p.sum(axis) - known[:, :, None] * known[:, None]).abs().max().item() for axis in (1, 2)))
    assert far[1] < 0.01 < far[0]


def test_sinkhorn_cannot_break_the_symmetry_of_an_empty_grid() -> None:
    shown, digit = torch.full((1, 4, 4), EMPTY), torch.tensor([[token(d) for d in digits("negative", 4)]])
    p = losses.digit_log_probabilities(losses.sinkhorn(torch.zeros(1, 4, 4, TOKENS), shown, digit, 5), digit).exp()
    assert torch.allclose(p, torch.tensor(0.25))
    shown[0, 0, 0] = digit[0, 2]
    p = losses.digit_log_probabilities(losses.sinkhorn(torch.zeros(1, 4, 4, TOKENS), shown, digit, 5), digit).exp()
    assert not p[0, 0, 1:, 2].any(), "the digit stands in their row"
    assert not p[0, 1:, 0, 2].any(), "and in their column"


def test_sinkhorn_is_finite_where_no_digit_fits_and_reads_nothing_on_the_host() -> None:
    shown = torch.tensor([[[token(1), token(2), EMPTY], [EMPTY, EMPTY, token(3)], [EMPTY] * 3]])
    digit = torch.tensor([[token(1), token(2), token(3)]])
    logits = (1e4 * torch.randn(1, 3, 3, TOKENS, generator=torch.Generator().manual_seed(0))).requires_grad_()
    log_p = losses.digit_log_probabilities(losses.sinkhorn(logits, shown, digit, 5), digit)
    (gradient,) = torch.autograd.grad(log_p.exp().square().sum(), logits)
    assert log_p.isfinite().all()
    assert gradient.isfinite().all()
    assert losses.sinkhorn(logits.to("meta"), shown.to("meta"), digit.to("meta"), 5).shape == logits.shape


def test_a_network_with_sinkhorn_starts_at_its_own_chance_and_takes_no_smoothing() -> None:
    task = latin_task(model={"sinkhorn": 5})
    found = batch(task, records(each=100), plain=True)
    count, bounds = task.counts(found), task.bounds(found)
    sums, _ = task.losses(task.build_model(), found, frozenset({"cell", "constraint"}))
    assert sums["cell"].item() == pytest.approx(bounds["cell"][0], rel=0.1)
    assert bounds["cell"][0] / count["cell"] < 0.8 * latin_task().bounds(found)["cell"][0] / count["cell"]
    with pytest.raises(ValueError, match=r"model\.sinkhorn gives impossible digits no probability"):
        latin_task(model={"sinkhorn": 5}, loss={"label_smoothing": 0.1})


# Network


def test_grids_of_several_sizes_do_not_disturb_each_other() -> None:
    task = latin_task()
    model = task.build_model().eval()
    found = batch(task, records(), plain=True)
    shown = tokens(found)
    with torch.no_grad():
        whole = model(shown, found["size"], found["mode"])
        for i, size in enumerate(found["size"].tolist()):
            alone = model(shown[i : i + 1, :size, :size], found["size"][i : i + 1], found["mode"][i : i + 1])
            assert torch.allclose(alone[0], whole[i, :size, :size], atol=1e-5)


def test_the_mode_is_given_to_the_network() -> None:
    """The same empty grid has three sets of labels."""
    logits = latin_task().build_model().eval()(torch.full((3, 4, 4), EMPTY), torch.full((3,), 4), torch.arange(3))
    assert len(logits.flatten(1).round(decimals=5).unique(dim=0)) == 3


@pytest.mark.parametrize("causal", [False, True])
def test_causal_cells_see_only_what_stands_before(causal: bool) -> None:
    model = latin_task(model={"causal": causal}).build_model().eval()
    size, mode = torch.tensor([4]), torch.tensor([0])
    before = torch.full((1, 4, 4), EMPTY)
    changed = before.clone()
    changed[0, 2, 1] = 5
    with torch.no_grad():
        difference = (model(before, size, mode) - model(changed, size, mode)).abs().sum(3).flatten()
    assert (difference[9:] > 0).all()
    assert bool((difference[:9] > 0).any()) is not causal


def test_the_full_preset_is_as_large_as_the_specification_s() -> None:
    config: Any = load("latin_full")
    with torch.device("meta"):
        model = LatinNet(config.model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(6_393_088, rel=0.02)


# Distillation


def test_a_student_learns_what_its_teacher_says_and_not_the_squares(reports: Path) -> None:
    """By the cell of the notebook, from a teacher that prefers some tokens whatever stands in the grid."""
    cell = definitions("latin")
    with closing(open_run("latin_demo", "cpu", steps=60)) as run:
        teacher = LatinNet(run.config.model)
        torch.nn.init.normal_(teacher.head.bias, std=2.0, generator=torch.Generator().manual_seed(0))
        before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
        cell["train_small"].__globals__.update(current=run, small=run.config.model.model_copy(update={"width": 16}))
        found = run.batch(1000)
        given = tokens(found), found["size"], found["mode"]

        def far(student: LatinNet) -> float:
            """KL from the teacher's probabilities, nats a cell."""
            with torch.no_grad():
                own, its = (losses.digit_log_probabilities(net(*given), found["digits"]) for net in (student, teacher))
            return (its.exp() * (its - own)).sum(3)[found["hidden"]].mean().item()

        assert far(cell["train_small"](teacher)) < 0.05
        assert far(cell["train_small"](None)) > 0.3
    assert all(torch.equal(before[name], weight) for name, weight in teacher.state_dict().items())


# ONNX


@pytest.mark.skipif(not onnx.installed(), reason=f"needs {', '.join(onnx.PACKAGES)}")
@pytest.mark.slow
def test_the_exported_network_says_the_same(tmp_path: Path) -> None:
    net = latin_task().build_model().eval()
    file = model.export(net, tmp_path / "latin.onnx", sizes=(3, 4, 5))
    assert [entry.name for entry in tmp_path.iterdir()] == ["latin.onnx"], "weights in a file beside it"
    assert file.difference < 1e-4
    assert file.examples == 4 * 14, "every size, in batches of 1 and 3"

    # A reader that has the file alone: what the tokens are, where the puzzle stands, which logits are digits.
    session = onnx.session(file.path)
    facts = session.get_modelmeta().custom_metadata_map
    named, modes, by_mode, sizes = (json.loads(facts[name]) for name in ("tokens", "modes", "digits", "sizes"))
    assert (facts["task"], sizes, modes, len(named)) == ("latin", [3, 4, 5], list(MODES), TOKENS)
    assert [named.index(str(digit)) for digit in range(-16, 17)] == [token(digit) for digit in range(-16, 17)]
    assert (named[PAD], named[EMPTY]) == ("outside", "empty")
    assert by_mode["negative"]["4"] == [-2, -1, 1, 2]
    assert "16 x 16" in facts["board"]
    grid = np.full((3, 16, 16), named.index("outside"))
    for row, size in enumerate(sizes):  # several sizes in one batch
        grid[row, :size, :size] = named.index("empty")
        grid[row, 0, size - 1] = named.index(str(by_mode[modes[row]][str(size)][-1]))
    for rows in (1, 3):
        given = {"input_grid": grid[:rows], "grid_size": np.array(sizes[:rows]), "mode": np.arange(rows)}
        (theirs,) = session.run(["cell_logits"], given)
        with torch.inference_mode():
            ours = net(*map(torch.from_numpy, given.values())).permute(0, 3, 1, 2).numpy()
        assert theirs.shape == (rows, TOKENS, 16, 16)
        for row, size in enumerate(sizes[:rows]):
            assert np.abs(theirs - ours)[row, :, :size, :size].max() < 1e-4


@pytest.mark.parametrize("causal", [False, True])
def test_every_cell_of_a_grid_sees_one(causal: bool) -> None:
    """A row of attention that is masked as a whole gives zeros, which hides a wrong mask."""
    net = LatinNet(load("latin_demo", {"model": {"causal": causal}}).model)
    grid = torch.full((2, 4, 4), EMPTY)
    grid[1, 3:], grid[1, :, 3:] = PAD, PAD
    seen = (net._mask(grid.flatten(1)) == 0)[:, 0]
    assert seen[grid.flatten(1) != PAD].any(-1).all()
