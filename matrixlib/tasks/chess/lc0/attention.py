"""Lc0's attention bodies, new or read, which compute what its src/neural/backends/blas/network_blas.cc does.

Shapes: B positions, 64 squares (a1 = 0) of the board of the side to move, C channels. Errors name the fields of Lc0's
net.proto, whose numbers stand beside the names. ValueError for damaged and unsupported messages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.tasks.chess.blocks import SQUARES, board_mask, in_fp32
from matrixlib.tasks.chess.config import START_PLIES, Lc0Activation, ModelConfig
from matrixlib.tasks.chess.heads import Head
from matrixlib.tasks.chess.lc0.weights import CLOCK, CLOCK_SCALE, NOW, Message, check_format, form_of, read_layer
from matrixlib.tasks.chess.model import HEAD_INIT_SCALE, LC0_PLANES, Lc0AttentionPolicy, PolicyValueNet, Trunk

SE_HEADS, BODIES = 4, (6, 7, 134)  # network formats: of the first attention bodies and later ones, 134 an older 7
ATTENTION, WDL, PE_DENSE, PIECE_PLANES = 3, 2, 2, 12  # formats of policy, value and input embedding; planes
RESIDUAL, ENCODER, SMOLGEN, VALUE_HEADS, POLICY_HEADS = 2, 27, 35, 44, 45  # fields of Weights
VALUE, MOVES_LEFT = (1, 3, 5), (31, 13, 15)  # weights of three layers in ValueHead and Weights
SMOLGEN_CHANNELS = 32  # per square in the smolgen of a new network
Place = tuple[tuple[int, int], ...]  # of a layer in Weights: fields, each with its index if it is repeated, else -1
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
    place: Place = ()  # of the message, as written
    layers: list[tuple[nn.Parameter, Place]] = field(default_factory=list)  # all that were read

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

    def part(self, name: str, field: int, number: int = -1) -> Self:
        place, message = (*self.place, (field, number)), self.message.message(field, number)
        return replace(self, name=f"{self.name}{name}.", message=message, place=place)

    def heads(self, name: str, field: int, names: dict[str, int], old: dict[int, int]) -> Iterator[tuple[str, Self]]:
        """Heads that are not empty by Lc0's names. old: fields of a head -> of Weights in files with one head."""
        if not self.has(field):
            own, (first, number) = self.message.fields, next(iter(names.items()))
            message = Message({new: own[number] for new, number in old.items() if number in own})
            yield first, replace(self, message=message, place=((field, -1), (number, -1)))
        heads = ((head, self.part(name, field).part(head, number)) for head, number in names.items())
        yield from (head for head in heads if head[1].has(3))

    def has(self, *fields: int) -> bool:
        return any(len(self.message.fields.get(field, [b""])[-1]) for field in fields)

    def activation(self, name: str = "activation") -> nn.Module:
        return ACTIVATIONS[self.form[name] or self.form["activation"]]()

    def layer(self, name: str, field: int, *shape: int) -> nn.Parameter:
        """Values of a layer; one size of the shape may be -1."""
        tensor = self.message.fields.get(field, [None])[-1]
        if not isinstance(tensor, Tensor):
            values, size = read_layer(self.name + name, self.message, field), math.prod(shape)
            if not len(values) or (len(values) % size if size < 0 else len(values) != size):
                raise ValueError(f"{self.name}{name} has {len(values):,} values, expected the shape {shape}")
            if not np.isfinite(values).all():
                raise ValueError(f"{self.name}{name} has values that are not finite")
            tensor = torch.from_numpy(values.astype(np.float32))
        parameter = nn.Parameter(tensor.reshape(shape))
        self.layers.append((parameter, (*self.place, (field, -1))))
        return parameter

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


class Stem(nn.Module):
    """Planes (B, 112, 8, 8), or (B, 21, 8, 8) without `history` (default: if it has no weight), -> (B, C, 8, 8)."""

    def __init__(self, part: Part, history: bool | None = None) -> None:
        super().__init__()
        self.map = nn.Buffer(board_mask().float() - 2 * torch.eye(SQUARES), persistent=False)
        self.pieces, self.ffn, extra = None, None, SQUARES
        if part.dense:
            extra = len(part.layer("ip_emb_preproc_b", 38, -1, SQUARES))
            self.pieces = part.linear("ip_emb_preproc", 37, PIECE_PLANES * SQUARES, extra * SQUARES)
        embed = part.linear("ip_emb", 25, LC0_PLANES + extra)
        self.width, self.extra, weight = embed.out_features, extra, embed.weight.detach()
        weight[:, CLOCK] *= CLOCK_SCALE
        self.history = bool(weight[:, 13:104].any()) if history is None else history
        if not self.history:
            embed.weight = nn.Parameter(weight[:, [*NOW, *range(LC0_PLANES, weight.shape[1])]])
            part.layers.append((embed.weight, ((25, -1),)))
        self.embed, self.alpha = nn.Sequential(embed, part.activation()), part.alpha
        if part.dense:
            self.embed.append(part.norm("ip_emb_ln", 39, self.width))
            self.ffn = part.part("ip_emb_ffn", 41).ffn(self.width)
            self.norm = part.norm("ip_emb_ffn_ln", 42, self.width)
        gates = (("ip_mult_gate", 33), ("ip_add_gate", 34)) if part.has(33, 34) else ()
        self.gates = nn.ParameterList(part.layer(name, field, self.width, SQUARES) for name, field in gates)

    def forward(self, planes: Tensor) -> Tensor:
        x = _squares(planes)
        extra = self.map.expand(len(x), -1, -1)
        if self.pieces is not None:
            extra = self.pieces(x[:, :, :PIECE_PLANES].flatten(1)).unflatten(1, (SQUARES, -1))
        x = self.embed(torch.cat([x, extra], dim=2))
        x = x * self.gates[0].t() + self.gates[1].t() if len(self.gates) else x
        return _maps(x if self.ffn is None else self.norm(x + self.alpha * self.ffn(x)))


def _squares(maps: Tensor) -> Tensor:
    """(B, C, 8, 8) -> (B, 64, C)."""
    return maps.flatten(2).transpose(1, 2)


def _maps(squares: Tensor) -> Tensor:
    """(B, 64, C) -> (B, C, 8, 8)."""
    return squares.transpose(1, 2).unflatten(2, (8, 8))


class Encoder(nn.Module):
    """(B, C, 8, 8) -> (B, C, 8, 8). shared: the network's layer of smolgen."""

    def __init__(self, part: Part, width: int, heads: int, shared: Any) -> None:
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
        self.shared = (shared,)  # no submodule: a sharded network gathers it with its root
        self.ffn = part.part("ffn", 4).ffn(width)
        self.norms = nn.ModuleList((part.norm("ln1", 2, width, eps), part.norm("ln2", 5, width, eps)))

    def forward(self, maps: Tensor) -> Tensor:
        x = _squares(maps)
        x = self.norms[0](x + self.alpha * self.dense(self.mixed(x).transpose(1, 2).flatten(2)))
        return _maps(self.norms[1](x + self.alpha * self.ffn(x)))

    def mixed(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        """As `AttentionBlock.mixed`."""
        query, key, own = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        scores = None if self.smolgen is None else self.shared[0](self.smolgen(x)).unflatten(2, (SQUARES, SQUARES))
        return F.scaled_dot_product_attention(query, key, own if values is None else values, scores)


def _smolgen(part: Part, width: int, heads: int, shared: nn.Linear | None) -> nn.Module:
    """(B, 64, C) -> (B, heads, G), of which the shared layer makes scores, added to those of queries and keys."""
    if shared is None:
        raise ValueError(f"{part.name[:-1]} without smolgen_w")
    compress, sizes = part.linear("compress", 1, width, bias=False), (heads, shared.in_features)
    first, activation = part.linear("dense1", 2, SQUARES * len(compress.weight)), part.activation("smolgen_activation")
    second = part.linear("dense2", 6, len(first.bias), math.prod(sizes))
    layers = [compress, nn.Flatten(), first, activation, part.norm("ln1", 4, len(first.bias))]
    return nn.Sequential(*layers, second, activation, part.norm("ln2", 8, len(second.bias)), nn.Unflatten(1, sizes))


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


class Value(nn.Module):
    """(B, 64, C) -> win-draw-loss logits (B, 3), or values (B,); with the fields MOVES_LEFT plies (B,) to the end."""

    def __init__(self, head: Part, width: int, fields: tuple[int, int, int] = VALUE) -> None:
        super().__init__()
        name, moves = ("val", False) if fields == VALUE else ("mov", True)
        self.scalar, self.activation = moves or head.form["value"] != WDL, head.activation()
        self.bound = F.relu if moves else torch.tanh
        self.embed = head.linear(f"ip_{name}", fields[0], width)
        self.fc1 = head.linear(f"ip1_{name}", fields[1], SQUARES * self.embed.out_features)
        self.fc3 = head.linear(f"ip2_{name}", fields[2], self.fc1.out_features, 1 if self.scalar else 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.embed(x)).flatten(1)
        out = in_fp32(self.fc3, self.activation(self.fc1(x)))
        return self.bound(out).flatten() if self.scalar else out


class Heads(nn.ModuleDict):
    """Heads by Lc0's names, of which the chosen one is computed: (B, C, 8, 8) -> its output in fp32."""

    def __init__(self, kind: str, chosen: str, last: str, heads: dict[str, nn.Module]) -> None:
        super().__init__(heads)
        self.kind, self.last, self.chosen = kind, last, chosen
        self.check(chosen)

    def check(self, name: str) -> None:
        if name not in self:
            raise ValueError(f"the network has no {self.kind} head '{name}', it has {', '.join(self) or 'none'}")

    @property
    def output_layer(self) -> nn.Module:
        return self[self.chosen].get_submodule(self.last)

    def forward(self, x: Tensor, moves: Tensor | None = None) -> Tensor:
        return self[self.chosen](_squares(x)).float()


class Body(NamedTuple):
    """Modules of `PolicyValueNet`, and the places of their layers in a file."""

    modules: dict[str, Any]
    places: dict[str, Place]

    @classmethod
    def of(cls, part: Part, history: bool | None = None) -> Self:
        stem = Stem(part, history)
        width, several = stem.width, part.part("policy_heads", POLICY_HEADS)
        shared = part.linear("smolgen", SMOLGEN, -1, SQUARES**2, bias=False) if part.has(SMOLGEN) else None
        encoders = (part.part(f"encoder.{k}", ENCODER, k) for k in range(len(part.message.fields[ENCODER])))
        tower = nn.ModuleList(Encoder(one, width, part.message.integer(28), shared) for one in encoders)
        own = next((one.linear("ip_pol", k, width) for one, k in ((several, 1), (part, 4)) if one.has(k)), None)
        policies = part.heads("policy_heads", POLICY_HEADS, POLICIES, OLD_POLICY)
        policy = Heads("policy", "vanilla", "key", {name: _policy(head, width, own) for name, head in policies})
        values = part.heads("value_heads", VALUE_HEADS, VALUES, OLD_VALUE)
        value = Heads("value", "winner", "fc3", {name: Value(head, width) for name, head in values})
        modules = {"stem": stem, "tower": tower, "policy_head": policy, "value_head": value}
        modules |= {} if shared is None else {"smolgen": shared}
        if part.form["moves_left"]:
            moves = Value(part, width, MOVES_LEFT)
            modules["moves_left_head"] = Heads("moves-left", "moves_left", "fc3", {"moves_left": moves})
        placed = {id(parameter): place for parameter, place in part.layers}
        return cls(modules, {name: placed[id(one)] for name, one in nn.ModuleDict(modules).named_parameters()})


class AttentionNet(PolicyValueNet):
    """A network with an attention body, a new one without `body`. places: of its layers in a file."""

    def __init__(
        self, config: ModelConfig, trunk: Trunk | None = None, heads: Sequence[Head] = (), body: Body | None = None
    ) -> None:
        body = body or Body.of(Part.of(new(config)), config.history)
        super().__init__(config, trunk, heads, body.modules)
        self.places = body.places

    def choose(self, policy: str = "vanilla", value: str = "winner") -> None:
        """Use these heads; ValueError for a head that the network has not, which changes neither."""
        heads: list[tuple[Any, str]] = [(self.policy_head, policy), (self.value_head, value)]
        for head, name in heads:
            head.check(name)
        for head, name in heads:
            head.chosen = name


def build(net: Message) -> tuple[dict[str, Any], Body] | None:
    """(options of `model`, body) of a message `Net`, None if it has no attention body."""
    kind = net.message(4).message(2).integer(3)
    if kind not in BODIES and not (kind == SE_HEADS and ENCODER in net.message(10).fields):
        return None
    part = Part.of(net)
    body, kinds = Body.of(part), get_args(Lc0Activation)
    stem, tower, policy, value = (body.modules[name] for name in ("stem", "tower", "policy_head", "value_head"))
    policy, value, shared = policy[policy.chosen], value[value.chosen], body.modules.get("smolgen")
    activation = "mish" if part.form["activation"] == 1 else "relu"
    options = {
        **{"encoding": "lc0", "trunk": "encoder", "history": stem.history, "channels": stem.width},
        **{"blocks": len(tower), "preact": False, "activation": activation, "ssl": []},
        "norm": {"blocks": "batch", "stem_heads": "batch"},
        "encoder": {
            **{"heads": tower[0].heads, "ffn_ratio": tower[0].ffn[0].out_features / stem.width},
            **{"smolgen": shared.in_features if shared else 0, "dense": stem.extra if part.dense else 0},
            **{name: kinds[part.form[name]] for name in ("ffn_activation", "smolgen_activation")},
        },
        "policy": {"kind": "attention", "channels": policy.embed.out_features, "rank": policy.query.out_features},
        "value": {
            **{"kind": "scalar" if value.scalar else "wdl", "channels": value.embed.out_features},
            **{"hidden": value.fc1.out_features, "activation": activation},
        },
    }
    if moves := body.modules.get("moves_left_head"):
        one = moves["moves_left"]
        options["moves_left"] = {"channels": one.embed.out_features, "hidden": one.fc1.out_features}
    return options, body


def new(config: ModelConfig) -> Message:
    """The message `Net` of a new network, with tensors as layers, of DeepNorm's sizes (Wang et al. 2022,
    https://arxiv.org/abs/2203.00555)."""
    width, options, policy, value = config.channels, config.encoder, config.policy, config.value
    beta, size, extra = (8 * config.blocks) ** -0.25, options.smolgen, options.dense or SQUARES

    def dense(field: int, inputs: int, outputs: int, gain: float = 1.0, bias: bool = True) -> dict[int, Any]:
        weight = torch.randn(outputs, inputs) * (gain * (2 / (inputs + outputs)) ** 0.5)
        return {field: weight} | ({field + 1: torch.zeros(outputs)} if bias else {})

    def norm(field: int, *shape: int) -> dict[int, Any]:
        return {field: torch.ones(shape), field + 1: torch.zeros(shape)}

    def ffn() -> dict[int, Any]:
        hidden = max(1, round(width * options.ffn_ratio))
        return dense(1, width, hidden, beta) | dense(3, hidden, width, beta)

    def smolgen() -> dict[int, Any]:
        inner = options.heads * size
        first = dense(1, width, SMOLGEN_CHANNELS, bias=False) | dense(2, SQUARES * SMOLGEN_CHANNELS, size)
        return first | norm(4, size) | dense(6, size, inner) | norm(8, inner)

    def encoder() -> dict[int, Any]:
        mha = dense(1, width, width) | dense(3, width, width) | dense(5, width, width, beta)
        mha |= dense(7, width, width, beta) | ({9: smolgen()} if size else {})
        return {1: mha, **norm(2, width), 4: ffn(), **norm(5, width)}

    weights: dict[int, Any] = dense(25, LC0_PLANES + extra, width) | norm(33, width, SQUARES) | {28: options.heads}
    weights[25][:, CLOCK] /= CLOCK_SCALE
    if options.dense:
        weights |= dense(37, PIECE_PLANES * SQUARES, extra * SQUARES) | norm(39, width) | {41: ffn()} | norm(42, width)
    weights[ENCODER] = [encoder() for _ in range(config.blocks)]
    weights |= dense(SMOLGEN, size, SQUARES**2, bias=False) if size else {}
    query = dense(3, policy.channels, policy.rank) | dense(5, policy.channels, policy.rank, HEAD_INIT_SCALE)
    head = dense(1, width, value.channels) | dense(3, SQUARES * value.channels, value.hidden)
    last = dense(5, value.hidden, 3 if value.kind == "wdl" else 1, HEAD_INIT_SCALE)
    weights[POLICY_HEADS] = dense(1, width, policy.channels) | {3: query | dense(7, policy.rank, 4, bias=False)}
    weights[VALUE_HEADS] = {1: head | last}
    if moves := config.moves_left.channels:
        embed, first, final = MOVES_LEFT
        weights |= dense(embed, width, moves) | dense(first, SQUARES * moves, config.moves_left.hidden)
        weights |= dense(final, config.moves_left.hidden, 1, HEAD_INIT_SCALE) | {final + 1: torch.tensor([START_PLIES])}
    return Message({4: {2: form_of(config)}, 10: weights})
