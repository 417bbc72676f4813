"""What the data notebook is asked to do: files brought in by parameters, the folder that is meant, a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from matrixlib.data.catalogue import Catalogue
from matrixlib.tasks.chess.importers import delivery
from matrixlib.tasks.chess.importers.import_files import ImportStopped

MATED = '[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0\n\n'
OPEN = '[Event "x"]\n\n1. e4 e5 2. Nf3 *\n\n'


@pytest.fixture
def games(tmp_path: Path) -> Path:
    path = tmp_path / "games.pgn"
    path.write_text(MATED + OPEN)
    return path


def test_several_files_are_brought_in_each_with_its_reader(games: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.epd").write_text("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8+;\n")
    folder = tmp_path / "f"
    text = delivery.bring_in(f"{games}, {tmp_path / 'suite.epd'},", folder, workers=1)
    assert text.startswith("games.pgn (pgn)\n2 entries: 1 stored, 1 in quarantine, 0 left out\n")
    assert "\n\nsuite.epd (epd)\n1 entries: 1 stored" in text
    assert {row.source for row in Catalogue(folder).shards()} == {"pgn", "epd"}
    assert "nothing new" in delivery.bring_in(str(games), folder, workers=1)


def test_repair_takes_the_result_from_the_board(games: Path, tmp_path: Path) -> None:
    delivery.bring_in(str(games), tmp_path / "f", workers=1)
    again = delivery.bring_in(str(games), tmp_path / "f", repair=True, workers=1)
    assert "2 entries: 1 stored, 0 in quarantine, 1 left out" in again
    assert "stored before" in again


def test_a_kind_is_named_for_files_whose_ending_says_nothing(games: Path, tmp_path: Path) -> None:
    odd = games.rename(tmp_path / "games.txt")
    with pytest.raises(ValueError, match="unknown kind of file"):
        delivery.bring_in(str(odd), tmp_path / "f")
    assert "1 stored" in delivery.bring_in(str(odd), tmp_path / "f", kind="pgn", workers=1)
    with pytest.raises(ValueError, match=r"unknown kind 'pgm', did you mean 'pgn'.*known: auto, pgn"):
        delivery.bring_in(str(odd), tmp_path / "f", kind="pgm")


def test_every_path_is_checked_before_the_first_is_read(games: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.pgn: no such file"):
        delivery.bring_in(f"{games},{tmp_path / 'nowhere.pgn'}", tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_nothing_to_bring_in_is_nothing(tmp_path: Path) -> None:
    assert delivery.bring_in(" , ", tmp_path / "f") == ""
    assert not (tmp_path / "f").exists()


def test_the_folder_that_is_meant(reports: Path, tmp_path: Path) -> None:
    assert delivery.place(str(tmp_path), "") == tmp_path
    assert delivery.place("", "a.pgn") == reports / "data"
    assert delivery.place("", "").name.startswith("sample-")


def test_the_catalogue_is_copied_and_comes_back(games: Path, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    delivery.bring_in(str(games), folder, workers=1)
    name = Catalogue(folder).shards()[0].name
    said = delivery.back_up(folder, str(tmp_path / "copy.sqlite"))
    assert "copied to" in said
    Catalogue(folder).set_quality(name, {})
    assert Catalogue.restore(folder, tmp_path / "copy.sqlite").shards()[0].quality["records"] == 3
    with pytest.raises(ValueError, match="cannot be written"):
        delivery.back_up(folder, str(tmp_path / "none" / "copy.sqlite"))


def test_import_stopped_is_an_error_of_ours() -> None:
    assert ImportStopped.__module__.startswith("matrixlib."), "so that a notebook shows it as one line"
