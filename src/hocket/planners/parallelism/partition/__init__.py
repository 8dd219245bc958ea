"""Dividing layers over the stages of a pipeline.

`partition_layers` divides the layers of one model where the degrees are given (`layers`), with
memory, unequal devices and several ways to run a layer.
"""

from hocket.planners.parallelism.partition.costs import LayerCosts
from hocket.planners.parallelism.partition.layers import LayerPartition, partition_layers
from hocket.planners.parallelism.partition.orders import has_few_orders
from hocket.planners.parallelism.partition.pipelines import in_flight_counts

__all__ = [
    "LayerCosts",
    "LayerPartition",
    "has_few_orders",
    "in_flight_counts",
    "partition_layers",
]
