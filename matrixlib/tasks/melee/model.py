"""Imitation networks and losses: a frame's state and held controller, a trunk, six heads.

Shapes: B rows, T frames, N inputs of a frame, W width, ... any leading dimensions; `choices` (..., 13) and `logits`
(..., 81) as in controller.py. Trunks are causal. Training runs `forward` over windows; play runs `step` frame by frame
with explicit memory: a tuple of tensors with first size B.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.tasks.melee.columns import CHARACTERS
from matrixlib.tasks.melee.config import MeleeModelConfig
from matrixlib.tasks.melee.controller import HEADS, LOGITS, Head
from matrixlib.tasks.melee.windows import ACTIONS, INPUTS
from matrixlib.tasks.transformer import Block

State = tuple[Tensor, ...]
Correct = Callable[[Head, Tensor], Tensor]
ROTATION = 10_000.0  # longest wavelength of the rotary embedding
SHOULDER_SHARE = 2  # the shoulder's head is so many times narrower
DEVIATION = 0.02  # of the last weights: a fresh network is nearly the constant predictor
SIZES = [head.classes for head in HEADS]


def norm(config: MeleeModelConfig) -> nn.Module:
    return nn.RMSNorm(config.width) if config.norm == "rms" else nn.LayerNorm(config.width)


class Trunk(nn.Module):
    """(B, T, W) to (B, T, W), without memory: single frames."""

    def initial(self, rows: int) -> State:
        """Memory before the first frame."""
        return ()

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One frame (B, W), and the memory after it."""
        y: Tensor = self(x)
        return y, state


class Mlp(Trunk):
    """Dense layers with a norm before each activation."""

    def __init__(self, config: MeleeModelConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(config) for _ in range(config.layers + 1))
        self.dense = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.layers))
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.dense):
            x = layer(self.drop(F.relu(self.norms[number](x))))
        return F.relu(self.norms[-1](x))


class Residual(Trunk):
    """Pre-norm residual blocks of two dense layers."""

    def __init__(self, config: MeleeModelConfig) -> None:
        super().__init__()
        width, layers = config.width, range(config.layers)
        self.norms = nn.ModuleList(norm(config) for _ in range(config.layers + 1))
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in layers)
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in layers)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        for number, inner in enumerate(self.inner):
            x = x + self.drop(self.outer[number](F.relu(inner(self.norms[number](x)))))
        return cast(Tensor, self.norms[-1](x))


class Recurrent(Trunk):
    """GRU or LSTM layers between two norms."""

    def __init__(self, config: MeleeModelConfig) -> None:
        super().__init__()
        self.width, self.layers, self.memories = config.width, config.layers, 2 if config.trunk == "lstm" else 1
        kind = nn.LSTM if config.trunk == "lstm" else nn.GRU
        drop = config.dropout if config.layers > 1 else 0.0
        self.first, self.last = norm(config), norm(config)
        self.cells = kind(config.width, config.width, config.layers, batch_first=True, dropout=drop)

    def forward(self, x: Tensor) -> Tensor:
        # Autocast does not cover every cell on every device: some need inputs of the weights' dtype.
        with torch.autocast(x.device.type, enabled=False):
            y = self.cells(self.first(x.float()))[0]  # CUDA has no norm of bf16 by weights in fp32
            return cast(Tensor, self.last(y))

    def initial(self, rows: int) -> State:
        weight = cast(Tensor, self.cells.weight_hh_l0)
        return tuple(weight.new_zeros(rows, self.layers, self.width) for _ in range(self.memories))

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Manual: torch's ONNX exporter gets the GRU wrong (pytorch issue 189225)."""
        y, after = self.first(x), []
        for layer in range(self.layers):
            one = tuple(memory[:, layer] for memory in state)
            after.append(self._lstm(layer, y, *one) if self.memories == 2 else self._gru(layer, y, *one))
            y = after[-1][0]
        return self.last(y), tuple(torch.stack(memory, 1) for memory in zip(*after, strict=True))

    def _gates(self, layer: int, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        w_x, w_h, b_x, b_h = self.cells.all_weights[layer]
        return F.linear(x, w_x, b_x), F.linear(hidden, w_h, b_h)

    def _gru(self, layer: int, x: Tensor, hidden: Tensor) -> tuple[Tensor]:
        (r_x, z_x, n_x), (r_h, z_h, n_h) = (gates.chunk(3, -1) for gates in self._gates(layer, x, hidden))
        z = torch.sigmoid(z_x + z_h)
        fresh = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        return (fresh + z * (hidden - fresh),)

    def _lstm(self, layer: int, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        own, before = self._gates(layer, x, hidden)
        i, f, g, o = (own + before).chunk(4, -1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell


class Transformer(Trunk):
    """Causal attention over the last `window` frames with rotary position embedding.

    In play, unrotated keys are cached and rotated by age at every frame, so angles stay exact in long games.
    """

    turns: Tensor
    ages: Tensor

    def __init__(self, config: MeleeModelConfig, window: int) -> None:
        super().__init__()
        self.window, self.width, self.heads = window, config.width, config.heads
        sizes = config.width, config.heads, 4 * config.width, config.dropout
        self.blocks = nn.ModuleList(Block(*sizes, partial(norm, config)) for _ in range(config.layers))
        self.norm = norm(config)
        frames = torch.arange(window)
        self.register_buffer("turns", self._rotations(frames), persistent=False)
        self.register_buffer("ages", self._rotations(frames - frames[-1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length, mask, turn = x.shape[1], None, self.turns
        if length <= self.window:
            turn = turn[:, :length]
        else:  # as in play, where memory ends
            frames = torch.arange(length, device=x.device)
            turn, age = self._rotations(frames), frames[:, None] - frames
            mask = (age >= 0) & (age < self.window)
        for block in self.blocks:
            q, k, v = cast(Block, block).split(x)
            x = cast(Block, block).mix(x, rotated(q, turn), rotated(k, turn), v, mask, mask is None)
        return cast(Tensor, self.norm(x))

    def initial(self, rows: int) -> State:
        """Keys and values (B, layers, 2, heads, window, W / heads), oldest first; their number (B,)."""
        like = cast(Block, self.blocks[0]).out.weight
        kept = like.new_zeros(rows, len(self.blocks), 2, self.heads, self.window, self.width // self.heads)
        return kept, torch.zeros(rows, dtype=torch.int64, device=like.device)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        kept, count = state[0].roll(-1, 4), (state[1] + 1).clamp(max=self.window)
        mask = (torch.arange(self.window, 0, -1, device=x.device) <= count[:, None])[:, None, None]
        x = x[:, None]
        for number, block in enumerate(self.blocks):
            qkv = cast(Block, block).split(x)
            kept[:, number, :, :, -1] = qkv[1:, :, :, 0].transpose(0, 1)
            k, v = kept[:, number].unbind(1)
            x = cast(Block, block).mix(x, qkv[0], rotated(k, self.ages), v, mask, False)
        return self.norm(x)[:, 0], (kept, count)

    def _rotations(self, frames: Tensor) -> Tensor:
        """(2, T, W / heads) factors of `rotated` for frames (T,), relative."""
        half = self.width // self.heads // 2
        angle = frames[:, None] * ROTATION ** (-torch.arange(half, device=frames.device) / half)
        return torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], 1)])


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """x (..., T, D) with rotary embedding (Su et al. 2021, "RoFormer"); turn: (2, T, D) cosines and signed sines."""
    return (x * turn[0] + x.roll(x.shape[-1] // 2, -1) * turn[1]).to(x.dtype)


class Heads(nn.Module):
    """Features (..., W) to logits; autoregressive: each head also gets the earlier choices.

    prior: (81,) initial logits. weights: (8,) loss weights of pressed buttons, stored as the logits depend on them.
    """

    weights: Tensor
    values: Tensor
    columns: Tensor

    def __init__(
        self, width: int, hidden: int, autoregressive: bool, prior: Sequence[float], weights: Sequence[float]
    ) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))
        # Meaning of each logit: a value of a column of choices.
        values = torch.cat([torch.ones(8) if head.name == "buttons" else torch.arange(head.classes) for head in HEADS])
        columns = torch.cat([torch.arange(13)[head.choices].expand(head.classes) for head in HEADS])
        self.register_buffer("values", values.long(), persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        sizes = [hidden // SHOULDER_SHARE if head.name == "shoulder" else hidden for head in HEADS]
        self.inner = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        self.outer = nn.ModuleList(nn.Linear(size, head.classes) for size, head in zip(sizes, HEADS, strict=True))
        given = HEADS[:-1] if autoregressive else ()
        self.given = nn.ModuleList(nn.Linear(head.classes, width, bias=False) for head in given)
        start = torch.tensor(prior)
        with torch.no_grad():
            for head, layer in zip(HEADS, cast(Iterable[nn.Linear], self.outer), strict=True):
                layer.weight.normal_(std=DEVIATION)
                layer.bias.copy_(start[head.logits])

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        """(..., 81) logits, teacher-forced by `choices` (..., 13)."""
        return self._run(x, lambda number, logits: choices[..., HEADS[number].choices])[0]

    def decide(self, x: Tensor, noise: Tensor, correct: Correct) -> tuple[Tensor, Tensor]:
        """(logits (..., 81), choices (..., 13)), each head decided by argmax of scores plus noise (..., 81).

        noise: `gumbel` samples, zeros give the mode. correct: `Objective.correct`, from a head's logits.
        """
        noises = noise.split(SIZES, -1)

        def pick(number: int, logits: Tensor) -> Tensor:
            score = correct(HEADS[number], logits.float()) + noises[number]
            return (score > 0).long() if number == 0 else score.argmax(-1, keepdim=True)

        return self._run(x, pick)

    def _run(self, x: Tensor, pick: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        parts, picks = [], []
        layers = zip_longest(self.inner, self.outer, self.values.split(SIZES), self.given)
        for number, (inner, outer, values, given) in enumerate(layers):
            parts.append(outer(F.relu(inner(x))))
            picks.append(pick(number, parts[-1]))
            if given is not None:
                x = x + given((picks[-1] == values).float())
        return torch.cat(parts, -1), torch.cat(picks, -1)


def gumbel(uniform: Tensor) -> Tensor:
    """Noise for `decide` from uniforms (..., 81): logistic for buttons, Gumbel for classes, so that the argmax is a
    sample (Maddison et al. 2014, "A* Sampling")."""
    u = uniform.clamp(1e-7, 1 - 1e-7)
    buttons = HEADS[0].logits
    return torch.cat([u[..., buttons].logit(), -(-u[..., buttons.stop :].log()).log()], -1)


class MeleeNet(nn.Module):
    """numeric (..., N) fp32, action (..., 2) and character (..., 2) int64 of both players, previous (..., 13) int64
    (held controller) to features (..., W) and logits.

    window: attention span of a transformer. prior, weights: of `Heads`.
    """

    def __init__(self, config: MeleeModelConfig, window: int, prior: Sequence[float], weights: Sequence[float]) -> None:
        super().__init__()
        self.action = nn.Embedding(ACTIONS, config.embedding)
        self.character = nn.Embedding(CHARACTERS, config.embedding)
        self.first = nn.Linear(len(INPUTS) + 4 * config.embedding + LOGITS, config.width)
        kinds = {"mlp": Mlp, "residual": Residual, "gru": Recurrent, "lstm": Recurrent}
        transformer = config.trunk == "transformer"
        self.trunk: Trunk = Transformer(config, window) if transformer else kinds[config.trunk](config)
        self.heads = Heads(config.width, config.head_width, config.autoregressive, prior, weights)

    def edges(self) -> list[nn.Module]:
        return [self.first, self.heads.given, self.heads.outer]

    def forward(self, numeric: Tensor, action: Tensor, character: Tensor, previous: Tensor, choices: Tensor) -> Tensor:
        """(B, T, 81) logits of all frames; choices (B, T, 13): targets, as in `Heads.forward`."""
        x = self.trunk(self.encode(numeric, action, character, previous))
        return cast(Tensor, self.heads(x, choices))

    def encode(self, numeric: Tensor, action: Tensor, character: Tensor, previous: Tensor) -> Tensor:
        """(..., W) before the trunk."""
        embedded = (self.action(action).flatten(-2), self.character(character).flatten(-2))
        held = previous.index_select(-1, self.heads.columns) == self.heads.values  # one-hot, but for buttons
        return cast(Tensor, self.first(torch.cat([numeric, *embedded, held.float()], -1)))

    def step(
        self, numeric: Tensor, action: Tensor, character: Tensor, previous: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Features (B, W) of one frame, and the trunk's memory after it."""
        return self.trunk.step(self.encode(numeric, action, character, previous), state)


# Losses of one head by frame, in fp32: `logits` (..., 8 or K classes), `choices` (..., 8 or 1). The buttons' loss is
# the mean over the eight, so that no part dominates.

LIMIT = 60.0  # of logits
TINY = 1e-7
LEAST = 0.01  # smallest share of a class after removing smoothing; below it noise would decide


@dataclass(frozen=True)
class Objective:
    """Loss options. weights: (8,) of pressed buttons. gamma: focal loss, 0 = none. smoothing: of class labels."""

    weights: Tensor
    gamma: float = 0.0
    smoothing: float = 0.0

    def losses(self, head: Head, logits: Tensor, choices: Tensor) -> Tensor:
        """(...) loss of each frame.

        Focal loss: log-likelihood times (1 - p_t)^gamma, p_t the true class's probability (Lin et al. 2017). Buttons
        are never smoothed.
        """
        z = logits.float().clamp(-LIMIT, LIMIT)
        if head.name == "buttons":
            right = torch.where(choices > 0, z, -z)
            loss = -F.logsigmoid(right)
            if self.gamma:
                loss = loss * (self.gamma * F.logsigmoid(-right)).exp()
            weight = torch.where(choices > 0, self.weights, 1.0)
            return (weight * loss).mean(-1)
        log_p = z.log_softmax(-1)
        loss = -log_p
        if self.gamma:
            loss = loss * (1 - log_p.exp()).clamp(min=TINY) ** self.gamma
        own = loss.gather(-1, choices)[..., 0]
        return (1 - self.smoothing) * own + self.smoothing * loss.mean(-1) if self.smoothing else own

    def floor(self, head: Head) -> float:
        """Lowest loss of a frame: the smoothed target's entropy; 0 for focal loss."""
        if head.name == "buttons" or not self.smoothing or self.gamma:
            return 0.0
        rest = self.smoothing / head.classes
        top = 1 - self.smoothing + rest
        return -(math.log(top) * top if top else 0.0) - (head.classes - 1) * rest * math.log(rest)

    def correct(self, head: Head, logits: Tensor) -> Tensor:
        """Log-odds (..., 8) of buttons, log-probabilities (..., K) of classes, corrected for the training loss.

        The focal loss is minimised elsewhere than at the true probabilities, which follow from the network's q as q /
        phi(q), phi(q) = (1 - q)^gamma - gamma (1 - q)^(gamma - 1) q ln q (Charoenphakdee et al. 2021, "On Focal Loss
        for Class-Posterior Probability Estimation"). A button's weight multiplies its odds. Smoothing mixes in a
        uniform distribution, which is subtracted.
        """
        z = logits.float().clamp(-LIMIT, LIMIT)
        if head.name == "buttons":
            odds = z
            if self.gamma:
                odds = odds - self._log_phi(F.logsigmoid(z), F.logsigmoid(-z))
                odds = odds + self._log_phi(F.logsigmoid(-z), F.logsigmoid(z))
            return odds - self.weights.log()
        log_p = z.log_softmax(-1)
        if self.gamma:
            others = (-log_p.clamp(max=-TINY).expm1()).log()
            log_p = (log_p - self._log_phi(log_p, others)).log_softmax(-1)
        if self.smoothing:
            share = self.smoothing / head.classes
            log_p = (log_p.exp() - share).clamp(min=LEAST * share).log().log_softmax(-1)
        return log_p

    def _log_phi(self, log_q: Tensor, log_rest: Tensor) -> Tensor:
        """ln phi(q) from ln q and ln (1 - q)."""
        return (self.gamma - 1) * log_rest + (log_rest.exp() - self.gamma * log_q.exp() * log_q).log()


def log_likelihood(head: Head, corrected: Tensor, choices: Tensor) -> Tensor:
    """(...) of the target, all eight buttons together, from `Objective.correct`."""
    if head.name == "buttons":
        return F.logsigmoid(torch.where(choices > 0, corrected, -corrected)).sum(-1)
    return corrected.gather(-1, choices)[..., 0]


def likeliest(head: Head, corrected: Tensor) -> Tensor:
    """(..., 8 or 1) most probable choices."""
    return (corrected > 0).long() if head.name == "buttons" else corrected.argmax(-1, keepdim=True)
