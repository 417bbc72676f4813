"""Options of a tic-tac-toe training: data, network, losses."""

from typing import Literal

from pydantic import Field

from matrixlib.config import Config, Count, CountOrZero, DataConfig, NonNegative, Section
from matrixlib.engine.stages import SourceCurriculumConfig


class TicTacToeDataConfig(DataConfig):
    source: str = Field(default="selfplay", description="a folder of shards with a catalogue; the cycle gives its own")
    augment: bool = Field(
        default=True, description="turn each training position by a random one of the board's symmetries"
    )


class TicTacToeModelConfig(Section):
    width: Count = Field(default=128, description="units of each layer")
    layers: CountOrZero = Field(default=3, description="layers between the first and the heads")


class TicTacToeLossConfig(Section):
    policy: NonNegative = Field(default=1.0, description="weight of the policy cross-entropy")
    value: NonNegative = Field(default=1.0, description="weight of the cross-entropy of win, draw and loss")


class TicTacToeConfig(Config):
    """One run's whole configuration, where tic-tac-toe is trained."""

    task: Literal["tictactoe"]
    data: TicTacToeDataConfig = TicTacToeDataConfig()
    curriculum: SourceCurriculumConfig = SourceCurriculumConfig()
    model: TicTacToeModelConfig = TicTacToeModelConfig()
    loss: TicTacToeLossConfig = TicTacToeLossConfig()
