"""Options of a cycle of self-play, training and matches."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, SerializeAsAny

from matrixlib.config import Config, ConfigError, Count, Processes, Section, option, read_preset, validated
from matrixlib.files import PARAMS
from matrixlib.play.match import MatchOptions
from matrixlib.play.search import SearchOptions
from matrixlib.play.selfplay import SelfPlayOptions
from matrixlib.runs.fleet import Kind
from matrixlib.tasks import TASKS, get_task, parse_config, task_of, validate_config


class CycleConfig(Section):
    """A whole cycle: generations of self-play, training and a match that decides about promotion.

    `network` is the network and its training, with the sections of its task, as in a preset.
    """

    seed: Annotated[int, Field(ge=0, lt=2**62)] = option(0, "of games, openings and training")
    generations: Count = option(6, "generations to train")
    games: Annotated[int, Field(ge=20)] = option(512, "games of self-play in a generation; every twentieth is held out")
    chunk: Count = option(128, "games of a shard; what a killed process loses at most")
    window: Count = option(3, "latest generations that are trained on")
    workers: Processes = option(1, "processes of self-play and matches, each of which computes on one thread")
    fleet: Kind = option(
        "local",
        "`ray`: every thread, or every GPU, of the Ray cluster that this machine belongs to, in place of `workers`",
    )
    selfplay: SelfPlayOptions = SelfPlayOptions()
    search: SearchOptions = SearchOptions()
    match: MatchOptions = MatchOptions()
    network: SerializeAsAny[Config]


def load_cycle(preset: str, overrides: Mapping[str, Any] | None = None) -> CycleConfig:
    """Read a cycle's preset by name, from params/cycle/, or a YAML file by path, and apply nested overrides.

    Raises ConfigError: unknown preset, unknown or mistyped keys, a task that is no game for two.
    """
    data, name = read_preset(preset, overrides, PARAMS / "cycle")
    network = _network(data, name)
    if task_of(network, name, "network.").game is None:
        games = ", ".join(task for task in TASKS if get_task(task).game is not None)
        raise ConfigError(f"{name}: a cycle plays games for two ({games}), and task '{network['task']}' is none")
    config = validate_config(network, name, "network.")
    if config.train.init:
        raise ConfigError(
            f"{name}: network.train.init is '{config.train.init}', but a cycle begins with random weights: leave it out"
        )
    return validated(CycleConfig, {**data, "network": config}, name)


def parse_cycle(data: Mapping[str, Any], name: str, task: str) -> CycleConfig:
    """Validate what a cycle's folder holds; task: the one that the user has named, no other import path is followed."""
    network = parse_config(_network(data, name), name, task)
    return validated(CycleConfig, {**data, "network": network}, name)


def _network(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    network = data.get("network")
    if not isinstance(network, Mapping):
        raise ConfigError(f"{name}: key 'network' is missing: the network and its training, as in a preset")
    return network
