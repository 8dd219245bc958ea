"""Nearly optimal favourite shares for large graphs: Frank-Wolfe steps between balancing sweeps.

Frank and Wolfe, "An algorithm for quadratic programming", 1956, on the longest path with its maxima
blurred: the unit of flow along the blurred longest paths is the gradient, a greedy matching on flow
times cost the corner to step towards. The blur is a fraction of the mean time per op of the longest
path and shrinks with the steps. Sweeps that divide each op's share among its edges in balance come
before and after: where ops follow each other in series they alone reach the optimum within
rounding, where many paths run side by side they get stuck and the steps help.
O(edges) per sweep; a step also sorts the edges that carry flow. The number of steps falls with the
number of edges, so that the work stays about linear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hocket.arrays import FloatArray
from hocket.compiled.containers import table, zeros
from hocket.planners.placement.favourites.edges import Edges

if TYPE_CHECKING:
    from hocket.planners.placement.favourites.passes import Sweep

_SWEEPS_BEFORE, _SWEEPS_AFTER = 2, 5
_MIN_STEPS, _MAX_STEPS = 30, 100
_STEP_EDGES = 8_000_000
"""Edges looked at in all steps together, beyond the smallest number of steps."""
_BLUR, _BLUR_DECAY = 0.6, 0.06


def solve_nearly(edges: Edges, num_steps: int | None = None) -> FloatArray:
    """Shares whose longest path is close to the shortest possible."""
    num_edges = len(edges.src)
    share = np.zeros(num_edges)
    if num_edges == 0:
        return share
    if num_steps is None:
        num_steps = max(_MIN_STEPS, min(_MAX_STEPS, _STEP_EDGES // num_edges))
    _balance(edges, share, _SWEEPS_BEFORE)
    stepped = share.copy()
    _step(edges, stepped, num_steps)
    candidates = (stepped, share)
    for candidate in candidates:
        _balance(edges, candidate, _SWEEPS_AFTER)
    return min(candidates, key=lambda candidate: path_s(edges, candidate))


def path_s(edges: Edges, share: FloatArray) -> float:
    """The longest path when the given shares of transfers are free."""
    from hocket.planners.placement.favourites.passes import longest

    return float(longest(edges, share, np.zeros(len(edges.op_s))))


def _balance(edges: Edges, share: FloatArray, num_sweeps: int) -> None:
    """Balance the shares backward and forward, in place."""
    from hocket.planners.placement.favourites.passes import Scratch, balance, longest

    most = int(max(np.diff(edges.in_ptr).max(), np.diff(edges.out_ptr).max()))
    scratch = Scratch(
        start_s=np.zeros(len(edges.op_s)),
        least_s=np.zeros(len(share)),
        base_s=np.zeros(most),
        cost_s=np.zeros(most),
    )
    forward, backward = _sweeps(edges)
    longest(edges, share, scratch.start_s)
    for _ in range(num_sweeps):
        balance(backward, scratch.start_s + edges.op_s, share, scratch)
        balance(forward, scratch.start_s + edges.op_s, share, scratch)


def _sweeps(edges: Edges) -> tuple[Sweep, Sweep]:
    from hocket.planners.placement.favourites.passes import Sweep

    order = np.arange(len(edges.op_s))
    forward = Sweep(
        order=table(order, np.int64),
        op_s=edges.op_s,
        cost_s=edges.cost_s,
        behind=edges.src,
        ahead=edges.dst,
        in_ptr=edges.in_ptr,
        incoming=table(np.arange(len(edges.src)), np.int64),
        out_ptr=edges.out_ptr,
        outgoing=edges.out,
    )
    backward = forward._replace(
        order=table(order[::-1], np.int64),
        behind=edges.dst,
        ahead=edges.src,
        in_ptr=edges.out_ptr,
        incoming=edges.out,
        out_ptr=edges.in_ptr,
        outgoing=forward.incoming,
    )
    return forward, backward


def _step(edges: Edges, share: FloatArray, num_steps: int) -> None:
    """Frank-Wolfe steps, in place."""
    from hocket.planners.placement.favourites import passes

    num_ops, num_edges = len(edges.op_s), len(edges.src)
    reach_s, op_flow, flow = np.zeros(num_ops), np.zeros(num_ops), np.zeros(num_edges)
    used, matched = zeros(num_edges), zeros(num_ops)
    has_child, has_parent = np.zeros(num_ops, dtype=np.bool_), np.zeros(num_ops, dtype=np.bool_)
    blur_s = _BLUR * passes.longest(edges, share, reach_s) / passes.depth(edges, share, reach_s)
    if blur_s == 0.0:
        return
    for step in range(num_steps):
        now_s = blur_s / (1 + step * _BLUR_DECAY)
        passes.soft_longest(edges, share, now_s, reach_s)
        carrying = used[: passes.flows(edges, share, now_s, reach_s, op_flow, flow, used)]
        gain_s = edges.cost_s[carrying] * flow[carrying]
        ranked = carrying[np.argsort(-gain_s, kind="stable")]
        count = passes.match(edges, ranked, has_child, has_parent, matched)
        passes.shift(edges, share, 2 / (step + 2), has_child, has_parent, matched[:count])
