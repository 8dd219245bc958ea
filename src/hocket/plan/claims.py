"""Claims: what planners state about a plan, typed, for programs to read.

A claim is not a decision: without it the plan runs the same. Whoever relies on one that can be
checked (a bound, a prediction) checks it; text for users is in a plan's notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hocket.base import fields as checked
from hocket.base.units import MOST_BYTES

_MAX_SECONDS = 1e15
_MAX_COUNT = 2**53
_SECONDS = (
    "step_s", "repeated_step_s", "estimated_step_s", "max_load_s", "step_bound_s", "load_bound_s",
)  # fmt: skip
_TEXTS = ("made_from", "form", "order")


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Bounds, counts and predictions; None, empty or zero where nothing is claimed."""

    step_s: float | None = None
    """Step time that is predicted: that of the simulator, with what waits of two streams for each
    other cost, and without what the next of many steps hides."""
    repeated_step_s: float | None = None
    """A step among many of a memory plan: the host updates beside the next one."""
    peak_bytes: tuple[int, ...] = ()
    """Predicted peak per device of the cluster; where a training is divided, of one device of each
    pipeline rank."""
    peak_bound_bytes: tuple[int, ...] = ()
    """Per device: no order of the ops placed there holds fewer bytes at its peak; 0 where nothing
    is known."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Parts of a step's time."""
    estimated_step_s: float | None = None
    """Step time as the planner's own model sees it."""
    max_load_s: float | None = None
    """Load of the busiest device."""
    step_bound_s: float | None = None
    """No plan has a shorter step."""
    load_bound_s: float | None = None
    """No plan has a smaller load of the busiest device."""
    proven: bool | None = None
    """True if the plan is proven to be the best."""
    gap: float | None = None
    """Share of the step by which another plan could be shorter."""
    made_from: str = ""
    """The candidate that ``auto`` went on from."""
    form: str = ""
    """The form of the graph that was planned: single ops, the forward pass, the whole step."""
    order: str = ""
    """The order that was best of those tried."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counters of the algorithm by name."""
    certificate: Mapping[str, Any] = field(default_factory=dict)
    """Of a collective: rate, bound, and what proves the bound."""

    def also(self, **claims: Any) -> Claims:
        """These claims with others added; counts and parts are joined."""
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
            if value is not None and value != "" and value != () and value != {}
        }

    @classmethod
    def from_data(cls, data: object) -> Claims:
        """The claims of such data; raises `InputFileError`."""
        known = [f.name for f in fields(cls)]
        entry = checked.record(data, "claims", optional=known)
        return cls(**{name: _claim(name, value, f"claims.{name}") for name, value in entry.items()})

    def summary(self) -> dict[str, Any]:
        """The planner's own claims, counts among them, as ``hocket plan --json`` has them."""
        summary = self.to_data()
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
            for key, entry in table.items()
        }
    if name == "counts":
        return {
            key: checked.integer(entry, checked.inside(path, key), 0, _MAX_COUNT)
            for key, entry in table.items()
        }
    return dict(table)
