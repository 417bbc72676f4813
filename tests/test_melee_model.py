"""Melee's networks: frame by frame as over whole windows, causal, the parts decided in order."""

import pytest
import torch
from melee_batches import melee_batch, melee_task

from matrixlib.engine.task import Batch, active_terms
from matrixlib.tasks.melee.controller import HEADS, LOGITS
from matrixlib.tasks.melee.model import MeleeNet, gumbel

TRUNKS = ("mlp", "residual", "gru", "lstm", "transformer")


def features(model: MeleeNet, batch: Batch) -> torch.Tensor:
    return model.trunk(model.encode(*inputs(batch)))


def inputs(batch: Batch) -> tuple[torch.Tensor, ...]:
    pair = (batch["action"].long(), batch["character"].long())
    return batch["numeric"], *pair, batch["previous"].long()


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("trunk", TRUNKS)
def test_frame_by_frame_is_as_over_the_whole(trunk: str, norm: str) -> None:
    """Also over three times as many frames as a window has, where the transformer forgets the first ones."""
    model = melee_task(model={"trunk": trunk, "norm": norm}).build_model().eval()
    batch = melee_batch(rows=2, frames=36)
    with torch.inference_mode():
        whole = features(model, batch)
        state, steps = model.trunk.initial(2), []
        for frame in range(36):
            numeric, action, character, previous = (part[:, frame] for part in inputs(batch))
            x, state = model.step(numeric, action, character, previous, state)
            steps.append(x)
    assert torch.allclose(torch.stack(steps, 1), whole, atol=1e-5)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_no_frame_knows_a_later_one(trunk: str) -> None:
    model = melee_task(model={"trunk": trunk}).build_model().eval()
    batch = melee_batch(rows=1)
    changed = {**batch, "numeric": batch["numeric"].clone()}
    changed["numeric"][:, 6] += 1
    with torch.inference_mode():
        difference = (features(model, batch) - features(model, changed)).abs().amax(2)[0]
    assert not difference[:6].any()
    assert difference[6] > 0
    assert bool(difference[7:].any()) is (trunk not in ("mlp", "residual"))


@pytest.mark.parametrize("autoregressive", [True, False])
def test_a_part_knows_the_decisions_before_it_alone(autoregressive: bool) -> None:
    model = melee_task(model={"autoregressive": autoregressive}).build_model().eval()
    batch = melee_batch(rows=1)
    x, choices = features(model, batch), batch["choices"].long()
    before = model.heads(x, choices)
    for number, head in enumerate(HEADS):
        other = choices.clone()
        other[..., head.choices] = (other[..., head.choices] + 1) % (2 if number == 0 else head.classes)
        difference = (model.heads(x, other) - before).abs().amax((0, 1))
        changed = [bool(difference[part.logits].any()) for part in HEADS]
        assert changed == [autoregressive and later > number for later in range(len(HEADS))]


def test_a_fresh_network_says_what_a_constant_predictor_does() -> None:
    task, batch = melee_task(), melee_batch(rows=20)
    with torch.no_grad():
        sums, _ = task.losses(task.build_model(), batch, active_terms(task))
    assert task.bounds(batch).keys() == sums.keys() == active_terms(task)
    for term, (chance, floor) in task.bounds(batch).items():
        assert sums[term].item() == pytest.approx(chance, rel=0.02)
        assert floor == 0


def test_decisions_are_samples_of_what_the_heads_say() -> None:
    """By noise that is added before the greatest is taken; without noise it is the likeliest."""
    heads = melee_task(model={"autoregressive": False}).build_model().heads
    for layer in heads.outer:
        torch.nn.init.normal_(layer.get_parameter("bias"))
    x = torch.zeros(1, 16).expand(20_000, -1)
    noise = gumbel(torch.rand(len(x), LOGITS, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        logits, choices = heads.decide(x, noise, lambda head, logits: logits)
        best = heads.decide(x[:1], torch.zeros(1, LOGITS), lambda head, logits: logits)[1][0]
    assert torch.allclose(choices[:, :8].float().mean(0), logits[0, :8].sigmoid(), atol=0.015)
    assert torch.equal(best[:8], (logits[0, :8] > 0).long())
    for head in HEADS[1:]:
        counts = torch.bincount(choices[:, head.choices][:, 0], minlength=head.classes)
        assert torch.allclose(counts / len(x), logits[0, head.logits].softmax(0), atol=0.015)
        assert best[head.choices] == logits[0, head.logits].argmax()
