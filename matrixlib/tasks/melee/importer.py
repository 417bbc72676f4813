"""Import of Slippi's replays into a folder of shards (see `matrixlib.data.imports`).

A folder of replays is one import, a replay one entry of it. Which replays are held out follows from their bytes: about
one in HELD_OUT, and always one of several that come in together.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from matrixlib.data.account import ImportReport
from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.data.imports import Storage, files_of, import_each
from matrixlib.data.shards import Batch, concat, file_hash
from matrixlib.tasks.melee.columns import LAYOUT
from matrixlib.tasks.melee.replay import NoGame, ReplayError, read
from matrixlib.tasks.melee.stretches import figures, stretches

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

    held_out: str = ""

    @property
    def source(self) -> str:
        """The catalogue's source."""
        return "slippi"

    def parts(self, path: Path) -> Iterator[Part]:
        """A replay is one part; other files of a folder are none."""
        if path.suffix.lower() == ENDING:
            yield Part(0, 0, path.read_bytes() if path.stat().st_size <= LARGEST else b"", path.name)

    def read(self, part: Part) -> ParseResult:
        """The rows of a replay, one that is refused, or one that is left out."""
        entries = Entries(part)
        batch = concat([], LAYOUT)
        try:
            if not part.data:
                raise ReplayError(f"is empty, or larger than {LARGEST >> 20} MiB")
            with tempfile.TemporaryDirectory() as folder:  # peppi reads files alone
                path = Path(folder, "replay.slp")
                path.write_bytes(part.data)
                replay = read(path)
            held_out = hashlib.sha256(part.data).hexdigest() <= self.held_out
            batch = stretches(replay, held_out)
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

    Damaged ones are refused (`data.account.quarantined` names them), those that are no game of two people left out;
    both are counted. Options as of `data.imports.import_each`. ValueError for a path without replays, and where
    peppi-py is missing.
    """
    if importlib.util.find_spec("peppi_py") is None:
        raise ValueError("reading .slp files needs peppi-py: pip install 'matrixlib[melee]'")
    named = [Path(path).expanduser() for path in ([paths] if isinstance(paths, str | Path) else paths)]
    replays = [file for path in named for file in _replays(path)]
    reader = Slippi(threshold({file_hash(file): file for file in replays}))
    storage = Storage(LAYOUT, VERSION, SHARD, STEP, _is_held_out, _faults, figures)
    return import_each([(path, reader) for path in named], Path(folder), storage, workers, progress, limit)


def threshold(replays: Mapping[str, Path]) -> str:
    """The greatest SHA-256 (hex) that is held out, of replays by theirs: that of the share, or of the first sound game
    where that is above it and there is another game."""
    share = f"{2**256 // HELD_OUT:064x}"
    sound = (digest for digest, path in sorted(replays.items()) if _is_game(path))
    first, second = next(sound, ""), next(sound, "")
    return max(share, first) if second else share


def _is_game(path: Path) -> bool:
    try:
        read(path)
    except (NoGame, ReplayError):
        return False
    return True


def _replays(path: Path) -> list[Path]:
    """The replays of a path; ValueError where there is none."""
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise ValueError(f"{path}: no such file or folder")
    files = [file for file in files_of(path) if file.suffix.lower() == ENDING]
    if not files:
        raise ValueError(f"{path}: no replay; a replay's name ends in {ENDING}")
    return files


def _is_held_out(records: np.ndarray) -> np.ndarray:
    held_out: np.ndarray = records["held_out"] > 0
    return held_out


def _faults(batch: Batch) -> dict[str, np.ndarray]:
    """Rows that nothing could be learned from."""
    bad = (batch["records"]["own"] == 0) | (np.diff(batch["frame_offset"]) < 2)
    return {"a row without a frame and the one after it": bad} if bad.any() else {}
