"""Configuration of a chess run: data, network, losses, teacher."""

from functools import reduce
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from matrixlib import config as configuration
from matrixlib.config import Config, CountOrZero, Fraction, NonNegative, Positive, Real, Section, Width, option
from matrixlib.engine.curriculum import SourceCurriculumConfig

Activation = Literal["silu", "relu", "gelu", "mish"]
Lc0Activation = Literal["default", "mish", "relu", "none", "tanh", "sigmoid", "selu", "swish", "squared_relu"]
SSLHead = Literal["piece", "threat", "pin", "fork", "control"]
START_PLIES = 60.0  # predicted by a new moves-left head
SSL_CHANNELS = {"piece": 13, "threat": 1, "pin": 1, "fork": 1, "control": 3}
LC0_OPTIONS: dict[str, tuple[Any, ...]] = {  # of the networks that Lc0's weight files hold
    "encoding": ("lc0",),
    "block": ("basic",),
    "preact": (False,),
    "activation": ("relu", "mish"),
    "norm.blocks": ("batch",),
    "norm.stem_heads": ("batch",),
    "chess_features": (False,),
    "lines": (0,),
    "attention.every": (0,),
    "policy.kind": ("conv", "attention", "dense"),
    "policy.clamp": (0.0,),
    "policy.logit_norm": (False,),
    "value.pool": ("flatten",),
    "auxiliary": (False,),
}


class NormConfig(Section):
    blocks: Literal["group", "batch"] = option("group", "normalisation in residual blocks and chess features")
    stem_heads: Literal["group", "batch"] = option("group", "normalisation in stem and heads")
    momentum: Fraction = option(0.1, "BatchNorm momentum: weight of the new batch")


class AttentionConfig(Section):
    every: CountOrZero = option(0, "attention after every k-th block; 0 = none; not worth its time in a small network")
    heads: Width = option(4, "attention heads; must divide `channels`")
    bias: bool = option(True, "learned attention bias per head and pair of squares (heads, 64, 64)")
    mask: bool = option(False, "attend only to squares one queen, knight or king move away")
    unmasked_mix: Fraction = option(0.0, "weight of unmasked attention mixed in when `mask` is on")
    norm: Literal["pre", "post"] = option("pre", "LayerNorm before attention, or after the residual sum as in Matrix0")


class EncoderConfig(Section):
    heads: Width = option(4, "attention heads; must divide `channels`")
    ffn_ratio: Positive = option(2.0, "hidden width of the feed-forward layers relative to `channels`")
    ffn_activation: Lc0Activation = option("default", "activation of the feed-forward layers; default: `activation`")
    smolgen: CountOrZero = option(0, "width of smolgen, scores made from the whole board; 0 = none, 256 in Lc0's own")
    smolgen_activation: Lc0Activation = option("default", "activation of smolgen; default: `activation`")
    dense: CountOrZero = option(0, "channels per square made from the whole board (PE_DENSE); 0 = PE_MAP")


class PolicyHeadConfig(Section):
    kind: Literal["conv", "attention", "factored", "dense"] = option(
        "conv",
        "type of policy head; `attention`: from-squares are queries, to-squares keys; `factored` and `dense` cost "
        "top-1 (guide of verdicts)",
    )
    channels: Width = option(48, "channels before the output layer")
    rank: Width = option(96, "hidden width of `factored`, query and key width of `attention`")
    clamp: NonNegative = option(0.0, "clamp activations and logits, 5.0 in Matrix0; 0 = none")
    logit_norm: bool = option(False, "LayerNorm over all logits, as in Matrix0")


class ValueHeadConfig(Section):
    kind: Literal["wdl", "scalar"] = option("wdl", "win-draw-loss logits, or a tanh scalar")
    pool: Literal["flatten", "pooled", "attention"] = option(
        "flatten", "flatten the squares, average them, or pool them by attention"
    )
    channels: Width = option(32, "channels before the linear layers")
    hidden: Width = option(128, "width of the first hidden layer; the second has half")
    activation: Activation = option("silu", "activation of the hidden layers; `relu` units may die")


class MovesLeftConfig(Section):
    channels: CountOrZero = option(0, "channels of a head that predicts plies to the game's end; 0 = none, 8 in Lc0's")
    hidden: Width = option(128, "width of its hidden layer")


class ModelConfig(Section):
    encoding: Literal["oriented", "matrix0", "lc0"] = option(
        "oriented", "input planes and policy encoding; `lc0`: a network that Lc0 runs (guide lc0)"
    )
    history: bool = option(
        False,
        "`lc0` networks see the seven positions before, in training as far as the game's rows are stored one after "
        "another; false: only this one",
    )
    trunk: Literal["residual", "encoder"] = option(
        "residual", "residual blocks; `encoder`: those of Lc0's attention bodies, for GPUs (guide lc0)"
    )
    channels: Width = option(48, "trunk width")
    blocks: Annotated[int, Field(ge=0, le=1024)] = option(6, "residual blocks, or encoders")
    block: Literal["basic", "light", "bottleneck"] = option(
        "basic", "3x3-3x3; 3x3-1x1 with one norm, for `lines`, faster; or 1x1-3x3-1x1 (costs top-1)"
    )
    bottleneck: Width = option(2, "reduction of a bottleneck block: its inner width is channels // bottleneck")
    preact: bool = option(True, "pre-activation blocks: norm and activation before each convolution")
    activation: Activation = option("silu", "activation of trunk and heads; `relu` costs top-1 (guide of verdicts)")
    norm: NormConfig = NormConfig()
    se_ratio: Fraction = option(0.25, "squeeze-and-excitation width relative to `channels`; 0 = none")
    droppath: Annotated[Real, Field(ge=0, lt=1)] = option(
        0.0, "stochastic depth: drop rate of the last residual branch, linear in depth"
    )
    dropout: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "dropout in attention and heads")
    chess_features: bool = option(False, "Matrix0's position encoding and feature convolutions")
    lines: CountOrZero = option(
        0,
        "channels of each residual block summed over the squares seen on ranks and files, and as many on diagonals; "
        "half of all leaves none to the square itself, which costs top-1",
    )
    attention: AttentionConfig = AttentionConfig()
    encoder: EncoderConfig = EncoderConfig()
    policy: PolicyHeadConfig = PolicyHeadConfig()
    value: ValueHeadConfig = ValueHeadConfig()
    moves_left: MovesLeftConfig = MovesLeftConfig()
    ssl: tuple[SSLHead, ...] = option(("threat", "control"), "self-supervised heads; [] = none")
    ssl_trunk: bool = option(True, "let their gradient reach the trunk; false trains only the heads")
    auxiliary: bool = option(False, "Matrix0's from-square and move-type heads, never trained")
    checkpoint_every: CountOrZero = option(0, "activation checkpointing on every k-th block; 0 = off")

    @model_validator(mode="after")
    def _divides(self, info: ValidationInfo) -> Self:
        ours = self.trunk == "encoder" and not info.context
        part = "encoder" if ours else "attention" if self.attention.every else ""
        if part and self.channels % (heads := getattr(self, part).heads):
            good = [h for h in range(1, 65) if self.channels % h == 0]
            raise ValueError(f"{part}.heads {heads} does not divide channels {self.channels}; use one of {good}")
        if ours and (self.channels % 16 or self.encoder.smolgen % 16):
            given = f"channels {self.channels} and encoder.smolgen {self.encoder.smolgen}"
            raise ValueError(f"{given} must be multiples of 16 for trunk encoder, as Lc0's GPU backends want it")
        if self.trunk == "encoder" and (self.encoding != "lc0" or not self.blocks):
            raise ValueError("trunk encoder needs encoding lc0 (preset lc0_quick) and blocks above 0")
        inner = self.channels if self.block != "bottleneck" else self.channels // self.bottleneck
        if 2 * self.lines > inner:
            most = f"blocks have {inner} channels; set {inner // 2} at most"
            raise ValueError(f"lines {self.lines}: twice as many are summed, and {most}")
        if len(set(self.ssl)) != len(self.ssl):
            raise ValueError(f"ssl names a head twice: {list(self.ssl)}")
        if self.encoding == "lc0" and (changes := lc0_changes(self, bool(info.context))):
            raise ValueError(f"Lc0 does not run this network; with encoding lc0 set {changes}")
        if self.history and self.encoding != "lc0":
            raise ValueError("only networks with encoding lc0 see history: set history to false")
        if self.moves_left.channels and self.encoding != "lc0":
            raise ValueError("only networks with encoding lc0 have a moves-left head: set moves_left.channels to 0")
        return self


def lc0_changes(model: ModelConfig, read: bool = False) -> str:
    """The options to set for a network that Lc0 runs, empty if it is one. read: from a file, for our reader alone."""
    wanted = LC0_OPTIONS | {"value.activation": ("mish",) if model.activation == "mish" else ("relu",)}
    if not read:  # its ONNX backends crash for other widths
        wanted |= {"value.channels": (32,), "value.hidden": (128,)}
    if model.trunk == "encoder":
        wanted |= {"policy.kind": ("attention",), "dropout": (0.0,), "droppath": (0.0,)}
        wanted.pop("value.channels", None)
    if model.policy.kind == "conv":
        wanted["policy.channels"] = (model.channels,)  # Lc0 reads past the weights of another width without a word
    given = {name: reduce(getattr, name.split("."), model) for name in wanted}
    texts = [f"{name} {' or '.join(map(str, values))}" for name, values in wanted.items() if given[name] not in values]
    return ", ".join(f"model.{text.replace('False', 'false')}" for text in texts)


class SSLWeights(Section):
    piece: NonNegative = option(0.3, "weight of the piece loss: pieces on hidden squares")
    threat: NonNegative = option(1.5, "weight of the threat loss: squares attacked by the opponent")
    pin: NonNegative = option(0.3, "weight of the pin loss: pieces pinned to their king")
    fork: NonNegative = option(0.3, "weight of the fork loss: pieces that attack two valuable targets")
    control: NonNegative = option(1.5, "weight of the control loss: side with more attackers of a square")


class PositiveWeights(Section):
    pin: Annotated[Real, Field(ge=1)] = option(20.0, "positive weight of the pin loss, corrected for in predictions")
    fork: Annotated[Real, Field(ge=1)] = option(20.0, "positive weight of the fork loss, corrected for in predictions")


class LossConfig(Section):
    policy: NonNegative = option(1.0, "weight of the policy cross-entropy")
    value: NonNegative = option(1.0, "weight of the value loss")
    moves_left: NonNegative = option(1.0, "weight of the moves-left loss: Huber, of the error in units of 20 plies")
    ssl: SSLWeights = SSLWeights()
    positive: PositiveWeights = PositiveWeights()
    best_move: bool = option(False, "hard policy targets: the best move only; costs KL (guide of verdicts)")
    policy_temperature: Annotated[Real, Field(ge=0.1, le=10)] = option(
        1.0, "T: loss between p^(1/T) of both policies; below 1 likely moves weigh more; predictions stay calibrated"
    )
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "label smoothing over the legal moves")
    result_share: Fraction = option(
        0.0, "weight of the game result in the value target; the rest is the engine's win-draw-loss"
    )
    scalar: Literal["mse", "huber"] = option("mse", "loss of the scalar value head")
    huber_delta: Positive = option(1.0, "delta of the Huber loss")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if self.best_move and self.policy_temperature != 1:
            raise ValueError("best_move ignores the temperature: set policy_temperature to 1 or best_move to false")
        return self


class TeacherConfig(Section):
    network: str = option("", "teacher: a run, a checkpoint or a network file (Lc0, Matrix0, ONNX); empty = none")
    policy: NonNegative = option(1.0, "weight of the policy distillation loss, T^2 KL; labels keep those of `loss`")
    wdl: NonNegative = option(1.0, "weight of the win-draw-loss distillation loss")
    temperature: Positive = option(2.0, "T that softens both policies; the initial value unless `schedule` is `fixed`")
    schedule: Literal["fixed", "linear", "learned"] = option(
        "fixed", "T is constant, moves to `final_temperature`, or is learned adversarially between 1 and 5"
    )
    final_temperature: Positive = option(1.0, "T at the last update of the `linear` schedule")
    cache: bool = option(False, "compute the teacher's outputs once, stored beside the shards, not at every update")
    temperature_rate: Positive = option(0.1, "SGD learning rate of a learned T")
    features: NonNegative = option(
        0.0,
        "weight of the feature loss, 1 - CKA of the blocks' residuals; switched off when the held-out loss gets "
        "10 % worse; 0 = none",
    )
    layers: tuple[tuple[CountOrZero, CountOrZero], ...] = option(
        (), "pairs [student block, teacher block] of the feature loss, from 0; [] = equal relative depth"
    )
    squares: bool = option(False, "feature loss per square instead of on board means")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.schedule == "learned" and not 1 < self.temperature < 5:
            raise ValueError(f"a learned temperature starts between 1 and 5, not at {self.temperature:g}")
        if self.schedule == "learned" and self.network and not self.policy:
            raise ValueError("a learned temperature needs the policy loss: set teacher.policy above 0")
        if self.features and self.cache:
            raise ValueError("the cache holds no features: set teacher.cache to false or teacher.features to 0")
        return self


class ChessDataConfig(configuration.DataConfig):
    source: configuration.Source = option(
        "sample", f"`sample` (shipped with the package) or a folder of shards; {configuration.SEVERAL}"
    )
    mirror: bool = option(True, "random left-right mirroring of positions without castling rights")
    hidden_rows: Fraction = option(0.25, "fraction of positions with hidden squares, which train a `piece` head only")
    hidden_squares: Fraction = option(0.3, "fraction of their squares that is hidden")


class ChessConfig(Config):
    task: Literal["chess"]
    data: ChessDataConfig = ChessDataConfig()
    curriculum: SourceCurriculumConfig = SourceCurriculumConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig = TeacherConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.teacher.network and self.teacher.wdl and self.model.value.kind == "scalar":
            raise ValueError(
                "a scalar value head cannot learn win-draw-loss: set teacher.wdl to 0 or model.value.kind to wdl"
            )
        trained, data = "piece" in self.model.ssl and self.loss.ssl.piece, self.data
        if trained and not (data.hidden_rows and data.hidden_squares and data.hidden_rows < 1):
            raise ValueError(
                "the piece head needs hidden squares, the other losses rows without: set data.hidden_squares above 0 "
                "and data.hidden_rows between 0 and 1 (0.25 is usual), or take piece out of model.ssl"
            )
        return self
