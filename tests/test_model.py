"""The network: every option, Matrix0's size, and the traps of each part."""

import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toy_task import toy_runtime

from matrixlib.config import dump, merge
from matrixlib.engine.compiler import place
from matrixlib.tasks import load_config as load
from matrixlib.tasks.chess import blocks
from matrixlib.tasks.chess.config import SSL_CHANNELS, ModelConfig
from matrixlib.tasks.chess.losses import PAD_INDEX, legal_logits
from matrixlib.tasks.chess.model import AUXILIARY_CHANNELS, MOVES, PLANES, PolicyValueNet, flops, training_flops

C, BLOCKS, HIDDEN = 32, 3, 24
BASE = merge(
    dump(load("demo"))["model"],
    {
        "channels": C,
        "blocks": BLOCKS,
        "se_ratio": 0.0,
        "attention": {"every": 0, "heads": 4, "bias": True, "mask": False, "unmasked_mix": 0.0, "norm": "pre"},
        "policy": {"kind": "conv", "channels": 32, "rank": 5},
        "value": {"kind": "wdl", "pool": "pooled", "channels": 16, "hidden": HIDDEN, "activation": "silu"},
    },
)
ALL_SSL = list(SSL_CHANNELS)
ATTENTION = {"every": 2, "heads": 4}
S = 8  # squeeze-and-excitation width at 32 channels and ratio 0.25
FLAT, CONV_HEAD = 32 * 64, 32 * 73 + 73
ATTENDED = 3 * C * C + C * C + 2 * C + 4 * 64 * 64  # qkv, proj, LayerNorm and bias of one attention block
CONV = 2 * 9 * C * C + 4 * C  # of a residual block
NARROW = 2 * C * 16 + 9 * 16 * 16 + 2 * (C + 16 + 16)  # with a bottleneck
OPTIONS: dict[str, tuple[dict[str, Any], int]] = {
    # name: (options changed, parameters more than in BASE)
    "no blocks, matrix0's encoding": ({"blocks": 0, "encoding": "matrix0"}, -BLOCKS * CONV),
    "post-activation": ({"preact": False}, 0),
    "light blocks": ({"block": "light", "lines": 16}, -BLOCKS * (8 * C * C + 2 * C)),
    "bottleneck": ({"block": "bottleneck", "bottleneck": 2}, BLOCKS * (NARROW - CONV)),
    "batch norm and mish": ({"norm": {"blocks": "batch", "stem_heads": "batch"}, "activation": "mish"}, 0),
    "squeeze-excite": ({"se_ratio": 0.25}, BLOCKS * (2 * C * S + S + C)),
    "droppath and dropout": ({"droppath": 0.3, "dropout": 0.2, "attention": ATTENTION}, ATTENDED),
    "chess features": ({"chess_features": True}, 64 * C + C * C + 9 * C * C + 4 * C),
    "open lines": ({"lines": 8, "attention": ATTENTION, "checkpoint_every": 1}, ATTENDED),
    "open lines in bottlenecks": ({"lines": 8, "preact": False, "block": "bottleneck"}, BLOCKS * (NARROW - CONV)),
    "masked attention": ({"attention": ATTENTION | {"mask": True}}, ATTENDED),
    "without bias": ({"attention": ATTENTION | {"mask": True, "bias": False}}, ATTENDED - 4 * 64 * 64),
    "blended attention": ({"attention": ATTENTION | {"mask": True, "unmasked_mix": 0.3}}, ATTENDED),
    "post-norm attention": ({"attention": ATTENTION | {"mask": True, "norm": "post"}}, ATTENDED),
    "dense policy": ({"policy": {"kind": "dense"}}, FLAT * MOVES + MOVES - CONV_HEAD),
    "factored policy": ({"policy": {"kind": "factored"}}, 5 * (FLAT + 1) + MOVES * (5 + 1) - CONV_HEAD),
    "attention policy": ({"policy": {"kind": "attention"}}, 2 * 5 * (32 + 1) + 3 * 5 + 64 * (64 + 24) - CONV_HEAD),
    "logit norm and clamp": ({"policy": {"clamp": 5.0, "logit_norm": True}}, 2 * MOVES),
    "value by attention": ({"value": {"pool": "attention"}}, 16),
    "flat value": ({"value": {"pool": "flatten"}}, 63 * 16 * HIDDEN),
    "scalar value": ({"value": {"kind": "scalar"}}, -2 * (HIDDEN // 2 + 1)),
    "ssl heads": ({"ssl": ALL_SSL}, sum(C * 16 + 2 * 16 + 16 * channels for channels in SSL_CHANNELS.values())),
    "auxiliary heads": ({"auxiliary": True}, sum(C * 32 + 2 * 32 + 32 * n for n in AUXILIARY_CHANNELS.values())),
    "activation checkpointing": ({"checkpoint_every": 2, "attention": ATTENTION}, ATTENDED),
}


def options(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(merge(BASE, changes))


def build(seed: int = 0, **changes: Any) -> PolicyValueNet:
    torch.manual_seed(seed)
    return PolicyValueNet(options(**changes))


def planes(rows: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.rand(rows, PLANES, 8, 8, generator=torch.Generator().manual_seed(seed))


def every_head(net: PolicyValueNet) -> frozenset[str]:
    return frozenset({"policy", "value", "features", *(f"ssl_{name}" for name in net.config.ssl)})


def randomise(net: nn.Module, seed: int = 2) -> None:
    """Weights that make every part matter (biases and attention biases start at zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in net.parameters():
            value.add_(torch.randn(value.shape, generator=generator) * 0.1)


def parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", list(OPTIONS))
def test_option_gives_shapes_gradients_and_its_parameter_count(name: str) -> None:
    changes, more = OPTIONS[name]
    net = build(**changes).train()
    assert parameters(net) == parameters(build()) + more
    out = net(planes(), every_head(net))
    assert out["policy"].shape == (4, MOVES)
    assert out["value"].shape == ((4,) if net.config.value.kind == "scalar" else (4, 3))
    assert out["features"].shape == (4, C, 8, 8)
    maps = out.get("ssl", {})
    assert {name: tuple(value.shape) for name, value in maps.items()} == {
        name: (4, SSL_CHANNELS[name], 8, 8) for name in net.config.ssl
    }
    loss = out["policy"].square().sum() + out["value"].square().sum() + sum(m.square().sum() for m in maps.values())
    assert torch.isfinite(loss)
    loss.backward()
    for parameter_name, parameter in net.named_parameters():
        if parameter_name.startswith("auxiliary"):
            assert not parameter.requires_grad
            continue
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("in_blocks", ["group", "batch"])
@pytest.mark.parametrize("in_heads", ["group", "batch"])
def test_norm_is_honoured_in_every_block_and_head(in_blocks: str, in_heads: str) -> None:
    norm = {"blocks": in_blocks, "stem_heads": in_heads, "momentum": 0.25}
    net = build(norm=norm, chess_features=True, ssl=ALL_SSL, auxiliary=True, attention=ATTENTION)
    norms = {n: module for n, module in net.named_modules() if isinstance(module, nn.GroupNorm | nn.BatchNorm2d)}
    for name, module in norms.items():
        kind = in_blocks if name.startswith(("tower.", "features.")) else in_heads
        assert isinstance(module, nn.BatchNorm2d) == (kind == "batch"), name
        size, wanted = ("momentum", 0.25) if kind == "batch" else ("num_groups", max(1, module.weight.numel() // 16))
        assert getattr(module, size) == wanted
    assert len(norms) == 2 * BLOCKS + 2 + 3 + len(ALL_SSL) + 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 56}, r"3 groups do not divide 56 channels.*multiples of 16"),
        ({"channels": 256, "attention": {"every": 1, "heads": 12}}, "heads 12 does not divide channels 256"),
        ({"lines": 17}, "lines 17: twice as many are summed, and blocks have 32 channels; set 16"),
        ({"lines": 9, "block": "bottleneck"}, "lines 9: twice as many are summed, and blocks have 16 channels; set 8"),
        ({"block": "bottleneck", "bottleneck": 40}, "bottleneck 40 leaves no channel of 32"),
    ],
)
def test_widths_that_do_not_fit_are_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_heads_are_computed_only_when_asked_for() -> None:
    net = build(ssl=["threat", "pin"])
    ran: list[str] = []
    heads = {"policy_head": net.policy_head, "value_head": net.value_head, **net.ssl_heads}
    for name, module in heads.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    assert set(net(planes())) == {"policy", "value"}
    assert ran == ["policy_head", "value_head"]
    ran.clear()
    out = net(planes(), frozenset({"ssl_pin"}))
    assert (set(out), set(out["ssl"]), ran) == ({"ssl"}, {"pin"}, ["pin"])
    with pytest.raises(ValueError, match="no head ssl_fork; it has features, policy, ssl_pin, ssl_threat, stream, v"):
        net(planes(), frozenset({"ssl_fork"}))


def test_the_stream_keeps_its_size_in_a_deep_net() -> None:
    changes: dict[str, Any] = {"blocks": 24, "attention": ATTENTION, "se_ratio": 0.25}
    for preact, activation in ((True, "silu"), (False, "silu"), (False, "relu")):
        net = build(preact=preact, activation=activation, **changes).eval()
        with torch.no_grad():
            x, stem = net(planes(), frozenset({"features"}))["features"], net.stem(planes())
        assert 0.5 < float(x.std() / stem.std()) < 4


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_convolutional_policy_keeps_squares_in_order(encoding: str) -> None:
    """Square s has the row of rank s // 8: row 0 is rank 1, or rank 8 in Matrix0's frame."""
    head = build(encoding=encoding).policy_head.eval()
    marks = torch.arange(73 * 64.0).view(1, 73, 8, 8)  # plane p, row r, column c -> p*64 + r*8 + c
    head.input, head.planes = nn.Identity(), nn.Identity()
    logits = head(marks)[0].view(64, 73)
    for square in (0, 7, 12, 56, 63):
        row = square // 8 if encoding == "oriented" else 7 - square // 8
        assert logits[square].tolist() == [plane * 64.0 + row * 8 + square % 8 for plane in range(73)]


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_attention_policy_compares_squares(encoding: str) -> None:
    """Square s has the row of rank s // 8 as above; 48 to 57 is a queen's, king's or pawn's step, 48 * 73 + 64 + 3 + 2
    a pawn's that becomes a bishop."""
    head = build(encoding=encoding, policy={"kind": "attention"}).policy_head.eval()
    randomise(head)
    head.input = nn.Identity()
    marks = torch.randn(1, 32, 8, 8, generator=torch.Generator().manual_seed(4))
    squares = (marks if encoding == "oriented" else marks.flip(2)).flatten(2)[0].T
    query, key = squares[48] @ head.pairs.query.weight.T + head.pairs.query.bias, squares[57] @ head.pairs.key.weight.T
    key = key + head.pairs.key.bias
    logits, ends = head(marks)[0], len(head.pairs.ends)
    torch.testing.assert_close(logits[48 * 73 + 28], query @ key / 5**0.5 + head.pairs.bias[48, 57])
    promoted = query @ (key + head.pairs.piece[1, 0]) / 5**0.5 + head.pairs.bias[48, 64 + ends + 1]
    torch.testing.assert_close(logits[48 * 73 + 64 + 3 + 2], promoted)


@pytest.mark.parametrize("changes", [{}, {"clamp": 0.5}, {"logit_norm": True}])
def test_listed_moves_are_what_they_are_among_all(changes: dict[str, Any]) -> None:
    """Of every index, also of those that are no move, with pads, and with rows of no move at all."""
    net = build(policy={"kind": "attention", **changes}).eval()
    randomise(net)
    moves = torch.stack([torch.randperm(MOVES) for _ in range(4)]).to(torch.int16)
    moves[torch.rand(moves.shape) < 0.3] = PAD_INDEX
    moves[2] = PAD_INDEX
    moves = moves[:, 1:]
    whole, listed = (net(planes(), frozenset({"policy"}), some)["policy"] for some in (None, moves))
    assert listed.shape == ((4, MOVES) if "logit_norm" in changes else moves.shape)
    torch.testing.assert_close(legal_logits(whole, moves), legal_logits(listed, moves))


@pytest.mark.parametrize("kind", ["conv", "attention", "dense", "factored"])
def test_clamp_only_where_asked(kind: str) -> None:
    for clamp in (0.0, 5.0):
        net = build(policy={"kind": kind, "clamp": clamp}).eval()
        with torch.no_grad():
            for parameter in net.policy_head.parameters():
                parameter.mul_(40)
            top = net(planes())["policy"].abs().max()
        assert (top == 5.0) if clamp else (top > 20)


def test_droppath_drops_the_branch_of_single_samples_and_leaves_the_skip_path() -> None:
    torch.manual_seed(3)
    block, x = blocks.ResidualBlock(options(), drop=0.5), torch.randn(64, C, 8, 8)
    branch, out = block.eval()(x) - x, block.train()(x)
    kept = [row for row in range(64) if not torch.equal(out[row], x[row])]
    assert 16 < len(kept) < 48
    torch.testing.assert_close(out[kept] - x[kept], 2 * branch[kept], rtol=1e-4, atol=1e-4)


def test_droppath_grows_linearly_over_the_tower() -> None:
    net = build(blocks=4, droppath=0.3, attention={"every": 4, "heads": 4})
    rates = [module.rate for module in net.modules() if isinstance(module, blocks.DropPath)]
    assert rates == pytest.approx([0.0, 0.075, 0.15, 0.225, 0.3])
    assert build(blocks=1, droppath=0.3).tower[0].drop.rate == 0.0


def test_board_mask_is_queen_knight_and_king_moves() -> None:
    mask = blocks.board_mask()
    assert int(mask.sum()) == 1856
    assert torch.equal(mask, mask.T)
    assert mask.diagonal().all(), "without any square attention gives zeros, which hides a wrong mask"
    near = {square for square in range(64) if mask[0, square]}
    assert near == {0, *range(1, 8), *range(8, 64, 8), *range(9, 64, 9), 10, 17}


def slow_attention(block: blocks.AttentionBlock, x: torch.Tensor, mask: bool, mix: float) -> torch.Tensor:
    """Attention head by head, as written in the fact sheet."""
    rows, width = x.shape[:2]
    tokens = x.reshape(rows, width, 64).transpose(1, 2)
    inputs = tokens if block.post else F.layer_norm(tokens, (width,), block.norm.weight, block.norm.bias)
    query, key, value = (inputs @ block.qkv.weight.T).split(width, dim=2)
    size = width // block.heads
    parts = []
    for head in range(block.heads):
        span = slice(head * size, (head + 1) * size)
        scores = query[..., span] @ key[..., span].transpose(1, 2) / size**0.5
        scores = scores + block.bias[0, head]
        scores = scores.clamp(-50, 50) if block.post else scores
        near = scores.masked_fill(~blocks.board_mask(), -1e4).softmax(-1) @ value[..., span]
        far = scores.softmax(-1) @ value[..., span]
        parts.append((1 - mix) * near + mix * far if mask else far)
    branch = torch.cat(parts, 2) @ block.proj.weight.T
    out = F.layer_norm(tokens + branch, (width,), block.norm.weight, block.norm.bias) if block.post else tokens + branch
    return out.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("mask, mix", [(False, 0.0), (True, 0.0), (True, 0.2), (True, 1.0)])
def test_attention_equals_a_slow_reference(norm: str, mask: bool, mix: float) -> None:
    config = options(attention=ATTENTION | {"mask": mask, "unmasked_mix": mix, "norm": norm})
    torch.manual_seed(4)
    block = blocks.AttentionBlock(config, 0.0).eval()
    randomise(block)
    with torch.no_grad():
        block.bias.mul_(20)
        x = torch.randn(3, C, 8, 8)
        torch.testing.assert_close(block(x), slow_attention(block, x, mask, mix), rtol=1e-4, atol=1e-4)
        weights = block.mixed(x.flatten(2).transpose(1, 2), torch.eye(64).expand(3, block.heads, -1, -1))
    torch.testing.assert_close(weights.sum(3), torch.ones(3, block.heads, 64))
    assert bool(weights[..., ~blocks.board_mask()].any()) != (mask and mix == 0)


@pytest.mark.parametrize("mix", [0.0, 0.2, 1.0])
def test_matrix0s_scores_are_not_rounded_to_half_precision(mix: float) -> None:
    """Scores of 30 to 40 would be off by up to an eighth in bf16, and shares by as many per cent as they differ."""
    attention = ATTENTION | {"mask": True, "unmasked_mix": mix, "norm": "post"}
    block = blocks.AttentionBlock(options(attention=attention), 0.0).eval()
    query, key, value = (torch.randn(3, 2, 4, 64, C // 4, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
    expected = block._attend_clamped(query.float(), key.float(), value.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = block._attend_clamped(query, key, value)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))
    with torch.no_grad():
        block.bias[0, 1, 3, 4] = torch.nan
    assert block._attend_clamped(query.float(), key.float(), value.float())[:, 1, 3].isnan().all(), "not hidden"


# Activation checkpointing


RANDOM = {"attention": ATTENTION | {"mask": True}, "droppath": 0.2, "dropout": 0.1, "se_ratio": 0.25}


def update(every: int, dtype: torch.dtype, kind: str = "batch", passes: int = 2) -> dict[str, torch.Tensor]:
    """Gradients, buffers and random state after the backward pass of `passes` micro-batches."""
    net = build(norm={"blocks": kind, "momentum": 0.3}, checkpoint_every=every, **RANDOM).train()
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        outs = [net(planes(seed=seed)) for seed in range(passes)]
        loss = torch.stack([out["policy"].square().sum() + out["value"].square().sum() for out in outs]).sum()
    loss.backward()
    result = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert all(m.momentum == 0.3 for m in net.tower.modules() if isinstance(m, nn.BatchNorm2d))
    return result | dict(net.named_buffers()) | {"random state": torch.get_rng_state()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["group", "batch"])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_changes_no_bit(every: int, kind: str, dtype: torch.dtype) -> None:
    """The traps: a second forward pass that moves BatchNorm's statistics again, draws other dropout and DropPath
    masks, leaves the random stream elsewhere, runs outside autocast, or finds the first one's weights in its cache.
    """
    plain, product = update(0, dtype, kind), update(every, dtype, kind)
    assert plain.keys() == product.keys()
    assert sum("num_batches_tracked" in name for name in product) == (2 * BLOCKS if kind == "batch" else 0)
    for name, value in plain.items():
        assert torch.equal(product[name], value), name


@pytest.mark.parametrize(("every", "forwards"), [(0, 6), (1, 12), (2, 9), (7, 6)])
def test_checkpointing_recomputes_every_kth_block_and_keeps_less(every: int, forwards: int) -> None:
    """It is really active: autograd keeps less than without it, a block's tensors for each block that is recomputed."""
    kept: dict[int, list[torch.Tensor]] = {0: [], every: []}  # by storages, whose addresses would be used again
    for k, tensors in kept.items():
        net, ran = build(blocks=6, checkpoint_every=k).train(), list[int]()
        for block in net.tower:
            block.register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, own=tensors: own.append(t) or t, lambda t: t):
            out = net(planes(8))
        (out["policy"].sum() + out["value"].sum()).backward()
    sizes = {
        k: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}.values())
        for k, own in kept.items()
    }
    assert len(ran) == forwards
    assert sizes[0] - sizes[every] >= (forwards - 6) * 4 * 8 * C * 64 * 4, "two norms', two activations' inputs"


def test_an_error_in_the_second_pass_leaves_the_statistics_in_order() -> None:
    """Running out of memory there must not leave BatchNorm with a momentum of 0 or another counter."""
    net = build(norm={"blocks": "batch"}, checkpoint_every=1).train()
    norm, out = net.tower[1].norms[1], net(planes())["policy"].sum()
    hook = net.tower[1].convs[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.backward()
    hook.remove()
    assert (norm.momentum, int(norm.num_batches_tracked)) == (0.1, 1)
    net(planes())["policy"].sum().backward()
    assert int(norm.num_batches_tracked) == 2


def test_the_random_stream_of_mps_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch replays it on CPU and CUDA alone (pytorch issue 127676); a made-up device stands for MPS."""
    state = ["before the first pass"]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: state[0])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda new: state.__setitem__(0, new))
    passes: list[Any] = []
    monkeypatch.setattr(blocks, "checkpoint", lambda block, x, context_fn, **_: passes.extend(context_fn()))
    blocks.checkpointed(nn.Identity(), SimpleNamespace(device=SimpleNamespace(type="mps")))
    state[0] = "after the forward pass"
    with suppress(KeyError), passes[1]:
        assert state[0] == "before the first pass"
        state[0] = "after the second pass"
        raise KeyError  # torch, too, leaves the second pass by an exception as soon as it has all it needs
    assert state[0] == "after the forward pass"


def test_flops_are_of_what_is_asked_for_and_never_of_what_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting takes no random number, and imports no compiler, which takes as long as importing torch."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    net = build(ssl=["threat"], ssl_trunk=False)
    config = net.config
    head = 2 * 64 * (C * C // 2 + C // 2)  # two 1x1 convolutions on 64 squares
    stream = torch.get_rng_state()
    play, both = frozenset({"policy", "value"}), frozenset({"policy", "value", "ssl_threat"})
    assert flops(net, heads=both) - flops(net) == head
    # Three times as much, but for the gradients of what has none: the planes, and the trunk below a detached head.
    assert training_flops(config, play) == 3 * flops(net) - 2 * 64 * 9 * PLANES * C
    assert training_flops(config, both) - training_flops(config, play) == 3 * head - 2 * 64 * C * C // 2
    again = config.model_copy(update={"checkpoint_every": 1})
    assert training_flops(again, both) == training_flops(config, both)
    assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(("policy", "value"), [("conv", "wdl"), ("dense", "scalar"), ("factored", "wdl")])
def test_bf16_autocast_gives_fp32_outputs_near_those_of_fp32(norm: str, policy: str, value: str) -> None:
    attention = ATTENTION | {"norm": norm, "mask": True}
    net = build(attention=attention, se_ratio=0.25, ssl=ALL_SSL, policy={"kind": policy}, value={"kind": value}).eval()
    randomise(net)
    heads = every_head(net) - {"features"}
    with torch.no_grad():
        exact = net(planes(), heads)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(planes(), heads)
    for name in ("policy", "value"):
        assert out[name].dtype == torch.float32
        torch.testing.assert_close(out[name], exact[name], rtol=0.1, atol=0.1 * float(exact[name].abs().max()))
        rounded = out[name] == out[name].bfloat16().float()
        assert rounded.float().mean() < 0.2, "logits are not rounded to half precision"
    assert all(value.dtype == torch.float32 for value in out["ssl"].values())


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["group", "batch"])
def test_the_network_compiles_whole_with_checkpointing(kind: str) -> None:
    """torch.compile in one graph gives the same gradients and the same running statistics."""
    result = []
    for compiled in (False, True):
        net = build(norm={"blocks": kind, "momentum": 0.3}, attention=ATTENTION, lines=8, checkpoint_every=1).train()
        call = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        out = call(planes(8), frozenset({"policy", "value"}))
        (out["policy"].square().sum() + out["value"].square().sum()).backward()
        result.append([p.grad for p in net.parameters() if p.grad is not None] + list(net.buffers()))
    torch.testing.assert_close(*result, rtol=1e-4, atol=1e-5)


def test_only_convolutions_change_their_memory_format() -> None:
    """An attention bias (1, H, 64, 64) in channels_last has no last stride of 1: CUDA's fused attention refuses it."""
    net = build(attention=ATTENTION, chess_features=True)
    _, net = place(net, replace(toy_runtime(), channels_last=True))
    kernels = {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, nn.Conv2d)}
    whole = {name: p for name, p in net.named_parameters() if p.ndim == 4}
    assert {name.rpartition(".")[2] for name in whole.keys() - kernels} == {"bias", "position_encoding"}
    for name, parameter in whole.items():
        format = torch.channels_last if name in kernels else torch.contiguous_format
        assert parameter.is_contiguous(memory_format=format), name


def test_a_network_on_the_meta_device_draws_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing imports torch's compiler, which takes seconds when a network's file is loaded."""
    monkeypatch.setattr(nn.init, "kaiming_normal_", None)
    with torch.device("meta"):
        assert next(PolicyValueNet(ModelConfig()).parameters()).is_meta
