"""Memory of one device: op orders with a low peak, and plans that keep a budget (`budget`)."""

from hocket.planners.memory.order import (
    OrderBound,
    bounded_order,
    memory_order,
    order_bound,
    release_gradients,
)

__all__ = ["OrderBound", "bounded_order", "memory_order", "order_bound", "release_gradients"]
