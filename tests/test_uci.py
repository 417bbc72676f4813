"""The UCI engine: in this process line by line, and as a program under python-chess's client."""

import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import chess
import chess.engine
import pytest
import warm
from networks import material_net, random_net, save_run
from positions import random_positions

from matrixlib.engine.folder import newest_complete
from matrixlib.play.search import Search
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.uci import engine as uci
from matrixlib.tasks.chess.uci import game_search, protocol

ROOT = Path(__file__).resolve().parents[1]
MATE = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1"
WAIT = 120  # seconds, for machines under load


class Dialogue:
    """An engine in a thread, talked to line by line."""

    def __init__(self, net: Net) -> None:
        self.lines: uci.Lines = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.engine = uci.Engine("test", lambda: net, self.lines, self.answers.put)
        self.thread = threading.Thread(target=self.engine.serve, daemon=True)
        self.thread.start()

    def ask(self, *lines: str, until: str) -> list[str]:
        """Send lines; everything said up to the first line that starts so."""
        for line in lines:
            self.lines.put(line)
        heard = [self.answers.get(timeout=WAIT)]
        while not heard[-1].startswith(until):
            heard.append(self.answers.get(timeout=WAIT))
        return heard

    def best(self, position: str, go: str) -> str:
        """The move that it plays, with the promise that it is legal."""
        answer = self.ask(f"position {position}", f"go {go}", until="bestmove")[-1].split()[1]
        assert self.engine.board.parse_uci(answer)
        return answer

    def end(self) -> None:
        self.lines.put(None)
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def random_engine() -> Iterator[Dialogue]:
    dialogue = Dialogue(random_net())
    yield dialogue
    dialogue.end()


@pytest.fixture
def engine(random_engine: Dialogue) -> Dialogue:
    """With its options at their defaults."""
    for option in protocol.OPTIONS:
        value = str(option).split(" default ")[1].split(" min ")[0]
        random_engine.lines.put(f"setoption name {option.name} value {value}")
    random_engine.ask("ucinewgame", "position startpos", "isready", until="readyok")
    return random_engine


def infos(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("info depth")]


# --- line by line


def test_lines_about_a_search_are_whole_and_its_move_is_their_first(
    engine: Dialogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock does not interrupt a search of so many nodes: its result would depend on it."""
    monkeypatch.setattr(game_search, "REPORT_SECONDS", 1e-9)
    lines = engine.ask("position startpos moves e2e4", "go nodes 100", until="bestmove")
    pattern = re.compile(r"info depth (\d+) multipv 1 score cp -?\d+ nodes (\d+) nps \d+ hashfull \d+ time \d+ pv (.+)")
    shown = [pattern.fullmatch(line) for line in infos(lines)]
    assert [match and int(match[2]) for match in shown] == [16, 32, 64, 100]
    assert [match and int(match[1]) for match in shown] == [1, 2, 3, 3]
    line = shown[-1][3].split()
    assert lines[-1] == f"bestmove {line[0]}"
    board = chess.Board()
    for move in ("e2e4", *line):
        board.push_uci(move)


def test_win_draw_and_loss_are_shown_where_the_network_says_them(engine: Dialogue) -> None:
    plain = infos(engine.ask("go nodes 20", until="bestmove"))
    assert " wdl " not in plain[-1]
    shown = infos(engine.ask("setoption name UCI_ShowWDL value true", "go nodes 20", until="bestmove"))
    wdl = re.search(r" wdl (\d+) (\d+) (\d+) ", shown[-1])
    assert sum(map(int, wdl.groups())) == 1000


def test_mates_are_shown_from_both_sides(engine: Dialogue) -> None:
    lines = engine.ask(f"position fen {MATE}", "go nodes 50", until="bestmove")
    assert "score mate 1 " in infos(lines)[-1]
    assert lines[-1] == "bestmove d1d8"
    assert engine.best(f"fen {chess.Board(MATE).mirror().fen()}", "mate 1") == "d8d1"
    driven = "k7/8/2K5/8/8/8/8/1Q6 b - - 0 1"  # Ka7, then mate
    assert "score mate -1 " in infos(engine.ask(f"position fen {driven}", "go nodes 200", until="bestmove"))[-1]


def test_a_finished_game_has_no_move(engine: Dialogue) -> None:
    for fen, score in (("R5k1/5ppp/8/8/8/8/8/K7 b - - 0 1", "mate 0"), ("k7/2Q5/8/8/8/8/8/K7 b - - 0 1", "cp 0")):
        lines = engine.ask(f"position fen {fen}", "go movetime 1000", until="bestmove")
        assert lines == [f"info depth 0 score {score}", "bestmove (none)"]


def test_a_game_that_goes_on_after_a_draw_gets_a_move(engine: Dialogue) -> None:
    third = "startpos moves" + 2 * " g1f3 g8f6 f3g1 f6g8"
    for position in (third, "fen 7k/8/8/8/8/1Q6/8/K7 w - - 100 150", "fen 7k/8/8/8/8/8/8/K7 w - - 0 1"):
        assert engine.best(position, "nodes 50 searchmoves " + engine.best(position, "nodes 9"))


def test_moves_of_the_game_count_as_occurrences() -> None:
    """A queen up, one move leads to the third occurrence of a position: a draw, and only the history says so."""
    material = Dialogue(material_net())
    start, history = "7k/8/8/8/8/8/8/KQ6 w - - 0 1", "b1b2 h8h7 b2b3 h7h8 b3b2 h8h7 b2b4 h7h8"
    board = protocol.read_position(f"fen {start} moves {history}")
    material.ask("setoption name MultiPV value 218", "isready", until="readyok")
    for position, drawn in ((f"fen {start} moves {history}", True), (f"fen {board.fen()}", False)):
        lines = infos(material.ask(f"position {position}", "go nodes 400", until="bestmove"))
        about = [line for line in lines if " pv b4b2" in line]
        assert (" score cp 0 " in about[-1]) == drawn


def test_the_tree_is_kept_from_move_to_move(engine: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    reset = Search.reset
    monkeypatch.setattr(Search, "reset", lambda self, *args, **more: resets.append(1) or reset(self, *args, **more))
    lines = engine.ask("position startpos", "go nodes 300", until="bestmove")
    ours, theirs = infos(lines)[-1].split(" pv ")[1].split()[:2]
    assert len(resets) == 1
    position = f"position startpos moves {ours} {theirs}"
    lines = engine.ask(position, "go nodes 20", until="bestmove")
    assert len(resets) == 1, "the game went on"
    assert int(infos(lines)[-1].split(" nodes ")[1].split()[0]) == 20, "reused simulations are not counted"
    engine.ask(position, "go nodes 20", until="bestmove")
    assert len(resets) == 1, "the same position again"
    engine.ask("position startpos moves d2d4", "go nodes 20", until="bestmove")
    engine.ask("ucinewgame", "position startpos moves d2d4", "go nodes 20", until="bestmove")
    engine.ask("position startpos moves d2d4 d7d5", "go nodes 20 searchmoves c2c4", until="bestmove")
    assert len(resets) == 4, "another game, a new game, chosen moves"


def test_an_infinite_search_answers_ready_and_ends_at_stop_alone(engine: Dialogue) -> None:
    engine.ask("position startpos", "go infinite", until="info depth 3")
    engine.ask("isready", until="readyok")
    assert engine.ask("stop", until="bestmove")
    assert engine.ask(f"position fen {MATE}", "go infinite", "isready", until="readyok")[-1] == "readyok"
    assert engine.answers.empty() or not engine.answers.get().startswith("bestmove"), "solved, but not yet asked for"
    assert engine.ask("position startpos", "stop", "go nodes 5", until="bestmove")[-1] == "bestmove d1d8"
    assert engine.ask(until="bestmove"), "what came during the search is done after it"
    assert engine.engine.board == chess.Board()


def test_an_end_behind_a_waiting_search_is_not_lost() -> None:
    dialogue = Dialogue(random_net())
    dialogue.ask("go infinite", until="info depth 1")
    for line in ("go infinite", "position startpos", "go infinite", "quit"):
        dialogue.lines.put(line)
    dialogue.thread.join(WAIT)
    assert not dialogue.thread.is_alive()
    said = [dialogue.answers.get() for _ in range(dialogue.answers.qsize())]
    assert sum(line.startswith("bestmove") for line in said) == 3


def test_limits_of_time_and_of_simulations_end_a_search(engine: Dialogue) -> None:
    for go in ("movetime 50", "wtime 50 btime 50 winc 10 binc 10", "btime 50"):
        engine.best("startpos", go)
    engine.lines.put("setoption name Simulations value 30")
    lines = engine.ask("position startpos", "go wtime 99999999 btime 99999999", until="bestmove")
    assert " nodes 30 " in infos(lines)[-1]


def test_a_full_tree_forgets_and_searches_on(engine: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had ended the search at 256 visits of the root for each MiB, those of the move before included."""
    monkeypatch.setattr(uci, "MIB", 2**14)
    lines = infos(engine.ask("setoption name Hash value 16", "position startpos", "go nodes 1500", until="bestmove"))
    assert " nodes 1500 " in lines[-1]
    assert " hashfull 1000 " in "".join(lines)
    assert engine.engine.game_search.search.bytes < 16 * 2**14 + 2**17, "one batch more at most"
    assert int(re.search(r"nodes (\d+)", infos(engine.ask("go nodes 300", until="bestmove"))[-1])[1]) == 300


def test_a_temperature_varies_the_moves(engine: Dialogue) -> None:
    engine.lines.put("setoption name Temperature value 200")
    assert len({engine.best("startpos", "nodes 60") for _ in range(12)}) > 1


NONSENSE = """position startpos moves e2e5
position fen 8/8/8/8/8/8/8/8 w - - 0 1
go nodes
go searchmoves e2e5
setoption name MultiPV value -3
setoption name SyzygyPath value no/such/folder
\x00\ufffd"""


@pytest.mark.parametrize("line", NONSENSE.split("\n"))
def test_nonsense_is_named_and_the_position_stays(engine: Dialogue, line: str) -> None:
    engine.ask("position startpos moves e2e4 e7e5", "isready", until="readyok")
    lines = engine.ask(line, "isready", until="readyok")
    assert [line.startswith("info string") for line in lines] == [True, False]
    assert engine.engine.board.fen() == "rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR w KQkq - 0 2"


def test_a_broken_network_is_no_silent_end() -> None:
    net = random_net()
    for parameter in net.model.parameters():
        parameter.fill_(float("nan"))
    lines: uci.Lines = queue.SimpleQueue()
    lines.put("isready")
    with pytest.raises(ValueError, match="network is broken"):
        uci.Engine("broken", lambda: net, lines, print).serve()


# --- as a program


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uci") / "tiny"
    save_run(folder, random_net())
    return folder


def command(run: Path) -> list[str]:
    return [sys.executable, "-m", "matrixlib.tasks.chess.uci.engine", "--checkpoint", str(run), "--device", "cpu"]


@pytest.fixture(scope="module")
def program(run: Path) -> Iterator[chess.engine.SimpleEngine]:
    with chess.engine.SimpleEngine.popen_uci(command(run), timeout=WAIT, cwd=ROOT) as client:
        yield client


def test_a_client_plays_a_game(program: chess.engine.SimpleEngine) -> None:
    assert program.id["name"] == "matrixlib tiny"
    board = chess.Board()
    while not board.is_game_over(claim_draw=True) and board.ply() < 30:
        limit = chess.engine.Limit(nodes=16) if board.turn else chess.engine.Limit(white_clock=9, black_clock=0.3)
        board.push(program.play(board, limit, game=1).move or chess.Move.null())
    assert board.ply() >= 10


def test_a_client_analyses_several_variations(program: chess.engine.SimpleEngine) -> None:
    board = chess.Board("r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R b KQkq - 0 1")
    found = program.analyse(board, chess.engine.Limit(nodes=300), multipv=4)
    assert [info["multipv"] for info in found] == [1, 2, 3, 4]
    assert all(info["pv"][0] in board.legal_moves and info["score"].turn == chess.BLACK for info in found)


def test_random_positions_without_an_illegal_move(program: chess.engine.SimpleEngine) -> None:
    for board in (board for board in random_positions(100, seed=11) if any(board.legal_moves)):
        played = program.play(board, chess.engine.Limit(nodes=4), info=chess.engine.INFO_ALL)
        assert played.move in board.legal_moves
        assert played.info["pv"][0] == played.move


def converse(run: Path, sent: bytes) -> subprocess.CompletedProcess[bytes]:
    return warm.run(*command(run)[1:], sent=sent)


def test_bytes_that_mean_nothing_do_not_end_it(run: Path) -> None:
    dice = random.Random(5)
    noise = b"\n".join(dice.randbytes(dice.randrange(60)).replace(b"quit", b"") for _ in range(300))
    done = converse(run, b"uci\n" + noise + b"\n" + b"x" * 100_000 + b"\r\nisready\r\nquit\n")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"uciok" in done.stdout
    assert done.stdout.split()[-1] == b"readyok"


def test_the_end_of_input_ends_it_even_in_a_search(run: Path) -> None:
    done = converse(run, b"position startpos\ngo infinite\n")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.split(b"\n")[-2].startswith(b"bestmove ")
    assert converse(run, b"").returncode == 0


def test_what_cannot_be_loaded_is_named(run: Path, tmp_path: Path) -> None:
    absent = converse(tmp_path / "absent", b"uci\n")
    assert absent.returncode == 2
    assert b"no run at" in absent.stderr
    hurt = tmp_path / "hurt"
    shutil.copytree(run, hurt)
    for file in hurt.glob("checkpoints/*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-16])
    done = converse(hurt, b"uci\nisready\n")
    assert done.returncode == 1
    assert b"uciok" in done.stdout
    assert b"info string" in done.stdout.splitlines()[-1]
    with pytest.raises(SystemExit):
        uci.main(["--checkpoint", str(run), "--simulations", "-1"])


def test_without_a_name_the_training_that_ended_last_plays(reports: Path, run: Path) -> None:
    assert newest_complete("chess") is None, "shipped plays"
    for number, (name, kind) in enumerate({"old": "train", "new": "train", "tried": "overfit"}.items()):
        shutil.copytree(run, reports / name)
        (reports / name / "run.json").write_text(json.dumps({"kind": kind, "requested": {"task": "chess"}}))
        (reports / name / "summary.json").write_text(f'{{"complete": true, "ended": "2026-01-0{number + 1}"}}')
    assert newest_complete("chess") == reports / "new"


def test_a_line_without_end_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"position startpos moves " + b"e2e4 " * 4_000_000 + b"\nquit\n")
    lines: uci.Lines = queue.SimpleQueue()
    handle = os.open(tmp_path / "lines", os.O_RDONLY)
    uci.read_lines(handle, lines)
    os.close(handle)
    assert len(lines.get() or "") < 2 * uci.MAX_LINE_BYTES
    assert (lines.get(), lines.get(), lines.get()) == ("quit", "", None)
