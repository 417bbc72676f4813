"""Lc0's attention bodies: what Lc0 itself says, heads by name, bad files, use as teacher and player, and networks
that are trained here and written."""

from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import chess
import chess.engine
import lc0_files
import numpy as np
import pytest
import torch
from networks import random_net
from test_chess_task import positions as some_boards
from test_chess_task import stored
from test_lc0_train import PROMOTIONS, check_lc0, difference, games
from test_lc0_train import opened as run_of
from test_task_contract import check_task
from test_uci import Dialogue

import matrixlib
from matrixlib.config import ConfigError, merge
from matrixlib.runs.data import RunError
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.distill.teacher import ChessTeacher
from matrixlib.tasks.chess.evaluate import strength
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.throughput import positions
from matrixlib.tasks.chess.lc0.attention import AttentionNet
from matrixlib.tasks.chess.model import flops

MISH, SELU, SWISH, RELU_2 = 1, 6, 7, 8
NAN = b"\x0d\x00\x00\xc0\x7f" + lc0_files.field(3, bytes(4096))  # a layer from NaN
SEVERAL = {"several": True, "network_format": 7}
FORMS: dict[str, dict[str, Any]] = {
    "map": {},
    "without smolgen": {"smolgen": False, "form": {9: SELU}},
    "mish": {"form": {7: MISH}},
    "swish": {"form": {8: SWISH, 9: RELU_2}},
    "dense": {"embedding": 2},
    "dense without smolgen": {"embedding": 2, "smolgen": False, "form": {7: MISH, 9: SWISH}},
    "scalar": {"value": 1},
    "old": {"network_format": 4, "form": {10: 0}},
    "several": SEVERAL | {"embedding": 2},
    "optimistic q": SEVERAL | {"embedding": 2, "form": {8: SWISH, 9: MISH}},
    "soft st": SEVERAL | {"network_format": 134},
    "opponent winner": SEVERAL | {"network_format": 6, "embedding": 2},
}
OURS: dict[str, dict[str, Any]] = {  # options over those of `small`
    "our map": {},
    "our smolgen": {"history": True, "encoder": {"smolgen": 16, "ffn_activation": "squared_relu"}},
    "our dense": {"history": True, "activation": "mish", "value": {"activation": "mish"}, "encoder": {"dense": 4}},
    "our moves left": {"moves_left": {"channels": 4, "hidden": 24}, "history": True},
    "our scalar": {"value": {"kind": "scalar", "channels": 16}, "encoder": {"smolgen": 16, "dense": 4, "heads": 2}},
}


def small(form: str = "our smolgen", **changes: Any) -> dict[str, Any]:
    """Options of `model` for networks of our own."""
    policy = {"kind": "attention", "channels": 24, "rank": 16}
    options = {"trunk": "encoder", "channels": 32, "blocks": 2, "policy": policy}
    return merge(merge(options, OURS[form]), changes)


def made(form: str) -> Net:
    """A network of our own whose moves are not alike."""
    task: Any = get_task("chess").task(load_config("lc0_quick", {"model": small(form, ssl=[])}))
    model, generator = task.build_model(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value += 0.1 * torch.randn(value.shape, generator=generator)
            value *= 3.0 if name.endswith(("key.weight", "query.weight", "fc3.weight")) else 1.0
    return Net(model, task, random_net().runtime)


def opened(tmp_path: Path, **options: Any) -> tuple[Net, AttentionNet, Path]:
    path = lc0_files.save(tmp_path / "made.pb.gz", lc0_files.attention_network(**options))
    net = matrixlib.load(path, device="cpu")
    return cast(Net, net), cast(AttentionNet, net.model), path


@pytest.mark.parametrize("form", [*FORMS, *OURS])
def test_lc0_says_the_same(form: str, lc0: str, tmp_path: Path) -> None:
    net, model, path = opened(tmp_path, **FORMS.get(form, {}))
    if form in OURS:
        made(form).save_lc0(path)
        net = cast(Net, matrixlib.load(path, device="cpu"))
    boards = [*games(24, 80), *map(chess.Board, PROMOTIONS)]
    command = [lc0, f"--weights={path}", "--backend=eigen"]
    if " " in form and FORMS.get(form, {}).get("several"):
        policy, value = form.split()
        model.choose(policy, value)
        command.append(f"--backend-opts=policy_head={policy},value_head={value}")
    answers = check_lc0(command, net, boards)
    assert np.median([max(one.shares.values()) for one in answers]) > 0.25
    assert np.std([one.value for one in answers]) > 0.02, "neither moves nor positions are alike"


def test_heads_are_chosen_by_name(tmp_path: Path) -> None:
    net, model, _ = opened(tmp_path, **SEVERAL)
    said = {}
    for policy, value in (("vanilla", "winner"), ("optimistic", "q"), ("soft", "st"), ("opponent", "winner")):
        model.choose(policy, value)
        (said[policy, value],) = net.evaluate("startpos moves e2e4")
    moves = [list(one.moves.values()) for one in said.values()]
    assert all(np.abs(np.subtract(a, b)).max() > 0.01 for k, a in enumerate(moves) for b in moves[:k])
    assert len({one.value for one in said.values()}) == 3
    with pytest.raises(ValueError, match="no policy head 'other', it has vanilla, optimistic, soft, opponent"):
        model.choose("other")
    _, model, _ = opened(tmp_path)
    with pytest.raises(ValueError, match="no value head 'q', it has winner"):
        model.choose("vanilla", "q")


def test_its_heads_are_options_of_the_uci_engine(tmp_path: Path) -> None:
    net, model, _ = opened(tmp_path, **SEVERAL)
    for own, option, answer in (
        (net, "PolicyHead value optimistic", "readyok"),
        (net, "ValueHead value x", "info string the network has no value head 'x', it has winner, q, st"),
        (random_net(), "ValueHead value q", "info string PolicyHead and ValueHead are for Lc0 networks with several"),
    ):
        engine = Dialogue(own)
        engine.ask("setoption name PolicyHead value optimistic", "isready", until="readyok")
        heard = engine.ask(f"setoption name {option}", "isready", until="readyok")
        assert heard[0].startswith(answer)
        engine.end()
    assert (model.policy_head.chosen, model.value_head.chosen) == ("optimistic", "winner")


@pytest.mark.parametrize("smolgen", [True, False])
def test_its_attention_is_shown(tmp_path: Path, smolgen: bool) -> None:
    net, model, _ = opened(tmp_path, smolgen=smolgen)
    board, seen = chess.Board("r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R w KQkq - 4 4"), list[torch.Tensor]()
    model.tower[1].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    found = net.attention(board)
    assert found.shape == (3, 4, 64, 64)
    encoder, x = cast(Any, model.tower[1]), seen[0].flatten(2).transpose(1, 2)
    query, key = (layer(x).view(64, 4, 6).transpose(0, 1) for layer in encoder.qkv[:2])
    scores = query @ key.transpose(1, 2) / 6**0.5
    if smolgen:
        scores += encoder.shared[0](encoder.smolgen(x)).view(4, 64, 64)
    np.testing.assert_allclose(found[1], scores.softmax(2).numpy(), atol=1e-5)
    cast(Any, model.stem).embed[0].weight[:, 108] = 0  # of the plane that says who is to move
    turned, mirrored = np.arange(64) ^ 56, net.attention(board.mirror())
    np.testing.assert_allclose(mirrored[:, :, turned][:, :, :, turned], net.attention(board), atol=1e-5)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # layers, options, reason
    ({"q_w": np.ones(700)}, {}, "encoder.0.mha.q_w has 700 values, expected the shape (24, 32)"),
    ({"ip_emb_w": np.ones(112 * 32)}, {}, "ip_emb_w has 3,584 values, expected the shape (32, 176)"),
    ({"preproc_b": np.ones(321)}, {"embedding": 2}, "ip_emb_preproc_b has 321 values, expected the shape (-1, 64)"),
    ({"smolgen_w": np.ones(5000)}, {}, "smolgen_w has 5,000 values, expected the shape (4096, -1)"),
    ({"smolgen_w": np.ones(4096)}, {}, "encoder.0.mha.smolgen.dense2_b has 24 values, expected the shape (4,)"),
    ({"mha": [(9, b"\x08\x01")]}, {"smolgen": False}, "encoder.0.mha.smolgen without smolgen_w"),
    ({"headcount": 5}, {}, "headcount 5 does not divide the 24 values of encoder.0.mha.q_b"),
    ({"headcount": 0}, {}, "headcount 0 does not divide"),
    ({"headcount": 1 << 40}, {}, "headcount 1099511627776 does not divide"),
    ({"weights": [(34, np.ones(32))]}, {}, "ip_add_gate has 32 values, expected the shape (32, 64)"),
    ({"weights": [(34, NAN)]}, {}, "ip_add_gate has values that are not finite"),
    ({"mha": [(10, np.ones(4))]}, {}, "unsupported: encoder.0.mha.rpe_q"),
    ({"weights": [(2, b"\x0a\x00")]}, {}, "unsupported: an attention body with residual"),
    ({"weights": [(21, b"\x0a\x00")]}, {}, "unsupported: pol_encoder"),
    ({"weights": [(45, b"\x0a\x00")]}, {}, "no policy head 'vanilla', it has none"),
    ({}, {"form": {4: 2}}, "with another policy"),
    ({}, {"form": {10: 3}}, "unsupported: input_embedding format 3"),
    ({}, {"form": {9: 9}}, "unsupported: ffn_activation format 9"),
    ({}, {"form": {1: 3}}, "canonical planes"),
]


@pytest.mark.parametrize(("changed", "options", "reason"), BAD, ids=[reason for _, _, reason in BAD])
def test_a_file_that_is_of_no_use_is_named(
    tmp_path: Path, changed: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=r"^made.pb.gz cannot be read as an Lc0 network: .*$") as error:
        opened(tmp_path, changed=changed, **options)
    assert reason in str(error.value)


def test_it_plays_and_teaches(tmp_path: Path) -> None:
    net, model, path = opened(tmp_path, embedding=2)
    moved, alone = net.evaluate(
        ["startpos moves g1f3 g8f6", "rnbqkb1r/pppppppp/5n2/8/8/5N2/PPPPPPPP/RNBQKB1R w KQkq - 2 2"]
    )
    assert abs(moved.value - alone.value) > 1e-4, "the history is seen"
    assert 64 * 2 * 24 * 32 * 3 * 4 < flops(net.model, net.task.input_planes) < 10 * 64 * 2 * 24 * 32 * 3 * 4
    assert len(dict(strength.gauntlet(net, [0], 2, plies=6, opponents={"made": net}))) > 1
    teaching = {"network": str(path), "features": 0.1, "layers": [[0, 2]]}
    config = cast(ChessConfig, load_config("demo", {"teacher": teaching}))
    teacher = ChessTeacher.of(net, config)
    rows = {name: torch.from_numpy(array) for name, array in positions(net, 16).items()}
    taught = teacher(rows, progress=0.5)
    torch.testing.assert_close(taught["teacher_wdl"], net.task.predict(model, rows)["wdl"])
    assert taught["teacher_features_0"].shape == (16, 32, 1)


# Our own


@pytest.mark.parametrize("form", OURS)
def test_a_network_is_written_and_read_back(form: str, tmp_path: Path) -> None:
    net, boards = made(form), games(24, 80)
    net.save_lc0(tmp_path / "net.pb.gz")
    back = cast(Net, matrixlib.load(tmp_path / "net.pb.gz", device="cpu"))
    assert back.task.config.model == net.task.config.model
    assert difference(net, back, boards) < 5e-3, "rounded to 16 bits"
    back.save_lc0(tmp_path / "again.pb.gz")
    assert difference(back, cast(Net, matrixlib.load(tmp_path / "again.pb.gz", device="cpu")), boards) < 1e-3


def test_a_file_with_several_heads_is_written_again(tmp_path: Path) -> None:
    net, model, _ = opened(tmp_path, **FORMS["soft st"])
    net.save_lc0(tmp_path / "again.pb.gz")
    back = cast(Net, matrixlib.load(tmp_path / "again.pb.gz", device="cpu"))
    for policy, value in (("vanilla", "winner"), ("soft", "st")):
        model.choose(policy, value)
        cast(AttentionNet, back.model).choose(policy, value)
        assert difference(net, back, games(8, 40)) < 2e-3


@pytest.mark.parametrize("form", OURS)
def test_it_keeps_the_task_contract(form: str) -> None:
    task: Any = get_task("chess").task(load_config("lc0_quick", {"model": small(form)}))
    check_task(task, stored(some_boards(23, seed=7)))


def test_bf16_gives_fp32_outputs_near_those_of_fp32() -> None:
    net = made("our smolgen")
    planes = net.planes([board.fen() for board in games(8, 40)])
    with torch.no_grad():
        exact = net.model(planes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net.model(planes)
    for name in ("policy", "value"):
        assert out[name].dtype == torch.float32
        torch.testing.assert_close(out[name], exact[name], rtol=0.1, atol=0.1 * float(exact[name].abs().max()))
        assert (out[name] == out[name].bfloat16().float()).float().mean() < 0.2


@pytest.mark.usefixtures("reports")
def test_it_learns_a_batch_from_chance() -> None:
    model = small("our dense", ssl=["control"], moves_left={"channels": 8})
    with closing(run_of("learns", model, steps=4, batch_size=32)) as run:
        batch, task = run.batch(0), run.task
        assert any(module in run.model.edges() for module in run.model.moves_left_head.modules()), "as Adam has it"
        assert task.counts(batch)["moves_left"] == batch["moves_left"].gt(0).sum() > 16
        optimizer, chance = torch.optim.AdamW(run.model.parameters(), 3e-3), task.bounds(batch)
        first = {name: loss.item() for name, loss in run.losses(batch).items()}
        for name, loss in first.items():
            at_chance = chance[name][0] / task.counts(batch)[name]
            assert loss == pytest.approx(at_chance, rel=0.1, abs=0.05), name
        for _ in range(120):
            optimizer.zero_grad()
            losses = run.losses(batch)
            torch.stack(list(losses.values())).sum().backward()
            optimizer.step()
        for name in ("policy", "value", "moves_left"):
            floor = chance[name][1] / task.counts(batch)[name]
            assert losses[name].item() - floor < 0.2 * (first[name] - floor), name


@pytest.mark.usefixtures("reports")
def test_a_run_begins_with_a_file_and_keeps_frozen_parts(tmp_path: Path) -> None:
    made("our smolgen").save_lc0(tmp_path / "net.pb.gz")
    source = cast(Net, matrixlib.load(tmp_path / "net.pb.gz", device="cpu"))
    options = {"init": str(tmp_path / "net.pb.gz"), "freeze": ["stem", "tower.0"], "steps": 4, "batch_size": 16}
    with pytest.raises(RunError, match=r"train.init: .* is not of this network.*model.encoder.smolgen 16, not 0"):
        run_of("other", small(encoder={"smolgen": 0}, ssl=[]), **options)
    with closing(run_of("begun", small(ssl=[]), **options)) as run:
        before = deepcopy(run.trainer.model.state_dict())
        assert all(torch.equal(before[name], value) for name, value in source.model.state_dict().items())
        next(stats for stats in run.train() if stats.step == 2)
    with closing(run_of("begun", small(ssl=[]), **options)) as run:
        assert [stats.step for stats in run.train()][-1] == 4
        for name, value in run.trainer.model.named_parameters():
            assert torch.equal(value, before[name]) == name.startswith(("stem.", "tower.0.")), name
    net = cast(Net, matrixlib.load(run.folder, device="cpu"))
    net.save_lc0(tmp_path / "trained.pb.gz")
    back = cast(Net, matrixlib.load(tmp_path / "trained.pb.gz", device="cpu"))
    assert difference(net, back, games(8, 40)) < 5e-3 < difference(net, source, games(8, 40))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"encoder": {"heads": 5}}, "encoder.heads 5 does not divide channels 32; use one of"),
    ({"channels": 40}, "channels 40 and encoder.smolgen 0 must be multiples of 16"),
    ({"encoder": {"smolgen": 20}}, "channels 32 and encoder.smolgen 20 must be multiples of 16"),
    ({"encoding": "oriented"}, "trunk encoder needs encoding lc0"),
    ({"blocks": 0}, "blocks above 0"),
    ({"policy": {"kind": "dense"}}, "with encoding lc0 set model.policy.kind attention"),
    ({"dropout": 0.1, "droppath": 0.1}, "with encoding lc0 set model.dropout 0.0, model.droppath 0.0"),
    ({"value": {"hidden": 64}}, "with encoding lc0 set model.value.hidden 128"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_wrong_options_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("lc0_quick", {"model": small("our map", **changes)})
