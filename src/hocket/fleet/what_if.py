"""Scenarios: the same jobs under another policy, or with more or fewer devices.

Both forecasts start from the same state with the same bounds. They are compared up to the moment
that both reached, on jobs that end in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.base.arrays import BoolArray
from hocket.base.jsonfile import finite_or_none
from hocket.fleet.forecast import (
    Forecast,
    affordable_grain_s,
    forecast,
    resized,
)
from hocket.fleet.rounds.state import FleetState


@dataclass(frozen=True, eq=False, kw_only=True)
class TwoFutures:
    """Two forecasts of one state: unchanged, and with the scenario."""

    now: Forecast
    then: Forecast

    @property
    def horizon_s(self) -> float:
        """Moment up to which both forecasts can be compared; infinite if both are complete."""
        cut = [future.reached_s for future in (self.now, self.then) if future.is_cut_off]
        return min(cut, default=np.inf)

    @property
    def num_ended(self) -> tuple[int, int]:
        """Jobs that end up to the horizon, unchanged and in the scenario."""
        now, then = self._ended()
        return int(now.sum()), int(then.sum())

    @property
    def average_completion_s(self) -> tuple[float, float]:
        """Mean time from submission to end of the jobs that end in both; NaN where none does."""
        now, then = self._ended()
        both = now & then
        if not both.any():
            return np.nan, np.nan
        submitted_s = self.now.submitted_s[both]
        return (
            float((self.now.end_s[both] - submitted_s).mean()),
            float((self.then.end_s[both] - submitted_s).mean()),
        )

    def to_data(self) -> dict[str, Any]:
        """Convert to the body of a REST response."""
        averages = [finite_or_none(value) for value in self.average_completion_s]
        futures = (self.now.to_data(), self.then.to_data())
        both = zip(futures, self.num_ended, averages, strict=True)
        return {
            "horizon_s": finite_or_none(self.horizon_s),
            **{
                name: {**future, "num_ended": num_ended, "average_completion_s": average}
                for name, (future, num_ended, average) in zip(("now", "then"), both, strict=True)
            },
        }

    def _ended(self) -> tuple[BoolArray, BoolArray]:
        # Comparisons with NaN are false, so jobs without a known end do not count.
        return self.now.end_s <= self.horizon_s, self.then.end_s <= self.horizon_s


def what_if(
    state: FleetState, *, policy: str | None = None, num_devices: Mapping[str, int] | None = None
) -> TwoFutures:
    """Forecast a state unchanged, and with another policy or other numbers of devices by type."""
    add, remove = resized(state, num_devices or {})
    grain_s = affordable_grain_s(state)
    return TwoFutures(
        now=forecast(state, grain_s=grain_s),
        then=forecast(state, policy=policy, add=add, remove=remove, grain_s=grain_s),
    )
