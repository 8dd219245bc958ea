"""Throughputs of a model that nobody ran yet, from the costs and the simulator.

One device: the step is simulated alone on it. A gang trains data parallel: every member does the
step on a batch of its own, then gradients are summed around a ring; what the backward pass hides of
that costs nothing, by the rule of `hocket.cost.parallel`. Steps of all members count, as in Gavel's
table, so a gang of n that scales perfectly has n times the throughput of one device. Not modelled:
input pipelines, buckets of gradients, other jobs on the same links. O(kinds x (ops + reads)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.arrays import FloatArray
from hocket.cost.calibrate import Calibration
from hocket.cost.collectives import RingPath, ring_all_reduce_s
from hocket.cost.parallel.step import exposed_s
from hocket.cost.roofline import estimate_costs
from hocket.errors import InputFileError
from hocket.fleet.throughputs.servers import SPREAD, Servers
from hocket.fleet.throughputs.table import Profile, Throughputs
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate
from hocket.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """One step on one device of a kind."""

    servers: Servers
    step_s: float
    """Infinite where the device cannot run some op."""
    backward_s: float
    peak_bytes: int

    @property
    def obstacle(self) -> str:
        """Why the model cannot run there; empty where it can."""
        has_bytes = self.servers.server.devices[0].memory_bytes
        if not np.isfinite(self.step_s):
            return f"an op cannot run on {self.servers.hardware}"
        if self.peak_bytes > has_bytes:
            needs, has = format_bytes(self.peak_bytes), format_bytes(has_bytes)
            return f"needs {needs}, {self.servers.hardware} has {has}"
        return ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """Throughputs of one model, with what they were made from."""

    throughputs: Throughputs
    steps: tuple[DeviceStep, ...]
    gradient_bytes: int


def predict_throughputs(
    graph: Graph,
    kinds: Sequence[Servers],
    gangs: Sequence[int] = (1,),
    *,
    job_type: str | None = None,
    calibration: Calibration | None = None,
) -> Throughputs:
    """Steps per second of a model on kinds of devices; 0 where it does not fit."""
    return predict(graph, kinds, gangs, job_type=job_type, calibration=calibration).throughputs


def predict(
    graph: Graph,
    kinds: Sequence[Servers],
    gangs: Sequence[int] = (1,),
    *,
    job_type: str | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """As `predict_throughputs`, with the steps and obstacles behind each number."""
    steps = tuple(device_step(graph, servers, calibration) for servers in kinds)
    size_bytes = gradient_bytes(graph)
    gangs = tuple(sorted(set(gangs)))
    columns = [_column(step, gangs, size_bytes, spread=False) for step in steps]
    names = [step.servers.name for step in steps]
    if gangs[-1] > 1:
        columns += [_column(step, gangs, size_bytes, spread=True) for step in steps]
        names += [name + SPREAD for name in names]
    table = Throughputs(
        kinds=tuple(names),
        profiles=tuple(Profile(job_type or graph.name, gang) for gang in gangs),
        alone=np.stack(columns, axis=1),
        beside=np.zeros((len(gangs), len(gangs), len(names))),
    )
    return Prediction(throughputs=table, steps=steps, gradient_bytes=size_bytes)


def device_step(graph: Graph, servers: Servers, calibration: Calibration | None) -> DeviceStep:
    """The step of a graph on one device; raises `InputFileError` for a graph without work."""
    one = servers.server.only(servers.server.device_names[:1])
    is_calibrated = calibration is not None and servers.kind.name in calibration.kinds
    costs = estimate_costs(graph, one, calibration=calibration if is_calibrated else None)
    if not np.isfinite(costs.op_s).all():
        return DeviceStep(servers=servers, step_s=np.inf, backward_s=0.0, peak_bytes=0)
    placement = np.zeros(graph.num_ops, dtype=np.int32)
    timeline = simulate(Problem(graph=graph, cluster=one, costs=costs), Plan(device_of=placement))
    if timeline.makespan_s <= 0.0:
        raise InputFileError(
            f"{graph.name!r} states no work on {servers.hardware!r}",
            hint="use a graph with FLOPs and bytes, or with times for this kind of device",
        )
    op_s = timeline.op_end_s - timeline.op_start_s
    return DeviceStep(
        servers=servers,
        step_s=timeline.makespan_s,
        backward_s=float(op_s[graph.op_phase == Phase.BACKWARD].sum()),
        peak_bytes=int(timeline.peak_bytes[0]),
    )


def gradient_bytes(graph: Graph) -> int:
    """Bytes that data-parallel members sum in each step: none in inference."""
    by_role = graph.bytes_by_role()
    if not (graph.op_phase == Phase.BACKWARD).any():
        return 0
    # Some formats keep no gradients: they are as large as what they are gradients of.
    return by_role.get(Role.GRADIENT.name.lower(), by_role.get(Role.PARAMETER.name.lower(), 0))


def _column(
    step: DeviceStep, gangs: tuple[int, ...], size_bytes: int, *, spread: bool
) -> FloatArray:
    if step.obstacle:
        return np.zeros(len(gangs))
    servers = step.servers
    paths = [servers.between if spread else servers.consolidated(gang) for gang in gangs]
    exchange_s = np.array(
        [_all_reduce_s(size_bytes, gang, path) for gang, path in zip(gangs, paths, strict=True)]
    )
    total_s = step.step_s + exposed_s(exchange_s, np.full(len(gangs), step.backward_s))
    return np.asarray(np.array(gangs) / total_s)


def _all_reduce_s(size_bytes: int, gang: int, path: RingPath) -> float:
    return float(ring_all_reduce_s(size_bytes, gang, path.latency_s, path.bandwidth_bps))
