"""How often each class of the controller is held in the rows that a configuration trains on.

The catalogue has the counts of each shard, made when it was written. They are added up over the shards in use, so that
another split, another limit or a shard in quarantine gives other rates; where a limit keeps a part of a shard, the rows
of that part are counted.
"""

import functools
import operator

import numpy as np

from matrixlib.config import ConfigError
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.reader import kept_rows
from matrixlib.data.remote import local_path
from matrixlib.data.shards import Shard, select
from matrixlib.tasks.melee.columns import LAYOUT
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.sample_set import data_folder
from matrixlib.tasks.melee.statistics import Statistics
from matrixlib.tasks.melee.stretches import count


def statistics(config: MeleeConfig) -> Statistics | None:
    """Of the training rows of a configuration; None where its data are not on this machine.

    Raises ShardError for a shard that cannot be read.
    """
    try:
        folder = data_folder(config)
    except ConfigError:
        return None
    rows = Catalogue(folder).shards("train")
    kept = kept_rows([row.count for row in rows], [row.source for row in rows], config.data.limit)
    parts = []
    for row, rows_kept in zip(rows, kept, strict=True):
        if rows_kept == row.count and "classes" in row.quality:
            parts.append(Statistics(**row.quality["classes"]))
        elif rows_kept:
            parts.append(count(select(Shard(local_path(row), LAYOUT).arrays, np.arange(rows_kept), LAYOUT)))
    return functools.reduce(operator.add, parts) if parts else None
