"""Options of Latin-square training: data, network, losses, curriculum."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from matrixlib.config import Config, Count, DataConfig, Depth, Fraction, NonNegative, Real, Section, Width, option
from matrixlib.engine.curriculum import CurriculumConfig, StagesConfig

LatinMode = Literal["standard", "zero_inclusive", "negative"]
LatinSize = Annotated[int, Field(ge=3, le=16)]


class LatinDataConfig(DataConfig):
    source: str = option("generated", "`generated` (on first use, cached), or a folder of shards")
    squares: Count = option(20000, "squares of each size, one in eight of which is held out")
    augment: bool = option(True, "permute rows, columns and digits of each training square at random")
    easy_share: Fraction = option(0.25, "share of training puzzles with a fill from the range of all stages")


class SizeStages(StagesConfig):
    stages: tuple[tuple[LatinSize, LatinSize], ...] = option(((3, 3), (3, 4), (3, 5)), "smallest and largest grid")
    fractions: tuple[Fraction, ...] = option((0.1, 0.2, 0.7), "share of the updates that each stage lasts; sum is 1")


class ModeStages(StagesConfig):
    stages: tuple[tuple[LatinMode, ...], ...] = option(
        (("standard",), ("standard", "zero_inclusive"), ("standard", "zero_inclusive", "negative")),
        "digit sets of a stage; the first is drawn half of the time",
    )
    fractions: tuple[Fraction, ...] = option((0.4, 0.2, 0.4), "share of the updates that each stage lasts; sum is 1")


class FillStages(StagesConfig):
    stages: tuple[tuple[Fraction, Fraction], ...] = option(
        ((0.5, 0.7), (0.3, 0.7), (0.0, 0.7)), "lowest and highest probability that a cell is given"
    )
    fractions: tuple[Fraction, ...] = option((0.3, 0.3, 0.4), "share of the updates that each stage lasts; sum is 1")


class LatinCurriculumConfig(CurriculumConfig):
    metric: str = option("constraint/valid", "metric of `adaptive` (`term/name`)")
    up: Real = option(0.8, "`adaptive`: next phase when the metric is at least this ...")
    down: Real = option(0.4, "`adaptive`: previous phase below this, as often in a row; less than `up`")
    size: SizeStages = SizeStages()
    mode: ModeStages = ModeStages()
    fill: FillStages = FillStages()

    @model_validator(mode="after")
    def _ranges(self) -> Self:
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
    width: Width = option(64, "width of the transformer; a multiple of `heads`")
    layers: Depth = option(4, "transformer blocks")
    heads: Width = option(4, "attention heads")
    feedforward: Width = option(4, "inner width of the MLP, in widths")
    repeats: Depth = option(1, "times the stack of blocks is applied (recurrence)")
    dropout: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "dropout in attention and blocks")
    causal: bool = option(False, "causal attention mask; worse, for comparison")
    relations: bool = option(True, "learned attention bias for cells of the same row or column")
    sinkhorn: Annotated[int, Field(ge=0, le=100)] = option(
        0, "Sinkhorn iterations over rows, columns and cells of the digits that may stand in each empty cell; 0 = none"
    )

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} does not divide width {self.width}")
        return self


class LatinLossConfig(Section):
    cell: NonNegative = option(1.0, "weight of the cross-entropy of hidden cells")
    constraint: NonNegative = option(0.1, "weight of the penalty on digits expected more than once in a row or column")
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "label smoothing over the puzzle's digits")


class LatinConfig(Config):
    task: Literal["latin"]
    data: LatinDataConfig = LatinDataConfig()
    model: LatinModelConfig = LatinModelConfig()
    loss: LatinLossConfig = LatinLossConfig()
    curriculum: LatinCurriculumConfig = LatinCurriculumConfig()

    @model_validator(mode="after")
    def _impossible_digits(self) -> Self:
        if self.model.sinkhorn and self.loss.label_smoothing:
            raise ValueError(
                "model.sinkhorn gives impossible digits no probability, and loss.label_smoothing asks for some: "
                "set one of them to 0"
            )
        return self
