"""Positions labelled by Stockfish; skipped with the reason where there is none."""

from pathlib import Path

import chess
import numpy as np
import pytest
from readers import read_file, same

from matrixlib.tasks.chess.importers import labels
from matrixlib.tasks.chess.importers.labels import Labelled
from matrixlib.tasks.chess.stockfish.client import EngineError, Stockfish

MATE = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 5 40"
HANGING = "4k3/8/8/3q4/4P3/2N5/8/4K3 w - -"
LINES = (MATE, f'{HANGING} bm exd5; id "queen";', chess.STARTING_FEN, chess.Board(MATE).mirror().fen())
BAD = {"rubbish": "not a position of chess", "8/8/8/8/8/8/8/8 w - - 0 1": "not a position of chess"}
LEFT_OUT = {"# comment": "comment", "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1": "game over"}


def write(folder: Path, *lines: str) -> Path:
    path = folder / "positions.fen"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_labels(tmp_path, engine: Stockfish):
    lines = [*BAD, *LINES, *LEFT_OUT]
    whole = read_file(Labelled(str(engine.path)), write(tmp_path, *lines))
    assert (whole.entries, whole.stored) == (len(lines), len(LINES))
    assert [(item.entry, item.reason, item.text) for item in whole.refused] == [
        (number, reason, line) for number, (line, reason) in enumerate(BAD.items())
    ]
    assert whole.skipped == dict.fromkeys(LEFT_OUT.values(), 1)
    records = whole.batch["records"]
    assert [board.epd() for board in whole.boards()] == [" ".join(line.split()[:4]) for line in LINES]
    assert max(whole.policy(0), key=whole.policy(0).get) == "d1d8"
    assert max(whole.policy(1), key=whole.policy(1).get) in ("e4d5", "c3d5")
    assert records["wdl"][0].tolist() == [65535, 0, 0]
    assert records["wdl"][2].argmax() == 1
    assert (records["result"] == 2).all()
    assert records["halfmove"].tolist() == [5, 0, 0, 5]


def test_a_label_follows_from_the_position_alone(tmp_path, engine: Stockfish, monkeypatch):
    reader = Labelled(str(engine.path), shallow_depth=2, deep_depth=4)
    whole = read_file(reader, write(tmp_path, *LINES))
    monkeypatch.setattr(labels, "PART", 60)
    parted = read_file(reader, write(tmp_path, *LINES))
    assert parted.parts > 1
    assert same(whole.batch, parted.batch)
    turned = read_file(reader, write(tmp_path, *LINES[::-1]))
    assert np.array_equal(turned.batch["records"][::-1], whole.batch["records"])
    # The position and its mirror image for the other side have one label.
    offset = whole.batch["policy_offset"]
    weights = [whole.batch["policy_weight"][offset[row] : offset[row + 1]] for row in (0, 3)]
    assert np.array_equal(*weights)
    assert (whole.batch["records"]["wdl"][0] == whole.batch["records"]["wdl"][3]).all()
    assert whole.batch["records"]["game"][0] == whole.batch["records"]["game"][3]


def test_depths_matter(tmp_path, engine: Stockfish):
    path = write(tmp_path, chess.STARTING_FEN)
    one, other = (read_file(Labelled(str(engine.path), 1, depth), path).batch for depth in (2, 9))
    assert not same(one, other)


def test_without_an_engine_the_remedy_is_told(tmp_path):
    reader = Labelled(str(tmp_path / "no-such-stockfish"))
    with pytest.raises(EngineError, match="apt install stockfish"):
        list(reader.parts(write(tmp_path, MATE)))


def test_nothing_to_label_needs_no_engine_at_work(tmp_path, engine: Stockfish):
    whole = read_file(Labelled(str(engine.path)), write(tmp_path, *BAD, *LEFT_OUT))
    assert (whole.entries, whole.stored) == (4, 0)
