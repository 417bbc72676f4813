"""Options of a training on Melee: data, network, losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from matrixlib.config import Config, DataConfig, Fraction, NonNegative, Section
from matrixlib.tasks.melee.columns import DELAYS, OWN

Delay = Annotated[int, Field(ge=0, le=DELAYS)]


class MeleeDataConfig(DataConfig):
    source: str = Field(
        default="sample", description="`sample` (ships with the package), or a folder of imported replays"
    )
    window: Annotated[int, Field(ge=1, le=OWN)] = Field(default=60, description="frames of a window, 60 a second")
    delay: tuple[Delay, Delay] = Field(
        default=(0, 0),
        description="least and greatest frames from a state to the decision on it; held-out rows have the least",
    )
    mirror: Fraction = Field(default=0.5, description="share of the windows of symmetric stages that are mirrored")
    noise: Fraction = Field(default=0.3, description="share of the windows whose measured inputs get noise")
    noise_sigma: NonNegative = Field(default=0.01, description="its standard deviation, of inputs as they are scaled")
    random_start: bool = Field(
        default=True, description="a window begins with any frame of a row; false: with its first"
    )

    @model_validator(mode="after")
    def _range(self) -> MeleeDataConfig:
        if self.delay[0] > self.delay[1]:
            raise ValueError(f"delay runs from the least to the greatest, not {list(self.delay)}")
        return self


class MeleeModelConfig(Section):
    pass


class MeleeLossConfig(Section):
    pass


class MeleeConfig(Config):
    """One run's whole configuration, where players of Melee are imitated."""

    task: Literal["melee"]
    data: MeleeDataConfig = MeleeDataConfig()
    model: MeleeModelConfig = MeleeModelConfig()
    loss: MeleeLossConfig = MeleeLossConfig()
