"""The simulator's semantics in plain Python: slow, without cleverness, equal to the last bit."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from hocket.graph import Graph, Role, Stream
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem

HELD = {
    Role.PARAMETER,
    Role.OPTIMIZER_STATE,
    Role.BUFFER,
    Role.INPUT,
    Role.GRADIENT,
    Role.OUTPUT,
}


@dataclass
class Storage:
    device: int
    size: int
    kept: bool = False
    uses: set[tuple] = field(default_factory=set)


@dataclass
class Transfer:
    tensor: int
    src: int
    dst: int
    ready: float = math.nan
    start: float = math.nan
    end: float = math.nan
    flowing: bool = False
    due: str = ""
    """What happens at ``due_s``: 'start', 'flow' or 'end'."""
    due_s: float = math.inf


@dataclass
class Route:
    """Transfers over the same channels, and the work each of them has had by ``since``."""

    path: tuple[int, ...]
    finish: dict[int, float] = field(default_factory=dict)
    clock: float = 0.0
    rate: float = 0.0
    since: float = 0.0

    def end_of(self, transfer: int) -> float:
        return self.since + (self.finish[transfer] - self.clock) / self.rate


def homes_of(graph: Graph, device_of: list[int]) -> list[int]:
    def family(tensor: int) -> int:
        while graph.alias_of[tensor] >= 0:
            tensor = int(graph.alias_of[tensor])
        return tensor

    homes = []
    for tensor in range(graph.num_tensors):
        producer = int(graph.tensor_producer[tensor])
        if producer >= 0:
            homes.append(device_of[producer])
            continue
        kin = [
            t
            for t in range(graph.num_tensors)
            if graph.tensor_producer[t] < 0 and family(t) == family(tensor)
        ]
        readers = [op for op in range(graph.num_ops) if set(kin) & set(graph.reads_of(op).tolist())]
        homes.append(device_of[readers[0]] if readers else 0)
    return homes


class Oracle:
    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.graph, self.mode = problem, problem.graph, problem.transfers
        graph = self.graph
        self.device_of = [int(d) for d in plan.device_of]
        self.num_devices = problem.cluster.num_devices
        self.order = (
            None if plan.by_device is None else [list(map(int, ops)) for ops in plan.by_device]
        )
        self.priority = (
            list(range(graph.num_ops)) if plan.priority is None else plan.priority.tolist()
        )
        self.home = homes_of(graph, self.device_of)
        self.reads = [graph.reads_of(op).tolist() for op in range(graph.num_ops)]
        self.now = 0.0
        self.op_start = [math.nan] * graph.num_ops
        self.op_end = [math.nan] * graph.num_ops
        self.op_due = [math.inf] * graph.num_ops
        self.present: set[tuple[int, int]] = set()
        self.held = [0] * self.num_devices
        self.find_transfers()
        self.find_storages()
        self.peak = list(self.held)
        self.curve = [[(0.0, held)] for held in self.held]
        self.queue_free = [0.0] * (2 * self.num_devices)
        self.routes: dict[tuple[int, ...], Route] = {}

    def find_transfers(self) -> None:
        graph, pairs = self.graph, set()
        for tensor in range(graph.num_tensors):
            made = graph.tensor_producer[tensor] >= 0
            if not made:
                self.present.add((tensor, self.home[tensor]))
            for op in range(graph.num_ops):
                device = self.device_of[op]
                if tensor not in self.reads[op] or device == self.home[tensor]:
                    continue
                if not made and graph.tensor_role[tensor] == Role.INPUT:
                    self.present.add((tensor, device))
                else:
                    pairs.add((tensor, device))
        self.transfers = [Transfer(t, self.home[t], d) for t, d in sorted(pairs)]

    def find_storages(self) -> None:
        graph = self.graph
        self.storage: dict[tuple[int, int], Storage] = {}
        copies = {(t.tensor, t.dst) for t in self.transfers}
        for tensor, device in sorted(copies):
            kept = graph.tensor_role[tensor] == Role.INPUT
            size = int(graph.tensor_bytes[tensor])
            self.storage[tensor, device] = Storage(device, size, kept)
        native = set(self.present)
        native |= {
            (t, self.home[t]) for t in range(graph.num_tensors) if graph.tensor_producer[t] >= 0
        }

        def storage_of(tensor: int, device: int) -> Storage:
            if (tensor, device) in self.storage:
                return self.storage[tensor, device]
            base = int(graph.alias_of[tensor])
            made = graph.tensor_producer[tensor] >= 0
            if base >= 0 and ((base, device) in native or (made and (base, device) in copies)):
                found = storage_of(base, device)
            else:
                found = Storage(device, int(graph.tensor_bytes[tensor]))
                if made:
                    found.uses.add(("made", int(graph.tensor_producer[tensor])))
                else:
                    self.held[device] += found.size
            self.storage[tensor, device] = found
            found.kept |= Role(int(graph.tensor_role[tensor])) in HELD
            return found

        self.own: dict[int, list[Storage]] = {op: [] for op in range(graph.num_ops)}
        for tensor, device in sorted(native):
            storage = storage_of(tensor, device)
            producer = int(graph.tensor_producer[tensor])
            if ("made", producer) in storage.uses and graph.alias_of[tensor] < 0:
                self.own[producer].append(storage)
        for op in range(graph.num_ops):
            for tensor in self.reads[op]:
                self.storage[tensor, self.device_of[op]].uses.add(("read", op, tensor))
        for transfer in self.transfers:
            used = self.storage[transfer.tensor, transfer.src]
            used.uses.add(("sent", transfer.tensor, transfer.dst))

    def hold(self, device: int, size: int) -> None:
        self.held[device] += size
        self.peak[device] = max(self.peak[device], self.held[device])
        if self.curve[device][-1][0] == self.now:
            self.curve[device].pop()
        self.curve[device].append((self.now, self.held[device]))

    def use_up(self, tensor: int, device: int, use: tuple) -> None:
        storage = self.storage[tensor, device]
        if use not in storage.uses:
            return
        storage.uses.remove(use)
        if not storage.uses and not storage.kept:
            self.hold(storage.device, -storage.size)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────

    def end_op(self, op: int) -> None:
        device = self.device_of[op]
        self.op_end[op], self.op_due[op] = self.now, math.inf
        self.hold(device, -int(self.graph.workspace_bytes[op]))
        for tensor in self.reads[op]:
            self.use_up(tensor, device, ("read", op, tensor))
        for tensor in self.graph.made_by(op):
            self.present.add((tensor, device))
            self.use_up(tensor, device, ("made", op))

    def end_transfer(self, transfer: Transfer) -> None:
        transfer.end, transfer.due, transfer.due_s = self.now, "", math.inf
        self.present.add((transfer.tensor, transfer.dst))
        self.use_up(transfer.tensor, transfer.src, ("sent", transfer.tensor, transfer.dst))

    def end_all(self) -> None:
        for op in range(self.graph.num_ops):
            if self.op_due[op] == self.now:
                self.end_op(op)
        for transfer in self.transfers:
            if transfer.due == "end" and transfer.due_s == self.now:
                self.end_transfer(transfer)
        for route in self.routes.values():
            for index in list(route.finish):
                if route.end_of(index) <= self.now:
                    del route.finish[index]
                    self.end_transfer(self.transfers[index])

    # ── starts ───────────────────────────────────────────────────────────────────────────────

    def cost_of(self, transfer: Transfer) -> tuple[float, float, tuple[int, ...], float]:
        """Latency, work, path and smallest capacity."""
        costs = self.problem.costs
        path = tuple(costs.routes.path(transfer.src, transfer.dst).tolist())
        latency = float(costs.routes.latency_s[transfer.src, transfer.dst])
        if costs.tensor_s is not None:
            return latency, float(costs.tensor_s[transfer.tensor]) * len(path), path, 1.0
        work = float(costs.tensor_bytes[transfer.tensor])
        return latency, work, path, min(costs.routes.channel_bandwidth_bps[c] for c in path)

    def offer(self, transfer: Transfer) -> None:
        routes = self.problem.costs.routes
        transfer.ready = transfer.start = self.now
        if self.mode == "queued":
            send, receive = routes.send_queue[transfer.src], routes.receive_queue[transfer.dst]
            latency, work, _, capacity = self.cost_of(transfer)
            transfer.start = max(self.now, self.queue_free[send], self.queue_free[receive])
            end = transfer.start + (latency + work / capacity)
            self.queue_free[send] = self.queue_free[receive] = end
        transfer.due, transfer.due_s = "start", transfer.start

    def start_transfers(self) -> None:
        for transfer in self.transfers:
            producer = int(self.graph.tensor_producer[transfer.tensor])
            if math.isnan(transfer.ready) and (producer < 0 or self.op_end[producer] == self.now):
                self.offer(transfer)
        for index, transfer in enumerate(self.transfers):
            if transfer.due_s != self.now or transfer.due not in ("start", "flow"):
                continue
            latency, work, path, capacity = self.cost_of(transfer)
            if transfer.due == "start":
                self.hold(transfer.dst, int(self.graph.tensor_bytes[transfer.tensor]))
                if self.mode != "shared":
                    transfer.due, transfer.due_s = "end", self.now + (latency + work / capacity)
                    continue
                transfer.due, transfer.due_s = "flow", self.now + latency
                if work == 0:
                    transfer.due = "end"
                    continue
            if transfer.due_s == self.now:
                self.begin_flow(index, path, work)

    def begin_flow(self, index: int, path: tuple[int, ...], work: float) -> None:
        self.transfers[index].due, self.transfers[index].due_s = "", math.inf
        route = self.routes.setdefault(path, Route(path))
        if not route.finish:
            route.clock, route.rate, route.since = 0.0, 0.0, self.now
        clock = route.clock + route.rate * (self.now - route.since)
        route.finish[index] = clock + work

    def set_rates(self) -> None:
        capacity = self.problem.costs.channel_capacity()
        flowing = [c for route in self.routes.values() for _ in route.finish for c in route.path]
        for route in self.routes.values():
            if not route.finish:
                continue
            rate = min(float(capacity[c]) / flowing.count(c) for c in route.path)
            if rate != route.rate:
                route.clock += route.rate * (self.now - route.since)
                route.since, route.rate = self.now, rate

    def start_ops(self) -> None:
        for device, stream in itertools.product(range(self.num_devices), Stream):
            own = [
                op
                for op in range(self.graph.num_ops)
                if self.device_of[op] == device and self.graph.op_stream[op] == stream
            ]
            if any(self.op_due[op] < math.inf for op in own):
                continue
            waiting = [op for op in own if math.isnan(self.op_start[op])]
            if self.order is not None:
                waiting = [op for op in self.order[device] if op in waiting][:1]
            ready = [
                op for op in waiting if all((t, device) in self.present for t in self.reads[op])
            ]
            if ready:
                self.start_op(min(ready, key=lambda op: (self.priority[op], op)))

    def start_op(self, op: int) -> None:
        device, costs = self.device_of[op], self.problem.costs
        self.op_start[op] = self.now
        self.op_due[op] = self.now + float(costs.op_s[costs.device_row[device], op])
        self.hold(device, int(self.graph.workspace_bytes[op]))
        for storage in self.own[op]:
            self.hold(device, storage.size)

    def run(self) -> Oracle:
        while True:
            self.start_transfers()
            self.start_ops()
            self.set_rates()
            due = [*self.op_due, *(t.due_s for t in self.transfers)]
            due += [max(self.now, r.end_of(i)) for r in self.routes.values() for i in r.finish]
            self.now = min(due, default=math.inf)
            if self.now == math.inf:
                return self
            self.end_all()

    # ── results ──────────────────────────────────────────────────────────────────────────────

    def arrays(self) -> dict[str, np.ndarray]:
        """The same names and values as the arrays of a Timeline."""
        in_order = sorted(self.transfers, key=lambda t: (t.start, t.tensor, t.dst))
        curves = [
            [entry for i, entry in enumerate(curve) if i == 0 or entry[1] != curve[i - 1][1]]
            for curve in self.curve
        ]
        return {
            "op_device": np.array(self.device_of),
            "op_start_s": np.array(self.op_start),
            "op_end_s": np.array(self.op_end),
            "transfer_tensor": np.array([t.tensor for t in in_order]),
            "transfer_src": np.array([t.src for t in in_order]),
            "transfer_dst": np.array([t.dst for t in in_order]),
            "transfer_ready_s": np.array([t.ready for t in in_order]),
            "transfer_start_s": np.array([t.start for t in in_order]),
            "transfer_end_s": np.array([t.end for t in in_order]),
            "memory_ptr": np.cumsum([0, *(len(curve) for curve in curves)]),
            "memory_time_s": np.array([time for curve in curves for time, _ in curve]),
            "memory_bytes": np.array([held for curve in curves for _, held in curve]),
            "peak_bytes": np.array(self.peak),
        }
