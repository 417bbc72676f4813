"""Windows of Melee: no label leaks, none crosses a game, the mirror is exact; a network plays frame by frame."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from melee_games import game, melee_task
from networks import CPU

from matrixlib.data.shards import Batch, Shard, concat, select
from matrixlib.engine import onnx
from matrixlib.engine.network import Network
from matrixlib.hardware.runtime import resolve
from matrixlib.tasks.melee import columns, windows
from matrixlib.tasks.melee.config import MeleeDataConfig
from matrixlib.tasks.melee.controller import HEADS, NEUTRAL, Controller, choices_of, controllers
from matrixlib.tasks.melee.importer import unpack_sample
from matrixlib.tasks.melee.player import MeleeOnnx, Player, export
from matrixlib.tasks.melee.replay import Replay
from matrixlib.tasks.melee.spec import MeleeTask
from matrixlib.tasks.melee.windows import INPUTS, PLACE, augment, cut, plain, stretches

PLAIN = MeleeDataConfig(mirror=0.0, noise=0.0, random_start=False)


def rows_of(*seeds: int, frames: int = 200) -> Batch:
    return concat([stretches(game(frames, seed), False) for seed in seeds], columns.LAYOUT)


def window_of(replay: Replay, frames: int, delay: int = 0) -> np.ndarray:
    """The first frames of a game, seen by its first player."""
    row = select(stretches(replay, False), np.array([0]), columns.LAYOUT)
    return cut(row, np.array([0]), np.array([delay]), frames)


# Rows


def test_no_row_crosses_a_game_or_a_gap_in_it() -> None:
    replay = game(300)
    number = replay.number.copy()
    number[130:] += 7
    batch = concat([stretches(replace(replay, number=number), False), stretches(game(100, 1), True)], columns.LAYOUT)
    for row, (begin, end) in enumerate(zip(batch["frame_offset"], batch["frame_offset"][1:], strict=False)):
        record = batch["records"][row]
        source = game(100, 1) if record["held_out"] else replay
        numbers = source.number if record["held_out"] else number
        first = int(np.flatnonzero(numbers == record["first"])[0])
        here = slice(first, first + end - begin)
        assert (np.diff(numbers[here]) == 1).all()
        who = source.ports.index(record["port"])
        assert (batch["frame_state"]["self"][begin:end] == source.players[here, who]).all()


def test_two_recordings_of_one_game_are_one_game() -> None:
    whole = game(4000)
    shorter = replace(whole, number=whole.number[:3900], players=whole.players[:3900], ports=(1, 2))
    shorter = replace(shorter, controllers=whole.controllers[:3900])
    assert whole.game == shorter.game != game(4000, 1).game


# Labels


@pytest.mark.parametrize("delay", [0, 1, 18])
def test_a_frame_is_paired_with_the_controller_after_it_and_the_delay(delay: int) -> None:
    replay = game(300)
    batch = stretches(replay, False)
    out = plain(batch, PLAIN.model_copy(update={"delay": (delay, 18)}))
    truth = choices_of(replay.controllers)
    for row in range(len(batch["records"])):
        who, first = divmod(row, len(batch["records"]) // 2)
        frames = first * columns.OWN + np.arange(columns.OWN)
        later = frames + delay + 1
        known = later < 300
        assert (out["valid"][row] == known).all()
        assert (out["choices"][row][known] == truth[later[known], who]).all()
        assert (out["previous"][row][known] == truth[later[known] - 1, who]).all()
        assert (out["action"][row, frames < 300, 0] == replay.players["action"][frames[frames < 300], who]).all()
    assert (out["numeric"][..., PLACE["delay"]] == np.float32(delay / 18)).all()


def test_random_windows_keep_the_pairing_and_reach_every_own_frame() -> None:
    batch = rows_of(3, frames=700)
    data = MeleeDataConfig(mirror=0.0, noise=0.0, delay=(2, 5))
    state = batch["frame_state"]
    starts = set()
    for seed in range(40):
        out = augment(batch, data, np.random.default_rng(seed))
        delay = np.rint(out["numeric"][:, 0, PLACE["delay"]] * 18).astype(int)
        assert set(delay) <= {2, 3, 4, 5}
        for row, begin in enumerate(batch["frame_offset"][:-1]):
            stretch = state[begin : batch["frame_offset"][row + 1]]
            start = _start(stretch, out["action"][row, :, 0])
            starts.add(start)
            frames = start + np.arange(60) + delay[row] + 1
            known = frames < len(stretch)
            assert (out["valid"][row] == known).all()
            assert (out["choices"][row][known] == choices_of(stretch["controller"][frames[known]])).all()
    assert starts == set(range(columns.OWN))


def test_every_own_frame_is_judged_however_short_the_windows_of_training() -> None:
    batch = stretches(game(150), False)
    out = plain(batch, PLAIN.model_copy(update={"window": 20}))
    shown = out["action"][..., 0][out["valid"] > 0].reshape(2, -1)  # nothing follows on the last frame of a player
    assert (shown == game(150).players["action"][:-1].T).all()


def _start(stretch: np.ndarray, actions: np.ndarray) -> int:
    """Where a window begins in a row."""
    own = stretch["self"]["action"]
    return next(n for n in range(columns.OWN) if (own[n : n + 60] == actions[: len(own) - n]).all())


def leak(out: dict[str, np.ndarray], labels: np.ndarray) -> float:
    """How much likelier an action changes with the state in which a button of `labels` (B, T, 8) is newly pressed."""
    known = out["valid"][:, 1:] > 0
    onset = ((labels[:, 1:] > labels[:, :-1])[..., :5]).any(-1)[known]
    changes = (np.diff(out["action"][..., 0], axis=1) != 0)[known]
    return float(changes[onset].mean() - changes.mean())


def test_labels_do_not_leak_and_a_planted_leak_is_seen() -> None:
    """Of people's games: with the controller of the same frame, the new action gives the button away."""
    shard = Shard(unpack_sample() / "sample_validation.npz", columns.LAYOUT)
    out = plain(shard.gather(np.arange(len(shard))), PLAIN)
    assert leak(out, out["choices"][..., :8]) < 0.1
    assert leak(out, out["previous"][..., :8]) > 0.4


# Inputs


def test_what_a_version_does_not_record_is_told() -> None:
    replay = game(known=columns.SPEEDS | columns.ITEMS)
    replay.players["hitstun"], replay.players["action_frame"], replay.players["jumps"] = np.nan, np.nan, columns.UNKNOWN
    out = plain(stretches(replay, False), PLAIN)["numeric"]
    told = {name: set(out[..., PLACE[f"known {name}"]].flat) for name in windows.KNOWN}
    assert told == {name: {float(name in ("speeds", "items"))} for name in windows.KNOWN}
    assert np.isfinite(out).all()


def test_the_numbers_of_a_player_by_hand() -> None:
    replay = game(2)
    player = replay.players[0, 0]
    player["percent"], player["shield"], player["x"], player["y"], player["speeds"] = 50, 30, -20, 10, (1, 2, 3, 4, 5)
    player["hitstun"], player["action_frame"], player["stocks"], player["jumps"] = 12, 15, 3, 1
    player["flags"] = columns.LEFT | columns.AIR | columns.SAFE
    out = windows.inputs(window_of(replay, 1))["numeric"][0, 0]
    told = [out[PLACE[f"own {name}"]] for name in windows.LEADER]
    state, speeds, rest = [0.5, -1, -1, 0.5, 1, 1 / 6, 0.3, 0], [0.5, 1, 1.5, 2, 2.5], [0.1, 0.25, 0.75, 65 / 85]
    assert told == pytest.approx([*state, *speeds, *rest], rel=1e-3)  # of a half
    assert (out[PLACE["stage Battlefield"]], out[PLACE["stage other"]]) == (1, 0)


def test_an_item_and_a_second_character_stand_where_they_belong() -> None:
    out = plain(stretches(game(130), False), PLAIN)["numeric"]
    one, other = out[[0, 3]]  # each player's first row
    for rows, mine in ((one, "other second there"), (other, "own second there")):
        assert np.flatnonzero(rows[:, PLACE[mine]]).tolist() == list(range(20))
    assert (one[:, PLACE["own second there"]].sum(), other[:, PLACE["other second there"]].sum()) == (0, 0)
    assert [rows[0, PLACE["item 0 owner"]] for rows in (one, other)] == [0.5, -0.5]
    assert out[..., PLACE["item 0 there"]].sum() == 2 * 2, "at frames 0 and 60, for both players"
    assert out[0, 0, PLACE["item 0 x"]] == 0.5


def test_left_and_right_change_places_exactly() -> None:
    batch = concat([stretches(game(200, 4), False), stretches(game(200, 5, stage=3), False)], columns.LAYOUT)
    before = plain(batch, PLAIN)
    after = augment(batch, PLAIN.model_copy(update={"mirror": 1.0}), np.random.default_rng(0))
    turned = batch["records"]["stage"] == 31
    for name, values in before.items():
        assert (after[name][~turned] == values[~turned]).all(), f"{name} of Pokémon Stadium"
    was, now = before["numeric"][turned], after["numeric"][turned]
    odd = [place for name, place in PLACE.items() if name.split("own ")[-1].split("other ")[-1] in ODD or name in ODD]
    assert (now[..., odd] == -was[..., odd]).all()
    even = np.setdiff1d(np.arange(len(INPUTS)), odd)
    assert (now[..., even] == was[..., even]).all()
    stored = batch["frame_state"]["controller"]
    for row in np.flatnonzero(turned):
        begin, end = batch["frame_offset"][row : row + 2]
        known = min(60, end - begin - 1)
        for name, first in (("choices", begin + 1), ("previous", begin)):
            other = stored[first : first + known].copy()
            other["sticks"][:, [0, 2]] *= -1  # in the steps of the game: -5 is class 8, and 5 is class 9
            assert (after[name][row][:known] == choices_of(other)).all()


ODD = {"facing", "x", "speed air x", "speed ground x", "speed hit x", "second facing", "second x", "second speed air x"}
ODD |= {"dx", "previous main x", "previous c x"} | {f"item {n} {name}" for n in range(5) for name in ("x", "speed x")}


def test_noise_is_on_measured_inputs_alone() -> None:
    batch = rows_of(6)
    data = PLAIN.model_copy(update={"noise": 1.0, "noise_sigma": 0.1})
    before = plain(batch, PLAIN)["numeric"]
    moved = augment(batch, data, np.random.default_rng(0))["numeric"] - before
    assert (moved[before == 0] == 0).all(), "nothing is made of what is not there, or unknown"
    places = [place for place in windows.CONTINUOUS.tolist() if before[..., place].any()]
    assert (moved != 0).any((0, 1)).nonzero()[0].tolist() == places
    assert moved[before != 0].std() < 0.1
    assert moved[..., PLACE["own x"]].std() == pytest.approx(0.1, rel=0.1)
    names = {INPUTS[place] for place in windows.CONTINUOUS}
    assert "own percent" in names
    assert not {name for name in names if re.search("there|stage|previous|kind|known", name)}


def test_a_frame_as_it_is_played_is_the_frame_of_a_window() -> None:
    replay = game(150)
    whole = window_of(replay, 130, delay=3)
    together = windows.inputs(whole)
    held = replay.controllers[:, 0]
    for frame in (0, 19, 60, 120):
        second = {1: replay.follower["state"][frame]} if frame < 20 else None
        state = np.zeros((), columns.FRAME)
        state["self"], state["other"] = replay.players[frame]
        items = replay.item[replay.item["at"] == frame]
        items["owner"] = 1
        one = windows.live(state, held[frame + 3], columns.FIRST + frame, replay.stage, 3, second, items)
        for scene in (one, whole[:, frame : frame + 1]):
            for name, values in windows.inputs(scene).items():
                assert (values[0, 0] == together[name][0, frame]).all(), (name, frame)


def test_controllers_and_their_classes() -> None:
    held = np.zeros(3, columns.CONTROLLER)
    held["sticks"] = [(-80, -5, 0, 4), (5, 80, 23, -23), (75, 76, -75, -76)]
    held["shoulder"], held["buttons"] = (0, 17, 140), (1, 128, 255)
    out = choices_of(held)
    assert out[:, 8:12].tolist() == [[0, 8, 8, 8], [9, 16, 10, 6], [16, 16, 1, 0]]
    assert out[:, 12].tolist() == [0, 0, 4]
    assert out[:, :8].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [1] * 8]
    assert (choices_of(controllers(out)) == out).all()


def test_who_is_lost_over_the_left_edge_is_lost_over_the_right_one_in_the_mirror() -> None:
    batch = stretches(game(200, 4), False)
    actions = batch["frame_state"]["self"]["action"]
    actions[:3] = 0, 1, 2  # down, left, right
    before = plain(batch, PLAIN)["action"][0, :3, 0].tolist()
    after = augment(batch, PLAIN.model_copy(update={"mirror": 1.0}), np.random.default_rng(0))["action"][0, :3, 0]
    assert (before, after.tolist()) == ([0, 1, 2], [0, 2, 1])


REST = Controller.of(NEUTRAL)


def first_frames(count: int, delay: int = 0) -> np.ndarray:
    return window_of(game(), count, delay)


def network(**sections: Any) -> Network:
    task = melee_task(**sections)
    settings = task.config.runtime.model_copy(update=CPU)
    runtime = resolve(settings, task.config.train, task.config.data)
    return Network(task.build_model(), task, runtime)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("trunk", ["mlp", "gru", "lstm", "transformer"])
def test_a_played_game_is_as_its_recording(trunk: str, delay: int) -> None:
    """Frame by frame as the whole window at once, with the player's own decisions as what it held."""
    net = network(model={"trunk": trunk}, data={"delay": [delay, delay]})
    window = first_frames(30, delay)
    player = Player(net, seed=1)
    logits, choices = [], []
    for frame in range(30):
        player.act(window[:, frame : frame + 1])
        logits.append(player.logits)
        choices.append(player.decision)
    window["previous"] = controllers(np.stack([NEUTRAL, *choices[:-1]]))
    arrays = windows.inputs(window) | {"choices": np.stack(choices)[None]}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    inputs = {name: tensor if tensor.is_floating_point() else tensor.long() for name, tensor in tensors.items()}
    with torch.inference_mode():
        assert np.abs(np.stack(logits) - net.model(**inputs)[0].numpy()).max() < 1e-5


def test_players_of_one_seed_play_alike_and_the_likeliest_needs_none() -> None:
    net, window = network(), first_frames(10)

    def play(**options: Any) -> list[Controller]:
        player = Player(net, **options)
        return [player.act(window[:, frame : frame + 1]) for frame in range(10)]

    assert play(seed=1) == play(seed=1) != play(seed=2)
    assert play(seed=1, temperature=0.0) == play(seed=2, temperature=0.0)


def test_a_bot_chooses_a_delay_among_those_of_training() -> None:
    net, window = network(data={"delay": [2, 4]}), first_frames(8, 2)
    said = {}
    for delay in (None, 2, 3, 4):
        player = Player(net, seed=1, delay=delay)
        held, decided = [player.act(window[:, :1])], [Controller.of(player.decision)]
        said[delay] = player.logits
        for frame in range(1, 8):
            held.append(player.act(window[:, frame : frame + 1]))
            decided.append(Controller.of(player.decision))
        late = delay or 2
        assert held == [REST] * late + decided[:-late]
    assert (said[4] != said[2]).any(), "the network is told of it"
    for delay in (1, 5, -1):
        with pytest.raises(ValueError, match=rf"delay {delay}: the network was trained with 2 to 4 frames"):
            Player(net, delay=delay)


def test_a_file_says_what_its_numbers_are() -> None:
    net = network(data={"delay": [0, 3]})
    told = MeleeOnnx(net.model, net.task).metadata()  # type: ignore
    assert told["task"] == "melee"
    assert json.loads(told["numeric"]) == list(windows.INPUTS)
    assert json.loads(told["choices"])[:2] + json.loads(told["choices"])[-2:] == ["A", "B", "c_y", "shoulder"]
    assert (json.loads(told["delay"]), json.loads(told["delay_unit"])) == ([0, 3], 18)


def test_weights_of_rare_buttons_go_with_the_network() -> None:
    """What logits mean depends on them, and where a network is used its training set is not."""
    loss = {"rare": 1.0}
    trained, used = melee_task(loss=loss), MeleeTask(melee_task(loss=loss).config)
    model, other = trained.build_model(), used.build_model()
    other.load_state_dict(model.state_dict())
    logits = torch.zeros(1, 8)
    odds = used.objective(other).correct(HEADS[0], logits)
    assert torch.equal(odds, trained.objective(model).correct(HEADS[0], logits))
    assert odds.max() < -0.5


@pytest.mark.parametrize("loss, pressed", [({}, True), ({"rare": 1.0}, False), ({"focal": 2.0}, True)])
def test_what_is_played_is_corrected_for_the_loss(loss: dict[str, float], pressed: bool) -> None:
    """Odds of 1.6 that a weight of 2 made are odds of 0.8."""
    net = network(loss=loss)
    outer: Any = net.model.heads.outer[0]  # type: ignore
    outer.weight.zero_()
    outer.bias.fill_(0.5)
    player = Player(net, temperature=0.0)
    player.act(first_frames(1))
    weights = torch.as_tensor(net.model.heads.weights)  # type: ignore
    assert player.decision[:8].tolist() == [int(pressed or weight < 1.6) for weight in weights]
    assert pressed or 0 in player.decision[:8]


def test_what_cannot_be_played_is_refused() -> None:
    net = network()
    for frame in (first_frames(2), first_frames(1)["players"]):
        with pytest.raises(ValueError, match="one frame at a time"):
            Player(net).act(frame)  # type: ignore[arg-type]
    for temperature in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature {temperature}"):
            Player(net, temperature=temperature)


@pytest.mark.skipif(not onnx.installed(), reason=f"needs {', '.join(onnx.PACKAGES)}")
@pytest.mark.soak
@pytest.mark.parametrize("trunk", ["mlp", "gru", "lstm", "transformer"])
def test_the_file_decides_as_the_network(trunk: str, tmp_path: Path) -> None:
    net = network(model={"trunk": trunk})
    file = export(net.model, net.task, tmp_path / "melee.onnx")  # type: ignore
    assert file.difference < 1e-5
    assert file.outputs[:2] == ("logits", "choices")
    assert [entry.name for entry in tmp_path.iterdir()] == ["melee.onnx"]
