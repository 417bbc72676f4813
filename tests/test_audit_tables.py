"""The audit as tables and pictures: every number of a small set, openings by their pawns, the quarantine by reason."""

from pathlib import Path

import chess
import numpy as np
import pytest
from chess_shards import BARE, QUEEN_UP, batch_of, game, write

from matrixlib.data.catalogue import Catalogue
from matrixlib.runs.figures import png
from matrixlib.tasks.chess.importers import audit_tables as tables
from matrixlib.tasks.chess.importers.audit import audit_folder, columns
from matrixlib.tasks.chess.importers.duplicates import deduplicate
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.importers.pgn import Pgn

WON = (65535, 0, 0)


def test_contents_by_source_and_split_with_what_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of(game("e4 e5 Nf3"), game=7))
    write(tmp_path, "b", batch_of([BARE], game=7))
    write(tmp_path, "c", batch_of([QUEEN_UP]), source="puzzles")
    write(tmp_path, "d", batch_of([QUEEN_UP]), split="validation")
    Catalogue(tmp_path).quarantine("c.npz", "one too many")
    report = audit_folder(tmp_path)
    assert tables.contents(report).reset_index().to_numpy().tolist() == [
        ["pgn", "train", "5", "1", "0.0", 2, 0],  # one game over two shards
        ["pgn", "validation", "1", "1", "0.0", 1, 0],
        ["puzzles", "train", "0", "0", "0.0", 0, 1],
    ]
    assert tables.problems(report)["where and why"].tolist() == ["c.npz: one too many"]


def test_shards_that_were_merged_are_no_problem_and_the_accounts_still_add_up(tmp_path: Path) -> None:
    for name, moves in (("one", "1. e4 e5 2. Nf3"), ("two", "1. e4 e5 2. f4")):
        (tmp_path / f"{name}.pgn").write_text(f'[Event "{name}"]\n\n{moves} *\n')
        import_files(tmp_path / f"{name}.pgn", tmp_path / "f", workers=1, progress=False)
    deduplicate(tmp_path / "f")
    for _ in range(2):
        report = audit_folder(tmp_path / "f")
        assert sum(row.count for row in report.healthy) == 3
        assert report.excluded == []
        assert report.merged
        assert len(tables.problems(report)) == 0
        assert report.account_faults() == []
        for path in (tmp_path / "f").glob("catalogue*"):
            path.unlink()


def test_repairs_of_the_catalogue_are_told(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([BARE]))
    write(tmp_path, "b", batch_of([BARE]))
    assert len(tables.problems(audit_folder(tmp_path))) == 0
    (tmp_path / "a.npz").unlink()
    lines = tables.problems(audit_folder(tmp_path)).reset_index().to_numpy().tolist()
    assert lines[0] == ["in quarantine", "a.npz: the file is missing"]
    assert "the file is missing; quarantined" in lines[1][1]


def test_imports_and_quarantine_are_listed(tmp_path: Path) -> None:
    mated = '[Event "{}"]\n[Result "1-0"]\n\n1. f3 e5 2. g4 Qh4# 1-0\n\n'
    games = "".join(mated.format(number) for number in range(5))
    (tmp_path / "in.pgn").write_text(games + '[Event "open"]\n\n1. e4 e5 *\n\n[Event "bad"]\n\n1. e5 *\n')
    import_files(tmp_path / "in.pgn", tmp_path / "f", workers=1, progress=False)
    report = audit_folder(tmp_path / "f")
    assert tables.imports(report).reset_index().to_numpy().tolist() == [["in.pgn", "pgn", 7, 1, 6, 0, 2]]
    assert tables.quarantine(report)["entries"].to_dict() == {"result contradicts the board": 5, "illegal move": 1}
    entries = tables.quarantined_entries(report)
    assert entries["entry"].tolist() == [0, 1, 2, 6], "the first three of a reason"
    assert entries["text"].iloc[0] == '[Event "0"] [Result "1-0"] 1. f3 e5 2. g4 Qh4# 1-0'
    import_files(tmp_path / "in.pgn", tmp_path / "f", Pgn(repair=True), workers=1, progress=False)
    assert sorted(tables.imports(audit_folder(tmp_path / "f"))["kind"]) == ["pgn", "pgn repair"]


def test_without_imports_the_tables_are_empty(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([BARE]))
    report = audit_folder(tmp_path)
    for table in (tables.imports, tables.quarantine, tables.quarantined_entries):
        assert len(table(report)) == 0
    assert tables.openings(report) == []
    assert len(tables.openings_table([])) == 0


def test_distributions_by_source(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([QUEEN_UP, BARE, BARE], result=[1, 0, 2], wdl=[WON, (0, 0, 0), (0, 0, 0)]))
    write(tmp_path, "b", batch_of([BARE], weighted=False), source="puzzles")
    report = audit_folder(tmp_path)
    table = tables.distributions(report).T
    assert table.index.tolist() == ["pgn", "puzzles"]
    assert table["records"].tolist() == ["3", "1"]
    assert table["pieces on the board"]["pgn"] == "5.0 ± 2.8"
    assert table["result known"].tolist() == ["66.7%", "0.0%"]
    assert table["the side to move won, drew, lost"]["pgn"] == "50%, 50%, 0%"
    assert table["expected points"].tolist() == ["1.00 ± 0.00", "-"]
    assert table["policy known"].tolist() == ["100.0%", "0.0%"]
    assert report.duplicates() == (2, 0)


def test_openings_are_told_apart_by_their_pawns_whoever_moves(tmp_path: Path) -> None:
    sicilian, spanish = "e4 c5 Nf3 Nc6", "e4 e5 Nf3 Nc6 Bb5"
    fens = [*game(sicilian)[4:], *game(sicilian)[4:], *game("Nf3 c5 e4 d6 Nc3")[5:], *game(spanish)[4:]]
    fens += [*game("e4 c5 Nf3 Nf6 Nc3")[4:], *game("e4 d5 exd5 Qxd5")[4:]]
    write(tmp_path, "a", batch_of(fens))
    report = audit_folder(tmp_path)
    assert (len(report.openings), report.different_openings()) == (8, 7)
    first, second, *rest = tables.openings(report)
    assert (first.name, first.records, first.times) == ("e4 / c5", 4, 2)
    assert first.share == pytest.approx(4 / 8)
    assert first.board.fen() == game(sicilian)[4]
    assert (second.name, second.records, second.times) == ("e4 / e5", 2, 1)
    assert {one.name for one in rest} == {"e4 / c5 d6", "- (less 1) / - (less 1)"}
    shown = tables.openings_table([first, second])["the commonest position"]
    assert shown["e4 / c5"] == game(sicilian)[4].rsplit(" ", 4)[0], "board and side to move"


def test_doubts_name_the_place_and_the_position(tmp_path: Path) -> None:
    results = {"result": [2, -1, -1, -1, -1], "wdl": [(0, 0, 0), *[WON] * 4]}
    write(tmp_path, "a", batch_of([BARE] + [QUEEN_UP] * 4, **results))
    report = audit_folder(tmp_path)
    kinds = tables.doubts(report, report.suspects())
    assert kinds.loc["value against result"].tolist() == [4, "80.00%"]
    records = tables.doubtful_records(report, report.suspects())
    assert (records["position"] == QUEEN_UP).all()
    assert records.reset_index().iloc[0].tolist()[:3] == [
        "a.npz",
        1,
        "win-draw-loss gives +1.00 points, the game gave -1",
    ]
    assert len(records) == 3
    write(tmp_path / "good", "a", batch_of([BARE]))
    good = audit_folder(tmp_path / "good")
    assert len(tables.doubts(good, good.suspects())) == len(tables.doubtful_records(good, {})) == 0


def test_outliers_are_listed_and_drawn(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path, f"s{number}", batch_of([BARE] * 20 if number == 3 else game("e4 e5"), game=number))
    report = audit_folder(tmp_path)
    distances = report.distances()
    assert set(tables.outliers(report, distances).index) == {"s3.npz"}
    (axes,) = tables.shards_figure(distances).axes
    assert {text.get_text().split()[0] for text in axes.texts} == {"s3.npz"}
    assert all(abs(line.get_xdata()[0]) <= 18 for line in axes.get_lines())
    assert len(tables.outliers(report, {"s3.npz": {"men": 1.0}})) == 0
    assert png(tables.shards_figure({}))


def test_pictures_have_axes_and_every_board_its_fen(tmp_path: Path) -> None:
    fens = [*game("e4 e5 Nf3 Nc6 Bb5 a6"), QUEEN_UP, BARE]
    write(tmp_path, "a", batch_of(fens, result=-1, wdl=[(0, 0, 0)] * 7 + [WON, WON]))
    write(tmp_path, "b", batch_of(fens, weighted=False), source="puzzles")
    report = audit_folder(tmp_path)
    figure = tables.distributions_figure(report)
    assert len(figure.axes) == 8
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pgn", "puzzles"]
    assert png(figure)
    suspects = report.suspects()
    boards = tables.boards_figure(report, suspects)
    random, suspicious = ([axes for axes in part.axes if axes.axison] for part in boards.subfigs)
    assert all(chess.Board("".join(axes.get_xlabel().split("\n"))).is_valid() for axes in [*random, *suspicious])
    assert len(random) == 6
    assert sum(map(len, suspects.values())) >= len(suspicious) == 2
    assert "win-draw-loss gives" in suspicious[0].get_title()
    assert png(boards)
    assert png(tables.boards_figure(report, {}))
    assert png(tables.openings_figure(tables.openings(report)))
    assert png(tables.openings_figure([]))


def test_every_figure_of_a_position_with_nothing_known_can_be_drawn(tmp_path: Path) -> None:
    write(tmp_path, "a", batch_of([BARE], weighted=False))
    report = audit_folder(tmp_path)
    assert np.isnan(columns(report.batch)["entropy"]).all()
    assert png(tables.distributions_figure(report))
    assert png(tables.boards_figure(report, report.suspects()))
