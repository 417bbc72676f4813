"""The cycle: accounts that add up, kills that lose nothing, decisions that are made once, and by the test alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file

from matrixlib import config, files
from matrixlib.data.catalogue import NAME, Catalogue
from matrixlib.data.shards import Shard
from matrixlib.play.search import SearchOptions
from matrixlib.play.selfplay import SelfPlayOptions
from matrixlib.runs import cycle, cycle_config
from matrixlib.runs.cycle_config import load_cycle
from matrixlib.tasks.chess.records import LAYOUT, legal_indices
from matrixlib.tasks.tictactoe.records import LAYOUT as TICTACTOE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TINY: dict[str, Any] = {
    "generations": 2,
    "games": 20,
    "chunk": 5,
    "selfplay": {"parallel": 20, "simulations": 4, "quick_simulations": 2, "plies": 12},
    "arena": {"pairs": 2, "batch": 1, "simulations": 2, "plies": 12, "anchor_pairs": 1},
    "network": {
        "train": {"steps": 6, "batch_size": 16},
        "validation": {"interval": 3, "sample": 16},
        "checkpoint": {"interval": 2},
        "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
    },
}
PROGRAM = """
import json, sys
from matrixlib.runs import cycle
for made in cycle.open_cycle("demo", "cpu", "c", json.loads(sys.argv[1])).train():
    print("decided", made.number, flush=True)
"""


def run(reports: Path, **changes: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "MATRIXLIB_REPORTS": str(reports)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(TINY | changes)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports root of a cycle of two generations that nothing interrupted."""
    root = tmp_path_factory.mktemp("whole")
    assert run(root).wait(300) == 0
    return root


@pytest.fixture
def opened(whole: Path, monkeypatch: pytest.MonkeyPatch) -> cycle.Cycle:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(whole))
    return cycle.open_cycle("demo", "cpu", "c", TINY)


def positions(root: Path, source: str = "") -> np.ndarray:
    rows = [row for row in Catalogue(root / "c" / "shards").shards() if source in ("", row.source)]
    return np.concatenate([Shard(row.path, LAYOUT).gather(np.arange(row.count))["records"] for row in rows])


def weights(root: Path, generation: int) -> dict[str, Any]:
    newest = max((root / f"c-{generation:03d}" / "checkpoints").glob("step_*"))
    return load_file(newest / "ema.safetensors")


def test_every_game_is_there_once_with_its_legal_moves(whole: Path, opened: cycle.Cycle) -> None:
    found = positions(whole)
    made = opened.history()
    assert [(g.number, g.played.games) for g in made] == [(1, 20), (2, 20)]
    assert len(found) == sum(g.played.positions for g in made)
    assert len(np.unique(found["game"])) == 40
    assert (found["source"] == 9).all()
    for g in made:
        assert sum(g.played.results) == g.played.games
        assert sum(g.match) == 2
        assert sum(g.anchor) == 1
    held = Catalogue(whole / "c" / "shards").shards("validation")
    games = [
        np.unique(Shard(row.path, LAYOUT).gather(np.arange(row.count))["records"]["game"]) for row in held
    ]
    assert len(np.concatenate(games)) == 2, "one game in twenty is held out"
    for row in held:
        batch = Shard(row.path, LAYOUT).gather(np.arange(row.count))
        index, offset = legal_indices(batch["records"])
        assert (index == batch["policy_index"]).all()
        assert (offset == batch["policy_offset"]).all()


def test_the_candidate_goes_on_from_the_network_before_it(whole: Path, opened: cycle.Cycle) -> None:
    start = {name: tensor.clone() for name, tensor in opened.network(0).model.state_dict().items()}
    again = cycle.open_cycle("demo", "cpu", "c", TINY).network(0).model.state_dict()
    assert all((again[name] == tensor).all() for name, tensor in start.items()), (
        "generation 0 is a function of the seed"
    )
    first, second = weights(whole, 1), weights(whole, 2)
    moved = sum(float((first[name] - start[name]).abs().sum()) for name in first)
    moved_on = sum(float((second[name] - first[name]).abs().sum()) for name in first)
    from_start = sum(float((second[name] - start[name]).abs().sum()) for name in first)
    assert 0 < moved_on < from_start
    assert moved > 0


def test_what_was_decided_is_not_done_again(whole: Path, opened: cycle.Cycle) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in (whole / "c").rglob("*.*") if path.suffix != ".sqlite"
    }
    assert list(opened.train()) == opened.history()
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before
    assert len(opened.promotions()) == 2


STAGES = {
    "games": "c/games/001_*.json",
    "checkpoint": "c-001/checkpoints/step_????????",
    "match": "c/matches/001_*.json",
    "decision": "c/promotions.json",
    "next games": "c/games/002_*.json",
    "next checkpoint": "c-002/checkpoints/step_????????",
    "next match": "c/matches/002_*.json",
}
"""Stage -> the first file that it leaves."""


@pytest.mark.parametrize(
    "stages", [("games", "checkpoint"), pytest.param(tuple(STAGES), marks=pytest.mark.soak)]
)
def test_killed_anywhere_it_ends_with_the_same_games_and_weights(
    whole: Path, tmp_path: Path, stages: tuple[str, ...]
) -> None:
    for stage in stages:
        process = run(tmp_path)
        while not any(tmp_path.glob(STAGES[stage])):
            assert process.poll() is None, f"it ended before {stage}"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(tmp_path).wait(300) == 0
    assert positions(tmp_path).tobytes() == positions(whole).tobytes()
    for generation in (1, 2):
        ours, theirs = weights(tmp_path, generation), weights(whole, generation)
        assert all((ours[name] == theirs[name]).all() for name in theirs)
    for path in (whole / "c").glob("matches/*"):
        assert (tmp_path / "c" / "matches" / path.name).read_bytes() == path.read_bytes()
    promotions = [
        json.loads((root / "c" / "promotions.json").read_text())["promotions"] for root in (whole, tmp_path)
    ]
    decided = [[(p["after"], p["best"], p["reason"]) for p in found] for found in promotions]
    assert decided[0] == decided[1]


def test_several_processes_play_the_same_games(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    made = cycle.open_cycle("demo", "cpu", "c", {**TINY, "workers": 2})
    play = cycle._played

    def watched(chunks: list[cycle.Chunk], workers: int) -> Iterator[cycle.Chunk]:
        assert (tmp_path / "c" / "shards" / NAME).is_file(), "processes must not make it all at once"
        return play(chunks, workers)

    monkeypatch.setattr(cycle, "_played", watched)
    played = made._self_play(1, 0)
    assert played.games == 20
    one = positions(tmp_path).tolist()
    other = Catalogue(whole / "c" / "shards").shards()
    theirs = [
        Shard(r.path, LAYOUT).gather(np.arange(r.count))["records"] for r in other if r.source.endswith("001")
    ]
    assert sorted(map(str, one)) == sorted(map(str, np.concatenate(theirs).tolist()))


@pytest.mark.soak
def test_killed_with_several_processes_it_ends_with_the_same_games_and_weights(
    whole: Path, tmp_path: Path
) -> None:
    process = run(tmp_path, workers=2, generations=1)
    while not any(tmp_path.glob(STAGES["games"])):
        assert process.poll() is None, "it ended before any games"
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert len(list(tmp_path.glob(STAGES["games"]))) < 4, "it was killed amid self-play"
    assert run(tmp_path, workers=2, generations=1).wait(300) == 0
    found = positions(tmp_path)
    assert len(np.unique(found["game"])) == 20
    assert found.tobytes() == positions(whole, "selfplay_001").tobytes()
    ours, theirs = weights(tmp_path, 1), weights(whole, 1)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@dataclass(frozen=True)
class Task:
    """Stands in for a chunk of games; number 0 fails."""

    folder: Path
    number: int

    def play(self) -> None:
        if not self.number:
            raise ValueError("planted")
        time.sleep(0.2)
        (self.folder / str(self.number)).touch()


def test_an_error_does_not_wait_for_the_chunks_that_have_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="planted"):
        list(cycle._played([Task(tmp_path, number) for number in range(24)], 2))  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) < 12


def test_only_the_test_promotes_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    made = cycle.open_cycle("demo", "cpu", "p", TINY)
    assert made._promote(1, (0, 0, 2, 0, 0))[0] == 0  # undecided
    assert made._begin(2) == 0
    assert made._promote(2, (0, 0, 0, 4, 60)) == (2, made.promotions()[-1]["reason"])
    assert "SPRT accepts" in made.promotions()[-1]["reason"]
    assert made._promote(3, (60, 4, 0, 0, 0))[0] == 2
    assert "SPRT refuses" in made.promotions()[-1]["reason"]
    for _ in range(
        2
    ):  # killed between the decision and the generation's file, it is decided again: to no effect
        made._promote(2, (0, 0, 0, 4, 60))
    assert [(p["after"], p["best"]) for p in made.promotions()] == [(1, 0), (2, 2), (3, 2)]
    assert made.best == 2
    assert made._begin(2) == 0, "a generation that is begun again plays with the network that it began with"


def test_a_generation_keeps_its_opponent_through_a_roll_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one sequential test would be made of games against two networks."""
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    made = cycle.open_cycle("demo", "cpu", "p", TINY)
    opponents: list[tuple[int, int]] = []
    results = iter([(0, 0, 0, 4, 60), None, (0, 0, 2, 0, 0), (0, 0, 2, 0, 0)])

    def match(self: cycle.Cycle, number: int, other: int, kind: str, *_: Any, **more: Any) -> Any:
        if kind == "anchor":
            return (0, 0, 1, 0, 0)
        opponents.append((number, other))
        if (found := next(results)) is None:
            raise KeyboardInterrupt
        return found

    played = cycle.Played(20, 100, 200, (5, 5, 5, 5), 0, 0, 1.0)
    monkeypatch.setattr(cycle.Cycle, "_self_play", lambda self, number, by: played)
    monkeypatch.setattr(cycle.Cycle, "_learn", lambda self, number: 0.5)
    monkeypatch.setattr(cycle.Cycle, "_match", match)
    assert made._generation(1).best == 1
    with pytest.raises(KeyboardInterrupt):
        made._generation(2)
    made.roll_back(0, "weak")
    second, third = made._generation(2), made._generation(3)
    assert opponents == [(1, 0), (2, 1), (2, 1), (3, 0)]
    assert (second.by, second.best) == (1, 0), "what was rolled back stays so where nothing is promoted"
    assert (third.by, third.best) == (0, 0)
    assert [g.number for g in made.history()] == [1, 2, 3]
    assert [entry["kind"] for entry in made.promotions()] == ["match", "rollback", "match", "match"]


def test_rolling_back_is_one_call(whole: Path, opened: cycle.Cycle, tmp_path: Path) -> None:
    path = whole / "c" / "promotions.json"
    before = path.read_bytes()
    try:
        opened.roll_back(1, "weak in endings")
        assert opened.best == 1
        assert opened.promotions()[-1]["reason"] == "rolled back: weak in endings"
        assert opened.promotions()[-1]["kind"] == "rollback"
        opened.roll_back(1, "weak in endings")
        assert len(opened.promotions()) == 3, "the notebook was run again"
        opened.roll_back(1, "weak in openings")
        assert len(opened.promotions()) == 4
        with FileLock(whole / "c" / "lock"), pytest.raises(cycle.CycleError, match="by another process"):
            opened.roll_back(0, "")
        with pytest.raises(cycle.CycleError, match="generation 7 has not been trained; there are 0 to 2"):
            opened.roll_back(7, "")
    finally:
        path.write_bytes(before)


def test_another_configuration_or_a_second_process_is_refused(whole: Path, opened: cycle.Cycle) -> None:
    with pytest.raises(cycle.CycleError, match="was begun with another configuration"):
        cycle.open_cycle("demo", "cpu", "c", {**TINY, "games": 21})
    cycle.open_cycle("demo", "cpu", "c", {**TINY, "generations": 3})  # more generations are no other cycle
    with FileLock(whole / "c" / "lock"), pytest.raises(cycle.CycleError, match="by another process"):
        next(opened.train())
    with pytest.raises(cycle.CycleError, match="plain folder name"):
        cycle.open_cycle("demo", "cpu", "../c")
    with pytest.raises(config.ConfigError, match="unknown preset 'quik', did you mean 'quick'"):
        cycle.open_cycle("quik")
    with pytest.raises(config.ConfigError, match=r"'games'.*20, got 19"):  # none would be held out
        cycle.open_cycle("demo", "cpu", "d", {**TINY, "games": 19})


def test_checks_judge_the_best_network_and_all_that_was_played(
    opened: cycle.Cycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened.history()
    strong, weak = (0, 0, 0, 4, 60), (60, 4, 0, 0, 0)
    monkeypatch.setattr(
        opened, "history", lambda: [replace(first, anchor=weak), replace(second, anchor=strong)]
    )
    for best, passed in ((2, True), (1, False), (0, False)):
        monkeypatch.setattr(cycle.Cycle, "best", best)
        assert [check[1] for check in opened.checks()] == [True, True, passed]
    fewer = cycle.Cycle(opened.folder, opened.config.model_copy(update={"generations": 1}), opened.runtime)
    assert [check[1] for check in fewer.checks()] == [True, True]
    more = cycle.Cycle(opened.folder, opened.config.model_copy(update={"generations": 3}), opened.runtime)
    assert [check[1] for check in more.checks()] == [False, False]


def test_all_networks_compute_as_was_resolved_when_the_cycle_began(
    whole: Path, opened: cycle.Cycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle.runtimes, "resolve", None)  # nothing is decided again
    again = cycle.open_cycle("demo", "auto", "c", TINY)
    assert again.runtime == opened.runtime
    assert all(again.network(g).runtime == again.runtime for g in (0, 1, 2))
    for number in (1, 2):
        stored = json.loads((whole / f"c-{number:03d}" / "run.json").read_text())["runtime"]
        for name in ("device", "dtype", "threads", "channels_last", "compile"):
            assert stored[name] == getattr(again.runtime, name)
    monkeypatch.setattr(cycle.runtimes, "reuse", lambda stored: replace(again.runtime, device="cuda"))
    with pytest.raises(
        cycle.CycleError, match=r"was begun on 'cuda'; give it another name to run it on 'cpu'"
    ):
        cycle.open_cycle("demo", "cpu", "c", TINY)


def test_threads_are_the_same_however_far_it_had_come(opened: cycle.Cycle) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        list(opened.train())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_an_opened_cycle_computes_with_the_threads_that_were_resolved(opened: cycle.Cycle) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        cycle.open_cycle("demo", "cpu", "c", TINY)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_threads_are_as_they_were_after_games_that_failed(
    opened: cycle.Cycle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shards").mkdir()
    runtime = replace(opened.runtime, threads=2)
    made = cycle.Cycle(tmp_path, opened.config, runtime)

    def failing(*arguments: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(cycle.selfplay, "play_games", failing)
    before = torch.get_num_threads()
    try:
        with pytest.raises(ValueError, match="planted"):
            made._self_play(1, 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_of_two_that_begin_a_cycle_at_once_one_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    resolve, resolved = cycle.runtimes.resolve, []

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)  # the other one looks meanwhile
        resolved.append(resolve(*arguments))
        return resolved[-1]

    monkeypatch.setattr(cycle.runtimes, "resolve", slow)

    def begin(seed: int) -> bool:
        try:
            cycle.open_cycle("demo", "cpu", "c", {**TINY, "seed": seed})
        except cycle.CycleError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(begin, (1, 2))) == [False, True]
    assert len(resolved) == 1


def test_games_are_played_on_one_thread_whatever_the_rest_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the number of processes would change their bits."""
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    network = {**TINY["network"], "runtime": {**TINY["network"]["runtime"], "threads": 2}}
    made = cycle.open_cycle("demo", "cpu", "c", {**TINY, "network": network})
    play, seen = cycle.selfplay.play_games, []

    def watched(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return play(*arguments)

    monkeypatch.setattr(cycle.selfplay, "play_games", watched)
    before = torch.get_num_threads()
    try:
        made._self_play(1, 0)
        assert (set(seen), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_two_networks_are_kept(opened: cycle.Cycle) -> None:
    kept = [opened.network(generation) for generation in (0, 1, 2)]
    assert list(opened._nets.values()) == kept[1:]
    assert opened.network(1) is kept[1]
    assert list(opened._nets) == [2, 1], "that of longest ago goes first"


@pytest.mark.parametrize(
    ("section", "options"),
    [(cycle_config.SelfPlayConfig, SelfPlayOptions), (config.SearchConfig, SearchOptions)],
)
def test_sections_have_the_fields_of_the_options_they_become(section: Any, options: Any) -> None:
    assert [options.RENAMED.get(name, name) for name in section.model_fields] == list(options.model_fields)


def test_more_pairs_than_a_game_has_openings_are_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    monkeypatch.setattr(cycle.matches, "TRIES", 4)
    for key in ("pairs", "anchor_pairs"):
        settings = {"arena": {"pairs": 4, "anchor_pairs": 4, "random_plies": 3, key: 260}}
        with pytest.raises(ValueError, match="hardly 260 different positions after 3 random plies"):
            cycle.open_cycle("tictactoe", "cpu", "t", settings)
    assert not any(tmp_path.iterdir())


def test_a_match_of_no_pairs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    made = cycle.open_cycle("tictactoe", "cpu", "t", {"arena": {"anchor_pairs": 0}})
    assert made._match(1, 0, "anchor", 0, sprt=False) == (0, 0, 0, 0, 0)


def shard(count: int, source: str) -> Any:
    return SimpleNamespace(count=count, source=source)


def test_what_is_learned_from_is_settled_when_the_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a shard that is quarantined between a kill and the resume changes the run's configuration."""
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    made = cycle.open_cycle("demo", "cpu", "p", TINY)
    rows = [shard(30, "selfplay_001"), shard(20, "selfplay_002"), shard(5, "selfplay_002")]
    begun = made._lesson(2, rows)
    assert begun["sources"] == {"selfplay_001": 30.0, "selfplay_002": 25.0}
    assert made._lesson(2, rows[:2]) == begun
    with pytest.raises(
        cycle.CycleError, match=r"learn from 'selfplay_001', of which there is no healthy shard"
    ):
        made._learn(2)


def test_after_a_roll_back_training_starts_from_the_best_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    made = cycle.open_cycle("demo", "cpu", "p", TINY)
    starts = []
    for number in range(1, 6):
        starts.append(made._lesson(number, [])["start"])
        if number in (2, 4):  # before the generation that has begun is decided, and after it
            made._decide({"kind": "rollback", "after": number - 1, "best": 1, "reason": "collapsed"})
        assert made._lesson(number, [])["start"] == starts[-1], "one that has begun goes on"
        made._promote(number, (0, 0, 0, 4, 60) if number < 3 else (0, 0, 2, 0, 0))
    assert starts == [0, 1, 2, 3, 1]


def test_generations_are_in_the_order_of_their_numbers(
    opened: cycle.Cycle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened.history()[0]
    other = cycle.Cycle(tmp_path, opened.config, opened.runtime)
    for number in (1000, 101, 2):
        text = json.dumps(asdict(replace(made, number=number)))
        (tmp_path / f"generation_{number:03d}.json").write_text(text)
    assert [g.number for g in other.history()] == [2, 101, 1000]


def test_a_cycle_needs_a_game_for_two() -> None:
    for task, says in (
        ("latin", r"unknown task 'latin' \(tasks: chess, tictactoe\)"),
        (None, r"'network.task' is missing; it is one of chess, tictactoe"),
    ):
        with pytest.raises(config.ConfigError, match=says):
            load_cycle("demo", {"network": {"task": task}})
    with pytest.raises(
        config.ConfigError, match=r"unknown key 'network\.model\.widht', did you mean 'width'"
    ):
        load_cycle("tictactoe", {"network": {"model": {"widht": 3}}})


@pytest.mark.parametrize("name", config.presets(files.PARAMS / "cycle"))
def test_presets_are_complete(name: str, tmp_path: Path) -> None:
    text = (files.PARAMS / "cycle" / f"{name}.yaml").read_text()
    assert config.dump(load_cycle(name)) == json.loads(json.dumps(yaml.safe_load(text)))
    data = yaml.safe_load(text)
    del data["arena"]["pairs"]
    path = tmp_path / "less.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(config.ConfigError, match=r"key 'arena.pairs' is missing"):
        load_cycle(str(path))


def test_the_table_and_the_curve_show_every_generation(opened: cycle.Cycle) -> None:
    lines = cycle.table(opened.history()).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    assert lines[0].split()[-1] == "SPRT"
    axes = cycle.elo_figure(opened.history()).axes[0]
    assert len(axes.lines) == 3  # two generations, the zero line


def test_tic_tac_toe_goes_the_same_way_and_is_measured_by_perfect_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    shorter = {
        "games": 200,
        "generations": 2,
        "arena": {"anchor_pairs": 16},
        "network": {"train": {"steps": 150}, "validation": {"interval": 150}},
    }
    made = cycle.open_cycle("tictactoe", "cpu", "t", shorter)
    first, second = made.train()
    assert [g.played.games for g in (first, second)] == [200, 200]
    assert (first.played.results[3], second.played.results[3]) == (0, 0), "no game is cut off"
    rows = Catalogue(tmp_path / "t" / "shards").shards()
    found = [Shard(row.path, TICTACTOE).gather(np.arange(row.count))["records"] for row in rows]
    games = {split: set[int]() for split in ("train", "validation")}
    for row, records in zip(rows, found, strict=True):
        games[row.split] |= set(records["game"].tolist())
    assert (len(games["train"]), len(games["validation"])) == (380, 20)
    assert not games["train"] & games["validation"]
    course = made.course()
    assert list(course) == [0, 1, 2]
    assert course[0]["policy: move does not lose"] < 0.75 < 0.9 < course[2]["policy: move does not lose"]
    assert course[0]["policy: games lost"] > 0.5 > course[2]["policy: games lost"]
    assert made.checks()[-1][0] == "loses to nobody"
    text = next((tmp_path / "t" / "matches").glob("001*.txt")).read_text()
    assert text.startswith("generation 0 - generation 1: "), (
        "three plies were random, so O is the first to choose"
    )
    table = cycle.course_table(course).splitlines()
    assert len(table) == 1 + len(course[0])
    assert len(cycle.course_figure(course).axes[0].lines) == len(course[0])
    monkeypatch.setattr(cycle.Cycle, "_generation", None)
    assert made.course() == course, "it is kept"
