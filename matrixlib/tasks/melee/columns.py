"""Stored game data: stretches of consecutive frames from one player's view.

A row of a shard: OWN frames belonging to this row only, then the frames that windows starting in it may reach. So a
window is a range of one row and never crosses games. A frame's state is the one after it, its controller the one that
led there (Slippi's post- and pre-frame events).
"""

import numpy as np

from matrixlib.data.shards import Layout

OWN = 60  # a row's own frames, one second: the longest window
DELAYS = 18  # longest delay in frames
ROW = OWN + OWN - 1 + DELAYS + 1  # most frames of a row: a window starting at the last own frame, plus its last target
FIRST = -39  # first frame with controller input (https://github.com/project-slippi/slippi-wiki)

BUTTONS = ("A", "B", "X", "Y", "Z", "L", "R", "D-up")
MASKS = (0x100, 0x200, 0x400, 0x800, 0x10, 0x40, 0x20, 0x08)  # Slippi's bit of each button
STICKS = ("main x", "main y", "c x", "c y")
CHARACTERS = 33  # number of characters, by internal id
STICK_STEPS, SHOULDER_STEPS = 80, 140  # the game's steps from centre to edge, and of a shoulder
UNKNOWN = 255  # integers that a replay's version does not record

# Bits of `flags`: if neither of a pair is set it is unknown, or the player faces the screen.
RIGHT, LEFT, GROUND, AIR, SAFE, OPEN = (1 << bit for bit in range(6))
# Bits of `known`: what the version of a replay records.
SPEEDS, GROUNDED, ACTION_FRAME, SAFETY, ITEMS = (1 << bit for bit in range(5))
EVERYTHING = 31

PLAYER = np.dtype(  # a character after a frame, in game units; NaN and UNKNOWN if not recorded
    [
        ("action", "<u2"),
        ("character", "u1"),
        ("flags", "u1"),
        ("stocks", "u1"),
        ("jumps", "u1"),
        ("percent", "<f2"),
        ("shield", "<f2"),
        ("x", "<f2"),
        ("y", "<f2"),
        ("speeds", "<f2", (5,)),  # own x in the air, own x on the ground, own y, x and y of being hit
        ("hitstun", "<f2"),
        ("action_frame", "<f2"),
    ]
)
HALVES = np.dtype({"names": ["halves"], "formats": [("<f2", 11)], "offsets": [6], "itemsize": PLAYER.itemsize})
"""View of all float16 fields at once, in order."""
CONTROLLER = np.dtype([("buttons", "u1"), ("sticks", "i1", (4,)), ("shoulder", "u1")])
"""buttons: bit i is BUTTONS[i]; sticks: steps from the centre; shoulder: steps."""
FRAME = np.dtype([("self", PLAYER), ("other", PLAYER), ("controller", CONTROLLER)])
PAIR = np.dtype({"names": ["players"], "formats": [(PLAYER, 2)], "offsets": [0], "itemsize": FRAME.itemsize})
"""View of both players at once."""
FOLLOWER = np.dtype([("at", "<u4"), ("whose", "u1"), ("state", PLAYER)])
"""The second Ice Climber. at: frame of the row; whose: 0 ours, 1 theirs."""
ITEM = np.dtype([("at", "<u4"), ("owner", "i1"), ("type", "<u2"), ("place", "<f2", (2,)), ("speed", "<f2", (2,))])
"""owner: 1 ours, -1 theirs, 0 nobody's."""
SLOTS = 5  # items shown to a network
NOTHING = 0xFFFF  # type of an absent item
SCENE = np.dtype(  # a frame with all network inputs; our player first
    [
        ("players", PLAYER, (2,)),
        ("follower", PLAYER, (2,)),  # character UNKNOWN = nobody
        ("item", ITEM, (SLOTS,)),  # type NOTHING = none
        ("previous", CONTROLLER),  # what the player decided last
        ("decision", CONTROLLER),  # what the player decides now
        ("valid", "u1"),  # whether that is known
        ("number", "<i4"),  # Slippi's, of the frame
        ("stage", "<u2"),
        ("known", "u1"),
        ("delay", "u1"),
    ]
)
RECORD = np.dtype(
    [
        ("game", "<u8"),
        ("first", "<i4"),  # Slippi's number of the first frame
        ("stage", "<u2"),
        ("own", "u1"),
        ("port", "u1"),
        ("known", "u1"),
        ("held_out", "u1"),
    ]
)
LAYOUT = Layout(
    "melee", 1, RECORD, {"frame": {"state": FRAME}, "follower": {"state": FOLLOWER}, "item": {"state": ITEM}}
)
