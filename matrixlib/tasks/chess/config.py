"""Options of a chess training: data, network, losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from matrixlib.config import Config, Count, CountOrZero, DataConfig, Fraction, NonNegative, Positive, Real, Section
from matrixlib.engine.stages import SourceCurriculumConfig

Activation = Literal["silu", "relu", "gelu", "mish"]
SSLHead = Literal["piece", "threat", "pin", "fork", "control"]
SSL_CHANNELS = {"piece": 13, "threat": 1, "pin": 1, "fork": 1, "control": 3}


class NormConfig(Section):
    blocks: Literal["group", "batch"] = Field(
        default="group", description="normalisation inside residual blocks and features"
    )
    stem_heads: Literal["group", "batch"] = Field(
        default="group", description="normalisation of the stem and the heads"
    )
    momentum: Fraction = Field(default=0.1, description="BatchNorm momentum (weight of the new batch)")


class AttentionConfig(Section):
    every: CountOrZero = Field(default=0, description="one attention block after every k-th residual block; 0 = none")
    heads: Count = Field(default=4, description="attention heads; must divide `channels`")
    bias: bool = Field(
        default=True, description="learned additive bias for every head and pair of squares (heads, 64, 64)"
    )
    mask: bool = Field(
        default=False, description="let a square attend only to squares one queen, knight or king move away"
    )
    unmasked_mix: Fraction = Field(default=0.0, description="share of unmasked attention blended in where `mask` is on")
    norm: Literal["pre", "post"] = Field(default="pre", description="`post` is Matrix0's LayerNorm over the skip path")


class PolicyHeadConfig(Section):
    kind: Literal["conv", "attention", "factored", "dense"] = Field(
        default="conv",
        description="how 4,672 move logits are made; `attention` by queries of from-squares and keys of to-squares",
    )
    channels: Count = Field(default=48, description="channels before the logits")
    rank: Count = Field(
        default=96, description="inner width of the `factored` head, width of queries and keys of `attention`"
    )
    clamp: NonNegative = Field(default=0.0, description="clamp of Matrix0's head (5.0); 0 = none")
    logit_norm: bool = Field(default=False, description="Matrix0's LayerNorm over all logits")


class ValueHeadConfig(Section):
    kind: Literal["wdl", "scalar"] = Field(default="wdl", description="win-draw-loss logits, or one tanh value")
    pool: Literal["flatten", "pooled", "attention"] = Field(
        default="flatten", description="flatten the squares, average over them, or weigh them by learned attention"
    )
    channels: Count = Field(default=32, description="channels before the linear layers")
    hidden: Count = Field(default=128, description="width of the first hidden layer; the second is half of it")
    activation: Activation = Field(
        default="silu", description="of the hidden layers; units of `relu` may die and stay dead"
    )


class ModelConfig(Section):
    encoding: Literal["oriented", "matrix0"] = Field(default="oriented", description="input planes and move frame")
    channels: Count = Field(default=48, description="width of the trunk")
    blocks: CountOrZero = Field(default=6, description="residual blocks")
    block: Literal["basic", "bottleneck"] = Field(default="basic", description="3x3-3x3, or 1x1-3x3-1x1")
    bottleneck: Count = Field(default=2, description="a bottleneck block's inner width is channels // bottleneck")
    preact: bool = Field(default=True, description="norm and activation before each convolution")
    activation: Activation = Field(default="silu", description="activation of trunk and heads")
    norm: NormConfig = NormConfig()
    se_ratio: Fraction = Field(
        default=0.25, description="squeeze-and-excitation width as a share of channels; 0 = none"
    )
    droppath: Annotated[Real, Field(ge=0, lt=1)] = Field(
        default=0.0, description="probability of dropping a residual branch, per sample (linear in depth)"
    )
    dropout: Annotated[Real, Field(ge=0, lt=1)] = Field(default=0.0, description="dropout in attention and heads")
    chess_features: bool = Field(default=False, description="Matrix0's position encoding and feature convolutions")
    attention: AttentionConfig = AttentionConfig()
    policy: PolicyHeadConfig = PolicyHeadConfig()
    value: ValueHeadConfig = ValueHeadConfig()
    ssl: tuple[SSLHead, ...] = Field(
        default=("threat", "control"), description="self-supervised heads by name; [] = none"
    )
    ssl_trunk: bool = Field(default=True, description="their gradient reaches the trunk; false trains the heads alone")
    auxiliary: bool = Field(
        default=False, description="Matrix0's from-square and move-type heads (never trained there)"
    )
    checkpoint_every: CountOrZero = Field(
        default=0, description="activation checkpointing of every k-th block; 0 = off"
    )

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
    piece: NonNegative = Field(
        default=0.3, description="weight of the piece head's loss: what stands on hidden squares"
    )
    threat: NonNegative = Field(default=1.5, description="weight of the threat head's loss: attacked by the opponent")
    pin: NonNegative = Field(default=0.3, description="weight of the pin head's loss: pinned to its own king")
    fork: NonNegative = Field(default=0.3, description="weight of the fork head's loss: attacks two worthwhile targets")
    control: NonNegative = Field(default=1.5, description="weight of the control head's loss: who has more attackers")


class PositiveWeights(Section):
    pin: Annotated[Real, Field(ge=1)] = Field(
        default=20.0,
        description="how many times a pinned piece counts in the pin loss; predictions are corrected for it",
    )
    fork: Annotated[Real, Field(ge=1)] = Field(
        default=20.0,
        description="how many times a forking piece counts in the fork loss; predictions are corrected for it",
    )


class LossConfig(Section):
    policy: NonNegative = Field(default=1.0, description="weight of the policy cross-entropy")
    value: NonNegative = Field(default=1.0, description="weight of the value loss")
    ssl: SSLWeights = SSLWeights()
    positive: PositiveWeights = PositiveWeights()
    best_move: bool = Field(
        default=False, description="learn the best move alone, a hard label, in place of every move's share"
    )
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of the policy target spread over the legal moves"
    )
    result_share: Fraction = Field(
        default=0.0, description="share of the game result in the value target; the rest is the engine's win-draw-loss"
    )
    scalar: Literal["mse", "huber"] = Field(default="mse", description="loss of the scalar value head")
    huber_delta: Positive = Field(default=1.0, description="delta of the Huber loss")


class TeacherConfig(Section):
    network: str = Field(
        default="",
        description="learn from this network: a run, a checkpoint's folder, or the file of one (Lc0, Matrix0, ONNX); "
        "empty = none",
    )
    policy: NonNegative = Field(
        default=1.0, description="weight of the teacher's policy, T^2 KL; labels keep `loss.policy` and `loss.value`"
    )
    wdl: NonNegative = Field(default=1.0, description="weight of the teacher's win-draw-loss")
    temperature: Positive = Field(
        default=2.0, description="T by which both policies are softened; where `schedule` moves it, at the start"
    )
    schedule: Literal["fixed", "linear", "learned"] = Field(
        default="fixed",
        description="T stays, goes to `final_temperature`, or is learned against the student within 1 and 5",
    )
    final_temperature: Positive = Field(default=1.0, description="T at the last update of the `linear` schedule")
    cache: bool = Field(
        default=False,
        description="ask the network once about all of the data, in files beside the shards, in place of every update",
    )
    temperature_rate: Positive = Field(default=0.1, description="learning rate of a learned T, by plain descent")
    features: NonNegative = Field(
        default=0.0,
        description="weight of the feature loss: 1 - CKA of what blocks add to the stream; off by itself where the "
        "held-out loss gets 10 % worse; 0 = none",
    )
    layers: tuple[tuple[CountOrZero, CountOrZero], ...] = Field(
        default=(),
        description="its pairs [block of the student, block of the teacher], from 0; [] = at the same depths",
    )
    squares: bool = Field(default=False, description="it compares each square, not the means over the board")

    @model_validator(mode="after")
    def _within_bounds(self) -> TeacherConfig:
        if self.schedule == "learned" and not 1 < self.temperature < 5:
            raise ValueError(f"a learned temperature begins between 1 and 5, not at {self.temperature:g}")
        if self.features and self.cache:
            raise ValueError(
                "the cache holds what a teacher says, not its features: set teacher.cache to false or teacher.features "
                "to 0"
            )
        return self


class ChessDataConfig(DataConfig):
    source: str = Field(
        default="sample", description="`sample` (ships with the package) or a folder of shards with a catalogue"
    )
    mirror: bool = Field(default=True, description="mirror left-right at random where no castling right is left")
    hidden_rows: Fraction = Field(
        default=0.25,
        description="share of the positions with squares hidden at the input, where there is a `piece` head; "
        "they train that head alone",
    )
    hidden_squares: Fraction = Field(default=0.3, description="share of the squares hidden in such a position")


class ChessConfig(Config):
    """One run's whole configuration, where chess is trained."""

    task: Literal["chess"]
    data: ChessDataConfig = ChessDataConfig()
    curriculum: SourceCurriculumConfig = SourceCurriculumConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig = TeacherConfig()

    @model_validator(mode="after")
    def _teacher_fits(self) -> ChessConfig:
        if self.teacher.network and self.teacher.wdl and self.model.value.kind == "scalar":
            raise ValueError(
                "a value head with one number cannot learn win-draw-loss: set teacher.wdl to 0 or model.value.kind to "
                "wdl"
            )
        if self.teacher.schedule == "learned" and self.teacher.network and not self.teacher.policy:
            raise ValueError("with teacher.policy 0 nothing tells a learned temperature where to go; set it above 0")
        return self

    @model_validator(mode="after")
    def _piece_head(self) -> ChessConfig:
        trained = "piece" in self.model.ssl and self.loss.ssl.piece
        if trained and not (self.data.hidden_rows and self.data.hidden_squares):
            raise ValueError(
                "the piece head is asked about hidden squares, and none are hidden: give data.hidden_rows and "
                "data.hidden_squares values above 0, or take piece out of model.ssl"
            )
        if trained and self.data.hidden_rows == 1:
            raise ValueError(
                "with data.hidden_rows 1 every position trains the piece head alone; a quarter (0.25) is usual"
            )
        return self
