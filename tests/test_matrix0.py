"""Reading Matrix0's networks: every key accounted for, outputs as its own code gave them."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import matrix0_state
from torch import Tensor

from matrixlib.config import difference
from matrixlib.runs.start import read_start
from matrixlib.tasks import get_task
from matrixlib.tasks import load_config as load
from matrixlib.tasks.chess.evaluate.onnx import open_file
from matrixlib.tasks.chess.matrix0 import convert_weights, matrix0_config, read_checkpoint
from matrixlib.tasks.chess.model import PolicyValueNet

SMALL: dict[str, Any] = {
    "channels": 16,
    "blocks": 3,
    "attention_heads": 2,
    "norm": "group",
    "activation": "silu",
    "preact": True,
    "policy_factor_rank": 2,
    "aux_policy_from_square": True,
    "aux_policy_move_type": True,
}
BIG: dict[str, Any] = SMALL | {  # config.yaml of Matrix0 on 22 August 2025
    "planes": 19,
    "channels": 320,
    "blocks": 24,
    "attention_heads": 20,
    "policy_size": 4672,
    "droppath": 0.1,
    "policy_factor_rank": 128,
    "ssl_curriculum": True,
    "self_supervised": True,
    "ssl_tasks": ["piece"],
    "ssrl_tasks": ["position", "material", "rotation"],
}
Weights = dict[str, Tensor]


def loaded(data: Any) -> Weights:
    """What a small network of Matrix0's then holds, under its keys."""
    net = PolicyValueNet(matrix0_config(SMALL))
    net.load_state_dict(convert_weights(data, net.state_dict()))
    return matrix0_state(net)


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.manual_seed(1)
    state = matrix0_state(PolicyValueNet(matrix0_config(SMALL)))
    fresh = {key: torch.rand(t.shape) if t.is_floating_point() else torch.full_like(t, 7) for key, t in state.items()}
    return fresh | {"ssl_head" + key[14:]: tensor for key, tensor in fresh.items() if key.startswith("ssl_piece_head")}


def test_outputs_equal_matrix0s(shared: Path) -> None:
    folder = shared / "parity"
    given, expected = json.loads((folder / "small_cfg.json").read_text()), np.load(folder / "parity.npz")
    assert matrix0_config(given["netconfig_given"]) == matrix0_config(given["netconfig_full"])
    net = PolicyValueNet(matrix0_config(given["netconfig_full"])).eval()
    assert sum(parameter.numel() for parameter in net.parameters()) == 303_823
    data = read_checkpoint(folder / "small_ckpt.pt")
    assert len(data) == len(matrix0_state(net)) == 103
    net.load_state_dict(convert_weights(data, net.state_dict()))
    with torch.no_grad():
        out = net(torch.from_numpy(expected["planes"]), frozenset({"policy", "value", "features", "ssl_piece"}))
    ours = {**out, "ssl_piece": out["ssl"]["piece"], "feats_first4": out["features"][:4]}
    for name in ("policy", "value", "ssl_piece", "feats_first4"):
        assert np.abs(ours[name].numpy() - expected[name]).max() < 1e-4, name


def test_the_preset_is_matrix0s_network() -> None:
    assert load("matrix0_53m").model == matrix0_config(BIG)
    assert matrix0_config({}).policy.kind == "dense"
    # Matrix0 reads a mix of 1 or more as masked alone and 0 or less as unmasked alone
    for mix, mask, ours in ((0.2, True, 0.2), (1.0, True, 0.0), (True, True, 0.0), (0.0, False, 0.0)):
        options = matrix0_config(SMALL | {"attention_unmasked_mix": mix}).attention
        assert (options.mask, options.unmasked_mix) == (mask, ours)


def test_a_better_policy_on_its_trunk_differs_in_nothing_else() -> None:
    better = difference(load("matrix0_attention_policy"), load("matrix0_53m"))
    assert {key for key in better if not key.startswith("model.policy.")} == {"optim.optimiser"}


@pytest.mark.filterwarnings("ignore:small_ckpt.pt")
def test_a_better_policy_on_its_trunk_begins_with_its_checkpoints(shared: Path) -> None:
    checkpoint = shared / "parity" / "small_ckpt.pt"
    network = matrix0_config(json.loads(checkpoint.with_name("small_cfg.json").read_text())["netconfig_full"])
    shape = network.model_dump(exclude={"policy"})
    config = load(
        "matrix0_attention_policy", {"model": shape, "train": {"init": str(checkpoint), "init_partial": True}}
    )
    start = read_start(config, get_task("chess").task(config))
    assert start.record["new"]
    assert {name.split(".")[0] for name in (*start.record["new"], *start.record["left_out"])} == {"policy_head"}


def test_474_keys_of_the_53m_network() -> None:
    """320 parameters, 150 buffers of 50 BatchNorms, 4 aliases; shapes of the fact sheet's table."""
    with torch.device("meta"):
        net = PolicyValueNet(load("matrix0_53m").model)
        state = matrix0_state(net)
    assert len(state) == 474
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert sum(key.startswith("ssl_head.") for key in state) == 4
    assert sum(key.endswith(statistics) for key in state) == 150
    assert len(list(net.parameters())) == 320
    assert sum(parameter.numel() for parameter in net.parameters()) == 53_161_185
    shapes = {
        "stem.0.weight": (320, 19, 3, 3),
        "chess_features.position_encoding": (1, 320, 8, 8),
        "chess_features.interaction_norm.running_var": (320,),
        "tower.30.se_fc1.weight": (80, 320),
        "tower.3.rel_bias": (1, 20, 64, 64),
        "tower.31.qkv.weight": (960, 320, 1, 1),
        "ssl_head.3.weight": (13, 160, 1, 1),
        "value_fc3.weight": (1, 160),
        "aux_from_square.3.weight": (64, 32, 1, 1),
    }
    assert {key: tuple(state[key].shape) for key in shapes} == shapes


@pytest.mark.parametrize("schema", ["model_ema", "model", "model_state_dict", "state dict"])
@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
def test_every_schema_fills_every_tensor(weights: Weights, schema: str, prefix: str, tmp_path: Path) -> None:
    """And those of its training, whose scheduler leaves numbers of numpy that torch's safe unpickler refuses."""
    state, path = {prefix + key: value for key, value in weights.items()}, tmp_path / "net.pt"
    scheduler = {"_last_lr": [np.float64(1e-3)], "step": np.int64(4)}
    torch.save(state if schema == "state dict" else {schema: state, "scheduler": scheduler}, path)
    ours = loaded(read_checkpoint(path))
    assert all(torch.equal(value, weights[key]) for key, value in ours.items())


def test_averaged_weights_come_first_and_lack_counters(weights: Weights) -> None:
    averaged = {key: value * 0.5 for key, value in weights.items() if value.is_floating_point()}
    state = loaded({"model_state_dict": weights, "model": weights, "model_ema": averaged})
    assert torch.equal(state["stem.0.weight"], weights["stem.0.weight"] * 0.5)
    assert int(state["tower.0.bn1.num_batches_tracked"]) == 0


def test_an_absent_alias_is_fine(weights: Weights) -> None:
    state = loaded({key: value for key, value in weights.items() if not key.startswith("ssl_head.")})
    assert torch.equal(state["ssl_head.0.weight"], weights["ssl_head.0.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_fc3.bias": None}, "Missing .*value_head.fc3.bias"),
        ({"tower.0.bn1.running_mean": None}, "Missing .*tower.0.norms.0.running_mean"),
        ({"extra.weight": torch.zeros(3)}, "Unexpected .*extra.weight"),
        ({"value_fc3.bias": torch.zeros(2)}, "size mismatch for value_head.fc3.bias"),
        ({"stem.1.bias": torch.full((16,), float("nan"))}, "not finite: stem.1.bias"),
        ({"ssl_head.1.bias": torch.full((8,), 9.0)}, "Unexpected .*ssl_head.1.bias"),
        ({"ssl_piece_head.1.bias": None}, "Missing .*ssl_heads.piece.input.norm.bias.* Unexpected .*ssl_head.1.bias"),
        ({"stem.1.bias": 1.0}, "no weights found.* got stem.1.bias"),
        # claims of a file are not believed
        ({"stem.0.weight": torch.zeros(1).expand(300_000, 19, 3, 3)}, "no weights found: .* stem"),
        ({"stem.0.weight": torch.zeros(())}, "tuple index"),
        ({"policy_fc1.weight": torch.zeros(1_000_000, 1)}, "rank: Input should be less than or equal to 65536"),
        ({"tower.3.rel_bias": torch.zeros(()), "config": {"attention_heads": "x"}}, " heads: "),
        ({"config": {"attention_unmasked_mix": "x"}}, "not supported between"),
        ({"config": {"ssl_tasks": 3}}, "not iterable"),
    ],
)
def test_whatever_does_not_fit_is_named(weights: Weights, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    state = {key: value for key, value in (weights | change).items() if value is not None and key != "config"}
    torch.save({"model": state, "config": change.get("config", SMALL)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=rf"^odd\.pt .*{message}") as caught:
        open_file(tmp_path / "odd.pt", "cpu", False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [{"optimizer": {}, "step": 1}, {}])
def test_files_without_weights(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"no weights found.* got {', '.join(content) or 'nothing'}"):
        loaded(content)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def test_code_in_a_file_is_never_executed(weights: Weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": weights, "note": Payload()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"^evil\.pt is damaged or holds more than tensors and numbers$"):
        read_checkpoint(tmp_path / "evil.pt")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("data", [b"", b"a picture of a cat", b"PK\3\4", b"\x80\x02", "cut", "list", "absent"])
def test_files_of_another_kind_are_named(weights: Weights, tmp_path: Path, data: bytes | str) -> None:
    path = tmp_path / "other.pt"
    torch.save([1, 2] if data == "list" else weights, path)
    if data == "absent":
        path.unlink()
    elif data != "list":
        path.write_bytes(path.read_bytes()[:2000] if isinstance(data, str) else data)
    with pytest.raises(ValueError, match=r"other\.pt (holds a list|is damaged)"):
        read_checkpoint(path)


def test_a_file_that_unpacks_to_more_is_not_read(weights: Weights, tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=r"packed\.pt .*compressed"):
        read_checkpoint(tmp_path / "packed.pt")


@pytest.mark.parametrize(
    "change",
    [
        {"wdl": True},
        {"enable_visual": True},
        {"policy_size": 1858},
        {"ssl_tasks": ["piece", "threat"]},
        {"infer_attention_stride": 2},
        {"aux_policy_move_type": False},
    ],
)
def test_unsupported_options_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"(not supported|unknown fields).*{next(iter(change))}"):
        matrix0_config(SMALL | change)
