"""Dividing layers over the stages of a pipeline.

`partition_layers` divides the layers of one model where the degrees are given (`layers`), with
memory, unequal devices and several ways to run a layer. `piper_plan` also chooses the tensor and
data degree of every stage (`piper`).
"""

from hocket.planners.parallelism.partition.costs import LayerCosts
from hocket.planners.parallelism.partition.layers import LayerPartition, partition_layers
from hocket.planners.parallelism.partition.pipelines import in_flight_counts
from hocket.planners.parallelism.partition.piper import PiperPlan, PiperStage, piper_plan
from hocket.planners.parallelism.partition.piper_input import PiperInput, read_piper

__all__ = [
    "LayerCosts",
    "LayerPartition",
    "PiperInput",
    "PiperPlan",
    "PiperStage",
    "in_flight_counts",
    "partition_layers",
    "piper_plan",
    "read_piper",
]
