"""Claims: typed statements of planners about a plan, such as bounds and predictions, for programs.

Claims are not decisions: a plan without them runs the same. Code that relies on a bound or a
prediction checks it first. Text for users is in the plan's notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hocket.base import fields as checked
from hocket.base.units import MOST_BYTES

# Limits against absurd values in files, far above anything real.
_MAX_SECONDS = 1e15
_MAX_COUNT = 2**53
_SECONDS = (
    "step_s", "repeated_step_s", "estimated_step_s", "max_load_s", "step_bound_s", "load_bound_s",
)  # fmt: skip
_TEXTS = ("made_from", "form", "order")


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Bounds, counts and predictions; None, empty or zero if nothing is claimed."""

    step_s: float | None = None
    """Predicted step time: the simulated time, plus the cost of waits between two streams, minus
    the time that overlaps with the next step."""
    repeated_step_s: float | None = None
    """Time per step of a memory plan when many steps follow each other: host updates overlap with
    the next forward pass."""
    peak_bytes: tuple[int, ...] = ()
    """Predicted peak memory per device of the cluster; for a transformer's training, of one device
    of each pipeline rank."""
    peak_bound_bytes: tuple[int, ...] = ()
    """Lower bound of each device's peak memory over all orders of its ops; 0 if unknown."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Breakdown of the step time: seconds by name of the part."""
    estimated_step_s: float | None = None
    """Step time in the planner's own cost model, before simulation."""
    max_load_s: float | None = None
    """Load of the busiest device."""
    step_bound_s: float | None = None
    """Lower bound of the step time over all plans."""
    load_bound_s: float | None = None
    """Lower bound, over all plans, of the load of the busiest device."""
    proven: bool | None = None
    """True if the plan is proven to be optimal."""
    gap: float | None = None
    """Optimality gap: fraction of the step time that a better plan could save at most."""
    made_from: str = ""
    """Planners whose candidate ``auto`` chose."""
    form: str = ""
    """Form of the graph that was planned: single ops, groups of the forward pass or of the step."""
    order: str = ""
    """Name of the best of the orders that were tried."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counters of the algorithm by name."""
    certificate: Mapping[str, Any] = field(default_factory=dict)
    """Certificate of a collective: its rate, the bound of the rate, and the proof of the bound."""

    def also(self, **claims: Any) -> Claims:
        """Return these claims with others added; ``counts`` and ``parts_s`` are merged by key."""
        # Several planners may add counters to one plan, so these are merged.
        for name in ("counts", "parts_s"):
            if name in claims:
                claims[name] = {**getattr(self, name), **claims[name]}
        return replace(self, **claims)

    def to_data(self) -> dict[str, Any]:
        """The claims as plain data."""
        stated = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in stated.items()
            # A claim of 0 or False is a statement and must stay.
            if value is not None and value != "" and value != () and value != {}
        }

    @classmethod
    def from_data(cls, data: object) -> Claims:
        """Read claims from plain data; raises `InputFileError`."""
        known = [f.name for f in fields(cls)]
        entry = checked.record(data, "claims", optional=known)
        return cls(**{name: _claim(name, value, f"claims.{name}") for name, value in entry.items()})

    def summary(self) -> dict[str, Any]:
        """Return claims for ``hocket plan --json``: no predictions, with counts and bound."""
        summary = self.to_data()
        # These have places of their own in the output.
        for name in ("step_s", "repeated_step_s", "peak_bytes", "parts_s", "certificate"):
            summary.pop(name, None)
        summary |= summary.pop("counts", {})
        for name in ("step_bound_s", "load_bound_s"):
            if name in summary:
                summary["lower_bound_s"] = summary.pop(name)
        return summary


def _claim(name: str, value: object, path: str) -> Any:
    if name in _SECONDS:
        return checked.number(value, path, 0, _MAX_SECONDS)
    if name in _TEXTS:
        return checked.text(value, path)
    if name in ("peak_bytes", "peak_bound_bytes"):
        return tuple(checked.int_column(value, path, 0, MOST_BYTES).tolist())
    if name == "gap":
        return checked.number(value, path, 0, 1)
    if name == "proven":
        return checked.flag(value, path)
    table = checked.mapping(value, path)
    if name == "parts_s":
        return {
            key: checked.number(entry, checked.inside(path, key), -_MAX_SECONDS, _MAX_SECONDS)
            # Parts may be negative: time that overlaps with the next step is subtracted.
            for key, entry in table.items()
        }
    if name == "counts":
        return {
            key: checked.integer(entry, checked.inside(path, key), 0, _MAX_COUNT)
            for key, entry in table.items()
        }
    return dict(table)
