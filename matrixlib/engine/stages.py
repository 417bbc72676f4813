"""Options of a curriculum: the engine's part, and the stages of its dimensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from matrixlib.config import Count, CountOrZero, Fraction, Real, Section, option

VALIDATED = "a metric as validation names it (`term/name`), a term's loss (`term`), or the total (`loss`)"


class CurriculumConfig(Section):
    """The engine's part of a curriculum; a task adds its dimensions, sections with `enabled`, `fractions`
    and `stages`.
    """

    kind: Literal["fractions", "adaptive"] = option(
        "fractions", "stages end at shares of the updates, or when `metric` is good enough"
    )
    metric: str = option("", "what `adaptive` looks at: " + VALIDATED)
    up: Real = option(0.4, "`adaptive`: go on when a metric is at least this, a loss at most, ...")
    patience: Count = option(2, "... in so many validations in a row")
    down: Real = option(0.2, "`adaptive`: go back when a metric is below this, or a loss above it, as often in a row")
    dwell: Count = option(2, "`adaptive`: validations in a phase before it may change")
    longest: CountOrZero = option(0, "`adaptive`: validations after which a phase ends in any case; 0 = never")

    @model_validator(mode="after")
    def _hysteresis(self) -> CurriculumConfig:
        if self.falling and self.down <= self.up:
            raise ValueError(f"down {self.down:g} must be above up {self.up:g}: '{self.metric}' is a loss, which falls")
        if not self.falling and self.down >= self.up:
            raise ValueError(f"down {self.down:g} must be below up {self.up:g}, or phases would flap")
        return self

    @property
    def falling(self) -> bool:
        """Whether less of the metric is better: it is a loss."""
        return bool(self.metric) and "/" not in self.metric


class StagesConfig(Section):
    """One dimension of a curriculum; the task's subclass says what its `stages` are."""

    enabled: bool = option(True, "false = the last stage from the start")
    stages: tuple[Any, ...]
    fractions: tuple[Fraction, ...] = option((1.0,), "share of the updates that each stage lasts; sum is 1")

    @model_validator(mode="after")
    def _complete(self) -> StagesConfig:
        if not self.stages or len(self.stages) != len(self.fractions):
            raise ValueError(f"{len(self.stages)} stages and {len(self.fractions)} fractions; give one for each")
        if abs(sum(self.fractions) - 1) > 1e-9:
            raise ValueError(f"fractions {list(self.fractions)} add up to {sum(self.fractions):g}, not to 1")
        return self


class SourceStages(StagesConfig):
    enabled: bool = option(False, "false = the last stage from the start")
    stages: tuple[dict[str, Annotated[Real, Field(gt=0)]], ...] = option(
        ({},),
        "weight of each source of the data in a stage, any positive numbers; "
        "{} = all sources, each by its number of positions",
    )


class SourceCurriculumConfig(CurriculumConfig):
    """Of the tasks whose data come from several sources."""

    metric: str = option("policy/top1", "what `adaptive` looks at: " + VALIDATED)
    sources: SourceStages = SourceStages()
