"""The rows of a batch that one of several processes makes, and random numbers for these alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from matrixlib.data.reader import LoaderError

SIZE_AT = {"random": 0, "standard_normal": 0, "integers": 2, "normal": 2, "uniform": 2}
"""Methods of a generator that `prepare` may draw with -> place of the argument `size`."""


@dataclass(frozen=True)
class Share:
    """Every `size`-th row of a batch from row `rank` on: of all ranks together each row once. So the rows of a batch
    are the same for any number of ranks, and the first rows of all of them are the first rows of the batch.
    """

    rank: int = 0
    size: int = 1

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Those of (B, ...)."""
        return rows[self.rank :: self.size]

    def stream(self, generator: np.random.Generator, rows: int) -> np.random.Generator:
        """The random stream of a batch of `rows` rows, of which only the numbers of this share's rows come out."""
        return generator if self.size == 1 else cast(np.random.Generator, RowGenerator(generator, rows, self))


class RowGenerator:
    """Draws for every row of a batch and gives the numbers of the rows of a share, so that a row gets the same ones
    whoever makes it. The leading size of each draw is the number of rows.
    """

    def __init__(self, generator: np.random.Generator, rows: int, share: Share) -> None:
        self._generator, self._rows, self._share = generator, rows, share
        self._own = len(range(share.rank, rows, share.size))

    def __getattr__(self, name: str) -> Callable[..., np.ndarray]:
        if name not in SIZE_AT:
            raise LoaderError(
                f"prepare: with several ranks it cannot draw with `{name}`, but with {', '.join(SIZE_AT)}"
            )

        def draw(*args: Any, **options: Any) -> np.ndarray:
            place = SIZE_AT[name]
            given = options.pop("size", None) if len(args) <= place else args[place]
            size = (given,) if isinstance(given, (int, np.integer)) else tuple(given or ())
            if not size or size[0] != self._own:
                raise LoaderError(
                    f"prepare: the leading size of `{name}` is the number of rows, {self._own}, not {given}"
                )
            before, after = args[:place], args[place + 1 :]
            if len(before) < place:  # such as integers(64, size=rows)
                whole = getattr(self._generator, name)(*before, size=(self._rows, *size[1:]), **options)
            else:
                whole = getattr(self._generator, name)(*before, (self._rows, *size[1:]), *after, **options)
            return self._share.of(whole)

        return draw
