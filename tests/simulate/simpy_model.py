"""The parallel and queued modes as SimPy processes: times only, from the same words."""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np
import simpy

from hocket.graph import Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate import owner_devices

AFTER_ALL = 2
"""SimPy's own events have priority 0 or 1."""


def simpy_times(problem: Problem, plan: Plan) -> tuple[list[float], dict[tuple[int, int], float]]:
    """End of each op, and of each transfer by (tensor, destination)."""
    graph, costs, routes = problem.graph, problem.costs, problem.costs.routes
    device_of = np.asarray(plan.device_of).tolist()
    home = owner_devices(graph, np.asarray(plan.device_of)).tolist()
    producer, role = graph.tensor_producer.tolist(), graph.tensor_role.tolist()
    reads = [graph.reads_of(op).tolist() for op in range(graph.num_ops)]
    op_s = costs.op_s[costs.device_row]
    env = simpy.Environment()
    op_end = [float("nan")] * graph.num_ops
    transfer_end: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, int], simpy.Event] = defaultdict(env.event)
    queue_free = defaultdict(float)
    ready: list[list[tuple[float, int]]] = [[] for _ in range(problem.cluster.num_devices)]
    wake = [env.event() for _ in ready]
    destinations: dict[int, set[int]] = defaultdict(set)
    for op, tensors in enumerate(reads):
        for tensor in tensors:
            if device_of[op] != home[tensor]:
                destinations[tensor].add(device_of[op])

    def send(tensor: int, dst: int):
        start = env.now
        if problem.transfers == "queued":
            queues = routes.send_queue[home[tensor]], routes.receive_queue[dst]
            start = max(env.now, *(queue_free[int(queue)] for queue in queues))
            for queue in queues:
                queue_free[int(queue)] = start + costs.transfer_s(tensor, home[tensor], dst)
        yield env.timeout(start + costs.transfer_s(tensor, home[tensor], dst) - env.now)
        transfer_end[tensor, dst] = env.now
        arrived[tensor, dst].succeed()

    def wait(op: int):
        yield env.all_of([arrived[tensor, device_of[op]] for tensor in reads[op]])
        rank = float(op) if plan.priority is None else float(plan.priority[op])
        heapq.heappush(ready[device_of[op]], (rank, op))
        if not wake[device_of[op]].triggered:
            wake[device_of[op]].succeed()

    def settled():
        """Happens after everything else at this time, so that a choice sees all that is ready."""
        event = env.event()
        event._ok, event._value = True, None
        env.schedule(event, priority=AFTER_ALL)
        return event

    def compute(device: int):
        while True:
            yield settled()
            if not ready[device]:
                wake[device] = env.event()
                yield wake[device]
                continue
            _, op = heapq.heappop(ready[device])
            yield env.timeout(op_s[device, op])
            finish(op, device)

    def finish(op: int, device: int) -> None:
        op_end[op] = env.now
        for tensor in graph.made_by(op):
            arrived[tensor, device].succeed()
            for dst in sorted(destinations[tensor]):
                env.process(send(tensor, dst))

    for tensor in range(graph.num_tensors):
        if producer[tensor] < 0:
            arrived[tensor, home[tensor]].succeed()
            for dst in sorted(destinations[tensor]):
                if role[tensor] == Role.INPUT:
                    arrived[tensor, dst].succeed()
                else:
                    env.process(send(tensor, dst))
    for op in range(graph.num_ops):
        env.process(wait(op))
    for device in range(problem.cluster.num_devices):
        env.process(compute(device))
    env.run()
    return op_end, transfer_end
