"""The data of a run: loaders by phase, held-out batches, evidence records. The trainer's only data source."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrixlib.config import Config
from matrixlib.data.order import RankSlice
from matrixlib.data.reader import WHOLE, Sidecars, kept_rows
from matrixlib.data.shards import concat, write_shard
from matrixlib.engine.parts import Parts
from matrixlib.engine.stats import listed
from matrixlib.hardware import backend
from matrixlib.hardware.runtime import Runtime

if TYPE_CHECKING:
    from matrixlib.data.catalogue import Catalogue, ShardRow
    from matrixlib.data.loader import Loader, Tensors
    from matrixlib.engine.curriculum import Phase
    from matrixlib.engine.task import Task, Teacher
    from matrixlib.tasks.spec import TaskSpec


class RunError(ValueError):
    """A run cannot be opened or resumed; the message says what to do."""


@dataclass
class RunData:
    """Training and held-out data of one run, and messages about it. ranks: which rows this process prepares. parts:
    the caller's, already in `task`. strength: a `runs.strength.StrengthMatch`. training, validation: loaders over
    all data. RunError if either is empty, or a phase has no data."""

    config: Config
    runtime: Runtime
    spec: TaskSpec[Any]
    task: Task
    catalogue: Catalogue
    messages: list[str]
    teacher: Teacher | None = None
    ranks: RankSlice = RankSlice()
    parts: Parts = Parts()
    strength: Any = None

    def __post_init__(self) -> None:
        self._sidecars: Sidecars | None = None
        self._max_lost = self.config.data.max_lost
        self._lost: dict[str, set[tuple[str, int]]] = {"train": set(), "validation": set()}
        self.messages += [text for text in self._left_out() if text not in self.messages]  # already reported
        self._check_sources()
        self._open()

    def _open(self) -> None:
        self.training = self._training(self.task)
        self.validation = self._validation(self.task)

    def of_all_ranks(self) -> RunData:
        """The rows of all ranks; losses so far stay counted."""
        if self.ranks.size == 1:
            return self
        whole = replace(self, ranks=RankSlice())
        whole._lost = self._lost
        return whole

    def batches(self, phase: Phase | None = None) -> tuple[Task, Loader]:
        if phase is None:
            return self.task, self.training
        stage = self.spec.stage(self.task, phase)
        loader = self._training(stage.task, stage.sources, phase=phase.number, weights=stage.weights)
        return stage.task, loader

    def try_workers(self) -> None:
        """Test the loader's workers; if they fail, batches are prepared in this process, with equal results."""
        if problem := self.training.try_workers():
            self.runtime = replace(self.runtime, workers=0)
            self._open()
            self._say(f"the loader's workers do not work here ({problem}); batches are made between the updates")

    def put_beside(self, sidecars: Sidecars | None) -> None:
        """From now on rows include their sidecar data."""
        if sidecars is not None:
            self._sidecars = sidecars
            self._open()

    def held_out(self, kind: str, phase: Phase | None = None) -> Iterable[Tensors]:
        loader = self.validation
        if phase is not None:
            stage = self.spec.stage(self.task, phase)
            loader = self._validation(stage.task, stage.sources)
        held, teacher = self.config.validation, self.teacher
        batches = loader.sequential(held.batch_size, sample=held.sample if kind == "sample" else 0)
        return batches if teacher is None else replace(batches, make=lambda: map(teacher, batches))

    def batch(self, i: int) -> Tensors:
        import torch

        batch = {name: torch.from_numpy(array) for name, array in self.training.batch(i).items()}
        return batch if self.teacher is None else self.teacher(batch, 0.0)

    def records(self, source: Any, batches: Sequence[int], folder: Path) -> None:
        """Write the stored rows of these unskipped batch numbers as one shard, `records.npz`, in `folder`."""
        layout, batches = self.spec.layout, list(batches)
        meta = {"source": "evidence", "generator": "training", "seed": self.config.seed, "split": "train"}
        rows = concat([source.records(raw) for raw in batches], layout)
        write_shard(folder / "records.npz", layout, rows, {**meta, "batches": batches})

    def _training(self, task: Task, sources: Iterable[str] = (), **options: Any) -> Loader:
        """Loader of training rows of these sources (default all), prepared by `task`."""
        from matrixlib.data.loader import Loader

        data = self.config.data
        rows = rows_of(self.catalogue, "train", self.config, sources)
        if not rows:
            quarantined = self.catalogue.shards(state="quarantined")
            reasons = [f"{row.name}: {row.reason}" for row in quarantined] + self.catalogue.messages
            raise RunError(
                f"data set '{data.source}' has no healthy training shard left"
                + (f" of {', '.join(sources)}" if sources else "")
                + (f" ({'; '.join(reasons[:3])})" if reasons else "")
                + "; restore the shards or import the data again"
            )
        if not (isinstance(data.source, str) or options.get("weights")):
            options["weights"] = data.source
        options |= {"limit": data.limit, "window_blocks": data.window_blocks, **self._making("train")}
        options |= {"before": getattr(task, "history", 0), "last_of": getattr(task, "last_of", "")}
        size = self.config.train.batch_size
        loader = Loader(rows, self.spec.layout, size, self.config.seed, task.prepare, **options)
        loader.check_cache()
        return loader

    def _validation(self, task: Task, sources: Iterable[str] = ()) -> Loader:
        return held_out_loader(self.spec, self.config, self.catalogue, task, sources, **self._making("validation"))

    def _making(self, split: str) -> dict[str, Any]:
        """Common loader arguments: how batches are prepared, and whom to notify."""
        return {
            "workers": self.runtime.workers,
            "prefetch": self.runtime.prefetch,
            "pin": backend.pins(self.runtime.device),
            "timeout": self.config.data.timeout,
            "on_damage": partial(self._damaged, split),
            "on_loss": self._say,
            "sidecars": self._sidecars,
            "ranks": self.ranks,
        }

    def _left_out(self) -> Iterator[str]:
        """Messages on data excluded from the start, or suspicious."""
        if doubts := [f"{row.name} ({outlier_text(row)})" for row in self.catalogue.shards() if outlier_text(row)]:
            use = self.config.data.suspicious == "use"
            fate = "used; data.suspicious: quarantine leaves them out" if use else "left out of this run"
            yield f"suspicious shards, {fate}: {listed(doubts)}"
        if out := self.catalogue.shards(state="quarantined"):
            share = sum(row.count for row in out) / max(1, sum(row.count for row in self.catalogue.shards(state=None)))
            shards = f"{len(out)} shard{'s are' if len(out) > 1 else ' is'} quarantined"
            yield f"{shards}, {share:.2%} of the rows; {out[0].name}: {out[0].reason}"

    def _check_sources(self) -> None:
        """RunError unless every phase has data of its sources, also held-out data if it is judged by them."""
        curriculum = self.spec.curriculum(self.config)
        if curriculum is None:
            return
        training, held_out = (
            {row.source for row in rows_of(self.catalogue, split, self.config)} for split in ("train", "validation")
        )
        for phase in curriculum.phases:
            sources = self.spec.stage(self.task, phase).sources
            if lacking := [name for name in sources if name not in training]:
                raise RunError(
                    f"the curriculum's phase '{phase}' asks for source '{lacking[0]}', of which there is no healthy "
                    f"training shard; {self.catalogue.folder} has {', '.join(sorted(training)) or 'none'}"
                )
            if curriculum.config.kind == "adaptive" and sources and held_out.isdisjoint(sources):
                raise RunError(
                    f"the curriculum's phase '{phase}' is to end by what is measured on its sources, of which nothing "
                    f"is held out ({', '.join(sources)}): take curriculum.kind fractions, or bring in more games"
                )

    def _damaged(self, split: str, name: str, block: int, reason: str) -> None:
        lost, most = self._lost[split], self._max_lost
        lost.add((name, block))
        share = self.lost(split)
        rows = f"of the {'training' if split == 'train' else 'held-out'} rows"
        shards = ", ".join(sorted({name for name, _ in lost}))
        restored = f"restore {shards} in {self.catalogue.folder} and "
        if self._sidecars is not None and not self._sidecars.sound(name, block):
            path = self._sidecars.paths[name]
            with contextlib.suppress(OSError):  # read-only folder
                self._sidecars.note(path).touch()
            reason = f"what belongs to it in {path} is damaged, and recomputed when the run is opened again"
            restored = ""
        if (count := len(lost)) < 4 or count.bit_count() == 1:  # then the 4th, 8th, 16th ...
            where = f"shard {name}" if block == WHOLE else f"shard {name}, block {block}"
            blocks = f", in {count} blocks" if count > 1 else ""
            self._say(f"{where}: {reason}; its rows are replaced by others; {share:.2%} {rows} are lost so far{blocks}")
        if share > most:
            raise RunError(
                f"{share:.1%} {rows} are damaged, more than data.max_lost allows ({most:.1%}): {restored}"
                "start the same run again, or raise that option"
            )

    def lost(self, split: str) -> float:
        """Share of the "train" or "validation" rows read so far that were corrupt."""
        loader, lost = self.training if split == "train" else self.validation, self._lost[split]
        whole = {name for name, block in lost if block == WHOLE}
        rows = (loader.reader.rows_in(name, block) for name, block in lost if block == WHOLE or name not in whole)
        return sum(rows) / loader.count

    def _say(self, text: str) -> None:
        self.messages.append(text)
        warnings.warn(text, stacklevel=2)


def held_out_loader(
    spec: TaskSpec[Any], config: Config, catalogue: Catalogue, task: Task, sources: Iterable[str] = (), **options: Any
) -> Loader:
    """Loader of held-out rows of these sources (default all), prepared by `task`."""
    from matrixlib.data.loader import Loader

    rows = rows_of(catalogue, "validation", config, sources)
    if not rows:
        raise RunError(
            f"data set '{config.data.source}' holds nothing out, so nothing could be said of what is learned; add data"
            + (f": {spec.held_out}" if spec.held_out else "")
        )
    held, prepare = config.validation, task.prepare_plain
    options |= {"before": getattr(task, "history", 0), "last_of": getattr(task, "last_of", "")}
    if catalogue.remote:  # limits its open files
        options["window_blocks"] = config.data.window_blocks
    return Loader(rows, spec.layout, held.batch_size, config.seed, prepare, limit=held.limit, **options)


def rows_of(catalogue: Catalogue, split: str, config: Config, sources: Iterable[str] = ()) -> list[ShardRow]:
    """Healthy shards of a split and of these sources (default all); suspicious ones as configured."""
    names, use = set(sources), config.data.suspicious == "use"
    return [
        row for row in catalogue.shards(split) if (not names or row.source in names) and (use or not outlier_text(row))
    ]


def shards_in_use(spec: TaskSpec[Any], config: Config, catalogue: Catalogue) -> list[ShardRow]:
    """Shards of which a run reads any row: limits keep the first of each source."""
    used = []
    for split, limit in (("train", config.data.limit), ("validation", config.validation.limit)):
        rows = rows_of(catalogue, split, config)
        whole = spec.curriculum(config) is not None  # phases keep other rows
        kept = kept_rows([row.count for row in rows], [row.source for row in rows], 0 if whole else limit)
        used += [row for row, count in zip(rows, kept, strict=True) if count]
    return used


def outlier_text(row: ShardRow) -> str:
    """Outlier figures of a shard at import, as text."""
    return ", ".join(f"{figure} z {z:+.1f}" for figure, z in row.quality.get("outliers", {}).items())
