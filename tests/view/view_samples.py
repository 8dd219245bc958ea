"""Problems with plans and consistent timelines, small enough to reason about.

The timelines come from a plain list schedule in which transfers do not notice each other, so that
they overlap on the channels: the case that views must keep apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hocket.cost.costs import Costs, device_rows
from hocket.graph import Graph, GraphBuilder, Phase, Role
from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.bounds import LowerBound
from hocket.planners.candidates import Candidate, Comparison
from hocket.simulate.timeline import Timeline

HOSTILE = (
    "<img src=x onerror=document.title='owned'>",
    "</script><script>document.title='owned'</script>",
    "\x1b[31mred\x1b[0m\r\n\x07bell",
    "\u202eexe.gpj {{title}} &amp; \"quoted\" 'single' `tick`",
    "\ud800 lone surrogate",
)


@dataclass(frozen=True)
class Sample:
    problem: Problem
    plan: Plan
    timeline: Timeline

    @property
    def parts(self) -> tuple[Problem, Plan, Timeline]:
        return self.problem, self.plan, self.timeline


def layered_graph(num_layers: int, branches: int = 2, name: str = "tiny-gpt") -> Graph:
    """Layers of parallel branches that join, with a mirrored backward part and updates."""
    build = GraphBuilder(name)
    weights = [
        [build.tensor(f"h.{n}.w{b}", 3 * 2**20, role=Role.PARAMETER) for b in range(branches)]
        for n in range(num_layers)
    ]
    last = build.tensor("batch", 2**20, role=Role.INPUT)
    forward: list[list[int]] = []

    def op(label: str, kind: str, reads: list[int], phase: Phase, flops: float, module: str) -> int:
        return build.op(
            label, kind, reads=reads, phase=phase, flops=flops, bytes_touched=2**20, module=module
        )

    saved: list[list[int]] = []
    for n in range(num_layers):
        ops, outs = [], []
        for b in range(branches):
            number = op(f"h.{n}.mm{b}", "aten.mm", [last, weights[n][b]], Phase.FORWARD,
                        4e9 * (1 + b), f"transformer.h.{n}.attn")  # fmt: skip
            ops.append(number)
            outs.append(build.tensor(f"h.{n}.y{b}", 2**21, producer=number))
        join = op(f"h.{n}.add", "aten.add", outs, Phase.FORWARD, 1e9, f"transformer.h.{n}")
        last = build.tensor(f"h.{n}.out", 2**21, producer=join)
        forward.append([*ops, join])
        saved.append([*outs, last])
    for n in reversed(range(num_layers)):
        module = f"transformer.h.{n}.attn"
        grads = []
        for b in range(branches):
            number = op(f"h.{n}.mm{b}_backward", "aten.mm", [last, saved[n][b], weights[n][b]],
                        Phase.BACKWARD, 8e9 * (1 + b), module)  # fmt: skip
            grads.append(build.tensor(f"h.{n}.dy{b}", 2**21, producer=number))
            grad = build.tensor(f"h.{n}.dw{b}", 2**21, producer=number, role=Role.GRADIENT)
            op(f"h.{n}.adam{b}", "aten._fused_adamw_", [grad, weights[n][b]],
               Phase.OPTIMIZER, 5e8, module)  # fmt: skip
        join = op(f"h.{n}.add_backward", "aten.add", grads, Phase.BACKWARD, 1e9, module)
        last = build.tensor(f"h.{n}.dx", 2**21, producer=join)
    return build.build()


def small_cluster(num_devices: int = 3, *, price: float = 2.5, name: str = "mixed") -> Cluster:
    kind = DeviceKind(
        name="rtx-2080", memory_bytes=8 * 2**30, peak_flops={"float32": 1e13},
        memory_bandwidth_bps=4e11, price_per_hour=price,
    )  # fmt: skip
    devices = tuple(
        Device(name=f"gpu{d}", kind=kind, host="host0", memory_bytes=(64 + 32 * d) * 2**20)
        for d in range(num_devices)
    )
    links = tuple(
        Link(name=f"pcie{d}", ends=(f"gpu{d}", "host0"), bandwidth_bps=12e9, latency_s=5e-6)
        for d in range(num_devices)
    )
    return Cluster(name=name, devices=devices, hosts=("host0",), links=links)


def problem_of(graph: Graph, cluster: Cluster) -> Problem:
    peak = cluster.kinds[0].peak_flops["float32"]
    op_s = np.maximum(graph.flops / peak, 2e-6)
    costs = Costs(
        kind_names=tuple(kind.name for kind in cluster.kinds),
        op_s=np.tile(op_s, (len(cluster.kinds), 1)),
        op_source=np.zeros((len(cluster.kinds), graph.num_ops), dtype=np.uint8),
        device_row=device_rows(cluster),
        routes=cluster.routes,
        tensor_bytes=graph.tensor_bytes,
        reserved_bytes=np.zeros(len(cluster.kinds), dtype=np.int64),
        settings={},
    )
    return Problem(work=graph, cluster=cluster, op_costs=costs, transfers="parallel")


def listed_timeline(problem: Problem, plan: Plan) -> Timeline:
    """Ops in graph order on their devices, each transfer as soon as its tensor is made."""
    graph, costs, device_of = problem.graph, problem.costs, plan.device_of
    assert device_of is not None
    op_s = costs.op_s[costs.device_row]
    free = [0.0] * problem.cluster.num_devices
    start, end = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    sent: dict[tuple[int, int], tuple[float, float, float, int]] = {}
    home = {t: int(device_of[graph.users_of(t)[0]]) for t in range(graph.num_tensors)
            if graph.tensor_producer[t] < 0 and len(graph.users_of(t))}  # fmt: skip
    for op in range(graph.num_ops):
        device = int(device_of[op])
        ready = free[device]
        for tensor in graph.reads_of(op).tolist():
            producer = int(graph.tensor_producer[tensor])
            made = end[producer] if producer >= 0 else 0.0
            src = int(device_of[producer]) if producer >= 0 else home[tensor]
            if src != device:
                key = (tensor, device)
                if key not in sent:
                    took = costs.transfer_s(tensor, src, device)
                    sent[key] = (made, made, made + took, src)
                made = sent[key][2]
            ready = max(ready, made)
        start[op], end[op] = ready, ready + op_s[device, op]
        free[device] = end[op]
    transfers = sorted((s[1], t, d, s[0], s[2], s[3]) for (t, d), s in sent.items())
    columns = list(zip(*transfers, strict=True)) if transfers else [()] * 6
    curves = [_curve(problem, device_of, start, end, sent, d)
              for d in range(problem.cluster.num_devices)]  # fmt: skip
    return Timeline(
        makespan_s=max([0.0, *end, *columns[4]]),
        op_device=device_of,
        op_stream=graph.op_stream,
        op_start_s=start,
        op_end_s=end,
        transfer_tensor=np.array(columns[1], dtype=np.int32),
        transfer_src=np.array(columns[5], dtype=np.int32),
        transfer_dst=np.array(columns[2], dtype=np.int32),
        transfer_ready_s=np.array(columns[3], dtype=np.float64),
        transfer_start_s=np.array(columns[0], dtype=np.float64),
        transfer_end_s=np.array(columns[4], dtype=np.float64),
        memory_ptr=np.cumsum([0, *(len(times) for times, _ in curves)]),
        memory_time_s=np.concatenate([times for times, _ in curves]),
        memory_bytes=np.concatenate([held for _, held in curves]),
        peak_bytes=np.array([held.max() for _, held in curves], dtype=np.int64),
    )


def _curve(problem, device_of, start, end, sent, device):
    """Bytes that the tensors made on or sent to a device hold, from start to the end of use."""
    graph = problem.graph
    changes: dict[float, int] = {0.0: 0}
    for tensor in range(graph.num_tensors):
        producer = int(graph.tensor_producer[tensor])
        readers = [u for u in graph.users_of(tensor).tolist() if device_of[u] == device]
        if producer >= 0 and device_of[producer] == device:
            begin = float(start[producer])
            last = max([end[producer], *(end[u] for u in readers)])
        elif (tensor, device) in sent:
            begin = sent[tensor, device][1]
            last = max(end[u] for u in readers)
        elif readers and producer < 0:
            begin, last = 0.0, None
        else:
            continue
        held = int(graph.held_bytes[tensor])
        changes[begin] = changes.get(begin, 0) + held
        if last is not None and not graph.is_held[tensor]:
            changes[float(last)] = changes.get(float(last), 0) - held
    times = np.array(sorted(changes))
    return times, np.cumsum([changes[t] for t in times.tolist()]).astype(np.int64)


def sample(num_layers: int = 4, num_devices: int = 3, **cluster_options) -> Sample:
    graph = layered_graph(num_layers)
    cluster = small_cluster(num_devices, **cluster_options)
    problem = problem_of(graph, cluster)
    layer = [int(name.split(".")[1]) for name in graph.op_names]
    device_of = np.array([n * num_devices // num_layers for n in layer], dtype=np.int32)
    # The second branch runs next door, so that transfers cross in both directions at once.
    for op, name in enumerate(graph.op_names):
        if "mm1" in name or "adam1" in name:
            device_of[op] = (device_of[op] + 1) % num_devices
    plan = Plan(
        planner="layer-blocks", work_hash=graph.content_hash, cluster_hash=cluster.content_hash,
        notes={"blocks": f"{num_devices}"},
    ).placing(device_of)  # fmt: skip
    return Sample(problem, plan, listed_timeline(problem, plan))


def random_sample(num_ops: int, num_devices: int, seed: int) -> Sample:
    """Ops that read up to three earlier tensors, thrown onto devices at random."""
    rng = np.random.default_rng(seed)
    build = GraphBuilder("random")
    tensors: list[int] = [build.tensor("in", 2**20, role=Role.INPUT)]
    for op in range(num_ops):
        reads = {int(tensors[i]) for i in rng.integers(len(tensors), size=rng.integers(1, 4))}
        number = build.op(f"op{op}", f"kind{op % 5}", reads=sorted(reads),
                          phase=Phase(int(rng.integers(3))), flops=float(rng.integers(1, 10**8)),
                          module=f"block.{op // 10}")  # fmt: skip
        tensors.append(build.tensor(f"t{op}", int(rng.integers(1, 2**22)), producer=number))
    graph = build.build()
    problem = problem_of(graph, small_cluster(num_devices))
    plan = Plan(planner="random").placing(rng.integers(num_devices, size=num_ops).astype(np.int32))
    return Sample(problem, plan, listed_timeline(problem, plan))


def hostile_sample() -> Sample:
    """Every name that a file can set carries an attack."""
    plain = sample(num_layers=4)
    graph = plain.problem.graph

    def mean(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{HOSTILE[i % len(HOSTILE)]}{i}" for i in range(len(names)))

    graph = replace(
        graph, name=HOSTILE[1], op_names=mean(graph.op_names), kinds=mean(graph.kinds),
        modules=mean(graph.modules), tensor_names=mean(graph.tensor_names),
    )  # fmt: skip
    device_names = [f"{HOSTILE[d]}{d}" for d in range(plain.problem.cluster.num_devices)]
    cluster = plain.problem.cluster
    kind = replace(cluster.devices[0].kind, name=HOSTILE[0])
    cluster = replace(
        cluster,
        name=HOSTILE[2],
        devices=tuple(
            replace(device, name=name, kind=kind)
            for device, name in zip(cluster.devices, device_names, strict=True)
        ),
        links=tuple(
            replace(link, name=HOSTILE[d], ends=(name, "host0"))
            for d, (link, name) in enumerate(zip(cluster.links, device_names, strict=True))
        ),
    )
    problem = problem_of(graph, cluster)
    plan = replace(plain.plan, planner=HOSTILE[0], notes={HOSTILE[1]: HOSTILE[3]})
    return Sample(problem, plan, listed_timeline(problem, plan))


def comparison_of(chosen: Sample, *, planner: str = "m-topo, recompute 4 of 48") -> Comparison:
    """One candidate without a plan, one that does not fit, one slower, and the given one."""
    problem, plan, timeline = chosen.parts
    alone = plan.having(Placement(np.zeros_like(plan.device_of)))
    crowded = listed_timeline(problem, alone)
    crowded = replace(crowded, peak_bytes=crowded.peak_bytes + np.array([2**30, 0, 0]))
    slow = replace(timeline, makespan_s=timeline.makespan_s * 1.22)
    candidates = (
        Candidate(planner="exact", plan=None, timeline=None, feasible=False,
                  reason="found nothing in the time given", plan_seconds=1.0),
        Candidate(planner="one-device", plan=alone, timeline=crowded, feasible=False,
                  reason="gpu0 needs more than it has", plan_seconds=0.01),
        Candidate(planner="pipeline 3, even", plan=plan, timeline=slow, feasible=True,
                  reason="22% longer than the winner", plan_seconds=0.02),
        Candidate(planner=planner, plan=plan, timeline=timeline, feasible=True,
                  reason="its step is 18% shorter than the next", plan_seconds=0.03),
    )  # fmt: skip
    why = "chosen because its step is 18% shorter than the next (pipeline 3, even); limited by gpu1"
    bound = LowerBound(timeline.makespan_s / 2, "the work of all devices together", {})
    return Comparison(problem=problem, candidates=candidates, chosen=3, why=why, bound=bound)
