"""A network as the evaluator of a search."""

from typing import Any

import numpy as np

from matrixlib.play.game import Moves, Offsets, Past, States, Values


class Evaluator:
    """What a network says of states of its game: a `play.search.Evaluate`.

    Priors are the softmax over the legal moves alone; the value is the expected result (win - loss where the head
    says win, draw and loss) from the side to move. history: plies before a state that the network looks at.

    net: an `engine.network.Network`. Its task's `inputs(states, moves, offsets)` gives the arrays that its `predict`
    takes, `policy_index` (B, L) among them; where the task has a `history` above 0, `inputs` takes a `Past`, too.
    """

    def __init__(self, net: Any) -> None:
        assert not net.training, "the network must be in eval mode"
        self.net = net
        self.history: int = getattr(net.task, "history", 0)

    def __call__(
        self, states: States, moves: Moves, offsets: Offsets, past: Past | None = None
    ) -> tuple[Values, Values]:
        """Priors (K,) and values (N,) of states (N,) with their legal moves (K,) at offsets (N + 1,).

        past: what came before; without it a network that looks at it fills it up by its own rule.
        """
        if not len(states):
            return np.empty(0, np.float32), np.empty(0, np.float32)
        known = () if past is None else (past,)
        batch = self.net.task.inputs(states, moves, offsets, *known)
        out = self.net.predict(batch)
        return np.exp(out["policy"][batch["policy_index"] >= 0]), out["value"]
