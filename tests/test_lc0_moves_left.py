"""The moves-left head of Lc0 networks: its targets from stored games, files and options. Training: test_lc0_history.py,
test_lc0_attention.py."""

from contextlib import closing
from pathlib import Path
from typing import Any, cast

import chess
import lc0_files
import numpy as np
import pytest
import torch
from test_lc0_history import META
from test_lc0_train import opened

import matrixlib
from matrixlib.config import ConfigError
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.imports import Part
from matrixlib.data.loader import Loader
from matrixlib.data.shards import BLOCK, Batch, select, write_shard
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.importers.pgn import Pgn
from matrixlib.tasks.chess.records import LAYOUT, from_boards

HEAD = {"moves_left": {"channels": 8}}
GAMES = """[Result "1-0"]

1. e4 e5 2. Qh5 Nc6 3. Bc4 Nf6 4. Qxf7# 1-0

[Result "0-1"]

1. d4 d5 2. c4 e6 0-1

[Result "*"]

1. c4 c5 2. Nc3 *

[Result "1/2-1/2"]

1. Nf3 Nf6 2. g3 1/2-1/2
"""
MATE, RESIGNED, UNFINISHED = [7, 6, 5, 4, 3, 2, 1], [4, 3, 2, 1], [0, 0, 0]
LAST = [0, 0, 0]  # of the shard: the game may go on in the next one


def read(text: str) -> Batch:
    return Pgn().read(Part(0, 0, text.encode())).batch


def targets(folder: Path, *parts: Batch, mirror: bool = False) -> list[float]:
    """Of all rows of these shards, as training gets them."""
    for number, part in enumerate(parts):
        write_shard(folder / f"{number}.npz", LAYOUT, part, META)
    task: Any = get_task("chess").task(load_config("lc0_quick", {"model": HEAD, "data": {"mirror": mirror}}))
    prepare = task.prepare if mirror else task.prepare_plain
    loader = Loader(Catalogue(folder).shards(), LAYOUT, 64, 0, prepare, last_of=task.last_of)
    return [value for batch in loader.sequential(64) for value in batch["moves_left"].tolist()]


@pytest.mark.parametrize("mirror", [False, True])
def test_targets_count_the_plies_to_the_end(tmp_path: Path, mirror: bool) -> None:
    """The move that ends a game included; without a result they are unknown."""
    assert targets(tmp_path, read(GAMES), mirror=mirror) == [*MATE, *RESIGNED, *UNFINISHED, *LAST]


def test_of_a_game_in_two_shards_the_second_part_is_known(tmp_path: Path) -> None:
    rows, count = read(GAMES), len(read(GAMES)["records"])
    parts = [select(rows, part, LAYOUT) for part in (np.arange(9), np.arange(9, count))]
    assert targets(tmp_path, *parts) == [*MATE, 0, 0, *RESIGNED[2:], *UNFINISHED, *LAST]


def test_positions_that_are_not_stored_count_by_their_ply(tmp_path: Path) -> None:
    """As in self-play with quick searches and the sample set; the last stored position is the game's last."""
    rows = select(read(GAMES), np.array([0, 1, 4, 5, 7, 10, 14, 15]), LAYOUT)
    assert targets(tmp_path, rows) == [6, 5, 2, 1, 4, 1, 0, 0]


def test_games_end_within_a_block_of_the_shard(tmp_path: Path) -> None:
    """A game across the border of two blocks is unknown in the first, whose checksum is no other's."""
    plies = 100
    count = BLOCK + 3 * plies
    rows = np.repeat(from_boards([chess.Board()], result=0), count)
    rows["game"], rows["ply"] = np.arange(count) // plies, np.arange(count) % plies
    empty = {"policy_offset": np.zeros(count + 1, "<i8"), "policy_index": np.zeros(0, "<u2")}
    found = np.array(targets(tmp_path, {"records": rows, **empty, "policy_weight": np.zeros(0, "<u2")}))
    border, last = BLOCK // plies * plies, (count - 1) // plies * plies
    expected = plies - rows["ply"].astype(float)
    expected[border:BLOCK] = expected[last:] = 0
    np.testing.assert_array_equal(found, expected)


def test_rows_without_their_game_are_unknown() -> None:
    task: Any = get_task("chess").task(load_config("lc0_quick", {"model": HEAD}))
    batch = read(GAMES)
    out = task.prepare_plain(batch, np.random.default_rng(0))
    assert not out["moves_left"].any()
    assert task.counts({name: torch.from_numpy(array) for name, array in out.items()})["moves_left"] == 0
    other: Any = get_task("chess").task(load_config("lc0_quick"))
    assert not other.last_of
    assert "moves_left" not in other.prepare_plain(batch, np.random.default_rng(0)).keys() | other.weights


@pytest.mark.usefixtures("reports")
def test_rows_with_hidden_squares_do_not_count() -> None:
    with closing(opened("hidden", {**HEAD, "ssl": ["piece"]})) as run:
        batch = run.batch(0)
        visible, known = batch["hidden"].eq(0).all(1), batch["moves_left"] > 0
        assert 0 < run.task.counts(batch)["moves_left"] == (visible & known).sum() < known.sum()


# Files and options

LAYERS = {12: lc0_files.message((1, np.ones(2 * 4)), (2, np.zeros(2))), 13: np.ones(3 * 128), 14: np.zeros(3)}
LAYERS |= {15: np.ones(3), 16: np.full(1, 7.5)}
LAYERS_OF_BODIES = {31: np.ones(2 * 32), 32: np.zeros(2), 13: np.ones(3 * 128), 14: np.zeros(3), 15: np.ones(3)}
LAYERS_OF_BODIES |= {16: np.full(1, 7.5)}
BAD: list[tuple[bool, dict[int, Any], int, str]] = [  # of an attention body, layers, format, reason
    (False, {12: b""}, 1, "moves_left_head.input.conv has 0 weights"),
    (False, {14: np.zeros(5)}, 1, "moves_left_head.fc1 has 384 weights for 5 biases"),
    (False, {13: np.ones(3 * 100)}, 1, "size mismatch for moves_left_head.fc1.weight"),
    (False, {15: np.ones(6), 16: np.zeros(2)}, 1, "size mismatch for moves_left_head.fc3.weight"),
    (False, {}, 2, "unsupported: moves_left format 2"),
    (True, {32: b""}, 1, "ip_mov_b has 0 values"),
    (True, {13: np.ones(3 * 100)}, 1, "ip1_mov_w has 300 values, expected the shape (3, 128)"),
    (True, {16: np.zeros(2)}, 1, "ip2_mov_b has 2 values, expected the shape (1,)"),
    (True, {}, 2, "unsupported: moves_left format 2"),
]


def stored(path: Path, body: bool, changed: dict[int, Any], form: int = 1) -> Path:
    if body:
        layers = list((LAYERS_OF_BODIES | changed).items())
        return lc0_files.save(path, lc0_files.attention_network(form={6: form}, changed={"weights": layers}))
    return lc0_files.save(path, lc0_files.network(parts=LAYERS | changed, moves_left=form))


@pytest.mark.parametrize(("body", "changed", "form", "reason"), BAD, ids=[reason for *_, reason in BAD])
def test_a_damaged_head_is_named(tmp_path: Path, body: bool, changed: dict[int, Any], form: int, reason: str) -> None:
    path = stored(tmp_path / "net.pb.gz", body, changed, form)
    with pytest.raises(ValueError, match=r"net.pb.gz cannot be read as an Lc0 network") as error:
        matrixlib.load(path, device="cpu")
    assert reason in str(error.value)


@pytest.mark.parametrize("body", [False, True])
def test_the_head_of_a_file_is_read(tmp_path: Path, body: bool) -> None:
    """And one that the format does not name ignored, as Lc0 does."""
    net = cast(Net, matrixlib.load(stored(tmp_path / "with.pb.gz", body, {}), device="cpu"))
    assert net.task.config.model.moves_left.model_dump() == {"channels": 2, "hidden": 3}
    planes = net.planes(chess.STARTING_FEN)
    plies, features = (net.model(planes, frozenset({name}))[name].detach() for name in ("moves_left", "features"))
    assert plies.tolist() == pytest.approx([7.5 + 9 * float(features.sum(1).relu().sum()) * 2 / 3], rel=1e-3)
    assert net.evaluate(chess.STARTING_FEN)[0].moves_left == pytest.approx(plies.item())
    other = cast(Net, matrixlib.load(stored(tmp_path / "without.pb.gz", body, {}, 0), device="cpu"))
    assert other.task.config.model.moves_left.channels == 0
    assert other.evaluate(chess.STARTING_FEN)[0].moves_left is None
    with pytest.raises(ValueError, match="the network has no head moves_left; it has features, policy"):
        other.model(planes, frozenset({"moves_left"}))


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="only networks with encoding lc0 have a moves-left head: set moves_left"):
        load_config("demo", {"model": HEAD})
    with pytest.raises(ConfigError, match=r"model.moves_left.channels"):
        load_config("lc0_quick", {"model": {"moves_left": {"channels": -1}}})
