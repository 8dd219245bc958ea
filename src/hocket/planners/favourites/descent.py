"""Favours for large graphs: descent on a smoothed longest path, after Frank and Wolfe (1956).

The longest path becomes soft: every maximum is a log-sum-exp, so that all long paths count and each
edge carries a flow, the share of the long paths that use it. A round finds a matching of great
weight on the seconds that favours would save, and moves favours towards it, but only at the ops
that the matching covers: elsewhere nothing is lost. The temperature falls from two mean lengths of
an edge to a twentieth, since what smoothing adds grows with the edges on a path. O(rounds · edges).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.planners.favourites.net import ReaderPairs

_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 2.0, 0.05
"""In mean lengths of an edge, with its producer, on the long paths."""
_MAX_ROUNDS, _MIN_ROUNDS = 300, 30
_TOTAL_EDGES = 36_000_000
"""Edges looked at over all rounds, about; more than that gains little on the largest graphs."""


def descended_favours(net: ReaderPairs, num_rounds: int | None = None) -> FloatArray:
    """Favours of a short longest path; the number of rounds follows from the size if not given."""
    from hocket.planners.favourites.descent_kernels import Descent, descend

    num_ops, num_edges = len(net.op_s), len(net.src)
    if num_rounds is None:
        num_rounds = int(np.clip(_TOTAL_EDGES // max(num_edges, 1), _MIN_ROUNDS, _MAX_ROUNDS))
    descent = Descent(
        favour=net.is_free.astype(np.float64),
        weight=np.zeros(num_edges),
        start_s=np.zeros(num_ops),
        flow=np.zeros(num_ops),
        chosen=np.full(num_ops, -1, dtype=np.int32),
        taken=np.full(num_ops, -1, dtype=np.int32),
    )
    temperatures = np.geomspace(_FIRST_TEMPERATURE, _LAST_TEMPERATURE, num_rounds)
    steps = 2 / (np.arange(num_rounds) + 2)
    # Replaced, after one round, by the mean over the paths themselves.
    guess_s = float(net.op_s.sum() + net.cost_s.sum()) / max(num_edges, 1)
    descend(net, descent, guess_s, temperatures, steps)
    return descent.favour
