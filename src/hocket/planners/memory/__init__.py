"""Memory of one device: in which order its ops hold few bytes, at which addresses, and what is
kept, moved and made again within a budget (`budget`)."""

from hocket.planners.memory.bound import Certificate, check_certificate
from hocket.planners.memory.order import certified_order, memory_order, order_bound

__all__ = ["Certificate", "certified_order", "check_certificate", "memory_order", "order_bound"]
