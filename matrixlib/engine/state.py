"""Plain state that goes into a checkpoint beside the configuration it belongs to."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass
class State:
    """Base of dataclasses whose fields, but for `config`, go into the checkpoint as plain data."""

    config: Any

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the checkpoint; from_dict(s.config, s.to_dict()) == s."""
        return copy.deepcopy({f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"})

    @classmethod
    def from_dict(cls, config: Any, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; `config` may be another. Raises ValueError naming keys that are missing or unknown."""
        names = {f.name for f in fields(cls)} - {"config"}
        if odd := sorted(names ^ set(data)):
            kind = cls.__name__.lower()
            raise ValueError(f"{kind} state of the checkpoint is of another version: {', '.join(odd)}")
        return cls(config, **copy.deepcopy(dict(data)))
