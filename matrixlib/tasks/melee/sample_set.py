"""The sample set that ships with the package: games of people, byte by byte along time; and the data of a run.

`sample/sample.npz.xz` holds what `replay.read` gives of each game, for each byte of a frame an array along time, so
that successive values are alike. `sample/manifest.json` says of each game where it is from, `sample/LICENSE` is the
licence of the recordings. The file is made again from the replays by

    python -m matrixlib.tasks.melee.sample_set FOLDER
"""

import functools
import io
import lzma
import operator
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.config import ConfigError
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.reader import kept_rows
from matrixlib.data.remote import local_path
from matrixlib.data.shards import Shard, ShardInfo, concat, select, write_shard
from matrixlib.tasks.melee.columns import CONTROLLER, ITEM, LAYOUT, PLAYER
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.controller import Statistics
from matrixlib.tasks.melee.replay import Replay, read
from matrixlib.tasks.melee.windows import count, figures, stretches
from matrixlib.tasks.shipped import read_manifest, unpack, write_shipped
from matrixlib.tasks.spec import given_folder

SAMPLE = Path(__file__).parent / "sample"
ARRAYS: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
    "players": (PLAYER, (2,)),
    "controllers": (CONTROLLER, (2,)),
    "follower": (PLAYER, ()),
    "item": (ITEM, ()),
    **{name: (np.dtype("<i8"), ()) for name in ("number", "follower_at", "whose", "item_at", "owner")},
}
"""Of a replay: kind and shape of each entry."""
RISING = ("number", "follower_at", "item_at")  # stored as differences


def data_folder(config: MeleeConfig) -> Path:
    """Folder of the shards of a run. Raises ConfigError."""
    return unpack_sample() if config.data.source == "sample" else given_folder(config.data, "sample")


def statistics(config: MeleeConfig) -> Statistics | None:
    """Of the training rows of a configuration; None where its data are not on this machine.

    The catalogue has the counts of each shard, made when it was written. They are added up over the shards in use, so
    that another split, another limit or a shard in quarantine gives other rates; where a limit keeps a part of a shard,
    the rows of that part are counted. Raises ShardError for a shard that cannot be read.
    """
    try:
        folder = data_folder(config)
    except ConfigError:
        return None
    rows = Catalogue(folder).shards("train")
    kept = kept_rows([row.count for row in rows], [row.source for row in rows], config.data.limit)
    parts = []
    for row, rows_kept in zip(rows, kept, strict=True):
        if rows_kept == row.count and "classes" in row.quality:
            parts.append(Statistics(**row.quality["classes"]))
        elif rows_kept:
            parts.append(count(select(Shard(local_path(row), LAYOUT).arrays, np.arange(rows_kept), LAYOUT)))
    return functools.reduce(operator.add, parts) if parts else None


def encode(games: Sequence[Replay]) -> bytes:
    """Games to the bytes that ship; deterministic."""
    columns = {}
    for number, game in enumerate(games):
        columns[f"{number} facts"] = np.array([game.stage, *game.ports, game.known], "<i8")
        for name, (kind, shape) in ARRAYS.items():
            values = np.asarray(getattr(game, name), kind)
            values = np.ascontiguousarray(np.diff(values, prepend=0) if name in RISING else values)
            frames = values.view(np.uint8).reshape(len(values), kind.itemsize * prod(shape))
            columns[f"{number} {name}"] = np.ascontiguousarray(frames.T)
    plain = io.BytesIO()
    np.savez(plain, **columns)  # type: ignore[arg-type]
    return lzma.compress(plain.getvalue(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)


def decode(data: bytes) -> list[Replay]:
    """The inverse of `encode`. The bytes are trusted: their checksum is the caller's to check."""
    games = []
    with np.load(io.BytesIO(lzma.decompress(data)), allow_pickle=False) as stored:
        for number in range(len(stored.files) // (1 + len(ARRAYS))):
            fields: dict[str, Any] = {}
            for name, (kind, shape) in ARRAYS.items():
                values = np.frombuffer(stored[f"{number} {name}"].T.tobytes(), kind).reshape(-1, *shape)
                fields[name] = np.cumsum(values) if name in RISING else values
            stage, *ports, known = stored[f"{number} facts"].tolist()
            games.append(Replay(stage, (ports[0], ports[1]), known, **fields))
    return games


def ship(replays: Path | str, folder: Path = SAMPLE) -> dict[str, Any]:
    """Compress the games that the manifest of `folder` names, from a folder of replays; returns the new manifest. For
    the makers of the package."""
    old = read_manifest(folder)
    data = encode([read(Path(replays, game["file"])) for game in old["games"]])
    with tempfile.TemporaryDirectory() as scratch:
        infos = _write(Path(scratch), data, old["meta"])
    return write_shipped(folder, old["file"], data, {"games": old["games"]}, old["meta"], infos)


def unpack_sample() -> Path:
    """The folder with the unpacked shards of the sample set; see `shipped.unpack`."""
    return unpack(SAMPLE, "melee", _write)


def _write(folder: Path, data: bytes, meta: Mapping[str, Any]) -> list[ShardInfo]:
    """The shards of the games: one of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [stretches(game, held_out) for game, held_out in zip(decode(data), meta["held_out"], strict=True)]
    infos = []
    for split, held_out in (("train", False), ("validation", True)):
        batch = concat([part for part in rows if bool(part["records"]["held_out"][0]) == held_out], LAYOUT)
        own = {name: value for name, value in meta.items() if name != "held_out"}
        own |= {"split": split, "quality": figures(batch)}
        infos.append(write_shard(folder / f"sample_{split}.npz", LAYOUT, batch, own))
    return infos


if __name__ == "__main__":
    print(ship(sys.argv[1])["bytes"], "bytes")
