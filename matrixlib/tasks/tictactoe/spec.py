"""The tic-tac-toe task: options, network, losses, figures, and a game that minimax solves. The example to read.

States are two bitboards, moves the squares 0 to 8, row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.config import Config, Count, CountOrZero, DataConfig, NonNegative, Section, Source, option
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.shards import Batch as Rows
from matrixlib.data.shards import Layout
from matrixlib.engine.curriculum import SourceCurriculumConfig
from matrixlib.engine.task import Batch, Ungated
from matrixlib.play import match
from matrixlib.play.game import GameRecord, Moves, Offsets, States, Trace, Values, endings
from matrixlib.play.search import Evaluate, SearchOptions
from matrixlib.tasks.spec import Check, GameSpec, Overfit, TaskSpec

# The game

SQUARES = 9
STATE = np.dtype([("ours", "<u2"), ("theirs", "<u2"), ("side", "u1")])  # bit = square, side 0 = X
LINES = np.array([0o7, 0o70, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124], np.uint16)
UNKNOWN = 2  # result
RECORD = np.dtype(
    [
        *((name, STATE[name]) for name in STATE.names or ()),
        ("policy", "<u2", SQUARES),  # shares of the moves, sum about 65535; 0 on taken squares
        ("result", "i1"),  # of the game, from the side to move: 1 win, 0 draw, -1 loss, 2 unknown
        ("game", "<u8"),  # id of the game
    ]
)
LAYOUT = Layout("tictactoe", 1, RECORD, {})


class TicTacToe:
    """The rules. X starts; three in a row win."""

    name = "tic-tac-toe"
    actions = SQUARES

    def initial(self, n: int) -> States:
        return np.zeros(n, STATE)

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        """Empty squares (K,), none after a win, and offsets (N + 1,)."""
        taken = states["ours"] | states["theirs"]
        free = taken[:, None] >> np.arange(SQUARES) & 1 == 0
        free &= ~_won(states)[:, None]
        return np.nonzero(free)[1].astype(np.int32), np.concatenate([[0], free.sum(1).cumsum()])

    def play(self, states: States, moves: Moves) -> States:
        after = np.empty(len(states), STATE)
        after["ours"] = states["theirs"]
        after["theirs"] = states["ours"] | np.left_shift(1, moves)
        after["side"] = 1 - states["side"]
        return after

    def terminal(self, states: States, counts: NDArray[np.int64]) -> Values:
        """(N,) -1 if the opponent has three in a row, 0 on a full board, else NaN."""
        return np.where(_won(states), -1, np.where(counts == 0, 0, np.nan)).astype(np.float32)

    def to_move(self, states: States) -> NDArray[np.uint8]:
        return states["side"]

    def key(self, states: States) -> NDArray[np.uint64]:
        """(N,) the state itself in 19 bits."""
        high = states["theirs"].astype(np.uint64) | states["side"].astype(np.uint64) << np.uint64(SQUARES)
        return states["ours"].astype(np.uint64) | high << np.uint64(SQUARES)

    def repeat(self, states: States, counts: NDArray[np.int32]) -> States:
        """Unchanged: nothing can repeat."""
        return states

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        return endings(self, states, moves, offsets)

    def proven(self, states: States) -> Values:
        """Nothing: searches prove by themselves."""
        return np.full(len(states), np.nan, np.float32)

    def write(self, game: GameRecord) -> str:
        """The game in a line: players X and O, initial board, squares played, points of both."""
        (start,) = game.start
        us, them = "xo" if start["side"] == 0 else "ox"
        signs = ((us if start["ours"] >> s & 1 else them if start["theirs"] >> s & 1 else ".") for s in range(SQUARES))
        x = 1.0 if us == "x" else -1.0
        points: dict[float | None, str] = {None: "*", 0.0: "1/2-1/2", x: "1-0", -x: "0-1"}
        return f"{' - '.join(game.players)}: {''.join(signs)} {' '.join(map(str, game.moves))} {points[game.result]}"


def _won(states: States) -> NDArray[np.bool_]:
    """Whether the side that just moved has three in a row."""
    return ((states["theirs"][:, None] & LINES) == LINES).any(1)


@cache
def best_moves(ours: int, theirs: int) -> tuple[int, tuple[int, ...]]:
    """(value for the side to move, all moves that keep it) of two bitboards; no moves if the game is over."""
    if any(theirs & line == line for line in LINES.tolist()):
        return -1, ()
    values = _move_values(ours, theirs)
    best = max(values.values(), default=0)
    return best, tuple(square for square, value in values.items() if value == best)


def _move_values(ours: int, theirs: int) -> dict[int, int]:
    """Move -> its value for the mover."""
    free = (square for square in range(SQUARES) if not (ours | theirs) >> square & 1)
    return {square: -best_moves(theirs, ours | 1 << square)[0] for square in free}


@cache
def solve() -> tuple[States, NDArray[np.int8]]:
    """The 4,520 reachable positions (N,) with a move, and each move's value for the mover (N, 9), -2 if taken."""
    states, values = [], []
    reached, side = {(0, 0)}, 0
    while level := sorted(pair for pair in reached if best_moves(*pair)[1]):
        states += [(*pair, side) for pair in level]
        values += [[_move_values(*pair).get(square, -2) for square in range(SQUARES)] for pair in level]
        reached = {(theirs, ours | 1 << square) for ours, theirs in level for square in _move_values(ours, theirs)}
        side = 1 - side
    return np.array(states, STATE), np.array(values, np.int8)


def perfect_player(seed: int) -> match.Player:
    """Plays a random move that keeps the position's value, a function of seed and game number."""

    def play(turn: match.Turn) -> match.Choice:
        options = [best_moves(int(state["ours"]), int(state["theirs"]))[1] for state in turn.states]
        numbers = zip(turn.games, turn.history, options, strict=True)
        picks = [np.random.default_rng([seed, n, len(past)]).choice(moves) for n, past, moves in numbers]
        return match.Choice(np.array(picks, np.int32))

    return play


# The task

FILL = -1e9  # logit of a taken square; finite, so 0 * FILL is not NaN
PAD = -1  # policy index of a square that is no move
BOARD = np.arange(SQUARES).reshape(3, 3)
SYMMETRIES = np.array([np.rot90(b, k).ravel() for b in (BOARD, BOARD.T) for k in range(4)])
"""(8, 9): source square of each square, in the board's eight symmetries."""
PERFECT_GAMES = 200  # against perfect play, half as the first player
SAFE = "policy: move does not lose"
LOST_ALONE, LOST = "policy: games lost", "with search: games lost"


class TicTacToeDataConfig(DataConfig):
    source: Source = option("selfplay", "a folder of shards with a catalogue; the cycle gives its own")
    augment: bool = option(True, "turn each training position by a random one of the board's symmetries")


class TicTacToeModelConfig(Section):
    width: Count = option(128, "units of each layer")
    layers: CountOrZero = option(3, "layers between the first and the heads")


class TicTacToeLossConfig(Section):
    policy: NonNegative = option(1.0, "weight of the policy cross-entropy")
    value: NonNegative = option(1.0, "weight of the cross-entropy of win, draw and loss")


class TicTacToeConfig(Config):
    task: Literal["tictactoe"]
    data: TicTacToeDataConfig = TicTacToeDataConfig()
    curriculum: SourceCurriculumConfig = SourceCurriculumConfig()
    model: TicTacToeModelConfig = TicTacToeModelConfig()
    loss: TicTacToeLossConfig = TicTacToeLossConfig()


class TicTacToeNet(nn.Module):
    """Squares (B, 9), 1 ours, -1 theirs, 0 empty, to move logits (B, 9) and win-draw-loss logits (B, 3)."""

    def __init__(self, config: TicTacToeModelConfig) -> None:
        super().__init__()
        self.stem = nn.Linear(2 * SQUARES, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.layers))
        self.policy, self.value = nn.Linear(config.width, SQUARES), nn.Linear(config.width, 3)

    def edges(self) -> list[nn.Module]:
        return [self.stem, self.policy, self.value]

    def forward(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(torch.cat([squares == 1, squares == -1], dim=1).float())
        for layer in self.layers:
            x = x + layer(F.silu(x))
        x = F.silu(x)
        return self.policy(x), self.value(x)


@dataclass(frozen=True)
class TicTacToeTask(Ungated):
    """Terms "policy" and "value". Frozen and picklable, for loader workers."""

    config: TicTacToeConfig

    @property
    def weights(self) -> dict[str, float]:
        return {"policy": self.config.loss.policy, "value": self.config.loss.value}

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`prepare_plain`; with `data.augment` each board gets a random symmetry."""
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
        """Inputs of `predict` for states (B,) with moves (K,) at offsets (B + 1,): `squares`, and `policy_index` i64
        (B, 9), each move at its own place, else PAD."""
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
        policy, value = model(batch["squares"])
        sums: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        if "policy" in active:
            sums["policy"], metrics = policy_loss(policy, batch["policy"], batch["squares"] == 0)
        if "value" in active:
            sums["value"], metrics["value/accuracy"] = value_loss(value, batch["result"])
        return sums, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """(chance, floor): policy ln(free squares) and the target's entropy; value ln 3 and 0."""
        target = batch["policy"].double()
        free = (batch["squares"] == 0).sum(1)[target.sum(1) > 0].double()
        entropy = -torch.special.xlogy(target, target).sum().item()
        return {"policy": (free.log().sum().item(), entropy), "value": (self.counts(batch)["value"] * np.log(3), 0.0)}

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`policy` (B, 9), logits, NaN on taken squares; `value` (B, 3)."""
        policy, value = model(batch["squares"])
        return {"policy": policy.masked_fill(batch["squares"] != 0, torch.nan), "value": value}

    def predict(self, model: nn.Module, batch: Batch, heads: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """`policy` (B, 9) log-probabilities of `policy_index`; `wdl` (B, 3); `value` (B,) in [-1, 1]."""
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
    target's best, ties included), `uniform` (the same for a random free square), `kl` to the target."""
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
    """Win-draw-loss cross-entropy summed over known results, and the number of correct ones."""
    log_p, known = logits.float().log_softmax(1), result != UNKNOWN
    wanted = torch.where(known, 1 - result, 0)  # win 1 -> 0, draw 0 -> 1, loss -1 -> 2
    loss = -log_p.gather(1, wanted[:, None])[:, 0]
    right = (log_p.argmax(1) == wanted) & known
    return torch.where(known, loss, 0.0).sum(), right.sum().float()


class TicTacToeGameSpec(GameSpec):
    ending, solved = ".txt", True
    game = TicTacToe()

    def batch(self, traces: Sequence[Trace], ids: Mapping[int, int]) -> Rows:
        parts = [np.empty(0, RECORD)]
        for trace in traces:
            records, result = np.zeros(len(trace.states), RECORD), trace.results()
            for name in STATE.names or ():
                records[name] = trace.states[name]
            owner = np.repeat(np.arange(len(records)), np.diff(trace.offsets))
            records["policy"][owner, trace.moves] = np.rint(trace.policy * 65535)
            records["result"] = np.where(np.isnan(result), UNKNOWN, result)
            records["game"] = ids[trace.number]
            parts.append(np.repeat(records, trace.copies))
        return {"records": np.concatenate(parts)}

    def keys(self, records: np.ndarray) -> np.ndarray:
        return records["ours"].astype(np.uint64) << np.uint64(16) | records["theirs"]

    def perfection(self, evaluate: Evaluate, player: match.Player) -> dict[str, float]:
        """Rates: over positions not lost, the policy's move does not lose; over all, it keeps the value; games lost
        against perfect play with search, and by policy alone."""
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
    name = "tictactoe"
    config = TicTacToeConfig
    layout = LAYOUT
    objective_options = ("loss.",)
    measured_on_options = ("validation.limit",)
    held_out = "of a cycle's games one in twenty is held out"
    # Early positions recur with different results, which cannot be memorised.
    overfit = Overfit(overrides={"data": {"augment": False}}, gaps={"policy": 0.05})
    game = TicTacToeGameSpec()

    def task(self, config: TicTacToeConfig) -> TicTacToeTask:
        return TicTacToeTask(config)

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Top-1 agreement with the search (baseline: random move), KL to it, and correct results."""
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
