"""Facts of a plan and its timeline, computed once for text, report and notebook.

Covers devices, modules, links, collectives, longest ops, the critical path with its causes, and
memory by role at the peak.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.base.units import format_percent
from hocket.graph.graph import Graph, Phase, Role, Stream
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.analysis import (
    TRANSFERS,
    PathStep,
    bottleneck,
    channel_busy_s,
    critical_path,
    crossings,
    path_seconds,
    price_per_hour,
)
from hocket.simulate.engine import lower
from hocket.simulate.timeline import Timeline
from hocket.view.module_places import ModulePlace, module_places
from hocket.view.names import inert

NUM_TOP_OPS = 12
_NUM_GROUPED_OPS = 2000
_MICROBATCH = re.compile(r"#(\d+)$")
_LETTERS = {int(Phase.FORWARD): "F", int(Phase.BACKWARD): "B"}
MAX_MODULES = 24
"""Number of rows in the table of modules; more only if there are more outermost modules."""
SHARING, OTHER = "sharing links", "between"
"""Additional causes of time on the critical path, beyond those of `path_seconds`."""


_ROLE_NAMES = {
    Role.PARAMETER: "parameters",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.GRADIENT: "gradients",
    Role.INPUT: "batch",
    Role.BUFFER: "buffers",
}
REST = "activations"
KINDS = (*_ROLE_NAMES.values(), REST)
"""Kinds of memory in the order of the tables."""


class HostCopies(NamedTuple):
    """Number and bytes of copies between device and host in one step."""

    num_copies: int
    to_host_bytes: int
    from_host_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.to_host_bytes + self.from_host_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Work and memory of one device."""

    name: str
    kind: str
    num_ops: int
    busy_s: float
    busy_share: float
    peak_bytes: int
    capacity_bytes: int
    """Bytes available to tensors."""
    headroom_bytes: int
    """Bytes of the device that are reserved for context, workspaces and fragmentation."""

    @property
    def fits(self) -> bool:
        """True if the peak fits into the device."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def fullness(self) -> float:
        """Peak as a fraction of the capacity."""
        return fullness(self.peak_bytes, self.capacity_bytes)


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """Consecutive modules on one device, or one module that is split over several devices."""

    name: str
    """Range such as ``transformer.h.0 … 5``, or the path of a single module."""
    on: str
    """Name of the device, or of several devices with their fractions of the module's time."""
    num_ops: int


@dataclass(frozen=True, kw_only=True)
class LinkFacts:
    """Load of one used channel: one direction of a link, or a bus."""

    name: str
    channel: int
    num_transfers: int
    moved_bytes: int
    busy_s: float
    busy_share: float
    bandwidth_bps: float


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts:
    """Collectives of one device: gathers, scatters and reductions on their own stream."""

    device: str
    num_exchanges: int
    sent_bytes: int
    """Bytes that this device sends; it receives the same number."""
    busy_s: float
    busy_share: float


@dataclass(frozen=True, kw_only=True)
class OpFacts:
    """One op, or the microbatches of one op on a device, with their duration."""

    op: int
    name: str
    kind: str
    module: str
    phase: str
    device: str
    start_s: float
    duration_s: float
    step_share: float
    count: int = 1
    """Number of ops of this name on the device: one per microbatch."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PathFacts:
    """The critical path: the chain of ops and transfers whose length is the step time."""

    steps: tuple[PathStep, ...]
    ops: IntArray
    """Indices of the ops on the path."""
    transfers: IntArray
    """Indices of the transfers on the path."""
    shares: Mapping[str, float]
    """Fraction of the step per cause; the fractions sum to 1."""
    device_share: float
    """Fraction of the step in path ops that waited for their device although their inputs were
    ready.
    """

    def longest(self, max_steps: int) -> list[int]:
        """Positions of the longest steps of the path, in order of time."""
        # Start minus end is the negative length, so that an ascending sort puts the longest first.
        lengths = np.array([step.start_s - step.end_s for step in self.steps])
        return sorted(np.argsort(lengths, kind="stable")[:max_steps].tolist())


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts that the views show of one plan."""

    title: str
    planner: str
    step_s: float
    num_ops: int
    num_transfers: int
    """Number of transfers, without those of 0 bytes that only signal the start of a collective."""
    moved_bytes: int
    """Bytes moved by transfers and collectives."""
    copies: HostCopies
    """Copies between devices and host memory."""
    price_per_hour: float | None
    """Hourly price of the devices that compute; None if a price is unknown."""
    devices: tuple[DeviceFacts, ...]
    modules: tuple[ModuleFacts, ...]
    """Layers of each device, in the order in which they first run."""
    links: tuple[LinkFacts, ...]
    """Used channels, busiest first."""
    exchanges: tuple[ExchangeFacts, ...]
    """Collectives of each device that runs any."""
    top_ops: tuple[OpFacts, ...]
    path: PathFacts
    bottleneck: str
    """One sentence about the limit of the step; may be empty."""

    @property
    def fullest(self) -> DeviceFacts:
        """The device with the highest peak as a fraction of its capacity."""
        return max(self.devices, key=lambda device: device.fullness)

    @property
    def busiest(self) -> DeviceFacts:
        """The device that computes longest."""
        return max(self.devices, key=lambda device: device.busy_s)


def facts_of(problem: Problem, plan: Plan, timeline: Timeline) -> Facts:
    """Compute the facts of a plan and its timeline."""
    graph, cluster = problem.graph, problem.cluster
    is_data = _is_data(problem, timeline)
    exchanges = _exchanges(problem, timeline)
    path = _path(problem, timeline)
    return Facts(
        title=f"{inert(graph.name)} on {inert(cluster.name)}",
        # Batch strategies are described by their note "how", which is shown in place of the
        # planner.
        planner="" if plan.notes.get("how") else inert(plan.planner),
        step_s=timeline.makespan_s,
        num_ops=graph.num_ops,
        num_transfers=int(is_data.sum()),
        moved_bytes=int(transferred_bytes(problem, timeline).sum())
        + sum(each.sent_bytes for each in exchanges),
        copies=host_copies(graph),
        price_per_hour=price_per_hour(problem, timeline),
        devices=_devices(problem, timeline),
        modules=module_facts(problem, timeline.op_device),
        links=_links(problem, timeline, is_data),
        exchanges=exchanges,
        top_ops=_top_ops(problem, timeline),
        path=path,
        bottleneck=inert(bottleneck(timeline, problem, path.steps)),
    )


def fullness(peak_bytes: int, capacity_bytes: int) -> float:
    """Peak as a fraction of the capacity; infinite for a positive peak without capacity."""
    if capacity_bytes > 0:
        return peak_bytes / capacity_bytes
    return float("inf") if peak_bytes > 0 else 0.0


def fullest_device(problem: Problem, timeline: Timeline) -> int:
    """Index of the device with the highest peak as a fraction of its capacity."""
    capacity = problem.memory_bytes.tolist()
    peaks = timeline.peak_bytes.tolist()
    # Ties go to the first device, so that the result does not depend on the order of max.
    return max(range(len(peaks)), key=lambda d: (fullness(peaks[d], capacity[d]), -d))


def transferred_bytes(problem: Problem, timeline: Timeline) -> LongArray:
    """Bytes of each transfer."""
    return problem.costs.tensor_bytes[timeline.transfer_tensor]


def _devices(problem: Problem, timeline: Timeline) -> tuple[DeviceFacts, ...]:
    busy_s = timeline.busy_s
    usable = problem.memory_bytes.tolist()
    num_ops = np.bincount(timeline.op_device, minlength=timeline.num_devices)
    return tuple(
        DeviceFacts(
            name=inert(device.name),
            kind=inert(device.kind.name),
            num_ops=int(num_ops[index]),
            busy_s=float(busy_s[index]),
            busy_share=_share(busy_s[index], timeline.makespan_s),
            peak_bytes=int(timeline.peak_bytes[index]),
            capacity_bytes=usable[index],
            headroom_bytes=device.memory_bytes - usable[index],
        )
        for index, device in enumerate(problem.cluster.devices)
    )


def module_facts(problem: Problem, device_of: IntArray) -> tuple[ModuleFacts, ...]:
    """Modules and their devices; empty if the graph has no module names."""
    if not len(problem.graph.modules):
        return ()
    names = [inert(name) for name in problem.cluster.device_names]
    return tuple(
        ModuleFacts(
            name=_module_name(place), on=_module_device(place, names), num_ops=place.num_ops
        )
        for place in module_places(problem, device_of, MAX_MODULES)
    )


def _module_name(place: ModulePlace) -> str:
    if place.last == place.path:
        name = inert(place.path) or "(no module)"
        return f"{name} itself" if place.is_own and place.path else name
    return f"{inert(place.path)} … {place.last.rpartition('.')[2]}"


def _module_device(place: ModulePlace, names: list[str]) -> str:
    if place.is_whole:
        return names[place.device]
    used = [d for d in np.argsort(-place.share, kind="stable").tolist() if place.share[d] > 0]
    return ", ".join(f"{names[d]} {format_percent(float(place.share[d]))}" for d in used)


def _is_data(problem: Problem, timeline: Timeline) -> BoolArray:
    """Mask of the transfers that carry data, in contrast to control signals."""
    found: BoolArray = problem.graph.tensor_role[timeline.transfer_tensor] != Role.CONTROL
    return found


def _exchanges(problem: Problem, timeline: Timeline) -> tuple[ExchangeFacts, ...]:
    sent_bytes = problem.graph.bytes_touched
    found = (problem.graph.op_stream == Stream.COMMUNICATION) & (sent_bytes > 0)
    length_s = timeline.op_end_s - timeline.op_start_s
    rows = []
    for device in np.unique(timeline.op_device[found]).tolist():
        own = found & (timeline.op_device == device)
        busy_s = float(length_s[own].sum())
        rows.append(
            ExchangeFacts(
                device=inert(problem.cluster.device_names[device]),
                num_exchanges=int(own.sum()),
                sent_bytes=int(sent_bytes[own].sum()),
                busy_s=busy_s,
                busy_share=_share(busy_s, timeline.makespan_s),
            )
        )
    return tuple(rows)


def _links(problem: Problem, timeline: Timeline, is_data: BoolArray) -> tuple[LinkFacts, ...]:
    routes = problem.costs.routes
    busy_s = channel_busy_s(timeline, problem)
    transfer, channel = crossings(timeline, problem)
    transfer, channel = transfer[is_data[transfer]], channel[is_data[transfer]]
    count = np.bincount(channel, minlength=len(routes.channel_names))
    moved = np.zeros(len(routes.channel_names), dtype=np.int64)
    np.add.at(moved, channel, transferred_bytes(problem, timeline)[transfer])
    order = np.lexsort((np.arange(len(count)), -moved, -busy_s))
    return tuple(
        LinkFacts(
            name=inert(routes.channel_names[index]),
            channel=index,
            num_transfers=int(count[index]),
            moved_bytes=int(moved[index]),
            busy_s=float(busy_s[index]),
            busy_share=_share(busy_s[index], timeline.makespan_s),
            bandwidth_bps=float(routes.channel_bandwidth_bps[index]),
        )
        for index in order.tolist()
        if count[index]
    )


def _top_ops(problem: Problem, timeline: Timeline) -> tuple[OpFacts, ...]:
    """Ops with the longest total duration; microbatches of an op on one device are summed."""
    duration_s = timeline.op_end_s - timeline.op_start_s
    # Grouping all ops of a large graph is slow; ops beyond the longest 2,000 cannot reach the top
    # dozen.
    longest = np.argsort(-duration_s, kind="stable")[:_NUM_GROUPED_OPS]
    groups: dict[tuple[str, int], list[int]] = {}
    for op in longest.tolist():
        if duration_s[op] > 0:
            name = _MICROBATCH.sub("", problem.graph.op_names[op])
            groups.setdefault((name, int(timeline.op_device[op])), []).append(op)
    total_s = {key: float(duration_s[ops].sum()) for key, ops in groups.items()}
    return tuple(
        replace(
            op_facts(problem, timeline, groups[key][0]),
            name=inert(key[0]),
            duration_s=total_s[key],
            step_share=_share(total_s[key], timeline.makespan_s),
            count=len(groups[key]),
        )
        for key in sorted(groups, key=lambda key: -total_s[key])[:NUM_TOP_OPS]
    )


class Pass(NamedTuple):
    """Consecutive ops of one microbatch and direction on one device."""

    start_s: float
    end_s: float
    label: str
    """Direction and microbatch, such as ``F0`` or ``B0``."""


def passes_of(problem: Problem, timeline: Timeline) -> tuple[tuple[Pass, ...], ...]:
    """Forward and backward passes of microbatches per device; empty if the batch is not split."""
    found: list[list[Pass]] = [[] for _ in range(timeline.num_devices)]
    graph = problem.graph
    if not graph.meta.get("unfolded"):
        return tuple(tuple(each) for each in found)
    computes = np.flatnonzero(graph.op_stream == Stream.COMPUTE)
    order = computes[np.argsort(timeline.op_start_s[computes], kind="stable")]
    for op in order.tolist():
        match = _MICROBATCH.search(graph.op_names[op])
        letter = _LETTERS.get(int(graph.op_phase[op]))
        if match is None or letter is None:
            continue
        row, label = found[int(timeline.op_device[op])], f"{letter}{match[1]}"
        start_s, end_s = float(timeline.op_start_s[op]), float(timeline.op_end_s[op])
        if row and row[-1].label == label:
            row[-1] = row[-1]._replace(end_s=end_s)
        else:
            row.append(Pass(start_s, end_s, label))
    return tuple(tuple(each) for each in found)


def op_facts(problem: Problem, timeline: Timeline, op: int) -> OpFacts:
    """Facts of one op."""
    graph = problem.graph
    duration_s = float(timeline.op_end_s[op] - timeline.op_start_s[op])
    return OpFacts(
        op=op,
        name=inert(graph.op_names[op]),
        kind=inert(graph.kind_of(op)),
        module=inert(graph.module_of(op)),
        phase=Phase(int(graph.op_phase[op])).name.lower(),
        device=inert(problem.cluster.device_names[int(timeline.op_device[op])]),
        start_s=float(timeline.op_start_s[op]),
        duration_s=duration_s,
        step_share=_share(duration_s, timeline.makespan_s),
    )


def step_name(problem: Problem, timeline: Timeline, step: PathStep) -> str:
    """Name of a step of the critical path: the op, or the tensor with its two devices."""
    if step.kind == "op":
        return inert(problem.graph.op_names[step.index])
    names = problem.cluster.device_names
    tensor = problem.graph.tensor_names[int(timeline.transfer_tensor[step.index])]
    src = names[int(timeline.transfer_src[step.index])]
    dst = names[int(timeline.transfer_dst[step.index])]
    return f"{inert(tensor)}, {inert(src)} → {inert(dst)}"


def _path(problem: Problem, timeline: Timeline) -> PathFacts:
    steps = critical_path(timeline, problem)
    ops = np.array([step.index for step in steps if step.kind == "op"], dtype=np.int32)
    transfers = np.array([step.index for step in steps if step.kind == "transfer"], dtype=np.int32)
    spent_s = path_seconds(timeline, steps)
    moving_s = spent_s[TRANSFERS]
    spent_s[TRANSFERS] = min(_alone_s(problem, timeline, transfers), moving_s)
    spent_s[SHARING] = moving_s - spent_s[TRANSFERS]
    spent_s[OTHER] = timeline.makespan_s - sum(spent_s.values())
    queued_s = sum(step.end_s - step.start_s for step in steps if step.reason == "device")
    shares = {cause: _share(time_s, timeline.makespan_s) for cause, time_s in spent_s.items()}
    return PathFacts(
        steps=steps,
        ops=ops,
        transfers=transfers,
        # A remainder below 1e-6 is rounding; a measured timeline has larger gaps between its ops.
        shares={cause: share for cause, share in shares.items() if share > 1e-6},
        device_share=_share(queued_s, timeline.makespan_s),
    )


def _alone_s(problem: Problem, timeline: Timeline, transfers: IntArray) -> float:
    """Seconds that transfers would take without contention."""
    columns = (timeline.transfer_tensor, timeline.transfer_src, timeline.transfer_dst)
    each = zip(*(column[transfers].tolist() for column in columns), strict=True)
    return sum(problem.costs.transfer_s(tensor, src, dst) for tensor, src, dst in each)


def _share(part: float, whole: float) -> float:
    return float(part) / whole if whole > 0 else 0.0


def host_copies(graph: Graph) -> HostCopies:
    """Count the copies of a step; other work on a copy stream is not counted."""
    kinds = np.array([kind.split(".")[0] == "copy" for kind in graph.kinds], dtype=bool)
    is_copy = kinds[graph.op_kind] if len(kinds) else np.zeros(graph.num_ops, dtype=bool)
    out = is_copy & (graph.op_stream == Stream.COPY_OUT)
    back = is_copy & (graph.op_stream == Stream.COPY_IN)
    size = graph.bytes_touched
    return HostCopies(int((out | back).sum()), int(size[out].sum()), int(size[back].sum()))


def memory_by_role(problem: Problem, timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """Bytes per kind of memory and device at the device's peak; kinds without bytes are omitted.

    Counts tensors that exist before the step and gradients that are retained. The rest of the peak
    is activations and workspace.
    """
    num_devices = timeline.num_devices
    places = lower(problem, timeline.op_device).places
    role = problem.graph.tensor_role[places.tensor]
    producer = problem.graph.tensor_producer[places.tensor]
    made_s = np.where(producer >= 0, timeline.op_start_s[producer], 0.0)
    peak_s = np.array([_peak_time_s(timeline, device) for device in range(num_devices)])
    is_there = places.is_kept & ~places.is_copy & (made_s <= peak_s[places.device])
    rest = timeline.peak_bytes.copy()
    held: dict[str, tuple[int, ...]] = {}
    for kind, label in _ROLE_NAMES.items():
        chosen = is_there & (role == kind)
        sums = np.zeros(num_devices, dtype=np.int64)
        np.add.at(sums, places.device[chosen], places.num_bytes[chosen])
        # Sums must not exceed the peak: whatever does not fit any more is not there at that moment.
        sums = np.minimum(sums, rest)
        rest -= sums
        held[label] = tuple(sums.tolist())
    held[REST] = tuple(rest.tolist())
    return {label: sizes for label, sizes in held.items() if any(sizes)}


def _peak_time_s(timeline: Timeline, device: int) -> float:
    time_s, held = timeline.memory_curve(device)
    return float(time_s[np.argmax(held)]) if len(held) else 0.0
