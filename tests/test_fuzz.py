"""Seeded damage of files and hostile requests: whatever is asked, the answer is success or an error that names the
thing, in a short line; nothing that existed changes."""

import gzip
import io
import random
import shutil
import string
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import chess
import pytest
from networks import random_net
from options import options_of

import matrixlib
from matrixlib.config import nest
from matrixlib.data.catalogue import Catalogue
from matrixlib.runs import browse, report, watch
from matrixlib.runs import run as runs
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.evaluate.puzzles import read_epd, read_puzzles
from matrixlib.tasks.chess.importers.import_files import import_files, reader_of
from matrixlib.tasks.chess.stockfish.sample import unpack_sample

HOSTILE: list[Any] = [None, True, -1, 0, 0.5, 1e308, float("nan"), float("inf"), 2**70, -(2**63), "", "x" * 5000]
HOSTILE += ["a\0b", "auto", "..", "/", "\ud800", [], [0], {}, {"a": {"b": 1}}, ["x"] * 1000]
TINY: dict[str, Any] = {
    "data": {"limit": 256},
    "model": {"channels": 8, "blocks": 0},
    "train": {"steps": 2, "batch_size": 16},
    "validation": {"limit": 64, "sample": 32},
    "checkpoint": {"interval": 1},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
}
GAME = '[Event "x"]\n[Result "1-0"]\n\n1. e4 {[%eval 0.3]} e5 2. Qh5 Nc6 3. Bc4 Nf6 4. Qxf7# 1-0\n\n'
PUZZLES = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl\n"
PUZZLES += "1,6k1/4rppp/8/8/8/8/5PPP/3R2K1 b - - 0 1,e7a7 d1d8,900,80,90,100,short,u\n"
LONGEST = 6000  # characters of a message: the nearest names, and the value


def damaged(data: bytes, draw: random.Random) -> bytes:
    """One damage: cut short, bits flipped, zeros, a part removed, doubled or replaced, or nothing left."""
    at, size = draw.randrange(len(data) + 1), draw.choice((1, 8, 512, 4096))
    noise = draw.randbytes(size)
    return draw.choice(
        (
            lambda: data[:at],
            lambda: data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :] if at < len(data) else data,
            lambda: data[:at] + bytes(size) + data[at + size :],
            lambda: data[:at] + data[at + size :],
            lambda: data[:at] + data[at : at + size] * 2 + data[at + size :],
            lambda: data[:at] + noise + data[at + size :],
            lambda: b"",
            lambda: noise,
        )
    )()


def answered(ask: Callable[[], Any]) -> Any:
    """What is answered without a word, None for a refusal or a warning in short; other exceptions are the test's."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer, words = ask(), [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
        except ValueError as error:
            answer, words = None, [str(error)]
    if any(not 0 < len(text) <= LONGEST for text in words):
        raise AssertionError(f"no short line: {words[0][:500]}")
    return None if words else answer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reports root with a finished run, a data set, and files to bring in."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIXLIB_REPORTS", str(root / "reports"))
        with closing(runs.open_run("demo", run="done", overrides=TINY)) as run:
            for _ in run.train():
                pass
    shutil.copytree(unpack_sample(), root / "reports" / "data")
    files = {"games.pgn": GAME * 3, "puzzles.csv": PUZZLES, "mates.epd": "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8+;\n"}
    for name, text in files.items():
        (root / name).write_text(text)
    (root / "games.pgn.gz").write_bytes(gzip.compress((GAME * 3).encode()))
    return root


@pytest.fixture(scope="module")
def net() -> Any:
    return random_net()


def file_cases(root: Path) -> Iterator[tuple[Path, Callable[[], Any]]]:
    """(file to damage, what then reads it, and the network's moves where it does not refuse)."""
    reports = root / "reports"
    run = reports / "done"

    def status() -> None:
        watch.run_status(run)
        browse.known_runs()
        report.frame(reports)

    def moves() -> dict[str, float]:
        return dict(matrixlib.load(run, device="cpu").evaluate(chess.STARTING_FEN)[0].moves)

    def whole(path: Path) -> bool | None:
        catalogue = Catalogue(reports / "data", warn=False)
        named = {*catalogue.verify(lambda row: row.path), *(row.name for row in catalogue.shards(state="quarantined"))}
        return path.name in named if path.suffix == ".npz" else None

    for path in sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".html"):
        yield path, moves
        yield path, lambda: report.write_report(run) and None
        yield path, status
        yield path, lambda: runs.open_run("demo", run="done", overrides=TINY).close()
    for path in sorted((reports / "data").iterdir()):
        yield path, partial(whole, path)
    for name in ("games.pgn", "games.pgn.gz", "puzzles.csv", "mates.epd"):
        path = root / name
        yield path, lambda path=path: import_files(path, root / "in", reader_of(path), 1) and None
    yield root / "puzzles.csv", lambda: read_puzzles(root / "puzzles.csv") and None
    yield root / "mates.epd", lambda: read_epd(root / "mates.epd") and None


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 10))])
def test_a_damaged_file_is_named_or_of_no_consequence(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    root = tmp_path / "root"
    shutil.copytree(made, root)
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(root / "reports"))
    cases = list(file_cases(root))
    right = cases[0][1]()
    for number in range(100 * part, 100 * (part + 1)):
        draw = random.Random(number)
        path, ask = draw.choice(cases)
        good = path.read_bytes()
        if (bad := damaged(good, draw)) == good:
            continue
        path.write_bytes(bad)
        try:
            assert answered(ask) in (None, right, True), "accepted without a word"
        except Exception as error:
            raise AssertionError(f"case {number}: {path.relative_to(root)}") from error
        path.write_bytes(good)


def hostile_cases(net: Any, draw: random.Random) -> Callable[[], Any]:
    """A request out of bounds, of one of the ways to ask for something."""
    value, task = draw.choice(HOSTILE), draw.choice(("demo", "latin_demo", "melee_demo"))
    names = [row[0] for row in options_of(type(load_config(task)))]
    fen = list(draw.choice((chess.STARTING_FEN, "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1", "8/P6k/8/8/8/8/8/K7 b - -")))
    word, mapping = value if isinstance(value, str) else "demo", value if isinstance(value, dict) else None
    for _ in range(draw.randrange(1, 4)):
        fen[draw.randrange(len(fen))] = draw.choice(string.printable)
    text = "".join(fen)
    return draw.choice(
        (
            lambda: load_config(task, nest({draw.choice(names): value})),
            lambda: load_config(task, {draw.choice(names).split(".")[0]: value}),
            lambda: load_config(word, mapping),
            lambda: runs.open_run(run=word if len(word) > 4 or "." in word else "../x"),
            lambda: runs.open_run("demo", steps=-1 if value is None else -5, overrides=TINY),
            lambda: net.evaluate(draw.choice((text, [text, text], value))),
            lambda: matrixlib.load(value),
            lambda: matrixlib.load("done", checkpoint=word, device="cpu"),
            lambda: report.main([word]),
            lambda: watch.main([word]),
        )
    )


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 10))])
def test_a_hostile_request_is_refused_in_a_line_and_changes_nothing(
    made: Path, net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(made / "reports"))
    monkeypatch.chdir(tmp_path)
    before = contents(made / "reports" / "done")
    for number in range(100 * part, 100 * (part + 1)):
        ask = hostile_cases(net, random.Random(number))
        try:
            answered(ask)
        except Exception as error:
            raise AssertionError(f"case {number}") from error
    after = contents(made / "reports" / "done")
    for name in ("report.html", "training.png"):  # written again where nothing else was asked for
        before.pop(name, None), after.pop(name, None)
    assert after == before
    assert sorted(path.name for path in (made / "reports").iterdir() if path.name != "index.html") == ["data", "done"]
    assert list(tmp_path.iterdir()) == []
