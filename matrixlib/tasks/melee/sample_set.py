"""The sample set that ships with the package: games of people, byte by byte along time.

`sample/sample.npz.xz` holds what `replay.read` gives of each game, for each byte of a frame an array along time, so
that successive values are alike. `sample/manifest.json` says of each game where it is from, `sample/LICENSE` is the
licence of the recordings. The file is made again from the replays by

    python -m matrixlib.tasks.melee.sample_set FOLDER
"""

import io
import lzma
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.shards import ShardInfo, concat, write_shard
from matrixlib.tasks.melee.columns import CONTROLLER, FOLLOWER, ITEM, LAYOUT, PLAYER
from matrixlib.tasks.melee.replay import Replay, read
from matrixlib.tasks.melee.windows import figures, stretches
from matrixlib.tasks.shipped import read_manifest, unpack, write_shipped

SAMPLE = Path(__file__).parent / "sample"
ARRAYS: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
    "number": (np.dtype("<i8"), ()),
    "players": (PLAYER, (2,)),
    "controllers": (CONTROLLER, (2,)),
    "follower": (FOLLOWER, ()),
    "item": (ITEM, ()),
}
"""Of a replay: kind and shape of each entry."""


def encode(games: Sequence[Replay]) -> bytes:
    """Games to the bytes that ship; deterministic."""
    columns = {}
    for number, game in enumerate(games):
        columns[f"{number} facts"] = np.array([game.stage, *game.ports, game.known], "<i8")
        for name, (kind, shape) in ARRAYS.items():
            values = np.ascontiguousarray(getattr(game, name), kind)
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
            fields: dict[str, Any] = {
                name: np.frombuffer(stored[f"{number} {name}"].T.tobytes(), kind).reshape(-1, *shape)
                for name, (kind, shape) in ARRAYS.items()
            }
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
