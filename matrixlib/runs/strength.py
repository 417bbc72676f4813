"""Matches of a network in training against an anchor: `validation.strength`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
from torch import nn

from matrixlib import files
from matrixlib.engine.checkpoint import host_copies
from matrixlib.engine.optim import load_tensors, named_tensors
from matrixlib.play.elo import rating
from matrixlib.play.match import Choice, Player, Turn, play_pairs, search_player
from matrixlib.play.search import Evaluator, SearchOptions
from matrixlib.runs.data import RunData, RunError
from matrixlib.tasks import load

MAX_ELO = 1500.0  # differences beyond cannot be told from losing every game
START = "start.safetensors"  # the run's first weights, in its folder


class StrengthMatch:
    """Plays a run's network against its anchor. record: the anchor's name and SHA-256 for run.json, {} for the run's
    own first weights. ValueError if anchor or openings are not usable."""

    def __init__(self, data: RunData, folder: Path) -> None:
        config, game = data.config, data.spec.game
        assert game is not None, "refused by validate_config"
        self._data, self._game, self._path = data, game.game, folder / START
        self._options = options = config.validation.strength
        self._openings = game.openings(options, options.pairs, config.seed, options.random_plies)
        self._anchor, self.record = None, dict[str, str]()
        if options.anchor:
            self._anchor = load(options.anchor, device=data.runtime.device, compile=False, task=config.task)
            self.record = {"name": options.anchor, "sha256": self._anchor.sha256}

    def __call__(self, model: nn.Module, step: int, beat: Callable[[], None]) -> dict[str, float] | None:
        """Elo of a frozen network with its 95 % interval, within 1,500, score and games. At step 0 the network is kept
        as the anchor, if there is no other, and None returned."""
        data, options, starts = self._data, self._options, self._openings
        if step == 0:
            if not options.anchor:
                files.write_bytes(self._path, safetensors.torch.save(host_copies({"": named_tensors(model)})[""]))
            return None
        if self._anchor is None:
            self._anchor = data.spec.network(self._start(), data.config, data.runtime)
        networks = data.spec.network(model, data.config, data.runtime), self._anchor
        searches = SearchOptions(leaves=1)
        one, other = (
            _beating(search_player(self._game, Evaluator(net), options.simulations, searches), beat) for net in networks
        )
        match = play_pairs(self._game, one, other, starts.states, options.plies, history=starts.history)
        found = rating(match.pairs())
        elo, low, high = np.clip([found.elo, found.low, found.high], -MAX_ELO, MAX_ELO).tolist()
        return {"elo": elo, "low": low, "high": high, "score": found.score, "games": found.games}

    def _start(self) -> nn.Module:
        if not self._path.exists():
            raise RunError(
                f"{self._path} is missing, the network that validation.strength plays against: bring it back, name an "
                "anchor, or set validation.strength.every to 0"
            )
        model = self._data.task.build_model()
        load_tensors(model, safetensors.torch.load_file(self._path))
        return model


def _beating(player: Player, beat: Callable[[], None]) -> Player:
    """The player, with a heartbeat at every turn."""

    def play(turn: Turn) -> Choice:
        beat()
        return player(turn)

    return play
