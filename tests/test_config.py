"""Strict configuration: each trap of YAML and of coercion, presets, overrides, differences and round trips."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from options import options_of

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import Config, ConfigError, difference, dump, merge, presets, read_yaml
from matrixlib.files import PARAMS
from matrixlib.tasks import TASKS, get_task
from matrixlib.tasks import load_config as load
from matrixlib.tasks import validate_config as parse
from matrixlib.tasks.chess.config import SSL_CHANNELS

ROOT = Path(__file__).resolve().parents[1]
DEMO = (ROOT / "params" / "demo.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", r"mine\.yaml: key 'b' stands twice \(lines 2 and 4\)"),
        ("list: [{x: 1, x: 2}]", "stands twice"),
        (DEMO + "\ntask: latin\n", "'task' stands twice"),
        *((text, r"mine\.yaml: not valid YAML") for text in ("a: [1", "a: b: c", "\tx: 1")),
        *((text, "expected sections") for text in ("", "- 1", "word")),
        ("on: 1", "key True is not a word"),
    ],
)
def test_yaml_that_is_no_configuration_is_refused(text: str, message: str) -> None:
    assert yaml.safe_load("a: 1\na: 2") == {"a": 2}  # the trap
    with pytest.raises(ConfigError, match=message):
        read_yaml(text, "mine.yaml")


def test_3e_4_is_a_number_where_a_float_is_wanted() -> None:
    text = "task: chess\noptim: {learning_rate: 3e-4}"
    assert yaml.safe_load(text)["optim"]["learning_rate"] == "3e-4"  # the trap
    assert parse(read_yaml(text, "demo"), "demo").optim.learning_rate == 3e-4


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("train", "batch_size", True),
        ("train", "batch_size", 128.0),
        ("train", "steps", "60"),
        ("data", "mirror", 1),
        ("optim", "learning_rate", "nan"),
        ("optim", "schedule", "Cosine"),
        ("model", "ssl", ["piece", "piece"]),
    ],
)
def test_nothing_else_is_coerced(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{section}.*{key}|ssl names a head twice"):
        load("demo", {section: {key: value}})


@pytest.mark.parametrize(
    "overrides, says",
    [
        ({"optim": {"learning_rat": 1e-4}}, "unknown key 'optim.learning_rat', did you mean 'learning_rate'?"),
        ({"optim": {"decay_share": 0.3}}, "unknown key 'optim.decay_share', did you mean 'decay_ratio'?"),
        ({"model": {"policy": {"rnk": 3}}}, "unknown key 'model.policy.rnk', did you mean 'rank'?"),
        ({"optim": {"xyzzy": 1}}, "unknown key 'optim.xyzzy' (known: "),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load("demo", overrides)


def test_every_bad_key_is_named_at_once_as_it_is_written() -> None:
    with pytest.raises(ConfigError) as caught:
        load("demo", {"train": {"steps": "x"}, "runtime": {"channels_last": "maybe"}, "optim": {"beta1": 2.0}})
    assert all(str(caught.value).count(f"'{key}'") == 1 for key in ("train.steps", "runtime.channels_last"))
    assert "'optim.beta1': Input should be less than or equal to 1, got 2.0" in str(caught.value)
    assert "constrained" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"optim.*seed|seed.*optim"):
        load("demo", {"optim": 3, "seed": {"value": 3}})


def latin(**sections: Any) -> Config:
    return load("latin_quick", sections)


@pytest.mark.parametrize("task", TASKS)
def test_every_option_has_its_default_and_its_meaning_in_the_schema(task: str) -> None:
    whole = parse({"task": task}, "config")
    rows = options_of(type(whole))
    assert {row[0] for row in rows} == set(configuration.dotted(dump(whole)))
    assert all(kind and default and meaning for key, kind, default, meaning in rows if key != "task")


@pytest.mark.parametrize("name", presets())
def test_a_preset_names_only_what_differs_from_the_defaults_and_comes_back_through_yaml(name: str) -> None:
    text = (PARAMS / f"{name}.yaml").read_text(encoding="utf-8")
    config = load(name)
    differing = difference(config, parse({"task": config.task}, "defaults"))
    named = set(configuration.dotted(read_yaml(text, name))) - {"task"}
    assert named == set(differing)
    assert parse(dump(config), "back") == config
    assert parse(read_yaml(configuration.to_yaml(config), "back"), "back") == config


def test_overrides_merge_into_the_depth_and_beat_the_preset() -> None:
    preset = load("demo")
    config = load("demo", {"model": {"policy": {"rank": 7}}, "seed": 5, "optim": {"clip_norm": 2}})
    assert (config.model.policy.rank, config.seed, config.optim.clip_norm) == (7, 5, 2.0)
    assert config.model.policy.channels == preset.model.policy.channels
    assert difference(load("demo", {"seed": 5}), preset) == {"seed": (preset.seed, 5)}
    base, top = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}
    assert merge(base, top) == {"a": {"b": 3, "c": 2}, "d": 4}
    assert (base, top) == ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}), "neither argument is changed"


def test_a_preset_by_name_or_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(DEMO + "seed: 9\n", encoding="utf-8")
    assert load(str(tmp_path / "mine.yaml")).seed == 9
    with pytest.raises(ConfigError, match=r"unknown preset 'dmeo', did you mean 'demo'\? \(presets: .*demo"):
        load("dmeo")
    for name in ("x" * 5000, "x" * 5000 + ".yaml", "a\0.yaml", "../README"):
        with pytest.raises(ConfigError, match="unknown preset") as caught:
            load(name)
        assert len(str(caught.value)) < 4000
    (tmp_path / "folder.yaml").mkdir()
    for name in (str(tmp_path / "folder.yaml"), str(tmp_path)):
        with pytest.raises(ConfigError, match=r"^a folder is no preset: '/"):
            load(name)
    with pytest.raises(ConfigError, match=r"'model\.blocks': Input should be less than or equal to 1024, got 1000000"):
        load("demo", {"model": {"blocks": 100_000_000}})


CHANGES = {
    "seed": st.integers(0, 2**63 - 1),
    "data.source": st.text(max_size=20),
    "model.ssl": st.lists(st.sampled_from(sorted(SSL_CHANNELS)), unique=True),
    "model.droppath": st.floats(0, 1, exclude_max=True),
    "optim.learning_rate": st.floats(0, 1e300),
    "train.steps": st.integers(1, 10**9) | st.just("auto"),
    "runtime.channels_last": st.booleans() | st.just("auto"),
    "runtime.precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_valid_changes_survive_yaml_and_are_the_difference(changes: dict[str, Any]) -> None:
    nested: dict[str, Any] = {}
    for path, value in changes.items():
        inside = value
        for part in reversed(path.split(".")):
            inside = {part: inside}
        nested = merge(nested, inside)
    preset = load("demo")
    config = load("demo", nested)
    assert parse(dump(config), "back") == config
    assert parse(read_yaml(configuration.to_yaml(config), "back"), "back") == config
    assert set(difference(config, preset)) <= set(changes)
    for path, (_, new) in difference(config, preset).items():
        assert new == changes[path]


@pytest.mark.parametrize(
    "task, says",
    [
        ("ches", "unknown task 'ches', did you mean 'chess'? (tasks: chess, latin, tictactoe, melee;"),
        ("no_such_module:TASK", "task 'no_such_module:TASK': cannot import 'no_such_module'"),
        ("math:TASK", "task 'math:TASK': module 'math' has no 'TASK'"),
        ("math:pi", "task 'math:pi': pi is float, not a matrixlib.tasks.spec.TaskSpec"),
        (3, "key 'task' is 3; it is one of chess, latin, tictactoe, melee"),
        (None, "key 'task' is missing; it is one of chess, latin, tictactoe, melee"),
    ],
)
def test_the_task_decides_the_schema(task: Any, says: str) -> None:
    assert type(load("demo")) is get_task("chess").config
    assert type(latin()) is get_task("latin").config
    found = difference(latin(), load("demo"))
    assert found["task"] == ("chess", "latin")
    assert found["model.layers"][0] is None
    with pytest.raises(ConfigError, match=re.escape(says)):
        load("demo", {"task": task})
    with pytest.raises(ConfigError, match=r"unknown key 'data\.mirror'"):
        latin(data={"mirror": True})


@pytest.mark.parametrize(
    "section, says",
    [
        ({"fill": {"fractions": [0.5, 0.6]}}, "curriculum.fill"),
        ({"size": {"stages": [[3, 5]], "fractions": [0.9]}}, "add up to 0.9, not to 1"),
        ({"size": {"stages": [[5, 3]], "fractions": [1.0]}}, "a range runs from low to high"),
        ({"size": {"stages": [[3, 3], [4, 4]], "fractions": [0.5, 0.5]}}, "must hold the sizes of all others"),
        ({"mode": {"stages": [[]], "fractions": [1.0]}}, "at least one digit set"),
        ({"mode": {"stages": [["standrd"]], "fractions": [1.0]}}, "curriculum.mode.stages"),
        ({"up": 0.5, "down": 0.5}, "must be below up"),
    ],
)
def test_a_curriculum_that_makes_no_sense_is_refused(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        latin(curriculum=section)


def test_reports_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    strange = "~nobody-of-this-name/reports"
    for value, root in ((strange, Path(strange)), ("~/reports", tmp_path / "reports"), ("", ROOT / "reports")):
        monkeypatch.setenv("MATRIXLIB_REPORTS", value)
        assert files.reports_root() == root


BOMB = "task: chess\nz0: &z0 [1]\n" + "".join(f"z{k + 1}: &z{k + 1} [{', '.join([f'*z{k}'] * 9)}]\n" for k in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: chess\n".encode("utf-16"), r"mine\.yaml: cannot be read as UTF-8 text"),
        (b"a: " + b"[" * 5000, r"mine\.yaml: not valid YAML: nested too deeply"),
        (b"{a: " * 3000, r"mine\.yaml: not valid YAML: nested too deeply"),
        ((BOMB + "seed: *z12\n").encode(), r"'seed': Input should be a valid integer, got \["),
        (b"task: chess\nseed: 18446744073709551616\n", "'seed': Input should be less than"),
        (b"task: chess\ntrain: {steps: 1" + b"0" * 400 + b"}\n", r"'train\.steps': Input should be less than"),
    ],
    ids=["utf-16", "lists", "mappings", "bomb", "seed", "steps"],
)
def test_a_preset_that_is_none_is_a_short_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(path))
    assert len(str(caught.value)) < 4000


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    files.write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_bytes(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]
