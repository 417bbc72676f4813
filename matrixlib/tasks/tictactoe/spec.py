"""Tic-tac-toe as a task: options, network, losses, held-out figures, and a game that is solved. The example to read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.config import Config, Count, CountOrZero, DataConfig, NonNegative, Section, option
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.shards import Batch as Rows
from matrixlib.engine.curriculum import SourceCurriculumConfig
from matrixlib.engine.task import Batch, Ungated
from matrixlib.play import match
from matrixlib.play.game import Trace
from matrixlib.play.search import Evaluate, SearchOptions
from matrixlib.tasks.spec import Check, GameSpec, Overfit, TaskSpec
from matrixlib.tasks.tictactoe.game import LAYOUT, SQUARES, UNKNOWN, TicTacToe, perfect_player, solve, training_batch

FILL = -1e9  # logit of a taken square: finite, so that nothing times it is NaN
PAD = -1  # policy index of a square that is no move
BOARD = np.arange(SQUARES).reshape(3, 3)
SYMMETRIES = np.array([np.rot90(b, k).ravel() for b in (BOARD, BOARD.T) for k in range(4)])
"""(8, 9): where each square's content comes from, in the board's eight symmetries."""
PERFECT_GAMES = 200  # against perfect play, half of them as the side that begins
SAFE = "policy: move does not lose"
LOST_ALONE, LOST = "policy: games lost", "with search: games lost"


class TicTacToeDataConfig(DataConfig):
    source: str = option("selfplay", "a folder of shards with a catalogue; the cycle gives its own")
    augment: bool = option(True, "turn each training position by a random one of the board's symmetries")


class TicTacToeModelConfig(Section):
    width: Count = option(128, "units of each layer")
    layers: CountOrZero = option(3, "layers between the first and the heads")


class TicTacToeLossConfig(Section):
    policy: NonNegative = option(1.0, "weight of the policy cross-entropy")
    value: NonNegative = option(1.0, "weight of the cross-entropy of win, draw and loss")


class TicTacToeConfig(Config):
    """One run's whole configuration, where tic-tac-toe is trained."""

    task: Literal["tictactoe"]
    data: TicTacToeDataConfig = TicTacToeDataConfig()
    curriculum: SourceCurriculumConfig = SourceCurriculumConfig()
    model: TicTacToeModelConfig = TicTacToeModelConfig()
    loss: TicTacToeLossConfig = TicTacToeLossConfig()


class TicTacToeNet(nn.Module):
    """Squares (B, 9), 1 ours, -1 theirs, 0 empty, to logits of moves (B, 9) and of win, draw and loss (B, 3)."""

    def __init__(self, config: TicTacToeModelConfig) -> None:
        super().__init__()
        self.stem = nn.Linear(2 * SQUARES, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.layers))
        self.policy, self.value = nn.Linear(config.width, SQUARES), nn.Linear(config.width, 3)

    def edges(self) -> list[nn.Module]:
        """The layers that take the squares and those that give the outputs."""
        return [self.stem, self.policy, self.value]

    def forward(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(torch.cat([squares == 1, squares == -1], dim=1).float())
        for layer in self.layers:
            x = x + layer(F.silu(x))
        x = F.silu(x)
        return self.policy(x), self.value(x)


@dataclass(frozen=True)
class TicTacToeTask(Ungated):
    """What the engine trains, with the terms "policy" and "value". Frozen and picklable, for the loader's workers."""

    config: TicTacToeConfig

    @property
    def weights(self) -> dict[str, float]:
        return {"policy": self.config.loss.policy, "value": self.config.loss.value}

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """As `prepare_plain`; with `data.augment` each board is turned by a random one of its symmetries."""
        turns = SYMMETRIES[rng.integers(len(SYMMETRIES), size=len(batch["records"]))]
        plain = self.prepare_plain(batch, rng)
        if not self.config.data.augment:
            return plain
        return plain | {name: np.take_along_axis(plain[name], turns, 1) for name in ("squares", "policy")}

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`squares` i8 (B, 9), 1 ours, -1 theirs; `policy` f32 (B, 9), a row sums to 1 or 0; `result` i64 (B,)."""
        rows = batch["records"]
        weight = rows["policy"].astype(np.float32)
        return {
            "squares": _squares(rows),
            "policy": weight / np.maximum(weight.sum(1, keepdims=True), 1),
            "result": rows["result"].astype(np.int64),
        }

    def inputs(self, rows: np.ndarray, index: np.ndarray, offset: np.ndarray) -> dict[str, np.ndarray]:
        """What `predict` asks for, of states (B,) and their moves (K,) at offsets (B + 1,): `squares` and
        `policy_index` i64 (B, 9), each move at its own place, else PAD."""
        moves = np.full((len(rows), SQUARES), PAD, np.int64)
        moves[np.repeat(np.arange(len(rows)), np.diff(offset)), index] = index
        return {"squares": _squares(rows), "policy_index": moves}

    def build_model(self) -> TicTacToeNet:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return TicTacToeNet(self.config.model)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Rows with a policy, rows with a known result."""
        return {"policy": int((batch["policy"].sum(1) > 0).sum()), "value": int((batch["result"] != UNKNOWN).sum())}

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums of the active terms and their metrics."""
        policy, value = model(batch["squares"])
        sums: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        if "policy" in active:
            sums["policy"], metrics = policy_loss(policy, batch["policy"], batch["squares"] == 0)
        if "value" in active:
            sums["value"], metrics["value/accuracy"] = value_loss(value, batch["result"])
        return sums, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """(chance, floor): ln of the number of free squares and the target's entropy; ln 3 and 0, as of a network that
        knows every game."""
        target = batch["policy"].double()
        free = (batch["squares"] == 0).sum(1)[target.sum(1) > 0].double()
        entropy = -torch.special.xlogy(target, target).sum().item()
        return {"policy": (free.log().sum().item(), entropy), "value": (self.counts(batch)["value"] * np.log(3), 0.0)}

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`policy` (B, 9), logits, NaN on taken squares; `value` (B, 3)."""
        policy, value = model(batch["squares"])
        return {"policy": policy.masked_fill(batch["squares"] != 0, torch.nan), "value": value}

    def predict(self, model: nn.Module, batch: Batch, heads: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """`policy` (B, 9) log-probabilities of `policy_index`'s moves; `wdl` (B, 3); `value` (B,) in -1..1."""
        policy, value = model(batch["squares"])
        wdl = value.float().softmax(1)
        log_p = log_shares(policy, batch["policy_index"] != PAD)
        return {"policy": log_p, "wdl": wdl, "value": wdl[:, 0] - wdl[:, 2]}


def _squares(rows: np.ndarray) -> np.ndarray:
    """(B, 9) int8: 1 ours, -1 theirs, 0 empty."""
    ours, theirs = (rows[name][:, None] >> np.arange(SQUARES) & 1 for name in ("ours", "theirs"))
    return ours.astype(np.int8) - theirs.astype(np.int8)


def log_shares(logits: Tensor, free: Tensor) -> Tensor:
    """(B, 9) fp32 log-probabilities over the free squares, about FILL elsewhere."""
    return torch.where(free, logits.float(), FILL).log_softmax(1)


def policy_loss(logits: Tensor, target: Tensor, free: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy in fp32, summed over rows with a target (B, 9). Metrics: `top1` (the best move is one of the
    target's best, all that tie), `uniform` (the same of a random free square) and `kl` to the target."""
    log_p = log_shares(logits, free)
    loss = -(target * log_p).sum(1)  # 0 without a target
    with torch.no_grad():
        best = (target >= target.amax(1, keepdim=True)) & (target > 0)
        hits = best.gather(1, log_p.argmax(1, keepdim=True))
        kl = loss + torch.special.xlogy(target, target).sum(1)
        uniform = best.sum(1) / free.sum(1).clamp(min=1)
        metrics = {"policy/top1": hits.sum().float(), "policy/uniform": uniform.sum(), "policy/kl": kl.sum()}
    return loss.sum(), metrics


def value_loss(logits: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of win, draw and loss, summed over known results, and how many are right."""
    log_p, known = logits.float().log_softmax(1), result != UNKNOWN
    wanted = torch.where(known, 1 - result, 0)  # win 1 -> 0, draw 0 -> 1, loss -1 -> 2
    loss = -log_p.gather(1, wanted[:, None])[:, 0]
    right = (log_p.argmax(1) == wanted) & known
    return torch.where(known, loss, 0.0).sum(), right.sum().float()


class TicTacToeGameSpec(GameSpec):
    """Tic-tac-toe as a game of self-play."""

    ending, solved = ".txt", True
    game = TicTacToe()

    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Rows:
        return training_batch(traces, ids)

    def keys(self, records: np.ndarray) -> np.ndarray:
        return records["ours"].astype(np.uint64) << np.uint64(16) | records["theirs"]

    def perfection(self, evaluate: Evaluate, player: match.Player) -> dict[str, float]:
        """Of the positions that are not lost those in which the most probable move does not lose, of all positions
        those in which it keeps what they are worth; of the games against perfect play those that the player loses, and
        those that the most probable moves lose."""
        game, (states, values) = self.game, solve()
        moves, offsets = game.legal(states)
        priors = np.full(values.shape, -1.0)
        priors[np.repeat(np.arange(len(priors)), np.diff(offsets)), moves] = evaluate(states, moves, offsets)[0]
        worth = values[np.arange(len(priors)), priors.argmax(1)]
        start = game.initial(PERFECT_GAMES // 2)
        raw = match.search_player(game, evaluate, 0, SearchOptions(look_ahead=False))
        matches = [match.play_pairs(game, one, perfect_player(0), start) for one in (player, raw)]
        with_search, alone = (float((games.scores() == 0).mean()) for games in matches)
        best = values.max(1)
        return {
            SAFE: float((worth[best >= 0] >= 0).mean()),
            "policy: move is one of the best": float((worth == best).mean()),
            LOST_ALONE: alone,
            LOST: with_search,
        }

    def checks(self, perfection: Mapping[str, float]) -> list[Check]:
        lost, alone = (round(perfection[name] * PERFECT_GAMES) for name in (LOST, LOST_ALONE))
        text = (
            f"{lost} of {PERFECT_GAMES} games lost to a player that knows all, {alone} without a search; "
            f"the policy's move does not lose in {perfection[SAFE]:.2%} of the positions"
        )
        return [("loses to nobody", lost == 0, text)]


class TicTacToeSpec(TaskSpec[TicTacToeConfig]):
    """Positions of self-play."""

    name = "tictactoe"
    config = TicTacToeConfig
    layout = LAYOUT
    objective_options = ("loss.",)
    measured_on_options = ("validation.limit",)
    held_out = "of a cycle's games one in twenty is held out"
    # The first positions of games come again and again, with other results: those can't be learned by heart.
    overfit = Overfit(overrides={"data": {"augment": False}}, gaps={"policy": 0.05})
    game = TicTacToeGameSpec()

    def task(self, config: TicTacToeConfig) -> TicTacToeTask:
        return TicTacToeTask(config)

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Top-1 agreement with the search beside that of a random move, KL to it, and right results."""
        found = super().evaluate(net, held_out, catalogue, sample)
        if "policy_loss" not in found:
            raise ValueError("the held-out positions have no policy target to evaluate on; play more games")
        figures = {"top1": found["policy_top1"], "policy_kl": found["policy_kl"]}
        if "value_accuracy" in found:
            figures["wdl_accuracy"] = found["value_accuracy"]
        return figures | {"baselines": {"uniform_top1": found["policy_uniform"]}}

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        better = figures["top1"] > figures["baselines"]["uniform_top1"]
        text = "top-1 agreement with the search above that of a random move"
        return [("held-out moves better than a random one", better, text)]


TASK = TicTacToeSpec()
