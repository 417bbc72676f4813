"""The chess network: a residual tower with policy, value and self-supervised heads.

Matrix0's 53-million-parameter network is the preset `params/matrix0_53m.yaml`.

Shapes: B positions, C trunk channels, 8 rows, 8 columns; row 0 is rank 1 of the side to move (`encoding: oriented`) or
rank 8 of White's board (`matrix0`), column 0 the a-file.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from matrixlib.engine.compiler import Watch
from matrixlib.tasks.chess.blocks import (
    ACTIVATIONS,
    SQUARES,
    AttentionBlock,
    ChessFeatures,
    ConvNorm,
    OpenLines,
    ResidualBlock,
    checkpointed,
    in_fp32,
)
from matrixlib.tasks.chess.config import SSL_CHANNELS, START_PLIES, ModelConfig, ValueHeadConfig
from matrixlib.tasks.chess.lc0.moves import CONV_PLANES, POLICY_SIZE, attention_table, plane_table
from matrixlib.tasks.chess.planes import PLANES, move_keys

if TYPE_CHECKING:
    from matrixlib.tasks.chess.heads import Head

MOVE_PLANES = 73
MOVES = SQUARES * MOVE_PLANES
AUXILIARY_CHANNELS = {"from_square": 64, "move_type": 12}
AUXILIARY_WIDTH = 32
HEAD_INIT_SCALE = 0.1  # of the heads' output layers; with zeros the trunk would get no gradient
DEFAULT_HEADS = frozenset({"policy", "value"})
RESERVED_NAMES = DEFAULT_HEADS | {"features", "stream", "moves_left"}
Trunk = Callable[[ModelConfig], nn.Module]
LC0_PLANES, LC0_PLANES_NOW = 112, 21  # with and without the history


def input_planes(config: ModelConfig) -> int:
    return PLANES if config.encoding != "lc0" else LC0_PLANES if config.history else LC0_PLANES_NOW


class FlopCounter(Watch):
    """FLOPs of what runs inside, by torch's formulas."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def flops(net: nn.Module, planes: int = PLANES, heads: frozenset[str] = DEFAULT_HEADS, backward: bool = False) -> int:
    """FLOPs per position of the forward pass (and `backward` pass), a multiply-add being two: convolutions, linear
    layers, attention. planes: input planes. heads: as in `PolicyValueNet.forward`."""
    board = torch.zeros(1, planes, 8, 8, device=next(net.parameters()).device)
    # There is no formula for fused attention on the CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter, torch.set_grad_enabled(backward):
        out = net(board, heads)
        if backward:
            torch.stack([o.sum() for o in (*out.pop("ssl", {}).values(), *out.values())]).sum().backward()
    return counter.total


@functools.lru_cache
def training_flops(
    config: ModelConfig, heads: frozenset[str], *parts: Any, network: "Callable[..., PolicyValueNet] | None" = None
) -> int:
    """Training FLOPs per position, without recomputation by activation checkpointing. parts: custom trunk and heads."""
    # On the CPU: operations on tensors without data import torch's compiler
    with torch.random.fork_rng(devices=()):
        net = (network or PolicyValueNet)(config.model_copy(update={"checkpoint_every": 0}), *parts)
        return flops(net, input_planes(config), heads, backward=True)


class AttentionPolicy(nn.Module):
    """Leela's attention policy: squares (B, 64, C) -> fp32 logits (B, 4672), or (B, L) of `moves` only, 0 in pads.

    Logit = query(from-square) . key(to-square) + bias(pair); under-promotions add a vector of the piece to the key.
    Policy indices that are no move get an arbitrary logit.
    """

    ends: Tensor
    place: Tensor

    def __init__(self, channels: int, width: int, encoding: str) -> None:
        super().__init__()
        ends, place = move_keys(encoding)
        self.query, self.key = nn.Linear(channels, width), nn.Linear(channels, width)
        self.piece = nn.Parameter(torch.zeros(3, 1, width))
        self.bias = nn.Parameter(torch.zeros(SQUARES, SQUARES + 3 * len(ends)))
        self.register_buffer("ends", ends, persistent=False)
        self.register_buffer("place", place, persistent=False)

    def forward(self, squares: Tensor, moves: Tensor | None = None) -> Tensor:
        query, key = self.query(squares), self.key(squares).float()
        query = query * key.shape[2] ** -0.5
        if moves is not None:
            return self._logits_of(query.float(), key, moves)
        keys = torch.cat([key, (key[:, None, self.ends] + self.piece).flatten(1, 2)], dim=1)
        # matmul + bias, and index_select: baddbmm and gather are a quarter slower on a CPU
        pairs = in_fp32(torch.matmul, query, keys.transpose(1, 2)) + self.bias
        return pairs.flatten(1).index_select(1, self.place)

    def _logits_of(self, query: Tensor, key: Tensor, moves: Tensor) -> Tensor:
        known = moves >= 0
        place = self.place[moves[known].long()]
        column, first = place % self.bias.shape[1], SQUARES * known.nonzero()[:, 0]
        targets = torch.cat([torch.arange(SQUARES, device=place.device), self.ends.repeat(3)])
        pieces = F.pad(self.piece.expand(-1, len(self.ends), -1).flatten(0, 1), (0, 0, SQUARES, 0))
        ours = query.flatten(0, 1).index_select(0, first + place // self.bias.shape[1])
        theirs = key.flatten(0, 1).index_select(0, first + targets[column]) + pieces.index_select(0, column)
        logits = (ours * theirs).sum(1) + self.bias.flatten().index_select(0, place)
        return logits.new_zeros(moves.shape).masked_scatter(known, logits)


class Lc0AttentionPolicy(nn.Module):
    """Lc0's attention policy: (B, 64, C) -> fp32 logits (B, 1858). Promotions add key(to-square) . vector(piece)."""

    place: Tensor

    def __init__(self, channels: int, embedding: int, width: int, activation: Any = F.selu) -> None:
        super().__init__()
        self.embed, self.activation = nn.Linear(channels, embedding), activation
        self.query, self.key = nn.Linear(embedding, width), nn.Linear(embedding, width)
        self.pieces = nn.Linear(width, 4, bias=False)  # queen, rook, bishop, and what they have in common
        self.register_buffer("place", torch.from_numpy(attention_table()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.activation(self.embed(x))
        key = self.key(squares)
        pairs = in_fp32(torch.matmul, self.query(squares) * key.shape[2] ** -0.5, key.transpose(1, 2))
        pieces = in_fp32(self.pieces, key[:, 56:])  # (B, 8 files, 4)
        promotions = pairs[:, 48:56, 56:, None] + (pieces[..., :3] + pieces[..., 3:])[:, None]
        return torch.cat([pairs.flatten(1), promotions.flatten(1)], dim=1).index_select(1, self.place)


class PolicyHead(nn.Module):
    """(B, C, 8, 8) -> logits (B, 4672), index = from-square * 73 + plane, or Lc0's (B, 1858), illegal ones unmasked.

    moves: policy indices (B, L); the `attention` head computes only their logits (B, L), the other kinds ignore them.
    With `clamp` c inputs and logits are clamped to +-c and hidden values to +-2c, as in Matrix0. The output layer is in
    fp32: in bf16, with steps of 1/128 between 1 and 2, moves would tie in a search.
    """

    order: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        options = config.policy
        lc0 = config.encoding == "lc0"
        planes = lc0 and options.kind == "conv"
        self.lc0_attention = lc0 and options.kind == "attention"
        self.input: nn.Module = nn.Identity()
        if not self.lc0_attention:
            self.input = ConvNorm(config, config.channels, options.channels, 3 if planes else 1)
        self.register_buffer("order", torch.from_numpy(plane_table()) if planes else None, persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.kind, self.clamp = options.kind, options.clamp
        self.flip = config.encoding == "matrix0"  # whose row 0 is rank 8
        flat = options.channels * SQUARES
        if planes:
            self.planes = nn.Conv2d(options.channels, CONV_PLANES, 3, padding=1)
        elif options.kind == "conv":
            self.planes = nn.Conv2d(options.channels, MOVE_PLANES, 1)
        elif self.lc0_attention:
            self.pairs: nn.Module = Lc0AttentionPolicy(config.channels, options.channels, options.rank)
        elif options.kind == "attention":
            self.pairs = AttentionPolicy(options.channels, options.rank, config.encoding)
        elif options.kind == "dense":
            self.dense = nn.Linear(flat, POLICY_SIZE if lc0 else MOVES)
        else:
            self.reduce = nn.Linear(flat, options.rank)
            self.expand = nn.Linear(options.rank, MOVES)
        self.logit_norm = nn.LayerNorm(MOVES) if options.logit_norm else None

    @property
    def output_layer(self) -> nn.Module:
        """The layer that computes the logits."""
        names = {"conv": "planes", "attention": "pairs.key", "dense": "dense", "factored": "expand"}
        return self.get_submodule(names[self.kind])

    def clamped(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x.clamp(-factor * self.clamp, factor * self.clamp) if self.clamp else x

    def forward(self, x: Tensor, moves: Tensor | None = None) -> Tensor:
        x = self.dropout(self.clamped(self.input(x)))
        if self.kind == "conv":
            planes = in_fp32(self.planes, x)
            if self.order is not None:
                logits = planes.flatten(1).index_select(1, self.order)
            else:
                logits = (planes.flip(2) if self.flip else planes).permute(0, 2, 3, 1).flatten(1)
        elif self.lc0_attention:
            logits = self.pairs(x.flatten(2).transpose(1, 2))
        elif self.kind == "attention":
            squares = (x.flip(2) if self.flip else x).flatten(2).transpose(1, 2)
            logits = self.pairs(squares, moves if self.logit_norm is None else None)
        elif self.kind == "dense":
            logits = self.clamped(in_fp32(self.dense, x.flatten(1)), 2)
        else:
            inner = self.clamped(F.relu(self.reduce(x.flatten(1))), 2)
            logits = self.clamped(in_fp32(self.expand, inner), 2)
        if self.logit_norm is not None:
            logits = self.logit_norm(logits.float())
        return self.clamped(logits.float())


class ValueHead(nn.Module):
    """(B, C, 8, 8) -> win-draw-loss logits (B, 3) of the side to move, or values (B,) in [-1, 1]; output in fp32. Lc0's
    has one hidden layer, the others two. options: default `config.value`."""

    def __init__(self, config: ModelConfig, options: ValueHeadConfig | None = None) -> None:
        super().__init__()
        options = options or config.value
        self.input = ConvNorm(config, config.channels, options.channels, 1)
        self.dropout = nn.Dropout(config.dropout)
        self.scalar, self.pool = options.kind == "scalar", options.pool
        self.bound: Callable[[Tensor], Tensor] = torch.tanh
        self.attention = nn.Conv2d(options.channels, 1, 1, bias=False) if options.pool == "attention" else None
        self.activation = ACTIVATIONS[options.activation]
        half = options.hidden if config.encoding == "lc0" else max(1, options.hidden // 2)
        self.fc1 = nn.Linear(options.channels * (SQUARES if options.pool == "flatten" else 1), options.hidden)
        self.fc2 = nn.Linear(options.hidden, half) if config.encoding != "lc0" else None
        self.fc3 = nn.Linear(half, 1 if self.scalar else 3)

    @property
    def output_layer(self) -> nn.Module:
        return self.fc3

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.input(x))
        if self.attention is not None:
            weights = self.attention(x).float().flatten(1).softmax(1).to(x.dtype)  # (B, 64)
            x = torch.einsum("bcs,bs->bc", x.flatten(2), weights)
        else:
            x = x.mean((2, 3)) if self.pool == "pooled" else x.flatten(1)
        x = self.activation(self.fc1(x))
        out = in_fp32(self.fc3, x if self.fc2 is None else self.activation(self.fc2(x))).float()
        return self.bound(out).squeeze(1) if self.scalar else out


class MovesLeftHead(ValueHead):
    """Lc0's: (B, C, 8, 8) -> plies (B,) to the end of the game."""

    def __init__(self, config: ModelConfig) -> None:
        sizes = config.moves_left.model_dump()
        super().__init__(config, ValueHeadConfig(kind="scalar", activation=config.activation, **sizes))
        self.bound = F.relu


class SquareHead(nn.Module):
    """Two 1x1 convolutions: (B, C, 8, 8) -> logits per square (B, outputs, 8, 8)."""

    def __init__(self, config: ModelConfig, width: int, outputs: int) -> None:
        super().__init__()
        self.input = ConvNorm(config, config.channels, width, 1)
        self.out = nn.Conv2d(width, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.input(x)).float()


class PolicyValueNet(nn.Module):
    """The chess network: planes -> trunk -> heads by name.

    trunk: builds a custom trunk (B, 19, 8, 8) -> (B, config.channels, 8, 8). heads: custom heads. Both keep their own
    initialisation. body: stem, tower, policy_head, value_head and others, initialised, in place of ours.
    Matrix0's auxiliary heads are frozen and exist only for its checkpoints.
    ValueError for widths that GroupNorm cannot divide, a trunk with another output shape and a duplicate head name.
    """

    def __init__(
        self,
        config: ModelConfig,
        trunk: Trunk | None = None,
        heads: Sequence["Head"] = (),
        body: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.temperature: nn.Module | None = None  # learned distillation temperature
        self.features: nn.Module | None = None
        self.lines: nn.Module | None = None
        self.ssl_chunk = 0  # positions per chunk of the self-supervised heads; 0: the whole batch
        width = config.channels
        if trunk is None and body is None:
            self.stem = ConvNorm(config, input_planes(config), width, 3)
            self.features = ChessFeatures(config) if config.chess_features else None
            self.lines = OpenLines() if config.lines else None
            self.tower = nn.ModuleList(_build_tower(config))
        if body is None:
            self.policy_head = PolicyHead(config)
            self.value_head = ValueHead(config)
            if config.moves_left.channels:
                self.moves_left_head = MovesLeftHead(config)
        inner = max(1, width // 2)
        self.ssl_heads = nn.ModuleDict({name: SquareHead(config, inner, SSL_CHANNELS[name]) for name in config.ssl})
        auxiliary = AUXILIARY_CHANNELS.items() if config.auxiliary else ()
        self.auxiliary = nn.ModuleDict({name: SquareHead(config, AUXILIARY_WIDTH, n) for name, n in auxiliary})
        self.auxiliary.requires_grad_(False)
        _initialise(self, tower_depth(config))
        for name, module in (body or {}).items():
            self.add_module(name, module)
        self.own_trunk = None if trunk is None else _check_trunk(trunk(config), config)
        names = [head.name for head in heads]
        for name in names:
            if name in RESERVED_NAMES or name.startswith("ssl_") or names.count(name) > 1:
                raise ValueError(f"heads: the name '{name}' is taken; rename your head")
        self.own_heads = nn.ModuleDict({head.name: head.build(config) for head in heads})

    def forward(
        self, planes: Tensor, heads: frozenset[str] | None = None, moves: Tensor | None = None
    ) -> dict[str, Any]:
        """Outputs for `planes` (B, C, 8, 8), of those that `heads` names (default: policy and value):

        "policy": logits (B, 4672), of Lc0's moves (B, 1858), or (B, L) of the policy indices `moves` (B, L) where that
        is cheaper.
        "value": logits (B, 3), or values (B,) in [-1, 1].  "ssl_<name>": logits out["ssl"][name] (B, c, 8, 8).
        "moves_left": plies (B,) to the end of the game, of networks with this head.
        custom heads: (B, ...).  "features": trunk output (B, C, 8, 8).  "stream": list as in `trunk`.
        All are fp32 but the last two. ValueError for an unknown head.
        """
        names = DEFAULT_HEADS if heads is None else heads
        known = {*RESERVED_NAMES} - (set() if self.config.moves_left.channels else {"moves_left"})
        known |= {*(f"ssl_{name}" for name in self.ssl_heads), *self.own_heads}
        if unknown := sorted(names - known):
            raise ValueError(f"the network has no head {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        stream: list[Tensor] | None = [] if "stream" in names else None
        x = self.trunk(planes, stream)
        out: dict[str, Any] = {} if stream is None else {"stream": stream}
        if "policy" in names:
            out["policy"] = self.policy_head(x, moves)
        if "value" in names:
            out["value"] = self.value_head(x)
        if "moves_left" in names:
            out["moves_left"] = self.moves_left_head(x)
        if "features" in names:
            out["features"] = x
        shared = x if self.config.ssl_trunk else x.detach()
        ssl = {name: head for name, head in self.ssl_heads.items() if f"ssl_{name}" in names}
        if ssl:
            out["ssl"] = {name: _in_chunks(head, shared, self.ssl_chunk) for name, head in ssl.items()}
        return out | {name: head(x).float() for name, head in self.own_heads.items() if name in names}

    def edges(self) -> list[nn.Module]:
        """Input and output layers, which Muon leaves to Adam; custom heads as a whole."""
        first = [self.stem] if self.own_trunk is None else []
        squares = [module.out for module in self.modules() if isinstance(module, SquareHead)]
        heads = [self.policy_head.output_layer, self.value_head.output_layer]
        if self.config.moves_left.channels:
            heads.append(self.moves_left_head.output_layer)
        return [*first, *heads, *squares, *self.own_heads.values()]

    def parts(self) -> list[nn.Module]:
        """The FSDP units: modules that a sharded network gathers one at a time."""
        return list(self.tower) if self.own_trunk is None else [self.own_trunk]

    def trunk(self, planes: Tensor, stream: list[Tensor] | None = None) -> Tensor:
        """Features (B, C, 8, 8). stream: list to which the input of the first block and the output of each block are
        appended, each (B, C, 8, 8); ValueError with a custom trunk."""
        if self.own_trunk is not None:
            if stream is not None:
                raise ValueError("a custom trunk has no known blocks to compare: set teacher.features to 0")
            return self.own_trunk(planes)
        x = self.stem(planes)
        if self.features is not None:
            x = self.features(x)
        lines = [] if self.lines is None else self.lines(planes)
        every = self.config.checkpoint_every if self.training and torch.is_grad_enabled() else 0
        for number, block in enumerate(self.tower, start=1):
            if stream is not None:
                stream.append(x)
            inputs = (x, lines) if lines and isinstance(block, ResidualBlock) else (x,)
            x = checkpointed(block, *inputs) if every and number % every == 0 else block(*inputs)
        if stream is not None:
            stream.append(x)
        return x


def _check_trunk(trunk: nn.Module, config: ModelConfig) -> nn.Module:
    """Check the output shape of a custom trunk on one position."""
    device = next((parameter.device for parameter in trunk.parameters()), torch.device("cpu"))
    with torch.no_grad():
        shape = tuple(trunk.eval()(torch.zeros(1, input_planes(config), 8, 8, device=device)).shape)
    if shape != (1, config.channels, 8, 8):
        raise ValueError(
            f"trunk: its output for one position is {shape}, expected (1, model.channels {config.channels}, 8, 8)"
        )
    return trunk.train()


def _in_chunks(head: nn.Module, x: Tensor, rows: int) -> Tensor:
    """head(x) in chunks of `rows` rows (0: no chunks), recomputed in the backward pass to keep one chunk in memory."""
    if not rows or rows >= len(x):
        return head(x)
    run = functools.partial(checkpointed, head) if torch.is_grad_enabled() else head
    return torch.cat([run(part) for part in x.split(rows)])


def tower_depth(config: ModelConfig) -> int:
    every = config.attention.every
    return config.blocks + (config.blocks // every if every else 0)


def _build_tower(config: ModelConfig) -> list[nn.Module]:
    """Residual blocks with an attention block after every k-th; the DropPath rate grows linearly with depth."""
    every, count = config.attention.every + 1, tower_depth(config)
    kinds = [AttentionBlock if every > 1 and k % every == 0 else ResidualBlock for k in range(1, count + 1)]
    return [kind(config, config.droppath * index / max(1, count - 1)) for index, kind in enumerate(kinds)]


def _initialise(net: PolicyValueNet, blocks: int) -> None:
    """He-normal convolutions, Xavier linear layers; scaled-down output layers of heads and residual branches."""
    if any(parameter.is_meta for parameter in net.parameters()):
        return  # `normal_` of a tensor without values would import torch._dynamo, which takes seconds
    # Losses start at chance level and the sum of all branches at about the size of one. Exception: post-activation
    # blocks without ReLU, where the activation shrinks the stream at every block.
    scaled: list[tuple[nn.Module | None, float]] = []
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, PolicyHead):
            scaled.append((module.logit_norm or module.output_layer, HEAD_INIT_SCALE))
        elif isinstance(module, ValueHead):
            # Attention pooling starts close to uniform
            scaled += [(module.fc3, HEAD_INIT_SCALE), (module.attention, HEAD_INIT_SCALE)]
        elif isinstance(module, SquareHead):
            scaled.append((module.out, HEAD_INIT_SCALE))
        elif isinstance(module, AttentionBlock) and not module.post:
            scaled.append((module.proj, blocks**-0.5))
        elif isinstance(module, ResidualBlock) and (module.preact or module.activation is F.relu):
            scaled.append(((module.convs if module.preact else module.norms)[-1], blocks**-0.5))
    with torch.no_grad():
        for layer, factor in scaled:
            if layer is not None:
                layer.get_parameter("weight").mul_(factor)
        for module in net.modules():
            if isinstance(module, MovesLeftHead):  # its ReLU would die at 0
                module.fc3.bias.fill_(START_PLIES)
