"""Seeded damage of files, hostile requests and commands: whatever is asked, the answer is success or an error that
names the thing, in a short line; nothing that existed changes."""

import gzip
import io
import json
import os
import random
import shutil
import string
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import chess
import nbformat
import psutil
import pytest
from cells import run_notebook
from networks import random_net
from options import options_of

import matrixlib
from matrixlib.config import nest
from matrixlib.data.catalogue import Catalogue
from matrixlib.files import NOTEBOOKS
from matrixlib.runs import browse, compare, cycle, notebook, report, tensorboard, watch
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
SWEEP: dict[str, Any] = {
    "steps": 2,
    "space": {"optim.optimiser": ["adamw", "muon"]},
    "overrides": {
        "data": {"limit": 256},
        "train": {"batch_size": 16},
        "validation": {"interval": 1, "sample": 32, "limit": 64, "full_every": 1},
        "model": {"channels": 8, "blocks": 0},
    },
}
CYCLE: dict[str, Any] = {
    "generations": 1,
    "games": 20,
    "chunk": 10,
    "selfplay": {"parallel": 20, "num_simulations": 4, "num_quick_simulations": 2, "plies": 12},
    "match": {"pairs": 2, "batch": 1, "num_simulations": 2, "plies": 12, "anchor_pairs": 1},
    "network": {"train": {"steps": 2, "batch_size": 16}, "model": {"channels": 8, "blocks": 0}},
}
GAME = '[Event "x"]\n[Result "1-0"]\n\n1. e4 {[%eval 0.3]} e5 2. Qh5 Nc6 3. Bc4 Nf6 4. Qxf7# 1-0\n\n'
PUZZLES = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl\n"
PUZZLES += "1,6k1/4rppp/8/8/8/8/5PPP/3R2K1 b - - 0 1,e7a7 d1d8,900,80,90,100,short,u\n"
LONGEST = 6000  # characters of a message: the nearest names, and the value
parts = pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 20))])


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
    teachers = shutil.ignore_patterns("teacher-*")  # stored outputs of networks of other tests
    shutil.copytree(unpack_sample(), root / "reports" / "data", ignore=teachers)
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
        yield path, lambda path=path: import_files(path, root / "in", reader_of(path), workers=1) and None
    yield root / "puzzles.csv", lambda: read_puzzles(root / "puzzles.csv") and None
    yield root / "mates.epd", lambda: read_epd(root / "mates.epd") and None


@parts
def test_a_damaged_file_is_named_or_of_no_consequence(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    root = tmp_path / "root"
    shutil.copytree(made, root)
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(root / "reports"))
    cases = list(file_cases(root))
    right = cases[0][1]()
    for number in range(50 * part, 50 * (part + 1)):
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


@parts
def test_a_hostile_request_is_refused_in_a_line_and_changes_nothing(
    made: Path, net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(made / "reports"))
    monkeypatch.chdir(tmp_path)
    before = contents(made / "reports" / "done")
    for number in range(50 * part, 50 * (part + 1)):
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


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reports root with a sweep `s` and a cycle `c`."""
    root = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("MATRIXLIB_REPORTS", str(root))
        run_notebook("sweep", device="cpu", sweep="s", overrides=SWEEP)
        run_notebook("cycle", device="cpu", cycle="c", overrides=CYCLE)
    return root


def folder_cases(root: Path) -> list[tuple[Callable[[], Any], tuple[str, ...], tuple[str, ...]]]:
    """(what reads or resumes, beginnings of the files to damage, beginnings of what it may write)."""

    def cycle_best() -> Any:
        current = cycle.open_cycle("demo", "cpu", "c", CYCLE)
        return current.history(), current.decisions(), current.network(current.best)

    def status() -> None:
        for name in ("s", "s-000-s0", "c", "c-001"):
            watch.run_status(root / name)
        browse.known_runs(), report.frame(root)

    def table() -> Any:
        return compare.results({"A": [root / "s-000-s0"], "B": [root / "s-001-s0"]})

    sweep, trial = ("s/", "s-00"), "s-000-s0/"
    pages = tuple(f"{name}/{file}" for name in ("c", "c-001") for file in ("report.html", "training.png"))
    return [
        (partial(run_notebook, "sweep", device="cpu", sweep="s", overrides=SWEEP), sweep, sweep),
        (partial(run_notebook, "cycle", device="cpu", cycle="c", overrides=CYCLE), ("c",), ("c", "index.html")),
        (cycle_best, ("c",), ()),
        (lambda: matrixlib.load("c-001", device="cpu").evaluate(chess.STARTING_FEN), ("c-001",), ()),
        (lambda: [report.write_report(root / name) for name in ("c", "c-001")], ("c/", "c-001/run", "c-001/m"), pages),
        (partial(report.write_index, root), ("c/", "c-001/", "s-"), ("index.html",)),
        (status, ("c/", "c-001/", "s-"), ()),
        (table, sweep, ()),
        (lambda: load_config(str(root / "s" / "best.yaml")), ("s/best",), ()),
        (lambda: tensorboard.main([trial]), (f"{trial}run", f"{trial}metrics"), (f"{trial}events",)),
    ]


@parts
def test_a_damaged_sweep_or_cycle_is_named_and_what_else_there_is_stays(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    root = tmp_path / "reports"
    shutil.copytree(searched, root)
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(root))
    good, cases = contents(root), folder_cases(root)
    for number in range(30 * part, 30 * (part + 1)):
        draw = random.Random(number)
        ask, reads, writes = draw.choice(cases)
        name = draw.choice([name for name in sorted(good) if name.startswith(reads)])
        (root / name).write_bytes(damaged(good[name], draw))
        before = contents(root)
        try:
            answered(ask)
        except Exception as error:
            if not notebook._ours(error, error.__traceback__):
                raise AssertionError(f"case {number}: {name}") from error
        after = contents(root)
        changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
        assert [path for path in changed if not path.startswith(writes)] == [], f"case {number}: {name}"
        for path in {*after, *good}:
            if path not in good:
                (root / path).unlink()
            elif after.get(path) != good[path]:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(good[path])


# Commands, each in a process of its own

COMMAND_SECONDS, COMMAND_BYTES = 60.0, 2 * 2**30
NOT_SAID = ("Traceback", "KeyError", "TypeError", "AttributeError", "IndexError", "AssertionError", "OSError", " ")


def ended(words: list[str], folder: Path, sent: bytes = b"", **env: str) -> tuple[int, str]:
    """Exit code and stderr of a command within its limits of time and resident memory, children included."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err, (folder / "in").open("wb+") as given:
        given.write(sent)
        given.seek(0)
        place = folder / "empty"
        place.mkdir(exist_ok=True)
        command = psutil.Popen(words, cwd=place, stdin=given, stdout=out, stderr=err, env=os.environ | env)
    ends, most = time.monotonic() + COMMAND_SECONDS, 0
    while command.poll() is None:
        with suppress(psutil.Error):
            most = max(most, sum(one.memory_info().rss for one in (command, *command.children(recursive=True))))
        if time.monotonic() > ends or most > COMMAND_BYTES:
            for one in (*command.children(recursive=True), command):
                one.kill()
            raise AssertionError(f"{words}: {most / 2**20:.0f} MiB, or more than {COMMAND_SECONDS:.0f} s")
        time.sleep(0.05)
    assert list(place.iterdir()) == []
    return command.returncode, (folder / "err").read_text(errors="replace")


def hostile_command(draw: random.Random, folder: Path) -> tuple[list[str], bytes, dict[str, str]]:
    """(words, standard input, environment) of a command with something out of bounds."""
    words = ["", "..", "/", "../done", "x" * 5000, "-1", "nan", "1e308", "auto", "a\nb", "\udcff", "données"]
    word, module = draw.choice(words), [sys.executable, "-m"]
    kind = draw.choice(("launch", "report", "watch", "tensorboard", "uci", "papermill", "papermill"))
    if kind == "launch":
        names = ("--preset", "--run", "--steps", "--device", "--ranks", "--target-loss", "MATRIXLIB_DEVICE")
        option, value = draw.choice(names), word or "-1"
        if option == "MATRIXLIB_DEVICE":
            return [*module, "matrixlib.runs.launch", "--preset", "demo"], b"", {option: "nonsense"}
        if (option, value) in {("--device", "auto"), ("--run", "auto"), ("--run", "nan"), ("--run", "1e308")}:
            value = "a/b"  # the others would train
        value = "a/b" if option == "--run" and value in ("données", "-1") else value
        return [*module, "matrixlib.runs.launch", "--preset", "demo", f"{option}={value}"], b"", {}
    if kind == "uci":
        fen = "".join(draw.choice(string.printable) for _ in range(draw.randrange(200)))
        lines = ["uci", f"position fen {fen}", f"position startpos moves e2e5 {word}", "go nodes -1", "go nodes 3"]
        lines += [f"setoption name Hash value {word}", f"setoption name {word}", f"go movetime {word}", fen, "isready"]
        sent = "\n".join(draw.sample(lines, len(lines))) + "\nquit\n"
        run = draw.choice(("done", "done", "done", word))
        return (
            [*module, "matrixlib.tasks.chess.uci.engine", f"--checkpoint={run}", "--device=cpu"],
            sent.encode(errors="replace"),
            {},
        )
    if kind == "papermill":
        name = draw.choice(("train", "overfit", "eval", "eval", "compare", "sweep", "data", "distill", "play", "latin"))
        cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4).cells
        (source,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
        declared = [line.partition(":")[0] for line in source.splitlines() if ":" in line]
        value = draw.choice([None, float("nan"), 2**70, "x" * 300, "../x", ["x"], {"a": {"b": 1}}])
        given = {"run": "done"} if "run" in declared and name in ("eval", "play") else {}
        bad = json.dumps(given | {draw.choice(declared): value}).replace("NaN", ".nan")
        path = [str(NOTEBOOKS / f"{name}.ipynb"), str(folder / "out.ipynb")]
        return [*module, "papermill", *path, "--no-progress-bar", "-y", bad], b"", {}
    return [*module, f"matrixlib.runs.{kind}", draw.choice((word, "done"))], b"", {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 41))])
def test_a_hostile_command_ends_in_a_sentence_and_changes_nothing(made: Path, tmp_path: Path, number: int) -> None:
    draw, root = random.Random(number), tmp_path / "reports"
    shutil.copytree(made / "reports", root)
    run = [path for path in sorted((root / "done").rglob("*")) if path.is_file()]
    if draw.random() < 0.5:
        (bad := draw.choice(run)).write_bytes(damaged(bad.read_bytes(), draw))
    before = contents(root)
    words, sent, env = hostile_command(draw, tmp_path)
    code, said = ended(words, tmp_path, sent, MATRIXLIB_REPORTS=str(root), MATRIXLIB_LIVE="0", **env)
    lines = said.rstrip().splitlines() or [""]
    assert not code or (lines[-1] and len(lines[-1]) <= LONGEST and not lines[-1].startswith(NOT_SAID)), said[-3000:]
    assert "papermill" in words or "Traceback" not in said, said[-3000:]
    after = contents(root)
    if code or "matrixlib.runs.watch" in words:
        assert {*after} - {*before} <= {"index.html"}
    own = ("index.html", "done/report.html", "done/training.png", "done/summary.json", "done/events")
    assert [name for name in before if after[name] != before[name] and not name.startswith(own)] == []
