"""The sample set that ships with the package: games of people, column by column, and where the data of a run lie.

`sample/sample.npz.xz` holds what `replay.read` gives of each game, one array for each field of all games, so that
successive values are alike. `sample/manifest.json` says of each game where it is from, `sample/LICENSE` is the licence
of the recordings. The file is made again from the replays by

    python -m matrixlib.tasks.melee.sample_set FOLDER
"""

import io
import lzma
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.shards import ShardInfo, concat, file_hash, write_shard
from matrixlib.tasks.melee.columns import CONTROLLER, ITEM, LAYOUT, PLAYER
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.replay import Replay, read
from matrixlib.tasks.melee.stretches import figures, stretches
from matrixlib.tasks.shipped import unpack, write_shipped
from matrixlib.tasks.spec import given_folder

SAMPLE = Path(__file__).parent / "sample"
DATA = "sample.npz.xz"
PY_SLIPPI = "https://github.com/hohav/py-slippi 53b8f39 test/replays, MIT"
PEPPI = "https://github.com/hohav/peppi eac50be tests/data, MIT"
GAMES = {
    "console_name": PY_SLIPPI,
    "nintendont": PY_SLIPPI,
    "v2.0": PY_SLIPPI,
    "ics2": PEPPI,
    "transform": PEPPI,
    "old_ver_thegang": PEPPI.replace("tests", "benches"),
}
"""Replays between two people, and where they are from: names of the files that `ship` reads."""
HELD_OUT = ("nintendont",)
CREATED = "2026-01-01T00:00:00Z"
"""Creation time in every shard, so that they are the same bytes everywhere."""
PER_GAME, PER_FRAME = ("version", "stage", "ports", "known"), ("number", "players", "controllers")
SECONDS, ITEMS = ("follower", "follower_at", "whose"), ("item", "item_at", "owner")
RISING = ("number", "follower_at", "item_at")


def data_folder(config: MeleeConfig) -> Path:
    """Folder of the shards of a run. Raises ConfigError."""
    return unpack_sample() if config.data.source == "sample" else given_folder(config.data, "sample")


def encode(games: Sequence[Replay]) -> bytes:
    """Games to the bytes that ship; deterministic."""
    columns: dict[str, np.ndarray] = {}
    for name in (*PER_GAME, *PER_FRAME, *SECONDS, *ITEMS):
        values = [np.asarray(getattr(game, name)) for game in games]
        joined = np.stack(values) if name in PER_GAME else np.concatenate(values)
        columns |= _columns(name, joined)
    for name, member in (("frames", "number"), ("followers", "follower"), ("items", "item")):
        columns[name] = np.array([len(getattr(game, member)) for game in games], "<i4")
    plain = io.BytesIO()
    np.savez(plain, **columns)  # type: ignore[arg-type]
    return lzma.compress(plain.getvalue(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)


def decode(data: bytes) -> list[Replay]:
    """The inverse of `encode`. The bytes are trusted: their checksum is the caller's to check."""
    with np.load(io.BytesIO(lzma.decompress(data)), allow_pickle=False) as stored:
        columns = {name: stored[name] for name in stored.files}
    kinds = {"players": PLAYER, "controllers": CONTROLLER, "follower": PLAYER, "item": ITEM}
    fields = {name: _join(name, columns, kinds.get(name)) for name in (*PER_GAME, *PER_FRAME, *SECONDS, *ITEMS)}
    lengths = {
        **dict.fromkeys(PER_FRAME, "frames"),
        **dict.fromkeys(SECONDS, "followers"),
        **dict.fromkeys(ITEMS, "items"),
    }
    parts = {name: np.split(fields[name], np.cumsum(columns[length])[:-1]) for name, length in lengths.items()}
    games = []
    for number, (version, stage, ports, known) in enumerate(zip(*(fields[name] for name in PER_GAME), strict=True)):
        own: dict[str, Any] = {name: part[number] for name, part in parts.items()}
        own |= {"version": tuple(version.tolist()), "ports": tuple(ports.tolist())}
        games.append(Replay(stage=int(stage), known=int(known), **own))
    return games


def _columns(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays that compress well: each field along time, halves as two bytes, of rising numbers the differences."""
    if values.dtype.names:
        parts = (_columns(f"{name}.{field}", values[field]) for field in values.dtype.names)
        return {key: array for part in parts for key, array in part.items()}
    if name in RISING:
        return {name: np.diff(values, prepend=0).astype("<i4")}
    column = np.ascontiguousarray(values.T)
    if column.dtype == np.float16:
        return {f"{name}.{byte}": column.view(np.uint8)[..., byte::2] for byte in (0, 1)}
    return {name: column}


def _join(name: str, columns: Mapping[str, np.ndarray], kind: np.dtype | None) -> np.ndarray:
    """The inverse of `_columns`; kind: of its fields, where it has some."""
    if kind is not None and kind.names:
        assert kind.fields is not None
        parts = {field: _join(f"{name}.{field}", columns, kind.fields[field][0].base) for field in kind.names}
        sizes = [len(kind.fields[field][0].shape) for field in kind.names]
        first = parts[kind.names[0]]
        out = np.zeros(first.shape[: first.ndim - sizes[0]], kind)
        for field, part in parts.items():
            out[field] = part
        return out
    if name in RISING:
        return np.cumsum(columns[name])
    if kind == np.float16:
        return np.stack([columns[f"{name}.{byte}"] for byte in (0, 1)], -1).view(np.float16)[..., 0].T
    return columns[name].T


# Made and unpacked


def ship(replays: Path | str, folder: Path = SAMPLE) -> dict[str, Any]:
    """Compress the games of a folder of replays into `folder`; returns the manifest. For the makers of the package."""
    paths = [Path(replays, f"{name}.slp") for name in GAMES]
    games = [read(path) for path in paths]
    facts = [
        {
            "file": path.name,
            "from": origin,
            "sha256": file_hash(path),
            "frames": len(game.number),
            "held_out": name in HELD_OUT,
        }
        for (name, origin), path, game in zip(GAMES.items(), paths, games, strict=True)
    ]
    meta = {"source": "slippi", "generator": "sample", "seed": 0, "created": CREATED}
    meta["held_out"] = [game["held_out"] for game in facts]
    data = encode(games)
    with tempfile.TemporaryDirectory() as scratch:
        infos = _write(Path(scratch), data, meta)
    return write_shipped(folder, DATA, data, {"games": facts}, meta, infos)


def unpack_sample(cache: Path | None = None, folder: Path = SAMPLE) -> Path:
    """The folder with the unpacked shards of the sample set; see `shipped.unpack`."""
    return unpack(folder, "melee", _write, cache)


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
