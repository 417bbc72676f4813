"""Options of a training on Melee: data, network, losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from matrixlib.config import Config, Count, DataConfig, Fraction, NonNegative, Real, Section
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
    trunk: Literal["mlp", "residual", "gru", "lstm", "transformer"] = Field(
        default="gru", description="what sees the frames: each for itself (`mlp`, `residual`), or with those before it"
    )
    width: Count = Field(default=256, description="width of the trunk")
    layers: Count = Field(default=2, description="layers of the trunk; of `residual` and `transformer`, blocks")
    heads: Count = Field(default=4, description="attention heads of the transformer")
    norm: Literal["layer", "rms"] = Field(
        default="layer", description="LayerNorm or RMSNorm; of `mlp`, between a layer and its activation"
    )
    dropout: Annotated[Real, Field(ge=0, lt=1)] = Field(default=0.0, description="dropout in the trunk")
    embedding: Count = Field(default=64, description="numbers that an action or a character is embedded in")
    head_width: Annotated[int, Field(ge=2)] = Field(
        default=64, description="units of each part of the controller; half of it for the shoulder"
    )
    autoregressive: bool = Field(
        default=True,
        description="decide buttons, main x, main y, c x, c y, shoulder one after the other, each by those before it",
    )

    @model_validator(mode="after")
    def _divides(self) -> MeleeModelConfig:
        if self.trunk == "transformer" and self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of twice heads {self.heads}")
        return self


class MeleeLossConfig(Section):
    buttons: NonNegative = Field(default=1.0, description="weight of the buttons, the mean over all eight")
    main: NonNegative = Field(default=1.0, description="weight of each axis of the main stick")
    c: NonNegative = Field(default=1.0, description="weight of each axis of the C-stick")
    shoulder: NonNegative = Field(default=1.0, description="weight of the shoulder")
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of a class's target spread over all; never of the buttons'"
    )
    focal: NonNegative = Field(
        default=0.0,
        description="gamma of the focal loss, 0 = none; the probabilities are corrected for it wherever they are used",
    )
    rare: Fraction = Field(
        default=0.0,
        description="weight of a pressed button, the more the rarer it is: 0 none, 1 sqrt((1 - rate) / rate), up to 30",
    )


class MeleeConfig(Config):
    """One run's whole configuration, where players of Melee are imitated."""

    task: Literal["melee"]
    data: MeleeDataConfig = MeleeDataConfig()
    model: MeleeModelConfig = MeleeModelConfig()
    loss: MeleeLossConfig = MeleeLossConfig()
