"""What one update computes: the terms, their weights, and the items that their sums are divided by."""

from dataclasses import dataclass
from functools import cached_property

from matrixlib.engine.distributed import Ranks
from matrixlib.engine.task import Batch, Task, rows, slice_batch


@dataclass(frozen=True)
class UpdatePlan:
    """What an update of `batch` computes. weights: factor of each term's mean. main: the terms that are not gated.
    until: rows with the gated terms; the others get the terms of `main` alone.
    """

    task: Task
    batch: Batch
    weights: dict[str, float]
    main: frozenset[str]
    until: int
    ranks: Ranks

    @cached_property
    def counts(self) -> dict[str, int]:
        """Items of each term, of all ranks."""
        return {term: self.totals[term] for term in self.weights}

    @cached_property
    def totals(self) -> dict[str, int]:
        """The same, and "" for rows. Made when it is asked for: on the host, while a GPU works on the first forward
        pass.
        """
        counts = self.task.counts(self.batch)
        if self.until < rows(self.batch):
            part = self.task.counts(slice_batch(self.batch, 0, self.until))
            counts |= {term: count for term, count in part.items() if term not in self.main}
        return self.ranks.total({"": rows(self.batch), **{term: counts[term] for term in self.weights}})
