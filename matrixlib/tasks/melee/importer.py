"""Import of Slippi's replays into a folder of shards (see `matrixlib.data.imports`).

A folder of replays is one import, a replay one entry of it. Which replays are held out follows from their bytes: about
one in HELD_OUT, and the first new one where nothing else would be and there are others to train on.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from matrixlib.data.catalogue import NAME, Catalogue
from matrixlib.data.entries import ParseResult, Part
from matrixlib.data.imports import ImportReport, Storage, files_of, hash_of, import_each, import_logs
from matrixlib.data.shards import Shard, concat, file_hash
from matrixlib.files import from_home
from matrixlib.tasks.melee.columns import LAYOUT
from matrixlib.tasks.melee.replay import NoGame, ReplayError, read
from matrixlib.tasks.melee.windows import figures, stretches

VERSION = 1  # of what decides about names and bytes
SHARD = 2048  # rows of a shard: some 17 MB, six games
STEP = 4 * SHARD  # training rows from which on a step of an import ends
HELD_OUT = 10  # one replay in so many
ENDING = ".slp"
DAMAGED = "damaged, or no replay"
LARGEST = 1 << 28  # bytes of a replay; a game of eight minutes has some five million


@dataclass(frozen=True)
class Slippi:
    """Reader of replays. held_out: those whose SHA-256 (hex) is at most this."""

    source: ClassVar[str] = "slippi"
    held_out: str = ""

    def parts(self, path: Path) -> Iterator[Part]:
        """A replay is one part; other files of a folder are none."""
        if path.suffix.lower() == ENDING:
            yield Part(0, 0, path.read_bytes() if path.stat().st_size <= LARGEST else b"")

    def read(self, part: Part) -> ParseResult:
        """The rows of a replay, one that is refused, or one that is left out."""
        entries, batch = ParseResult(replace(part, first=part.number)), concat([], LAYOUT)
        try:
            if not part.data:
                raise ReplayError(f"is empty, or larger than {LARGEST >> 20} MiB")
            with tempfile.TemporaryDirectory() as folder:  # peppi reads files alone
                path = Path(folder, "replay.slp")
                path.write_bytes(part.data)
                batch = stretches(read(path), hashlib.sha256(part.data).hexdigest() <= self.held_out)
        except ReplayError as error:
            entries.refuse(0, DAMAGED, str(error), part.name)
        except NoGame as error:
            entries.skipped[str(error)] += 1
        rows = np.array([len(batch["records"])] if len(batch["records"]) else [], np.int64)
        return entries.result(batch, 1, len(rows), rows)


def import_replays(
    paths: Path | str | Iterable[Path | str],
    folder: Path | str,
    workers: int | None = None,
    progress: bool = True,
    limit: int | None = None,
) -> ImportReport:
    """Import replays and folders of replays into a folder of shards; what had been imported is not done again.

    Damaged ones are refused (`data.imports.quarantined` names them), those that are no game of two people left out.
    Options as of `data.imports.import_each`. ValueError for a path without replays, and where peppi-py is missing.
    """
    named = [from_home(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    replays = {path: _replays(path) for path in named}
    before = _thresholds(Path(folder))
    known = {path: before[digest] for path in named if before and (digest := hash_of(path)) in before}
    new = [file for path in named if path not in known for file in replays[path]]
    split = threshold({file_hash(file): file for file in new}, *_games(Path(folder)))
    jobs = [(path, Slippi(known.get(path, split))) for path in named]
    storage = Storage(LAYOUT, VERSION, SHARD, STEP, _is_held_out, lambda batch: {}, figures)
    return import_each(jobs, Path(folder), storage, workers, progress, limit)


def threshold(replays: Mapping[str, Path], stored: Set[int] = frozenset(), held_out: bool = False) -> str:
    """The greatest SHA-256 (hex) that is held out, of replays by theirs: that of the share, or of the first sound game
    that is not `stored` yet, where that is above it, nothing is held out yet and there is another game."""
    share = f"{2**256 // HELD_OUT:064x}"
    first, games = "", set(stored)
    for digest, path in [] if held_out else sorted(replays.items()):
        try:
            game = read(path).game
        except (NoGame, ReplayError):
            continue
        if game not in games:
            games.add(game)
            first = first or digest
            if len(games) > 1:
                return max(share, first)
    return share


def _thresholds(folder: Path) -> dict[str, str]:
    """SHA-256 of what has been imported into a folder -> the threshold then, with which an import goes on."""
    logs = import_logs(folder) if (folder / NAME).is_file() else []
    return {log.sha256: log.reader["held_out"] for log in logs if log.source == Slippi.source and log.step == 0}


def _games(folder: Path) -> tuple[set[int], bool]:
    """Ids of the games in a folder, and whether any of them is held out."""
    if not (folder / NAME).is_file():
        return set(), False
    rows = [row for row in Catalogue(folder, warn=False).shards() if row.source == Slippi.source]
    records = [Shard(row.path, LAYOUT).arrays["records"] for row in rows]
    ids = {game for part in records for game in np.unique(part["game"]).tolist()}
    return ids, any(_is_held_out(part).any() for part in records)


def _replays(path: Path) -> list[Path]:
    """The replays of a path; ValueError where there is none."""
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file or folder")
    files = [file for file in files_of(path) if file.suffix.lower() == ENDING]
    if not files:
        raise ValueError(f"{path}: no replay; a replay's name ends in {ENDING}")
    return files


def _is_held_out(records: np.ndarray) -> np.ndarray:
    return records["held_out"] > 0
