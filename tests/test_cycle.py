"""The cycle: accounts that add up, kills that lose nothing, decisions that are made once, and by the match alone."""

import io
import json
import os
import re
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cells import run_notebook
from filelock import FileLock
from saved import assert_same, newest

from matrixlib import config
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard, read_info, write_shard
from matrixlib.engine.metrics import read as read_rows
from matrixlib.engine.optim import named_tensors
from matrixlib.files import read_json
from matrixlib.hardware.runtime import Runtime
from matrixlib.play.game import uniform
from matrixlib.play.search import Evaluator
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.runs import cycle, cycle_games
from matrixlib.runs import run as runs
from matrixlib.runs.cycle_games import Decision, Generation, Pairs, load_cycle, read_generations
from matrixlib.tasks import get_task, load
from matrixlib.tasks.chess.records import LAYOUT, legal_indices, position_ids
from matrixlib.tasks.chess.stockfish.sample import unpack_sample
from matrixlib.tasks.tictactoe.spec import LAYOUT as TICTACTOE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TINY: dict[str, Any] = {
    "generations": 2,
    "games": 20,
    "chunk": 5,
    "row_uses": 0.8,
    "carry": True,
    "selfplay": {"parallel": 20, "num_simulations": 4, "num_quick_simulations": 2, "plies": 12},
    "match": {"pairs": 2, "batch": 1, "num_simulations": 2, "plies": 12, "anchor_pairs": 1},
    "network": {
        "train": {"batch_size": 16},
        "validation": {"interval": 3, "sample": 16},
        "checkpoint": {"interval": 2},
        "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
    },
}


def play_cycle(reports: Path, changes: dict[str, Any]) -> None:
    """In a process of its own: the cycle "c", or what is left of it."""
    os.environ["MATRIXLIB_REPORTS"] = str(reports)
    list(cycle.open_cycle("demo", "cpu", "c", TINY | changes).train())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports root of a cycle of two generations that nothing interrupted."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIXLIB_REPORTS", str(root))
        play_cycle(root, {})
    return root


@pytest.fixture
def opened(whole: Path, monkeypatch: pytest.MonkeyPatch) -> cycle.Cycle:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(whole))
    return cycle.open_cycle("demo", "cpu", "c", TINY)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    return tmp_path


def test_cycles_are_compared_by_their_last_networks(whole: Path, reports: Path) -> None:
    for name in ("c", "c-001", "c-002"):
        for copy in (name, name.replace("c", "d")):
            shutil.copytree(whole / name, reports / copy)
    text = run_notebook("cycle", device="cpu", cycle="c", overrides=TINY, against="d").text
    (own, other) = (re.search(rf"^\d +{name} +(.+)$", text, re.MULTILINE)[1].split() for name in "cd")
    assert other[: len(own)] == own
    assert " ".join(other[len(own) :]).startswith("+0.0 Elo ["), "the same network on both sides"
    path = reports / "d" / "cycle.yaml"
    path.write_text(path.read_text().replace("task: chess", "task: x:y"))
    for name in ("d", "c-001", "../c"):
        with pytest.raises(ValueError, match=f"against: '{name}' is no cycle of the task chess"):
            run_notebook("cycle", device="cpu", cycle="c", overrides=TINY, against=name)


class Script:
    """A cycle in which nothing is computed: `train` says what the matches come to, each won, lost or even for the
    candidate, or interrupted. lessons: sources of the trainings; updates: of each, 0 by preset; killed: whether those
    end before they have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.matches: list[str] = []
        self.opponents: list[tuple[int, int]] = []
        self.lessons: list[dict[str, float]] = []
        self.updates: list[int] = []
        self.killed = False
        network = SimpleNamespace(model=torch.nn.Linear(1, 1), training=False, task=None)
        monkeypatch.setattr(cycle_games, "weights_of", lambda *_: b"")
        monkeypatch.setattr(cycle_games, "network", lambda *_: network)
        monkeypatch.setattr(cycle_games, "play_chunk", lambda *_: ({"games": 5, "seconds": 1.0}, {}))
        monkeypatch.setattr(runs, "open_run", self.open_run)
        monkeypatch.setattr(cycle_games, "play_part", self.play_part)
        monkeypatch.setattr(cycle_games, "newest_checkpoint", lambda *_: None)
        monkeypatch.setattr(cycle.Cycle, "_on_games", lambda *_: {"new": 0.5})
        monkeypatch.setattr(cycle.Cycle, "_value_loss", lambda *_: {})
        self.cycle = cycle.open_cycle("demo", "cpu", "p", TINY | {"match": {"pairs": 64, "batch": 64}})

    def open_run(self, *_: Any, overrides: Any, **__: Any) -> Any:
        self.lessons.append({Path(name).name: weight for name, weight in overrides["data"]["source"].items()})
        self.updates.append(overrides.get("train", {}).get("steps", 0))
        if self.killed:
            raise KeyboardInterrupt
        trainer = SimpleNamespace(step=0, start_from=lambda tensors: None, carry_on=lambda checkpoint: None)
        summary: dict[str, Any] = {"evaluation": {}}  # of a game of somebody's own, which has no such figure
        ended: dict[str, Any] = {"train": list, "close": lambda: None, "summary": lambda: summary, "data": None}
        return SimpleNamespace(trainer=trainer, steps=1, **ended)

    def play_part(
        self, config: Any, _: Any, generations: tuple[int, int], openings: Any, *__: Any
    ) -> tuple[str, Pairs]:
        outcome, n = "even", len(openings)
        if n > config.match.anchor_pairs:
            self.opponents.append(generations)
            outcome = self.matches.pop(0)
        if outcome == "interrupted":
            raise KeyboardInterrupt
        return "", {"won": (0, 0, 0, 0, n), "lost": (n, 0, 0, 0, 0)}.get(outcome, (n // 2, 0, 0, 0, n - n // 2))

    def train(self, *matches: str) -> list[Generation]:
        """As many generations more as there are matches."""
        self.matches = list(matches)
        known = len(self.cycle.history())
        return list(self.cycle.train(known + len(matches)))[known:]


@pytest.fixture
def script(reports: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def positions(root: Path, source: str = "") -> np.ndarray:
    rows = [row for row in Catalogue(root / "c" / "shards").shards() if source in ("", row.source)]
    return np.concatenate([Shard(row.path, LAYOUT).gather(np.arange(row.count))["records"] for row in rows])


def weights(root: Path, generation: int) -> dict[str, Any]:
    return newest(root / f"c-{generation:03d}").tensors["ema"]


def test_every_game_is_there_once_with_its_legal_moves(whole: Path, opened: cycle.Cycle) -> None:
    records = positions(whole)
    history = opened.history()
    assert [(g.number, g.selfplay["games"]) for g in history] == [(1, 20), (2, 20)]
    assert len(records) == sum(g.selfplay["positions"] for g in history)
    assert len(np.unique(records["game"])) == 40
    assert (records["source"] == 9).all()
    for g in history:
        assert sum(g.selfplay[result] for result in ("wins", "draws", "losses", "unknown")) == 20
        assert sum(count for name, count in g.selfplay.items() if name.startswith("by ")) == 20
        assert g.selfplay["by ply limit"] == g.selfplay["unknown"]
        assert (sum(g.pairs("match")), sum(g.pairs("anchor"))) == (2, 1)
    games = set()
    for row in Catalogue(whole / "c" / "shards").shards("validation"):
        batch = Shard(row.path, LAYOUT).gather(np.arange(row.count))
        games |= set(batch["records"]["game"].tolist())
        index, offset = legal_indices(batch["records"])
        assert np.array_equal(index, batch["policy_index"])
        assert np.array_equal(offset, batch["policy_offset"])
    assert len(games) == 2, "one game in twenty is held out"
    endings = [read_info(row.path).meta["generator"]["endings"] for row in Catalogue(whole / "c" / "shards").shards()]
    named = {game for shard in endings for ids in shard.values() for game in ids}
    assert named == set(records["game"].tolist()), "a shard says how its results came about"


def test_the_candidate_goes_on_from_the_network_before_it(whole: Path, opened: cycle.Cycle) -> None:
    start = {name: tensor.clone() for name, tensor in opened.network(0).model.state_dict().items()}
    again = cycle.open_cycle("demo", "cpu", "c", TINY).network(0).model.state_dict()
    assert all((again[name] == tensor).all() for name, tensor in start.items()), "a function of the seed"
    first, second = weights(whole, 1), weights(whole, 2)
    moved_on, from_start = (
        sum(float((second[name] - old[name]).abs().sum()) for name in first) for old in (first, start)
    )
    assert 0 < moved_on < from_start
    paths = [path for path in (whole / "c").rglob("*.*") if path.suffix != ".sqlite"]
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert list(opened.train()) == opened.history()
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what was decided is not done again"


def test_updates_follow_the_new_rows_and_the_optimizer_is_carried_on(whole: Path, opened: cycle.Cycle) -> None:
    history, made = opened.history(), []
    for g in history:
        rows = sum(row.count for row in Catalogue(whole / "c" / "shards" / f"{g.number:03d}").shards("train"))
        assert g.steps == read_json(whole / f"c-{g.number:03d}" / "summary.json")["steps"] == -(-0.8 * rows // 16)
        made.append(g.steps)
        optimiser = newest(whole / f"c-{g.number:03d}").tensors["optimiser"]
        counts = {float(t) for name, t in optimiser.items() if name.endswith("/step")}
        assert counts == {sum(made)}, "of this training and those before it"
    measured = [row["validation"] for row in read_rows(whole / "c-001" / "metrics.jsonl") if row.get("validation")]
    assert history[0].value_loss["held out"] == pytest.approx(measured[-1]["losses"]["value"], rel=1e-4)
    assert history[0].value_loss["chance"] == pytest.approx(np.log(3))
    assert [g.value_loss["error"] >= 1 for g in history] == [True, False], "one held-out game says nothing, two do"


@pytest.mark.parametrize(
    ("train", "held_out", "error", "by_heart"),
    [
        (0.5, 0.6, 0.0, False),
        (0.5, 0.9, 0.09, True),
        (0.5, 0.9, 0.11, False),
        (0.9, 1.2, 0.05, True),
        (1.08, 1.3, 0, False),
    ],
)
def test_values_learned_by_heart_are_named(train: float, held_out: float, error: float, by_heart: bool) -> None:
    loss = {"train": train, "held out": held_out, "error": error, "chance": 1.1}
    generation = Generation(number=1, chunks={"0": {"games": 20}}, value_loss=loss)
    assert (generation.by_heart, "by heart" in str(generation)) == (by_heart, by_heart)


STAGES = [(n, part) for n in (1, 2) for part in ("chunks", "sources", "checkpoint", "match", "anchor", "decision")]


def run(forkserver: Any, reports: Path, **changes: Any) -> Any:
    process = forkserver.Process(target=play_cycle, args=(reports, changes))
    process.start()
    return process


def kill_at(stage: tuple[int, str], process: Any, root: Path) -> None:
    """Kill a cycle as soon as a generation has come so far."""
    number, part = stage
    while not (
        any(root.glob(f"c-{number:03d}/checkpoints/step_????????"))
        if part == "checkpoint"
        else getattr(read_generations(root / "c").get(number), part, None)
    ):
        assert process.is_alive(), f"it ended before {stage}"
        time.sleep(0.002)
    process.kill()
    process.join()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["one", "all"])
@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_games_and_weights(
    whole: Path, tmp_path: Path, forkserver: Any, every: bool
) -> None:
    """Once in the first of two generations; or at every stage of both, with a start and other data."""
    stages, killed, changes = STAGES[:1], tmp_path / "killed", {"generations": 1}
    if every:
        stages, whole = STAGES[:-1], tmp_path / "whole"
        changes = {"start": "shipped", "sources": {str(other_data(tmp_path)): 0.25}}
        run(forkserver, whole, **changes).join(300)
    for stage in stages:
        kill_at(stage, run(forkserver, killed, **changes), killed)
    last = run(forkserver, killed, **changes)
    last.join(300)
    assert last.exitcode == 0
    decisions = [generation.decision for generation in read_generations(killed / "c").values()]
    assert len(decisions) == 1 + every
    assert decisions == [generation.decision for generation in read_generations(whole / "c").values()][: 1 + every]
    for number in range(1, 2 + every):
        source = f"selfplay_{number:03d}"
        assert positions(killed, source).tobytes() == positions(whole, source).tobytes()
        assert_same(killed / f"c-{number:03d}", whole / f"c-{number:03d}")
        matches = list((whole / "c" / "matches").glob(f"{number:03d}_*"))
        assert matches
        for path in matches:
            assert (killed / "c" / "matches" / path.name).read_bytes() == path.read_bytes()


def other_data(root: Path) -> Path:
    """A folder of 300 rows of the sample set to learn from and 300 held out."""
    sample, outside = Catalogue(unpack_sample()), root / "outside"
    outside.mkdir()
    for split in ("train", "validation"):
        rows = Shard(sample.shards(split)[0].path, LAYOUT).gather(np.arange(300))
        about = {"generator": "test", "seed": 0, "source": "stockfish", "split": split}
        write_shard(outside / f"{split}.npz", LAYOUT, rows, about)
    return outside


class Enough(Exception):
    """Self-play is over."""


@pytest.fixture
def games_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def training(*_: Any, **__: Any) -> Any:
        raise Enough

    monkeypatch.setattr(runs, "open_run", training)


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "c" / "shards").rglob("001_*.npz")}


@pytest.mark.filterwarnings("error:.*was not in the catalogue")  # nothing is wrong with what has just been written
def test_several_processes_play_the_same_games(whole: Path, reports: Path, games_alone: None) -> None:
    current = cycle.open_cycle("demo", "cpu", "c", {**TINY, "workers": 2})
    begun = read_generations(whole / "c")[1].begun  # shards say when they were made
    Generation(number=1, begun=begun).write(reports / "c")
    with pytest.raises(Enough):
        next(current.train())
    assert read_generations(reports / "c")[1].selfplay["games"] == 20
    assert shards(reports) == shards(whole)
    assert len(Catalogue(reports / "c" / "shards").shards()) == 5


def test_games_are_played_on_one_thread_whatever_the_rest_has(
    reports: Path, games_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the number of processes would change their bits. The rest has its own again, also after an error."""
    network = {**TINY["network"], "runtime": {**TINY["network"]["runtime"], "threads": 2}}
    current = cycle.open_cycle("demo", "cpu", "c", {**TINY, "network": network})
    counts = set()

    def watched(*arguments: Any) -> Any:
        counts.add(torch.get_num_threads())
        raise Enough

    monkeypatch.setattr(cycle_games, "play_games", watched)
    before = torch.get_num_threads()
    with pytest.raises(Enough):
        next(current.train())
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (counts, after) == ({1}, 2)


def test_figures_are_also_of_held_out_positions_that_no_game_to_learn_from_has(
    whole: Path, opened: cycle.Cycle
) -> None:
    shards, ids = Catalogue(whole / "c" / "shards"), dict[str, np.ndarray]()
    for split in ("train", "validation"):
        parts = [Shard(row.path, LAYOUT).gather(np.arange(row.count)) for row in shards.shards(split)]
        ids[split] = np.concatenate([position_ids(part["records"]) for part in parts])
    generation = opened.history()[-1]
    assert generation.new == pytest.approx(1 - np.isin(ids["validation"], ids["train"]).mean())
    assert 0 < generation.new < 1
    assert generation.top1_new is not None


def test_only_the_match_promotes_and_only_once(script: Script) -> None:
    generations = script.train("even", "won", "lost")
    decisions = script.cycle.decisions()
    told = [(d.after, d.best, d.reason.partition(": ")[0]) for d in decisions]
    assert told == [(1, 0, "SPRT is undecided"), (2, 2, "SPRT accepts"), (3, 2, "SPRT refuses")]
    assert list(script.cycle.train(3)) == generations, "decided once"
    assert (script.cycle.decisions(), script.cycle.best) == (decisions, 2)


def test_the_scale_of_ratings_has_no_end(script: Script) -> None:
    """Each anchor match is against the newest generation not beaten in all games; in old cycles against 0."""
    generations = script.train("won", "won", "even")
    assert [(g.by, g.anchor_by) for g in generations] == [(0, 0), (1, 0), (2, 2)]
    scale = cycle_games.ratings(generations)
    assert scale.index.tolist() == [0, 1, 2, 3]
    assert scale["elo"][0] == scale["low"][0] == 0 < scale["elo"][1] < scale["elo"][2]
    assert ((scale["low"] <= scale["elo"]) & (scale["elo"] <= scale["high"])).all()
    folder = script.cycle.folder
    for path in folder.glob("generation_*.json"):
        path.write_text(json.dumps({key: v for key, v in json.loads(path.read_text()).items() if key != "anchor_by"}))
    settings = yaml.safe_load((folder / "cycle.yaml").read_text())
    for section in ("selfplay", "match"):
        del settings[section]["openings"]
    (folder / "cycle.yaml").write_text(yaml.safe_dump(settings))
    Generation(number=4, by=2, match=((0, 0, 64, 0, 0),), anchor=((0, 0, 1, 0, 0),)).write(folder)
    script.cycle = cycle.open_cycle("demo", "cpu", "p", TINY | {"match": {"pairs": 64, "batch": 64, "anchor_pairs": 2}})
    (fourth,) = script.train("even")
    assert [g.results.keys() for g in script.cycle.history()] == [{0}, {0, 1}, {0, 2}, {0, 2}]
    assert fourth.anchor_by is None, "a match that has begun keeps its opponent"
    settings["network"]["task"] = "somebody.elses:TASK"
    (folder / "cycle.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(cycle.CycleError, match="another configuration"):  # whose code is not imported
        cycle.open_cycle("demo", "cpu", "p", TINY)


def test_who_lost_every_game_is_no_anchor(script: Script) -> None:
    decided = Decision(kind="match", after=1, best=0, reason="lost")
    lost = {"match": ((64, 0, 0, 0, 0),), "anchor": ((2, 0, 0, 0, 0),), "anchor_by": 0, "decision": decided}
    Generation(number=1, **lost).write(script.cycle.folder)  # type: ignore[arg-type]
    (second,) = script.train("even")
    assert second.anchor_by == 0


def test_a_generation_keeps_its_opponent_through_a_roll_back(script: Script) -> None:
    """Else one sequential test would be made of games against two networks."""
    with pytest.raises(KeyboardInterrupt):
        script.train("won", "interrupted")
    script.cycle.roll_back(0, "weak")
    second, third = script.train("even", "even")
    assert script.opponents == [(1, 0), (2, 1), (2, 1), (3, 0)]
    assert [(g.by, g.decision and g.decision.best) for g in (second, third)] == [(1, 0), (0, 0)]
    kinds = [decision.kind for decision in script.cycle.decisions()]
    assert kinds == ["match", "rollback", "match", "match"]


def test_after_a_roll_back_training_starts_from_the_best_network(script: Script) -> None:
    with pytest.raises(KeyboardInterrupt):
        script.train("interrupted")
    script.cycle.roll_back(0, "before any decision")
    assert [(d.kind, d.after, d.best) for d in script.cycle.decisions()] == [("rollback", 0, 0)]
    script.train("won")
    with pytest.raises(KeyboardInterrupt):
        script.train("interrupted")
    script.cycle.roll_back(1, "before the generation that has begun is decided")
    script.train("won", "even", "even")
    script.cycle.roll_back(1, "after it")
    script.train("even")
    assert [(g.number, g.start) for g in script.cycle.history()] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 1)]


def test_rolling_back_is_one_call(script: Script) -> None:
    script.train("even", "even")
    for reason, count in (("weak in endings", 3), ("weak in endings", 3), ("weak in openings", 4)):
        script.cycle.roll_back(1, reason)
        decisions = script.cycle.decisions()
        assert len(decisions) == count, "the same again counts once"
        assert decisions[-1] == Decision(kind="rollback", after=2, best=1, reason=f"rolled back: {reason}")
    with FileLock(script.cycle.folder / "lock"), pytest.raises(cycle.CycleError, match="by another process"):
        script.cycle.roll_back(0, "")
    with pytest.raises(cycle.CycleError, match="generation 7 has not been trained; there are 0 to 2"):
        script.cycle.roll_back(7, "")


def test_a_lesson_is_settled_when_the_training_begins(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a shard that is quarantined between a kill and the resume changes the run's configuration."""
    counts = {"001": 30, "002": 25}
    monkeypatch.setattr(cycle, "_positions", lambda folder: counts[folder.name])
    script.train("even")
    script.killed = True
    for left in ({"002": 20}, {"001": 0}):
        with pytest.raises(KeyboardInterrupt):
            script.train("even")
        assert script.lessons[-1] == {"001": 30.0, "002": 25.0}
        counts |= left
    with pytest.raises(cycle.CycleError, match=r"learn from 'selfplay_001', of which there is no healthy shard"):
        script.train("even")


def test_window_shares_and_updates_follow_the_generations(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Wu's law 273 of 400, 336 of 600, 423 of 900 positions with c = 200; what began so is resumed so."""
    counts = {"001": 100, "002": 300, "003": 200, "004": 300}
    monkeypatch.setattr(cycle, "_positions", lambda folder: counts[folder.name])
    changes = {"sources": {"x": [0.5, 0.25, 0.0]}, "window_rows": 200, "row_uses": 4.0}
    script.cycle.config = script.cycle.config.model_copy(update=changes)
    script.train("even", "even", "even", "even")
    assert script.lessons == [
        {"001": 100, "x": 100},
        {"002": 300, "x": 100},
        {"002": 300, "003": 200},
        {"003": 200, "004": 300},
    ]
    assert script.updates == [50, 100, 50, 75]
    assert [g.steps for g in script.cycle.history()] == script.updates
    script.killed = True
    for rows in (160, 80):
        counts["005"] = rows
        with pytest.raises(KeyboardInterrupt):
            script.train("even")
    assert script.updates[-2:] == [40, 40]
    for sources, refusal in (
        ({"x": [0.5, 0.3], "y": 0.6}, "sources take 1.1 in generation 1, which leaves nothing for the games"),
        ({"x": [0.1, 0.5], "y": [0.1, 0.2, 0.5]}, "in generation 3"),
        ({"x": [0, 0]}, r"^demo\.yaml: source 'x' has a share in no generation"),
        ({"x": []}, "at least 1 item"),
        ({"x": [1.0]}, "less than 1"),
    ):
        with pytest.raises(config.ConfigError, match=refusal):
            load_cycle("demo", {"sources": sources})


def test_a_match_ends_when_the_test_decides(script: Script) -> None:
    match = script.cycle.config.match.model_copy(update={"pairs": 64, "batch": 16})
    script.cycle.config = script.cycle.config.model_copy(update={"match": match})
    script.matches = ["won"] * 4
    (generation,) = script.cycle.train(1)
    assert (sum(generation.pairs("match")), script.cycle.best) == (32, 1)
    assert script.cycle.decisions()[0].reason.startswith("SPRT accepts early (the truth is less extreme): +")


def test_held_out_games_are_measured_as_they_are(reports: Path) -> None:
    """However surprising their positions are, which repeat in training."""
    surprising = {**TINY["selfplay"], "surprise_share": 1.0, "full_share": 1.0}
    config = load_cycle("demo", TINY | {"selfplay": surprising, "games": 20, "chunk": 20})
    runtime = cycle.open_cycle("demo", "cpu", "c", TINY | {"selfplay": surprising}).runtime
    stored = cycle_games.weights_of(reports / "c", config, 0)
    tally, shards = cycle_games.play_chunk("c", config, runtime, Generation(number=1), 0, stored)
    repeated = {}
    for name, data in shards.items():
        with np.load(io.BytesIO(data)) as members:
            records = members["records"]
        repeated[name.split("_")[-1]] = len(records) - len(np.unique(records))
    assert repeated["validation.npz"] == 0 < repeated["train.npz"]
    assert tally["games"] == 20


def test_damaged_files_are_named(script: Script, reports: Path) -> None:
    for text in ("", "[]", "{}"):
        (reports / "p" / "generation_001.json").write_text(text)
        with pytest.raises(cycle.CycleError, match=r"generation_001.json is damaged"):
            script.cycle.history()
    for text in ("seed: 0\n", "network: 3\n", "seed: ["):
        (reports / "p" / "cycle.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"cycle\.yaml"):
            cycle.open_cycle("demo", "cpu", "p", TINY)


def test_another_configuration_or_a_second_process_is_refused(whole: Path, opened: cycle.Cycle) -> None:
    cycle.open_cycle("demo", "cpu", "c", {**TINY, "generations": 3})  # more generations are no other cycle
    with FileLock(whole / "c" / "lock"), pytest.raises(cycle.CycleError, match="by another process"):
        next(opened.train())
    for refusal, *arguments in (
        ("was begun with another configuration", "demo", "cpu", "c", {**TINY, "games": 21}),
        ("plain folder name", "demo", "cpu", "../c"),
        ("unknown preset 'quik', did you mean 'quick'", "quik"),
        (r"'games'.*20, got 19", "demo", "cpu", "d", {**TINY, "games": 19}),  # none would be held out
    ):
        with pytest.raises(ValueError, match=refusal):
            cycle.open_cycle(*arguments)


def test_all_networks_compute_as_was_resolved_when_the_cycle_began(
    whole: Path, opened: cycle.Cycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle.runtimes, "resolve", None)  # nothing is decided again
    again = cycle.open_cycle("demo", "auto", "c", TINY)
    assert again.runtime == opened.runtime
    assert all(again.network(g).runtime == again.runtime for g in (0, 1, 2))
    stored = json.loads((whole / "c-002" / "run.json").read_text())["runtime"]
    for name in ("device", "dtype", "threads", "channels_last", "compile"):
        assert stored[name] == getattr(again.runtime, name)
    monkeypatch.setattr(cycle.runtimes, "reuse", lambda stored: replace(again.runtime, device="cuda"))
    with pytest.raises(cycle.CycleError, match=r"was begun on 'cuda'; give it another name to run it on 'cpu'"):
        cycle.open_cycle("demo", "cpu", "c", TINY)


def test_a_dtype_that_computes_nonsense_is_not_what_a_cycle_begins_with(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, tried = cycle.runtimes.resolve, list[set[str]]()

    def compare(task: Any, batch: dict[str, torch.Tensor], runtime: Runtime, config: Any) -> tuple[str, int]:
        tried.append({term for term, count in task.counts(batch).items() if count})
        return "the loss of policy is 7 where the CPU has 3", 0

    monkeypatch.setattr("matrixlib.engine.self_test.compare", compare)
    half = lambda *sections: replace(resolve(*sections), dtype="bf16", requested=())  # noqa: E731
    monkeypatch.setattr(cycle.runtimes, "resolve", half)
    for preset in ("tictactoe", "demo"):
        with pytest.warns(UserWarning, match="dtype bf16 -> fp32: .*7 where the CPU has 3"):
            assert cycle.open_cycle(preset, "cpu").runtime.dtype == "fp32"
    assert tried == [{"policy", "value"}] * 2, "every term has rows to be compared by"


def test_more_pairs_than_a_game_has_openings_are_refused_before_anything_is_played(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matrixlib.play.match.TRIES", 4)
    settings = {"match": {"pairs": 4, "anchor_pairs": 260, "random_plies": 3}}
    with pytest.raises(ValueError, match="hardly 260 different positions after 3 random plies"):
        cycle.open_cycle("tictactoe", "cpu", "t", settings)
    assert not any(reports.iterdir())


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"search": {"fpu": 0.3}}, r"unknown key 'search\.fpu', did you mean 'fpu_reduction'"),  # its old name
        ({"network": {"task": "latin"}}, r"plays games for two \(chess, tictactoe\), and task 'latin' is none"),
        ({"network": {"train": {"init": "mine"}}}, r"network\.train\.init is 'mine': give it as the cycle's `start`"),
        ({"network": {"task": None}}, r"key 'network.task' is missing"),
        ({"network": {"model": {"channles": 3}}}, r"unknown key 'network\.model\.channles', did you mean 'channels'"),
    ],
)
def test_options_that_no_cycle_can_begin_with_are_refused(changes: dict[str, Any], refusal: str) -> None:
    with pytest.raises(config.ConfigError, match=refusal):
        load_cycle("demo", changes)


def test_other_data_has_its_share_of_each_batch_and_figures_of_its_own(reports: Path) -> None:
    """The window's games share the rest by their positions; what is new is asked of games alone."""
    outside = other_data(reports)
    changes = TINY | {"generations": 1, "sources": {str(outside): 0.25}}
    (generation,) = cycle.open_cycle("demo", "cpu", "c", changes).train()
    games, other = generation.sources["selfplay_001"], generation.sources[str(outside)]  # type: ignore[index]
    assert other == pytest.approx(games / 3)
    run = runs.open_run(str(reports / "c" / "network.yaml"), run="c-001", kind="cycle", overrides=read_request(reports))
    with closing(run):
        rows = run.data.training._batches().rows(3)
        assert run.data.training.of_sources()[str(outside)][rows].sum() == 4
    folder = str(reports / "c" / "shards" / "001")
    figures = run.summary()["evaluation"]
    assert figures["by_source"].keys() == {folder, str(outside)}
    new = generation.new * figures["by_source"][folder]["positions"]  # type: ignore[operator]
    assert new == pytest.approx(round(new)), "a share of the games' positions alone"
    assert generation.top1 == pytest.approx(figures["by_source"][folder]["top1"])
    assert generation.top1 != pytest.approx(figures["top1"]), "the other data's"
    for sources, refusal in (({"sample": 0.5, "x": 0.5}, "leaves nothing for the games"), ({"sample": 1}, "sources")):
        with pytest.raises(config.ConfigError, match=refusal):
            cycle.open_cycle("demo", "cpu", "refused", TINY | {"sources": sources})
    with pytest.raises(config.ConfigError, match="'nowhere' is no folder"):
        cycle.open_cycle("demo", "cpu", "refused", TINY | {"sources": {"nowhere": 0.5}})
    assert not (reports / "refused").exists()
    assert load_cycle("further", {"sources": {"sample": 0}}).shares(1) == {}, "what a preset has can be left out"


def test_data_that_nothing_can_be_learned_from_is_refused_before_any_game(reports: Path, tmp_path: Path) -> None:
    empty, foreign, held_out = tmp_path / "empty", tmp_path / "foreign", other_data(tmp_path)
    (held_out / "train.npz").unlink()
    for folder in (empty, foreign):
        folder.mkdir()
    rules = get_task("tictactoe").game
    assert rules is not None
    played = list(play_games(rules.game, uniform, range(2), SelfPlayOptions(num_simulations=2)))
    about = {"generator": "test", "seed": 0, "source": "x", "split": "train"}
    write_shard(foreign / "train.npz", TICTACTOE, rules.batch(played, {0: 0, 1: 1}), about)
    for folder, refusal in (
        (empty, "has no healthy training shard: import its data"),
        (held_out, "has no healthy training shard"),
        (foreign, r"train\.npz: data of task 'tictactoe', not 'chess'"),
    ):
        with pytest.raises(ValueError, match=rf"{folder.name}.*{refusal}"):
            cycle.open_cycle("demo", "cpu", "refused", TINY | {"sources": {str(folder): [0.0, 0.5]}})
        assert not (reports / "refused").exists()
    assert cycle.open_cycle("demo", "cpu", "free", TINY | {"sources": {"nowhere": 0.0}}).best == 0, "it is left out"


def test_an_anchor_that_cannot_be_played_is_refused_before_any_game(reports: Path) -> None:
    for option, value, refusal in (
        ("anchor", "/absent depth=3", r"validation\.strength\.anchor: /absent cannot be started"),
        ("anchor", "x dept=3", r"engine 'x dept=3': no limit is understood; .* \(nodes=500, depth=8, or movetime=100"),
        ("anchor", "sh 3", r"engine 'sh 3': no limit is understood"),
        ("anchor", "nobody", "no run at 'nobody'"),
        ("openings", "none.pgn", r"none\.pgn' cannot be read"),
    ):
        strength = {"validation": {**TINY["network"]["validation"], "strength": {"every": 5, option: value}}}
        with pytest.raises(ValueError, match=refusal):
            cycle.open_cycle("demo", "cpu", "refused", TINY | {"network": TINY["network"] | strength})
        assert not (reports / "refused").exists()


def read_request(root: Path) -> dict[str, Any]:
    return dict(read_json(root / "c-001" / "run.json")["requested"])


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_cycle_begins_with_a_file_of_lc0(reports: Path, shared: Path, trained: bool) -> None:
    maia = str(next(iter(sorted((shared / "maia").glob("*.pb.gz")))))
    current = cycle.open_cycle("demo", "cpu", "m", TINY | {"start": maia, "generations": 1})
    assert (current.config.network.model.encoding, current.config.network.model.history) == ("lc0", True)
    before = named_tensors(current.network(0).model)
    assert all(
        torch.equal(before[name], tensor) for name, tensor in named_tensors(load(maia, device="cpu").model).items()
    )
    if trained:
        assert [generation.start for generation in current.train()] == [0]


def test_a_cycle_begins_with_a_trained_network_and_keeps_it(reports: Path) -> None:
    """Also where the run is gone afterwards. Its architecture is the cycle's, whatever the preset says."""
    small = {"model": {"channels": 16, "blocks": 2, "ssl": ["threat"]}, "data": {"limit": 256}}
    small |= {"validation": {"limit": 256}}
    run = runs.open_run("demo", "cpu", run="trained", steps=4, overrides=small)
    list(run.train())
    net = load(run.folder)
    runs.open_run("latin_demo", "cpu", run="latin", steps=4).close()
    for start in ("nobody", "latin"):
        with pytest.raises(cycle.CycleError, match=f"^start '.*{start}"):
            cycle.open_cycle("demo", "cpu", "refused", TINY | {"start": start})
        assert not (reports / "refused").exists()
    frozen = TINY | {"start": "trained", "network": TINY["network"] | {"train": {"freeze": ["body"]}}}
    with pytest.raises(ValueError, match=r"train\.freeze: the network has no part 'body'"):
        cycle.open_cycle("demo", "cpu", "refused", frozen)
    assert not (reports / "refused").exists(), "nothing is written before"
    other = TINY | {"start": "trained", "network": {"model": {"blocks": 1, "channels": 8}}}
    with pytest.raises(config.ConfigError, match=r"leave out network\.model \(blocks, channels\)"):
        cycle.open_cycle("demo", "cpu", "refused", other)
    changes = TINY | {"start": "trained", "generations": 1}
    current = cycle.open_cycle("demo", "cpu", "c", changes)
    assert current.config.network.model.blocks == 2
    first = named_tensors(current.network(0).model)
    assert all(torch.equal(first[name], tensor) for name, tensor in named_tensors(net.model).items())
    shutil.rmtree(run.folder)
    again = cycle.open_cycle("demo", "cpu", "c", changes)
    (generation,) = again.train()
    assert (generation.start, generation.by) == (0, 0)
    assert read_json(reports / "c" / "start.json")["source"] == "trained"
    with pytest.raises(cycle.CycleError, match="begun with another configuration"):
        cycle.open_cycle("demo", "cpu", "c", TINY | {"generations": 1})
    kept = reports / "c" / cycle_games.START
    kept.write_bytes(kept.read_bytes()[:-4] + bytes(4))
    for _ in range(2):
        with pytest.raises(cycle.CycleError, match=rf"{cycle_games.START} (is damaged|cannot be read).*bring it back"):
            again._network(0)
        kept.unlink(missing_ok=True)


@pytest.mark.soak
def test_tic_tac_toe_goes_the_same_way_and_is_measured_by_perfect_play(reports: Path) -> None:
    network = {"train": {"steps": 150}, "validation": {"interval": 150}}
    shorter = {"games": 200, "generations": 2, "match": {"anchor_pairs": 16}, "network": network}
    current = cycle.open_cycle("tictactoe", "cpu", "t", shorter)
    assert [g.selfplay["unknown"] for g in current.train()] == [0, 0], "no game is cut off"
    games = {split: set[int]() for split in ("train", "validation")}
    for row in Catalogue(reports / "t" / "shards").shards():
        records = Shard(row.path, TICTACTOE).gather(np.arange(row.count))["records"]
        games[row.split] |= set(records["game"].tolist())
    assert [len(numbers) for numbers in (*games.values(), games["train"] | games["validation"])] == [380, 20, 400]
    networks = [current.network(number) for number in (0, 1, 2)]
    course = [current.rules.perfection(Evaluator(n), cycle_games.player(current.config, n)) for n in networks]
    assert course[0]["policy: move does not lose"] < 0.75 < 0.9 < course[2]["policy: move does not lose"]
    assert course[0]["policy: games lost"] > 0.5 > course[2]["policy: games lost"]
    assert current.rules.checks(course[2])[0][0] == "loses to nobody"
    text = next((reports / "t" / "matches").glob("001*.txt")).read_text()
    assert text.startswith("generation 0 - generation 1: "), "three plies were random, so O is the first to choose"
