"""Dividing layers over the stages of a pipeline.

`partition_layers` divides the layers of one model where the degrees are given (`layers`), with
memory, unequal devices and several ways to run a layer.
"""

from hocket.planners.parallel.partition.costs import LayerCosts
from hocket.planners.parallel.partition.layers import LayerPartition, partition_layers
from hocket.planners.parallel.partition.orders import has_few_orders
from hocket.planners.parallel.partition.pipelines import in_flight_counts

__all__ = [
    "LayerCosts",
    "LayerPartition",
    "has_few_orders",
    "in_flight_counts",
    "partition_layers",
]
