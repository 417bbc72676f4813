"""Options of a chess training: data, network, losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from matrixlib.config import (
    Config,
    Count,
    CountOrZero,
    DataConfig,
    Fraction,
    NonNegative,
    Positive,
    Real,
    Section,
    option,
)
from matrixlib.engine.curriculum import SourceCurriculumConfig

Activation = Literal["silu", "relu", "gelu", "mish"]
SSLHead = Literal["piece", "threat", "pin", "fork", "control"]
SSL_CHANNELS = {"piece": 13, "threat": 1, "pin": 1, "fork": 1, "control": 3}


class NormConfig(Section):
    blocks: Literal["group", "batch"] = option("group", "normalisation inside residual blocks and features")
    stem_heads: Literal["group", "batch"] = option("group", "normalisation of the stem and the heads")
    momentum: Fraction = option(0.1, "BatchNorm momentum (weight of the new batch)")


class AttentionConfig(Section):
    every: CountOrZero = option(
        0, "one attention block after every k-th residual block; 0 = none; in a small network not worth its time"
    )
    heads: Count = option(4, "attention heads; must divide `channels`")
    bias: bool = option(True, "learned additive bias for every head and pair of squares (heads, 64, 64)")
    mask: bool = option(False, "let a square attend only to squares one queen, knight or king move away")
    unmasked_mix: Fraction = option(0.0, "share of unmasked attention blended in where `mask` is on")
    norm: Literal["pre", "post"] = option("pre", "`post` is Matrix0's LayerNorm over the skip path")


class PolicyHeadConfig(Section):
    kind: Literal["conv", "attention", "factored", "dense"] = option(
        "conv",
        "how 4,672 move logits are made; `attention` by queries of from-squares and keys of to-squares; "
        "`factored` and `dense` cost top-1 (guide of verdicts)",
    )
    channels: Count = option(48, "channels before the logits")
    rank: Count = option(96, "inner width of the `factored` head, width of queries and keys of `attention`")
    clamp: NonNegative = option(0.0, "clamp of Matrix0's head (5.0); 0 = none")
    logit_norm: bool = option(False, "Matrix0's LayerNorm over all logits")


class ValueHeadConfig(Section):
    kind: Literal["wdl", "scalar"] = option("wdl", "win-draw-loss logits, or one tanh value")
    pool: Literal["flatten", "pooled", "attention"] = option(
        "flatten", "flatten the squares, average over them, or weigh them by learned attention"
    )
    channels: Count = option(32, "channels before the linear layers")
    hidden: Count = option(128, "width of the first hidden layer; the second is half of it")
    activation: Activation = option("silu", "of the hidden layers; units of `relu` may die and stay dead")


class ModelConfig(Section):
    encoding: Literal["oriented", "matrix0"] = option("oriented", "input planes and move frame")
    channels: Count = option(48, "width of the trunk")
    blocks: CountOrZero = option(6, "residual blocks")
    block: Literal["basic", "bottleneck"] = option("basic", "3x3-3x3, or 1x1-3x3-1x1, which costs top-1")
    bottleneck: Count = option(2, "a bottleneck block's inner width is channels // bottleneck")
    preact: bool = option(True, "norm and activation before each convolution")
    activation: Activation = option("silu", "activation of trunk and heads; `relu` costs top-1 (guide of verdicts)")
    norm: NormConfig = NormConfig()
    se_ratio: Fraction = option(0.25, "squeeze-and-excitation width as a share of channels; 0 = none")
    droppath: Annotated[Real, Field(ge=0, lt=1)] = option(
        0.0, "probability of dropping a residual branch, per sample (linear in depth)"
    )
    dropout: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "dropout in attention and heads")
    chess_features: bool = option(False, "Matrix0's position encoding and feature convolutions")
    attention: AttentionConfig = AttentionConfig()
    policy: PolicyHeadConfig = PolicyHeadConfig()
    value: ValueHeadConfig = ValueHeadConfig()
    ssl: tuple[SSLHead, ...] = option(("threat", "control"), "self-supervised heads by name; [] = none")
    ssl_trunk: bool = option(True, "their gradient reaches the trunk; false trains the heads alone")
    auxiliary: bool = option(False, "Matrix0's from-square and move-type heads (never trained there)")
    checkpoint_every: CountOrZero = option(0, "activation checkpointing of every k-th block; 0 = off")

    @model_validator(mode="after")
    def _divides(self) -> ModelConfig:
        if self.attention.every and self.channels % self.attention.heads:
            good = [h for h in range(1, 65) if self.channels % h == 0]
            raise ValueError(
                f"attention.heads {self.attention.heads} does not divide channels {self.channels}; use one of {good}"
            )
        if len(set(self.ssl)) != len(self.ssl):
            raise ValueError(f"ssl names a head twice: {list(self.ssl)}")
        return self


class SSLWeights(Section):
    piece: NonNegative = option(0.3, "weight of the piece head's loss: what stands on hidden squares")
    threat: NonNegative = option(1.5, "weight of the threat head's loss: attacked by the opponent")
    pin: NonNegative = option(0.3, "weight of the pin head's loss: pinned to its own king")
    fork: NonNegative = option(0.3, "weight of the fork head's loss: attacks two worthwhile targets")
    control: NonNegative = option(1.5, "weight of the control head's loss: who has more attackers")


class PositiveWeights(Section):
    pin: Annotated[Real, Field(ge=1)] = option(
        20.0, "how many times a pinned piece counts in the pin loss; predictions are corrected for it"
    )
    fork: Annotated[Real, Field(ge=1)] = option(
        20.0, "how many times a forking piece counts in the fork loss; predictions are corrected for it"
    )


class LossConfig(Section):
    policy: NonNegative = option(1.0, "weight of the policy cross-entropy")
    value: NonNegative = option(1.0, "weight of the value loss")
    ssl: SSLWeights = SSLWeights()
    positive: PositiveWeights = PositiveWeights()
    best_move: bool = option(
        False, "learn the best move alone, a hard label, in place of every move's share; costs KL (guide of verdicts)"
    )
    policy_temperature: Annotated[Real, Field(ge=0.1, le=10)] = option(
        1.0, "T: policies p are compared as p^(1/T); below 1 likely moves count more, and what is predicted stays true"
    )
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = option(
        0.0, "share of the policy target spread over the legal moves"
    )
    result_share: Fraction = option(
        0.0, "share of the game result in the value target; the rest is the engine's win-draw-loss"
    )
    scalar: Literal["mse", "huber"] = option("mse", "loss of the scalar value head")
    huber_delta: Positive = option(1.0, "delta of the Huber loss")

    @model_validator(mode="after")
    def _one_target(self) -> LossConfig:
        if self.best_move and self.policy_temperature != 1:
            raise ValueError(
                "no temperature changes a best move alone: set policy_temperature to 1 or best_move to false"
            )
        return self


class TeacherConfig(Section):
    network: str = option(
        "",
        "learn from this network: a run, a checkpoint's folder, or the file of one (Lc0, Matrix0, ONNX); empty = none",
    )
    policy: NonNegative = option(
        1.0, "weight of the teacher's policy, T^2 KL; labels keep `loss.policy` and `loss.value`"
    )
    wdl: NonNegative = option(1.0, "weight of the teacher's win-draw-loss")
    temperature: Positive = option(
        2.0, "T by which both policies are softened; where `schedule` moves it, at the start"
    )
    schedule: Literal["fixed", "linear", "learned"] = option(
        "fixed", "T stays, goes to `final_temperature`, or is learned against the student within 1 and 5"
    )
    final_temperature: Positive = option(1.0, "T at the last update of the `linear` schedule")
    cache: bool = option(
        False, "ask the network once about all of the data, in files beside the shards, in place of every update"
    )
    temperature_rate: Positive = option(0.1, "learning rate of a learned T, by plain descent")
    features: NonNegative = option(
        0.0,
        "weight of the feature loss: 1 - CKA of what blocks add to the stream; off by itself where the "
        "held-out loss gets 10 % worse; 0 = none",
    )
    layers: tuple[tuple[CountOrZero, CountOrZero], ...] = option(
        (), "its pairs [block of the student, block of the teacher], from 0; [] = at the same depths"
    )
    squares: bool = option(False, "it compares each square, not the means over the board")

    @model_validator(mode="after")
    def _consistent(self) -> TeacherConfig:
        if self.schedule == "learned" and not 1 < self.temperature < 5:
            raise ValueError(f"a learned temperature begins between 1 and 5, not at {self.temperature:g}")
        if self.schedule == "learned" and self.network and not self.policy:
            raise ValueError("with teacher.policy 0 nothing tells a learned temperature where to go; set it above 0")
        if self.features and self.cache:
            raise ValueError("the cache holds no features: set teacher.cache to false or teacher.features to 0")
        return self


class ChessDataConfig(DataConfig):
    source: str = option("sample", "`sample` (ships with the package) or a folder of shards with a catalogue")
    mirror: bool = option(True, "mirror left-right at random where no castling right is left")
    hidden_rows: Fraction = option(
        0.25,
        "share of the positions with squares hidden at the input, where there is a `piece` head; "
        "they train that head alone",
    )
    hidden_squares: Fraction = option(0.3, "share of the squares hidden in such a position")


class ChessConfig(Config):
    """One run's whole configuration, where chess is trained."""

    task: Literal["chess"]
    data: ChessDataConfig = ChessDataConfig()
    curriculum: SourceCurriculumConfig = SourceCurriculumConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig = TeacherConfig()

    @model_validator(mode="after")
    def _consistent(self) -> ChessConfig:
        if self.teacher.network and self.teacher.wdl and self.model.value.kind == "scalar":
            raise ValueError("one number cannot learn win-draw-loss: set teacher.wdl to 0 or model.value.kind to wdl")
        trained, data = "piece" in self.model.ssl and self.loss.ssl.piece, self.data
        if trained and not (data.hidden_rows and data.hidden_squares and data.hidden_rows < 1):
            raise ValueError(
                "the piece head is asked about hidden squares, all others about other rows: give data.hidden_squares a "
                "value above 0 and data.hidden_rows one between 0 and 1 (0.25 is usual), or take piece out of model.ssl"
            )
        return self
