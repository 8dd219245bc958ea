"""m-ETF and m-SCT in plain Python: every ready op on every device after every commit.

Slow and without cleverness; the compiled loop must agree to the last bit. Rules: the docstring of
`hocket.planners.placement.list_schedule`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from planners.list_schedule_facts import PERSISTENT, in_breadth_first_order, root_of, tied_ops

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes
from hocket.graph import Role
from hocket.plan.problem import Problem
from hocket.planners.placement.m_etf import list_schedule

HELD = {*PERSISTENT, Role.GRADIENT, Role.OUTPUT}


class StuckError(Exception):
    """Nothing runs and nothing fits: the first ready op, and the bytes that it lacks at least.

    Or no device can run an op and those tied to it: that op, and None.
    """


class Oracle:
    def __init__(
        self,
        problem: Problem,
        favourite: list[int] | None = None,
        spared_s: list[float] | None = None,
    ) -> None:
        self.problem, self.graph = problem, problem.graph
        graph = self.graph
        self.ops, self.devices = range(graph.num_ops), range(problem.cluster.num_devices)
        self.favourite = favourite or [-1] * graph.num_ops
        self.spared_s = spared_s or [0.0] * graph.num_ops
        self.rank = {op: index for index, op in enumerate(in_breadth_first_order(graph))}
        self.ties = tied_ops(graph)
        self.reads = [graph.reads_of(op).tolist() for op in self.ops]
        self.limit = problem.memory_bytes.tolist()
        self.device_of: dict[int, int] = {}
        self.start_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.ended: set[int] = set()
        self.bound: dict[int, int] = {}
        self.home: dict[int, int] = {}
        self.copies: dict[tuple[int, int], float] = {}
        self.storage: dict[int, tuple] = {}
        self.bytes_in: dict[tuple, tuple[int, int]] = {}
        self.living_in: dict[tuple, set[int]] = {}
        self.kept: set[tuple] = set()
        self.avail = [0.0 for _ in self.devices]
        self.last_op = [-1 for _ in self.devices]
        self.queue_free = [0.0] * (2 * len(self.devices))
        self.used = [0 for _ in self.devices]
        for tensor in range(graph.num_tensors):
            is_owner = self.maker(tensor) < 0 and graph.alias_of[tensor] < 0
            reads = {self.family(t) for op in self.ops for t in self.reads[op]}
            if is_owner and tensor not in reads:
                self.used[0] += self.size(tensor)
        self.peak = list(self.used)
        self.now = 0.0

    # ── facts ────────────────────────────────────────────────────────────────────────────────

    def maker(self, tensor: int) -> int:
        return int(self.graph.tensor_producer[tensor])

    def size(self, tensor: int) -> int:
        return int(self.graph.tensor_bytes[tensor])

    def family(self, tensor: int) -> int:
        """The storage's owner among tensors that exist before the step; -1 for made tensors."""
        return root_of(self.graph, tensor) if self.maker(tensor) < 0 else -1

    def is_batch(self, tensor: int) -> bool:
        return self.maker(tensor) < 0 and self.graph.tensor_role[tensor] == Role.INPUT

    def is_held(self, tensor: int) -> bool:
        return Role(int(self.graph.tensor_role[tensor])) in HELD

    def op_s(self, op: int, device: int) -> float:
        return float(self.problem.costs.op_s[self.problem.costs.device_row[device], op])

    def transfer_s(self, tensor: int, src: int, dst: int) -> float:
        costs, routes = self.problem.costs, self.problem.costs.routes
        if costs.tensor_s is not None:
            work, unit_s = float(costs.tensor_s[tensor]), float(routes.hops[src, dst])
        else:
            work, unit_s = float(self.size(tensor)), 1 / float(routes.bandwidth_bps[src, dst])
        return float(routes.latency_s[src, dst]) + work * unit_s

    def place_of(self, tensor: int) -> int:
        """The device where the tensor is at home; -1 while a parameter has none."""
        maker = self.maker(tensor)
        return self.device_of[maker] if maker >= 0 else self.home.get(self.family(tensor), -1)

    def is_missing(self, tensor: int, device: int) -> bool:
        return self.place_of(tensor) not in (-1, device) and (tensor, device) not in self.copies

    # ── time ─────────────────────────────────────────────────────────────────────────────────

    def edges_of(self, op: int) -> list[list[int]]:
        """What the op reads, by producer; each tensor that exists before the step alone."""
        edges: dict[tuple[int, int], list[int]] = {}
        for tensor in self.reads[op]:
            maker = self.maker(tensor)
            edges.setdefault((maker, -1 if maker >= 0 else tensor), []).append(tensor)
        return list(edges.values())

    def queue_start(self, ready_s: float, src: int, dst: int) -> float:
        if self.problem.transfers == "parallel":
            return ready_s
        routes = self.problem.costs.routes
        send, receive = int(routes.send_queue[src]), int(routes.receive_queue[dst])
        return max(ready_s, self.queue_free[send], self.queue_free[receive])

    def data_s(self, op: int, device: int) -> float:
        latest = 0.0
        for tensors in self.edges_of(op):
            maker = self.maker(tensors[0])
            ready_s = self.end_s[maker] if maker >= 0 else 0.0
            src = self.place_of(tensors[0])
            if src == device:
                latest = max(latest, ready_s)
            sent_s, any_sent = 0.0, False
            for tensor in tensors:
                if (tensor, device) in self.copies:
                    latest = max(latest, self.copies[tensor, device])
                if not self.is_missing(tensor, device) or self.is_batch(tensor):
                    continue
                transfer_s = self.transfer_s(tensor, src, device)
                if self.problem.transfers == "parallel":
                    latest = max(latest, ready_s + transfer_s)
                else:
                    sent_s, any_sent = sent_s + transfer_s, True
            if any_sent:
                latest = max(latest, self.queue_start(ready_s, src, device) + sent_s)
        return latest

    def earliest_s(self, op: int, device: int) -> float:
        return max(self.data_s(op, device), self.avail[device])

    # ── memory ───────────────────────────────────────────────────────────────────────────────

    def arriving(self, op: int) -> list[int]:
        """Families that find their home with the op: those its tied ops read, if it is first."""
        if op in self.bound:
            return []
        read = {self.family(t) for other in self.ties[op] for t in self.reads[other]}
        return sorted(f for f in read if f >= 0 and f not in self.home)

    def made(self, op: int, held: bool) -> int:
        tensors = self.graph.made_by(op)
        return sum(
            self.size(t)
            for t in tensors
            if self.graph.alias_of[t] < 0 and self.is_held(t) == held
        )  # fmt: skip

    def needs(self, op: int, device: int) -> tuple[int, int]:
        """Bytes that the op would take, and those of them that are there from the beginning."""
        need = int(self.graph.workspace_bytes[op]) + self.made(op, held=False)
        early = sum(self.size(family) for family in self.arriving(op))
        for tensor in self.reads[op]:
            if self.is_missing(tensor, device):
                need += self.size(tensor)
                early += self.size(tensor) if self.is_batch(tensor) else 0
                need -= self.size(tensor) if self.is_batch(tensor) else 0
        if op not in self.bound:
            need += sum(self.made(other, held=True) for other in self.ties[op])
        return need + early, early

    def lacking(self, op: int, device: int) -> int:
        need, early = self.needs(op, device)
        over = max(self.used[device] + need, self.peak[device] + early)
        return over - self.limit[device]

    def can_run(self, op: int, device: int) -> bool:
        if self.bound.get(op, device) != device:
            return False
        return all(math.isfinite(self.op_s(other, device)) for other in self.ties[op])

    def feasible(self, op: int) -> list[int]:
        return [d for d in self.devices if self.can_run(op, d) and self.lacking(op, d) <= 0]

    def release(self, tensor: int) -> None:
        """The tensor is not needed any more."""
        storages = [("copy", t, d) for t, d in self.copies if t == tensor]
        if tensor in self.storage:
            storages.append(self.storage[tensor])
        for storage in storages:
            self.living_in[storage].remove(tensor)
            if not self.living_in[storage] and storage not in self.kept:
                device, size = self.bytes_in[storage]
                self.used[device] -= size

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    def send(self, tensor: int, device: int) -> None:
        maker, src = self.maker(tensor), self.place_of(tensor)
        arrival_s = 0.0
        if not self.is_batch(tensor):
            ready_s = self.end_s[maker] if maker >= 0 else 0.0
            start_s = self.queue_start(ready_s, src, device)
            arrival_s = start_s + self.transfer_s(tensor, src, device)
            if self.problem.transfers != "parallel":
                routes = self.problem.costs.routes
                self.queue_free[int(routes.send_queue[src])] = arrival_s
                self.queue_free[int(routes.receive_queue[device])] = arrival_s
        self.copies[tensor, device] = arrival_s
        storage = ("copy", tensor, device)
        self.bytes_in[storage] = (device, self.size(tensor))
        self.living_in[storage] = {tensor}
        if self.is_batch(tensor):
            self.kept.add(storage)

    def commit(self, op: int, device: int) -> None:
        need, early = self.needs(op, device)
        self.used[device] += need
        self.peak[device] = max(self.peak[device] + early, self.used[device])
        for family in self.arriving(op):
            self.home[family] = device
        for other in self.ties[op]:
            self.bound[other] = device
        for tensor in self.reads[op]:
            if self.is_missing(tensor, device):
                self.send(tensor, device)
        start_s = max(self.earliest_s(op, device), self.now)
        self.device_of[op], self.start_s[op] = device, start_s
        self.end_s[op] = self.avail[device] = start_s + self.op_s(op, device)
        self.last_op[device] = op
        for tensor in self.graph.made_by(op):
            self.make(tensor, device)

    def make(self, tensor: int, device: int) -> None:
        base = int(self.graph.alias_of[tensor])
        if base < 0:
            storage: tuple = ("made", tensor)
            self.bytes_in[storage] = (device, self.size(tensor))
            self.living_in[storage] = set()
        elif (base, device) in self.copies:
            storage = ("copy", base, device)
        elif base in self.storage:
            storage = self.storage[base]
        else:
            return
        self.storage[tensor] = storage
        self.living_in[storage].add(tensor)
        if self.is_held(tensor):
            self.kept.add(storage)

    def end_due(self) -> None:
        due = [op for op in self.end_s if op not in self.ended and self.end_s[op] <= self.now]
        for op in sorted(due, key=lambda o: (self.end_s[o], self.rank[o])):
            self.ended.add(op)
            device = self.device_of[op]
            self.used[device] -= int(self.graph.workspace_bytes[op])
            for tensor in {*self.reads[op], *self.graph.made_by(op)}:
                if all(int(user) in self.ended for user in self.graph.users_of(tensor)):
                    self.release(tensor)

    def ready(self) -> list[int]:
        made = [
            [self.maker(t) for t in self.reads[op] if self.maker(t) >= 0]
            for op in self.ops
        ]  # fmt: skip
        return [op for op in self.ops if op not in self.device_of and set(made[op]) <= self.ended]

    # ── decisions ────────────────────────────────────────────────────────────────────────────

    def awaited(self, device: int, ready: list[int]) -> int:
        """The favourite for which the device stays awake; -1 for none."""
        last = self.last_op[device]
        favourite = self.favourite[last] if last >= 0 else -1
        if favourite < 0 or favourite in self.device_of:
            return -1
        makers = [self.maker(t) for t in self.reads[favourite]]
        if any(maker >= 0 and maker not in self.device_of for maker in makers):
            return -1
        feasible = self.feasible(favourite)
        if device not in feasible:
            return -1
        here_s = self.earliest_s(favourite, device)
        if any(self.earliest_s(favourite, other) < here_s for other in feasible):
            return -1
        soon = here_s - self.now <= self.spared_s[last]
        return favourite if favourite in ready or soon else -1

    def urgent_s(self, op: int) -> float:
        return max((self.earliest_s(op, d) for d in self.feasible(op)), default=math.inf)

    def proposal(self, device: int, ready: list[int]) -> tuple[float, int, int, int] | None:
        able = [op for op in ready if device in self.feasible(op)]
        due = [op for op in able if self.earliest_s(op, device) <= self.now]
        favourite = self.awaited(device, ready)
        if favourite >= 0:
            urgent = [op for op in due if self.urgent_s(op) <= self.now]
            if urgent:
                due = [min(urgent, key=lambda op: (self.urgent_s(op), self.rank[op]))]
            else:
                due = [op for op in due if op == favourite]
        offers = [(self.earliest_s(op, device), self.rank[op], device, op) for op in due]
        return min(offers, default=None)

    def run(self) -> tuple[list[int], list[float]]:
        for op in self.ops:
            if not any(self.can_run(op, device) for device in self.devices):
                raise StuckError(op, None)
        while len(self.ended) < len(self.ops):
            self.end_due()
            ready = self.ready()
            free = [d for d in self.devices if self.avail[d] <= self.now]
            offers = [offer for d in free if (offer := self.proposal(d, ready)) is not None]
            if offers:
                _, _, device, op = min(offers)
                self.commit(op, device)
                continue
            times = [self.end_s[op] for op in self.end_s if op not in self.ended]
            times += [self.earliest_s(op, d) for op in ready for d in self.feasible(op)]
            times = [time_s for time_s in times if time_s > self.now]
            if times:
                self.now = min(times)
            elif len(self.ended) < len(self.ops):
                self.raise_stuck(ready)
        return [self.device_of[op] for op in self.ops], [self.start_s[op] for op in self.ops]

    def raise_stuck(self, ready: list[int]) -> None:
        op = min(ready, key=lambda o: self.rank[o])
        able = [d for d in self.devices if self.can_run(op, d)]
        raise StuckError(op, min(self.lacking(op, d) for d in able))


# ── the comparison ───────────────────────────────────────────────────────────────────────────────


def assert_as_oracle(problem: Problem, favourite: Any = None, spared_s: Any = None) -> None:
    """The compiled loop decides as the oracle does, or fails for the same op."""
    lists = (None if values is None else values.tolist() for values in (favourite, spared_s))
    try:
        device_of, start_s = Oracle(problem, *lists).run()
    except StuckError as stuck:
        op, lacking_bytes = stuck.args
        with pytest.raises(NoFeasiblePlanError, match=repr(problem.graph.op_names[op])) as caught:
            list_schedule(problem, favourite, spared_s)
        assert lacking_bytes is None or format_bytes(lacking_bytes) in caught.value.message
        return
    found = list_schedule(problem, favourite, spared_s)
    assert found.device_of.tolist() == device_of
    assert found.start_s.tolist() == start_s
