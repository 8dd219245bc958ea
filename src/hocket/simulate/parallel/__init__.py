"""Expansion of a parallel plan into one graph: replicas, microbatches, collectives as ops."""

from hocket.simulate.parallel.batch_costs import priced_at
from hocket.simulate.parallel.expand import ExpandedStep, expand

__all__ = ["ExpandedStep", "expand", "priced_at"]
