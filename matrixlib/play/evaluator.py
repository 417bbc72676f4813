"""A network as the evaluator of a search."""

from typing import Any, Protocol

import numpy as np

from matrixlib.play.game import Moves, Offsets, Past, States, Values


class Network(Protocol):
    """What an evaluator needs of a network: `engine.network.Network` has it."""

    @property
    def task(self) -> Any:
        """With `inputs(states, moves, offsets)`: the arrays that `predict` takes, `policy_index` (B, L) among them.

        A task whose networks look at what came before a state says at how many plies by `history`; its `inputs` then
        take a `Past`, too.
        """

    @property
    def training(self) -> bool:
        """Whether a part of it is in training mode, in which what it says depends on chance."""

    def predict(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`policy` (B, L), log-probabilities; `value` (B,), the expected result in -1..1."""


class Evaluator:
    """What a network says of states of its game: a `play.search.Evaluate`.

    Priors are the softmax over the legal moves alone; the value is the expected result (win - loss where the head
    says win, draw and loss) from the side to move. history: plies before a state that the network looks at.
    """

    def __init__(self, net: Network) -> None:
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
