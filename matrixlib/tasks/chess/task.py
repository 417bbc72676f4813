"""The chess task (`engine.task.Task`): stored rows to training batches, network and losses.

Terms: "policy", "value", "ssl_<head>" per self-supervised head; with a teacher "teacher_policy", "teacher_value" and
optionally "teacher_features". Batches stay packed until they are on the device: see `ChessTask.prepare`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import chess
import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.task import Batch
from matrixlib.play.game import Past
from matrixlib.tasks.chess import losses, records
from matrixlib.tasks.chess import ssl_targets as ssl
from matrixlib.tasks.chess.config import SSL_CHANNELS, START_PLIES, ChessConfig, ModelConfig
from matrixlib.tasks.chess.distill import losses as soft
from matrixlib.tasks.chess.heads import Head
from matrixlib.tasks.chess.losses import Sums, visible_rows
from matrixlib.tasks.chess.model import DEFAULT_HEADS, PolicyValueNet, input_planes, training_flops
from matrixlib.tasks.chess.planes import SIDE, move_map, planes, unpack_maps

# The padded policy has room for 96 legal moves, or the next multiple of 32
MIN_POLICY_WIDTH, POLICY_WIDTH_STEP = 96, 32
HISTORY_PLIES = 7
# Term -> network output, where the names differ
TERM_OUTPUTS = {"teacher_policy": "policy", "teacher_value": "value", "teacher_features": "stream"}
STATE_COLUMNS = ("castling", "en_passant", "halfmove", "repetition", "side", "ply")


class Term(NamedTuple):
    """A loss term.

    loss: (outputs, batch) -> (sum over items, sums of metrics). items: mask of the valid ones of a batch. floor: least
    sum of a host batch; None where neither floor nor chance level is known.
    """

    weight: float
    loss: Callable[[dict[str, Any], Batch], tuple[Tensor, Sums]]
    items: Callable[[Batch], Tensor]
    floor: Callable[[Batch], float] | None = lambda batch: 0.0


@dataclass(frozen=True)
class ChessTask:
    """The chess task of a configuration; frozen and picklable for the loader's workers.

    trunk, heads: custom parts of the network, see `PolicyValueNet`.
    loss_functions: term -> custom loss (outputs, batch) -> sum, or (sum, sums of metrics). An existing term keeps its
    weight and items; a new one has weight 1 and the rows of `losses.visible_rows`.
    """

    config: ChessConfig
    trunk: Callable[[ModelConfig], nn.Module] | None = None
    heads: tuple[Head, ...] = ()
    loss_functions: Mapping[str, Callable[[dict[str, Any], Batch], Any]] = field(default_factory=dict, hash=False)

    @property
    def model_class(self) -> Callable[..., PolicyValueNet]:
        return PolicyValueNet

    @property
    def input_planes(self) -> int:
        return input_planes(self.config.model)

    @property
    def history(self) -> int:
        """Earlier positions in the network's input, in plies."""
        return HISTORY_PLIES if self.config.model.history else 0

    @property
    def last_of(self) -> str:
        """The field of records by which `prepare` gets each game's last one, see `Reader`."""
        return "game" if self.config.model.moves_left.channels else ""

    @property
    def terms(self) -> dict[str, Term]:
        options, teacher = self.config.loss, self.config.teacher
        terms = {
            "policy": Term(options.policy, self._policy_loss, _policy_rows, self._policy_floor),
            "value": Term(options.value, self._value_loss, lambda b: self.value_target(b)[1], self._value_floor),
        }
        if self.config.model.moves_left.channels:
            terms["moves_left"] = Term(options.moves_left, losses.moves_left_loss, losses.moves_left_rows)
        for name in self.config.model.ssl:
            loss, squares = partial(self._ssl_loss, name), partial(_squares, name)
            terms[f"ssl_{name}"] = Term(getattr(options.ssl, name), loss, squares)
        if teacher.network:
            terms["teacher_policy"] = Term(teacher.policy, self._teacher_policy_loss, _rows_with_moves)
            terms["teacher_value"] = Term(teacher.wdl, self._teacher_value_loss, visible_rows)
            if teacher.features:
                terms["teacher_features"] = Term(teacher.features, self._teacher_features_loss, visible_rows, None)
        terms |= {head.name: Term(head.weight, head.loss, visible_rows, None) for head in self.heads}
        for term, function in self.loss_functions.items():
            weight, items = terms[term][::2] if term in terms else (1.0, visible_rows)
            terms[term] = Term(weight, partial(_custom_loss, term, function), items, None)
        return terms

    @property
    def weights(self) -> dict[str, float]:
        return {name: term.weight for name, term in self.terms.items()}

    @property
    def gated(self) -> frozenset[str]:
        """Terms of the self-supervised heads and of custom heads with `gated`."""
        own = (head.name for head in self.heads if head.gated)
        return frozenset((*(f"ssl_{name}" for name in self.config.model.ssl), *own))

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Packed training batch of stored rows:

        pieces: uint8 (B, 32).  state: int16 (B, 6), STATE_COLUMNS; en-passant file -1 for none.
        policy_index: int16 (B, L) on the oriented board, -1 in pads.
        policy_weight: float32 (B, L), rows sum to 1, or 0 without a target.
        wdl: float32 (B, 3) likewise.  result: int8 (B,), 2 unknown.
        moves_left: float32 (B,), plies to the end of the game, 0 unknown, with a moves-left head.
        maps: uint8 (B, 5, 8), bit maps `ssl.MAPS`, with self-supervised heads.
        hidden: uint8 (B, 8), bit map of hidden squares, if `ssl_piece` has a weight.
        teacher_policy, teacher_wdl: float32 (B, L), (B, 3), with a cached teacher.
        <head>: targets of each custom head.

        With `data.mirror` half of the rows without castling rights, now and in their history, are mirrored first. All
        random numbers are drawn whether used or not.
        """
        rows = len(batch["records"])
        mirrored = rng.random(rows) < 0.5
        data = self.config.data
        hidden = ssl.draw_hidden_squares(rng, rows, data.hidden_rows, data.hidden_squares)
        batch, past = soft.unpack_outputs(batch), records.stored_history(batch)
        if data.mirror:
            mirrored &= batch["records"]["castling"] == 0
            if past is not None:
                mirrored &= ~past.states["castling"].any(1)
                past = Past(records.mirror_records(past.states, mirrored), past.known)
            batch = records.mirror(batch, mirrored)
        return self._packed(batch, hidden, past)

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`prepare` without augmentation: no mirroring, no hidden squares, so no items for the piece loss."""
        hidden, past = np.zeros((len(batch["records"]), 8), np.uint8), records.stored_history(batch)
        return self._packed(soft.unpack_outputs(batch), hidden, past)

    def inputs(
        self, rows: np.ndarray, index: np.ndarray, offset: np.ndarray, past: Past | None = None
    ) -> dict[str, np.ndarray]:
        """Inputs of `predict`: `pieces`, `state` and `policy_index` as in `prepare`.

        rows: records (B,). index, offset: legal moves (K,) and row offsets (B + 1,). past: for networks with `history`.
        """
        return {
            "pieces": np.ascontiguousarray(rows["pieces"]),
            "state": packed_state(rows),
            "policy_index": _padded(index, offset, losses.PAD_INDEX, np.int16),
        }

    def _packed(self, batch: dict[str, np.ndarray], hidden: np.ndarray, past: Past | None) -> dict[str, np.ndarray]:
        rows, offset = batch["records"], batch["policy_offset"]
        out = self.inputs(rows, batch["policy_index"], offset, past) | {
            "policy_weight": _normalised(_padded(batch["policy_weight"], offset, 0, np.float32)),
            "wdl": _normalised(rows["wdl"].astype(np.float32)),
            "result": np.ascontiguousarray(rows["result"]),
        }
        if "policy_teacher" in batch:
            out["teacher_policy"] = _padded(batch["policy_teacher"], offset, losses.PAD_LOGIT, np.float32)
            out["teacher_wdl"] = _normalised(batch["sidecar"]["wdl"].astype(np.float32))
        if self.config.model.moves_left.channels:
            out["moves_left"] = records.moves_left(batch)
        if self.config.model.ssl:
            out["maps"] = ssl.target_maps(rows)
        if self.weights.get("ssl_piece"):
            out["hidden"] = hidden
        return out | {head.name: head.targets(batch) for head in self.heads}

    def build_model(self) -> PolicyValueNet:
        """Initialised fp32 network on the CPU, deterministic by seed; leaves torch's global RNG untouched."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            model = self.model_class(self.config.model, self.trunk, self.heads)
        teacher = self.config.teacher
        if teacher.network and teacher.schedule == "learned":
            model.temperature = soft.LearnedTemperature(teacher.temperature, teacher.temperature_rate)
        return model

    def network_with(self, tensors: Mapping[str, Tensor]) -> PolicyValueNet:
        """The network with these tensors. RuntimeError if they do not fit, before it takes memory."""
        with torch.device("meta"):  # a file may claim sizes that do not fit in memory
            PolicyValueNet(self.config.model).load_state_dict(tensors, assign=True)
        model = self.build_model()
        model.load_state_dict(tensors)
        return model

    def set_chunk(self, model: nn.Module, rows: int) -> int:
        """Run the self-supervised heads on chunks of `rows`; returns the size in effect: 0 (all) with BatchNorm."""
        assert isinstance(model, PolicyValueNet)
        model.ssl_chunk = rows if self.config.model.norm.stem_heads == "group" else 0
        return model.ssl_chunk

    def training_flops(self) -> int:
        """Training FLOPs (forward and backward) per position for the active terms."""
        heads = self._output_names(frozenset(name for name, term in self.terms.items() if term.weight > 0))
        parts, heads = (self.trunk, self.heads), heads - {"stream", "features"}
        return training_flops(self.config.model, heads, *parts, network=self.model_class)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Valid items of each term: rows, or squares for the self-supervised heads."""
        return {name: int(term.items(batch).sum()) for name, term in self.terms.items()}

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> tuple[Sums, Sums]:
        """Sums of the active terms and of their metrics; rows with hidden squares count for `ssl_piece` only."""
        return self.loss(self.forward(model, batch, active), batch, active)

    def loss(self, out: dict[str, Any], batch: Batch, active: frozenset[str]) -> tuple[Sums, Sums]:
        """`losses` from the outputs of `forward`."""
        sums, metrics, terms = Sums(), Sums(), self.terms
        with torch.autocast(batch["pieces"].device.type, enabled=False):
            for name in sorted(active):
                sums[name], of_term = terms[name].loss(out, batch)
                metrics |= {f"{name}/{metric}": value for metric, value in of_term.items()}
        return sums, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """(chance, floor) sums of each active term where known; chance: the loss of a new network."""
        batch, model = {name: tensor.cpu() for name, tensor in batch.items()}, self.config.model
        count = len(batch["pieces"])
        blank = {
            "policy": torch.zeros(batch["policy_index"].shape),
            "value": torch.zeros(count) if model.value.kind == "scalar" else torch.zeros(count, 3),
            "moves_left": torch.full((count,), START_PLIES),
            "ssl": {name: torch.zeros(count, SSL_CHANNELS[name], 8, 8) for name in model.ssl},
        }
        floors = {name: term.floor for name, term in self.terms.items() if term.weight > 0 and term.floor is not None}
        chance, _ = self.loss(blank, batch, frozenset(floors))
        return {name: (float(chance[name]), floor(batch)) for name, floor in floors.items()}

    def _policy_loss(self, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        index, weight = self.network_index(batch), batch["policy_weight"]
        return losses.policy_loss(out["policy"], index, weight, visible_rows(batch), self.config.loss)

    def _policy_floor(self, batch: Batch) -> float:
        index, weight = batch["policy_index"], batch["policy_weight"]
        return losses.policy_floor(index, weight, visible_rows(batch), self.config.loss)

    def value_target(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(win-draw-loss targets (B, 3), mask (B,) of the rows that have one)."""
        target, known = losses.value_target(batch["wdl"], batch["result"], self.config.loss.result_share)
        return target, known & visible_rows(batch)

    def _value_loss(self, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        if self.config.model.value.kind == "scalar":
            return losses.scalar_loss(out["value"], *self.value_target(batch), self.config.loss)
        return losses.wdl_loss(out["value"], *self.value_target(batch))

    def _value_floor(self, batch: Batch) -> float:
        target, rows = self.value_target(batch)
        return 0.0 if self.config.model.value.kind == "scalar" else float(losses.entropy(target[rows].double()).sum())

    def _ssl_loss(self, head: str, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        # Targets are on the oriented board
        logits, target = self.oriented(out["ssl"][head], batch, head), ssl.head_target(batch, head)
        if SSL_CHANNELS[head] > 1:
            return losses.class_loss(logits, target, _squares(head, batch))
        return losses.binary_loss(logits, target, _squares(head, batch), self._positive_weight(head))

    def _teacher_policy_loss(self, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        index, rows = self.network_index(batch), visible_rows(batch)
        temperature = out.get("temperature", batch["temperature"])
        loss, metrics = soft.policy_loss(out["policy"], index, batch["teacher_policy"], rows, temperature)
        return loss, metrics | ({"raw": out["raw"] * soft.policy_rows(index, rows).sum()} if "raw" in out else {})

    def _teacher_value_loss(self, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        return soft.wdl_loss(out["value"], batch["teacher_wdl"], visible_rows(batch))

    def _teacher_features_loss(self, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        blocks = [own for own, _ in self.config.teacher.layers] or range(len(out["stream"]) - 1)
        own = self.residuals(out["stream"], batch, blocks, self.config.teacher.squares)
        theirs = [batch[f"teacher_features_{k}"] for k in range(len(blocks))]
        return soft.feature_loss(own, theirs, visible_rows(batch)), {}

    def residuals(self, stream: Sequence[Tensor], batch: Batch, blocks: Sequence[int], squares: bool) -> list[Tensor]:
        """fp32 residuals (B, C, S) of these blocks, their output minus input: S = 64 squares of the oriented board, or
        their mean (S = 1). stream: input of the first block and output of each, as in `PolicyValueNet.trunk`."""
        added = [stream[block + 1].float() - stream[block].float() for block in blocks]
        if squares:
            return [self.oriented(maps, batch).flatten(2) for maps in added]
        return [maps.mean((2, 3))[:, :, None] for maps in added]

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Raw outputs: `policy` (B, L), logits of legal moves, NaN in pads; `value`; `ssl_<head>`; custom heads."""
        out = self.forward(model, batch, frozenset(self.weights))
        index = self.network_index(batch)
        legal = torch.where(index != losses.PAD_INDEX, losses.legal_logits(out["policy"], index), math.nan)
        own = {name: out[name] for name in ("moves_left", *(head.name for head in self.heads)) if name in out}
        maps = {f"ssl_{name}": logits for name, logits in out.get("ssl", {}).items()}
        return {"policy": legal, "value": out["value"]} | maps | own

    def predict(self, model: nn.Module, batch: Batch, heads: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Predictions on the oriented board: `policy` (B, L) log-probabilities of the moves `policy_index`, about -1e9
        in pads; `value` (B,) in [-1, 1]; `wdl` (B, 3) probabilities unless the value head is scalar; of `heads`
        `moves_left` (B,) in plies, and `ssl/<head>` (B, c, 8, 8), probabilities of each other one."""
        names = DEFAULT_HEADS | {name if name == "moves_left" else f"ssl_{name}" for name in heads}
        return self.probabilities(self.forward(model, batch, names), batch, heads)

    def probabilities(
        self, out: dict[str, Any], batch: Batch, heads: frozenset[str] = frozenset()
    ) -> dict[str, Tensor]:
        """`predict` from the outputs of `forward`."""
        result = {"policy": losses.legal_logits(out["policy"], self.network_index(batch)).log_softmax(1)}
        if self.config.model.value.kind == "scalar":
            result["value"] = out["value"]
        else:
            result["wdl"] = out["value"].softmax(1)
            result["value"] = result["wdl"][:, 0] - result["wdl"][:, 2]
        result |= {name: out[name] for name in heads & {"moves_left"}}
        for name in heads - {"moves_left"}:
            result[f"ssl/{name}"] = self.ssl_probabilities(name, self.oriented(out["ssl"][name], batch, name))
        return result

    def ssl_probabilities(self, head: str, logits: Tensor) -> Tensor:
        """Probabilities from a self-supervised head's logits (B, c, 8, 8), corrected for `loss.positive`."""
        if logits.shape[1] > 1:
            return logits.softmax(1)
        return losses.calibrated(logits, self._positive_weight(head)).sigmoid()

    def _positive_weight(self, head: str) -> float:
        """Positive weight of a binary head's loss."""
        return float(getattr(self.config.loss.positive, head, 1.0))

    def planes(self, batch: Batch) -> Tensor:
        """The network's input (B, C, 8, 8) float32 of a packed batch."""
        return planes(batch, self.config.model.encoding)

    def forward(self, model: nn.Module, batch: Batch, terms: frozenset[str]) -> dict[str, Any]:
        """Network outputs that these terms need, in the network's frame, see `PolicyValueNet.forward`. In training with
        a learned temperature also `temperature` (B,) and `raw`, its parameter."""
        names = self._output_names(terms)
        arguments: list[Any] = [self.planes(batch), names]
        index = batch["policy_index"]
        # A GPU or one position gains nothing, and a compiled network would need a graph for each L
        if isinstance(model, PolicyValueNet) and index.device.type == "cpu" and len(index) > 1 and "policy" in names:
            arguments.append(self.network_index(batch))
        out: dict[str, Any] = model(*arguments)
        # Held-out rows use the temperature of their batch
        if "teacher_policy" in terms and self.config.teacher.schedule == "learned" and model.training:
            learned = model.temperature  # also through torch.compile's wrapper
            assert isinstance(learned, soft.LearnedTemperature)
            out["temperature"] = learned(batch["reversal"][0]).expand(len(batch["pieces"]))
            out["raw"] = learned.raw.detach()
        return out

    def _output_names(self, terms: frozenset[str]) -> frozenset[str]:
        """Network outputs that these terms need; a custom loss may need any."""
        names = {TERM_OUTPUTS.get(term, term) for term in terms}
        if terms & self.loss_functions.keys():
            known = {*DEFAULT_HEADS, "features", *(f"ssl_{name}" for name in self.config.model.ssl)}
            known |= {head.name for head in self.heads} | ({"moves_left"} if self.last_of else set())
            names = names & {"stream"} | known
        return frozenset(names)

    def network_index(self, batch: Batch) -> Tensor:
        """Policy indices (B, L) in the network's frame, pads kept."""
        index = batch["policy_index"]
        if self.config.model.encoding != "matrix0":
            return index
        table = device_table(move_map, str(index.device), self.config.model.encoding)
        moved = table[batch["state"][:, SIDE, None].long(), index.clamp(min=0).long()]
        return torch.where(index != losses.PAD_INDEX, moved, losses.PAD_INDEX)

    def oriented(self, maps: Tensor, batch: Batch, name: str = "") -> Tensor:
        """Maps (B, c, 8, 8) from the network's frame to the oriented board. name: their head."""
        if self.config.model.encoding != "matrix0":
            return maps
        # Matrix0's row 0 is rank 8, as on Black's oriented board; Black's own pieces are classes 6-11
        black = batch["state"][:, SIDE, None, None, None].ne(0)
        theirs = maps[:, device_table(ssl.SWAPPED_COLOURS.tolist, str(maps.device))] if name == "piece" else maps
        return torch.where(black, theirs, maps.flip(2))


def packed_state(rows: np.ndarray) -> np.ndarray:
    """STATE_COLUMNS (..., 6) int16 of records (...); ply wraps around, `planes` reads it as unsigned."""
    return np.stack([rows[name].astype(np.uint16).view(np.int16) for name in STATE_COLUMNS], axis=-1)


def boards_of(batch: Batch) -> list[chess.Board]:
    """Boards of a prepared batch, hidden squares included."""
    rows = np.zeros(len(batch["pieces"]), records.LAYOUT.record)
    rows["pieces"] = batch["pieces"].numpy()
    for column, name in enumerate(STATE_COLUMNS):
        rows[name] = batch["state"][:, column].numpy().astype(rows[name].dtype)
    return [records.to_board(row) for row in rows]


def _policy_rows(batch: Batch) -> Tensor:
    return losses.policy_rows(batch["policy_index"], batch["policy_weight"], visible_rows(batch))


def _squares(head: str, batch: Batch) -> Tensor:
    """Mask (B, 8, 8) of the squares that train a self-supervised head: of `piece` the hidden ones."""
    if head == "piece":
        return unpack_maps(batch.get("hidden", torch.zeros_like(batch["pieces"][:, :8]))).bool()
    return visible_rows(batch)[:, None, None].expand(-1, 8, 8)


def _rows_with_moves(batch: Batch) -> Tensor:
    return soft.policy_rows(batch["policy_index"], visible_rows(batch))


def _custom_loss(name: str, function: Callable[..., Any], out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
    given = function(out, batch)
    loss, metrics = (given, {}) if isinstance(given, Tensor) else given
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ValueError(f"losses: the function of '{name}' must return a 0-d tensor, the sum over its items")
    return loss, {metric: value.detach().float() for metric, value in metrics.items()}


@cache
def device_table(make: Callable[..., Any], device: str, *arguments: str) -> Tensor:
    """A table on a device, cached; a normal tensor even in inference mode, so that training can use it."""
    with torch.inference_mode(False):
        return torch.as_tensor(make(*arguments)).to(device)


def _padded(values: np.ndarray, offset: np.ndarray, fill: float, kind: type[np.generic]) -> np.ndarray:
    """Ragged rows (K,) padded to (B, L); L is a multiple of POLICY_WIDTH_STEP."""
    length = np.diff(offset)
    width = max(MIN_POLICY_WIDTH, -(-int(length.max(initial=0)) // POLICY_WIDTH_STEP) * POLICY_WIDTH_STEP)
    out = np.full((len(length), width), fill, kind)
    out[np.arange(width) < length[:, None]] = values  # both in row order
    return out


def _normalised(weights: np.ndarray) -> np.ndarray:
    """Rows (B, n) divided by their sums, float32; zero rows stay zero."""
    total = weights.sum(1, keepdims=True, dtype=np.float64)
    return np.asarray(weights / np.where(total > 0, total, 1), np.float32)
