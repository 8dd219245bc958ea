"""Why two waves gain what they gain: what kernels leave free, the host, transfers, memory."""

from __future__ import annotations

import numpy as np

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.graph.graph import Stream
from hocket.plan.problem import Problem
from hocket.planners.placement.devices import workers
from hocket.planners.waves.search import WaveFit
from hocket.planners.waves.way import WaveWay
from hocket.simulate.parallel import priced_at
from hocket.simulate.parallel.lanes import in_lane, pass_order

FULL = 0.8
"""What asks for this share of a wave's time leaves too little to the other one."""
_HALF = 0.5
_MUCH = 0.1
"""A share of the step that is worth a sentence."""


def asked(problem: Problem, num_samples: int) -> tuple[float, float]:
    """Shares of its time in which a wave of so many samples keeps device and host busy, alone.

    A kernel that fills more than half of a device leaves no place to its like. Of two rows that
    were measured each has half of the device.
    """
    wave = in_lane(priced_at(problem, num_samples), 0)
    demand, ops = wave.costs.demand, pass_order(wave.graph)
    assert demand is not None, "lanes have it"
    row = int(wave.costs.device_row[workers(problem)[0]])
    seconds = wave.costs.op_s[row, ops]
    total_s = float(seconds.sum()) or 1.0
    on_device, on_host, fill, beside = demand[:, row, ops]
    filled = np.where(fill > _HALF, 1.0, np.where(fill > 0, fill, np.minimum(beside * _HALF, 1.0)))
    on_device = on_device * filled
    device_s, host_s = ((share * seconds).sum() for share in (on_device, on_host))
    return float(device_s / total_s), float(host_s / total_s)


def exchange_share(way: WaveWay) -> float:
    """The part of the step in which the busiest device exchanges gradients and computes nothing."""
    timeline = way.timeline
    sends = timeline.stream[: timeline.num_works] == Stream.COMMUNICATION
    if not sends.any():
        return 0.0
    alone_s = timeline.makespan_s - timeline.busy_s.max()
    length_s = np.where(sends, timeline.op_end_s - timeline.op_start_s, 0.0)
    on_device = np.bincount(timeline.op_device, length_s, timeline.num_devices)
    return float(min(alone_s, on_device.max()) / timeline.makespan_s)


def what_changes(fit: WaveFit) -> str | None:
    """What is not as in accumulation where parameters change after every wave; a sentence."""
    way = fit.chosen or fit.leanest
    if way.lanes is None or way.lanes.changes == "step":
        return None
    num_waves = len(way.shares.replicas[0].microbatches)
    return (
        "parameters change after every wave, by the mean of its gradients and those of the wave "
        "before: a wave is computed with parameters that are one change old, each lane holds its "
        f"own, and a step has {num_waves} updates instead of one; results are not those of "
        "accumulation"
    )


def reasons(fit: WaveFit) -> list[str]:
    """What decides, in sentences without a period."""
    told = fit.chosen or fit.leanest
    device, host = asked(fit.problem, told.shares.replicas[0].microbatches[0])
    found = []
    if device >= FULL:
        already = "for" if fit.pays else "already:"
        found.append(
            f"kernels fill the device {already} {format_percent(device)} of a wave that runs alone"
        )
    elif host >= FULL:
        found.append(
            "one process issues the ops of both lanes, and issuing those of one takes "
            f"{format_percent(host)} of its time"
        )
    else:
        found.append(
            f"a wave that runs alone asks for {format_percent(device)} of the device and "
            f"{format_percent(host)} of the host"
        )
    if fit.plain is fit.best_alone and not fit.pays and not fit.is_equal:
        found.append("all samples at once fit, and larger kernels gain more than a second lane")
    sent = exchange_share(told)
    if sent > _MUCH:
        found.append(f"gradients travel for {format_percent(sent)} of the step with nothing beside")
    if fit.chosen is not None and fit.aligned.peak_bytes > fit.budget_bytes:
        found.append(
            "the second wave begins later than would be quickest, so that both fit into "
            f"{format_bytes(fit.budget_bytes)}"
        )
    lanes = None if fit.chosen is None else fit.chosen.lanes
    if lanes is not None and lanes.part_bytes:
        num_parts = len(lanes.part_bytes)
        found.append(f"lanes hand memory over in {num_parts} parts and wait once for each")
    elif lanes is not None and lanes.own_bytes:
        found.append("there is room for memory of each lane's own, so lanes wait for results alone")
    if told.waits_s > _MUCH * told.simulated_s:
        has_own = told.lanes is not None and told.lanes.own_bytes and not told.lanes.part_bytes
        found.append(
            f"lanes wait for each other {told.num_waits} times for "
            f"{'results' if has_own else 'memory that one takes over from the other'}, which takes "
            f"about {format_seconds(told.waits_s)} of a step"
        )
    if told_changes := what_changes(fit):
        found.append(told_changes)
    return found
