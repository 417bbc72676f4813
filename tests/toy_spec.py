"""The toy task as a person's own task would come: a module outside of the package, named by its import path."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field
from toy_task import ROW, ToyNet, ToyTask, toy_records

from matrixlib.config import Config, Count, NonNegative, Section
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Layout, write_shard
from matrixlib.tasks.spec import Overfit, TaskSpec

LAYOUT = Layout("toy", 1, ROW, {})


class ToyModelConfig(Section):
    width: Count = Field(default=16, description="units of the hidden layer")
    norm: Literal["layer", "batch"] = Field(default="layer", description="normalisation of the hidden layer")


class ToyLossConfig(Section):
    plane: NonNegative = Field(default=0.5, description="weight of the squared error")


class ToyConfig(Config):
    model: ToyModelConfig = ToyModelConfig()
    loss: ToyLossConfig = ToyLossConfig()


@dataclass
class OwnTask(ToyTask):
    """The toy task with a configuration."""

    config: ToyConfig | None = None

    def build_model(self) -> ToyNet:
        import torch

        assert self.config is not None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return ToyNet(self.config.model.width, norm=self.config.model.norm)


class ToySpec(TaskSpec[ToyConfig]):
    """All that a task has to say; figures, checks and network are the defaults."""

    name = "toy"
    config = ToyConfig
    objective_options = ("loss.",)
    overfit = Overfit(overrides={"train": {"steps": 400}, "optim": {"learning_rate": 0.02}}, gaps={"class": 0.05})

    @property
    def layout(self) -> Layout:
        return LAYOUT

    def task(self, config: ToyConfig) -> OwnTask:
        return OwnTask(plane_weight=config.loss.plane, config=config)


TASK = ToySpec()


def sample(folder: Path, rows: int = 2048) -> None:
    """A data set of its own: shards of both splits, and their catalogue."""
    folder.mkdir(parents=True)
    for number, split in enumerate(("train", "validation")):
        records = toy_records(rows >> (3 * number), seed=number)
        meta = {"source": "toy", "generator": "sample", "seed": number, "split": split}
        batch: dict[str, np.ndarray] = {"records": records}
        write_shard(folder / f"{split}.npz", LAYOUT, batch, meta)
    Catalogue(folder)
