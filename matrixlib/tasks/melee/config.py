"""Options of a training on Melee: data, network, losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from matrixlib.config import Config, Count, DataConfig, Fraction, NonNegative, Real, Section, option
from matrixlib.tasks.melee.columns import DELAYS, OWN

Delay = Annotated[int, Field(ge=0, le=DELAYS)]


class MeleeDataConfig(DataConfig):
    source: str = option("sample", "`sample` (ships with the package), or a folder of imported replays")
    window: Annotated[int, Field(ge=1, le=OWN)] = option(60, "frames of a window, 60 a second")
    delay: tuple[Delay, Delay] = option(
        (0, 0), "least and greatest frames from a state to the decision on it; held-out rows have the least"
    )
    mirror: Fraction = option(0.5, "share of the windows of symmetric stages that are mirrored")
    noise: Fraction = option(0.3, "share of the windows whose measured inputs get noise")
    noise_sigma: NonNegative = option(0.01, "its standard deviation, of inputs as they are scaled")
    random_start: bool = option(True, "a window begins with any frame of a row; false: with its first")

    @model_validator(mode="after")
    def _range(self) -> MeleeDataConfig:
        if self.delay[0] > self.delay[1]:
            raise ValueError(f"delay runs from the least to the greatest, not {list(self.delay)}")
        return self


class MeleeModelConfig(Section):
    trunk: Literal["mlp", "residual", "gru", "lstm", "transformer"] = option(
        "gru", "what sees the frames: each for itself (`mlp`, `residual`), or with those before it"
    )
    width: Count = option(256, "width of the trunk")
    layers: Count = option(2, "layers of the trunk; of `residual` and `transformer`, blocks")
    heads: Count = option(4, "attention heads of the transformer")
    norm: Literal["layer", "rms"] = option(
        "layer", "LayerNorm or RMSNorm; of `mlp`, between a layer and its activation"
    )
    dropout: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "dropout in the trunk")
    embedding: Count = option(64, "numbers that an action or a character is embedded in")
    head_width: Annotated[int, Field(ge=2)] = option(
        64, "units of each part of the controller; half of it for the shoulder"
    )
    autoregressive: bool = option(
        True, "decide buttons, main x, main y, c x, c y, shoulder one after the other, each by those before it"
    )

    @model_validator(mode="after")
    def _divides(self) -> MeleeModelConfig:
        if self.trunk == "transformer" and self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of twice heads {self.heads}")
        return self


class MeleeLossConfig(Section):
    buttons: NonNegative = option(1.0, "weight of the buttons, the mean over all eight")
    main: NonNegative = option(1.0, "weight of each axis of the main stick")
    c: NonNegative = option(1.0, "weight of each axis of the C-stick")
    shoulder: NonNegative = option(1.0, "weight of the shoulder")
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = option(
        0.0, "share of a class's target spread over all; never of the buttons'"
    )
    focal: NonNegative = option(
        0.0, "gamma of the focal loss, 0 = none; the probabilities are corrected for it wherever they are used"
    )
    rare: Fraction = option(
        0.0, "weight of a pressed button, the more the rarer it is: 0 none, 1 sqrt((1 - rate) / rate), up to 30"
    )


class MeleeConfig(Config):
    """One run's whole configuration, where players of Melee are imitated."""

    task: Literal["melee"]
    data: MeleeDataConfig = MeleeDataConfig()
    model: MeleeModelConfig = MeleeModelConfig()
    loss: MeleeLossConfig = MeleeLossConfig()
