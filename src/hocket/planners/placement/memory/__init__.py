"""Placements that fit into memory: found from scratch, repaired, or explained where none is."""

from hocket.planners.placement.memory.fit import memory_split, spread_memory
from hocket.planners.placement.memory.shortage import Shortage, explain_shortage

__all__ = ["Shortage", "explain_shortage", "memory_split", "spread_memory"]
