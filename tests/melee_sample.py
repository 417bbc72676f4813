"""Making the sample set of Melee that ships: its games, named in its manifest, from a folder of replays.

python tests/melee_sample.py FOLDER
"""

import io
import lzma
import sys
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from shipping import write_shipped

from matrixlib.tasks.melee.importer import ARRAYS, SAMPLE, write_sample
from matrixlib.tasks.melee.replay import Replay, read
from matrixlib.tasks.shipped import read_manifest


def encode(games: Sequence[Replay]) -> bytes:
    """The bytes of which `importer.decode` makes these games; deterministic."""
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


def ship(replays: Path | str, folder: Path = SAMPLE) -> dict[str, Any]:
    """Compress the games named in the manifest of `folder` from a folder of replays; returns the new manifest."""
    old = read_manifest(folder)
    data = encode([read(Path(replays, game["file"])) for game in old["games"]])
    with tempfile.TemporaryDirectory() as scratch:
        infos = write_sample(Path(scratch), data, old["meta"])
    return write_shipped(folder, old["file"], data, {"games": old["games"]}, old["meta"], infos)


if __name__ == "__main__":
    print(ship(sys.argv[1])["bytes"], "bytes")
