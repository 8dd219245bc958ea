"""ParDNN: paths through the graph, mapped to devices by the work in their spans, then refined.

`pardnn_planner` runs the steps: `path_slices` (1a) and `path_mapping` (1b), on the weights of
`unit_work` and the state of `mapping_ledger`; `path_refinement` and `critical_path_moves` (1c);
`memory_moves` (2).
"""

from hocket.planners.placement.pardnn.pardnn_planner import pardnn

__all__ = ["pardnn"]
