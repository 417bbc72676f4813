"""The UCI client: what it reads, and that every way of failing is said."""

import os
import stat
import sys
import time
from pathlib import Path

import pytest

from matrixlib.tasks.chess.stockfish.client import (
    MATE,
    EngineError,
    Line,
    Stockfish,
    find_stockfish,
    parse_info,
)

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
    if word == "uci": print("id name Fake 1\\noption name UCI_ShowWDL type check\\nuciok", flush=True)
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


def test_absent_engine_is_named():
    with pytest.raises(EngineError, match=r"no Stockfish at 'no/such/engine'.*apt install"):
        find_stockfish("no/such/engine")


@pytest.mark.parametrize(
    "body, message, timeout",
    [
        ("sys.exit(3)", "does not speak UCI.*exit status 3", 20),
        ("for line in sys.stdin: print('what?', flush=True)", "does not speak UCI.*no answer within", 0.5),
        ("print('id name Old\\nuciok', flush=True); sys.stdin.read()", "Old has no option UCI_ShowWDL", 20),
    ],
    ids=["dies", "no UCI", "no WDL"],
)
def test_no_engine_of_ours(tmp_path, body, message, timeout):
    with pytest.raises(EngineError, match=message):
        Stockfish(fake_engine(tmp_path, body), timeout=timeout)


@pytest.mark.parametrize(
    "go, message",
    [
        ("sys.exit(7)", "no `bestmove` from Fake 1: exit status 7"),
        ("time.sleep(60)", "no answer within 3 s"),
        ("print('bestmove (none)', flush=True)", "gives no move in `fen x`"),
    ],
    ids=["dies", "hangs", "no move"],
)
def test_failing_searches(tmp_path, go, message):
    start = time.monotonic()
    with (
        Stockfish(fake_engine(tmp_path, GREETING.format(go=go)), timeout=3) as engine,
        pytest.raises(EngineError, match=message),
    ):
        engine.search("fen x", "depth 1")
    assert time.monotonic() - start < 30


def test_answers_cut_anywhere_are_read_whole(tmp_path):
    go = (
        "[(sys.stdout.write(c), sys.stdout.flush()) for c in "
        "'info depth 1 multipv 1 score cp 5 nodes 1 pv a2a3\\nbestmove a2a3\\n']"
    )
    with Stockfish(fake_engine(tmp_path, GREETING.format(go=go)), timeout=5) as engine:
        assert [engine.search("fen x", "depth 1") for _ in range(3)] == [[Line("a2a3", 5, None)]] * 3


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


def test_stockfish_lists_all_moves(engine):
    lines = engine.search("startpos", "depth 3", 500)
    assert len({line.move for line in lines}) == 20
    assert all(line.wdl is not None and sum(line.wdl) == 1000 for line in lines)
    assert [line.score for line in lines] == sorted((line.score for line in lines), reverse=True)
