"""Max-load: split a graph so that the busiest device has as little to do as possible.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020.
From a problem to a plan: `pieces` (ops that move together) - `classes` (of devices) - `lattice` and
`split` (exact contiguous splits) - `contiguous` - `moves` (any placement) - `bound` (lower bounds)
- `planner` (the planners).
"""

from hocket.planners.max_load.bound import max_load_bound
from hocket.planners.max_load.planner import dpl, pipedream, throughput

__all__ = ["dpl", "max_load_bound", "pipedream", "throughput"]
