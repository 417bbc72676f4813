"""Matches of a network in training against an anchor: `validation.strength`."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import safetensors.torch
from torch import nn

from matrixlib import files
from matrixlib.config import Config
from matrixlib.engine.checkpoint import Checkpoints, host_copies
from matrixlib.engine.network import Network
from matrixlib.engine.optim import load_tensors, named_tensors
from matrixlib.play.elo import rating
from matrixlib.play.match import Choice, EngineError, Player, Turn, play_pairs, search_player
from matrixlib.play.search import Evaluator, SearchOptions
from matrixlib.runs.data import RunData, RunError
from matrixlib.tasks import get_task, load

MAX_ELO = 1500.0  # differences beyond cannot be told from losing every game
START = "start.safetensors"  # the run's first weights, in its folder


class StrengthMatch:
    """Plays a run's network against its anchor. record: for run.json, name and SHA-256 of a network, or name of an
    engine and what it calls itself; {} for the run's own first weights. before: that of the run's beginning. device:
    of the anchor's network. ValueError if anchor or openings are not usable, or the anchor is another one."""

    def __init__(self, config: Config, device: str, folder: Path, before: Mapping[str, str]) -> None:
        game = get_task(config.task).game
        assert game is not None, "refused by validate_config"
        self._options = options = config.validation.strength
        self._openings = game.openings(options, options.pairs, config.seed, options.random_plies)
        self._game, self._path, self._anchor, self.record = game, folder / START, None, dict[str, str]()
        try:
            with game.engine(options.anchor) or nullcontext() as engine:
                self.record = {"name": options.anchor, "engine": engine[0]} if engine else {}
        except EngineError as error:
            raise RunError(f"validation.strength.anchor: {error}") from error
        if options.anchor and not self.record:
            self._anchor = load(options.anchor, device=device, compile=False, task=config.task)
            self.record = {"name": options.anchor, "sha256": self._anchor.sha256}
        if before and self.record != before and self.record.get("sha256", "") != before.get("sha256"):
            was = ", ".join(before.values())
            raise RunError(f"anchor '{options.anchor}' is not that of run '{folder.name}' ({was}): name another run")
        begun = Checkpoints(folder / "checkpoints", config.checkpoint.keep).steps()
        if not options.anchor and begun:
            self._check_start()

    def __call__(self, data: RunData, model: nn.Module, step: int, beat: Callable[[], None]) -> dict[str, float] | None:
        """Elo of a frozen network with its 95 % interval, within 1,500, score and games. An engine is restarted for
        each match. At step 0 the network is kept as the anchor, if there is no other, and None returned."""
        options, starts, game = self._options, self._openings, self._game.game
        if step == 0:
            if not options.anchor:
                files.write_bytes(self._path, safetensors.torch.save(host_copies({"": named_tensors(model)})[""]))
            return None
        own = self._player(data.spec.network(model, data.config, data.runtime))

        def one(turn: Turn) -> Choice:
            beat()
            return own(turn)

        running = self._game.engine(options.anchor) or nullcontext(("", self._player(self._network(data))))
        with running as (_, other):
            match = play_pairs(game, one, other, starts.states, options.plies, history=starts.history)
        found = rating(match.pairs())
        elo, low, high = np.clip([found.elo, found.low, found.high], -MAX_ELO, MAX_ELO).tolist()
        return {"elo": elo, "low": low, "high": high, "score": found.score, "games": found.games}

    def _check_start(self) -> None:
        if not self._path.exists():
            raise RunError(
                f"{self._path} is missing, the run's first weights, which validation.strength plays; a run that "
                "began without matches has none: bring it back, name an anchor, or set validation.strength.every to 0"
            )

    def _player(self, net: Network) -> Player:
        return search_player(self._game.game, Evaluator(net), self._options.simulations, SearchOptions(leaves=1))

    def _network(self, data: RunData) -> Network:
        """The anchor's."""
        if self._anchor is None:
            self._check_start()
            model = data.task.build_model()
            load_tensors(model, safetensors.torch.load_file(self._path))
            self._anchor = data.spec.network(model, data.config, data.runtime)
        return self._anchor
