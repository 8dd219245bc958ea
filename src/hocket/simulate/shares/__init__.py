"""Shares of a batch as one larger graph: every replica, microbatch and exchange as ops."""

from hocket.simulate.shares.prices import priced_at
from hocket.simulate.shares.unfold import Unfolded, unfold

__all__ = ["Unfolded", "priced_at", "unfold"]
