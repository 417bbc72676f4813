"""What is stored of a game: stretches of consecutive frames, each as one of the two players sees it.

A row of a shard is a stretch: OWN frames that no other row of this player has as its own, and behind them the frames
that a window which begins there may reach into. So a window is a range of one row, and never crosses a game. The state
of a frame is the one after it, its controller the one that led there (Slippi's post- and pre-frame events).
"""

import numpy as np

from matrixlib.data.shards import Layout

OWN = 60
"""Frames of a row that are its own, one second: the longest window."""
DELAYS = 18
"""The longest delay in frames."""
ROW = OWN + OWN - 1 + DELAYS + 1
"""Frames of a row at most: a window that begins with the last own frame, and its last target."""
FIRST = -39
"""The first frame in which a controller does something (https://github.com/project-slippi/slippi-wiki)."""

BUTTONS = ("A", "B", "X", "Y", "Z", "L", "R", "D-up")
MASKS = (0x100, 0x200, 0x400, 0x800, 0x10, 0x40, 0x20, 0x08)
"""Bit of each button in what Slippi records."""
STICKS = ("main x", "main y", "c x", "c y")
CHARACTERS = 33
"""Characters, by the game's internal numbers."""
STICK_STEPS, SHOULDER_STEPS = 80, 140
"""The game's own steps of a stick from its centre to its edge, and of a shoulder button."""
UNKNOWN = 255
"""Of a whole number that the version of a replay does not record."""

# Bits of `flags`: where neither of a pair is set, nobody knows, or the player faces the screen.
RIGHT, LEFT, GROUND, AIR, SAFE, OPEN = (1 << bit for bit in range(6))
# Bits of `known`: what the version of a replay records.
SPEEDS, GROUNDED, ACTION_FRAME, SAFETY, ITEMS = (1 << bit for bit in range(5))
EVERYTHING = 31

PLAYER = np.dtype(
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
"""A character after a frame, in the game's units; NaN and UNKNOWN where a replay does not say."""
HALVES = np.dtype({"names": ["halves"], "formats": [("<f2", 11)], "offsets": [6], "itemsize": PLAYER.itemsize})
"""The same, all that are halves at once, in their order."""
CONTROLLER = np.dtype([("buttons", "u1"), ("sticks", "i1", (4,)), ("shoulder", "u1")])
"""buttons: bit i is BUTTONS[i]; sticks: steps from the centre; shoulder: steps."""
FRAME = np.dtype([("self", PLAYER), ("other", PLAYER), ("controller", CONTROLLER)])
PAIR = np.dtype({"names": ["players"], "formats": [(PLAYER, 2)], "offsets": [0], "itemsize": FRAME.itemsize})
"""The same, both players at once."""
FOLLOWER = np.dtype([("at", "<u4"), ("whose", "u1"), ("state", PLAYER)])
"""The second of the Ice Climbers. at: frame of the row; whose: 0 ours, 1 theirs."""
ITEM = np.dtype([("at", "<u4"), ("owner", "i1"), ("type", "<u2"), ("place", "<f2", (2,)), ("speed", "<f2", (2,))])
"""owner: 1 ours, -1 theirs, 0 nobody's."""
SLOTS = 5
"""Items that a network is told of."""
NOTHING = 0xFFFF
"""Type of an item that is not there."""
SCENE = np.dtype(
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
"""A frame with all that is said of it to a network; of two players, ours comes first."""
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
