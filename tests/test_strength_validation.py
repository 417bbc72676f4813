"""`validation.strength`: matches of a network in training against an anchor."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved import assert_same
from test_stockfish import fake_engine
from test_strength import FIRST_MOVE

from matrixlib.config import ConfigError, merge
from matrixlib.engine import metrics
from matrixlib.files import read_json
from matrixlib.runs import cycle, figures
from matrixlib.runs import run as runs
from matrixlib.runs.data import RunError
from matrixlib.runs.strength import StrengthMatch
from matrixlib.tasks import load_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PLAIN: dict[str, Any] = {
    "data": {"limit": 1024},
    "model": {"channels": 16, "blocks": 1, "dropout": 0.1},
    "train": {"steps": 10, "batch_size": 64},
    "validation": {"interval": 5, "sample": 64, "limit": 256},
    "checkpoint": {"interval": 3},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": True},
}
MATCHES: dict[str, Any] = {"every": 4, "pairs": 3, "simulations": 2, "plies": 12}


def train(name: str, strength: dict[str, Any], until: int = 0, **more: Any) -> Path:
    """A run; its loop is left after so many updates, if any."""
    overrides = merge(merge(PLAIN, more), {"validation": {"strength": strength}})
    current = runs.open_run(run=name, overrides=overrides)
    for stats in current.train():
        if stats.step == until:
            break
    current.close()
    return current.folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without matches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIXLIB_REPORTS", str(tmp_path_factory.mktemp("plain")))
        return train("plain", {"every": 0})


def points(folder: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row["strength"] for row in metrics.read(folder / "metrics.jsonl") if "strength" in row}


def test_matches_change_nothing_and_a_resumed_run_has_the_same(plain: Path, reports: Path, drawn: None) -> None:
    whole = train("whole", MATCHES)
    assert_same(plain, whole)
    assert list(points(whole)) == [4, 8, 10], "and after the last update"
    assert not points(plain)
    rows = metrics.read(whole / "metrics.jsonl")
    assert {row["step"] for row in rows if row["times"].get("strength", 0) > 0} >= set(points(whole))
    for point in points(whole).values():
        assert -1500 <= point["low"] <= point["elo"] <= point["high"] <= 1500
        assert (point["games"], 0 <= point["score"] <= 1) == (6, True)
    chart = next(one for one in figures.charts(figures.frame(rows)) if one.label.startswith("Elo"))
    assert {curve.name: np.isfinite(curve.values).sum() for curve in chart.curves} == dict.fromkeys(
        ("elo", "low", "high"), 3
    )
    assert read_json(whole / "summary.json")["evaluation"]["Elo over the anchor"] == points(whole)[10]["elo"]
    page = (whole / "report.html").read_text()
    assert "Elo over the anchor" in page
    assert "strength" in page.split("Where the time went")[1].split("</table>")[0]
    train("parts", MATCHES, until=7)
    parts = train("parts", MATCHES)
    assert_same(parts, whole)
    assert points(parts) == points(whole)


def test_the_anchor_is_the_network_that_the_run_begins_with(reports: Path) -> None:
    """In a cycle that of the generation before, which it is given late. What does not learn is its equal."""
    matches = {"validation": {"strength": {**MATCHES, "pairs": 60, "random_plies": 2, "simulations": 0}}}
    still = {**matches, "optim": {"learning_rate": 0.0}, "train": {"steps": 4, "batch_size": 64}}
    options: dict[str, Any] = {
        "generations": 1,
        "games": 20,
        "match": {"pairs": 1, "anchor_pairs": 0},
        "network": still,
    }
    list(cycle.open_cycle("tictactoe", "cpu", "c", options).train())
    preset, scores = str(reports / "c" / "network.yaml"), list[float]()
    data = {"source": str(reports / "c" / "shards" / "001")}
    for name, rate in (("still", 0.0), ("learns", 0.3)):
        changes = {"data": data, "optim": {"learning_rate": rate, "ema_decay": 0.0}, "train": {"init": "c-001"}}
        run = runs.open_run(preset, run=name, overrides=changes)
        scores += [stats.strength["score"] for stats in run.train() if stats.strength]
        run.close()
    assert [point["elo"] for point in points(reports / "c-001").values()] == [0]
    assert scores[0] == 0.5
    assert scores[1] != 0.5


def test_an_anchor_is_a_run_that_must_stay_as_it_was(plain: Path, reports: Path) -> None:
    anchor = Path(shutil.copytree(plain, reports / "anchor"))
    named = {**MATCHES, "anchor": "anchor"}
    assert_same(train("other", named), anchor)  # building the anchor's network draws no weights of the run's
    folder = train("mine", named, until=5)
    assert list(points(folder)) == [4]
    assert not (folder / "start.safetensors").exists()
    shutil.rmtree(anchor)
    with pytest.raises(ValueError, match="no run at 'anchor'"):
        runs.open_run(run="mine", overrides=merge(PLAIN, {"validation": {"strength": named}}))
    train("anchor", {"every": 0}, optim={"learning_rate": 0.01})
    with pytest.raises(RunError, match=r"anchor 'anchor' is not that of run 'mine' \(anchor, [0-9a-f]{64}\)"):
        runs.open_run(run="mine", overrides=merge(PLAIN, {"validation": {"strength": named}}))


def test_an_engine_is_an_anchor_whose_failure_costs_a_match_and_not_the_training(
    plain: Path, reports: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    flag = tmp_path / "ill"
    engine = fake_engine(
        tmp_path, FIRST_MOVE.replace("{answer}", f"if __import__('os').path.exists({str(flag)!r}): sys.exit(4)")
    )
    matches = {**MATCHES, "anchor": f"{engine} depth=3 Hash=8"}
    current = runs.open_run(run="mine", overrides=merge(PLAIN, {"validation": {"strength": matches}}))
    for stats in current.train():
        if stats.step in (5, 9):
            flag.touch() if stats.step == 5 else flag.unlink()
    current.close()
    assert_same(plain, current.folder)
    assert list(points(current.folder)) == [4, 10], "it is restarted for each match"
    (events,) = [row["events"] for row in metrics.read(current.folder / "metrics.jsonl") if row["step"] == 8]
    assert "match" in events
    assert "Elo over the anchor" in read_json(current.folder / "summary.json")["evaluation"]
    (text,) = [str(one.message) for one in recwarn if "no match" in str(one.message)]
    assert text.startswith("update 8: no match: EngineError: no `bestmove` from First 1")
    assert read_json(current.folder / "run.json")["anchor"] == {"name": matches["anchor"], "engine": "First 1 depth 3"}
    for other in ("", f"{engine} depth=3", "shipped"):
        changed = {"validation": {"strength": {**matches, "anchor": other}}, "train": {"steps": 12}}
        with pytest.raises(RunError, match=r"anchor '.*' is not that of run 'mine' \(.*First 1 depth 3\)"):
            runs.open_run(run="mine", overrides=merge(PLAIN, changed))
    flag.touch()
    with pytest.raises(RunError, match=r"validation\.strength\.anchor: no `bestmove` from First 1.*exit status 4"):
        train("ill", matches)
    assert not (reports / "ill").exists()


def test_a_last_match_that_fails_leaves_no_elo_of_the_one_before(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play: Any = StrengthMatch.__call__
    monkeypatch.setattr(StrengthMatch, "__call__", lambda *given: play(*given) if given[3] < 10 else [][0])
    folder = train("late", {**MATCHES, "every": 5, "pairs": 1})
    assert list(points(folder)) == [5]
    assert "Elo over the anchor" not in read_json(folder / "summary.json")["evaluation"]


def test_what_cannot_be_played_is_refused_at_once(reports: Path) -> None:
    refusals = [("anchor", "x", "no run at 'x'"), ("openings", "x", "openings 'x' cannot be read")]
    refusals += [
        ("anchor", "x nodes=0", "engine 'x nodes=0': no limit is understood; give"),
        ("anchor", "x depth=2", "x cannot be started"),
    ]
    for option, value, refusal in refusals:
        with pytest.raises(ValueError, match=refusal):
            train("r", {**MATCHES, option: value})
        assert not (reports / "r").exists()


def test_a_start_that_is_gone_and_tasks_that_are_no_games(reports: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = train("gone", MATCHES, until=5)
    (folder / "start.safetensors").unlink()
    with pytest.raises(RunError, match=r"start\.safetensors is missing, the run's first weights"):
        train("gone", MATCHES)
    current = runs.open_run(run="meanwhile", overrides=merge(PLAIN, {"validation": {"strength": MATCHES}}))
    for stats in current.train():
        if stats.step == 1:
            (current.folder / "start.safetensors").unlink()
    current.close()
    texts = [str(one.message) for one in recwarn if "no match" in str(one.message)]
    assert re.match(r"update 4: no match: RunError: .*start\.safetensors is missing.*: bring it back", texts[0])
    train("late", {"every": 0}, until=5)
    with pytest.raises(RunError, match=r"a run that began without matches has none: .* name an anchor"):
        runs.open_run(run="late", overrides=merge(PLAIN, {"validation": {"strength": MATCHES}}))
    with pytest.raises(ConfigError, match=r"'validation\.strength\.every': latin is no game for two; set it to 0"):
        load_config("latin_demo", {"validation": {"strength": {"every": 5}}})
