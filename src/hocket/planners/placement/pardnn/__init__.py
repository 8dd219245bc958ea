"""ParDNN: paths through the graph, mapped to devices by the work in their spans, then refined.

`planner` puts the steps together: `slices` and `mapping` (step 1a and 1b) on the weights of `work`
and the books of `ledger`, `refinement` and `critical` (1c), `emulate` and `memory` (2).
"""

from hocket.planners.placement.pardnn.planner import pardnn

__all__ = ["pardnn"]
