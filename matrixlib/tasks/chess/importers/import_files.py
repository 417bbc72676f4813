"""Import of chess data files of any format (see `matrixlib.data.imports`).

PGN games that the folder already holds are skipped; other duplicates are stored until `duplicates.deduplicate`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matrixlib import config as configuration
from matrixlib.data.imports import COMPRESSED, ImportReport, Reader, Storage, files_of, import_each
from matrixlib.data.remote import download_catalogue, is_remote
from matrixlib.data.shards import LFS_POINTER
from matrixlib.files import from_home, reports_root
from matrixlib.tasks.chess.importers import audit
from matrixlib.tasks.chess.importers.epd import Epd, Labelled
from matrixlib.tasks.chess.importers.lichess import Evaluations, Puzzles
from matrixlib.tasks.chess.importers.pgn import Pgn
from matrixlib.tasks.chess.importers.planes import Lc0, Matrix0Data
from matrixlib.tasks.chess.records import LAYOUT, SHARD_RECORDS, in_validation
from matrixlib.tasks.chess.stockfish.sample import unpack_sample

IMPORT_VERSION = 1  # raise it when the bytes or names of shards change
STEP_POSITIONS = 4 * SHARD_RECORDS  # training positions per import step
KINDS: Mapping[str, Callable[[], Reader]] = {  # by extension, without that of the compression
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
    paths: Path | str | Iterable[Path | str], folder: Path | str, reader: Reader | None = None, **options: Any
) -> ImportReport:
    """Import files into a folder of shards; skips what was imported. A folder of one format (Lc0 games) is one file.

    reader: default by extension. options: of `data.imports.import_each`. ValueError for a wrong file, ImportStopped.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    jobs = [(path, reader_of(path, reader)) for path in files]
    checks = audit.faults, audit.shard_quality, audit.mark_outliers
    storage = Storage(LAYOUT, IMPORT_VERSION, SHARD_RECORDS, STEP_POSITIONS, in_validation, *checks)
    return import_each(jobs, Path(folder), storage, **options)


def import_listed(
    paths: str, folder: Path, kind: str = "auto", repair: bool = False, workers: int = 0, limit: int = 0
) -> str:
    """Import files and folders, separated by commas; returns the reports. See `import_files`.

    kind: `auto` or a source (pgn, epd, ...). repair: replace a PGN result that contradicts the board. workers: 0 for
    one per core. limit: 0 for none. All paths are checked first. ValueError for a wrong path or kind.
    """
    readers = {reader().source: reader for reader in KINDS.values()}
    if kind != "auto" and kind not in readers:
        close = configuration.nearest(kind, list(readers))
        raise ValueError(f"unknown kind '{kind}'{close}; known: auto, {', '.join(readers)}")
    if workers < 0 or limit < 0:
        raise ValueError(f"workers is {workers} and limit {limit}; give whole numbers from 0")
    files = [from_home(name) for name in map(str.strip, paths.split(",")) if name]
    found = [reader_of(path, None if kind == "auto" else readers[kind]()) for path in files]
    texts = []
    for path, reader in zip(files, found, strict=True):
        own = Pgn(repair) if isinstance(reader, Pgn) else reader
        report = import_files(path, folder, own, workers=workers or None, limit=limit or None)
        texts.append(f"{path.name} ({reader.source})\n{report.text()}")
    return "\n\n".join(texts)


def data_folder(folder: str, paths: str) -> Path:
    """Folder of shards to import into or inspect: `folder`, else reports/data with `paths`, else the sample set. For
    a URL, the local folder of its catalogue."""
    if is_remote(folder):
        return download_catalogue(folder, configuration.DataConfig().cache, look=True)
    if folder:
        return from_home(folder)
    return reports_root() / "data" if paths.strip(", ") else unpack_sample()


def reader_of(path: Path, reader: Reader | None = None) -> Reader:
    """The given reader, or that of a file's extension, of a folder's first file; ValueError for a wrong file."""
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file")
    files = files_of(path)
    if not files:
        raise ValueError(f"{path}: a folder without files")
    for file in files:
        if file.name.lower().endswith(NESTED):
            bare = file.with_suffix("").name
            raise ValueError(f"{file}: cannot be read compressed with {file.suffix}; decompress it to {bare} first")
        with open(file, "rb") as stream:
            head = stream.read(len(LFS_POINTER))
        if not head:
            raise ValueError(f"{file}: is empty; get the file again")
        if head == LFS_POINTER:
            raise ValueError(f"{file}: only a Git LFS pointer, not the data; run `git lfs pull`")
    first = files[0]
    plain = first.with_suffix("") if first.suffix in COMPRESSED else first
    kind = KINDS.get(plain.suffix.lower(), Lc0 if first.suffix == ".gz" else None)  # training.123456.gz: an Lc0 game
    if reader is None and kind is None:
        raise ValueError(
            f"{first}: unknown kind of file; known: {', '.join(KINDS)} (also with {', '.join(COMPRESSED)}), and "
            "Leela's .gz"
        )
    return reader or kind()  # type: ignore[misc]
