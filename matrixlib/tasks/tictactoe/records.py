"""The tic-tac-toe record: a position, what a search made of it, and how its game ended."""

from collections.abc import Mapping, Sequence

import numpy as np

from matrixlib.data.shards import Batch, Layout
from matrixlib.play.game import Trace
from matrixlib.tasks.tictactoe.game import SQUARES, STATE

UNKNOWN = 2  # result
RECORD = np.dtype(
    [
        *((name, STATE[name]) for name in STATE.names or ()),
        ("policy", "<u2", SQUARES),  # shares of the moves, sum about 65535; 0 on taken squares
        ("result", "i1"),  # of the game, from the side to move: 1 win, 0 draw, -1 loss, 2 unknown
        ("game", "<u8"),  # id of the game
    ]
)
LAYOUT = Layout("tictactoe", 1, RECORD, {})


def training_batch(traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
    """The positions of games that were fully searched, with the search's policy; ids: game number -> its id."""
    return {"records": np.concatenate([np.empty(0, RECORD), *(_records(t, ids[t.number]) for t in traces)])}


def _records(trace: Trace, game: int) -> np.ndarray:
    records, result = np.zeros(len(trace.states), RECORD), trace.results()
    for name in STATE.names or ():
        records[name] = trace.states[name]
    owner = np.repeat(np.arange(len(records)), np.diff(trace.offsets))
    records["policy"][owner, trace.moves] = np.rint(trace.policy * 65535)
    records["result"] = np.where(np.isnan(result), UNKNOWN, result)
    records["game"] = game
    return records[trace.full]
