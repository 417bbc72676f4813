"""Networks of Lc0: what Lc0 itself says of 44 positions, their files, and the history that search and UCI hand over."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import chess
import lc0_files
import numpy as np
import pytest
import torch
from cells import run_notebook

import matrixlib
from matrixlib.data.shards import file_hash
from matrixlib.play.game import uniform
from matrixlib.play.match import Choice, Turn, play_pairs, random_openings, random_player
from matrixlib.play.search import Search
from matrixlib.runs import browse
from matrixlib.tasks import load
from matrixlib.tasks.chess.evaluate import strength
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.lc0 import network, weights
from matrixlib.tasks.chess.lc0.moves import move_name
from matrixlib.tasks.chess.model import flops
from matrixlib.tasks.chess.records import batch_history, from_boards, positions_before
from matrixlib.tasks.chess.task import packed_state


@pytest.fixture(scope="module", params=["maia-1100", "maia-1900"])
def maia(request: pytest.FixtureRequest, shared: Path) -> tuple[str, Net]:
    path = shared / "maia" / f"{request.param}.pb.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the shared data")
    return request.param, matrixlib.load(path, device="cpu")


@pytest.fixture(scope="module")
def truth(shared: Path) -> list[dict[str, Any]]:
    folder = shared / "maia"
    if not folder.exists():
        pytest.skip("the shared data has no folder maia")
    return [row for name in ("truth.json", "truth_fen.json") for row in json.loads((folder / name).read_text())]


def text_of(row: dict[str, Any]) -> str:
    return " ".join(["fen", row["start_fen"], *(["moves", *row["moves"]] if row["moves"] else [])])


def test_it_says_what_lc0_says(maia: tuple[str, Net], truth: list[dict[str, Any]]) -> None:
    name, net = maia
    assert (net.parameters, len(truth)) == (866_499, 44)
    for row, evaluation in zip(truth, net.evaluate([text_of(row) for row in truth]), strict=True):
        expected = row["nets"][name]
        assert evaluation.moves.keys() == expected["policy"].keys(), row["tag"]
        moves = list(expected["policy"])
        ours = [evaluation.moves[move] for move in moves]
        np.testing.assert_allclose(ours, list(expected["policy"].values()), rtol=0, atol=5e-5, err_msg=row["tag"])
        np.testing.assert_allclose(evaluation.wdl, expected["wdl"], rtol=0, atol=1e-5, err_msg=row["tag"])


# Files


def opened(tmp_path: Path, **options: Any) -> Net:
    net = matrixlib.load(lc0_files.save(tmp_path / "made.pb.gz", lc0_files.network(**options)), device="cpu")
    assert isinstance(net, Net)
    assert net.sha256 == file_hash(tmp_path / "made.pb.gz"), "a changed anchor or teacher is refused by it"
    return net


@pytest.mark.parametrize("network_format", [1, 2, 3, 4], ids=["plain", "se", "plain heads", "se heads"])
def test_every_residual_form_is_read(tmp_path: Path, network_format: int) -> None:
    classical = network_format < 3
    net = opened(tmp_path, network_format=network_format, policy=1 if classical else 2, value=1 if classical else 2)
    (evaluation,) = net.evaluate("startpos moves e2e4")
    assert len(evaluation.moves) == 20
    assert sum(evaluation.moves.values()) == pytest.approx(1, abs=1e-5)
    assert -1 <= evaluation.value <= 1
    assert (evaluation.wdl is None) == classical
    filters, units, products = 4, 2, 64 * 2  # of a square: multiply and add
    tower = products * 9 * (112 * filters + 2 * filters**2) + 2 * 3 * filters * units * (network_format in (2, 4))
    value = products * filters * 2 + 2 * 5 * (128 + (1 if classical else 3))
    policy = products * (filters * 2 + 2 * 1858) if classical else products * 9 * (filters**2 + 80 * filters)
    assert flops(net.model, net.task.input_planes) == tower + value + policy, "of this network, not of ours"


def lc0_name(board: chess.Board, move: chess.Move) -> str:
    """A move as Lc0 calls it: ranks turned for Black, castling takes the rook, a knight's promotion has no letter."""
    to = move.to_square
    if board.is_castling(move):
        to = chess.square(7 if board.is_kingside_castling(move) else 0, chess.square_rank(to))
    flip = 0 if board.turn else 56
    promotion = None if move.promotion == chess.KNIGHT else move.promotion
    return chess.Move(move.from_square ^ flip, to ^ flip, promotion).uci()


def test_each_move_has_its_own_slot(tmp_path: Path) -> None:
    """By a policy without weights whose biases rise with the number of the slot."""
    parts = {4: np.zeros(1858 * 128), 5: np.arange(1858) / 400}
    net = opened(tmp_path, network_format=3, policy=1, parts=parts)
    number = {move_name(k): k for k in range(1858)}
    for fen in (
        "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1",
        "r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 0 1",
        "1n5k/P7/8/8/8/8/8/4R2K w - - 0 1",  # e1g1 of a rook
        "R6k/8/8/8/8/8/p7/1N5K b - - 0 1",
        "K6k/3Q4/8/8/4N3/8/8/8 w - - 0 1",
    ):
        board = chess.Board(fen)
        (evaluation,) = net.evaluate(fen)
        slots = np.array([number[lc0_name(board, chess.Move.from_uci(move))] for move in evaluation.moves])
        chances = np.log(list(evaluation.moves.values()))
        np.testing.assert_allclose(chances - chances[0], (slots - slots[0]) / 400, atol=1e-3, err_msg=fen)


def bad_files() -> dict[str, tuple[bytes, str]]:
    made, message = lc0_files.network, lc0_files.message
    whole = made()
    packed, head = gzip.compress(whole), whole[:5]
    unpacked = {
        "empty": (b"", "no header"),
        "a length that is not there": (head + b"\x52\xff\xff\xff\xff\x7f", "bytes after its message"),
        "a number without an end": (head + b"\xff" * 12, "unterminated integer"),
        "attention body": (made(network_format=3).replace(b"\x18\x03", b"\x18\x06", 1), "without encoder"),
        "attention policy": (made(policy=3, parts={21: b""}), "encoders in its policy"),
        "another input": (made(inputs=3), "canonical planes"),
        "another encoding": (made(encoding=2), "encoding 2"),
        "blocks of two widths": (made(further=(3,)), "size mismatch for tower.1.se.reduce"),
        "odd filters": (made(parts={1: message((1, np.ones(1009)))}), "not a multiple"),
        "too few moves": (
            made(3, 1, parts={4: np.ones(1857 * 128), 5: np.ones(1857)}),
            "size mismatch for policy_head.dense",
        ),
        "blocks without end": (head + lc0_files.field(10, b"\x12\x00" * 100_000), "more than 65,536 fields"),
        "not finite": (made(parts={8: b"\x0d\x00\x00\xc0\x7f" + lc0_files.field(3, bytes(10))}), "not finite"),
    }
    return {
        "cut": (packed[:-20], "cut short"),
        "damaged": (packed[:90] + b"\xff\xff" + packed[92:], "damaged|type|bytes|integer|weights"),
        **{name: (gzip.compress(data), reason) for name, (data, reason) in unpacked.items()},
    }


@pytest.mark.parametrize("kind", bad_files())
def test_a_file_that_is_of_no_use_is_named(tmp_path: Path, kind: str) -> None:
    data, reason = bad_files()[kind]
    (tmp_path / "bad.pb.gz").write_bytes(data)
    with pytest.raises(ValueError, match=f"bad.pb.gz cannot be read as an Lc0 network: .*({reason})"):
        matrixlib.load(tmp_path / "bad.pb.gz")


@pytest.mark.parametrize("data", [lc0_files.network(moves_left=0), lc0_files.attention_network()], ids=["conv", "body"])
def test_a_file_that_is_cut_anywhere_is_named(tmp_path: Path, data: bytes) -> None:
    """The archive, or the message in it."""
    packed, path = gzip.compress(data, mtime=0), tmp_path / "cut.pb.gz"
    for part in range(40):
        for whole in (packed[: part * len(packed) // 40], gzip.compress(data[: part * len(data) // 40])):
            path.write_bytes(whole)
            with pytest.raises(ValueError, match=r"^cut.pb.gz cannot be read as an Lc0 network: "):
                matrixlib.load(path, device="cpu")


def test_a_file_that_unpacks_to_more_than_any_network_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_BYTES", 1 << 20)
    (tmp_path / "bomb.pb.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    with pytest.raises(ValueError, match="unpacks to more than 1 MiB"):
        matrixlib.load(tmp_path / "bomb.pb.gz")


# History


def known_plies(game: ChessGame, states: Any, pasts: Any) -> list[int]:
    """How many plies lead to each state; every one of them is by a legal move."""
    for state, past in zip(states, pasts, strict=True):
        for new, old in pairwise([state, *past]):
            moves, _ = game.legal(old[None])
            reached = game.play(np.repeat(old[None], len(moves)), moves)
            assert np.isin(game.key(new[None]), game.key(reached))[0]
    return [len(past) for past in pasts]


def test_a_search_hands_over_what_came_before() -> None:
    game, known = ChessGame(), list[int]()

    def evaluate(states: Any, moves: Any, offsets: Any, past: Any) -> tuple[Any, Any]:
        known.extend(known_plies(game, states, [past.states[k, :n] for k, n in enumerate(past.known)]))
        return uniform(states, moves, offsets)

    evaluate.history = 3  # type: ignore[attr-defined]
    search = Search(game, evaluate, trees=2)
    board = chess.Board()
    for move in ("e2e4", "e7e5"):
        board.push_uci(move)
    search.reset(1, from_boards([board]), past=positions_before(board, 5))
    results = search.run(24)
    assert known[:2] == [0, 2]
    assert set(known) == {0, 1, 2, 3}
    known.clear()
    search.advance([0, 1], [result.best for result in results])
    search.run(24)
    assert min(known) >= 1


def test_a_match_hands_over_what_came_before() -> None:
    game, turns = ChessGame(), list[Turn]()
    anything = random_player(game, 1)

    def player(turn: Turn) -> Choice:
        turns.append(turn)
        return anything(turn)

    play_pairs(game, player, player, random_openings(game, 2, 0, 4), plies=5)
    assert len(turns) == 10
    for turn in turns:
        known_plies(game, turn.states, [past[::-1] for past in turn.past])
        assert all(game.key(past).tolist() == keys.tolist() for past, keys in zip(turn.past, turn.history, strict=True))


def test_history_that_is_missing_is_filled_up_as_lc0_does() -> None:
    def boards(texts: list[str], told: bool = True) -> torch.Tensor:
        positions = []
        for text in texts:
            fen, *moves = text.split(" moves ")
            positions.append(chess.Board(fen))
            for move in moves[0].split() if moves else ():
                positions[-1].push_uci(move)
        rows, past = from_boards(positions), batch_history(positions, network.HISTORY_PLIES)
        batch: dict[str, Any] = {"pieces": rows["pieces"], "state": packed_state(rows)}
        if told:
            batch |= {"past": past.states["pieces"], "known": past.known, "past_state": packed_state(past.states)}
        return network.planes({name: torch.from_numpy(array) for name, array in batch.items()})

    start = chess.STARTING_FEN
    stepped = "4k3/8/8/8/4P3/8/8/4K3 b - e3 0 1"  # nobody can capture there
    out = boards([start, f"{start} moves e2e4", start.replace(" w ", " b "), stepped, f"{stepped} moves e8e7"])
    for boards_known, planes in ((1, out[0]), (2, out[1])):
        assert planes[: 13 * boards_known].sum() == 32 * boards_known
        assert planes[13 * boards_known : 104].sum() == 0, "nothing before the start"
    assert (out[2, 13:104] == out[2, :13].repeat(7, 1, 1)).all(), "another start is repeated"
    pawn = out[3, 6::13, :, 4][:8]  # of White, seen from Black
    assert pawn[0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert all(one.tolist() == [0, 0, 0, 0, 0, 0, 1, 0] for one in pawn[1:]), "the pawn is back at home"
    pawn = out[4, 0::13, :, 4][:8]
    assert [one.argmax().item() for one in pawn] == [3, 3, 1, 1, 1, 1, 1, 1]
    # A row of the data tells of a double step only where the capture is legal; nothing else of what came before.
    capture = ["4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1", "4k3/8/8/3Pp3/8/8/8/4K3 w - e6 0 1", start]
    assert (boards(capture) == boards(capture, told=False)).all()
    assert boards(capture, told=False)[0, 19, 6, 4] == 1


# Everywhere


def test_a_file_can_be_browsed_and_met_in_a_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(browse, "load", lambda *args: opened.append(args) or load(*args))
    path = str(lc0_files.save(tmp_path / "made.pb.gz", lc0_files.network()))
    assert not run_notebook("browse", run=path, device="cpu", positions=2).failed
    assert browse.runs_like(path, [], "cpu") == [path]
    assert len(opened) == 1, "a file is read once, on the device that was asked for"
    with pytest.raises(ValueError, match="no curves to show against 'a'"):
        run_notebook("browse", run=path, against="a", device="cpu")
    net = matrixlib.load(path, device="cpu")
    assert isinstance(net, Net)
    matches = dict(strength.gauntlet(net, [0], 2, plies=6, opponents={"made": net}))
    assert list(matches)[-1] == ("network 0", "made 0")
    assert len(matches[("network 0", "made 0")].games) == 2


def test_opponents_of_one_name_stay_apart(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "made.pb.gz" for folder in "ab"] + [tmp_path / "own.pb.gz"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        lc0_files.save(path, lc0_files.network())
    given = [str(path) for path in paths]
    assert list(strength.load_opponents(given, "cpu")) == [*given[:2], "own.pb.gz"]
    with pytest.raises(ValueError, match=r"opponents: '.*own.pb.gz' is a duplicate"):
        strength.load_opponents([given[2], given[2]])
    with pytest.raises(ValueError, match="opponents: 3 is a duplicate or no path"):
        strength.load_opponents([given[2], 3])


def test_a_file_is_one_network(tmp_path: Path) -> None:
    path = lc0_files.save(tmp_path / "made.pb.gz", lc0_files.network())
    with pytest.raises(ValueError, match="without a checkpoint 'step_00000001'"):
        matrixlib.load(path, checkpoint="step_00000001")
    other = tmp_path / "other.npz"
    other.write_bytes(b"x")
    with pytest.raises(ValueError, match="no network that can be read"):
        matrixlib.load(other)
