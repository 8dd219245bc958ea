"""Smaller graphs that stand for larger ones: co-placed units, fused nodes, forward pass only.

`groups` chooses ops that share a device, `fuse` merges neighbours of a unit, `forward` keeps one
node per unit of the forward pass.
"""

from hocket.graph.coarsen.forward import forward_only
from hocket.graph.coarsen.fuse import fuse
from hocket.graph.coarsen.groups import anchor_of, bound_ops, co_placed, tied_ops
from hocket.graph.coarsen.nodes import Coarse

__all__ = ["Coarse", "anchor_of", "bound_ops", "co_placed", "forward_only", "fuse", "tied_ops"]
