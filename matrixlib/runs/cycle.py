"""Self-play cycle: self-play, training, a match against the best network, promotion.

Every stage is a pure function of the configuration and of earlier stages' files, and writes its results atomically in
`reports/<cycle>/` (`shards`, `matches`, `generation_*.json`), so that a killed cycle resumes. Trainings are runs of
their own, `reports/<cycle>-001` ...
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from filelock import FileLock

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.shards import Shard, file_hash, read_info
from matrixlib.engine import optim
from matrixlib.engine.folder import name_conflict
from matrixlib.engine.network import Network
from matrixlib.engine.task import active_terms
from matrixlib.engine.validation import validate
from matrixlib.files import read_json, write_json, write_text
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.runtime import Runtime
from matrixlib.play.elo import rating
from matrixlib.progress import live_bar
from matrixlib.runs import cycle_games as games
from matrixlib.runs import run as runs
from matrixlib.runs import start as starts
from matrixlib.runs.autotune import working_runtime
from matrixlib.runs.cycle_games import Against, CycleConfig, CycleError, Decision, Generation, Pairs, read_generations
from matrixlib.runs.data import RunData, rows_of
from matrixlib.runs.fleet import Part, compute
from matrixlib.runs.record import runtime_config
from matrixlib.runs.strength import StrengthMatch
from matrixlib.tasks import changed, get_task

FREE = ("generations", "workers", "fleet")  # options without effect on games and weights


def open_cycle(
    preset: str = "demo", device: str = "auto", cycle: str = "", overrides: Mapping[str, Any] | None = None
) -> Cycle:
    """Open a cycle: resume the named one, or start it; the default name is `cycle-<preset>`.

    preset: name in params/cycle/ or path of a YAML file. overrides: nested mapping, validated. ConfigError; CycleError
    if the cycle was started with another configuration.
    """
    config = games.load_cycle(preset, overrides)
    name = cycle or f"cycle-{Path(preset).stem}"
    trainings = {f"{name}-{number:03d}": "run.json" for number in range(1, config.generations + 1)}
    for taken, file in {name: "cycle.yaml", **trainings}.items():
        if problem := name_conflict(taken, file):
            raise CycleError(f"cycle name {taken!r} {problem}")
    folder = files.reports_root() / name
    path = folder / "cycle.yaml"
    for source in (one for one, share in config.sources.items() if np.any(share)):  # refuse before any game
        own, spec = changed(config.network, {"data": {"source": {source: 1.0}}}), get_task(config.network.task)
        if not (rows := rows_of(spec.catalogue(own), "train", own, [source])):
            raise CycleError(f"source '{source}' has no healthy training shard: import its data, or leave it out")
        Shard(rows[0].path, spec.layout)
    games.judges(config)
    if config.network.validation.strength.every and not path.exists():
        StrengthMatch(config.network, "cpu", folder, {})
    needed = max(config.match.pairs, config.match.anchor_pairs)  # a small game may have fewer openings: fail early
    rules, book, plies = games.rules(config), config.selfplay.openings, config.selfplay.opening_plies
    rules.openings(config.match, needed, config.seed, config.match.random_plies)
    if book:
        rules.read_openings(book, plies, 1, config.seed)
    books = {file: file_hash(files.from_home(file)) for file in (book, config.match.openings) if file}
    config, start = _with_start(path, config)
    if config.network.train.freeze:  # refuse unknown parts before anything is written
        optim.freeze(games.build(config), config.network.train.freeze)
    for part in ("shards", "matches"):
        files.make_folder(folder / part)
    # A separate lock for starting it, as a cycle in training may be opened for reading.
    with FileLock(folder / "opening.lock"):
        if not path.exists():
            if start is not None:
                kept = safetensors.torch.save(dict(start.tensors))
                files.write_bytes(folder / games.START, kept)
                write_json(folder / "start.json", {**start.record, "kept": hashlib.sha256(kept).hexdigest()})
            write_json(folder / "openings.json", books)
            write_text(path, configuration.to_yaml(config))
        runtime = _runtime(folder, config, device)
    stored, wanted = configuration.read_yaml_file(path, str(path)), configuration.dump(config)
    if configuration.merge(stored, {"network": {"task": config.network.task}}) == stored:  # import no other's code
        stored = configuration.dump(games.load_cycle(str(path)))  # with options that are newer than it
    if (stored | {key: wanted[key] for key in FREE}) != wanted:
        raise CycleError(
            f"cycle '{name}' was begun with another configuration (see {path}); only {', '.join(FREE)} may "
            "change: give the cycle another name"
        )
    if books and read_json(folder / "openings.json") != books:
        raise CycleError(
            f"the openings of cycle '{name}' ({', '.join(books)}) are not the files that it began with: bring those "
            "back, or give the cycle another name"
        )
    runtime.apply()  # evaluations are stored, too
    return Cycle(folder, config, runtime)


def _with_start(path: Path, config: CycleConfig) -> tuple[CycleConfig, starts.Start | None]:
    """The configuration with the architecture of its `start`, and the weights, until the cycle has begun (has its file
    at `path`). CycleError if a cycle cannot train it."""
    network, found = config.network, None
    if not config.start:
        return config, None
    if path.exists():
        stored = configuration.read_yaml_file(path, str(path)).get("network", {})
        model = stored.get("model", {}) if isinstance(stored, Mapping) else {}
    else:
        try:
            options = starts.source_weights(config.start, network)[1]
            if type(options) is not type(network.model):
                raise CycleError(f"its network ({type(options).__name__}) cannot be trained")
            model = configuration.dump(options)
            own = changed(network, {"model": model, "train": {"init": config.start}})
            found = starts.read_start(own, get_task(own.task).task(own))
        except ValueError as error:
            raise CycleError(f"start '{config.start}': {str(error).removeprefix('train.init: ')}") from error
    return config.model_copy(update={"network": changed(network, {"model": model})}), found


def _runtime(folder: Path, config: CycleConfig, device: str) -> Runtime:
    """Resolved and self-tested when a cycle starts, then stored, so that all its stages compute alike."""
    path = folder / "runtime.json"
    if not path.exists():
        network, changes = config.network, {} if device == "auto" else {"device": device}
        network = network.model_copy(update={"runtime": network.runtime.model_copy(update=changes)})
        runtime = runtimes.resolve(network.runtime, network.train, network.data)
        batch = partial(games.trial_rows, config)
        runtime, _, messages = working_runtime(runtime, get_task(network.task).task(network), batch, network, network)
        for message in messages:
            warnings.warn(message, stacklevel=2)
        write_json(path, runtime.to_dict())
    runtime = runtimes.reuse(read_json(path))
    if device not in ("auto", runtime.device):
        raise CycleError(
            f"cycle '{folder.name}' was begun on '{runtime.device}'; give it another name to run it on '{device}'"
        )
    return runtime


def _positions(folder: Path) -> int:
    """Training positions of the games in a folder."""
    return sum(row.count for row in Catalogue(folder).shards("train")) if folder.is_dir() else 0


class Cycle:
    """One cycle, from `open_cycle`; `train` yields its generations."""

    def __init__(self, folder: Path, config: CycleConfig, runtime: Runtime) -> None:
        self.folder, self.config, self.runtime, self.name = folder, config, runtime, folder.name
        self.rules = games.rules(config)
        self.network = lru_cache(2)(self._network)  # a match has two
        self._lock = FileLock(folder / "lock")

    def train(self, generations: int = 0) -> Iterator[Generation]:
        """Yield every generation up to the last (or `generations`) once decided.

        Earlier ones are yielded at once. CycleError while another process works on the cycle.
        """
        with self._held():
            for number in range(1, (generations or self.config.generations) + 1):
                generation = self._stored(number)
                try:
                    if generation.decision is None:
                        generation = self._learn(self._play(generation))
                        generation = self._match(generation, "match", generation.by)
                        generation = self._anchored(generation)
                        generation = self._decide(self._match(generation, "anchor", generation.anchor_by or 0))
                finally:
                    self.runtime.apply()  # games in this process set one thread
                yield generation

    def _held(self) -> AbstractContextManager[None]:
        """Context with the cycle's lock; CycleError if another process holds it."""
        return files.exclusive(self._lock, CycleError(f"cycle '{self.name}' is in use by another process; wait for it"))

    def history(self) -> list[Generation]:
        """Decided generations."""
        return [generation for generation in read_generations(self.folder).values() if generation.decision]

    def decisions(self) -> list[Decision]:
        """Every change of the best network and why, oldest first."""
        return [one for g in read_generations(self.folder).values() for one in (g.decision, *g.rollbacks) if one]

    @property
    def best(self) -> int:
        """Generation of the best network; 0 is that of `start`, or the untrained one."""
        return next((decision.best for decision in reversed(self.decisions())), 0)

    def roll_back(self, generation: int, reason: str) -> None:
        """Make the network of an earlier generation the best one again; repeating it has no effect.

        A generation in progress keeps its opponent; the next training starts from this network. CycleError if it has
        not been trained, or another process works on the cycle.
        """
        with self._held():
            numbers = [0, *(known.number for known in self.history())]
            if generation not in numbers:
                raise CycleError(f"generation {generation} has not been trained; there are 0 to {numbers[-1]}")
            now = Decision(kind="rollback", after=numbers[-1], best=generation, reason=f"rolled back: {reason}")
            if self.decisions()[-1:] != [now]:
                newest = self._stored(numbers[-1])
                newest.write(self.folder, rollbacks=(*newest.rollbacks, now))

    def _network(self, generation: int) -> Network:
        """The network of a generation, averaged weights; 0 is that of `start`, or untrained."""
        return games.network(self.config, self.runtime, games.weights_of(self.folder, self.config, generation))

    def _stored(self, number: int) -> Generation:
        """A generation as far as it has come; its opponent is fixed when it starts."""
        known = read_generations(self.folder).get(number)
        return known or Generation(number=number, by=self.best, begun=files.utc_now()).write(self.folder)

    def _compute(self, parts: Mapping[int, Part], *stored: bytes) -> closing[Generator[tuple[int, Any], None, None]]:
        config, gpu = self.config, self.runtime.device == "cuda"
        workers = config.workers if config.fleet == "local" else 0
        return closing(compute(parts.items(), stored, kind=config.fleet, workers=workers, gpu=gpu))

    def _play(self, generation: Generation) -> Generation:
        config, runtime = self.config, replace(self.runtime, threads=1)
        starts = range(0, config.games, config.chunk)
        missing = [first for first in starts if str(first) not in generation.chunks]
        if not missing:
            return generation
        play = partial(games.play_chunk, self.name, config, runtime, generation.model_copy(update={"chunks": {}}))
        if book := config.selfplay.openings:
            plies, seed = config.selfplay.opening_plies, [config.seed, generation.number]
            play = partial(play, openings=self.rules.read_openings(book, plies, config.games, seed))
        todo = {first: partial(play, first) for first in missing}
        files.make_folder(self._shards(generation.number))
        catalogue = Catalogue(self._shards(generation.number))
        title = f"generation {generation.number}: self-play"
        with (
            self._compute(todo, games.weights_of(self.folder, config, generation.by)) as results,
            live_bar(initial=len(starts) - len(todo), total=len(starts), desc=title, unit="chunk") as bar,
        ):
            for first, (tally, shards) in results:
                for name, data in shards.items():
                    files.write_bytes(catalogue.folder / name, data)
                    catalogue.add(read_info(catalogue.folder / name))
                chunks = sorted({**generation.chunks, str(first): tally}.items(), key=lambda row: int(row[0]))
                generation = generation.write(self.folder, chunks=dict(chunks))
                bar.update()
        return generation

    def _learn(self, generation: Generation) -> Generation:
        """Train the candidate."""
        if generation.new is not None:
            return generation
        if generation.sources is None:
            generation = self._settle(generation)
        number, sources = generation.number, generation.sources
        assert sources is not None
        folders = {f"selfplay_{one:03d}": self._shards(one) for one in range(1, number + 1)}
        if gone := [name for name in sources if name in folders and not _positions(folders[name])]:
            raise CycleError(
                f"generation {number} of cycle '{self.name}' began to learn from '{gone[0]}', of which there is no "
                f"healthy shard left in {folders[gone[0]]}: restore them or begin another cycle"
            )
        named = {str(folders.get(name, name)): weight for name, weight in sources.items()}
        overrides = {
            "seed": self.config.seed * games.SEEDS + number,
            "data": {"source": named},
            "runtime": configuration.dump(runtime_config(self.config.network, self.runtime).runtime),
        }
        if generation.steps:
            overrides["train"] = {"steps": generation.steps}
        preset = self.folder / "network.yaml"
        write_text(preset, configuration.to_yaml(self.config.network))
        run = runs.open_run(str(preset), run=f"{self.name}-{number:03d}", overrides=overrides, kind="cycle")
        with closing(run):
            if not run.trainer.step:
                run.trainer.start_from(optim.named_tensors(self.network(generation.start).model))
                if self.config.carry and generation.start:
                    run.trainer.carry_on(games.newest_checkpoint(self.folder, self.config, generation.start))
            title = f"generation {number}: training from {generation.start}"
            with live_bar(initial=run.trainer.step, total=run.steps, desc=title, unit="update") as bar:
                for stats in run.train():
                    bar.set_postfix_str(f"loss {stats.loss:.3f}", refresh=False)
                    bar.update()
        measured = self._on_games(run.data, number) | {"value_loss": self._value_loss(run.data, number)}
        return generation.write(self.folder, **measured)

    def _shards(self, number: int) -> Path:
        """Folder of a generation's games."""
        return self.folder / "shards" / f"{number:03d}"

    def _settle(self, generation: Generation) -> Generation:
        """Fix what a candidate starts from (after a roll-back the best network), and the weights of what it trains on:
        the games of recent generations by their positions, other data sets by their shares of all; and its updates."""
        number, decisions, config = generation.number, self.decisions(), self.config
        rows = [_positions(self._shards(one)) for one in range(1, number + 1)]
        first = max(1, number - config.recent(rows) + 1)
        counts = {f"selfplay_{one:03d}": count for one, count in enumerate(rows, 1) if count and one >= first}
        shares = config.shares(number)
        whole = sum(counts.values()) / (1 - sum(shares.values()))
        before = read_generations(self.folder).get(number - 1)
        rolled_back = any(decision.kind == "rollback" for decision in decisions[before.known if before else 0 :])
        return generation.write(
            self.folder,
            start=self.best if rolled_back else number - 1,
            sources=counts | {name: share * whole for name, share in shares.items()},
            known=len(decisions),
            steps=config.updates(number, rows[-1]),
        )

    def _on_games(self, data: RunData, number: int) -> dict[str, float | None]:
        """Top-1 on held-out positions of self-play, on those that occur in no training game, and their share."""
        known, games = data.training.of_records(self.rules.keys), self._of_games(data.validation)
        new = games & ~np.isin(data.validation.of_records(self.rules.keys), known)

        def top1(rows: np.ndarray) -> float | None:
            if not (loader := data.validation.only(rows)).count:
                return None
            return data.spec.evaluate(self.network(number), loader, data.catalogue).get("top1")

        return {"top1": top1(games), "top1_new": top1(new), "new": new.sum() / max(1, games.sum())}

    def _of_games(self, loader: Loader) -> np.ndarray:
        """Mask (N,) of a loader's rows of self-play."""
        rows = [own for name, own in loader.of_sources().items() if name not in self.config.sources]
        return np.logical_or.reduce([np.zeros(loader.count, bool), *rows])

    def _value_loss(self, data: RunData, number: int) -> dict[str, float]:
        """`Generation.value_loss` of a candidate; of as many positions trained on as are held out."""
        if "value" not in active_terms(data.task):
            return {}
        net, held_out = self.network(number), data.validation

        def sums(loader: Loader, sample: int = 0) -> tuple[float, float, int]:
            """Of value loss and chance over rows with a value, and their number."""
            batches = list(loader.sequential(data.config.validation.batch_size, sample=sample))
            found = validate(data.task, net.model, batches, net.runtime, frozenset({"value"}), "full")
            if found is None or not (count := found.counts["value"]):
                return 0.0, 0.0, 0
            return found.losses["value"] * count, sum(data.task.bounds(batch)["value"][0] for batch in batches), count

        own, games = self._of_games(held_out), held_out.of_records(lambda records: records["game"])
        by_game = np.array([sums(held_out.only(own & (games == game))) for game in np.unique(games[own])])
        training = data.training.prepared_by(data.task.prepare_plain)
        train, _, trained = sums(training.only(self._of_games(training)), int(own.sum()))
        if not (trained and by_game[:, 2].any()):
            return {}
        (losses, _, counts), (loss, chance, count) = by_game.T, by_game.sum(0).tolist()
        squares, known = ((losses - counts * loss / count) ** 2).sum(), (counts > 0).sum()
        error = float(np.sqrt(squares * known / (known - 1))) if known > 1 else chance
        return {"train": train / trained, "held out": loss / count, "error": error / count, "chance": chance / count}

    def _anchored(self, generation: Generation) -> Generation:
        """Fix the opponent of the anchor match: the newest earlier generation that no other has beaten in all games,
        so that the scale of ratings has no end; if there is none, the newest."""
        if generation.anchor or generation.anchor_by is not None or not self.config.match.anchor_pairs:
            return generation
        matches = [(g.number, *row) for g in (*self.history(), generation) for row in g.results.items() if sum(row[1])]
        beaten = {other for _, other, pairs in matches if pairs[-1] == sum(pairs)}
        beaten |= {number for number, _, pairs in matches if pairs[0] == sum(pairs)}
        left = set(range(generation.number)) - beaten
        return generation.write(self.folder, anchor_by=max(left, default=generation.number - 1))

    def _match(self, generation: Generation, kind: Against, other: int) -> Generation:
        """Match against an earlier network, in batches counted in order, until the plan or the test ends it."""
        options, number = self.config.match, generation.number
        pairs = options.pairs if kind == "match" else options.anchor_pairs
        seed = [self.config.seed, number, ord(kind[0])]
        openings = self.rules.openings(options, pairs, seed, options.random_plies)
        first = min(len(getattr(generation, kind)) * options.batch, pairs)
        play = partial(games.play_part, self.config, replace(self.runtime, threads=1), (number, other))
        starts = range(first, pairs, options.batch)
        parts = {start: partial(play, openings[start : start + options.batch], start) for start in starts}
        played: dict[int, tuple[str, Pairs]] = {}
        with (
            self._compute(parts, *(games.weights_of(self.folder, self.config, g) for g in (number, other))) as results,
            live_bar(initial=first, total=pairs, desc=f"generation {number}: {kind}", unit="pair") as bar,
        ):
            while first < pairs and (kind == "anchor" or options.decision(generation.pairs(kind)) is None):
                while first not in played:
                    played.update([next(results)])
                text, scores = played.pop(first)
                path = self.folder / "matches" / f"{number:03d}_{kind}_{first:06d}{self.rules.ending}"
                write_text(path, text)
                generation = generation.write(self.folder, **{kind: (*getattr(generation, kind), scores)})
                first += sum(scores)
                bar.set_postfix_str(str(rating(generation.pairs(kind))), refresh=False)
                bar.update(sum(scores))
        return generation

    def _decide(self, generation: Generation) -> Generation:
        """Promotion is decided by the match alone."""
        pairs, number = generation.pairs("match"), generation.number
        accepted = self.config.match.decision(pairs)
        outcome = {True: "SPRT accepts", False: "SPRT refuses", None: "SPRT is undecided"}[accepted]
        early = " early (the truth is less extreme)" if sum(pairs) < self.config.match.pairs else ""
        best, reason = number if accepted else self.best, f"{outcome}{early}: {rating(pairs)}"
        return generation.write(self.folder, decision=Decision(kind="match", after=number, best=best, reason=reason))
