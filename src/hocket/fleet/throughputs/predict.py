"""Predict throughputs of a model that never ran, by the cost model and the simulator.

One device: the step is simulated on it. A gang trains data parallel: every member has a batch of
its own, and gradients are all-reduced around a ring during the backward pass. Steps of all members
count, as in Gavel's table, so a gang of n that scales perfectly has n times the throughput of one
device. Not modelled: data loading, memory of buckets, other jobs on the same links. O(types x (ops
+ reads)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import InputFileError, UsageError, unknown_name
from hocket.base.units import format_bytes
from hocket.cost.calibrate import Calibration
from hocket.cost.collectives import RingPath, ring_all_reduce_s
from hocket.cost.parallel.efficiency import CONSTANTS
from hocket.cost.roofline import estimate_costs
from hocket.fleet.throughputs.servers import SPREAD, Servers
from hocket.fleet.throughputs.table import JobProfile, Throughputs
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.gradient_buckets import BUCKET_BYTES
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate

# Time that all-reduces of gradients add to a step of data-parallel training. Gradients are reduced
# around a ring in buckets, each as soon as the backward pass has produced all of it and the bucket
# before is done (Li et al., PyTorch Distributed, VLDB 2020). So gradients that are produced early
# are hidden by the rest of the backward pass, and those produced last, such as that of a large
# embedding, never are. O(gradients) per gang and path.


@dataclass(frozen=True, eq=False, kw_only=True)
class Gradients:
    """Gradients that all members reduce in each step, in the order of the backward pass."""

    ready_s: FloatArray
    """Time from the gradient to the end of the backward pass, negated: ascending, at most 0."""
    size_bytes: FloatArray

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return int(self.size_bytes.sum())

    def scaled(self, factor: float) -> Gradients:
        """The same with all times multiplied by ``factor``."""
        return Gradients(ready_s=self.ready_s * factor, size_bytes=self.size_bytes)


def gradients_of(graph: Graph, op_start_s: FloatArray, op_end_s: FloatArray) -> Gradients:
    """The gradients of a step, given the times of its ops; empty in inference."""
    backward = np.flatnonzero(graph.op_phase == Phase.BACKWARD)
    made = np.flatnonzero((graph.tensor_role == Role.GRADIENT) & (graph.held_bytes > 0))
    made = made[graph.tensor_producer[made] >= 0]
    ready_s: FloatArray = np.zeros(0)
    size_bytes: FloatArray = np.zeros(0)
    if not len(backward):
        return Gradients(ready_s=ready_s, size_bytes=size_bytes)
    if len(made):
        ready_s = op_end_s[graph.tensor_producer[made]]
        size_bytes = graph.tensor_bytes[made].astype(np.float64)
    else:
        # Some graph formats have no gradients: they are assumed to be as large as the parameters,
        # and to be produced evenly over the backward pass.
        total_bytes = graph.bytes_by_role().get(Role.PARAMETER.name.lower(), 0)
        op_s = (op_end_s - op_start_s)[backward]
        share = op_s / max(float(op_s.sum()), 1e-300)
        ready_s, size_bytes = op_end_s[backward], total_bytes * share
    end_s = max(float(op_end_s[backward].max(initial=0.0)), float(ready_s.max(initial=0.0)))
    order = np.argsort(ready_s, kind="stable")
    return in_buckets(Gradients(ready_s=ready_s[order] - end_s, size_bytes=size_bytes[order]))


def in_buckets(gradients: Gradients) -> Gradients:
    """Merge gradients into buckets; a bucket is ready when its last gradient is."""
    ready_s: list[float] = []
    size_bytes: list[float] = []
    filled = np.inf
    for at_s, more in zip(gradients.ready_s.tolist(), gradients.size_bytes.tolist(), strict=True):
        # A full bucket is reduced; the next gradient opens another.
        if filled >= BUCKET_BYTES:
            ready_s.append(at_s)
            size_bytes.append(0.0)
        ready_s[-1] = at_s
        size_bytes[-1] += more
        filled = size_bytes[-1]
    return Gradients(ready_s=np.array(ready_s), size_bytes=np.array(size_bytes))


def exposed_s(buckets: Gradients, gang: int, path: RingPath) -> float:
    """Time that the gradient sums add to a step of a gang.

    A part of the sums is never hidden, by the rule of `hocket.cost.parallel`: they take memory
    bandwidth and SMs from the concurrent kernels.
    """
    sums_s = ring_all_reduce_s(buckets.size_bytes, gang, path.latency_s, path.bandwidth_bps)
    done_s = -np.inf
    for ready_s, sum_s in zip(buckets.ready_s.tolist(), sums_s.tolist(), strict=True):
        done_s = max(done_s, ready_s) + sum_s
    return float(max(CONSTANTS.never_hidden * sums_s.sum(), done_s, 0.0))


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """Predicted training step on one device of a given type."""

    servers: Servers
    step_s: float
    """Infinite where the device cannot run some op."""
    gradients: Gradients
    peak_bytes: int
    is_measured: bool = False
    """True if its speed was measured: a device that did the step has the memory for it."""

    @property
    def obstacle(self) -> str:
        """Reason why the model cannot run there; empty if it can."""
        has_bytes = self.servers.server.devices[0].usable_bytes
        if not np.isfinite(self.step_s):
            return f"an op cannot run on {self.servers.hardware}"
        if self.peak_bytes > has_bytes and not self.is_measured:
            needs, has = format_bytes(self.peak_bytes), format_bytes(has_bytes)
            return f"needs {needs}, {self.servers.hardware} has {has}"
        return ""


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedThroughputs:
    """Throughputs of one model, and the steps that they follow from."""

    throughputs: Throughputs
    steps: tuple[DeviceStep, ...]
    """One of each device type."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes that data-parallel members sum in each step: none in inference."""
        return max(step.gradients.total_bytes for step in self.steps)


def predict(
    graph: Graph,
    device_types: Sequence[Servers],
    gangs: Sequence[int] = (1,),
    *,
    job_type: str | None = None,
    calibration: Calibration | None = None,
    measured: Mapping[str, float] | None = None,
) -> PredictedThroughputs:
    """Predict steps per second of a model on device types; 0 where it does not fit.

    ``measured`` speeds of one device of a type are kept, and its gangs follow from them.
    """
    for name, speed in (measured or {}).items():
        names = [servers.name for servers in device_types]
        if name not in names:
            raise unknown_name("device type", name, names)
        if not 0.0 < speed < np.inf:
            raise UsageError(f"{speed!r} is no number of steps per second")
    steps = tuple(
        _as_measured(device_step(graph, servers, calibration), (measured or {}).get(servers.name))
        for servers in device_types
    )
    gangs = tuple(sorted(set(gangs)))
    columns = [gang_steps_per_s(step, gangs, spread=False) for step in steps]
    names = [step.servers.name for step in steps]
    if gangs[-1] > 1:
        columns += [gang_steps_per_s(step, gangs, spread=True) for step in steps]
        names += [name + SPREAD for name in names]
    table = Throughputs(
        device_types=tuple(names),
        profiles=tuple(JobProfile(job_type or graph.name, gang) for gang in gangs),
        alone=np.stack(columns, axis=1),
        beside=np.zeros((len(gangs), len(gangs), len(names))),
    )
    return PredictedThroughputs(throughputs=table, steps=steps)


def device_step(graph: Graph, servers: Servers, calibration: Calibration | None) -> DeviceStep:
    """Simulate the step of a graph on one device; raises `InputFileError` for a graph without
    work."""
    one = servers.server.only(servers.server.device_names[:1])
    is_calibrated = calibration is not None and servers.kind.name in calibration.kinds
    costs = estimate_costs(graph, one, calibration=calibration if is_calibrated else None)
    if not np.isfinite(costs.op_s).all():
        nothing = Gradients(ready_s=np.zeros(0), size_bytes=np.zeros(0))
        return DeviceStep(servers=servers, step_s=np.inf, gradients=nothing, peak_bytes=0)
    placement = np.zeros(graph.num_ops, dtype=np.int32)
    timeline = simulate(Problem(work=graph, cluster=one, op_costs=costs), Plan().placing(placement))
    if timeline.makespan_s <= 0.0:
        raise InputFileError(
            f"{graph.name!r} states no work on {servers.hardware!r}",
            hint="use a graph with FLOPs and bytes, or with times for this device type",
        )
    return DeviceStep(
        servers=servers,
        step_s=timeline.makespan_s,
        gradients=gradients_of(graph, timeline.op_start_s, timeline.op_end_s),
        peak_bytes=int(timeline.peak_bytes[0]),
    )


def _as_measured(step: DeviceStep, steps_per_s: float | None) -> DeviceStep:
    """Scale a step to a measured speed."""
    if steps_per_s is None:
        return step
    if not np.isfinite(step.step_s):
        raise UsageError(f"{step.obstacle}, yet its speed was measured")
    factor = 1.0 / (steps_per_s * step.step_s)
    gradients = step.gradients.scaled(factor)
    return replace(step, step_s=1.0 / steps_per_s, gradients=gradients, is_measured=True)


def gang_steps_per_s(step: DeviceStep, gangs: Sequence[int], *, spread: bool) -> FloatArray:
    """Steps per second of all members together; 0 where the model does not fit."""
    if step.obstacle:
        return np.zeros(len(gangs))
    servers = step.servers
    paths = [servers.between if spread else servers.consolidated(gang) for gang in gangs]
    more_s = [exposed_s(step.gradients, *pair) for pair in zip(gangs, paths, strict=True)]
    return np.asarray(np.array(gangs) / (step.step_s + np.array(more_s)))
