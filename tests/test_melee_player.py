"""A network that plays Melee: frame by frame as over whole games, its delay, its samples, its ONNX file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from melee_batches import melee_task
from melee_games import game
from networks import CPU
from test_melee_windows import window_of

from matrixlib.engine import onnx
from matrixlib.engine.network import Network
from matrixlib.hardware.runtime import resolve
from matrixlib.tasks.melee import features
from matrixlib.tasks.melee.controller import HEADS, NEUTRAL, Controller, controllers
from matrixlib.tasks.melee.player import MeleeOnnx, Player, export
from matrixlib.tasks.melee.task import MeleeTask

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
    arrays = features.inputs(window) | {"choices": np.stack(choices)[None]}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    inputs = {name: tensor if tensor.is_floating_point() else tensor.long() for name, tensor in tensors.items()}
    with torch.inference_mode():
        assert np.abs(np.stack(logits) - net.model(**inputs)[0].numpy()).max() < 1e-5


def test_a_decision_is_held_after_the_delay() -> None:
    net, window = network(data={"delay": [2, 4]}), first_frames(8, 2)
    player = Player(net, seed=3)
    controllers_, decided = [], []
    for frame in range(8):
        controllers_.append(player.act(window[:, frame : frame + 1]))
        decided.append(Controller.of(player.decision))
    assert controllers_ == [REST, REST, *decided[:-2]]
    assert decided[0] != REST


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
        held = [player.act(window[:, :1])]
        said[delay] = player.logits
        held += [player.act(window[:, frame : frame + 1]) for frame in range(1, 8)]
        assert [controller != REST for controller in held].index(True) == (delay or 2)
    assert (said[4] != said[2]).any(), "the network is told of it"
    for delay in (1, 5, -1):
        with pytest.raises(ValueError, match=rf"delay {delay}: the network was trained with 2 to 4 frames"):
            Player(net, delay=delay)


def test_a_file_says_what_its_numbers_are() -> None:
    net = network(data={"delay": [0, 3]})
    told = MeleeOnnx(net.model, net.task).metadata()  # type: ignore
    assert told["task"] == "melee"
    assert json.loads(told["numeric"]) == list(features.INPUTS)
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
