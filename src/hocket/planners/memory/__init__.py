"""Memory of one device: in which order its ops hold few bytes, at which addresses, and what is
kept, moved and made again within a budget (`budget`)."""

from hocket.planners.memory.order import OrderBound, bounded_order, memory_order, order_bound
from hocket.planners.memory.packing import Addresses, Intervals, lifetimes, pack
from hocket.planners.memory.release import release_gradients

__all__ = [
    "Addresses",
    "Intervals",
    "OrderBound",
    "bounded_order",
    "lifetimes",
    "memory_order",
    "order_bound",
    "pack",
    "release_gradients",
]
