"""Import of files of any kind of chess data (see `matrixlib.data.imports`).

A game of a PGN file that the folder holds already is left out; what other files have in common is stored twice until
`duplicates.deduplicate` merges it.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from matrixlib import config as configuration
from matrixlib.data.entries import Reader
from matrixlib.data.imports import COMPRESSED, ImportReport, Storage, files_of, import_each
from matrixlib.data.remote import bring_catalogue, is_remote
from matrixlib.data.shards import LFS_POINTER
from matrixlib.files import from_home, reports_root
from matrixlib.tasks.chess.importers import audit
from matrixlib.tasks.chess.importers.epd import Epd, Labelled
from matrixlib.tasks.chess.importers.evaluations import Evaluations
from matrixlib.tasks.chess.importers.lc0 import Lc0
from matrixlib.tasks.chess.importers.matrix0_data import Matrix0Data
from matrixlib.tasks.chess.importers.pgn import Pgn
from matrixlib.tasks.chess.importers.puzzles import Puzzles
from matrixlib.tasks.chess.keys import SHARD, is_validation
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.sample_set import unpack_sample

VERSION = 1  # of what decides about names and bytes
STEP = 4 * SHARD  # training positions, from which on a step ends
KINDS: Mapping[str, Callable[[], Reader]] = {  # by ending, that of the compression taken off
    ".pgn": Pgn,
    ".csv": Puzzles,
    ".jsonl": Evaluations,
    ".epd": Epd,
    ".tar": Lc0,
    ".tgz": Lc0,
    ".npz": Matrix0Data,
    ".fen": Labelled,
}
NESTED = (".tar.zst", *(f"{kind}{ending}" for kind in (".tgz", ".npz") for ending in COMPRESSED))  # not read


def import_files(
    paths: Path | str | Iterable[Path | str],
    folder: Path | str,
    reader: Reader | None = None,
    workers: int | None = None,
    progress: bool = True,
    limit: int | None = None,
) -> ImportReport:
    """Import files into a folder of shards, made if it is not there; what had been imported is not done again. A
    folder of files of one kind (Leela's games) counts as one file, whose entries are numbered file by file.

    reader: by default that of the file's ending. workers: processes, by default one a core, started after two seconds.
    limit: stop, for each file, at the end of the step in which so many positions are reached; another call resumes.
    Raises ValueError for a file that can't be imported, ImportStopped where a worker died.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    readers = [_checked_reader(path, reader) for path in files]
    return import_each(zip(files, readers, strict=True), Path(folder), storage(), workers, progress, limit)


def storage() -> Storage:
    """How positions are stored."""
    return Storage(LAYOUT, VERSION, SHARD, STEP, _is_held_out, audit.faults, audit.figures, audit.mark_outliers)


def _is_held_out(records: np.ndarray) -> np.ndarray:
    return is_validation(records["game"])


def import_listed(
    paths: str, folder: Path, kind: str = "auto", repair: bool = False, workers: int = 0, limit: int = 0
) -> str:
    """Import files and folders, separated by commas; returns the reports. See `import_files`.

    kind: `auto`, or the name of a reader, which is that of its source. repair: a PGN result that contradicts the board
    is taken from the board. workers, limit: 0 for one process a core, and for no limit. Every path is checked before
    the first is read. ValueError for one that can't be imported, and for an unknown kind.
    """
    readers = {reader().source: reader for reader in KINDS.values()}
    if kind != "auto" and kind not in readers:
        close = configuration.nearest(kind, list(readers))
        raise ValueError(f"unknown kind '{kind}'{close}; known: auto, {', '.join(readers)}")
    if workers < 0 or limit < 0:
        raise ValueError(f"workers is {workers} and limit {limit}; give whole numbers from 0")
    jobs = []
    for name in filter(None, (part.strip() for part in paths.split(","))):
        path = from_home(name)
        reader = _checked_reader(path, None if kind == "auto" else readers[kind]())
        jobs.append((path, replace(reader, repair=repair) if isinstance(reader, Pgn) else reader))
    texts = []
    for path, reader in jobs:
        report = import_files(path, folder, reader, workers or None, limit=limit or None)
        texts.append(f"{path.name} ({reader.source})\n{report.text()}")
    return "\n\n".join(texts)


def data_folder(folder: str, paths: str) -> Path:
    """Where shards go, or are looked at: the folder named, else reports/data, or the sample set if nothing comes in.
    Of a URL, which is only looked at, the folder of its catalogue."""
    if is_remote(folder):
        return bring_catalogue(folder, configuration.DataConfig().cache, look=True)
    if folder:
        return from_home(folder)
    return reports_root() / "data" if paths.strip(", ") else unpack_sample()


# The files


def reader_for(path: Path) -> Reader:
    """The reader of a file, by its name; of a folder, that of its first file. ValueError names the known kinds."""
    if path.is_dir():
        path = files_of(path)[0]
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    kind = KINDS.get(plain.suffix.lower())
    if kind is None and path.suffix == ".gz":
        kind = Lc0  # one game: training.123456.gz
    if kind is None:
        known = ", ".join(KINDS)
        raise ValueError(
            f"{path}: unknown kind of file; known: {known} (also with {', '.join(COMPRESSED)}), and Leela's .gz"
        )
    return kind()


def _checked_reader(path: Path, reader: Reader | None) -> Reader:
    """The reader of a file. ValueError for what can't be imported, and what to do about it."""
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file")
    files = files_of(path)
    if not files:
        raise ValueError(f"{path}: a folder without files")
    for name in files:
        if name.name.lower().endswith(NESTED):
            plain = name.with_suffix("").name
            raise ValueError(f"{name}: can't be read with {name.suffix} around it; decompress it to {plain} first")
        with open(name, "rb") as file:
            head = file.read(len(LFS_POINTER))
        if not head:
            raise ValueError(f"{name}: is empty; get the file again")
        if head == LFS_POINTER:
            raise ValueError(f"{name}: only a Git LFS pointer, not the data; run `git lfs pull`")
    return reader or reader_for(path)
