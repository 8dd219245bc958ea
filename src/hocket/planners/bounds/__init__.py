"""How short a step can be at best: proven numbers, found without searching for a plan."""

from hocket.planners.bounds.bound import LowerBound, lower_bound

__all__ = ["LowerBound", "lower_bound"]
