"""Time per step when many steps follow each other and host updates overlap with the next step.

By default a step ends when all parameters are updated, so its simulated time holds for every step.
With asynchronous updates, steps overlap: the next forward pass waits block by block for parameters
that are updated on the host or written back to it. So several steps are simulated as one graph, and
the last one counts. Every stream runs its ops in graph order, except the host: among updates whose
gradients have arrived it runs the one of the lowest block, which the next forward pass needs first
(`runtime/offload/host_optimizer.py`). O(steps · (ops + reads) log).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.graph.graph import Graph, Phase, Role, Stream
from hocket.simulate.engine import simulate_placement
from hocket.simulate.parallel.graph_builder import StepBuilder
from hocket.simulate.rewriting.step import BudgetedStep
from hocket.simulate.rewriting.uses import Uses

_NUM_STEPS = 6
"""Number of simulated steps. Step times repeat by then, since a step waits only for the previous
one."""


def async_step_s(step: BudgetedStep, uses: Uses) -> float:
    """Return the time per step of many steps with asynchronous updates."""
    problem, graph, device_of = step.problem, step.rewritten.graph, step.plan.device_of
    assert device_of is not None, "a budgeted step has a placement"
    builder = StepBuilder(kinds=list(graph.kinds), modules=graph.modules, is_named=False)
    maker, reader = graph.edges
    block = uses.first_block[step.rewritten.neighbor]
    later, earlier = _between_steps(graph, block)
    # The engine would run ready ops by priority, so each op reads a result of the op before it on
    # its stream: for the first op, of the last op of the previous step.
    in_order = [np.flatnonzero(graph.op_stream == s) for s in Stream if s != Stream.HOST]
    after, previous = np.concatenate([(own, np.roll(own, 1)) for own in in_order], axis=1)
    is_inner = previous < after
    later, earlier = np.append(later, after[~is_inner]), np.append(earlier, previous[~is_inner])
    ops, before = np.arange(graph.num_ops, dtype=np.int32), np.zeros(0, dtype=np.int32)
    for _ in range(_NUM_STEPS):
        new = builder.copy_ops(problem, ops, "", device_of, block.astype(np.float64))
        done = builder.add_tensors([""] * len(ops), role=Role.CONTROL, producer=new)
        builder.add_reads(new[reader], done[maker])
        builder.add_reads(new[after[is_inner]], done[previous[is_inner]])
        if len(before):
            builder.add_reads(new[later], before[earlier])
        before = done
    steps = builder.graph(graph.name, {})
    costs = replace(problem.costs, op_s=builder.op_s(), tensor_bytes=steps.tensor_bytes)
    many = replace(problem, work=steps, op_costs=costs)
    priority = builder.column("priority").astype(np.float64)
    _, timeline = simulate_placement(many, np.tile(device_of, _NUM_STEPS), priority)
    computes = graph.op_stream == Stream.COMPUTE
    ends_s = timeline.op_end_s.reshape(_NUM_STEPS, -1)[:, computes].max(axis=1, initial=0.0)
    # No step is shorter than the work of its busiest stream.
    op_s = problem.costs.op_s[problem.costs.device_row[device_of], ops]
    busiest_s = np.bincount(graph.op_stream, weights=op_s).max(initial=0.0)
    # In steady state the ends of the last two steps differ by the time of one step.
    return max(float(ends_s[-1] - ends_s[-2]), float(busiest_s))


def has_host_updates(graph: Graph) -> bool:
    """Return True if part of a rewritten step can overlap with the next step."""
    return bool((_on_host(graph) | _swapped_updates(graph)).any())


def sent_gradients(graph: Graph) -> BoolArray:
    """Per op: True for copies of gradients to the host that host updates wait for."""
    maker, reader = graph.edges
    is_read = _among(graph, maker[_on_host(graph)[reader]])
    return np.asarray(is_read & (graph.op_stream == Stream.COPY_OUT))


def _on_host(graph: Graph) -> BoolArray:
    return np.asarray(graph.op_stream == Stream.HOST)


def _swapped_updates(graph: Graph) -> BoolArray:
    """Per op: True for device updates with swapped-in state, on the copy-out stream."""
    is_update = graph.op_phase == Phase.OPTIMIZER
    return np.asarray(is_update & (graph.op_stream == Stream.COPY_OUT))


def _among(graph: Graph, ops: IntArray | LongArray) -> BoolArray:
    """Per op: True if it is one of ``ops``."""
    return np.bincount(ops, minlength=graph.num_ops) > 0


def _between_steps(graph: Graph, block: LongArray) -> tuple[LongArray, LongArray]:
    """Return pairs of an op and an op of the previous step that it waits for.

    Fetches for the forward pass wait for updates and write-backs of the same block. The first
    compute op waits until the last gradient is used or sent.
    """
    maker, reader = graph.edges
    swapped = _swapped_updates(graph)
    is_written_back = _among(graph, reader[swapped[maker]]) & (graph.op_stream == Stream.COPY_OUT)
    is_fetch = (graph.op_phase == Phase.FORWARD) & (graph.op_stream == Stream.COPY_IN)
    changing = np.flatnonzero(_on_host(graph) | is_written_back)
    fetching = np.flatnonzero(is_fetch)
    fetch, change = np.nonzero(block[fetching][:, None] == block[changing])
    # The first compute op frees the gradients of the previous step, so all must be used or sent.
    used = np.flatnonzero(swapped | sent_gradients(graph))[-1:]
    first = np.flatnonzero(graph.op_stream == Stream.COMPUTE)[: len(used)]
    return np.append(fetching[fetch], first), np.append(changing[change], used[: len(first)])
