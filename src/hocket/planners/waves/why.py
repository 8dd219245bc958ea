"""Why two waves gain what they gain: what kernels leave free, the host, transfers, memory."""

from __future__ import annotations

import numpy as np

from hocket.base.units import format_bytes, format_percent
from hocket.graph.graph import Stream
from hocket.planners.waves.search import WaveFit, WaveWay

_MOSTLY = 0.9
"""What asks for this share of a wave's time leaves too little to the other one."""


def asked(way: WaveWay) -> tuple[float, float]:
    """Shares of a wave's time in which it keeps the device and the host busy, run alone."""
    problem = way.unfolded.problem
    demand, passes = problem.costs.demand, way.unfolded.passes[0][0]
    ops = passes[passes >= 0]
    assert demand is not None, "lanes have it"
    row = int(problem.costs.device_row[way.unfolded.device_of[ops[0]]])
    seconds = problem.costs.op_s[row, ops]
    total_s = float(seconds.sum()) or 1.0
    busy = [float((demand[which, row, ops] * seconds).sum()) / total_s for which in (0, 1)]
    return busy[0], busy[1]


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


def reasons(fit: WaveFit) -> list[str]:
    """What decides, in sentences without a period."""
    told = fit.chosen or fit.leanest
    device, host = asked(told)
    found = []
    if device >= _MOSTLY:
        found.append(
            f"kernels fill the device already: {format_percent(device)} of a wave that runs alone"
        )
    elif host >= _MOSTLY:
        found.append(
            "one process issues the ops of both lanes, and issuing those of one takes "
            f"{format_percent(host)} of its time"
        )
    else:
        found.append(
            f"a wave that runs alone asks for {format_percent(device)} of the device and "
            f"{format_percent(host)} of the host"
        )
    if fit.plain is fit.best_alone and not fit.pays:
        found.append("all samples at once fit, and larger kernels gain more than a second lane")
    sent = exchange_share(told)
    if sent > 1 - _MOSTLY:
        found.append(f"gradients travel for {format_percent(sent)} of the step with nothing beside")
    if fit.chosen is not None and fit.aligned.peak_bytes > fit.budget_bytes:
        found.append(
            "the second wave begins later than would be quickest, so that both fit into "
            f"{format_bytes(fit.budget_bytes)}"
        )
    return found
