"""ParDNN step 2, emulation: when every storage comes to a device and when it goes.

ParDNN imitates the framework's scheduler to learn the lifetimes of tensors; here the simulator is
that scheduler, since devices run the ops that are ready by the same rule when the plan is carried
out. O(simulation + reads log reads).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate_placement
from hocket.simulate.instructions import PlaceTable
from hocket.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class Emulation:
    """A simulated placement and the lifetimes of the places that hold bytes."""

    device_of: IntArray
    timeline: Timeline
    places: PlaceTable
    start_s: FloatArray
    """Per place: when its bytes are taken."""
    end_s: FloatArray
    """Per place: when its bytes are given back; infinite where they stay."""
    excess_bytes: FloatArray
    """Per device: how much its peak is above its memory; negative where there is room."""

    @property
    def overflow_bytes(self) -> float:
        """Bytes that devices need beyond what they have, summed over devices."""
        return float(np.maximum(self.excess_bytes, 0.0).sum())


def emulate(problem: Problem, device_of: IntArray, priority: FloatArray | None) -> Emulation:
    """Run a placement and follow its storages."""
    tables, timeline = simulate_placement(problem, device_of, priority)
    graph, num_devices = problem.graph, problem.cluster.num_devices
    places, transfers = tables.places, tables.transfers
    sent = timeline.transfer_tensor.astype(np.int64) * num_devices + timeline.transfer_dst
    by_place = np.argsort(sent, kind="stable")
    start_s, end_s = np.zeros(len(places.tensor)), np.zeros(len(places.tensor))
    made = np.flatnonzero(graph.tensor_producer >= 0)
    producer = graph.tensor_producer[made]
    start_s[made] = timeline.op_start_s[producer]
    start_s[transfers.place] = timeline.transfer_start_s[by_place]
    np.maximum.at(end_s, places.storage[made], timeline.op_end_s[producer])
    np.maximum.at(end_s, places.storage[places.read_place], timeline.op_end_s[places.reader])
    source = places.storage[places.tensor[transfers.place]]
    np.maximum.at(end_s, source, timeline.transfer_end_s[by_place])
    end_s[places.is_kept] = np.inf
    return Emulation(
        device_of=device_of,
        timeline=timeline,
        places=places,
        start_s=start_s,
        end_s=end_s,
        excess_bytes=(timeline.peak_bytes - problem.memory_bytes).astype(np.float64),
    )
