"""A pipeline's schedule as a problem and a plan of the event engine.

Actions are ops, in the strict order of their devices. A forward makes what its backward reads: one
tensor kept until the gradient of the inputs, one until that of the weights, and one without size
that goes to the next stage in the stated time; a backward makes the one that goes back. Whatever
works on problems and timelines (traces, reports, the critical path) then works on pipelines too.
O(actions).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.costs import Costs, TimeSource, device_rows
from hocket.cost.parallel.costs import StageCosts
from hocket.graph.build import GraphBuilder
from hocket.graph.graph import Graph, Phase, Role
from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.simulate.pipeline import action_name, check_costs

_HOST, _KIND = "host", "pipeline rank"
_MEMORY_BYTES = 2**50


def pipeline_problem(
    schedule: Schedule, costs: StageCosts, rank_names: tuple[str, ...] = ()
) -> tuple[Problem, Plan]:
    """Problem and plan for `hocket.simulate.simulate` that simulate ``schedule``.

    ``rank_names`` name its devices, which are numbered by default. Devices have no limit of memory
    here; transfers do not notice each other.
    """
    check_costs(costs, schedule.num_stages, schedule.num_devices)
    buffers = _PipelineGraph(schedule, costs)
    for action in _runnable_order(schedule).tolist():
        buffers.add(action)
    line_up = buffers.finish()
    names = rank_names or tuple(f"rank{index}" for index in range(schedule.num_devices))
    graph, cluster = buffers.builder.build(), _cluster(names)
    problem = Problem(
        work=graph,
        cluster=cluster,
        op_costs=_costs(graph, cluster, np.array(buffers.op_s), np.array(buffers.tensor_s)),
        transfers="parallel",
    )
    device_of = np.array(buffers.op_device, dtype=np.int32)
    return problem, Plan(planner=schedule.name).placing(device_of, by_device=line_up)


def _runnable_order(schedule: Schedule) -> IntArray:
    """Actions so that producers precede readers: forwards by stage, then backwards from the end."""
    work, stage = schedule.work, schedule.stage
    is_forward = work == StageWork.FORWARD
    along = np.where(is_forward, stage, -stage)
    phase = np.where(is_forward, 0, np.where(work == StageWork.WEIGHT_GRADIENT, 2, 1))
    return np.lexsort((schedule.microbatch, along, phase)).astype(np.int32)


@dataclass
class _PipelineGraph:
    """A graph in the making, with its times and the tensors that later ops will read."""

    schedule: Schedule
    costs: StageCosts
    builder: GraphBuilder = field(init=False)
    op_s: list[float] = field(default_factory=list)
    tensor_s: list[float] = field(default_factory=list)
    op_device: list[int] = field(default_factory=list)
    op_of: dict[int, int] = field(default_factory=dict)
    kept: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(self.schedule.name)
        for device, size in enumerate(self.costs.state_bytes):
            self._tensor("state", device, 0, size, role=Role.PARAMETER)

    def _tensor(
        self,
        name: str,
        stage: int,
        microbatch: int,
        size: int,
        producer: int = -1,
        time_s: float = 0.0,
        role: Role = Role.ACTIVATION,
    ) -> None:
        made = self.builder.tensor(
            f"{name}.{stage}.{microbatch}", size, producer=producer, role=role
        )
        self.kept[name, stage, microbatch] = made
        self.tensor_s.append(time_s)

    def _op(
        self, name: str, phase: Phase, device: int, time_s: float, reads: list[tuple[str, int, int]]
    ) -> int:
        found = [self.kept[key] for key in reads if key in self.kept]
        self.op_s.append(time_s)
        self.op_device.append(device)
        return self.builder.op(name, phase.name.lower(), reads=found, phase=phase)

    def add(self, action: int) -> None:
        """Add an action as an op, with what it reads and makes."""
        work, stage = StageWork(int(self.schedule.work[action])), int(self.schedule.stage[action])
        name, microbatch = action_name(self.schedule, action), int(self.schedule.microbatch[action])
        device = int(self.schedule.device_of_stage[stage])
        sent = (*self.costs.send_s, 0.0)
        kept, late = self.costs.activation_bytes[stage], self.costs.weight_gradient_bytes[stage]
        early_key, late_key = ("early", stage, microbatch), ("late", stage, microbatch)
        if work == StageWork.FORWARD:
            reads = [("out", stage - 1, microbatch)]
            op = self._op(name, Phase.FORWARD, device, self.costs.forward_s[stage], reads)
            self._tensor(*early_key, kept - late, op)
            self._tensor(*late_key, late, op)
            self._tensor("out", stage, microbatch, 0, op, sent[stage])
        elif work == StageWork.WEIGHT_GRADIENT:
            op = self._op(
                name, Phase.BACKWARD, device, self.costs.weight_gradient_s[stage],
                [late_key, ("back", stage, microbatch)],
            )  # fmt: skip
        else:
            reads = [("back", stage + 1, microbatch), early_key]
            time_s = self.costs.input_gradient_s[stage]
            if work == StageWork.BACKWARD:
                reads.append(late_key)
                time_s += self.costs.weight_gradient_s[stage]
            op = self._op(name, Phase.BACKWARD, device, time_s, reads)
            self._tensor("back", stage, microbatch, 0, op, sent[stage - 1])
        self.op_of[action] = op

    def finish(self) -> tuple[IntArray, ...]:
        """Add what follows each device's last action; return the devices' orders."""
        rows = []
        for device, time_s in enumerate(self.costs.after_s):
            own = range(int(self.schedule.start[device]), int(self.schedule.start[device + 1]))
            after = self._op(
                f"after.{device}", Phase.OPTIMIZER, device, time_s, [("state", device, 0)]
            )
            ops = [*(self.op_of[action] for action in own), after]
            rows.append(np.array(ops, dtype=np.int32))
        return tuple(rows)


def _cluster(names: tuple[str, ...]) -> Cluster:
    """Devices on one link that is as fast as each transfer's stated time."""
    kind = DeviceKind(
        name=_KIND, memory_bytes=_MEMORY_BYTES, peak_flops={}, memory_bandwidth_bps=1.0
    )
    link = Link(name="link", ends=names, bandwidth_bps=1.0, latency_s=0.0)
    return Cluster(
        name="pipeline",
        devices=tuple(
            Device(name=name, kind=kind, host=_HOST, memory_bytes=_MEMORY_BYTES) for name in names
        ),
        hosts=(_HOST,),
        links=(link,) if len(names) > 1 else (),
        uses_stated_times=True,
    )


def _costs(graph: Graph, cluster: Cluster, op_s: FloatArray, tensor_s: FloatArray) -> Costs:
    return Costs(
        kind_names=(_KIND,),
        op_s=op_s[None, :],
        op_source=np.full((1, graph.num_ops), TimeSource.FILE, dtype=np.uint8),
        device_row=device_rows(cluster),
        routes=cluster.routes,
        tensor_bytes=graph.tensor_bytes,
        tensor_s=tensor_s,
        settings={},
    )
