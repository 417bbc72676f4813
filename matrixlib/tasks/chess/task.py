"""The chess task: what the engine trains, from stored rows to losses.

Terms: "policy", "value" and "ssl_<head>" for each self-supervised head of the model; with a teacher also
"teacher_policy", "teacher_value" and, where it is wanted, "teacher_features". Batches stay packed until the device: see
`ChessTask.prepare` for the arrays.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import chess
import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.task import Batch
from matrixlib.play.game import Past
from matrixlib.tasks.chess import bitboard, losses, records
from matrixlib.tasks.chess import ssl_targets as ssl
from matrixlib.tasks.chess.config import SSL_CHANNELS, ChessConfig
from matrixlib.tasks.chess.distill import features, outputs
from matrixlib.tasks.chess.distill import losses as soft
from matrixlib.tasks.chess.distill.temperature import LearnedTemperature
from matrixlib.tasks.chess.losses import Sums
from matrixlib.tasks.chess.model import PLANES, PolicyValueNet
from matrixlib.tasks.chess.planes import CASTLING, EN_PASSANT, SIDE, move_map, planes, unpack_maps

MIN_MOVES = 96  # places for legal moves in a row; more, in steps of STEP_MOVES, where a position has more
STEP_MOVES = 32
TAUGHT = {"teacher_policy": "policy", "teacher_value": "value", "teacher_features": "stream"}
"""Terms of a teacher, and the outputs that learn from it."""
STATE = ("castling", "en_passant", "halfmove", "repetition", "side", "ply")


@dataclass(frozen=True)
class ChessTask:
    """Chess as `config` describes it. Frozen and picklable, because the loader's workers get a copy."""

    config: ChessConfig
    input_planes: ClassVar[int] = PLANES
    """That a network takes."""
    history: ClassVar[int] = 0
    """Plies before a position that its networks look at."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term."""
        weights = self.config.loss
        heads = {f"ssl_{name}": getattr(weights.ssl, name) for name in self.config.model.ssl}
        teacher = self.config.teacher
        taught = {"teacher_policy": teacher.policy, "teacher_value": teacher.wdl} if teacher.network else {}
        taught |= {"teacher_features": teacher.features} if teacher.network and teacher.features else {}
        return {"policy": weights.policy, "value": weights.value} | heads | taught

    @property
    def gated(self) -> frozenset[str]:
        """The self-supervised heads' terms."""
        return frozenset(f"ssl_{name}" for name in self.config.model.ssl)

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Stored rows to packed training arrays, all with leading dimension B.

        `pieces` u8 (B, 32); `state` i16 (B, 6): castling, en-passant file (-1 none), half-move clock,
        repetition, side, ply; `policy_index` i16 (B, L) on the oriented board, -1 in pads; `policy_weight`
        f32 (B, L), a row sums to 1, or 0 without target; `wdl` f32 (B, 3) likewise; `result` i8 (B,), 2
        unknown. With self-supervised heads `maps` u8 (B, 5, 8), bit maps as `ssl.MAPS`; with the piece head
        `hidden` u8 (B, 8), where its loss has a weight. Of a cached teacher `teacher_policy` f32 (B, L) and
        `teacher_wdl` f32 (B, 3), see `distill.teacher`.

        Where `data.mirror` is on, half of the rows without castling rights are mirrored left and right,
        before anything else is made of them. Every random number is drawn whether it is used or not. Rows with
        hidden squares idle while the gate leaves the piece head out.
        """
        rows = len(batch["records"])
        mirrored = rng.random(rows) < 0.5
        data = self.config.data
        hidden = ssl.hide(rng, rows, data.hidden_rows, data.hidden_squares)
        batch = outputs.unpacked(batch)
        if data.mirror:
            batch = records.mirror(batch, mirrored & records.mirrorable(batch["records"]))
        return self._packed(batch, hidden)

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """As `prepare`, with nothing mirrored and nothing hidden: every row gives policy and value, none a loss of the
        piece head, which the ssl notebook measures.
        """
        return self._packed(outputs.unpacked(batch), np.zeros((len(batch["records"]), 8), np.uint8))

    def inputs(
        self, rows: np.ndarray, index: np.ndarray, offset: np.ndarray, past: Past | None = None
    ) -> dict[str, np.ndarray]:
        """What `predict` asks for, of records (B,) and their legal moves (K,) at offsets (B + 1,): `pieces`, `state`
        and `policy_index` as `prepare` gives them. past: for networks that look at it.
        """
        return {
            "pieces": np.ascontiguousarray(rows["pieces"]),
            "state": packed_state(rows),
            "policy_index": _padded(index, offset, losses.PAD, np.int16),
        }

    def _packed(self, batch: dict[str, np.ndarray], hidden: np.ndarray) -> dict[str, np.ndarray]:
        rows, offset = batch["records"], batch["policy_offset"]
        out = self.inputs(rows, batch["policy_index"], offset) | {
            "policy_weight": _shares(_padded(batch["policy_weight"], offset, 0, np.float32)),
            "wdl": _shares(rows["wdl"].astype(np.float32)),
            "result": np.ascontiguousarray(rows["result"]),
        }
        if "policy_teacher" in batch:
            out["teacher_policy"] = _padded(batch["policy_teacher"], offset, losses.FILL, np.float32)
            out["teacher_wdl"] = _shares(batch["sidecar"]["wdl"].astype(np.float32))
        if self.config.model.ssl:
            out["maps"] = ssl.targets(rows)
        if self.weights.get("ssl_piece"):
            out["hidden"] = hidden
        return out

    def build_model(self) -> PolicyValueNet:
        """A fresh fp32 network on the CPU, the same for the same seed; torch's random streams are left untouched."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            model = PolicyValueNet(self.config.model)
        teacher = self.config.teacher
        if teacher.network and teacher.schedule == "learned":
            model.temperature = LearnedTemperature(teacher.temperature, teacher.temperature_rate)
        return model

    def set_chunk(self, model: nn.Module, rows: int) -> int:
        """Let the self-supervised heads work on `rows` positions at once; not those with BatchNorm, whose statistics
        are of all of them. Returns what is in force.
        """
        assert isinstance(model, PolicyValueNet)
        model.ssl_chunk = rows if self.config.model.norm.stem_heads == "group" else 0
        return model.ssl_chunk

    def counts(self, batch: Batch) -> dict[str, int]:
        """Valid items of each term: rows, or squares for the self-supervised heads."""
        rows = _plain_rows(batch)
        policy = losses.policy_rows(batch["policy_index"], batch["policy_weight"], rows)
        value = losses.value_known(batch["wdl"], batch["result"], self.config.loss.result_share) & rows
        # Made before every update, while a GPU waits: not by way of the maps of squares that the losses need.
        hidden, squares = batch["hidden"].numpy() if "hidden" in batch else np.zeros(0, np.uint8), 64 * int(rows.sum())
        counts = {"policy": int(policy.sum()), "value": int(value.sum())}
        for name in self.config.model.ssl:
            counts[f"ssl_{name}"] = int(np.bitwise_count(hidden).sum()) if name == "piece" else squares
        if self.config.teacher.network:
            moving = soft.policy_rows(batch["policy_index"], rows)
            counts |= {"teacher_policy": int(moving.sum()), "teacher_value": int(rows.sum())}
        if "teacher_features" in self.weights:
            counts["teacher_features"] = int(rows.sum())
        return counts

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums of the active terms and their metrics (see losses.py); of rows with hidden squares `ssl_piece` alone."""
        return self.scores(self.network_outputs(model, batch, active), model, batch, active)

    def scores(
        self, out: dict[str, Any], model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`losses`, of what the network has said of the batch (`network_outputs`)."""
        if "teacher_policy" in active and (learned := self._learned_temperature(model)) is not None:
            out["temperature"] = learned(batch["reversal"][0]).expand(len(batch["pieces"]))
            out["raw"] = learned.raw.detach()
        sums: Sums = {}
        metrics: Sums = {}
        with torch.autocast(batch["pieces"].device.type, enabled=False):
            for term in sorted(active):
                sums[term], of_term = self._term(term, out, batch)
                metrics |= {f"{term}/{name}": value for name, value in of_term.items()}
        return sums, metrics

    def _term(self, term: str, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        options = self.config.loss
        if term == "policy":
            index, weight = self.network_index(batch), batch["policy_weight"]
            rows = _plain_rows(batch)
            return losses.policy_loss(out["policy"], index, weight, rows, **self._learned_policy)
        if term == "value":
            target, rows = self._value_target(batch)
            if self.config.model.value.kind == "scalar":
                return losses.scalar_loss(out["value"], target, rows, options.scalar, options.huber_delta)
            return losses.wdl_loss(out["value"], target, rows)
        if term == "teacher_policy":
            index, rows = self.network_index(batch), _plain_rows(batch)
            heat = out.get("temperature", batch["temperature"])
            loss, metrics = soft.policy_loss(out["policy"], index, batch["teacher_policy"], rows, heat)
            return loss, metrics | ({"raw": out["raw"] * soft.policy_rows(index, rows).sum()} if "raw" in out else {})
        if term == "teacher_value":
            return soft.wdl_loss(out["value"], batch["teacher_wdl"], _plain_rows(batch))
        if term == "teacher_features":
            blocks = [own for own, _ in self.config.teacher.layers] or range(len(out["stream"]) - 1)
            own = self.additions(out["stream"], batch, blocks, self.config.teacher.squares)
            theirs = [batch[f"teacher_features_{k}"] for k in range(len(blocks))]
            return features.loss(own, theirs, _plain_rows(batch)), {}
        name = term.removeprefix("ssl_")
        # Outputs are turned to the oriented board, where the targets are.
        logits, squares = self.oriented(out["ssl"][name], batch, name), _squares(batch, name)
        target = ssl.target(batch, name)
        if SSL_CHANNELS[name] > 1:
            return losses.class_loss(logits, target, squares)
        return losses.binary_loss(logits, target, squares, self._positive(name))

    @property
    def _learned_policy(self) -> dict[str, Any]:
        options = self.config.loss
        return {
            "smoothing": options.label_smoothing,
            "best": options.best_move,
            "temperature": options.policy_temperature,
        }

    def additions(self, stream: Sequence[Tensor], batch: Batch, blocks: Sequence[int], squares: bool) -> list[Tensor]:
        """As `features.additions`, on the oriented board where `squares` are wanted each by itself."""
        return features.additions(stream, blocks, functools.partial(self.oriented, batch=batch) if squares else None)

    def _learned_temperature(self, model: nn.Module) -> LearnedTemperature | None:
        """Where T is learned, in training: held-out rows are always scored at the temperature of their batch."""
        if self.config.teacher.schedule != "learned" or not model.training:
            return None
        learned = model.temperature  # of a compiled model, too
        assert isinstance(learned, LearnedTemperature)
        return learned

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per term (chance, floor) as sums over the items of `counts`: see losses.py; a self-supervised head
        starts at ln(classes) per square and can reach 0.
        """
        options, counts = self.config.loss, self.counts(batch)
        target, rows = self._value_target(batch)
        scalar = self.config.model.value.kind == "scalar"
        out = {
            "policy": losses.policy_bounds(
                batch["policy_index"],
                batch["policy_weight"],
                _plain_rows(batch),
                **self._learned_policy,
            ),
            "value": losses.value_bounds(target, rows, scalar, options.scalar, options.huber_delta),
        }
        for name in self.config.model.ssl:
            classes, squares = SSL_CHANNELS[name], _squares(batch, name)
            if classes > 1:
                out[f"ssl_{name}"] = (counts[f"ssl_{name}"] * math.log(classes), 0.0)
            else:
                maps = ssl.target(batch, name)
                out[f"ssl_{name}"] = losses.binary_bounds(maps, squares, self._positive(name))
        if self.config.teacher.network:
            index, rows = batch["policy_index"], _plain_rows(batch)
            theirs, heat = (batch[name].cpu() for name in ("teacher_policy", "temperature"))
            out["teacher_policy"] = soft.policy_bounds(index, theirs, rows, heat)
            wdl = batch.get("teacher_wdl")
            out["teacher_value"] = soft.wdl_bounds(wdl.cpu(), rows) if wdl is not None else (0.0, 0.0)
        return out

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Raw outputs: `policy` (B, L), logits of legal moves, NaN in pads; `value`; `ssl_<head>` logits."""
        out = self.network_outputs(model, batch, frozenset(self.weights))
        index = self.network_index(batch)
        legal = torch.where(index != losses.PAD, losses.legal_logits(out["policy"], index), math.nan)
        return {"policy": legal, "value": out["value"]} | {f"ssl_{k}": v for k, v in out.get("ssl", {}).items()}

    def predict(self, model: nn.Module, batch: Batch, heads: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Predictions on the oriented board.

        `policy` (B, L) log-probabilities of `policy_index`'s moves, about -1e9 in pads; `value` (B,) expected result in
        -1..1; `wdl` (B, 3) probabilities, if the head gives them; `ssl/<head>` (B, c, 8, 8) probabilities for each of
        `heads`.
        """
        names = frozenset({"policy", "value", *(f"ssl_{name}" for name in heads)})
        return self.predictions(self.network_outputs(model, batch, names), batch, heads)

    def predictions(self, out: dict[str, Any], batch: Batch, heads: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """`predict`, of what the network has said of the batch (`network_outputs`)."""
        result = {"policy": losses.legal_logits(out["policy"], self.network_index(batch)).log_softmax(1)}
        if self.config.model.value.kind == "scalar":
            result["value"] = out["value"]
        else:
            result["wdl"] = out["value"].softmax(1)
            result["value"] = result["wdl"][:, 0] - result["wdl"][:, 2]
        for name in heads:
            result[f"ssl/{name}"] = self.shares(name, self.oriented(out["ssl"][name], batch, name))
        return result

    def shares(self, head: str, logits: Tensor) -> Tensor:
        """Probabilities of a self-supervised head's logits (B, c, 8, 8), corrected for `loss.positive`."""
        if logits.shape[1] > 1:
            return logits.softmax(1)
        return losses.calibrated(logits, self._positive(head)).sigmoid()

    def illegal_mass(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """(B,) f32: share of each row's policy target on moves that are not legal, of a batch of `prepare`; 0 is right.

        For checks of the data: the losses trust the list of moves.
        """
        state = batch["state"]
        castling, en_passant = state[:, CASTLING].astype(np.uint8), state[:, EN_PASSANT].astype(np.int8)
        legal, offset = bitboard.legal_policy_indices(batch["pieces"], castling, en_passant)
        table = np.zeros((len(state), bitboard.POLICY_SIZE), bool)
        table[np.repeat(np.arange(len(state)), np.diff(offset)), legal] = True
        index, weight = batch["policy_index"], batch["policy_weight"]
        weight = np.where(index >= 0, weight, 0)
        good = np.take_along_axis(table, np.maximum(index, 0).astype(np.int64), axis=1)
        total = weight.sum(1)
        mass: np.ndarray = np.where(good, 0, weight).sum(1) / np.where(total > 0, total, 1)
        return mass.astype(np.float32)

    def _positive(self, head: str) -> float:
        """How many times a 1 counts in a binary head's loss."""
        return float(getattr(self.config.loss.positive, head, 1.0))

    def _value_target(self, batch: Batch) -> tuple[Tensor, Tensor]:
        target, known = losses.value_target(batch["wdl"], batch["result"], self.config.loss.result_share)
        return target, known & _plain_rows(batch)

    def network_outputs(self, model: nn.Module, batch: Batch, heads: frozenset[str]) -> dict[str, Any]:
        """What the network says of a packed batch, in its own frame: see `PolicyValueNet.forward`."""
        names = frozenset(TAUGHT.get(head, head) for head in heads)
        arguments: list[Any] = [planes(batch, self.config.model.encoding), names]
        # A GPU makes all moves' in no time, and of a compiled network every number of moves would be another graph
        if isinstance(model, PolicyValueNet) and batch["policy_index"].device.type == "cpu" and "policy" in names:
            arguments.append(self.network_index(batch))
        out: dict[str, Any] = model(*arguments)
        return out

    def network_index(self, batch: Batch) -> Tensor:
        """(B, L) policy indices in the network's frame, PAD kept."""
        index = batch["policy_index"]
        if self.config.model.encoding == "oriented":
            return index
        table = _move_table(self.config.model.encoding, str(index.device))
        moved = table[batch["state"][:, SIDE, None].long(), index.clamp(min=0).long()]
        return torch.where(index != losses.PAD, moved, losses.PAD)

    def oriented(self, maps: Tensor, batch: Batch, name: str = "") -> Tensor:
        """Maps (B, c, 8, 8) turned from the network's frame to the oriented board. name: of the head that gave them."""
        if self.config.model.encoding == "oriented":
            return maps
        # Matrix0's rows run from rank 8: White's board is turned over. Black's oriented ranks run as its rows
        # do, but its own pieces are the second six classes.
        black = batch["state"][:, SIDE, None, None, None].ne(0)
        if name == "piece":
            return torch.where(black, maps[:, _swapped(str(maps.device))], maps.flip(2))
        return torch.where(black, maps, maps.flip(2))


def packed_state(rows: np.ndarray) -> np.ndarray:
    """The columns STATE (..., 6) int16 of records (...); ply wraps, and planes() reads it back as unsigned."""
    return np.stack([rows[name].astype(np.uint16).view(np.int16) for name in STATE], axis=-1)


def boards_of(batch: Batch) -> list[chess.Board]:
    """The positions of a prepared batch, whole."""
    rows = np.zeros(len(batch["pieces"]), records.LAYOUT.record)
    rows["pieces"] = batch["pieces"].numpy()
    for column, name in enumerate(STATE):
        rows[name] = batch["state"][:, column].numpy().astype(rows[name].dtype)
    return [records.to_board(row) for row in rows]


def _plain_rows(batch: Batch) -> Tensor:
    """(B,) bool: rows whose whole board is shown."""
    if "hidden" not in batch:
        return torch.ones(len(batch["pieces"]), dtype=torch.bool, device=batch["pieces"].device)
    return batch["hidden"].eq(0).all(1)


def _squares(batch: Batch, name: str) -> Tensor:
    """(B, 8, 8) bool: squares that count for a head: the hidden ones for `piece`, all of plain rows for the others."""
    if name == "piece":
        hidden = batch.get("hidden", torch.zeros_like(batch["pieces"][:, :8]))
        return unpack_maps(hidden).bool()
    return _plain_rows(batch)[:, None, None].expand(-1, 8, 8)


@functools.cache
def _move_table(encoding: str, device: str) -> Tensor:
    """`move_map` on a device, copied there once; no inference tensor, which training could not use."""
    with torch.inference_mode(False):
        return move_map(encoding).to(device)


@functools.cache
def _swapped(device: str) -> Tensor:
    """`ssl.SWAPPED` on a device, copied there once."""
    with torch.inference_mode(False):
        return torch.from_numpy(ssl.SWAPPED).to(device, torch.int64)


def _padded(values: np.ndarray, offset: np.ndarray, fill: float, kind: type[np.generic]) -> np.ndarray:
    """Ragged rows (K,) as (B, L) of a kind, the rest filled; L is a multiple of STEP_MOVES."""
    length = np.diff(offset)
    width = max(MIN_MOVES, -(-int(length.max(initial=0)) // STEP_MOVES) * STEP_MOVES)
    out = np.full((len(length), width), fill, kind)
    out[np.arange(width) < length[:, None]] = values  # both row by row
    return out


def _shares(weights: np.ndarray) -> np.ndarray:
    """Rows (B, n) float32 divided by their sums; rows of zeros stay."""
    total = weights.sum(1, keepdims=True, dtype=np.float64)
    shares: np.ndarray = (weights / np.where(total > 0, total, 1)).astype(np.float32)
    return shares
