"""Reader of Slippi replays (`.slp`) with peppi-py: a game between two people, frame by frame."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.shards import ragged_rows
from matrixlib.tasks.melee import columns
from matrixlib.tasks.melee.columns import CHARACTERS, CONTROLLER, FIRST, FOLLOWER, ITEM, PLAYER, UNKNOWN

PANIC = "PanicException"  # raised by peppi's Rust code on unexpected files; not an Exception
HITSTUN = 0x02  # bit of the fourth state-flag byte: `misc_as` is the remaining hitstun
LARGEST = 60_000.0  # of a half
SAME_GAME = 3600  # first frames that identify a game: netplay records it twice, with different ends


class ReplayError(ValueError):
    """An unreadable file: why, without its name."""


class NoGame(ValueError):
    """A valid replay that is not a game between two people: what it is."""


@dataclass(frozen=True)
class Replay:
    """A game of two people: n frames, unique, ascending.

    ports: from 0. number: (n,) Slippi's frame numbers. players: (n, 2) PLAYER, controllers: (n, 2) CONTROLLER, by port.
    known: bits of what the version records. follower: (K,) FOLLOWER, item: (M,) ITEM, ascending `at`, the index of
    their frame; `whose`, `owner`: 0 or 1 by port, -1 nobody.
    """

    stage: int
    ports: tuple[int, int]
    known: int
    number: np.ndarray
    players: np.ndarray
    controllers: np.ndarray
    follower: np.ndarray
    item: np.ndarray

    @property
    def game(self) -> int:
        """64-bit id shared by recordings of one game: stage, characters and first inputs."""
        parts = (np.array([self.stage], "<i8"), self.players["character"][0], self.controllers[:SAME_GAME])
        facts = hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=8)
        return int.from_bytes(facts.digest(), "little")


def read(path: Path | str) -> Replay:
    """The game in a file. ReplayError if corrupt or no replay, NoGame if not between two people. ValueError, with what
    to install, without peppi-py."""
    start, frames = parse(path)
    people = start["players"]
    if len(people) != 2:
        raise NoGame(f"{len(people)} players")
    if any(player["type"] != "Human" for player in people):
        raise NoGame("a computer plays")
    if frames is None or not len(frames):
        raise NoGame("no frames")
    number = _column(frames, "id")
    keep = last_rows(number)
    keep = keep[number[keep] >= FIRST]
    if not (np.diff(number[keep]) == 1).any():
        raise NoGame("ends before anybody could act")
    names = [player["port"] for player in people]
    places = (int(names[0][1:]) - 1, int(names[1][1:]) - 1)
    ports = [frames.field("ports").field(name) for name in names]
    leaders = [port.field("leader") for port in ports]
    if not all(np.asarray(leader.is_valid())[keep].all() for leader in leaders):
        raise NoGame("a player is away for some of the frames")
    players = np.stack([_player(leader.field("post"), keep) for leader in leaders], 1)
    check(players, number[keep])
    follower = np.concatenate([_follower(port, whose, keep) for whose, port in enumerate(ports)])
    item, items_known = _items(frames, keep, places)
    return Replay(
        stage=start["stage"],
        ports=places,
        known=_known(leaders[0].field("post")) | (columns.ITEMS if items_known else 0),
        number=number[keep],
        players=players,
        controllers=np.stack([controllers(leader.field("pre"), keep) for leader in leaders], 1),
        follower=follower[np.argsort(follower["at"], kind="stable")],
        item=item,
    )


def last_rows(number: np.ndarray) -> np.ndarray:
    """Rows (n,) to keep of frame numbers (rows,), by number: after a rollback only the last row of a frame is real."""
    _, last = np.unique(number[::-1], return_index=True)
    return len(number) - 1 - last


def parse(path: Path | str) -> tuple[dict[str, Any], Any]:
    """(game start data, Arrow struct of the frames or None); errors as `read`."""
    try:
        from peppi_py._peppi import read_slippi  # the public API omits items
    except ImportError as error:
        raise ValueError("reading .slp files needs peppi-py: pip install 'matrixlib[melee]'") from error
    try:
        game = read_slippi(os.fspath(path), False)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        text = str(error).splitlines() or [type(error).__name__]
        raise ReplayError(text[0][:200]) from error
    return game.start, game.frames


def check(players: np.ndarray, number: np.ndarray) -> None:
    """ReplayError for impossible values: files have no checksum."""
    odd = players["character"] >= CHARACTERS
    for name in ("percent", "x", "y"):
        odd |= ~np.isfinite(players[name])
    if odd.any():
        frame, player = np.argwhere(odd)[0]
        raise ReplayError(f"frame {number[frame]}: no sound state of a player ({players[frame, player]})"[:200])


def _column(struct: Any, *path: str) -> np.ndarray:
    for name in path:
        struct = struct.field(name)
    return struct.to_numpy(zero_copy_only=False)


def _names(struct: Any) -> set[str]:
    return {field.name for field in struct.type}


def _known(post: Any) -> int:
    """Bits of what this version records of a player."""
    bits = {
        columns.SPEEDS: {"velocities"},
        columns.GROUNDED: {"airborne", "jumps", "misc_as", "state_flags"},
        columns.ACTION_FRAME: {"state_age"},
        columns.SAFETY: {"hurtbox_state"},
    }
    return sum(bit for bit, names in bits.items() if names <= _names(post))


def _half(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -LARGEST, LARGEST).astype(np.float16)


def _player(post: Any, keep: np.ndarray) -> np.ndarray:
    """PLAYER of the rows to keep."""
    known, out = _known(post), np.zeros(len(keep), PLAYER)

    def column(*path: str) -> np.ndarray:
        return _column(post, *path)[keep]

    out["action"], out["character"], out["stocks"] = column("state"), column("character"), column("stocks")
    out["percent"], out["shield"] = _half(column("percent")), _half(column("shield"))
    out["x"], out["y"] = _half(column("position", "x")), _half(column("position", "y"))
    facing = column("direction")
    flags = np.where(facing > 0, columns.RIGHT, 0) | np.where(facing < 0, columns.LEFT, 0)
    out["jumps"], out["hitstun"], out["speeds"], out["action_frame"] = UNKNOWN, np.nan, np.nan, np.nan
    if known & columns.GROUNDED:
        flags |= np.where(column("airborne") > 0, columns.AIR, columns.GROUND)
        out["jumps"] = column("jumps")
        stunned = (column("state_flags", "3").astype(np.uint8) & HITSTUN) > 0
        out["hitstun"] = _half(np.where(stunned, column("misc_as"), 0.0))  # has other meanings in other states
    if known & columns.SAFETY:
        flags |= np.where(column("hurtbox_state") > 0, columns.SAFE, columns.OPEN)
    if known & columns.SPEEDS:
        parts = ("self_x_air", "self_x_ground", "self_y", "knockback_x", "knockback_y")
        out["speeds"] = np.stack([_half(column("velocities", part)) for part in parts], 1)
    if known & columns.ACTION_FRAME:
        out["action_frame"] = _half(column("state_age"))
    out["flags"] = flags
    return out


def controllers(pre: Any, keep: np.ndarray) -> np.ndarray:
    """CONTROLLER of the rows to keep; NaN axes are at rest."""
    out = np.zeros(len(keep), CONTROLLER)
    buttons = _column(pre, "buttons_physical")[keep].astype(np.uint16)
    for bit, mask in enumerate(columns.MASKS):
        out["buttons"] |= ((buttons & mask) > 0).astype(np.uint8) << bit

    def steps(least: float, steps: int, *path: str) -> np.ndarray:
        steady = np.nan_to_num(_column(pre, *path)[keep], nan=0.0, posinf=0.0, neginf=0.0)
        return np.rint(np.clip(steady, least, 1.0) * steps)

    for number, path in enumerate((("joystick", "x"), ("joystick", "y"), ("cstick", "x"), ("cstick", "y"))):
        out["sticks"][:, number] = steps(-1.0, columns.STICK_STEPS, *path)
    out["shoulder"] = steps(0.0, columns.SHOULDER_STEPS, "triggers")
    return out


def _follower(port: Any, whose: int, keep: np.ndarray) -> np.ndarray:
    """FOLLOWER of a player's second character, if any."""
    if "follower" not in _names(port):
        return np.zeros(0, FOLLOWER)
    follower = port.field("follower")
    there = np.flatnonzero(np.asarray(follower.is_valid())[keep])
    out = np.zeros(len(there), FOLLOWER)
    out["at"], out["whose"], out["state"] = there, whose, _player(follower.field("post"), keep[there])
    return out


def _items(frames: Any, keep: np.ndarray, ports: tuple[int, int]) -> tuple[np.ndarray, bool]:
    """(ITEM, whether the version records items and owners); older ones of a frame first."""
    if "item" not in _names(frames):
        return np.zeros(0, ITEM), False
    lists = frames.field("item")
    pick, bounds = ragged_rows(np.asarray(lists.offsets), keep)
    at, values = np.repeat(np.arange(len(keep)), np.diff(bounds)), lists.values
    order = np.lexsort((_column(values, "id")[pick], at))
    pick, out = pick[order], np.zeros(len(pick), ITEM)
    out["at"], out["type"], out["owner"] = at[order], _column(values, "type")[pick], -1
    for name, field in (("place", "position"), ("speed", "velocity")):
        out[name] = np.stack([_half(_column(values, field, axis)[pick]) for axis in "xy"], 1)
    if known := "owner" in _names(values):
        owners = _column(values, "owner")[pick]
        out["owner"] = np.select([owners == ports[0], owners == ports[1]], [0, 1], -1)
    return out, known
