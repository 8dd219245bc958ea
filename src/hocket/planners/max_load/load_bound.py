"""Proven lower bounds on the maximum load, for contiguous and other placements.

Fractional work: the least maximum load if pieces could be split fractionally and transfers were
free (`device_classes`).

Minimum cut: the device that runs a piece holds some set of pieces that contains it, and its load is
the time of that set plus the nets that the set cuts. The least load of a set that contains the
piece is a minimum cut, with each net as a pair of nodes whose arc is cut if the set holds only a
part of the net. No placement is better than the largest of these minima over all pieces. If links
differ, each device is assumed to use its fastest. Times are rounded down to integers for the flow
solver, so the bound holds. O(pieces tried · flow).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.plan.problem import Problem
from hocket.planners.max_load.device_classes import (
    DeviceClasses,
    device_classes,
    dual_weights,
    least_weighted,
)
from hocket.planners.max_load.load_pieces import Pieces, merged_nets, pieces_of
from hocket.planners.shared import once_per_problem

_MAX_FLOW_PIECES = 5000
_MAX_CUTS = 32
"""Number of pieces for which a minimum cut is computed: the longest and those in costly nets."""
_TOTAL = 2**29
"""Sum of the scaled times of all pieces and nets: the flow solver uses 32-bit integers."""


@once_per_problem
def max_load_bound(problem: Problem) -> float:
    """Lower bound in seconds on the load of the busiest device, for any placement.

    The result is cached: several planners claim it for one problem, and it can take as long as
    planning.
    """
    pieces = pieces_of(problem, with_partners=False)
    return bound_s(pieces, device_classes(problem, problem.memory_bytes))


def bound_s(pieces: Pieces, classes: DeviceClasses) -> float:
    """Return the larger of the two bounds."""
    fractional_s = _fractional_s(pieces, classes)
    if not 0 < pieces.num_pieces <= _MAX_FLOW_PIECES:
        return fractional_s
    return max(fractional_s, _min_cut_s(merged_nets(pieces), classes))


def _fractional_s(pieces: Pieces, classes: DeviceClasses) -> float:
    class_s = classes.piece_s(pieces)
    weight = dual_weights(class_s, classes.counts)
    total = float(least_weighted(weight, class_s).sum())
    return total / float(weight @ classes.counts)


def _min_cut_s(pieces: Pieces, classes: DeviceClasses) -> float:
    """Maximum over some pieces of the least load of a device that runs the piece."""
    class_s, net_s = classes.piece_s(pieces), classes.least_net_s(pieces)
    tried = _candidates(pieces, class_s, net_s.max(axis=0))
    least_s = np.full(len(tried), np.inf)
    for device_class in range(len(classes.devices)):
        least_s = np.minimum(
            least_s, _least_loads_s(pieces, class_s[device_class], net_s[device_class], tried)
        )
    return float(least_s.max(initial=0.0))


def _candidates(pieces: Pieces, class_s: FloatArray, net_s: FloatArray) -> LongArray:
    longest = np.argsort(-class_s.min(axis=0), kind="stable")[: _MAX_CUTS // 2]
    costliest = np.argsort(-net_s, kind="stable")[: _MAX_CUTS // 2]
    makers = pieces.net_pieces[pieces.net_ptr[costliest]]
    return np.unique(np.concatenate((longest, makers)))


def _least_loads_s(
    pieces: Pieces, piece_s: FloatArray, net_s: FloatArray, tried: LongArray
) -> FloatArray:
    """Per tried piece: least load of a device of one class that runs it."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    # Without transfers the smallest set is the piece alone.
    if not net_s.any():
        return piece_s[tried]
    num, num_nets = pieces.num_pieces, pieces.num_nets
    usable_s = np.where(np.isfinite(piece_s), piece_s, 0.0)
    unit = _TOTAL / (usable_s.sum() + net_s.sum())
    net = np.repeat(np.arange(num_nets), np.diff(pieces.net_ptr))
    # Nodes: pieces, then an entry and an exit per net, then the sink.
    inner, outer, end = num + net, num + num_nets + net, num + 2 * num_nets
    nets = np.arange(num_nets)
    src = np.concatenate((np.arange(num), num + nets, pieces.net_pieces, outer))
    dst = np.concatenate((np.full(num, end), num + num_nets + nets, inner, pieces.net_pieces))
    # Unlimited arcs tie the net's pieces to its entry and exit, so only the net's own arc is cut.
    capacity = np.concatenate((usable_s * unit, net_s * unit, np.full(2 * len(net), _TOTAL)))
    # Casting rounds down, which keeps the flow a lower bound.
    network = coo_array((capacity.astype(np.int32), (src, dst)), (end + 1, end + 1)).tocsr()
    flows = [maximum_flow(network, int(piece), end).flow_value for piece in tried]
    found: FloatArray = np.array(flows, dtype=np.float64) / unit
    return np.where(np.isfinite(piece_s[tried]), found, np.inf)
