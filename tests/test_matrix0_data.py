"""Matrix0's NPZ files: planes and policies as its encoder makes them (parity data, and our own `encoding: matrix0`)."""

import random
import zipfile
from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest
import torch
from positions import hard_positions, random_positions
from readers import Whole, read_file, same

from matrixlib.tasks.chess.importers import planes as matrix0_data
from matrixlib.tasks.chess.importers.planes import Matrix0Data
from matrixlib.tasks.chess.planes import move_map, planes
from matrixlib.tasks.chess.records import from_boards, policy_index

INDEX = move_map("matrix0").numpy()
Arrays = dict[str, np.ndarray]


def encode(boards: list[chess.Board]) -> np.ndarray:
    """Planes (N, 19, 8, 8) as Matrix0 has them."""
    records = from_boards(boards)
    names = ("castling", "en_passant", "halfmove", "repetition", "side", "ply")
    state = torch.tensor(np.stack([records[name].astype(np.int16) for name in names], axis=1))
    return planes({"pieces": torch.tensor(records["pieces"]), "state": state}, "matrix0").numpy()


def index_of(board: chess.Board, move: chess.Move) -> int:
    return int(INDEX[int(not board.turn), policy_index(move, board.turn)])


def arrays_of(boards: list[chess.Board], seed: int = 0) -> Arrays:
    """A file's arrays: random visit shares and values."""
    rng = random.Random(seed)
    pi = np.zeros((len(boards), 4672), np.float32)
    for row, board in enumerate(boards):
        visits = {move: rng.choice([0, 1, 7, 200]) for move in board.legal_moves}
        visits[rng.choice(list(visits))] += 1
        for move, count in visits.items():
            pi[row, index_of(board, move)] = count / sum(visits.values())
    z = np.array([rng.uniform(-1, 1) for _ in boards], np.float32)
    return {"s": encode(boards), "pi": pi, "z": z}


def write(folder: Path, arrays: Arrays, name: str = "selfplay.npz") -> Path:
    path = folder / name
    np.savez_compressed(path, **arrays)
    return path


BOARDS = [board for board in hard_positions() + random_positions(200, 3) if any(board.legal_moves)]


def check(whole: Whole, boards: list[chess.Board], arrays: Arrays) -> None:
    records = whole.batch["records"]
    assert len(records) == len(boards), whole.refused[:2]
    for row, (board, found) in enumerate(zip(boards, whole.boards(), strict=True)):
        pi = arrays["pi"][row]
        passing = [pi[index_of(board, move)] for move in board.legal_moves if board.is_en_passant(move)]
        known = any(passing) or ("legal_mask" in arrays and passing)
        want = board.copy(stack=False)
        if not known:
            want.ep_square = None
        assert found.epd(en_passant="legal") == want.epd(en_passant="legal")
        assert found.halfmove_clock == min(board.halfmove_clock, 99)
        assert records["ply"][row] == min(board.fullmove_number - 1, 198) * 2 + (not board.turn)
        moves = {move.uci(): float(pi[index_of(board, move)]) for move in board.legal_moves}
        policy = whole.policy(row)
        assert policy.keys() == {uci for uci, share in moves.items() if share > 0}
        assert all(abs(weight / 65535 - moves[uci]) < 4e-3 for uci, weight in policy.items())  # rounding
        win, _, loss = records["wdl"][row] / 65535
        assert win - loss == pytest.approx(float(np.clip(arrays["z"][row], -1, 1)), abs=1e-4)
        assert min(win, loss) == 0


@pytest.mark.parametrize("mask", [False, True])
def test_positions_policies_and_values(tmp_path, mask):
    arrays = arrays_of(BOARDS)
    if mask:
        arrays["legal_mask"] = np.zeros((len(BOARDS), 4672), np.uint8)
        for row, board in enumerate(BOARDS):
            arrays["legal_mask"][row, [index_of(board, move) for move in board.legal_moves]] = 1
    whole = read_file(Matrix0Data(), write(tmp_path, arrays))
    check(whole, BOARDS, arrays)
    assert (whole.entries, whole.refused) == (len(BOARDS), [])
    assert whole.parts == 2
    assert len(set(whole.batch["records"]["game"])) == 1
    assert (whole.batch["records"]["result"] == 2).all()


def test_parity_with_matrix0s_own_encoder(shared: Path, tmp_path):
    with np.load(shared / "parity" / "parity.npz") as data:
        s, flat, offset = data["planes"], data["legal_flat"], data["legal_offsets"]
    fens = (shared / "parity" / "positions.fen").read_text().splitlines()
    pi, mask = np.zeros((len(s), 4672), np.float32), np.zeros((len(s), 4672), np.uint8)
    for row in range(len(s)):
        mask[row, flat[offset[row] : offset[row + 1]]] = 1
        pi[row] = mask[row] / max(mask[row].sum(), 1)
    arrays = {"s": s, "pi": pi, "z": np.zeros(len(s), np.float32), "legal_mask": mask}
    whole = read_file(Matrix0Data(), write(tmp_path, arrays))
    over = [row for row, fen in enumerate(fens) if not any(chess.Board(fen).legal_moves)]
    assert [item.entry for item in whole.refused] == over == [19]
    left = [row for row in range(len(fens)) if row not in over]
    check(whole, [chess.Board(fens[row]) for row in left], {name: array[left] for name, array in arrays.items()})


def test_a_self_play_file_knows_its_result(tmp_path):
    boards = [chess.Board(), chess.Board("rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1")]
    arrays = arrays_of(boards)
    for white in (1, 0, -1):
        meta = {"meta_result": np.array([white], np.float32), "meta_moves": np.array([2], np.int32)}
        records = read_file(Matrix0Data(), write(tmp_path, arrays | meta)).batch["records"]
        assert records["result"].tolist() == [white, -white]


def test_a_result_that_unpacks_to_far_more_is_not_read(tmp_path, monkeypatch):
    path = write(tmp_path, arrays_of(BOARDS[:1]) | {"meta_result": np.zeros(10**5)})
    names, whole = [], zipfile.ZipFile.open

    def watched(self: zipfile.ZipFile, name: Any, *mode: Any, **options: Any) -> Any:
        names.append(name)
        return whole(self, name, *mode, **options)

    monkeypatch.setattr(zipfile.ZipFile, "open", watched)
    assert read_file(Matrix0Data(), path).batch["records"]["result"].tolist() == [2]
    assert "s.npy" in names
    assert "meta_result.npy" not in names


def test_other_names_types_and_shapes(tmp_path):
    boards = BOARDS[:5]
    arrays = arrays_of(boards)
    other = {
        "positions": arrays["s"].astype(np.float64),
        "policy_targets": arrays["pi"],
        "values": arrays["z"][:, None],
    }
    arrays["s"] = np.asfortranarray(arrays["s"])
    plain = read_file(Matrix0Data(), write(tmp_path, arrays, "a.npz")).batch
    found = read_file(Matrix0Data(), write(tmp_path, other, "b.npz")).batch
    plain["records"]["game"] = found["records"]["game"]
    assert same(plain, found)


# What can't be used


FAULTS: dict[str, tuple[str, Any, Any]] = {  # what the reader finds -> array, where in a row, value
    "planes are not Matrix0's": ("s", (3, 2, 2), 0.5),
    "not a position of chess": ("s", slice(0, 12), 0),
    "castling without king or rook": ("s", 13, 1),
    "value is not from -1 to 1": ("z", (), float("nan")),
    "policy is negative or not finite": ("pi", 5, float("inf")),
    "policy does not sum to 1": ("pi", ..., 0),
    "policy on illegal moves": ("pi", 63 * 73 + 7, 0.005),
}
PLAIN = chess.Board("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 3 40")


def test_every_row_is_accounted_for(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix0_data, "PART_ROWS", 3)
    faults = ["", *FAULTS, "", "", *reversed(FAULTS)]
    arrays = arrays_of([PLAIN] * len(faults))
    for row, fault in enumerate(faults):
        if fault:
            array, where, value = FAULTS[fault]
            arrays[array][(row, *where) if isinstance(where, tuple) else (row, where)] = value
    whole = read_file(Matrix0Data(), write(tmp_path, arrays))
    assert (whole.entries, whole.stored) == (len(faults), faults.count(""))
    assert {item.entry: item.reason for item in whole.refused} == {row: it for row, it in enumerate(faults) if it}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"s": np.zeros((2, 18, 8, 8), np.float32)}, r"'s' must be numbers of shape \(2, 19, 8, 8\)"),
        ({"pi": np.zeros((3, 4672), np.float32)}, r"'pi' must be numbers of shape \(2, 4672\)"),
        ({"z": np.zeros((), np.float32)}, r"'z' must be numbers of shape"),
        ({"z": np.array([None, 1])}, r"Object arrays cannot be loaded"),
        ({"z": np.array(["a", "b"])}, r"'z' must be numbers"),
        ({"z": None}, r"no array 'z' \(or value, values, value_targets\)"),
    ],
)
def test_arrays_of_another_shape_are_named(tmp_path, change, message):
    arrays = {name: array for name, array in (arrays_of([PLAIN] * 2) | change).items() if array is not None}
    with pytest.raises(ValueError, match=r"selfplay\.npz.*" + message):
        list(Matrix0Data().parts(write(tmp_path, arrays)))


def test_damage_is_found_before_any_row_is_handed_over(tmp_path, monkeypatch):
    path = write(tmp_path, arrays_of([PLAIN] * 40))
    whole = path.read_bytes()
    monkeypatch.setattr(matrix0_data, "PART_ROWS", 8)
    want = [part.data for part in Matrix0Data().parts(path)]
    turned = [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in range(60, len(whole), 97)]
    found = 0
    for data in (whole[:1000], b"PK\x03\x04", b"", *turned):
        path.write_bytes(data)
        try:
            parts = list(Matrix0Data().parts(path))
        except ValueError as error:
            found += 1
            assert "selfplay.npz" in str(error)  # noqa: PT017
        else:  # a time stamp or the like
            assert [part.data for part in parts] == want
    assert found > 30
