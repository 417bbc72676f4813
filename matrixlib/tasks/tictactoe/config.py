"""Options of a tic-tac-toe training: data, network, losses."""

from typing import Literal

from matrixlib.config import Config, Count, CountOrZero, DataConfig, NonNegative, Section, option
from matrixlib.engine.curriculum import SourceCurriculumConfig


class TicTacToeDataConfig(DataConfig):
    source: str = option("selfplay", "a folder of shards with a catalogue; the cycle gives its own")
    augment: bool = option(True, "turn each training position by a random one of the board's symmetries")


class TicTacToeModelConfig(Section):
    width: Count = option(128, "units of each layer")
    layers: CountOrZero = option(3, "layers between the first and the heads")


class TicTacToeLossConfig(Section):
    policy: NonNegative = option(1.0, "weight of the policy cross-entropy")
    value: NonNegative = option(1.0, "weight of the cross-entropy of win, draw and loss")


class TicTacToeConfig(Config):
    """One run's whole configuration, where tic-tac-toe is trained."""

    task: Literal["tictactoe"]
    data: TicTacToeDataConfig = TicTacToeDataConfig()
    curriculum: SourceCurriculumConfig = SourceCurriculumConfig()
    model: TicTacToeModelConfig = TicTacToeModelConfig()
    loss: TicTacToeLossConfig = TicTacToeLossConfig()
