"""Max-min fairness to the end, and told: the levels at which jobs stay behind.

The allocation is that of `las`, whose ties are broken in this way already; the answer lists every
level, so that a user sees who could rise above the lowest job and how far.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.market import Market
from hocket.fleet.policies.las import las
from hocket.fleet.policies.normalise import proportional_steps_per_s
from hocket.fleet.solve.check import throughputs

_MAX_LISTED = 20


def las_lexicographic(market: Market, warm: Warm | None = None) -> Allocation:
    """`las`, with the distinct normalised throughputs in its notes."""
    answer = las(market, warm)
    owed = market.weight * proportional_steps_per_s(market) / market.gang
    reached = throughputs(market, answer) / np.where(owed > 0.0, owed, np.inf)
    levels, counts = np.unique(np.round(reached, 6), return_counts=True)
    told = [f"{level:g} ({count})" for level, count in zip(levels, counts, strict=True)]
    more = ", …" if len(told) > _MAX_LISTED else ""
    notes = {**answer.notes, "reached (jobs)": ", ".join(told[:_MAX_LISTED]) + more}
    return replace(answer, policy="las-lexicographic", notes=notes)
