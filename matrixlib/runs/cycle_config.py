"""Options of a cycle of self-play, training and matches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, SerializeAsAny, model_validator

from matrixlib import config as configuration
from matrixlib.config import (
    Config,
    ConfigError,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Real,
    Section,
)
from matrixlib.files import PARAMS
from matrixlib.tasks import get_task, validate_config


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

    seed: CountOrZero = Field(description="of games, openings and training")
    generations: Count = Field(description="generations to train")
    games: Annotated[int, Field(ge=20)] = Field(
        description="games of self-play in a generation; every twentieth is held out"
    )
    chunk: Count = Field(description="games of a shard; what a killed process loses at most")
    window: Count = Field(description="latest generations that are trained on")
    workers: Count = Field(description="processes of self-play, each of which computes on one thread")
    network: SerializeAsAny[Config] = Field(description="the network and its training, as in a preset")
    selfplay: SelfPlayConfig
    search: SearchConfig
    arena: ArenaConfig


def load_cycle(preset: str, overrides: Mapping[str, Any] | None = None) -> CycleConfig:
    """Read a cycle's preset by name, from params/cycle/, or a YAML file by path, and apply nested overrides.

    Raises ConfigError: unknown preset, unknown or mistyped keys, a task that is no game for two.
    """
    data, name = configuration.read_preset(preset, overrides, PARAMS / "cycle")
    network = data.get("network")
    if not isinstance(network, Mapping):
        raise ConfigError(f"{name}: key 'network' is missing: the network and its training, as in a preset")
    config = validate_config(network, name, "network.")
    if get_task(config.task).game is None:
        raise ConfigError(f"{name}: a cycle plays games for two, and task '{config.task}' is none")
    return configuration.validated(CycleConfig, {**data, "network": config}, name)
