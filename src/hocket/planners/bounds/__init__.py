"""Proven lower bounds on the step time, computed without searching for a plan (`step_bound`)."""

from hocket.planners.bounds.step_bound import LowerBound, lower_bound

__all__ = ["LowerBound", "lower_bound"]
