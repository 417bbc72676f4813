"""The history of training rows: the earlier rows of their game, as a board with its moves has it (python-chess)."""

import io
import random
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import chess
import chess.pgn
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import random_net
from test_lc0_train import opened

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.imports import Part
from matrixlib.data.loader import Loader
from matrixlib.data.shards import Batch, select, write_shard
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.chess.evaluate.held_out import agreement, held_out
from matrixlib.tasks.chess.evaluate.net import INPUTS, Net
from matrixlib.tasks.chess.game import training_batch
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.importers.pgn import Pgn
from matrixlib.tasks.chess.lc0.network import planes
from matrixlib.tasks.chess.records import LAYOUT, batch_history, from_boards, legal_indices, stored_history

META = {"source": "pgn", "generator": "test", "seed": 0, "split": "train", "created": "2026-01-02T03:04:05Z"}
PLIES = 7
LINES = (  # from the start or a FEN: castling of both sides, en passant, repetition, kings that move at once
    "1. e4 e5 2. Nf3 Nc6 3. Bc4 Bc5 4. O-O Nf6 5. d3 O-O 6. h3 h6 7. a3 a6 *",
    "1. d4 d5 2. Nc3 Nc6 3. Bf4 Bf5 4. Qd2 Qd7 5. O-O-O O-O-O 6. f3 f6 7. h3 h6 *",
    "1. e4 a6 2. e5 d5 3. exd6 cxd6 4. a3 b5 5. a4 b4 6. c4 bxc3 7. bxc3 Nf6 *",
    "1. Nf3 Nf6 2. Ng1 Ng8 3. Nf3 Nf6 4. Ng1 Ng8 5. Nf3 Nf6 6. e3 e6 7. d3 d6 *",
    "1. e4 e5 2. Ke2 Ke7 3. Ke1 Ke8 4. Nf3 Nf6 5. Nc3 Nc6 6. a3 a6 7. a4 a5 *",
)
STARTS = (
    ("4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1", "1... dxe3 2. Ke2 Kd7 3. Kxe3 Kd6 *"),
    ("4k3/7p/8/8/8/8/P7/4K3 b - - 3 40", "40... Kd7 41. a4 h5 42. a5 h4 43. a6 h3 44. a7 h2 45. a8=Q h1=N *"),
    ("8/P6k/8/8/8/8/p6K/8 w - - 0 60", "60. a8=R a1=Q 61. Rxa1 Kg6 62. Ra6+ Kf5 *"),
)


class Games(NamedTuple):
    """rows: stored rows in game order. boards: theirs, with their moves."""

    text: str
    rows: Batch
    boards: list[chess.Board]


def random_game(seed: int, plies: int) -> chess.pgn.Game:
    """Shuffling pieces is likely, so that positions come again; so are castling, en passant and what allows it."""
    rng, board = random.Random(seed), chess.Board()

    def rare(move: chess.Move) -> bool:
        board.push(move)
        allowed = board.has_legal_en_passant()
        board.pop()
        return allowed or board.is_en_passant(move) or board.is_castling(move)

    while len(board.move_stack) < plies and not board.is_game_over():
        moves = list(board.legal_moves)
        quiet = [move for move in moves if board.piece_type_at(move.from_square) != chess.PAWN]
        special = [move for move in moves if rare(move)]
        board.push(rng.choice(special or (quiet if quiet and rng.random() < 0.7 else moves)))
    game = chess.pgn.Game.from_board(board)
    if game.headers["Result"] == "*":
        game.headers["Result"] = "1/2-1/2"
    return game


def collected(texts: list[str]) -> Games:
    """Rows as the importer reads them, and python-chess's boards of the same games."""
    text, boards = "\n\n".join(texts), list[chess.Board]()
    file = io.StringIO(text)
    for game in iter(lambda: chess.pgn.read_game(file), None):
        boards += [node.parent.board() for node in game.mainline() if node.parent]
    read = Pgn().read(Part(0, 0, text.encode()))
    assert (read.stored, read.entries) == (len(texts), len(texts))
    ids = read.batch["records"]["game"]
    assert len(boards) == len(ids)
    return Games(text, read.batch, boards)


@pytest.fixture(scope="module")
def games() -> Games:
    texts = [f'[Event "line"]\n[Result "*"]\n\n{line}' for line in LINES]
    texts += [f'[Event "fen"]\n[SetUp "1"]\n[FEN "{fen}"]\n[Result "*"]\n\n{line}' for fen, line in STARTS]
    return collected(texts + [str(random_game(seed, 60)) for seed in range(40)])


def lc0(mirror: bool = False, **model: Any) -> Any:
    changes = {"model": {"history": True, "ssl": [], **model}, "data": {"mirror": mirror}}
    return get_task("chess").task(load_config("lc0_quick", changes))


def stored(folder: Path, *parts: Batch, before: int = PLIES) -> Batch:
    """All rows of these shards as a loader gathers them."""
    for number, part in enumerate(parts):
        write_shard(folder / f"{number:03d}.npz", LAYOUT, part, META)
    seen = list[Batch]()

    def look(batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
        seen.append(batch)
        return {"row": np.arange(len(batch["records"]))}

    rows = Catalogue(folder).shards()
    list(Loader(rows, LAYOUT, 64, 0, look, before=before).sequential(100_000))
    return seen[0]


def shown(task: Any, arrays: dict[str, np.ndarray]) -> torch.Tensor:
    return task.planes({name: torch.from_numpy(array) for name, array in arrays.items() if name != "hidden"})


def expected(task: Any, boards: list[chess.Board], known: Any = None) -> torch.Tensor:
    """Planes of boards with their moves. known: the latest plies that may be seen, default all."""
    rows, past = from_boards(boards), batch_history(boards, PLIES)
    past = past if known is None else past.__class__(past.states, np.asarray(known))
    return shown(task, task.inputs(rows, *legal_indices(rows), past))


def test_a_row_shows_what_a_board_with_its_moves_shows(games: Games, tmp_path: Path) -> None:
    task, batch = lc0(), stored(tmp_path, games.rows)
    out = task.prepare_plain(batch, np.random.default_rng(0))
    seen, wanted = shown(task, out), expected(task, games.boards)
    assert seen.shape == (len(games.boards), 112, 8, 8)
    assert torch.equal(seen, wanted)
    assert out["known"].tolist() == [min(len(board.move_stack), PLIES) for board in games.boards]
    for facts in (
        lambda b: b.turn,
        lambda b: not b.turn,
        lambda b: b.is_repetition(2),
        lambda b: b.has_legal_en_passant(),
    ):
        assert sum(map(facts, games.boards)) > 10
    alone = expected(task, games.boards, np.zeros(len(games.boards), np.int64))
    assert (seen != alone).flatten(1).any(1).float().mean() > 0.9, "without history they look otherwise"
    assert torch.equal(seen[:, 104:], alone[:, 104:])


def test_the_history_is_mirrored_with_its_row_or_neither(games: Games, tmp_path: Path) -> None:
    """Never where castling rights are left, now or in the history: no game has mirrored castling in it."""
    task, batch = lc0(mirror=True), stored(tmp_path, games.rows)
    plain, turned = expected(task, games.boards), list[torch.Tensor]()
    for seed in range(2):
        seen = shown(task, task.prepare(batch, np.random.default_rng(seed)))
        same, image = ((seen == other).flatten(1).all(1) for other in (plain, plain.flip(3)))
        assert (same | image).all()
        turned.append(image & ~same)
    rights = torch.tensor([bool(board.castling_rights) for board in games.boards])
    past = batch_history(games.boards, PLIES)
    before = torch.from_numpy((past.states["castling"] != 0).any(1))
    share = torch.stack(turned).float().mean(0)
    assert share[rights | before].sum() == 0
    assert (before & ~rights).sum() > 20
    assert 0.4 < share[~(rights | before)].mean() < 0.6


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_history_ends_where_a_row_is_missing(data: st.DataObject) -> None:
    """Of random games, random rows in random shards: what is known are the rows straight before in the same shard."""
    seeds = data.draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=4, unique=True))
    held = collected([str(random_game(seed, 20)) for seed in seeds])
    kept = data.draw(st.lists(st.booleans(), min_size=len(held.boards), max_size=len(held.boards)))
    places = np.flatnonzero(kept)
    if not len(places):
        return
    cuts = sorted(data.draw(st.sets(st.integers(1, len(places)), max_size=3)) - {len(places)})
    pieces = np.split(places, cuts)
    known = list[int]()
    for piece in pieces:
        steps = [0, *accumulate(np.diff(piece) == 1, lambda run, near: (run + 1) * near, initial=0)][1:]
        known += [min(run, len(held.boards[place].move_stack), PLIES) for run, place in zip(steps, piece, strict=True)]
    parts = [select(held.rows, piece, LAYOUT) for piece in pieces]
    # By the reader of one shard at a time, without files
    out = [lc0_planes(part) for part in parts]
    assert np.concatenate([one["known"] for one in out]).tolist() == known
    task = lc0()
    seen = torch.cat([shown(task, one) for one in out])
    assert torch.equal(seen, expected(task, [held.boards[place] for place in places], known))


def lc0_planes(part: Batch) -> dict[str, np.ndarray]:
    """Prepared rows of one shard, gathered by hand."""
    rows = part["records"]
    line = np.concatenate([np.zeros(PLIES, LAYOUT.record), rows])
    before = np.stack([line[PLIES - k : PLIES - k + len(rows)] for k in range(1, PLIES + 1)], axis=1)
    out: dict[str, np.ndarray] = lc0().prepare_plain(part | {"before": before}, np.random.default_rng(0))
    return out


def test_shards_end_a_history_also_of_one_game_in_two(games: Games, tmp_path: Path) -> None:
    task, middle, count = lc0(), 35, len(games.boards)
    assert games.boards[middle].move_stack, "within a game"
    halves = [select(games.rows, part, LAYOUT) for part in (np.arange(middle), np.arange(middle, count))]
    batch = stored(tmp_path, *halves, halves[0])
    out = task.prepare_plain(batch, np.random.default_rng(0))
    boards = games.boards + games.boards[:middle]
    known = [min(len(board.move_stack), PLIES) for board in boards]
    known[middle : middle + PLIES] = [min(known[middle + k], k) for k in range(PLIES)]
    assert out["known"].tolist() == known
    assert torch.equal(shown(task, out), expected(task, boards, known))


def test_neighbours_that_are_no_history_are_none(games: Games) -> None:
    """Rows in another order, of other games, and a position beside its image with swapped colours, which has the same
    id where it belongs to no game."""
    task, rng = lc0(), np.random.default_rng(3)
    shuffled = select(games.rows, rng.permutation(len(games.boards)), LAYOUT)
    out = lc0_planes(shuffled)
    assert out["known"].mean() < 0.05
    some = select(games.rows, np.flatnonzero(out["known"] == 0)[:200], LAYOUT)
    alone = task.prepare_plain(some, rng)
    assert "past" not in alone
    spaced = some | {"before": np.zeros((200, PLIES), LAYOUT.record)}
    assert torch.equal(shown(task, alone), shown(task, task.prepare_plain(spaced, rng)))
    board = chess.Board("r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3")
    for one in (board, chess.Board("4k3/4p3/8/8/8/8/8/4K2R w - - 0 1"), chess.Board("4k3/8/8/8/8/8/8/4K3 w - - 0 1")):
        twin = one.mirror()
        rows = from_boards([one, twin], game=7, ply=[4, 5])
        assert (rows["pieces"][0] == rows["pieces"][1]).all()
        past = stored_history({"records": rows[1:], "before": rows[None, :1]})
        assert past is not None
        assert past.known.tolist() == [0]
    start, next_ = chess.Board(), chess.Board()
    next_.push_san("e4")
    for ids, known in (([7, 7], 1), ([7, 8], 0)):
        rows = from_boards([start, next_], game=ids)
        past = stored_history({"records": rows[1:], "before": rows[None, :1]})
        assert past is not None
        assert past.known.tolist() == [known], "another game's row is no history, though it may lead here"


def test_hidden_squares_are_hidden_on_every_board(games: Games, tmp_path: Path) -> None:
    """Else the piece head could read them one ply ago. All boards are the row's view, whoever was to move."""
    task, batch = lc0(ssl=["piece"]), stored(tmp_path, games.rows)
    out = {name: torch.from_numpy(array) for name, array in task.prepare(batch, np.random.default_rng(0)).items()}
    assert set(out) >= {"hidden", "past", "past_state", "known"}
    hidden = out.pop("hidden")
    seen, whole = task.planes(out | {"hidden": hidden}), task.planes(out)
    masks = np.unpackbits(hidden.numpy(), axis=1, bitorder="little").reshape(-1, 1, 8, 8) > 0
    assert masks.any((1, 2, 3)).mean() > 0.1
    for board in range(PLIES + 1):
        men = slice(13 * board, 13 * board + 12)
        wanted = torch.where(torch.from_numpy(masks), torch.zeros(()), whole[:, men])
        assert torch.equal(seen[:, men], wanted)
        assert torch.equal(seen[:, 13 * board + 12], whole[:, 13 * board + 12])
    assert torch.equal(planes(out, history=False)[:, :12], whole[:, :12])


def test_self_play_hands_over_its_positions() -> None:
    """A quick search in between leaves a gap."""
    from matrixlib.play.game import uniform
    from matrixlib.play.selfplay import SelfPlayOptions, play_games
    from matrixlib.tasks.chess.game import ChessGame

    options = SelfPlayOptions(parallel=4, num_simulations=4, num_quick_simulations=2, full_share=0.7, plies=24)
    traces = list(play_games(ChessGame(), uniform, range(4), options, seed=2))
    rows = training_batch(traces, {trace.number: trace.number + 1 for trace in traces}, 9)
    out, known = lc0_planes(rows), list[int]()
    for trace in traces:
        run = 0
        for full in trace.full:
            known += [min(run, PLIES)] if full else []
            run = run + 1 if full else 0
    assert out["known"].tolist() == known
    assert 0 < np.mean(np.equal(known, 0)) < 0.6


# Runs


@pytest.fixture(scope="module")
def imported(games: Games, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    (folder / "games.pgn").write_text(games.text, encoding="utf-8")
    import_files(folder / "games.pgn", folder / "shards", workers=1, progress=False)
    assert {row.split for row in Catalogue(folder / "shards").shards()} == {"train", "validation"}
    return folder / "shards"


def losses(run: Any, stop: int = 0) -> list[float]:
    found = list[float]()
    for stats in run.train():
        found.append(stats.loss)
        if stats.step == stop:
            break
    return found


def test_a_run_trains_on_it_and_resumes_to_the_same_bits(imported: Path, reports: Path) -> None:
    """With a moves-left head, too."""
    model, data = {"history": True, "moves_left": {"channels": 8}}, {"source": str(imported)}
    with closing(opened("whole", model, data, steps=8)) as run:
        batch = run.batch(0)
        assert batch["planes"].shape == (64, 112, 8, 8)
        assert batch["known"].float().mean() > 4
        assert batch["moves_left"].gt(0).float().mean() > 0.5
        assert any(module in run.model.edges() for module in run.model.moves_left_head.modules()), "as Adam has it"
        whole = losses(run)
        errors = [row["metrics"]["moves_left/error"] for row in run.history() if "metrics" in row]
        assert 0 < np.mean(errors[1:]) < errors[0] < 60
    for stop in (5, 0):
        with closing(opened("workers", model, data | {"workers": 2}, steps=8)) as run:
            part = losses(run, stop)
            assert part == (whole[:5] if stop else whole[-len(part) :])
            assert 0 < len(part) < 8
    with closing(opened("without", data=data)) as run:
        batch = run.batch(0)
        assert not {"past", "past_state", "known"} & set(batch)
        assert batch["planes"].shape == (64, 21, 8, 8)


def test_held_out_rows_have_their_history_too(imported: Path, reports: Path) -> None:
    with closing(opened("held", {"history": True}, {"source": str(imported)})) as run:
        data = run.data
        (held,) = list(data.held_out("full"))
        assert held["known"].float().mean() > 4
        net = Net(run.model.eval(), run.task, random_net().runtime)
        out = net.predict({name: held[name].numpy() for name in INPUTS})
        blind = net.predict({name: held[name].numpy() for name in INPUTS[:3]})
        for name in ("policy", "value"):
            assert np.abs(out[name] - blind[name]).max() > 1e-3, name
        rows: list[Any] = [Won(data.validation, history) for history in (True, False)]
        seen, unseen = (held_out(net, one)["reliability"]["win"]["probability"] for one in rows)
        assert seen != unseen
        figures = agreement(net, net, data.validation)
        assert figures["teacher_kl"] > 1e-6, "the teacher sees single positions, live as in its cache"


class Won(NamedTuple):
    """Held-out rows, all of them labelled as won."""

    loader: Loader
    history: bool

    def sequential(self, *args: Any, **options: Any) -> Any:
        for batch in self.loader.sequential(*args, **options):
            seen = {name: rows for name, rows in batch.items() if self.history or name not in INPUTS[3:]}
            yield seen | {"wdl": torch.eye(3)[:1].expand(len(batch["pieces"]), -1)}


def test_single_positions_are_trained_on_as_before(reports: Path) -> None:
    """The sample set has random positions of its games: most of their history is unknown."""
    with closing(opened("sample", {"history": True})) as run:
        batch = run.batch(0)
        known = batch["known"]
        assert 0 < (known > 0).float().mean() < 0.9
        assert len(losses(run, 2)) == 2
        first = {name: batch[name][known == 0] for name in ("pieces", "state")}
        assert torch.equal(batch["planes"][known == 0], run.task.planes(first))
