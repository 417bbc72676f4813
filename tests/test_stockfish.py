"""Stockfish: its client, the games and labels that it makes, and the targets that follow from them."""

import math
import os
import stat
import sys
import time
from pathlib import Path

import chess
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from positions import random_positions

from matrixlib.tasks.chess.records import policy_index
from matrixlib.tasks.chess.stockfish import labels
from matrixlib.tasks.chess.stockfish.client import (
    CENTIPAWN_LIMIT,
    MATE,
    EngineError,
    Line,
    Stockfish,
    find_program,
    parse_info,
    score_of,
)
from matrixlib.tasks.chess.stockfish.labels import label, level_weights, levels, wdl_of_score
from matrixlib.tasks.chess.stockfish.sample import Parameters, game_outcome

BLOCK = [
    "info string NNUE evaluation using nn.nnue enabled",
    "info depth 1 seldepth 1 multipv 1 score cp 90 wdl 500 490 10 nodes 9 nps 9000 tbhits 0 time 1 pv a2a3",
    "info depth 2 seldepth 2 multipv 1 score mate 2 wdl 1000 0 0 nodes 40 hashfull 0 pv e7e8q d1e1",
    "info depth 2 seldepth 2 multipv 2 score cp -31 upperbound wdl 0 969 31 nodes 40 pv e2e4",
    "info depth 2 seldepth 2 multipv 3 score mate -1 nodes 40 nps 40000 time 1 pv g2g4 d8h4",
    "bestmove e7e8q ponder d1e1",
]


def fake_engine(folder: Path, body: str) -> Path:
    """A program that stands where an engine is expected."""
    if os.name != "posix":
        pytest.skip("fake engines are scripts with a first line")
    path = folder / "engine"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


GREETING = """
for line in sys.stdin:
    word = line.strip()
    if word == "uci":
        sys.stdout.buffer.write(b"id author G\\xe9rard\\n")  # not UTF-8
        print("id name Fake 1\\noption name UCI_ShowWDL type check\\nuciok", flush=True)
    elif word == "isready": print("readyok", flush=True)
    elif word.startswith("go"): {go}
"""


def test_the_last_whole_block_counts():
    assert parse_info(BLOCK) == [
        Line("e7e8q", MATE - 2, (1000, 0, 0)),
        Line("e2e4", -31, (0, 969, 31)),
        Line("g2g4", -(MATE - 1), None),
    ]
    assert parse_info(["info depth 0 score mate 0", "bestmove (none)"]) == []
    for line in (  # of GNU Chess, Toga and Lc0
        "info depth 1 score cp 25 nodes 20 pv d2d4",
        "info multipv 1 depth 6 seldepth 12 score cp 25 time 3 nodes 5177 pv d2d4 d7d5",
        "info depth 1 seldepth 2 time 5 nodes 3 score cp 25 wdl 300 500 200 nps 90 multipv 1 pv d2d4",
    ):
        assert [(one.move, one.score) for one in parse_info([line, "info string score cp 9 pv a2a3"])] == [("d2d4", 25)]


@pytest.mark.parametrize(
    "body, message, timeout",
    [
        ("sys.exit(3)", "does not speak UCI.*exit status 3", 20),
        ("for line in sys.stdin: print('what?', flush=True)", "does not speak UCI.*no answer within", 0.5),
        (GREETING.format(go="sys.exit(7)"), "no `bestmove` from Fake 1 in `position fen x`: exit status 7", 20),
        (GREETING.format(go="time.sleep(60)"), "no answer within 3 s", 3),
        (GREETING.format(go="print('bestmove (none)', flush=True)"), "gives no move in `fen x`", 20),
    ],
    ids=["dies", "no UCI", "dies at a search", "hangs", "no move"],
)
def test_engines_that_fail_are_named(tmp_path, body, message, timeout):
    start = time.monotonic()
    with (
        pytest.raises(EngineError, match=message),
        Stockfish(fake_engine(tmp_path, body), timeout=timeout) as engine,
    ):
        engine.search("fen x", "depth 1")
    assert time.monotonic() - start < 30


PICKY = """
moves = [a + b for a in "abcdefgh" for b in ("2" + a + "3", "2" + a + "4")]
lines = 1
for line in sys.stdin:
    word, *rest = line.split()
    if word == "uci":
        print("id name Picky 1\\noption name UCI_ShowWDL type check default false")
        print("option name Hash type spin default 16 min 8 max 64")
        print("option name MultiPV type spin default 1 min 1 max 12\\nuciok", flush=True)
    elif word == "isready": print("readyok", flush=True)
    elif word == "setoption":
        assert rest[1] != "Hash" or 8 <= int(rest[3]) <= 64
        if rest[1] == "MultiPV" and int(rest[3]) <= 12: lines = int(rest[3])  # else ignored without a word
    elif word == "go":
        for k in range(lines): print(f"info depth 1 multipv {k + 1} score cp {-k} nodes 1 pv {moves[k]}")
        print("bestmove a2a3", flush=True)
"""


def test_an_engine_that_ignores_large_numbers_of_lines_is_asked_for_what_it_takes(tmp_path):
    """Stockfish of 2024 and later takes MultiPV up to 256, and stays at 1 where 500 is asked for."""
    with Stockfish(fake_engine(tmp_path, PICKY)) as engine:
        assert len(engine.search("startpos", "depth 1", 500)) == 12
    for options in ({"Contempt": 5}, {"MultiPV": 99}):
        with pytest.raises(EngineError, match=f"Picky 1 refuses {next(iter(options))}"):
            Stockfish(tmp_path / "engine", options=options)


# Games and labels

DEPTHS = Parameters.shallow_depth, Parameters.deep_depth


@pytest.mark.parametrize(
    "fen, occurrences, expected",
    [
        ("7k/5KQ1/8/8/8/8/8/8 b - - 0 1", 1, (1, "checkmate")),
        ("rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3", 1, (-1, "checkmate")),
        ("7k/5KQ1/8/8/8/8/8/8 b - - 100 90", 1, (1, "checkmate")),
        ("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1", 1, (0, "stalemate")),
        ("8/8/4k3/8/8/2KB4/8/8 w - - 0 1", 1, (0, "insufficient material")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 3 1", 3, (0, "repetition")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 100 90", 1, (0, "fifty moves")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 99 101", 2, (2, "cap")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 99 90", 2, None),
    ],
)
def test_every_way_a_game_ends(fen, occurrences, expected):
    end = game_outcome(chess.Board(fen), occurrences, cap=200)
    assert end == expected


def test_labels_do_not_depend_on_order_colour_or_move_number(engine):
    raw, boards = set(), [board for board in random_positions(12, 1) if any(board.legal_moves)][:6]
    forwards = [label(engine, board, *DEPTHS) for board in boards]
    assert forwards == [label(engine, board, *DEPTHS) for board in boards[::-1]][::-1]
    for first, board in zip(forwards, boards, strict=True):
        assert len(first.level) == board.legal_moves.count()
        assert (min(first.level), sum(first.wdl)) == (0, 1000)
        late, mirrored = board.copy(stack=False), board.mirror()
        late.fullmove_number = 120
        assert label(engine, late, *DEPTHS) == first
        assert label(engine, mirrored, *DEPTHS) == first
    quiet = chess.Board("r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3")
    for number in (1, 80):  # the trap: the engine's own answer does depend on it
        quiet.fullmove_number = number
        engine.new_game()
        raw.add(engine.search(f"fen {quiet.fen()}", "depth 6")[0].wdl)
    assert len(raw) == 2 or "15" not in engine.name


TREE = """
for line in sys.stdin:
    word = line.split()[0]
    if word == "uci":
        print("id name Tree 1\\noption name UCI_ShowWDL type check")
        print("option name VerboseMoveStats type check\\nuciok", flush=True)
    elif word == "isready": print("readyok", flush=True)
    elif word == "go":
        assert line.split()[1:] == ["nodes", "9"]
        print("info depth 2 nodes 9 score cp 20 wdl 300 500 200 pv e1d2\\ninfo string e1d1 N: 0 (P: 1%) (Q: 0.9)")
        print("info string e1e2 N: 1 (P: 1%) (Q: 0.9)\\ninfo string e1d2  (26  ) N:   100 (+ 0) (P: 9%) (N: 7)")
        print("info string e1f2 N: 50\\ninfo string e1f1 N: 1000000\\ninfo string node N: 9")
        print("bestmove e1d2", flush=True)
"""


def test_a_tree_search_labels_by_its_visits_not_by_scores_of_moves_that_it_did_not_visit(tmp_path):
    program = fake_engine(tmp_path, TREE)
    king = chess.Board("4k3/8/8/8/8/8/8/4K3 b - - 0 1")  # of Black, so mirrored
    with Stockfish(f"{program} nodes=9") as engine:
        made = label(engine, king, *DEPTHS)
        assert engine.title == f"Tree 1 ({program} nodes=9)"
    by_move = sorted(king.mirror().legal_moves, key=lambda move: policy_index(move, chess.WHITE))
    levels_by_move = dict(zip([move.uci() for move in by_move], made.level, strict=True))
    assert made.wdl == (300, 500, 200)
    assert levels_by_move == {"e1f1": 0, "e1d2": 81, "e1f2": 81, "e1e2": 81, "e1d1": 81}
    knight = chess.Board("4k3/8/8/8/8/8/8/6NK w - - 0 1")
    with (
        Stockfish(f"{program} nodes=9") as engine,
        pytest.raises(EngineError, match=r"Tree 1 answers 'e1d1' in `fen 4k3/8/8/8/8/8/8/6NK w - - 0 32`: illegal uci"),
    ):
        label(engine, knight, *DEPTHS)
    for text in (program, f"{program} --fast", f"{program} depth=4", f"{program} movetime=50"):
        with pytest.raises(EngineError, match="Tree 1 labels positions by its visits: end its text with nodes=800"):
            Stockfish(text)


def test_stockfish_labels_by_depth_alone(stockfish):
    with pytest.raises(EngineError, match="labels positions by depth: leave out 'nodes 50'"):
        Stockfish(f"{stockfish} nodes=50")


@pytest.mark.parametrize("name", ["toga2", "glaurung", "gnuchess"])
def test_real_engines_without_win_draw_loss_label_positions(name):
    """Toga lists ten moves at once, GNU Chess one."""
    if find_program(name) is None:
        pytest.skip(f"no {name} here")
    boards = [chess.Board(), chess.Board("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1")]
    with Stockfish("gnuchess --uci" if name == "gnuchess" else name) as engine:
        even, mate = (label(engine, board, *DEPTHS) for board in boards)
    assert (len(even.level), min(even.level)) == (20, 0)
    assert even.wdl[1] > 900
    assert mate.wdl[0] > 990
    assert mate.level.count(0) == 1, "d1d8 mates"


@pytest.mark.parametrize("name", ["matrixlib-uci", "lc0"])
def test_real_tree_searches_label_positions(name, request):
    text = f"{sys.executable} -m matrixlib.tasks.chess.uci.engine --checkpoint shipped --device cpu nodes=60"
    if name == "lc0":
        maia = Path(os.environ.get("MATRIXLIB_SHARED", "../shared")) / "maia" / "maia-1100.pb.gz"
        if not maia.exists():
            pytest.skip("there are no weights of Maia")
        alike = "--smart-pruning-factor=0 --minibatch-size=1 --max-prefetch=0"  # else its threads' timing counts
        text = f"{request.getfixturevalue('lc0')} --weights={maia} {alike} nodes=60"
    boards = [
        chess.Board("r3k2r/pppq1ppp/2n5/8/8/2N5/PPPQ1PPP/R3K2R w KQkq - 0 10"),
        chess.Board("k7/8/8/8/8/8/6q1/7K w - - 0 1"),
    ]
    boards += [board for board in random_positions(12, 1) if any(board.legal_moves)][:4]
    with Stockfish(text) as engine:
        made = [label(engine, board, *DEPTHS) for board in boards]
        assert made == [label(engine, board, *DEPTHS) for board in boards], "of the position alone"
    for board, one in zip(boards, made, strict=True):
        assert len(one.level) == board.legal_moves.count()
        assert (min(one.level), sum(one.wdl)) == (0, 1000)
    assert 0 < sum(level < labels.NO_WEIGHT for level in made[0].level) <= 60


# Targets


def test_weights_are_a_softmax_at_fifty_centipawns():
    level = np.array([0, 10, 20, 81, 0, 0, 7, 0], dtype=np.uint8)  # rows of 4, 3 and 1 moves
    offset = np.array([0, 4, 7, 8])
    weight = level_weights(level, offset).astype(np.int64)
    assert np.add.reduceat(weight, offset[:-1]).tolist() == [65535] * 3
    expected = np.exp(-np.array([0, 50, 100]) / 50)
    np.testing.assert_allclose(weight[:3] / 65535, expected / expected.sum(), atol=3e-5)
    assert (weight[3], weight[7]) == (0, 65535)
    for level in range(labels.NO_WEIGHT):
        assert abs(labels.WEIGHTS[level] - 1e6 * math.exp(-level / 10)) <= 1
    assert labels.WEIGHTS[labels.NO_WEIGHT] == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, labels.NO_WEIGHT), min_size=0, max_size=40), min_size=1, max_size=12))
def test_weights_of_any_levels_sum_to_all_and_keep_the_order(rows):
    rows = [[0, *row] for row in rows]
    offset = np.cumsum([0, *map(len, rows)])
    weight = level_weights(np.concatenate(rows).astype(np.uint8), offset).astype(np.int64)
    for row, start, stop in zip(rows, offset[:-1], offset[1:], strict=True):
        made = weight[start:stop]
        assert made.sum() == 65535
        assert made[0] == made.max()
        order = np.argsort(row[1:], kind="stable")
        assert (np.diff(made[1:][order]) <= 0).all()


@pytest.mark.parametrize(
    "shallow, deep, expected",
    [
        ([500, 100, 90, 80, -40], {1: 60, 2: 40, 3: 10}, [12, 0, 4, 10, 20]),  # the shallow favourite falls behind
        ([30, 20], {1: 50, 0: 0}, [10, 0]),
        ([30], {0: -9}, [0]),
        ([3 - MATE, 1 - MATE], {0: 3 - MATE, 1: 1 - MATE}, [0, 100 // labels.LEVEL_CENTIPAWNS]),
    ],
)
def test_the_deep_search_overrules_the_shallow_one(shallow, deep, expected):
    made = levels(
        {str(move): score for move, score in enumerate(shallow)}, {str(k): score for k, score in deep.items()}
    )
    assert [made[str(move)] for move in range(len(shallow))] == expected


# Win-draw-loss of scores

SCORES = st.integers(-CENTIPAWN_LIMIT, CENTIPAWN_LIMIT) | st.integers(-300, 300)


@given(st.lists(SCORES, min_size=1, max_size=20))
def test_rows_are_whole_and_symmetric(values):
    ours, theirs = wdl_of_score(values), wdl_of_score([-x for x in values])
    assert ours.dtype == np.dtype("<u2")
    assert (ours.astype(int).sum(1) == 65535).all()
    assert (np.abs(ours.astype(int) - theirs[:, ::-1]) <= 2).all()


def test_mates_are_certain():
    won, lost, mated = score_of("mate", 12), score_of("mate", -1), score_of("mate", 0)
    assert wdl_of_score([won, lost, mated, MATE]).tolist() == [
        [65535, 0, 0],
        [0, 0, 65535],
        [0, 0, 65535],
        [65535, 0, 0],
    ]
    assert wdl_of_score(CENTIPAWN_LIMIT).tolist() == [[65535, 0, 0]]


def test_the_engine_shows_the_same(engine: Stockfish):
    """What Stockfish 15 prints at full move 32; its wdl comes from a finer score than the centipawns it prints."""
    if not engine.name.startswith("Stockfish 15.1"):
        pytest.skip(f"{engine.name} has another model than Stockfish 15.1")
    fens = ["4k3/8/8/8/8/8/4P3/4K3", "rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR"]
    fens += ["r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5Q2/PPPP1PPP/RNB1K1NR", "6k1/5ppp/8/8/8/1P6/5PPP/6K1"]
    seen = 0
    for fen in fens:
        for depth in range(1, 13):
            for line in engine.search(f"fen {fen} w - - 0 32", f"depth {depth}", 4):
                if abs(line.score) <= CENTIPAWN_LIMIT:
                    near = wdl_of_score([line.score - 1, line.score, line.score + 1]) / 65.535
                    assert (near.min(0) - 6 <= line.wdl).all(), line
                    assert (near.max(0) + 6 >= line.wdl).all(), line
                    seen += 1
    assert seen > 100
