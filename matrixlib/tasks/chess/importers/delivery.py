"""The data notebook's parameters at work: files brought in, the folder that is meant, a copy of its catalogue."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.data.catalogue import Catalogue
from matrixlib.tasks.chess.importers import import_files as intake
from matrixlib.tasks.chess.importers.pgn import Pgn


def bring_in(
    paths: str, folder: Path, kind: str = "auto", repair: bool = False, workers: int = 0, limit: int = 0
) -> str:
    """Import files and folders, separated by commas; returns the reports. See `intake.take_in`.

    kind: `auto`, or the name of a reader, which is that of its source. repair: a PGN result that contradicts the board
    is taken from the board. workers, limit: 0 for one process a core, and for no limit. Every path is checked before
    the first is read. ValueError for one that can't be imported, and for an unknown kind.
    """
    readers = {reader().source: reader for reader in intake.KINDS.values()}
    if kind != "auto" and kind not in readers:
        close = configuration.nearest(kind, list(readers))
        raise ValueError(f"unknown kind '{kind}'{close}; known: auto, {', '.join(readers)}")
    jobs = []
    for name in filter(None, (part.strip() for part in paths.split(","))):
        path = Path(name).expanduser()
        intake.check_files(path)
        reader = intake.reader_for(path) if kind == "auto" else readers[kind]()
        jobs.append((path, replace(reader, repair=repair) if isinstance(reader, Pgn) else reader))
    told = []
    for path, reader in jobs:
        report = intake.take_in(path, folder, reader, workers or None, limit=limit or None)
        told.append(f"{path.name} ({reader.source})\n{report.text()}")
    return "\n\n".join(told)


def place(folder: str, paths: str) -> Path:
    """Where shards go, or are looked at: the folder named, else reports/data, or the sample set if nothing comes in."""
    from matrixlib.tasks.chess.sample_set import unpack_sample

    if folder:
        return Path(folder).expanduser()
    return files.reports_root() / "data" if paths.strip(", ") else unpack_sample()


def back_up(folder: Path, path: str) -> str:
    """Copy the catalogue; says so. ValueError where that can't be written."""
    try:
        Catalogue(folder).backup(Path(path).expanduser())
    except (OSError, sqlite3.Error) as error:
        raise ValueError(f"backup {path} cannot be written: {error}") from error
    return f"catalogue copied to {path}; Catalogue.restore(folder, path) brings it back"
