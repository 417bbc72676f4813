"""Strict configuration: YAML in, frozen sections out.

A preset in ``params/`` is complete: the schema holds no defaults, so a value lives in exactly one place.
Unknown, missing, duplicate and mistyped keys stop the run with a message that names the key and a fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from matrixlib.files import PARAMS


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names each key and what to do."""


def _number(value: Any) -> Any:
    """PyYAML reads ``3e-4`` as a string: accept a string that ``float()`` reads fully, for float fields only."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[Real, Field(gt=0)]
NonNegative = Annotated[Real, Field(ge=0)]
Fraction = Annotated[Real, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Auto = Literal["auto"]
Activation = Literal["silu", "relu", "gelu", "mish"]
SSLHead = Literal["piece", "threat", "pin", "fork", "control"]
SSL_CHANNELS = {"piece": 13, "threat": 1, "pin": 1, "fork": 1, "control": 3}


class Section(BaseModel):
    """Base of every section: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, data: Any) -> Any:
        """YAML has no tuples."""
        if not isinstance(data, Mapping):
            return data
        tuples = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {key: _as_tuple(value) if key in tuples else value for key, value in data.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


# Sections of the engine, the data and the run: every task has them


class DataConfig(Section):
    source: str = Field(description="a folder of shards with a catalogue, or a name that the task knows")
    limit: CountOrZero = Field(
        description="use only N training positions, the first of each source, of all the same share; 0 = all"
    )
    window_blocks: CountOrZero = Field(
        description="shuffle window in blocks of 4,096 records; 0 = everything (data fits in memory)"
    )
    workers: CountOrZero | Auto = Field(description="loader processes; 0 = in the main process")
    prefetch: Count | Auto = Field(description="updates prepared ahead by each worker")


class OptimConfig(Section):
    learning_rate: Annotated[Real, Field(ge=0)] = Field(description="peak learning rate of AdamW")
    schedule: Literal["cosine", "linear", "constant"] = Field(description="decay after the warm-up")
    final_fraction: Fraction = Field(description="learning rate at the last update as a share of the peak")
    warmup_steps: CountOrZero = Field(description="updates of linear warm-up (first update: 1/warmup, not 0)")
    weight_decay: NonNegative = Field(description="decoupled decay; never on norms, biases and embeddings")
    beta1: Fraction = Field(description="AdamW beta1")
    beta2: Fraction = Field(description="AdamW beta2")
    eps: Positive = Field(description="AdamW epsilon")
    clip_norm: Positive = Field(description="global gradient norm above which gradients are scaled down")
    ema_decay: Annotated[Real, Field(ge=0, lt=1)] = Field(
        description="exponential moving average of the weights, evaluated and exported; 0 = off"
    )


class TrainConfig(Section):
    steps: Count | Auto = Field(
        description="updates; `auto` = as many as fit in `minutes`, fixed at the start"
    )
    minutes: Positive = Field(description="training time aimed at where steps is `auto`")
    batch_size: Count = Field(description="positions of one update")
    micro_batch: Count | Auto = Field(description="positions of one forward pass; gradients are summed")
    statistics_interval: Count = Field(description="updates between output and gradient statistics")
    heartbeat_seconds: Positive = Field(description="seconds between heartbeat.json writes")


class ValidationConfig(Section):
    interval: Count = Field(description="updates between validations")
    sample: Count = Field(description="positions of the fixed sample that each validation uses")
    limit: CountOrZero = Field(description="use only N held-out rows, taken as those of data.limit; 0 = all")
    full_every: Count = Field(description="every k-th validation uses the whole set")
    batch_size: Count = Field(description="positions of one forward pass in validation")
    plateau: CountOrZero = Field(
        description="validations without improvement after which they get rarer; 0 = off"
    )
    plateau_factor: Count = Field(description="how many times rarer on a plateau")
    patience: CountOrZero = Field(description="full validations without improvement before stopping; 0 = off")
    min_delta: NonNegative = Field(description="what counts as an improvement of the validation loss")
    target_loss: NonNegative = Field(
        description="stop at this full validation loss (0 = off); refused below the attainable floor"
    )


class HealthConfig(Section):
    window: Annotated[int, Field(ge=8)] = Field(
        description="accepted updates that the running band of loss and gradient norm looks back on"
    )
    band: Positive = Field(description="robust standard deviations above the median that make an outlier")
    patience: Count = Field(description="outliers in a row after which the run is rolled back")
    skips: Count = Field(description="non-finite updates in a row after which the run is rolled back")
    rollbacks: CountOrZero = Field(description="rollbacks of a run; one more stops it with a diagnosis")
    rate_factor: Annotated[Real, Field(gt=0, le=1)] = Field(
        description="factor on the learning rate after a rollback"
    )
    rate_recovery: CountOrZero = Field(description="updates over which the factor goes back to 1")
    hooks: bool = Field(
        description="replay a non-finite update to name the module where a value first stops being finite"
    )


class GatingConfig(Section):
    warmup_steps: CountOrZero = Field(
        description="updates over which self-supervised weights rise to their value"
    )
    freeze_steps: CountOrZero = Field(
        description="updates without the self-supervised terms after an unstable one; 0 = never frozen"
    )
    seconds: NonNegative = Field(
        description="time for the self-supervised terms in an update; 0 = no limit. A run with one is not reproducible"
    )


class MemoryConfig(Section):
    limit: Fraction = Field(
        description="share of the accelerator's memory that this process may take; 0 = the library's own limit"
    )
    warn: Fraction = Field(description="share of that memory in use above which a warning is given")
    clear: Fraction = Field(description="share above which the allocator's cache is given back")


class CheckpointConfig(Section):
    interval: Count = Field(description="updates between checkpoints")
    keep: Annotated[int, Field(ge=2)] = Field(
        description="newest checkpoints kept (at least two) beside the best"
    )
    compress: Annotated[int, Field(ge=0, le=19)] = Field(
        description="zstd level of the tensor files; 0 = not compressed (weights shrink by a tenth only)"
    )


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(description="`auto` takes the best that works")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        description="autocast dtype; weights stay fp32"
    )
    threads: Count | Auto = Field(
        description="intra-op threads on the CPU; part of what makes runs bit-equal"
    )
    channels_last: bool | Auto = Field(description="memory format of convolutions")
    compile: bool | Auto = Field(description="torch.compile the model; `auto` = where it was measured to pay")


class Config(Section):
    """What engine, data and run need of a configuration; each task adds sections of its own.

    Each has a `model` and a `loss`, and `data` may have more keys.
    """

    if TYPE_CHECKING:  # no fields here: the task's schema gives them their types
        model: Any
        loss: Any

    task: str = Field(description="what is trained; decides which other sections there are")
    seed: CountOrZero = Field(description="seed of every random stream")
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    health: HealthConfig
    gating: GatingConfig
    memory: MemoryConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    runtime: RuntimeConfig


class CurriculumConfig(Section):
    """The engine's part of a curriculum; a task adds its dimensions, sections with `enabled`, `fractions`
    and `stages`.
    """

    kind: Literal["fractions", "adaptive"] = Field(
        description="stages end at shares of the updates, or when `metric` is good enough"
    )
    metric: str = Field(description="what `adaptive` looks at, as validation names it (`term/name`)")
    up: Real = Field(description="`adaptive`: go on when the metric is at least this ...")
    patience: Count = Field(description="... in so many validations in a row")
    down: Real = Field(description="`adaptive`: go back below this, as often in a row; must be below `up`")
    dwell: Count = Field(description="`adaptive`: validations in a phase before it may change")
    longest: CountOrZero = Field(
        description="`adaptive`: validations after which a phase ends in any case; 0 = never"
    )

    @model_validator(mode="after")
    def _hysteresis(self) -> CurriculumConfig:
        if self.down >= self.up:
            raise ValueError(f"down {self.down:g} must be below up {self.up:g}, or phases would flap")
        return self


class StagesConfig(Section):
    """One dimension of a curriculum; the task's subclass says what its `stages` are."""

    enabled: bool = Field(description="false = the last stage from the start")
    stages: tuple[Any, ...]
    fractions: tuple[Fraction, ...] = Field(
        description="share of the updates that each stage lasts; sum is 1"
    )

    @model_validator(mode="after")
    def _complete(self) -> StagesConfig:
        if not self.stages or len(self.stages) != len(self.fractions):
            raise ValueError(
                f"{len(self.stages)} stages and {len(self.fractions)} fractions; give one for each"
            )
        if abs(sum(self.fractions) - 1) > 1e-9:
            raise ValueError(f"fractions {list(self.fractions)} add up to {sum(self.fractions):g}, not to 1")
        return self


class SourceStages(StagesConfig):
    stages: tuple[dict[str, Annotated[Real, Field(gt=0)]], ...] = Field(
        description="weight of each source of the data in a stage, any positive numbers; "
        "{} = all sources, each by its number of positions"
    )


class SourceCurriculumConfig(CurriculumConfig):
    """Of the tasks whose data come from several sources."""

    sources: SourceStages


# Chess


class NormConfig(Section):
    blocks: Literal["group", "batch"] = Field(description="normalisation inside residual blocks and features")
    stem_heads: Literal["group", "batch"] = Field(description="normalisation of the stem and the heads")
    momentum: Fraction = Field(description="BatchNorm momentum (weight of the new batch)")


class AttentionConfig(Section):
    every: CountOrZero = Field(description="one attention block after every k-th residual block; 0 = none")
    heads: Count = Field(description="attention heads; must divide `channels`")
    bias: bool = Field(description="learned additive bias for every head and pair of squares (heads, 64, 64)")
    mask: bool = Field(description="let a square attend only to squares one queen, knight or king move away")
    unmasked_mix: Fraction = Field(description="share of unmasked attention blended in where `mask` is on")
    norm: Literal["pre", "post"] = Field(description="`post` is Matrix0's LayerNorm over the skip path")


class PolicyHeadConfig(Section):
    kind: Literal["conv", "factored", "dense"] = Field(description="how 4,672 move logits are made")
    channels: Count = Field(description="channels before the logits")
    rank: Count = Field(description="inner width of the `factored` head")
    clamp: NonNegative = Field(description="clamp of Matrix0's head (5.0); 0 = none")
    logit_norm: bool = Field(description="Matrix0's LayerNorm over all logits")


class ValueHeadConfig(Section):
    kind: Literal["wdl", "scalar"] = Field(description="win-draw-loss logits, or one tanh value")
    pool: Literal["flatten", "pooled"] = Field(description="flatten the squares, or average over them")
    channels: Count = Field(description="channels before the linear layers")
    hidden: Count = Field(description="width of the first hidden layer; the second is half of it")
    activation: Activation = Field(description="of the hidden layers; units of `relu` may die and stay dead")


class ModelConfig(Section):
    encoding: Literal["oriented", "matrix0"] = Field(description="input planes and move frame")
    channels: Count = Field(description="width of the trunk")
    blocks: CountOrZero = Field(description="residual blocks")
    block: Literal["basic", "bottleneck"] = Field(description="3x3-3x3, or 1x1-3x3-1x1")
    bottleneck: Count = Field(description="a bottleneck block's inner width is channels // bottleneck")
    preact: bool = Field(description="norm and activation before each convolution")
    activation: Activation = Field(description="activation of trunk and heads")
    norm: NormConfig
    se_ratio: Fraction = Field(description="squeeze-and-excitation width as a share of channels; 0 = none")
    droppath: Annotated[Real, Field(ge=0, lt=1)] = Field(
        description="probability of dropping a residual branch, per sample (linear in depth)"
    )
    dropout: Annotated[Real, Field(ge=0, lt=1)] = Field(description="dropout in attention and heads")
    chess_features: bool = Field(description="Matrix0's position encoding and feature convolutions")
    attention: AttentionConfig
    policy: PolicyHeadConfig
    value: ValueHeadConfig
    ssl: tuple[SSLHead, ...] = Field(description="self-supervised heads by name; [] = none")
    ssl_trunk: bool = Field(description="their gradient reaches the trunk; false trains the heads alone")
    auxiliary: bool = Field(description="Matrix0's from-square and move-type heads (never trained there)")
    checkpoint_every: CountOrZero = Field(description="activation checkpointing of every k-th block; 0 = off")

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
    piece: NonNegative = Field(description="weight of the piece head's loss: what stands on hidden squares")
    threat: NonNegative = Field(description="weight of the threat head's loss: attacked by the opponent")
    pin: NonNegative = Field(description="weight of the pin head's loss: pinned to its own king")
    fork: NonNegative = Field(description="weight of the fork head's loss: attacks two worthwhile targets")
    control: NonNegative = Field(description="weight of the control head's loss: who has more attackers")


class PositiveWeights(Section):
    pin: Annotated[Real, Field(ge=1)] = Field(
        description="how many times a pinned piece counts in the pin loss; predictions are corrected for it"
    )
    fork: Annotated[Real, Field(ge=1)] = Field(
        description="how many times a forking piece counts in the fork loss; predictions are corrected for it"
    )


class LossConfig(Section):
    policy: NonNegative = Field(description="weight of the policy cross-entropy")
    value: NonNegative = Field(description="weight of the value loss")
    ssl: SSLWeights
    positive: PositiveWeights
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = Field(
        description="share of the policy target spread over the legal moves"
    )
    result_share: Fraction = Field(
        description="share of the game result in the value target; the rest is the engine's win-draw-loss"
    )
    scalar: Literal["mse", "huber"] = Field(description="loss of the scalar value head")
    huber_delta: Positive = Field(description="delta of the Huber loss")


class ChessDataConfig(DataConfig):
    source: str = Field(
        description="`sample` (ships with the package) or a folder of shards with a catalogue"
    )
    mirror: bool = Field(description="mirror left-right at random where no castling right is left")
    hidden_rows: Fraction = Field(
        description="share of the positions with squares hidden at the input, where there is a `piece` head; "
        "they train that head alone"
    )
    hidden_squares: Fraction = Field(description="share of the squares hidden in such a position")


class ChessConfig(Config):
    """One run's whole configuration, where chess is trained."""

    task: Literal["chess"]
    data: ChessDataConfig
    curriculum: SourceCurriculumConfig
    model: ModelConfig
    loss: LossConfig

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


# Latin squares


LatinMode = Literal["standard", "zero_inclusive", "negative"]
LatinSize = Annotated[int, Field(ge=3, le=16)]


class LatinDataConfig(DataConfig):
    source: str = Field(
        description="`generated` (made at first use, kept in the cache), or a folder of shards with a catalogue"
    )
    squares: Count = Field(description="squares made for each size, before one in eight is held out")
    augment: bool = Field(description="permute rows, columns and digits of each training square at random")
    easy_share: Fraction = Field(
        description="share of the training puzzles whose fill is drawn from all stages' range"
    )


class SizeStages(StagesConfig):
    stages: tuple[tuple[LatinSize, LatinSize], ...] = Field(
        description="smallest and largest grid of a stage"
    )


class ModeStages(StagesConfig):
    stages: tuple[tuple[LatinMode, ...], ...] = Field(
        description="digit sets of a stage; the first is drawn half of the time, the others share the rest"
    )


class FillStages(StagesConfig):
    stages: tuple[tuple[Fraction, Fraction], ...] = Field(
        description="least and greatest probability that a cell is revealed"
    )


class LatinCurriculumConfig(CurriculumConfig):
    size: SizeStages
    mode: ModeStages
    fill: FillStages

    @model_validator(mode="after")
    def _ranges(self) -> LatinCurriculumConfig:
        if bad := [pair for pair in (*self.size.stages, *self.fill.stages) if pair[0] > pair[1]]:
            raise ValueError(f"a range runs from low to high, not {list(bad[0])}")
        if not all(self.mode.stages):
            raise ValueError("a stage of `mode` needs at least one digit set")
        lows, highs = zip(*self.size.stages, strict=True)
        if (lows[-1], highs[-1]) != (min(lows), max(highs)):
            raise ValueError(
                f"the last stage of `size`, {list(self.size.stages[-1])}, must hold the sizes of all others: "
                "validation asks for all of them"
            )
        return self


class LatinModelConfig(Section):
    width: Count = Field(description="width of the transformer; a multiple of `heads`")
    layers: Count = Field(description="transformer blocks")
    heads: Count = Field(description="attention heads")
    feedforward: Count = Field(description="inner width of a block's two-layer network, in widths")
    repeats: Count = Field(description="times that the stack of blocks is run over its own output")
    dropout: Annotated[Real, Field(ge=0, lt=1)] = Field(description="dropout in attention and blocks")
    causal: bool = Field(
        description="a cell sees only cells before it, as in the specification; worse, for comparison"
    )
    relations: bool = Field(
        description="learned attention bias for cells of the same row and the same column"
    )

    @model_validator(mode="after")
    def _divides(self) -> LatinModelConfig:
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} does not divide width {self.width}")
        return self


class LatinLossConfig(Section):
    cell: NonNegative = Field(description="weight of the cross-entropy of hidden cells")
    constraint: NonNegative = Field(
        description="weight of the penalty on digits expected more than once in a row or column"
    )
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = Field(
        description="share of a cell's target spread over the digits of its puzzle"
    )


class LatinConfig(Config):
    """One run's whole configuration, where Latin squares are completed."""

    task: Literal["latin"]
    data: LatinDataConfig
    model: LatinModelConfig
    loss: LatinLossConfig
    curriculum: LatinCurriculumConfig


# Tic-tac-toe


class TicTacToeDataConfig(DataConfig):
    source: str = Field(description="a folder of shards with a catalogue; the cycle gives its own")
    augment: bool = Field(description="turn each training position by a random one of the board's symmetries")


class TicTacToeModelConfig(Section):
    width: Count = Field(description="units of each layer")
    layers: CountOrZero = Field(description="layers between the first and the heads")


class TicTacToeLossConfig(Section):
    policy: NonNegative = Field(description="weight of the policy cross-entropy")
    value: NonNegative = Field(description="weight of the cross-entropy of win, draw and loss")


class TicTacToeConfig(Config):
    """One run's whole configuration, where tic-tac-toe is trained."""

    task: Literal["tictactoe"]
    data: TicTacToeDataConfig
    curriculum: SourceCurriculumConfig
    model: TicTacToeModelConfig
    loss: TicTacToeLossConfig


# The cycle of self-play, training and promotion


class SelfPlayConfig(Section):
    """The fields of `play.selfplay.SelfPlayOptions`."""

    parallel: Count = Field(description="games at a time")
    simulations: Count = Field(description="simulations of a full search, which is learned from")
    quick_simulations: Count = Field(description="simulations of a quick search, which is only played")
    full_share: Annotated[Real, Field(gt=0, le=1)] = Field(
        description="share of the moves with a full search"
    )
    temperature: NonNegative = Field(
        description="of the draw among the moves in the first plies; 0 = the best one"
    )
    temperature_plies: CountOrZero = Field(description="plies until which that holds")
    late_temperature: NonNegative = Field(description="temperature after them")
    random_plies: tuple[CountOrZero, CountOrZero] = Field(
        description="fewest and most plies drawn at random before the search takes over"
    )
    plies: Count = Field(description="longer games end without a result")
    resign_below: Annotated[Real, Field(ge=-1, lt=0)] = Field(
        description="value below which a side gives up; -1 never"
    )
    resign_moves: Count = Field(description="own moves in a row with such a value")
    play_out: Fraction = Field(
        description="share of the games in which nobody gives up, to see how often it is wrong"
    )


class SearchConfig(Section):
    """The fields of `play.search.SearchOptions`."""

    leaves: Count = Field(description="leaves of one tree in a batch")
    c_init: Real = Field(description="exploration of PUCT")
    c_base: Positive = Field(description="visits at which exploration begins to grow")
    fpu: Real = Field(description="how much less than its parent an untried move is held to be worth")
    virtual_loss: NonNegative = Field(description="taken off for each visit under way")
    noise_alpha: Positive = Field(description="Dirichlet noise at the root, summed over the moves")
    noise_weight: Fraction = Field(description="its share in the priors")
    gumbel: CountOrZero = Field(description="root moves of a Gumbel search; 0 = PUCT")
    gumbel_visits: NonNegative = Field(
        description="visits added to the most visited move's in its value scale"
    )
    gumbel_scale: NonNegative = Field(description="factor of that scale")
    look_ahead: bool = Field(description="recognise moves that end the game where their position is expanded")


class ArenaConfig(Section):
    """Matches of a candidate against the best network."""

    pairs: Count = Field(
        description="at most so many pairs of games, each from one opening with sides swapped"
    )
    batch: Count = Field(description="pairs played at once; the test looks after each batch")
    simulations: CountOrZero = Field(description="simulations of a move; 0 = the most probable move")
    random_plies: Annotated[int, Field(ge=3)] = Field(
        description="random plies of an opening; fewer than 3 give too few different ones"
    )
    plies: Count = Field(description="longer games are drawn")
    elo0: Real = Field(description="SPRT: no better than this is refused ...")
    elo1: Real = Field(description="... at least so much better is promoted")
    alpha: Annotated[Real, Field(gt=0, lt=0.5)] = Field(description="share of wrong promotions allowed")
    beta: Annotated[Real, Field(gt=0, lt=0.5)] = Field(description="share of wrong refusals allowed")
    anchor_pairs: CountOrZero = Field(
        description="pairs of each candidate against generation 0, for the Elo curve"
    )

    @model_validator(mode="after")
    def _ordered(self) -> ArenaConfig:
        if self.elo0 >= self.elo1:
            raise ValueError(f"elo0 {self.elo0:g} must be below elo1 {self.elo1:g}")
        return self


class CycleConfig(Section):
    """A whole cycle: generations of self-play, training and a match that decides about promotion.

    Each game adds its `network`: the network and its training, as in a preset.
    """

    if TYPE_CHECKING:  # no field here: the game's schema gives it its type
        network: Any

    seed: CountOrZero = Field(description="of games, openings and training")
    generations: Count = Field(description="generations to train")
    games: Annotated[int, Field(ge=20)] = Field(
        description="games of self-play in a generation; every twentieth is held out"
    )
    chunk: Count = Field(description="games of a shard; what a killed process loses at most")
    window: Count = Field(description="latest generations that are trained on")
    workers: Count = Field(description="processes of self-play, each of which computes on one thread")
    selfplay: SelfPlayConfig
    search: SearchConfig
    arena: ArenaConfig


class ChessCycleConfig(CycleConfig):
    network: ChessConfig


class TicTacToeCycleConfig(CycleConfig):
    network: TicTacToeConfig


TASKS: Mapping[str, type[Config]] = {"chess": ChessConfig, "latin": LatinConfig, "tictactoe": TicTacToeConfig}
"""The schema of each task."""
CYCLES: Mapping[str, type[CycleConfig]] = {"chess": ChessCycleConfig, "tictactoe": TicTacToeCycleConfig}
"""The schema of a cycle, by the task of its network: those that are games for two."""


# Reading


class _UniqueLoader(yaml.SafeLoader):
    """SafeLoader that refuses a duplicate key: PyYAML silently keeps the last."""


def _unique_mapping(loader: _UniqueLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise ConfigError(
                f"line {key_node.start_mark.line + 1}: key {key!r} is not a word; put it in quotes"
            )
        line = key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(f"key '{key}' stands twice (lines {seen[key]} and {line}); keep one")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_UniqueLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """Parse YAML text to a mapping; `name` stands in error messages.

    Raises ConfigError on bad YAML, a duplicate key, or anything but a mapping at the top.
    """
    try:
        data = yaml.load(text, _UniqueLoader)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: expected sections like 'model:', got {type(data).__name__}")
    return data


def presets(folder: Path | None = None) -> list[str]:
    """Names of the presets in params/, or in another folder."""
    return sorted(path.stem for path in (folder or PARAMS).glob("*.yaml"))


def load(preset: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a preset by name, or a YAML file by path, and apply nested overrides.

    Raises ConfigError: unknown preset (with the nearest name), unknown, missing or mistyped keys.
    """
    data, name = _read(preset, overrides, PARAMS)
    return parse(data, name)


def load_cycle(preset: str, overrides: Mapping[str, Any] | None = None) -> CycleConfig:
    """The same for a cycle's preset, in params/cycle/."""
    data, name = _read(preset, overrides, PARAMS / "cycle")
    network = data.get("network")
    task = network.get("task") if isinstance(network, Mapping) else None
    return _validated(_schema("network.task", task, name, CYCLES), data, name)


def _read(preset: str, overrides: Mapping[str, Any] | None, folder: Path) -> tuple[dict[str, Any], str]:
    path = Path(preset) if preset.endswith((".yaml", ".yml")) else folder / f"{preset}.yaml"
    if not path.is_file():
        known = presets(folder)
        raise ConfigError(f"unknown preset '{preset}'{nearest(preset, known)} (presets: {', '.join(known)})")
    return merge(read_yaml(path.read_text(encoding="utf-8"), path.name), overrides or {}), path.name


def parse(data: Mapping[str, Any], name: str = "config") -> Config:
    """Validate a nested mapping by the schema of its `task`; raises ConfigError naming every bad key."""
    return _validated(_schema("task", data.get("task"), name, TASKS), data, name)


_Schema = TypeVar("_Schema", bound=Section)


def _validated(schema: type[_Schema], data: Mapping[str, Any], name: str) -> _Schema:
    try:
        return schema.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{name}: " + "; ".join(_explain(error.errors(), schema))) from None


def _schema(key: str, task: Any, name: str, known: Mapping[str, type[_Schema]]) -> type[_Schema]:
    tasks = ", ".join(known)
    if task is None:
        raise ConfigError(f"{name}: key '{key}' is missing; it is one of {tasks}")
    if not isinstance(task, str) or task not in known:
        raise ConfigError(f"{name}: unknown task {task!r}{nearest(str(task), list(known))} (tasks: {tasks})")
    return known[task]


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `overrides` put in their places; neither argument is changed."""
    out = dict(base)
    for key, value in overrides.items():
        inside = out.get(key)
        out[key] = (
            merge(inside, value) if isinstance(inside, Mapping) and isinstance(value, Mapping) else value
        )
    return out


def nearest(word: str, known: list[str]) -> str:
    """', did you mean ...?' for a misspelt word, or an empty string."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean '{close[0]}'?" if close else ""


def _explain(errors: Sequence[Any], schema: type[Section]) -> list[str]:
    """One message a key, in words."""
    messages: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    for item in errors:
        where = [str(part) for part in item["loc"]]
        key = ".".join(_written(where, schema))
        if item["type"] == "extra_forbidden":
            known = sorted(_section_at(where[:-1], schema).model_fields)
            text = f"unknown key '{'.'.join(where)}'{nearest(where[-1], known)} (known: {', '.join(known)})"
            messages.setdefault(text, [])
        elif item["type"] == "missing":
            text = f"key '{key}' is missing; presets are complete, so copy it from another file in params/"
            messages.setdefault(text, [])
        else:
            messages.setdefault(f"'{key}'", []).append(item["msg"].removeprefix("Value error, "))
            inputs[f"'{key}'"] = item["input"]
    return [
        subject
        + (f": {' or: '.join(texts)}" if texts else "")
        + (
            f", got {inputs[subject]!r}"
            if subject in inputs and not isinstance(inputs[subject], Mapping)
            else ""
        )
        for subject, texts in messages.items()
    ]


def _written(where: list[str], schema: type[Section]) -> list[str]:
    """A key as it is written, without pydantic's names of a union's alternatives."""
    section: Any = schema
    for depth, part in enumerate(where):
        field = section.model_fields.get(part)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        ):
            return where[: depth + 1]
        section = field.annotation
    return where


def _section_at(path: list[str], schema: type[Section]) -> type[Section]:
    section: type[Section] = schema
    for part in path:
        section = section.model_fields[part].annotation  # type: ignore[assignment]
    return section


def dump(config: Section) -> dict[str, Any]:
    """Plain nested data that YAML and JSON can hold; parse(dump(c)) == c."""
    return config.model_dump(mode="json")


def to_yaml(config: Section) -> str:
    """YAML text of a configuration."""
    return yaml.safe_dump(dump(config), sort_keys=False, allow_unicode=True)


def difference(new: Config, old: Config) -> dict[str, tuple[Any, Any]]:
    """Keys that differ, as dotted path -> (old, new); None where the old task has no such key."""
    before, after = dict(_leaves(dump(old))), dict(_leaves(dump(new)))
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def options_table(section: type[Section], prefix: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, type, meaning) of every option, in schema order; the README's tables are made of it."""
    rows: list[tuple[str, str, str]] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += options_table(kind, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, _kind(kind), field.description or ""))
    return rows


def own_options(schema: type[Config]) -> list[tuple[str, str, str]]:
    """The rows of a task's schema that are not those of `Config`."""
    shared = set(options_table(Config))
    return [row for row in options_table(schema) if row not in shared and row[0] != "task"]


def _kind(kind: Any) -> str:
    if kind is Ellipsis:
        return "..."
    if get_origin(kind) is tuple:
        return f"list of {_kind(get_args(kind)[0])}"
    if args := [a for a in get_args(kind) if not hasattr(a, "gt") and type(a).__name__ not in _METADATA]:
        parts = [repr(a) if isinstance(a, str) else _kind(a) for a in args]
        return " or ".join(dict.fromkeys(p for p in parts if p != "..."))
    return str(getattr(kind, "__name__", kind))


_METADATA = {"BeforeValidator", "FieldInfo", "Ge", "Gt", "Le", "Lt"}
