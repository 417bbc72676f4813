"""Checkpoints: round trip, crashes at every point, damage, retention."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.engine import checkpoint
from matrixlib.engine.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    DamagedCheckpoint,
    NewerCheckpoint,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "model": {"weight": weight, "bias": torch.randn(3, generator=generator)},
        "optimiser": {"step": torch.tensor(float(seed)), "exp_avg": weight * 2},
    }


def save(store: Checkpoints, *steps: int) -> None:
    for step in steps:
        store.save(step, tensors(step), {"cursor": step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest_step(folder: Path) -> int:
    """As a fresh process would find it."""
    found = Checkpoints(folder, 2).newest()
    assert found is not None
    assert torch.equal(found.tensors["model"]["weight"], tensors(found.step)["model"]["weight"])
    assert found.state == {"cursor": found.step}
    return found.step


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
TENSOR = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 2**31), st.booleans()
)


def make(spec: tuple[torch.dtype, list[int], int, bool]) -> torch.Tensor:
    dtype, shape, seed, transpose = spec
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    return tensor.mT if transpose and tensor.ndim > 1 else tensor


@settings(max_examples=40, deadline=None)
@given(
    specs=st.dictionaries(
        st.sampled_from(["model", "ema", "optimiser"]),
        st.dictionaries(st.text(min_size=1), TENSOR, max_size=3),
    ),
    state=st.dictionaries(st.text(), JSON, max_size=3),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, specs: Any, state: Any) -> None:
    given_tensors = {
        group: {name: make(spec) for name, spec in members.items()} for group, members in specs.items()
    }
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    path = Checkpoints(folder, 2).save(7, given_tensors, state)
    found = Checkpoints(folder, 2).newest()
    assert found is not None
    assert (found.step, found.path, found.state) == (7, path, state)
    assert {g: set(m) for g, m in found.tensors.items()} == {g: set(m) for g, m in given_tensors.items()}
    for group, members in given_tensors.items():
        for name, tensor in members.items():
            back = found.tensors[group][name]
            assert back.dtype == tensor.dtype
            assert back.shape == tensor.shape
            assert bits(back) == bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_random_states_and_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    numpy_rng, python_rng, torch_rng = (
        np.random.default_rng(5),
        random.Random(5),
        torch.Generator().manual_seed(5),
    )
    store = Checkpoints(tmp_path, 2)
    state = {
        "numpy": numpy_rng.bit_generator.state,
        "python": python_rng.getstate(),
        "best": math.inf,
        "loss": [math.nan],
        "count": np.int64(3),
    }
    store.save(1, {"rng": {"cpu": torch_rng.get_state()}}, state)
    expected = numpy_rng.random(), python_rng.random(), torch.rand(1, generator=torch_rng).item()
    found = store.newest()
    assert found is not None
    numpy_rng.bit_generator.state = found.state["numpy"]
    version, words, gauss = found.state["python"]
    python_rng.setstate((version, tuple(words), gauss))
    torch_rng.set_state(found.tensors["rng"]["cpu"])
    assert (numpy_rng.random(), python_rng.random(), torch.rand(1, generator=torch_rng).item()) == expected
    assert found.state["best"] == math.inf
    assert math.isnan(found.state["loss"][0])
    assert found.state["count"] == 3


def test_state_json_is_standard_json(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, 2).save(1, tensors(1), {"best": math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads((path / "state.json").read_text(), parse_constant=refuse)
    assert data["schema"] == 1
    assert data["step"] == 1
    assert data["time"].endswith("Z")
    assert {"matrixlib", "python", "torch", "numpy", "safetensors"} <= set(data["versions"])
    assert set(data["groups"]) == {"model", "optimiser"}


def test_optimiser_and_model_continue_as_if_never_stopped(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def update(model: torch.nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
        optimiser.zero_grad()
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimiser.step()

    model, optimiser = build()
    for step in range(3):
        update(model, optimiser, step)
    flat = {f"{i}.{k}": v for i, s in optimiser.state_dict()["state"].items() for k, v in s.items()}
    groups = optimiser.state_dict()["param_groups"]
    Checkpoints(tmp_path, 2).save(3, {"model": model.state_dict(), "optimiser": flat}, {"groups": groups})
    update(model, optimiser, 3)

    other, other_optimiser = build()
    found = Checkpoints(tmp_path, 2).newest()
    assert found is not None
    other.load_state_dict(found.tensors["model"], strict=True)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in found.tensors["optimiser"].items():
        state.setdefault(int(key.split(".")[0]), {})[key.split(".")[1]] = tensor
    other_optimiser.load_state_dict({"state": state, "param_groups": found.state["groups"]})
    update(other, other_optimiser, 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_shared_memory_is_stored_for_each_name_and_said_once(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    members = {"a": base, "tied": base, "row": base[1], "column": base[:, 2], "alone": torch.zeros(2)}
    store = Checkpoints(tmp_path, 2)
    store.save(1, {"model": members}, {})
    store.save(2, {"model": members}, {})
    found = store.newest()
    assert found is not None
    assert set(found.tensors["model"]) == set(members)
    assert all(torch.equal(found.tensors["model"][name], tensor) for name, tensor in members.items())
    assert store.messages == [
        "model: tensors that share memory are stored once for each name (a = tied = row = column)"
    ]


def test_parameters_that_need_gradients_and_channels_last(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    store = Checkpoints(tmp_path, 2)
    store.save(1, {"model": {"w": weight}}, {})
    found = store.newest()
    assert found is not None
    assert torch.equal(found.tensors["model"]["w"], weight)
    assert not found.tensors["model"]["w"].requires_grad


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"rng": torch.zeros(2)}, r"state\.rng: Tensor .* group of tensors"),
        ({"a": [{"b": {1: 2}}]}, r"state\.a\[0\]\.b: key 1"),
        ({"a": {1, 2}}, r"state\.a: set"),
    ],
)
def test_state_that_json_cannot_hold_is_named_and_nothing_is_written(
    tmp_path: Path, state: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        Checkpoints(tmp_path, 2).save(1, {}, state)
    assert names(tmp_path) == []


def test_no_checkpoint_is_none_and_pick_says_so(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "absent", 2)
    assert store.newest() is None
    assert store.best is None
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* yet"):
        store.pick()


# Crashes


class Killed(BaseException):
    """Stands for kill -9: no handler of the code under test may catch it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, point: int) -> list[int]:
    """Die at the n-th call that touches the disk (before it takes effect)."""
    calls = [0]

    def guard(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > point:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(checkpoint.os, "fsync", guard(os.fsync))
    monkeypatch.setattr(checkpoint.os, "replace", guard(os.replace))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", guard(shutil.rmtree))
    monkeypatch.setattr(
        checkpoint.safetensors.torch, "save_file", guard(checkpoint.safetensors.torch.save_file)
    )
    return calls


@pytest.mark.parametrize("again", [False, True], ids=["new step", "step saved before"])
def test_a_crash_at_any_point_leaves_a_loadable_checkpoint(tmp_path: Path, again: bool) -> None:
    point, done = 0, False
    while not done:
        folder = tmp_path / f"{point}"
        save(Checkpoints(folder, 2), *([300] if again else [100, 200]))
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, point)
            try:
                save(Checkpoints(folder, 2), 300)
                done = True
            except Killed:
                pass
        assert newest_step(folder) in ((300,) if again else (200, 300)), point
        save(Checkpoints(folder, 2), 400)  # and the run goes on, with nothing left over
        assert names(folder) in (["step_00000200", "step_00000400"], ["step_00000300", "step_00000400"])
        point += 1
    assert point >= 10


def test_a_process_that_dies_in_the_middle_leaves_the_previous_one(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 2), 100)
    code = textwrap.dedent(f"""
        import os, pathlib, torch
        from matrixlib.engine import checkpoint
        write = checkpoint.safetensors.torch.save_file
        def die(tensors, file):
            if "optimiser" in file.name:
                os._exit(9)
            write(tensors, file)
        checkpoint.safetensors.torch.save_file = die
        big = {{"w": torch.zeros(1000)}}
        store = checkpoint.Checkpoints(pathlib.Path({str(tmp_path)!r}), 2)
        store.save(200, {{"model": big, "optimiser": big}}, {{}})
    """)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert names(tmp_path) == ["step_00000100", "step_00000200.tmp"]
    assert newest_step(tmp_path) == 100
    save(Checkpoints(tmp_path, 2), 200)
    assert names(tmp_path) == ["step_00000100", "step_00000200"]


# Damage


def files(path: Path) -> list[Path]:
    return sorted(path.iterdir())


@pytest.mark.parametrize("position", range(12))
@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors", "state.json"])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, name: str, position: int) -> None:
    save(Checkpoints(tmp_path, 2), 100, 200)
    file = tmp_path / "step_00000200" / name
    raw = bytearray(file.read_bytes())
    rng = random.Random(f"{name} {position}")
    where = {0: 0, 1: len(raw) - 1}.get(position, rng.randrange(len(raw)))
    raw[where] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)
    store = Checkpoints(tmp_path, 2)
    with pytest.warns(CheckpointWarning, match=f"using step_00000100 instead: step_00000200: {name}"):
        found = store.newest()
    assert found is not None
    assert found.step == 100
    assert name in store.messages[0]


def test_every_byte_of_the_state_counts_and_every_bit_of_the_schema(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, 2).save(1, {}, {"x": 1})
    raw = (path / "state.json").read_bytes()
    rng = random.Random(0)
    for where in range(len(raw)):
        for bit in range(8) if where < 20 else [rng.randrange(8)]:
            broken = bytearray(raw)
            broken[where] ^= 1 << bit
            (path / "state.json").write_bytes(broken)
            with pytest.raises(DamagedCheckpoint):
                Checkpoints(tmp_path, 2).load(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_truncated_file_is_found(tmp_path: Path, name: str, share: float) -> None:
    save(Checkpoints(tmp_path, 2), 100, 200)
    file = tmp_path / "step_00000200" / name
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.warns(CheckpointWarning, match="step_00000200"):
        assert newest_step(tmp_path) == 100


def test_a_missing_file_and_a_wrong_name_are_found(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 5), 100, 200, 300)
    (tmp_path / "step_00000300" / "optimiser.safetensors").unlink()
    os.replace(tmp_path / "step_00000200", tmp_path / "step_00000250")
    store = Checkpoints(tmp_path, 2)
    with pytest.warns(CheckpointWarning) as caught:
        found = store.newest()
    assert found is not None
    assert found.step == 100
    assert "step_00000300: optimiser.safetensors is missing" in str(caught[0].message)
    assert "step_00000250: its state.json is of step 200" in str(caught[0].message)


def test_all_damaged_is_one_line_that_names_each_and_what_to_do(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 2), 100, 200)
    (tmp_path / "step_00000100" / "state.json").unlink()
    os.truncate(tmp_path / "step_00000200" / "model.safetensors", 10)
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path, 2).newest()
    text = str(caught.value)
    assert "\n" not in text
    assert "step_00000100: no state.json" in text
    assert "step_00000200: model.safetensors has 10 bytes" in text
    assert "start a new run" in text


def test_a_newer_schema_is_an_error_not_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Checkpoints(tmp_path, 2), 100)
    monkeypatch.setattr(checkpoint, "SCHEMA", 7)
    save(Checkpoints(tmp_path, 2), 200)
    monkeypatch.undo()
    with pytest.raises(
        NewerCheckpoint, match=r"step_00000200 has checkpoint schema 7, .* up to schema 1\. Update"
    ):
        Checkpoints(tmp_path, 2).newest()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb())
    folder = tmp_path / "step_00000300"
    folder.mkdir()
    (folder / "model.pt").write_bytes(bomb)
    (tmp_path / "loose.pt").write_bytes(bomb)
    store = Checkpoints(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"no state\.json \(model\.pt: pickles are never loaded\)"):
        store.newest()
    with pytest.raises(CheckpointError, match="Pickles are never loaded"):
        store.load(tmp_path / "loose.pt")
    save(Checkpoints(tmp_path, 2), 400)
    (tmp_path / "step_00000400" / "model.safetensors").write_bytes(bomb)
    with pytest.raises(DamagedCheckpoint):
        store.load(tmp_path / "step_00000400")


# Retention, best, rollback


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 100, 200)
    store.mark_best(100, 1.5)
    save(store, 300, 400)
    assert names(tmp_path) == ["best.json", "step_00000100", "step_00000300", "step_00000400"]
    store.mark_best(400, 1.25)
    save(store, 500)
    assert names(tmp_path) == ["best.json", "step_00000400", "step_00000500"]
    again = Checkpoints(tmp_path, 2)  # a resumed run knows the best value
    assert again.best is not None
    assert (again.best.step, again.best.value) == (400, 1.25)
    assert again.pick("best").step == 400
    assert again.pick("newest").step == 500
    assert again.pick("step_00000400").step == 400
    with pytest.raises(CheckpointError, match="there are: best, newest, step_00000400, step_00000500"):
        again.pick("step_00000123")


def test_nothing_is_removed_before_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 100, 200)
    seen: list[list[str]] = []
    monkeypatch.setattr(checkpoint, "sync_folder", lambda folder: seen.append(names(tmp_path)))
    save(store, 300)
    assert seen[-1] == ["step_00000100", "step_00000200", "step_00000300"]
    assert names(tmp_path) == ["step_00000200", "step_00000300"]


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 100, 200)
    os.truncate(tmp_path / "step_00000200" / "model.safetensors", 10)
    with pytest.warns(CheckpointWarning):
        assert store.newest().step == 100  # type: ignore[union-attr]
    save(store, 300)
    assert names(tmp_path) == ["step_00000100", "step_00000300"]


def test_a_damaged_newest_is_replaced_when_the_run_comes_there_again(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 2), 100, 200)
    os.truncate(tmp_path / "step_00000200" / "state.json", 10)
    store = Checkpoints(tmp_path, 2)
    with pytest.warns(CheckpointWarning):
        store.newest()
    save(store, 200)
    assert newest_step(tmp_path) == 200
    assert names(tmp_path) == ["step_00000100", "step_00000200"]


def test_rollback_never_resumes_what_it_left_and_keeps_the_best(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 3)
    save(store, 100, 200, 300)
    store.mark_best(200, 1.0)
    store.discard_after(100)
    assert names(tmp_path) == ["best.json", "best_00000200", "step_00000100"]
    assert newest_step(tmp_path) == 100
    assert store.pick("best").step == 200
    save(store, 200)  # another network of the same step is not the best
    assert names(tmp_path) == ["best.json", "best_00000200", "step_00000100", "step_00000200"]
    assert store.best is not None
    assert store.best.path.name == "best_00000200"
    store.mark_best(200, 0.5)
    save(store, 300)
    assert names(tmp_path) == ["best.json", "step_00000100", "step_00000200", "step_00000300"]


def test_saving_behind_later_checkpoints_removes_them(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, 3), 100, 200, 300)
    save(Checkpoints(tmp_path, 3), 150)
    assert names(tmp_path) == ["step_00000100", "step_00000150"]


def test_best_must_be_saved_and_finite_and_a_broken_file_is_said(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 100)
    with pytest.raises(ValueError, match="no checkpoint of step 200"):
        store.mark_best(200, 1.0)
    with pytest.raises(ValueError, match="cannot be the best"):
        store.mark_best(100, math.nan)
    (tmp_path / "best.json").write_text("{")
    with pytest.warns(CheckpointWarning, match=r"best\.json cannot be read"):
        assert store.best is None


def test_at_least_two_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Checkpoints(tmp_path, 1)


# Full and read-only disks


def test_a_full_disk_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path, 2)
    save(store, 100)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 5000))
    with pytest.raises(CheckpointError) as caught:
        save(store, 200)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "needs 1.0 MB, 0.0 MB free; step_00000100 is untouched" in text
    monkeypatch.undo()
    assert names(tmp_path) == ["step_00000100"]
    assert newest_step(tmp_path) == 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX file size limit")
def test_a_write_that_fails_half_way_leaves_the_previous_one(tmp_path: Path) -> None:
    """A real failing write: the process may not write files beyond 1 MB."""
    save(Checkpoints(tmp_path, 2), 100)
    code = textwrap.dedent(f"""
        import pathlib, resource, signal, torch
        from matrixlib.engine.checkpoint import CheckpointError, Checkpoints
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        store = Checkpoints(pathlib.Path({str(tmp_path)!r}), 2)
        try:
            store.save(200, {{"model": {{"w": torch.zeros(1 << 20)}}}}, {{}})
        except CheckpointError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "cannot write checkpoint step_00000200" in done.stdout, done.stderr
    assert "step_00000100 is untouched" in done.stdout
    assert names(tmp_path) == ["step_00000100"]
    assert newest_step(tmp_path) == 100


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint step_00000001 to .*file"):
        Checkpoints(tmp_path / "file" / "checkpoints", 2).save(1, {}, {})
