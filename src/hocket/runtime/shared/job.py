"""What a replica is told about a run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hocket.capture.optimizer import Optimizer, optimizer_of_meta
from hocket.runtime.shared.rows import Rows

PER_MICROBATCH = 1_000
"""What a microbatch counts as while it is under way."""


@dataclass(frozen=True, kw_only=True)
class ShareJob:
    """One model trained for some steps, each replica on its rows of the batch."""

    model: str
    """A model of the zoo or ``package.module:function``."""
    options: Mapping[str, Any]
    """How it is built: batch, seq, dtype."""
    loss: str | None
    update: Optimizer
    rows: tuple[tuple[Rows, ...], ...]
    """Per replica, of each of its microbatches."""
    num_samples: int
    steps: int
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """The job as JSON data."""
        return {
            "model": self.model,
            "options": dict(self.options),
            "loss": self.loss,
            "update": self.update.to_meta(),
            "rows": [[list(rows) for rows in own] for own in self.rows],
            "num_samples": self.num_samples,
            "steps": self.steps,
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShareJob:
        """The job of `as_dict`."""
        update = optimizer_of_meta(data["update"])
        assert update is not None, "shares are trained"
        rows = tuple(tuple(Rows(*pair) for pair in own) for own in data["rows"])
        return cls(**{**data, "update": update, "rows": rows})
