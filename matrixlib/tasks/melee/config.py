"""Options of Melee training: data, network, losses."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from matrixlib import config as configuration
from matrixlib.config import Config, DataConfig, Depth, Fraction, NonNegative, Real, Section, Source, Width, option
from matrixlib.tasks.melee.columns import DELAYS, OWN

Delay = Annotated[int, Field(ge=0, le=DELAYS)]


class MeleeDataConfig(DataConfig):
    source: Source = option("sample", f"`sample` (ships with the package) or imported replays; {configuration.SEVERAL}")
    window: Annotated[int, Field(ge=1, le=OWN)] = option(60, "frames of a window, 60 a second")
    delay: tuple[Delay, Delay] = option((0, 0), "fewest and most frames from state to decision; held out: the fewest")
    mirror: Fraction = option(0.5, "share of windows mirrored, on symmetric stages")
    noise: Fraction = option(0.3, "share of windows with noise on measured inputs")
    noise_sigma: NonNegative = option(0.01, "standard deviation of the noise, in scaled units")
    random_start: bool = option(True, "windows start at any frame of a row; false: at its first")

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.delay[0] > self.delay[1]:
            raise ValueError(f"delay runs from the least to the greatest, not {list(self.delay)}")
        return self


class MeleeModelConfig(Section):
    trunk: Literal["mlp", "residual", "gru", "lstm", "transformer"] = option(
        "gru", "trunk over frames: single frames (`mlp`, `residual`), or with earlier ones"
    )
    width: Width = option(256, "width of the trunk")
    layers: Depth = option(2, "layers of the trunk; of `residual` and `transformer`, blocks")
    heads: Width = option(4, "attention heads of the transformer")
    norm: Literal["layer", "rms"] = option("layer", "LayerNorm or RMSNorm; of `mlp`, before each activation")
    dropout: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "dropout in the trunk")
    embedding: Width = option(64, "embedding size of actions and characters")
    head_width: Annotated[int, Field(ge=2)] = option(64, "hidden units of each controller head; half for the shoulder")
    autoregressive: bool = option(True, "autoregressive heads: buttons, main x, main y, c x, c y, shoulder")

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.trunk == "transformer" and self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of twice heads {self.heads}")
        return self


class MeleeLossConfig(Section):
    buttons: NonNegative = option(1.0, "weight of the buttons, the mean over all eight")
    main: NonNegative = option(1.0, "weight of each axis of the main stick")
    c: NonNegative = option(1.0, "weight of each axis of the C-stick")
    shoulder: NonNegative = option(1.0, "weight of the shoulder")
    label_smoothing: Annotated[Real, Field(ge=0, lt=1)] = option(0.0, "label smoothing of classes, not of buttons")
    focal: NonNegative = option(0.0, "gamma of the focal loss, 0 = none; probabilities are corrected for it")
    rare: Fraction = option(0.0, "weight of pressed rare buttons: 0 none, 1 sqrt((1 - rate) / rate), up to 30")
    characters: Fraction = option(
        0.0, "weight of frames of rare own characters: 0 none, 1 equal for all, up to 30; plus `rare` at most 1"
    )

    @model_validator(mode="after")
    def _one_balance(self) -> Self:
        if self.rare + self.characters > 1:
            raise ValueError(
                f"rare {self.rare} and characters {self.characters} are more than 1 together: what is rare would be "
                "weighted twice; lower one of them"
            )
        return self


class MeleeConfig(Config):
    task: Literal["melee"]
    data: MeleeDataConfig = MeleeDataConfig()
    model: MeleeModelConfig = MeleeModelConfig()
    loss: MeleeLossConfig = MeleeLossConfig()
