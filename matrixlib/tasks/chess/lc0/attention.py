"""Lc0's attention bodies, read from weight files, which compute what its src/neural/backends/blas/network_blas.cc does.

Shapes: B positions, 64 squares (a1 = 0) of the board of the side to move, C channels. Errors name the fields of Lc0's
net.proto, whose numbers stand beside the names. ValueError for damaged and unsupported messages.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.tasks.chess.blocks import SQUARES, board_mask
from matrixlib.tasks.chess.lc0.weights import CLOCK, CLOCK_SCALE, Message, check_format, read_layer
from matrixlib.tasks.chess.model import DEFAULT_HEADS, LC0_PLANES, Lc0AttentionPolicy

SE_HEADS, BODIES = 4, (6, 7, 134)  # network formats: of the first attention bodies and later ones, 134 an older 7
ATTENTION, WDL, PE_DENSE, PIECE_PLANES = 3, 2, 2, 12  # formats of policy, value and input embedding; planes
RESIDUAL, ENCODER, SMOLGEN, VALUE_HEADS, POLICY_HEADS = 2, 27, 35, 44, 45  # fields of Weights
# Heads by Lc0's names -> fields of PolicyHeads and ValueHeads; fields of a head -> of Weights, in files with one head
POLICIES, VALUES = {"vanilla": 3, "optimistic": 4, "soft": 5, "opponent": 6}, {"winner": 1, "q": 2, "st": 3}
OLD_POLICY, OLD_VALUE = {1: 4, 2: 5, 3: 17, 4: 18, 5: 19, 6: 20, 7: 22, 8: 21}, {1: 29, 2: 30, 3: 7, 4: 8, 5: 9, 6: 10}


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


ACTIVATIONS: dict[int, type[nn.Module]] = {1: nn.Mish, 2: nn.ReLU, 3: nn.Identity, 4: nn.Tanh, 5: nn.Sigmoid}
ACTIVATIONS |= {6: nn.SELU, 7: nn.SiLU, 8: SquaredReLU}


@dataclass(frozen=True)
class Part:
    """A message of the weights."""

    name: str  # for errors
    message: Message
    form: dict[str, int]  # of the file, see `check_format`
    dense: bool  # input embedding PE_DENSE
    alpha: float  # weight of residual branches

    @classmethod
    def of(cls, net: Message) -> Self:
        """The weights of a message `Net`."""
        form, weights = check_format(net.message(4)), net.message(10)
        count = len(weights.fields.get(ENCODER, ()))
        if form["network"] in (SE_HEADS, 6) and {VALUE_HEADS, POLICY_HEADS} <= weights.fields.keys():
            form["input_embedding"] = PE_DENSE  # as Lc0 reads files from before some fields
        if form["network"] == SE_HEADS and SMOLGEN in weights.fields:
            form |= {"smolgen_activation": 7, "ffn_activation": 8}
        form["activation"] = 1 if form["activation"] else 2
        if form["policy"] != ATTENTION or RESIDUAL in weights.fields or not count:
            raise ValueError("unsupported: an attention body with residual, without encoder or with another policy")
        return cls("", weights, form, form["input_embedding"] == PE_DENSE, (2 * count) ** -0.25)

    def part(self, name: str, field: int, place: int = -1) -> Self:
        return replace(self, name=f"{self.name}{name}.", message=self.message.message(field, place))

    def heads(self, name: str, field: int, names: dict[str, int], old: dict[int, int]) -> Iterator[tuple[str, Self]]:
        """Heads that are not empty by Lc0's names. old: fields of a head -> of Weights in files with one head."""
        if not self.has(field):
            message, own = Message(memoryview(b"")), self.message.fields
            message.fields = {new: own[number] for new, number in old.items() if number in own}
            yield next(iter(names)), replace(self, message=message)
        heads = ((head, self.part(name, field).part(head, number)) for head, number in names.items())
        yield from (head for head in heads if head[1].has(3))

    def has(self, *fields: int) -> bool:
        return any(len(self.message.chunk(field)) for field in fields)

    def activation(self, name: str = "activation") -> nn.Module:
        return ACTIVATIONS[self.form[name] or self.form["activation"]]()

    def layer(self, name: str, field: int, *shape: int) -> nn.Parameter:
        """Values of a layer; one size of the shape may be -1."""
        values, size = read_layer(self.name + name, self.message, field), math.prod(shape)
        if not len(values) or (len(values) % size if size < 0 else len(values) != size):
            raise ValueError(f"{self.name}{name} has {len(values):,} values, expected the shape {shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"{self.name}{name} has values that are not finite")
        return nn.Parameter(torch.from_numpy(values.astype(np.float32)).reshape(shape))

    def linear(self, name: str, field: int, inputs: int, outputs: int = -1, bias: bool = True) -> nn.Linear:
        """A dense layer: weights in a field, biases in the next; one size may be -1."""
        biases = [self.layer(f"{name}_b", field + 1, outputs)] if bias else []
        weight = self.layer(f"{name}_w", field, len(biases[0]) if bias else outputs, inputs)
        return _filled(nn.Linear(weight.shape[1], len(weight), bias, device="meta"), weight, *biases)

    def norm(self, name: str, field: int, width: int, eps: float = 1e-3) -> nn.LayerNorm:
        """A layer norm: gammas in a field, betas in the next."""
        gammas, betas = self.layer(f"{name}_gammas", field, width), self.layer(f"{name}_betas", field + 1, width)
        return _filled(nn.LayerNorm(width, eps, device="meta"), gammas, betas)

    def ffn(self, width: int) -> nn.Sequential:
        first, activation = self.linear("dense1", 1, width), self.activation("ffn_activation")
        return nn.Sequential(first, activation, self.linear("dense2", 3, first.out_features, width))


def _filled(layer: Any, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Any:
    layer.weight, layer.bias = weight, bias
    return layer


class Encoder(nn.Module):
    """(B, 64, C) -> (B, 64, C). shared: the network's layer of smolgen."""

    def __init__(self, part: Part, width: int, heads: int, shared: nn.Linear | None) -> None:
        super().__init__()
        mha, eps = part.part("mha", 1), 1e-3 if part.dense else 1e-6
        if mha.has(10, 11, 12):
            raise ValueError(f"unsupported: {mha.name}rpe_q, rpe_k, rpe_v")
        query, self.heads, self.alpha = mha.linear("q", 1, width), heads, part.alpha
        inner = query.out_features
        if heads < 1 or inner % heads:
            raise ValueError(f"headcount {heads} does not divide the {inner:,} values of {mha.name}q_b")
        self.qkv = nn.ModuleList((query, mha.linear("k", 3, width, inner), mha.linear("v", 5, width, inner)))
        self.dense = mha.linear("dense", 7, inner, width)
        self.smolgen = _smolgen(mha.part("smolgen", 9), width, heads, shared) if mha.has(9) else None
        self.ffn = part.part("ffn", 4).ffn(width)
        self.norms = nn.ModuleList((part.norm("ln1", 2, width, eps), part.norm("ln2", 5, width, eps)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.alpha * self.dense(self.mixed(x).transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.alpha * self.ffn(x))

    def mixed(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        """As `AttentionBlock.mixed`."""
        query, key, own = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        bias = None if self.smolgen is None else self.smolgen(x)
        return F.scaled_dot_product_attention(query, key, own if values is None else values, bias)


def _smolgen(part: Part, width: int, heads: int, shared: nn.Linear | None) -> nn.Module:
    """(B, 64, C) -> scores (B, heads, 64, 64) from the whole board, added to those of queries and keys."""
    if shared is None:
        raise ValueError(f"{part.name[:-1]} without smolgen_w")
    compress, sizes = part.linear("compress", 1, width, bias=False), (heads, shared.in_features)
    first, activation = part.linear("dense1", 2, SQUARES * len(compress.weight)), part.activation("smolgen_activation")
    second = part.linear("dense2", 6, len(first.bias), math.prod(sizes))
    layers = [compress, nn.Flatten(), first, activation, part.norm("ln1", 4, len(first.bias))]
    layers += [second, activation, part.norm("ln2", 8, len(second.bias)), nn.Unflatten(1, sizes), shared]
    return nn.Sequential(*layers, nn.Unflatten(2, (SQUARES, SQUARES)))


def _policy(head: Part, width: int, embed: nn.Linear | None) -> nn.Module:
    """embed: layer of heads that have none of their own."""
    if head.has(8):
        raise ValueError(f"unsupported: {head.name}pol_encoder")
    embed = head.linear("ip_pol", 1, width) if embed is None or head.has(1) else embed
    query = head.linear("ip2_pol", 3, embed.out_features)
    width, inner = embed.out_features, query.out_features
    with torch.device("meta"):
        policy = Lc0AttentionPolicy(1, width, inner, head.activation())
    policy.embed, policy.query, policy.key = embed, query, head.linear("ip3_pol", 5, width, inner)
    policy.pieces = head.linear("ip4_pol", 7, inner, 4, bias=False)
    return policy


def _value(head: Part, width: int) -> nn.Module:
    embed, wdl = head.linear("ip_val", 1, width), head.form["value"] == WDL
    first = head.linear("ip1_val", 3, SQUARES * embed.out_features)
    last = head.linear("ip2_val", 5, first.out_features, 3 if wdl else 1)
    scalar = () if wdl else (nn.Tanh(), nn.Flatten(0))
    return nn.Sequential(embed, head.activation(), nn.Flatten(), first, head.activation(), last, *scalar)


class AttentionNet(nn.Module):
    """A network with an attention body, behind the interface of `PolicyValueNet`.

    tower: the encoders. policies, values: heads by Lc0's names, of which those of `choose` are computed.
    """

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.map = nn.Buffer(board_mask().float() - 2 * torch.eye(SQUARES), persistent=False)
        self.pieces, self.ffn, extra = None, None, SQUARES
        if part.dense:
            extra = len(part.layer("ip_emb_preproc_b", 38, -1, SQUARES))
            self.pieces = part.linear("ip_emb_preproc", 37, PIECE_PLANES * SQUARES, extra * SQUARES)
        embed = part.linear("ip_emb", 25, LC0_PLANES + extra)
        with torch.no_grad():
            embed.weight[:, CLOCK] *= CLOCK_SCALE
        self.width = width = embed.out_features
        self.embed, self.alpha = nn.Sequential(embed, part.activation()), part.alpha
        if part.dense:
            self.embed.append(part.norm("ip_emb_ln", 39, width))
            self.ffn, self.norm = part.part("ip_emb_ffn", 41).ffn(width), part.norm("ip_emb_ffn_ln", 42, width)
        gates = (("ip_mult_gate", 33), ("ip_add_gate", 34)) if part.has(33, 34) else ()
        self.gates = nn.ParameterList(part.layer(name, field, width, SQUARES) for name, field in gates)
        shared = part.linear("smolgen", SMOLGEN, -1, SQUARES**2, bias=False) if part.has(SMOLGEN) else None
        encoders = (part.part(f"encoder.{k}", ENCODER, k) for k in range(len(part.message.fields[ENCODER])))
        self.tower = nn.ModuleList(Encoder(one, width, part.message.integer(28), shared) for one in encoders)
        several = part.part("policy_heads", POLICY_HEADS)
        own = next((one.linear("ip_pol", k, width) for one, k in ((several, 1), (part, 4)) if one.has(k)), None)
        policies = part.heads("policy_heads", POLICY_HEADS, POLICIES, OLD_POLICY)
        self.policies = nn.ModuleDict({name: _policy(head, width, own) for name, head in policies})
        values = part.heads("value_heads", VALUE_HEADS, VALUES, OLD_VALUE)
        self.values = nn.ModuleDict({name: _value(head, width) for name, head in values})
        self.choose()

    def choose(self, policy: str = "vanilla", value: str = "winner") -> None:
        """Use these heads; ValueError for a head that the network has not."""
        for kind, name, heads in (("policy", policy, self.policies), ("value", value, self.values)):
            if name not in heads:
                raise ValueError(f"the network has no {kind} head '{name}', it has {', '.join(heads) or 'none'}")
        self.chosen = (policy, value)

    def forward(self, planes: Tensor, heads: frozenset[str] | None = None) -> dict[str, Any]:
        """As `PolicyValueNet.forward`: "policy" (B, 1858), "value", "stream"."""
        names, (policy, value) = DEFAULT_HEADS if heads is None else heads, self.chosen
        x = planes.flatten(2).transpose(1, 2)
        extra = self.map.expand(len(x), -1, -1)
        if self.pieces is not None:
            extra = self.pieces(x[:, :, :PIECE_PLANES].flatten(1)).unflatten(1, (SQUARES, -1))
        x = self.embed(torch.cat([x, extra], dim=2))
        x = x * self.gates[0].t() + self.gates[1].t() if len(self.gates) else x
        x = x if self.ffn is None else self.norm(x + self.alpha * self.ffn(x))
        stream = [x]
        for block in self.tower:
            x = block(x)
            stream += [x] if "stream" in names else []
        maps = {"stream": [one.transpose(1, 2).unflatten(2, (8, 8)) for one in stream]} if "stream" in names else {}
        chosen = {"policy": self.policies[policy], "value": self.values[value]}
        return maps | {name: head(x).float() for name, head in chosen.items() if name in names}


def build(net: Message) -> tuple[dict[str, Any], AttentionNet] | None:
    """(options of `model`, network) of a message `Net`, None if it has no attention body."""
    kind = net.message(4).message(2).integer(3)
    if kind not in BODIES and not (kind == SE_HEADS and ENCODER in net.message(10).fields):
        return None
    part = Part.of(net)
    model = AttentionNet(part)
    value = "wdl" if part.form["value"] == WDL else "scalar"
    options = {
        **{"encoding": "lc0", "history": True, "channels": model.width, "blocks": len(model.tower)},
        **{"preact": False, "activation": "relu", "norm": {"blocks": "batch", "stem_heads": "batch"}, "ssl": []},
        **{"policy": {"kind": "attention"}, "value": {"kind": value, "activation": "relu"}},
    }
    return options, model
