"""UCI as text: limits, positions, time for a move, scores; nothing that comes in breaks the readers."""

import math

import chess
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrixlib.tasks.chess.uci import protocol
from matrixlib.tasks.chess.uci.protocol import Go, parse_go, read_position, seconds_for, simulations_for

LINE = "searchmoves infinite ponder startpos fen moves e2e4 e7e8q 0000 -5 0 w KQkq - 8/8/8/8/8/8/8/8"
WORDS = [*(*protocol.INTEGER_LIMITS, *LINE.split(), 20 * "9", "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR")]


@pytest.mark.parametrize(
    "text, limits",
    [
        ("", Go()),
        ("infinite depth 5 mate 2 movetime 100", Go(infinite=True, depth=5, mate=2, movetime=100)),
        (
            "wtime 60000 btime 50000 winc 1000 binc 500 movestogo 12",
            Go(wtime=60000, btime=50000, winc=1000, binc=500, movestogo=12),
        ),
        ("wtime -20 btime 5", Go(wtime=0, btime=5)),  # some programs send a clock that has run out
        ("searchmoves e2e4 d2d4 nodes 9", Go(nodes=9, searchmoves=("e2e4", "d2d4"))),
        ("ponder wtime 5", Go(wtime=5)),
        ("quickly nodes 9 searchmoves e7e8q at once depth 2", Go(nodes=9, depth=2, searchmoves=("e7e8q",))),
    ],
)
def test_limits(text: str, limits: Go) -> None:
    assert parse_go(text.split()) == limits


def test_positions() -> None:
    board = read_position("startpos moves e2e4 e7e5 g1f3")
    assert (board.fen().split()[0], len(board.move_stack)) == ("rnbqkbnr/pppp1ppp/8/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R", 3)
    fen = "r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 3 20"
    assert read_position(f"fen {fen} moves").fen() == fen
    assert read_position(f"fen {fen} moves e8g8").king(chess.BLACK) == chess.G8
    knight = read_position("fen 8/P6k/8/8/8/8/8/K7 w - - 0 1 moves a7a8n")
    assert knight.piece_type_at(chess.A8) == chess.KNIGHT


NO_POSITIONS = """
startpos e2e4
startpos moves e2e4 e2e4
startpos moves 0000
startpos moves castles
fen
fen kk6/8/8/8/8/8/8/K7 w - - 0 1
fen R6k/8/8/8/8/8/8/K7 w - - 0 1
fen 8/P6k/8/8/8/8/8/K7 w - - 0 1 moves a7a8"""


@pytest.mark.parametrize("text", NO_POSITIONS.split("\n"))
def test_positions_that_are_none(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_position(text)
    assert caught.type is ValueError, "which notebooks show in one line"


@pytest.mark.parametrize(
    "go, turn, seconds",
    [
        (Go(), chess.WHITE, None),
        (Go(infinite=True, movetime=100), chess.WHITE, None),
        (Go(movetime=1000), chess.WHITE, 0.9),
        (Go(movetime=50), chess.WHITE, 0),  # less than is lost outside
        (Go(wtime=60_100, btime=100), chess.WHITE, 2.0),  # a thirtieth
        (Go(btime=30_100), chess.BLACK, 1.0),
        (Go(wtime=60_100, btime=0, winc=2000, binc=0), chess.WHITE, 3.5),
        (Go(wtime=60_100, btime=0, movestogo=10), chess.WHITE, 6.0),
        (Go(wtime=10_100, btime=0, movestogo=1), chess.WHITE, 6.0),  # not all of it: a batch takes its time
        (Go(wtime=200, btime=0, winc=60_000, binc=0), chess.WHITE, 0.06),
        (Go(wtime=-500, btime=0), chess.WHITE, 0),
    ],
)
def test_seconds_by_the_clock(go: Go, turn: chess.Color, seconds: float | None) -> None:
    assert seconds_for(go, turn, 100) == (None if seconds is None else pytest.approx(seconds))


@given(st.integers(-1000, 10**10), *[st.integers(0, 10**6)] * 3)
def test_the_clock_never_runs_out(left: int, increment: int, moves: int, overhead: int) -> None:
    go = Go(wtime=left, btime=left, winc=increment, binc=increment, movestogo=moves)
    for turn in chess.COLORS:
        assert 0 <= (seconds_for(go, turn, overhead) or 0) <= max(left - overhead, 0) / 1000


@pytest.mark.parametrize(
    "go, most, simulations",  # Black to move
    [
        (Go(), 0, protocol.DEFAULT_SIMULATIONS),
        (Go(), 50, 50),
        (Go(nodes=7), 50, 7),  # asked for by name
        (Go(depth=5), 50, 256),
        (Go(depth=10**17), 0, 8 << 60),
        (Go(infinite=True), 50, math.inf),
        (Go(infinite=True, nodes=9), 0, 9),
        (Go(movetime=100), 50, 50),
        (Go(btime=5), 0, math.inf),
        (Go(wtime=5), 0, protocol.DEFAULT_SIMULATIONS),  # the opponent's alone
        (Go(mate=3), 0, math.inf),
    ],
)
def test_simulations(go: Go, most: int, simulations: float) -> None:
    assert simulations_for(go, chess.BLACK, most) == simulations


@given(st.floats(-1, 1))
def test_centipawns_expect_the_result_that_they_were_made_of(value: float) -> None:
    centipawns = protocol.centipawns(value)
    back = 2 / (1 + math.exp(-0.00368208 * centipawns)) - 1
    assert back == pytest.approx(value, abs=1e-3)
    assert protocol.centipawns(-value) == -centipawns


def test_scores() -> None:
    assert protocol.score_text(0.0, 0) == "cp 0"
    assert protocol.score_text(0.5, 0) == "cp 298"
    assert protocol.score_text(1.0, 0) == "cp 2690"  # won, but nobody knows how fast
    assert [protocol.score_text(1.0, plies) for plies in (1, 3, 5)] == ["mate 1", "mate 2", "mate 3"]
    assert [protocol.score_text(-1.0, plies) for plies in (2, 4)] == ["mate -1", "mate -2"]
    assert protocol.score_text(0.0, 7) == "cp 0"  # a proven draw


@given(st.floats(-1, 1), st.floats(0, 1))
def test_win_draw_and_loss_have_the_expected_result(value: float, draws: float) -> None:
    _, win, draw, loss = protocol.wdl_text(value, draws).split()
    assert int(win) + int(draw) + int(loss) == 1000
    assert min(int(win), int(draw), int(loss)) >= 0
    assert (int(win) - int(loss)) / 1000 == pytest.approx(value, abs=2e-3)
    assert int(draw) / 1000 == pytest.approx(min(draws, 1 - abs(value)), abs=1e-3)


def test_options_are_listed_and_read() -> None:
    listed = [str(option) for option in protocol.OPTIONS]
    assert "option name MultiPV type spin default 1 min 1 max 218" in listed
    assert "option name UCI_ShowWDL type check default false" in listed
    assert "option name SyzygyPath type string default <empty>" in listed
    for option, line in zip(protocol.OPTIONS, listed, strict=True):
        text = line.split(" default ")[1].split(" min ")[0]
        assert protocol.parse_option(f"name {option.name.lower()} value {text}") == (option.name, option.default)
    for name, text in (("MultiPV", "0"), ("MultiPV", "many"), ("Hash", "9" * 30), ("UCI_ShowWDL", "yes")):
        with pytest.raises(ValueError, match=name):
            protocol.parse_option(f"name {name} value {text}")
