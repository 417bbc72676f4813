"""Input planes of both encodings against slow, independent constructions."""

from pathlib import Path

import chess
import numpy as np
import pytest
import torch
from positions import hard_positions, random_positions

from matrixlib.tasks.chess import planes, records
from matrixlib.tasks.chess.blocks import LINE_WEIGHT, OpenLines, along_lines

ENCODINGS = ("oriented", "matrix0")
STATE = ("castling", "en_passant", "halfmove", "repetition", "side", "ply")


def packed(rows: records.Records) -> dict[str, torch.Tensor]:
    """Tensors of the packed batch."""
    state = np.stack([rows[name].astype(np.int16) for name in STATE], axis=1)
    return {"pieces": torch.from_numpy(rows["pieces"].copy()), "state": torch.from_numpy(state)}


def boards() -> list[chess.Board]:
    return hard_positions() + random_positions(300, seed=41)


def oriented(board: chess.Board, repetition: int) -> np.ndarray:
    """(19, 8, 8) of the board of the side to move, which `Board.mirror` turns into White's."""
    upright = board if board.turn else board.mirror()
    x = np.zeros((19, 8, 8), np.float32)
    for square, piece in upright.piece_map().items():
        plane = piece.piece_type - 1 + (0 if piece.color else 6)
        x[plane, chess.square_rank(square), chess.square_file(square)] = 1
    x[12] = repetition / 2
    x[13] = upright.has_kingside_castling_rights(chess.WHITE)
    x[14] = upright.has_queenside_castling_rights(chess.WHITE)
    x[15] = upright.has_kingside_castling_rights(chess.BLACK)
    x[16] = upright.has_queenside_castling_rights(chess.BLACK)
    if upright.has_legal_en_passant():
        assert upright.ep_square is not None
        x[17, chess.square_rank(upright.ep_square), chess.square_file(upright.ep_square)] = 1
    x[18] = np.float32(board.halfmove_clock) / np.float32(100)
    return x


def test_oriented_planes() -> None:
    some = boards()
    repetition = [i % 3 for i in range(len(some))]
    x = planes.planes(packed(records.from_boards(some, repetition=repetition)), "oriented")
    assert x.shape == (len(some), planes.PLANES, 8, 8)
    assert x.dtype == torch.float32
    for i, board in enumerate(some):
        assert np.array_equal(x[i].numpy(), oriented(board, repetition[i])), board.fen()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_open_lines(encoding: str) -> None:
    some = hard_positions() + random_positions(20, seed=43)
    x = planes.planes(packed(records.from_boards(some)), encoding)
    lines = OpenLines()(x)
    seen = along_lines(x[:, :12], 4, lines).flatten(2)
    for row, board in enumerate(some):
        occupied = int((board if encoding == "matrix0" or board.turn else board.mirror()).occupied)
        occupied = chess.flip_vertical(occupied) if encoding == "matrix0" else occupied
        for square in range(64):
            rank, file = (chess.BB_RANK_ATTACKS, chess.BB_RANK_MASKS), (chess.BB_FILE_ATTACKS, chess.BB_FILE_MASKS)
            for line, ways in enumerate(((rank, file), ((chess.BB_DIAG_ATTACKS, chess.BB_DIAG_MASKS),))):
                attacks = chess.SquareSet(sum(table[square][masks[square] & occupied] for table, masks in ways))
                assert (lines[line][row, square] == LINE_WEIGHT).tolist() == attacks.tolist(), board.fen()
    channels = x[:, :12].flatten(2)
    torch.testing.assert_close(seen[:, :4], torch.einsum("bij,bcj->bci", lines[0], channels[:, :4]))
    torch.testing.assert_close(seen[:, 4:8], torch.einsum("bij,bcj->bci", lines[1], channels[:, 4:8]))
    assert torch.equal(seen[:, 8:], channels[:, 8:])


def test_matrix0_parity(shared: Path) -> None:
    """The recorded output of Matrix0's own encoder, to the last bit, and its legal moves."""
    fens = (shared / "parity" / "positions.fen").read_text().splitlines()
    recorded = np.load(shared / "parity" / "parity.npz")
    rows = records.from_boards([chess.Board(fen) for fen in fens])
    assert np.array_equal(planes.planes(packed(rows), "matrix0").numpy(), recorded["planes"])
    table = planes.move_map("matrix0").numpy()
    index, offset = records.legal_indices(rows)
    ends = recorded["legal_offsets"]
    assert np.array_equal(offset, ends)
    for i, row in enumerate(rows):
        ours = table[row["side"]][index[offset[i] : offset[i + 1]]]
        assert sorted(ours) == sorted(recorded["legal_flat"][ends[i] : ends[i + 1]].tolist()), fens[i]


def test_move_maps() -> None:
    tables = torch.cat([planes.move_map(encoding) for encoding in ENCODINGS])
    assert torch.equal(tables.sort(dim=1).values, torch.arange(4672).repeat(4, 1))
    assert torch.equal(planes.move_map("oriented")[1], torch.arange(4672))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_hidden_squares_vanish_from_the_piece_planes_alone(encoding: str) -> None:
    some = boards()
    batch = packed(records.from_boards(some))
    rng = np.random.default_rng(42)
    bits = rng.random((len(some), 8, 8)) < 0.3
    bits[::2] = False
    hidden = torch.from_numpy(np.packbits(bits, axis=2, bitorder="little")[:, :, 0])
    full, masked = planes.planes(batch, encoding), planes.planes({**batch, "hidden": hidden}, encoding)
    for i, board in enumerate(some):
        # bits are by oriented rank; Matrix0's rows run from rank 8 of the absolute board
        squares = bits[i, ::-1] if encoding == "matrix0" and board.turn else bits[i]
        assert torch.equal(masked[i, :12], full[i, :12] * torch.from_numpy(~squares)), board.fen()
    assert torch.equal(masked[:, 12:], full[:, 12:])


def test_long_games_and_clocks_are_clipped_as_matrix0_does() -> None:
    rows = records.from_boards([chess.Board("4k3/8/8/8/8/8/8/4K2R w - - 250 400")] * 2, ply=[799, 65535])
    x = planes.planes(packed(rows), "matrix0")
    assert x[:, 17].unique().tolist() == [1]
    assert x[:, 18].unique().tolist() == [1]  # ply 65535 is -1 as int16
    assert planes.planes(packed(rows), "oriented")[0, 18].unique().item() == pytest.approx(2.5)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_move_keys_are_from_and_to_squares_and_pieces_of_under_promotions(encoding: str) -> None:
    ends, place = planes.move_keys(encoding)
    table, width = planes.move_map(encoding), 64 + 3 * len(ends)
    promotions = set()
    for board in boards():
        side = int(not board.turn)
        flip = 56 if side and encoding == "oriented" else 0
        for move in board.legal_moves:
            index = int(table[side, records.policy_index(move, board.turn)])
            origin, key = divmod(int(place[index]), width)
            assert origin == move.from_square ^ flip
            if move.promotion in (None, chess.QUEEN):
                assert key == move.to_square ^ flip
            else:
                piece, end = divmod(key - 64, len(ends))
                assert (piece, int(ends[end])) == (move.promotion - 2, move.to_square ^ flip)
                promotions.add((side, move.promotion))
    assert len(promotions) == 6
    assert len(place[place > 0].unique()) == 1792 + 66 * (len(ends) // 8)
