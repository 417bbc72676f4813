"""Lc0's attention bodies: what Lc0 itself says, heads by name, bad files, and use as teacher and player."""

from pathlib import Path
from typing import Any, cast

import chess
import chess.engine
import lc0_files
import numpy as np
import pytest
import torch
from networks import random_net
from test_lc0_train import PROMOTIONS, asked, games
from test_uci import Dialogue

import matrixlib
from matrixlib.runs.data import RunError
from matrixlib.runs.start import source_weights
from matrixlib.tasks import load_config
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


def opened(tmp_path: Path, **options: Any) -> tuple[Net, AttentionNet, Path]:
    path = lc0_files.save(tmp_path / "made.pb.gz", lc0_files.attention_network(**options))
    net = matrixlib.load(path, device="cpu")
    return cast(Net, net), cast(AttentionNet, net.model), path


@pytest.mark.parametrize("form", FORMS)
def test_lc0_says_the_same(form: str, lc0: str, tmp_path: Path) -> None:
    net, model, path = opened(tmp_path, **FORMS[form])
    boards = [*games(24, 80), *map(chess.Board, PROMOTIONS)]
    command = [lc0, f"--weights={path}", "--backend=eigen"]
    if " " in form and FORMS[form].get("several"):
        policy, value = form.split()
        model.choose(policy, value)
        command.append(f"--backend-opts=policy_head={policy},value_head={value}")
    likeliest, scores = list[float](), list[float]()
    with chess.engine.SimpleEngine.popen_uci(command) as engine:
        engine.configure({"VerboseMoveStats": True, "PolicyTemperature": 1.0, "UCI_ShowWDL": True, "ScoreType": "Q"})
        for board, ours in zip(boards, net.evaluate_boards(boards), strict=True):
            shares, expected, wdl = asked(engine, board)
            assert shares.keys() == ours.moves.keys()
            assert max(abs(shares[move] - ours.moves[move]) for move in shares) < 1e-3, board.fen()
            assert ours.value == pytest.approx(expected, abs=1e-3)
            assert ours.wdl is None or wdl == pytest.approx(ours.wdl, abs=1.6e-3), (
                "rounded to thousandths that sum to 1"
            )
            likeliest.append(max(shares.values()))
            scores.append(expected)
    assert np.median(likeliest) > 0.25
    assert np.std(scores) > 0.02, "neither moves nor positions are alike"


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
    assert model.chosen == ("optimistic", "winner")


@pytest.mark.parametrize("smolgen", [True, False])
def test_its_attention_is_shown(tmp_path: Path, smolgen: bool) -> None:
    net, model, _ = opened(tmp_path, smolgen=smolgen)
    board, seen = chess.Board("r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R w KQkq - 4 4"), list[torch.Tensor]()
    model.tower[1].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    found = net.attention(board)
    assert found.shape == (3, 4, 64, 64)
    encoder, x = cast(Any, model.tower[1]), seen[0]
    query, key = (layer(x).view(64, 4, 6).transpose(0, 1) for layer in encoder.qkv[:2])
    scores = query @ key.transpose(1, 2) / 6**0.5 + (encoder.smolgen(x)[0] if smolgen else 0)
    np.testing.assert_allclose(found[1], scores.softmax(2).numpy(), atol=1e-5)
    cast(Any, model.embed[0]).weight[:, 108] = 0  # of the plane that says who is to move
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
    with pytest.raises(RunError, match=r"made.pb.gz' has an attention body, so it can be played, not trained"):
        source_weights(str(path), load_config("lc0_quick"))
    with pytest.raises(ValueError, match="only residual networks are written: not an attention body"):
        net.save_lc0(tmp_path / "again.pb.gz")
