"""Import of Slippi replays into shards (see `matrixlib.data.imports`).

A folder of replays is one import, a replay one entry. About one replay in HELD_OUT is held out, by a hash of its bytes;
the first new one if none would be and others remain to train on.

The shipped sample set, `sample/`, is made by `python tests/melee_sample.py FOLDER`: each game's `replay.read` output,
one array along time for each byte of a frame, so that successive values compress.
"""

import hashlib
import io
import lzma
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from matrixlib.data.catalogue import NAME, Catalogue, mark_outliers
from matrixlib.data.imports import ImportReport, ParseResult, Part, Storage, files_of, hash_of, import_each, import_logs
from matrixlib.data.shards import Shard, ShardInfo, concat, file_hash, write_shard
from matrixlib.files import from_home
from matrixlib.tasks.melee.columns import BUTTONS, CONTROLLER, FOLLOWER, ITEM, LAYOUT, PLAYER
from matrixlib.tasks.melee.controller import HEADS
from matrixlib.tasks.melee.replay import NoGame, Replay, ReplayError, read
from matrixlib.tasks.melee.windows import figures, stretches
from matrixlib.tasks.shipped import unpack

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
        if path.suffix.lower() == ENDING:
            yield Part(0, 0, path.read_bytes() if path.stat().st_size <= LARGEST else b"")

    def read(self, part: Part) -> ParseResult:
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


def import_replays(paths: Path | str | Iterable[Path | str], folder: Path | str, **options: Any) -> ImportReport:
    """Import replays and folders of replays into a shard folder; finished work is skipped.

    Corrupt ones are quarantined (`data.imports.quarantined`), those not between two people skipped. options: of
    `data.imports.import_each`. ValueError for a path without replays, or without peppi-py.
    """
    named = [from_home(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    replays = {path: _replays(path) for path in named}
    before, stored, holds_out = _before(Path(folder))
    known = {path: before[digest] for path in named if before and (digest := hash_of(path)) in before}
    new = [file for path in named if path not in known for file in replays[path]]
    split = threshold({file_hash(file): file for file in new}, stored, holds_out)
    jobs = [(path, Slippi(known.get(path, split))) for path in named]
    mark = partial(mark_outliers, figures=compared)
    storage = Storage(LAYOUT, VERSION, SHARD, STEP, lambda rows: rows["held_out"] > 0, lambda batch: {}, figures, mark)
    return import_each(jobs, Path(folder), storage, **options)


def compared(quality: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a shard that `mark_outliers` compares, from its `windows.figures`: own frames a row, rate of each
    button, entropy of each axis and of the shoulder (nats)."""
    from scipy.stats import entropy  # takes a second to import

    if "classes" not in quality:
        return {}
    held, frames = np.array(quality["classes"]["held"]), quality["frames"]
    rates = zip(BUTTONS, (held[HEADS[0].logits] / max(1, frames)).tolist(), strict=True)
    spread = {head.name: float(entropy(held[head.logits])) for head in HEADS[1:]}
    return {"frames a row": frames / quality["records"], **dict(rates), **spread}


def threshold(replays: Mapping[str, Path], stored: Set[int] = frozenset(), held_out: bool = False) -> str:
    """Largest SHA-256 (hex) to hold out, of replays by hash: that of the share, or that of the first intact, unstored
    game if it is above, nothing is held out yet and another game exists."""
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


def _before(folder: Path) -> tuple[dict[str, str], set[int], bool]:
    """(SHA-256 of each import -> its threshold, ids of stored games, whether any is held out)."""
    if not (folder / NAME).is_file():
        return {}, set(), False
    logs = [log for log in import_logs(folder) if log.source == Slippi.source and log.step == 0]
    rows = [row for row in Catalogue(folder, warn=False).shards() if row.source == Slippi.source]
    records = [Shard(row.path, LAYOUT).arrays["records"] for row in rows]
    ids = {game for part in records for game in np.unique(part["game"]).tolist()}
    return {log.sha256: log.reader["held_out"] for log in logs}, ids, any(part["held_out"].any() for part in records)


def _replays(path: Path) -> list[Path]:
    """Replays of a path; ValueError if there are none."""
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file or folder")
    files = [file for file in files_of(path) if file.suffix.lower() == ENDING]
    if not files:
        raise ValueError(f"{path}: no replay; a replay's name ends in {ENDING}")
    return files


SAMPLE = Path(__file__).parent / "sample"
ARRAYS: dict[str, tuple[np.dtype, tuple[int, ...]]] = {  # of a replay: kind and shape of each entry
    "number": (np.dtype("<i8"), ()),
    "players": (PLAYER, (2,)),
    "controllers": (CONTROLLER, (2,)),
    "follower": (FOLLOWER, ()),
    "item": (ITEM, ()),
}


def decode(data: bytes) -> list[Replay]:
    """Games of the shipped bytes, which it trusts: callers verify the checksum."""
    games = []
    with np.load(io.BytesIO(lzma.decompress(data)), allow_pickle=False) as stored:
        for number in range(len(stored.files) // (1 + len(ARRAYS))):
            fields: dict[str, Any] = {
                name: np.frombuffer(stored[f"{number} {name}"].T.tobytes(), kind).reshape(-1, *shape)
                for name, (kind, shape) in ARRAYS.items()
            }
            stage, *ports, known = stored[f"{number} facts"].tolist()
            games.append(Replay(stage, (ports[0], ports[1]), known, **fields))
    return games


def unpack_sample() -> Path:
    """Folder of the unpacked sample set; see `shipped.unpack`."""
    return unpack(SAMPLE, "melee", write_sample)


def write_sample(folder: Path, data: bytes, meta: Mapping[str, Any]) -> list[ShardInfo]:
    """Shards of the games, one a split."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [stretches(game, held_out) for game, held_out in zip(decode(data), meta["held_out"], strict=True)]
    own, infos = {name: value for name, value in meta.items() if name != "held_out"}, []
    for split, held_out in (("train", False), ("validation", True)):
        batch = concat([part for part in rows if bool(part["records"]["held_out"][0]) == held_out], LAYOUT)
        facts = own | {"split": split, "quality": figures(batch)}
        infos.append(write_shard(folder / f"sample_{split}.npz", LAYOUT, batch, facts))
    return infos
