"""The census as tables and pictures: every number of a small set, openings by their pawns, the quarantine by reason."""

from __future__ import annotations

from pathlib import Path

import chess
import numpy as np
import pytest
from census_shards import BARE, QUEEN_UP, batch_of, game, write

from matrixlib.data.catalogue import Catalogue
from matrixlib.runs.figures import png
from matrixlib.tasks.chess.importers import census, ledger
from matrixlib.tasks.chess.importers import duplicates as merging
from matrixlib.tasks.chess.importers import import_files as intake
from matrixlib.tasks.chess.importers.census import look
from matrixlib.tasks.chess.importers.pgn import Pgn

WON = (65535, 0, 0)


def test_a_table_is_aligned_numbers_to_the_right() -> None:
    rows = [("what", "count", "share"), ("a", 1234, "50.0%"), ("longer", 5, "5.0%")]
    assert ledger.table(rows).splitlines() == [
        "what    count  share",
        "a       1,234  50.0%",
        "longer      5   5.0%",
    ]


def test_contents_by_source_and_split_with_what_is_kept_out(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of(game("e4 e5 Nf3"), game=7))
    write(tmp_path, "b", batch_of([BARE], game=7))
    write(tmp_path, "c", batch_of([QUEEN_UP]), source="puzzles")
    write(tmp_path, "d", batch_of([QUEEN_UP]), split="validation")
    Catalogue(tmp_path).quarantine("c.npz", "one too many")
    lines = ledger.contents(look(tmp_path)).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["pgn", "train", "5", "1", "0.0", "2", "0"],  # one game over two shards
        ["pgn", "validation", "1", "1", "0.0", "1", "0"],
        ["puzzles", "train", "0", "0", "0.0", "0", "1"],
    ]
    assert lines[4:] == ["kept out: c.npz: one too many"]


def test_shards_that_were_merged_are_not_kept_out_and_the_accounts_still_add_up(tmp_path: Path) -> None:
    for name, moves in (("one", "1. e4 e5 2. Nf3"), ("two", "1. e4 e5 2. f4")):
        (tmp_path / f"{name}.pgn").write_text(f'[Event "{name}"]\n\n{moves} *\n')
        intake.take_in(tmp_path / f"{name}.pgn", tmp_path / "f", workers=1, progress=False)
    merging.deduplicate(tmp_path / "f")
    found = look(tmp_path / "f")
    assert sum(row.count for row in found.healthy) == 3
    assert len(found.rows) > len(found.healthy)
    assert found.kept_out == []
    assert "kept out:" not in ledger.contents(found)
    assert census.account_faults(found) == []
    for path in (tmp_path / "f").glob("catalogue*"):
        path.unlink()
    found = look(tmp_path / "f")
    assert len(found.rows) == len(found.healthy), "a rebuilt catalogue knows nothing of them"
    assert census.account_faults(found) == []


def test_repairs_of_the_catalogue_are_told(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([BARE]))
    write(tmp_path, "b", batch_of([BARE]))
    assert len(ledger.contents(look(tmp_path)).splitlines()) == 2
    (tmp_path / "a.npz").unlink()
    lines = ledger.contents(look(tmp_path)).splitlines()
    assert lines[2] == "kept out: a.npz: the file is missing"
    assert "the file is missing; quarantined" in lines[3]


def test_imports_and_quarantine_are_listed(tmp_path: Path) -> None:
    mated = '[Event "{}"]\n[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0\n\n'
    games = "".join(mated.format(number) for number in range(5))
    (tmp_path / "in.pgn").write_text(games + '[Event "open"]\n\n1. e4 e5 *\n\n[Event "bad"]\n\n1. e5 *\n')
    intake.take_in(tmp_path / "in.pgn", tmp_path / "f", workers=1, progress=False)
    found = look(tmp_path / "f")
    assert ledger.imports(found).splitlines()[1].split() == ["in.pgn", "pgn", "7", "1", "6", "0", "2"]
    text = ledger.quarantine(found)
    first, second = text.splitlines()[1:3]
    assert first.split() == ["result", "contradicts", "the", "board", "5"]
    assert second.split()[-1] == "1"
    assert text.count("in.pgn, entry ") == 3 + 1, "the first three of a reason"
    assert "in.pgn, entry 0: result contradicts the board" in text
    assert '    [Event "0"] [Result "1-0"] 1. f3 e5 2. g4 Qh4# 1-0' in text
    assert "in.pgn, entry 6: " in text
    intake.take_in(tmp_path / "in.pgn", tmp_path / "f", Pgn(repair=True), workers=1, progress=False)
    lines = ledger.imports(look(tmp_path / "f")).splitlines()[1:]
    assert sorted(line.split()[1:3] for line in lines) == [["pgn", "7"], ["pgn", "repair"]]


def test_without_imports_it_says_so(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([BARE]))
    found = look(tmp_path)
    assert "no account" in ledger.imports(found)
    assert ledger.quarantine(found) == "nothing is in quarantine"
    assert ledger.openings(found) == []
    assert ledger.openings_table(found, []).startswith("0 records after 4 to 8 half moves")


def test_distributions_by_source(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([QUEEN_UP, BARE, BARE], result=[1, 0, 2], wdl=[WON, (0, 0, 0), (0, 0, 0)]))
    write(tmp_path, "b", batch_of([BARE], weighted=False), source="puzzles")
    rows = {line.split("  ")[0]: line for line in ledger.distributions(look(tmp_path)).splitlines()}
    assert rows["in the sample"].split()[-2:] == ["pgn", "puzzles"]
    assert rows["records"].split() == ["records", "3", "1"]
    assert "5.0 ± 2.8" in rows["pieces on the board"]
    assert rows["result known"].split()[2:] == ["66.7%", "0.0%"]
    text = ledger.distributions(look(tmp_path))
    assert "50%, 50%, 0%" in text
    assert "1.00 ± 0.00" in text
    assert rows["policy known"].split()[2:] == ["100.0%", "0.0%"]
    assert text.endswith("2 of 4 records repeat a position of the sample; 0 positions are in both splits")


def test_openings_are_told_apart_by_their_pawns_whoever_moves(tmp_path: Path) -> None:
    sicilian, spanish = "e4 c5 Nf3 Nc6", "e4 e5 Nf3 Nc6 Bb5"
    fens = [*game(sicilian)[4:], *game(sicilian)[4:], *game("Nf3 c5 e4 d6 Nc3")[5:], *game(spanish)[4:]]
    fens += [*game("e4 c5 Nf3 Nf6 Nc3")[4:], *game("e4 d5 exd5 Qxd5")[4:]]
    write(tmp_path, "a", batch_of(fens))
    found = look(tmp_path)
    first, second, *rest = ledger.openings(found)
    assert (first.name, first.records, first.times) == ("e4 / c5", 4, 2)
    assert first.share == pytest.approx(4 / 8)
    assert first.board.fen() == game(sicilian)[4]
    assert (second.name, second.records, second.times) == ("e4 / e5", 2, 1)
    assert {one.name for one in rest} == {"e4 / c5 d6", "- (less 1) / - (less 1)"}
    text = ledger.openings_table(found, [first, second])
    assert text.startswith("8 records after 4 to 8 half moves, 7 different positions\n")
    assert game(sicilian)[4].rsplit(" ", 4)[0] in text, "board and side to move"


def test_doubts_name_the_place_and_the_position(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        batch_of([BARE] + [QUEEN_UP] * 4, result=[2, -1, -1, -1, -1], wdl=[(0, 0, 0), *[WON] * 4]),
    )
    found = look(tmp_path)
    text = ledger.doubts(found, census.suspects(found.batch))
    assert "value against result        4         80.00%" in text
    assert "a.npz, record 1: win-draw-loss gives +1.00 points, the game gave -1" in text
    assert text.count(QUEEN_UP) == 3
    write(tmp_path / "good", "a", batch_of([BARE]))
    good = look(tmp_path / "good")
    assert ledger.doubts(good, census.suspects(good.batch)) == "no record of the sample is suspicious"


def test_outliers_are_listed_and_drawn(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path, f"s{number}", batch_of([BARE] * 20 if number == 3 else game("e4 e5"), game=number))
    found = look(tmp_path)
    distances = census.distances(found)
    text = ledger.outliers(found, distances)
    assert text.startswith("10 of 10 shards")
    assert {line.split()[0] for line in text.splitlines()[2:]} == {"s3.npz"}
    (axes,) = ledger.shards_figure(distances).axes
    named = {text.get_text().split()[0] for text in axes.texts}
    assert named == {"s3.npz"}
    assert all(abs(line.get_xdata()[0]) <= 18 for line in axes.get_lines())
    assert ledger.outliers(found, {}) == "0 of 10 shards have enough others to compare them with"
    assert "none of their figures" in ledger.outliers(found, {"s3.npz": {"men": 1.0}})
    assert png(ledger.shards_figure({}))


def test_pictures_have_axes_and_every_board_its_fen(tmp_path: Path) -> None:
    fens = [*game("e4 e5 Nf3 Nc6 Bb5 a6"), QUEEN_UP, BARE]
    write(tmp_path, "a", batch_of(fens, result=-1, wdl=[(0, 0, 0)] * 7 + [WON, WON]))
    write(tmp_path, "b", batch_of(fens, weighted=False), source="puzzles")
    found = look(tmp_path)
    figure = ledger.distributions_figure(found)
    assert len(figure.axes) == 8
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["pgn", "puzzles"]
    assert png(figure)
    suspects = census.suspects(found.batch)
    boards = ledger.boards_figure(found, suspects)
    drawn = [
        "".join(axes.get_xlabel().split("\n")) for part in boards.subfigs for axes in part.axes if axes.axison
    ]
    assert all(chess.Board(fen).is_valid() for fen in drawn)
    random, suspicious = ([axes for axes in part.axes if axes.axison] for part in boards.subfigs)
    assert len(random) == 6
    assert sum(map(len, suspects.values())) >= len(suspicious) == 2
    assert "win-draw-loss gives" in suspicious[0].get_title()
    assert png(boards)
    assert png(ledger.boards_figure(found, {}))
    assert png(ledger.openings_figure(ledger.openings(found)))
    assert png(ledger.openings_figure([]))


def test_every_figure_of_a_position_with_nothing_known_can_be_drawn(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([BARE], weighted=False))
    found = look(tmp_path)
    assert np.isnan(census.columns(found.batch)["entropy"]).all()
    assert png(ledger.distributions_figure(found))
    assert png(ledger.boards_figure(found, census.suspects(found.batch)))
