"""Chess records: boards to records and back, policy indices, the mirror."""

import chess
import numpy as np
import pytest
from positions import hard_positions, random_positions

from matrixlib.tasks.chess import records


def batch_of(rows: records.Records) -> records.Batch:
    index, offset = records.legal_indices(rows)
    weight = (np.arange(len(index)) % 1000 + 1).astype(np.uint16)
    return {"records": rows, "policy_index": index, "policy_weight": weight, "policy_offset": offset}


def left_right(board: chess.Board) -> chess.Board:
    mirrored = board.transform(chess.flip_horizontal)
    mirrored.ep_square = None if board.ep_square is None else board.ep_square ^ 7
    return mirrored


def test_boards_come_back_from_records() -> None:
    for board in hard_positions() + random_positions(300, seed=21):
        row = records.from_boards([board])[0]
        again = records.to_board(row)
        assert again.fen() == board.fen()
        assert records.from_boards([again], repetition=row["repetition"])[0] == row


def test_the_layout_of_a_known_position() -> None:
    row = records.from_boards([chess.Board("rnbqkbnr/pppp1ppp/8/8/3Pp3/8/PPP1PPPP/RNBQKBNR b KQkq d3 7 3")])[0]
    assert row.dtype.itemsize == 55
    # Black's rook on a8 is ours on a1 (class 3), the knight beside it (1) is in the high nibble.
    assert row["pieces"][0] == 3 | 1 << 4
    assert row["pieces"][31] == 7 | 9 << 4
    assert (row["castling"], row["en_passant"], row["halfmove"], row["side"], row["ply"]) == (15, 3, 7, 1, 5)
    assert (row["result"], row["repetition"], row["source"], row["game"]) == (records.UNKNOWN, 0, 0, 0)
    half = records.from_boards([chess.Board("r3k2r/8/8/8/8/8/8/R3K2R b Qk - 0 1")])[0]
    assert half["castling"] == 1 | 8  # Black's own king's side, White's queen's side


def test_repetitions_are_counted_from_the_move_stack() -> None:
    board, repetitions = chess.Board(), []
    for _ in range(3):
        for move in ("g1f3", "g8f6", "f3g1", "f6g8"):
            repetitions.append(int(records.from_boards([board])[0]["repetition"]))
            board.push_uci(move)
    assert repetitions == [0] * 4 + [1] * 4 + [2] * 4
    board.push_uci("e2e4")
    assert records.from_boards([board])[0]["repetition"] == 0


def test_en_passant_is_stored_only_where_the_capture_is_legal() -> None:
    for board in hard_positions():
        expected = chess.square_file(board.ep_square) if board.has_legal_en_passant() else -1
        assert records.from_boards([board])[0]["en_passant"] == expected
    pinned = chess.Board("8/8/8/1KPp3r/8/8/8/7k w - - 0 50")
    pinned.ep_square = chess.D6
    assert records.from_boards([pinned])[0]["en_passant"] == -1


@pytest.mark.parametrize(
    "fen",
    [
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBN w KQkq - 0 1",
        "hello",
        "8/8/8/8/8/8/8/K7 w - - 0 1",
        "k6R/8/8/8/8/8/8/K7 w - - 0 1",
        "rk2r3/pppppppp/8/8/8/8/PPPPPPPP/RK2R3 w KQkq - 0 1",  # Chess960
        "nrk2r2/pppppppp/8/8/8/8/PPPPPPPP/NRK2R2 w FBfb - 0 1",
    ],
)
def test_bad_fens_are_named(fen: str) -> None:
    with pytest.raises(ValueError, match=fen):
        records.parse_fen(fen)


def test_a_fen_of_megabytes_is_a_short_message() -> None:
    with pytest.raises(ValueError, match="not a FEN: 6,000,000 characters, beginning with '8/8/") as caught:
        records.parse_fen("8/" * 3_000_000)
    assert len(str(caught.value)) < 200


def test_chess960_castling_is_refused() -> None:
    with pytest.raises(ValueError, match="Chess960"):
        records.from_boards([chess.Board.from_chess960_pos(0)])[0]


def test_every_legal_move_has_an_index_and_comes_back() -> None:
    """Both sides, every promotion, castling and en passant among them."""
    kinds = set()
    for board in hard_positions() + random_positions(500, seed=22):
        indices = set()
        for move in board.legal_moves:
            index = records.policy_index(move, board.turn)
            assert 0 <= index < records.POLICY_SIZE
            assert records.move_from_index(index, board) == move
            indices.add(index)
            kinds.add((board.turn, move.promotion, board.is_castling(move), board.is_en_passant(move)))
        assert len(indices) == board.legal_moves.count()
        values, offsets = records.legal_indices(records.from_boards([board])[0])
        assert values.tolist() == sorted(indices)
        assert offsets.tolist() == [0, len(indices)]
    for turn in (chess.WHITE, chess.BLACK):
        assert {(turn, kind, False, False) for kind in (None, 2, 3, 4, 5)} <= kinds
        assert {(turn, None, True, False), (turn, None, False, True)} <= kinds


@pytest.mark.parametrize(
    "uci, white", [("a1b4", True), ("0000", True), ("a2a8n", True), ("a7a8q", False), ("e4e5q", True)]
)
def test_moves_without_an_index_are_named(uci: str, white: bool) -> None:
    with pytest.raises(ValueError, match=uci):
        records.policy_index(chess.Move.from_uci(uci), white)


def test_indices_without_a_legal_move_are_refused() -> None:
    """Never another move instead, as Matrix0 gives."""
    board = chess.Board("8/8/8/1KPp3r/8/8/8/7k w - d6 0 50")
    legal = {records.policy_index(m, board.turn) for m in board.legal_moves}
    for index in [*range(records.POLICY_SIZE), -1, records.POLICY_SIZE, 10**9]:
        if index not in legal:
            with pytest.raises(ValueError, match=f"index {index}[ ,]"):
                records.move_from_index(index, board)
    with pytest.raises(ValueError, match=r"'c5d6', is not legal"):
        records.move_from_index(records.policy_index(chess.Move.from_uci("c5d6"), True), board)


def test_the_mirror_is_an_exact_symmetry_where_no_castling_is_left() -> None:
    some = [b for b in hard_positions() + random_positions(1200, seed=23) if not b.clean_castling_rights()]
    assert len(some) > 300
    rows = records.from_boards(some)
    batch = batch_of(rows)
    selection = np.arange(len(some)) % 4 != 0
    mirrored = records.mirror(batch, selection)
    expected = records.from_boards([left_right(b) if c else b for b, c in zip(some, selection, strict=True)])
    for name in ("pieces", "castling", "en_passant"):
        assert (mirrored["records"][name] == expected[name]).all(), name
    index, offset = records.legal_indices(expected)
    assert (mirrored["policy_offset"] == offset).all()
    assert (mirrored["policy_index"] == index).all()
    for i, board in enumerate(some):  # python-chess's own moves of the mirrored board, and the weights go along
        here = slice(offset[i], offset[i + 1])
        image = left_right(board) if selection[i] else board
        assert {records.policy_index(m, image.turn) for m in image.legal_moves} == set(index[here].tolist())
        table = records.mirror_index if selection[i] else np.arange(records.POLICY_SIZE)
        before = {
            int(table[k]): w for k, w in zip(batch["policy_index"][here], batch["policy_weight"][here], strict=True)
        }
        assert before == dict(zip(index[here].tolist(), mirrored["policy_weight"][here], strict=True))
    twice = records.mirror(mirrored, selection)
    for name, array in batch.items():
        assert np.array_equal(twice[name], array), name


def test_mirroring_with_castling_rights_is_refused() -> None:
    rows = records.from_boards([chess.Board("4k3/8/8/8/8/8/8/1K6 w - - 0 1"), chess.Board()])
    records.mirror(batch_of(rows), np.array([True, False]))
    with pytest.raises(ValueError, match="row 1 has castling rights"):
        records.mirror(batch_of(rows), np.array([True, True]))


def test_playing_turns_the_result() -> None:
    rows = records.from_boards([chess.Board()] * 4, result=[1, 0, -1, 2], wdl=(65535, 0, 0), source=3, game=9)
    after = records.play(rows, np.full(4, chess.E2 | chess.E4 << 6, np.uint16))
    assert after["result"].tolist() == [-1, 0, 1, 2]
    assert not after["wdl"].any()
    assert set(after["source"]) == {3}
    assert set(after["game"]) == {9}
    assert set(after["ply"]) == {1}
    assert records.to_board(after[0]).board_fen() == "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR"
