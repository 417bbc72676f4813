"""A set made again after more games, and folders that hold what others made; engine and labels are stand-ins."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from test_packing import make_work

from matrixlib.data.catalogue import Catalogue
from matrixlib.files import FolderError
from matrixlib.tasks.chess.stockfish import generator as sources
from matrixlib.tasks.chess.stockfish import packing
from matrixlib.tasks.chess.stockfish.sample import make_set


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(folder: Path, games: int, *_: Any) -> dict[str, Any]:
        make_work(folder, games)
        return {"chunks": games}

    monkeypatch.setattr(sources, "generate", generate)


def test_made_again_with_more_games_every_shard_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHARD", 100)
    for chunks in (2, 4, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = make_set(str(tmp_path), chunks)
        assert made["illegal"] == 0
        rows = Catalogue(tmp_path / "shards").shards(state=None)
        assert {row.state for row in rows} == {"healthy"}
        assert len(rows) == made["shards"] > 2
        assert sum(row.count for row in rows) == made["positions_in_all"]
        rows[0].path.unlink()  # what is lost is made again


def test_shards_that_others_made_are_left_alone(tmp_path: Path) -> None:
    make_set(str(tmp_path / "a"), 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "shards").rename(tmp_path / "b" / "shards")  # of a cycle, or of other chunks
    before = {path.name: path.read_bytes() for path in (tmp_path / "b" / "shards").glob("*.npz")}
    for _ in range(2):
        with pytest.raises(ValueError, match="chunks: give another folder as `out`"):
            make_set(str(tmp_path / "b"), 2)
        assert {path.name: path.read_bytes() for path in (tmp_path / "b" / "shards").glob("*.npz")} == before
        sources.open_folder(tmp_path / "b" / "chunks", sources.Parameters(seed=9), "another engine")


def test_nothing_else_in_the_folder_is_deleted(tmp_path: Path) -> None:
    make_set(str(tmp_path), 1)
    note = tmp_path / "shards" / "imports" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    make_set(str(tmp_path), 2)
    assert note.read_text() == "mine"


@pytest.mark.parametrize(
    "options", [{"games": 0}, {"games": -1}, {"workers": 0}, {"seed": -5}, {"nodes": (500, 100)}, {"nodes": (0, 5)}]
)
def test_numbers_that_make_no_set_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give whole numbers from 1, "):
        make_set(str(tmp_path / "s"), **options)
    assert not (tmp_path / "s").exists()
    with pytest.raises(FolderError, match="cannot be written: File name too long"):
        make_set("x" * 5000)
