"""From chunks to records, without an engine: targets, splits, duplicates; python-chess is the oracle."""

import math
import random
from collections import Counter
from pathlib import Path

import chess
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.data.shards import Shard
from matrixlib.tasks.chess.keys import keys_of
from matrixlib.tasks.chess.records import LAYOUT, RECORD, from_boards, move_from_index, policy_index, to_board
from matrixlib.tasks.chess.scores import wdl_of_shares
from matrixlib.tasks.chess.stockfish import games, labels, packing
from matrixlib.tasks.chess.stockfish import generator as sources
from matrixlib.tasks.chess.stockfish.client import MATE
from matrixlib.tasks.chess.stockfish.games import Game, Parameters
from matrixlib.tasks.chess.stockfish.labels import Label, levels, values, weights_of
from matrixlib.tasks.chess.stockfish.packing import pack

PARAMETERS = Parameters(seed=3, games_per_chunk=5, plies=90)


ENGINE = "Random 1"


def fake_label(_engine: object, board: chess.Board, _parameters: Parameters) -> Label:
    ours = labels.oriented(board)
    rng = random.Random(ours.epd())
    moves = [move.uci() for move in ours.legal_moves]
    rng.shuffle(moves)
    scores = sorted((rng.choice([rng.randint(-300, 300), MATE - 2, 3 - MATE]) for _ in moves), reverse=True)
    deep = rng.sample(moves, min(3, len(moves)))
    deep_scores = sorted((rng.randint(-300, 300) for _ in deep), reverse=True)
    win = rng.randint(0, 1000)
    loss = rng.randint(0, 1000 - win)
    return Label(tuple(moves), tuple(scores), tuple(deep), tuple(deep_scores), (win, 1000 - win - loss, loss))


def mates(board: chess.Board) -> list[chess.Move]:
    found = []
    for move in filter(board.gives_check, board.legal_moves):
        board.push(move)
        if board.is_checkmate():
            found.append(move)
        board.pop()
    return found


def fake_game(_engine: object, number: int, parameters: Parameters) -> Game:
    rng = random.Random(number // 2)  # every second game repeats the one before: duplicates
    board, moves, seen = chess.Board(), [], Counter[str]()
    while True:
        seen[games.position_key(board)] += 1
        end = games.ending_of(board, seen[games.position_key(board)], parameters.plies)
        if end is not None:
            return Game(number, tuple(moves), (0,) * len(moves), *end)
        moves.append(rng.choice(mates(board) or list(board.legal_moves)))
        board.push(moves[-1])


def make_work(folder: Path, chunks: int) -> Path:
    """A work folder as `sources.generate` leaves it, played and labelled at random."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "play_game", fake_game)
        patch.setattr(sources, "label", fake_label)
        sources.open_folder(folder, PARAMETERS, ENGINE)
        for chunk in range(chunks):
            arrays = sources.make_chunk(None, chunk, PARAMETERS)
            np.savez(sources.chunk_path(folder, chunk), **arrays)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return make_work(tmp_path_factory.mktemp("random") / "work", 16)


@pytest.fixture(scope="module")
def packed(work, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    summary = pack(work, folder)
    shards = [Shard(path, LAYOUT) for path in sorted(folder.iterdir())]
    assert summary["shards"] == len(shards) > 0
    assert summary["train"] + summary["validation"] == sum(map(len, shards))
    assert summary["bytes_per_position"] < 250
    return [(shard, shard.gather(np.arange(len(shard)))) for shard in shards]


def test_mates_are_beyond_centipawns_and_shorter_ones_better():
    stored = np.array([-MATE, 1 - MATE, 9 - MATE, -20000, -50, 0, 50, 20000, MATE - 9, MATE - 2, MATE - 1])
    made = values(stored)
    assert (np.diff(made) > 0).all()
    assert made[4:7].tolist() == [-50, 0, 50]
    assert made[8] - made[7] >= labels.TEMPERATURE * 3


def test_weights_are_a_softmax_at_fifty_centipawns():
    level = np.array([0, 10, 20, 81, 0, 0, 7, 0], dtype=np.uint8)  # rows of 4, 3 and 1 moves
    offset = np.array([0, 4, 7, 8])
    weight = weights_of(level, offset).astype(np.int64)
    assert np.add.reduceat(weight, offset[:-1]).tolist() == [65535] * 3
    expected = np.exp(-np.array([0, 50, 100]) / 50)
    np.testing.assert_allclose(weight[:3] / 65535, expected / expected.sum(), atol=3e-5)
    assert (weight[3], weight[7]) == (0, 65535)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, labels.NO_WEIGHT), min_size=0, max_size=40), min_size=1, max_size=12))
def test_weights_of_any_levels_sum_to_all_and_keep_the_order(rows):
    rows = [[0, *row] for row in rows]
    offset = np.cumsum([0, *map(len, rows)])
    weight = weights_of(np.concatenate(rows).astype(np.uint8), offset).astype(np.int64)
    for row, start, stop in zip(rows, offset[:-1], offset[1:], strict=True):
        made = weight[start:stop]
        assert made.sum() == 65535
        assert made[0] == made.max()
        order = np.argsort(row[1:], kind="stable")
        assert (np.diff(made[1:][order]) <= 0).all()


def chunk_of(scores: list[int], deep: list[int], deep_scores: list[int]) -> dict[str, np.ndarray]:
    return {
        "legal_offset": np.array([0, len(scores)], "<u4"),
        "score": np.array(scores, "<i2"),
        "deep": np.array([deep], "u1"),
        "deep_score": np.array([deep_scores], "<i2"),
    }


def test_the_deep_search_overrules_the_shallow_one():
    """The shallow favourite (rank 0) is not among the deep lines: it falls behind the last of them."""
    level = levels(chunk_of([500, 100, 90, 80, -40], [1, 2, 3], [60, 40, 10]))
    assert level.tolist() == [12, 0, 4, 10, 20]
    assert levels(chunk_of([30, 20], [1, 0, 255], [50, 0, 0])).tolist() == [10, 0]
    assert levels(chunk_of([30], [0, 255, 255], [-9, 0, 0])).tolist() == [0]
    mated = levels(chunk_of([3 - MATE, 1 - MATE], [0, 1, 255], [3 - MATE, 1 - MATE, 0]))
    assert mated.tolist() == [0, 100 // labels.STEP]


def test_wdl_sums_to_all():
    rng = np.random.default_rng(0)
    per_mille = rng.multinomial(1000, [0.3, 0.3, 0.4], size=500).astype("<u2")
    made = wdl_of_shares(per_mille).astype(np.int64)
    assert (made.sum(axis=1) == 65535).all()
    np.testing.assert_allclose(made / 65535, per_mille / 1000, atol=1e-4)


def test_every_legal_move_and_nothing_else(packed):
    checked = 0
    for _, batch in packed:
        rows = np.random.default_rng(0).permutation(len(batch["records"]))[:300]
        for row in rows:
            board = to_board(batch["records"][row])
            start, stop = batch["policy_offset"][row : row + 2]
            index = batch["policy_index"][start:stop].astype(int)
            assert (np.diff(index) > 0).all()
            assert set(index) == {policy_index(move, board.turn) for move in board.legal_moves}
            assert batch["policy_weight"][start:stop].sum(dtype=np.int64) == 65535
            checked += 1
    assert checked >= 400


def test_targets_are_those_of_the_label(packed):
    for _, batch in packed:
        for row in range(0, len(batch["records"]), 23):
            board = to_board(batch["records"][row])
            made = fake_label(None, board, PARAMETERS)
            start, stop = batch["policy_offset"][row : row + 2]
            best = int(batch["policy_index"][start:stop][batch["policy_weight"][start:stop].argmax()])
            move = move_from_index(best, board)
            flipped = move if board.turn else chess.Move(move.from_square ^ 56, move.to_square ^ 56, move.promotion)
            scores = dict(zip(made.deep_moves, made.deep_scores, strict=True))
            assert max(made.deep_scores) - scores[flipped.uci()] <= labels.STEP
            np.testing.assert_allclose(batch["records"]["wdl"][row] / 65535, np.array(made.wdl) / 1000, atol=1e-4)


def test_results_are_the_movers(work, packed):
    white = {}
    for _, chunk in sources.chunks(work):
        white |= dict(zip(chunk["game_id"].tolist(), chunk["result"].tolist(), strict=True))
    found = Counter[int]()
    for _, batch in packed:
        for record in batch["records"]:
            result = white[int(record["game"])]
            assert record["result"] == (-result if record["side"] and result != 2 else result)
            found[int(record["result"])] += 1
    assert found[2] > 0
    assert len(found) > 2


def canonical(board: chess.Board) -> str:
    """What python-chess says equal positions share; colours and, without castling rights, sides undone."""
    ours = board if board.turn else board.mirror()
    plain = ours.epd(en_passant="legal")
    if ours.castling_rights:
        return plain
    return min(plain, ours.transform(chess.flip_horizontal).epd(en_passant="legal"))


def test_no_position_twice_and_no_game_in_both_splits(work, packed):
    ids, names = {}, Counter[str]()
    for shard, batch in packed:
        ids.setdefault(shard.meta["split"], set()).update(batch["records"]["game"].tolist())
        names.update(canonical(to_board(record)) for record in batch["records"])
    assert max(names.values()) == 1
    assert set(ids) == {"train", "validation"}
    assert not ids["train"] & ids["validation"]
    made = sum(len(chunk["ply"]) for _, chunk in sources.chunks(work))
    assert len(names) < made  # the repeated games were found


def test_mirror_images_are_duplicates_unless_castling_is_possible():
    def key(fen: str) -> bytes:
        return keys_of(np.array([from_boards([chess.Board(fen)])[0]], RECORD))[0]

    plain = "6k1/5ppp/8/3pP3/8/8/5PPP/6K1 w - d6 0 30"
    board = chess.Board(plain)
    assert key(board.mirror().fen()) == key(plain)
    assert key(board.transform(chess.flip_horizontal).fen()) == key(plain)
    assert key(plain.replace(" d6 ", " - ")) != key(plain)
    castling = "4k3/8/8/8/8/8/8/4K2R w K - 0 30"
    assert key(castling) != key(castling.replace(" K ", " - "))
    assert key(castling) != key(chess.Board(castling).transform(chess.flip_horizontal).fen())


def test_packing_again_gives_the_same_bytes(work, packed, tmp_path):
    pack(work, tmp_path)
    for path, (shard, _) in zip(sorted(tmp_path.iterdir()), packed, strict=True):
        assert path.read_bytes() == shard.path.read_bytes()
        assert shard.meta["generator"]["engine"] == ENGINE
        assert shard.meta["generator"]["parameters"]["plies"] == PARAMETERS.plies


def test_a_folder_with_shards_is_not_packed_into(work, tmp_path):
    pack(work, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds shards already: give another folder"):
        pack(work, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_moves_that_are_not_legal_are_refused(work):
    _, chunk = next(iter(sources.chunks(work)))
    chunk["legal"][0] = sources.move_code("a1h8")
    with pytest.raises(ValueError, match=r"not legal: delete the chunk"):
        packing.convert(chunk, set())


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"call generator\.generate first"):
        pack(tmp_path, tmp_path / "out")
    sources.open_folder(tmp_path / "work", PARAMETERS, ENGINE)
    with pytest.raises(ValueError, match="no finished chunk"):
        pack(tmp_path / "work", tmp_path / "out")


def test_the_levels_are_exact_powers():
    for level in range(labels.NO_WEIGHT):
        assert abs(labels.WEIGHTS[level] - 1e6 * math.exp(-level / 10)) <= 1
    assert labels.WEIGHTS[labels.NO_WEIGHT] == 0
