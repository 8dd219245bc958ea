"""Memory of one device: op orders with a low peak, and plans within a memory budget.

This package exports the order search (`order`). `budget` and `frontier` make plans that offload,
recompute or stream block by block; `linear` is their linear program, `maker` turns its fractions
into memory sections, and `placed` orders the ops of a placement on several devices.
"""

from hocket.planners.memory.order import (
    OrderBound,
    bounded_order,
    memory_order,
    order_bound,
    release_gradients,
)

__all__ = ["OrderBound", "bounded_order", "memory_order", "order_bound", "release_gradients"]
