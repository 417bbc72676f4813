"""The cycle: self-play, training on what was played, a match against the best network, promotion.

Every stage is a pure function of the configuration and of what the stages before it left on the disk, and it leaves
its result in files that appear whole or not at all. So a cycle that was killed goes on where it was: no game is lost
or counted twice, and nothing is decided twice.

    reports/<cycle>/cycle.yaml        the configuration
    reports/<cycle>/runtime.json      device, precision and threads of all of its networks
    reports/<cycle>/shards/           positions of all generations, with their catalogue
    reports/<cycle>/games/            an account of each chunk of self-play
    reports/<cycle>/matches/          score and games of each batch of a match
    reports/<cycle>/truth_*.json      a network beside perfect play, in a game that is solved
    reports/<cycle>/promotions.json   which network was the best one after each generation, and why
    reports/<cycle>/generation_*      what a generation began with and learned from, and what became of it
    reports/<cycle>-001/ ...          the training runs
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from filelock import FileLock, Timeout

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.files import end_with_parent, write_json, write_text
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.runtime import Runtime
from matrixlib.play import elo, selfplay
from matrixlib.play import match as matches
from matrixlib.play.search import SearchOptions
from matrixlib.runs.cycle_config import CycleConfig, load_cycle
from matrixlib.tasks import get_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from matrixlib.data.catalogue import ShardRow
    from matrixlib.engine.network import Network
    from matrixlib.play.game import Game, States, Trace

MEANINGFUL = 16  # pairs from which on a match with the untrained network is judged
HELD_OUT = 20  # every so many games one is held out of training


class CycleError(ValueError):
    """A cycle that cannot be begun or continued; says what to do."""


@dataclass(frozen=True)
class Played:
    """Self-play of a generation. results: won by the side that starts a game, drawn, by the other, unknown; wrong,
    played_out: games in which a side that would have given up did not lose, of those that were played out for that
    question; seconds: of computing."""

    games: int
    positions: int
    plies: int
    results: tuple[int, int, int, int]
    wrong: int
    played_out: int
    seconds: float


@dataclass(frozen=True)
class Generation:
    """What became of one generation. by: the network that played; match, anchor: pairs (5,) of the candidate against
    the best network before and against generation 0; best: the generation of the best network after it."""

    number: int
    by: int
    played: Played
    run: str
    top1: float
    match: tuple[int, ...]
    anchor: tuple[int, ...]
    best: int
    reason: str


class Cycle:
    """One cycle, made by `open_cycle`; `train` yields its generations."""

    def __init__(self, folder: Path, config: CycleConfig, runtime: Runtime) -> None:
        self.folder, self.config, self.runtime = folder, config, runtime
        self.spec = get_task(config.network.task)
        assert self.spec.game is not None, "load_cycle has looked"
        self.contest = self.spec.game
        self._nets: dict[int, Network] = {}
        self._lock = FileLock(folder / "lock")

    @property
    def name(self) -> str:
        return self.folder.name

    def train(self, generations: int = 0) -> Iterator[Generation]:
        """Every generation up to the last (or to `generations`), yielded when it has been decided.

        Those that were decided before are yielded at once. CycleError while another process works on the cycle.
        """
        with self._held():
            self.runtime.apply()
            for number in range(1, (generations or self.config.generations) + 1):
                yield self._generation(number)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """With the cycle's lock; CycleError where another process has it."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise CycleError(
                f"cycle '{self.name}' is being worked on by another process; wait for it"
            ) from None
        try:
            yield
        finally:
            self._lock.release()

    def history(self) -> list[Generation]:
        """The generations that have been decided."""
        decided = self.folder.glob("generation_*[0-9].json")
        made = [_generation_from(json.loads(path.read_text(encoding="utf-8"))) for path in decided]
        return sorted(made, key=lambda generation: generation.number)

    def promotions(self) -> list[dict[str, Any]]:
        """Which network was the best one (`best`), from when (`after` which generation), and why, oldest first."""
        path = self.folder / "promotions.json"
        return json.loads(path.read_text(encoding="utf-8"))["promotions"] if path.exists() else []

    @property
    def best(self) -> int:
        """Generation of the best network now; 0 is the untrained one."""
        found = self.promotions()
        return int(found[-1]["best"]) if found else 0

    def roll_back(self, generation: int, reason: str) -> None:
        """Make the network of an earlier generation the best one again; twice in a row counts once.

        A generation that has begun keeps its opponent; the next training that begins starts from this network, not
        from the newest one. CycleError where the network has not been trained, or while
        another process works on the cycle.
        """
        with self._held():
            known = [0, *(made.number for made in self.history())]
            if generation not in known:
                raise CycleError(
                    f"generation {generation} has not been trained; there are {known[0]} to {known[-1]}"
                )
            entry = {
                "kind": "rollback",
                "after": known[-1],
                "best": generation,
                "reason": f"rolled back: {reason}",
            }
            if not any({**last, **entry} == last for last in self.promotions()[-1:]):
                self._decide(entry)

    def decisions(self) -> str:
        """A line for each decision about the best network, oldest first."""
        return "\n".join(
            f"after {entry['after']:>3}: generation {entry['best']} is the best ({entry['reason']})"
            for entry in self.promotions()
        )

    def checks(self) -> list[tuple[str, bool, str]]:
        """What must hold of a cycle: name, whether, what it says. Of the preset `demo` it says nothing about strength,
        whose games are too few for any interval."""
        made = self.history()
        planned = max(self.config.generations, len(made)) * self.config.games  # more may be there
        played = sum(g.played.games for g in made)
        checks = [
            ("every game was played and counted once", played == planned, f"{played:,} of {planned:,} games"),
            (
                "every generation was decided by its match",
                len(made) >= self.config.generations,
                f"{len(made)} of {self.config.generations}",
            ),
        ]
        if made and sum(made[-1].anchor) >= MEANINGFUL:
            best = next((elo.rating(g.anchor) for g in made if g.number == self.best), None)
            said = f"generation {self.best}: {best}" if best else "no generation is the best one"
            checks.append(("stronger than the untrained network", bool(best and best.low > 0), said))
        if truth := self.truth(self.best):
            checks += self.contest.checks(truth)
        return checks

    def truth(self, generation: int) -> dict[str, float]:
        """The network of a generation beside perfect play; empty where nobody knows what that is."""
        from matrixlib.play.evaluator import Evaluator

        path = self.folder / f"truth_{generation:03d}.json"
        if not self.contest.solved:
            return {}
        if not path.exists():
            write_json(
                path, self.contest.perfection(Evaluator(self.network(generation)), self._player(generation))
            )
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def course(self) -> dict[int, dict[str, float]]:
        """`truth` by generation, from the untrained network on; empty where nobody knows perfect play."""
        known = [0, *(made.number for made in self.history())]
        return {number: self.truth(number) for number in known} if self.contest.solved else {}

    def network(self, generation: int) -> Network:
        """The network of a generation, averaged weights; 0 is the untrained one."""
        net = self._nets.pop(generation, None) or _network(self.folder, self.config, generation, self.runtime)
        self._nets = dict([*self._nets.items(), (generation, net)][-2:])  # a match needs two
        return net

    # Stages

    def _generation(self, number: int) -> Generation:
        path = self.folder / f"generation_{number:03d}.json"
        if not path.exists():
            before = self._begin(number)
            played = self._self_play(number, before)
            top1 = self._learn(number)
            match = self._match(number, before, "match", self.config.arena.pairs, sprt=True)
            anchor = self._match(number, 0, "anchor", self.config.arena.anchor_pairs, sprt=False)
            best, reason = self._promote(number, match)
            made = Generation(
                number, before, played, self._run_name(number), top1, match, anchor, best, reason
            )
            write_json(path, asdict(made))
        return _generation_from(json.loads(path.read_text(encoding="utf-8")))

    def _begin(self, number: int) -> int:
        """The best network when the generation began: it plays the games and is the opponent, whatever is decided
        meanwhile."""
        path = self.folder / f"generation_{number:03d}.started.json"
        if not path.exists():
            write_json(path, {"before": self.best})
        return int(json.loads(path.read_text(encoding="utf-8"))["before"])

    def _self_play(self, number: int, by: int) -> Played:
        from matrixlib.data.catalogue import Catalogue
        from matrixlib.progress import live_bar

        config = self.config
        Catalogue(self.folder / "shards")  # processes that make it all at once are in each other's way
        chunks = [
            Chunk(
                self.folder, config, self.runtime, number, by, first, min(config.chunk, config.games - first)
            )
            for first in range(0, config.games, config.chunk)
        ]
        todo = [chunk for chunk in chunks if not chunk.account.exists()]
        what = f"generation {number}: self-play"
        try:
            with live_bar(initial=len(chunks) - len(todo), total=len(chunks), desc=what, unit="chunk") as bar:
                for chunk in _played(todo, config.workers):
                    account = json.loads(chunk.account.read_text(encoding="utf-8"))
                    bar.set_postfix_str(
                        f"{account['games'] / account['seconds']:.1f} games/s in a process", refresh=False
                    )
                    bar.update()
        finally:
            self.runtime.apply()  # games that were played in this process had one thread
        return _total([json.loads(chunk.account.read_text(encoding="utf-8")) for chunk in chunks])

    def _run_name(self, number: int) -> str:
        return f"{self.name}-{number:03d}"

    def _learn(self, number: int) -> float:
        """Train the candidate from the weights that `_lesson` names; returns its held-out top-1."""
        from matrixlib.data.catalogue import Catalogue
        from matrixlib.engine.optim import named_tensors
        from matrixlib.progress import live_bar
        from matrixlib.runs import run as runs

        rows = Catalogue(self.folder / "shards").shards("train")
        lesson = self._lesson(number, rows)
        start, weights = lesson["start"], lesson["sources"]
        if gone := sorted(weights.keys() - {row.source for row in rows}):
            raise CycleError(
                f"generation {number} of cycle '{self.name}' began to learn from '{gone[0]}', of which there is no "
                f"healthy shard left in {self.folder / 'shards'}: restore them or begin another cycle"
            )
        overrides = {
            "seed": self.config.seed + number,
            "data": {"source": str(self.folder / "shards")},
            "curriculum": {"sources": {"enabled": True, "fractions": [1.0], "stages": [weights]}},
            "runtime": runs.runtime_settings(self.runtime),
        }
        preset = self.folder / "network.yaml"
        write_text(preset, configuration.to_yaml(self.config.network))
        run = runs.open_run(str(preset), run=self._run_name(number), overrides=overrides, kind="cycle")
        try:
            if not run.trainer.step:
                run.trainer.start_from(named_tensors(self.network(start).model))
            what = f"generation {number}: training from {start}"
            with live_bar(initial=run.trainer.step, total=run.steps, desc=what, unit="update") as bar:
                for stats in run.train():
                    bar.set_postfix_str(f"loss {stats.loss:.3f}", refresh=False)
                    bar.update()
        finally:
            run.close()
        return float(run.summary()["evaluation"]["top1"])

    def _lesson(self, number: int, rows: list[ShardRow]) -> dict[str, Any]:
        """What the candidate learns from, settled when its training begins, whatever becomes of shards meanwhile.

        start: generation of its first weights, the one before it, after a roll-back the best one; sources: weights
        of the latest generations' positions; decisions: how many there were about the best network.
        """
        path = self._lesson_file(number)
        if not path.exists():
            recent = [_source(g) for g in range(max(1, number - self.config.window + 1), number + 1)]
            counts = {name: float(sum(row.count for row in rows if row.source == name)) for name in recent}
            before, decided = self._lesson_file(number - 1), self.promotions()
            known = json.loads(before.read_text(encoding="utf-8"))["decisions"] if before.exists() else 0
            rolled_back = any(entry["kind"] == "rollback" for entry in decided[known:])
            lesson = {
                "start": self.best if rolled_back else number - 1,
                "sources": {name: count for name, count in counts.items() if count},
                "decisions": len(decided),
            }
            write_json(path, lesson)
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def _lesson_file(self, number: int) -> Path:
        return self.folder / f"generation_{number:03d}.lesson.json"

    def _match(self, number: int, other: int, kind: str, pairs: int, sprt: bool) -> tuple[int, ...]:
        """Pairs (5,) by score of the candidate of a generation against an earlier network."""
        from matrixlib.progress import live_bar

        config, counts = self.config.arena, np.zeros(5, np.int64)
        stop = (
            elo.Sprt(elo0=config.elo0, elo1=config.elo1, alpha=config.alpha, beta=config.beta)
            if sprt
            else None
        )
        seed = [self.config.seed, number, ord(kind[0])]
        starts = matches.random_openings(self.contest.game, pairs, seed, config.random_plies)
        with live_bar(total=pairs, desc=f"generation {number}: {kind}", unit="pair") as bar:
            for first in range(0, pairs, config.batch):
                path = self.folder / "matches" / f"{number:03d}_{kind}_{first:06d}.json"
                if not path.exists():
                    self._play_batch(path, number, other, starts[first : first + config.batch], first)
                counts += json.loads(path.read_text(encoding="utf-8"))["pairs"]
                bar.set_postfix_str(str(elo.rating(counts)), refresh=False)
                bar.update(min(config.batch, pairs - first))
                if stop is not None and stop.decision(counts) is not None:
                    break
        return tuple(int(count) for count in counts)

    def _play_batch(self, path: Path, number: int, other: int, openings: States, first: int) -> None:
        game, players = self.contest.game, [self._player(g) for g in (number, other)]
        names = (f"generation {number}", f"generation {other}")
        plies = self.config.arena.plies
        match = matches.play_pairs(game, players[0], players[1], openings, plies, names, 2 * first)
        text = "\n\n".join(game.write(played) for played in match.games) + "\n"
        write_text(path.with_suffix(self.contest.ending), text)
        write_json(path, {"pairs": match.pairs().tolist()})

    def _player(self, generation: int) -> matches.Player:
        from matrixlib.play.evaluator import Evaluator

        options = _options(SearchOptions, self.config.search)
        evaluate, simulations = Evaluator(self.network(generation)), self.config.arena.simulations
        return matches.search_player(self.contest.game, evaluate, simulations, options)

    def _promote(self, number: int, match: tuple[int, ...]) -> tuple[int, str]:
        """The best network after a generation, and why; decided once, even if it is asked for again after a kill."""
        for entry in self.promotions():
            if entry["after"] == number:  # a roll-back stands after a generation whose file is there
                return int(entry["best"]), str(entry["reason"])
        config = self.config.arena
        decision = elo.Sprt(
            elo0=config.elo0, elo1=config.elo1, alpha=config.alpha, beta=config.beta
        ).decision(match)
        rating = elo.rating(match)
        verdict = {True: "SPRT accepts", False: "SPRT refuses", None: "SPRT is undecided"}[decision]
        best, reason = number if decision else self.best, f"{verdict}: {rating}"
        self._decide({"kind": "match", "after": number, "best": best, "reason": reason})
        return best, reason

    def _decide(self, entry: Mapping[str, Any]) -> None:
        now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
        write_json(
            self.folder / "promotions.json", {"promotions": [*self.promotions(), {**entry, "time": now}]}
        )


def open_cycle(
    preset: str = "demo", device: str = "auto", cycle: str = "", overrides: Mapping[str, Any] | None = None
) -> Cycle:
    """Open a cycle: go on with the named one, or begin it; an empty name is `cycle-<preset>`.

    preset: name in params/cycle/ or path of a YAML file. overrides: nested mapping, checked by the schema.
    Raises ConfigError, and CycleError where the cycle was begun with another configuration.
    """
    config = load_cycle(preset, overrides)
    name = cycle or f"cycle-{Path(preset).stem}"
    if Path(name).name != name or name.startswith("."):
        raise CycleError(f"cycle name {name!r} must be a plain folder name, without slashes or a leading dot")
    settings = config.arena
    needed = max(settings.pairs, settings.anchor_pairs)  # of a small game there may be fewer: say so now
    rules = get_task(config.network.task).game
    assert rules is not None, "load_cycle has looked"
    matches.random_openings(rules.game, needed, config.seed, settings.random_plies)
    folder = files.reports_root() / name
    for part in ("shards", "games", "matches"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    path = folder / "cycle.yaml"
    # One of several that begin it decides. It is a lock of its own, as a cycle that is trained may be looked at.
    with FileLock(folder / "opening.lock"):
        if not path.exists():
            write_text(path, configuration.to_yaml(config))
        runtime = _runtime(folder, config, device)
    stored = load_cycle(str(path))
    if stored.model_copy(update={"generations": config.generations, "workers": config.workers}) != config:
        raise CycleError(
            f"cycle '{name}' was begun with another configuration (see {path}); only generations and workers may "
            "change: give the cycle another name"
        )
    runtime.apply()  # all that its networks compute is kept, `truth` too
    return Cycle(folder, config, runtime)


def _runtime(folder: Path, config: CycleConfig, device: str) -> Runtime:
    """Resolved when a cycle begins, and kept: what plays, learns and is compared is to compute alike.

    Raises ValueError where its device is not here, CycleError where another one is asked for.
    """
    path = folder / "runtime.json"
    if not path.exists():
        network, asked = config.network, {} if device == "auto" else {"device": device}
        settings = network.runtime.model_copy(update=asked)
        write_json(path, runtimes.resolve(settings, network.train, network.data).to_dict())
    runtime = runtimes.reuse(json.loads(path.read_text(encoding="utf-8")))
    if device not in ("auto", runtime.device):
        raise CycleError(
            f"cycle '{folder.name}' was begun on '{runtime.device}'; give it another name to run it on '{device}'"
        )
    return runtime


# Self-play


@dataclass(frozen=True)
class Chunk:
    """Games `first` to `first + games - 1` of a generation, played by the network of generation `by`."""

    folder: Path
    config: CycleConfig
    runtime: Runtime
    generation: int
    by: int
    first: int
    games: int

    @property
    def stem(self) -> str:
        return f"{self.generation:03d}_{self.first:06d}"

    @property
    def account(self) -> Path:
        """Written when all its games are in shards."""
        return self.folder / "games" / f"{self.stem}.json"

    def origin(self) -> dict[str, Any]:
        """Where its shards come from, as JSON data."""
        return {"cycle": self.folder.name, "generation": self.generation, "by": self.by, "first": self.first}

    def play(self) -> None:
        """Play the games, write their shards, and then the account.

        On one thread, as the processes of self-play are the parallelism: their number does not change the games.
        """
        from matrixlib.data.catalogue import Catalogue
        from matrixlib.data.shards import select, write_shard
        from matrixlib.play.evaluator import Evaluator

        runtime = replace(self.runtime, threads=1)
        runtime.apply()
        spec = get_task(self.config.network.task)
        contest, layout = spec.game, spec.layout
        assert contest is not None
        options = _options(selfplay.SelfPlayOptions, self.config.selfplay)
        evaluator = Evaluator(_network(self.folder, self.config, self.by, runtime))
        seed = self.config.seed * 1_000_003 + self.generation
        start = time.monotonic()
        numbers = range(self.first, self.first + self.games)
        search = _options(SearchOptions, self.config.search)
        traces = sorted(
            selfplay.play_games(contest.game, evaluator, numbers, options, search, seed),
            key=lambda t: t.number,
        )
        where = (self.folder.name, str(self.generation))
        ids = {number: contest.game_id((*where, str(number)), _held_out(number)) for number in numbers}
        batch = contest.batch(traces, ids)
        kept = np.array([ids[number] for number in numbers if _held_out(number)], np.uint64)
        held_out = np.isin(batch["records"]["game"], kept)
        catalogue = Catalogue(self.folder / "shards")
        meta = {"source": _source(self.generation), "generator": self.origin(), "seed": seed}
        for split, rows in (("train", ~held_out), ("validation", held_out)):
            if rows.any():
                part = select(batch, np.flatnonzero(rows), layout)
                path = self.folder / "shards" / f"{self.stem}_{split}.npz"
                info = write_shard(path, layout, part, {**meta, "split": split})
                catalogue.add(info, split, _source(self.generation))
        seconds = time.monotonic() - start
        write_json(self.account, _account(contest.game, traces, len(batch["records"]), seconds))


def _played(chunks: list[Chunk], workers: int) -> Iterator[Chunk]:
    """Play the chunks and yield each when it is done, in worker processes where there are several."""
    if workers == 1 or len(chunks) < 2:
        for chunk in chunks:
            chunk.play()
            yield chunk
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(chunks)), context, end_with_parent) as pool:
        futures = {pool.submit(chunk.play): chunk for chunk in chunks}
        try:
            for done in as_completed(futures):
                done.result()
                yield futures[done]
        finally:  # after an error the chunks that have not begun are not waited for
            pool.shutdown(cancel_futures=True)


def _network(folder: Path, config: CycleConfig, generation: int, runtime: Runtime) -> Network:
    from matrixlib.engine.checkpoint import Checkpoints
    from matrixlib.engine.network import GameTask, Network
    from matrixlib.tasks.spec import weights

    network = config.network.model_copy(update={"seed": config.seed})
    task = get_task(network.task).task(network)
    model = task.build_model()
    if generation:
        run = folder.parent / f"{folder.name}-{generation:03d}"
        found = Checkpoints(run / "checkpoints", config.network.checkpoint.keep).pick("newest")
        model.load_state_dict(weights(found.tensors), strict=True)
    return Network(model, cast(GameTask, task), runtime)


def _options(schema: Any, section: Any) -> Any:
    return schema(**{schema.RENAMED.get(key, key): value for key, value in section.model_dump().items()})


def _source(generation: int) -> str:
    return f"selfplay_{generation:03d}"


def _held_out(number: int) -> bool:
    return number % HELD_OUT == HELD_OUT - 1


def _account(game: Game, traces: list[Trace], positions: int, seconds: float) -> dict[str, Any]:
    results = [0, 0, 0, 0]
    for trace in traces:
        first = -1 if game.to_move(trace.states[:1])[0] else 1  # the result is the first mover's
        known = None if trace.result is None else trace.result * first
        results[{1.0: 0, 0.0: 1, -1.0: 2, None: 3}[known]] += 1
    judged = [trace.wrongly_given_up for trace in traces if trace.wrongly_given_up is not None]
    return {
        "games": len(traces),
        "positions": positions,
        "plies": sum(len(trace.line) for trace in traces),
        "results": results,
        "wrong": sum(judged),
        "played_out": len(judged),
        "seconds": seconds,
    }


def _total(accounts: list[dict[str, Any]]) -> Played:
    added = {key: sum(account[key] for account in accounts) for key in accounts[0] if key != "results"}
    results = tuple(int(n) for n in np.sum([account["results"] for account in accounts], axis=0))
    return Played(**added, results=results)  # type: ignore[arg-type]


def _generation_from(data: Mapping[str, Any]) -> Generation:
    played = {**data["played"], "results": tuple(data["played"]["results"])}
    pairs = {key: tuple(data[key]) for key in ("match", "anchor")}
    return Generation(**{**data, **pairs, "played": Played(**played)})


# What is shown


def table(generations: list[Generation]) -> str:
    """A line for each generation: games and their results, what was learned, the match, the decision."""
    head = f"{'':>3} {'games':>5} {'positions':>9} {'W/D/L/?':>14} {'plies':>5} {'top-1':>6}  SPRT"
    lines = [head]
    for made in generations:
        played = made.played
        results = "/".join(map(str, played.results))
        decision = made.reason.removeprefix("SPRT ").partition(", score")[0]
        lines.append(
            f"{made.number:>3} {played.games:>5,} {played.positions:>9,} {results:>14} "
            f"{played.plies / played.games:>5.0f} {made.top1:>6.1%}  {decision}"
        )
    return "\n".join(lines)


def course_table(course: Mapping[int, Mapping[str, float]]) -> str:
    """A line for each figure of `Cycle.course`, a column for each generation."""
    names = list(next(iter(course.values())))
    lines = [f"{'generation':34}" + "".join(f"{number:>9}" for number in course)]
    return "\n".join(
        lines
        + [f"{name:34}" + "".join(f"{found[name]:>9.2%}" for found in course.values()) for name in names]
    )


def course_figure(course: Mapping[int, Mapping[str, float]]) -> Figure:
    """The same as curves."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for name in next(iter(course.values())):
        axes.plot(list(course), [found[name] for found in course.values()], "o-", label=name)
    axes.set(xlabel="generation", ylim=(-0.03, 1.03))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def elo_figure(generations: list[Generation]) -> Figure:
    """Elo of each generation over the untrained network, with 95 % intervals; promoted ones are filled."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for made in generations:
        if not sum(made.anchor):
            continue
        rating = elo.rating(made.anchor)
        low, high = (float(np.clip(x, -1500, 1500)) for x in (rating.low, rating.high))
        middle = float(np.clip(rating.elo, -1500, 1500))
        promoted = made.best == made.number
        axes.vlines(made.number, low, high, color="#1f77b4")
        axes.plot(made.number, middle, "o", color="#1f77b4", fillstyle="full" if promoted else "none")
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlim(0.5, len(generations) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("generation")
    axes.set_ylabel("Elo over generation 0")
    axes.grid(alpha=0.3)
    return figure
