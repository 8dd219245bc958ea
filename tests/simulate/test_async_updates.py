"""Steps that overlap by asynchronous updates, against an event by event oracle in Python."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.memory.steps import MIB, chain_step, placed

from hocket.graph.graph import Phase, Stream
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_step
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.async_updates import async_step_s
from hocket.simulate.rewriting.step import budgeted
from hocket.simulate.rewriting.uses import find_uses

GRAPH = chain_step(5, weight=32 * MIB, flops=2e10)
BLOCKS = cut_step(GRAPH)
USES = find_uses(GRAPH, BLOCKS)
NUM_STEPS = 6
POLICIES = st.fixed_dictionaries(
    {
        "activations": st.sampled_from(["kept", "offloaded", "recomputed"]),
        "checkpoint": st.sampled_from(["kept", "offloaded"]),
        "parameters": st.sampled_from(["resident", "streamed"]),
        "update": st.sampled_from(["device", "host"]),
    }
)


def step_of(policies, **options):
    starts = BLOCKS.start.tolist()
    blocks = tuple(
        MemoryBlock(name=name, start=starts[n], stop=starts[n + 1], **policies[n])
        for n, name in enumerate(BLOCKS.names)
    )
    return budgeted(*placed(GRAPH), Memory(budget_bytes=(0,), blocks=blocks, **options))


def event_by_event_s(step):
    """The last of several steps: ops by their names, every stream with a queue of its own."""
    graph, seconds = step.rewritten.graph, step.problem.costs.op_s[0]
    names, count = graph.op_names, graph.num_ops
    block_of = BLOCKS.block_of[step.rewritten.neighbor].tolist()
    waits = {}
    for step_number in range(NUM_STEPS):
        for op in range(count):
            makers = graph.tensor_producer[graph.reads_of(op)].tolist()
            waits[step_number, op] = {(step_number, each) for each in makers if each >= 0}
    changes, used = {}, []
    for op in range(count):
        is_update = graph.op_phase[op] == Phase.OPTIMIZER and graph.op_stream[op] != Stream.COMPUTE
        if graph.op_stream[op] == Stream.HOST or "@return" in names[op]:
            changes.setdefault(block_of[op], []).append(op)
        if "@gradients" in names[op] or (is_update and graph.op_stream[op] == Stream.COPY_OUT):
            used.append(op)
    first = int(np.flatnonzero(graph.op_stream == Stream.COMPUTE)[0])
    for number in range(1, NUM_STEPS):
        for op in range(count):
            if names[op].endswith(("@fetch-forward", "@renew")):
                waits[number, op] |= {(number - 1, e) for e in changes.get(block_of[op], ())}
        waits[number, first] |= {(number - 1, each) for each in used}
    readers = {}
    for op, others in waits.items():
        for each in others:
            readers.setdefault(each, []).append(op)
    queues = {s: [] for s in Stream}
    for number in range(NUM_STEPS):
        for op in range(count):
            if graph.op_stream[op] != Stream.HOST:
                queues[Stream(int(graph.op_stream[op]))].append((number, op))
    ready_on_host, running, events, end_s, now = [], set(), [], {}, 0.0
    left = {op: len(others) for op, others in waits.items()}
    while True:
        for stream, queue in queues.items():
            if stream in running:
                continue
            if stream == Stream.HOST:
                chosen = heapq.heappop(ready_on_host)[1] if ready_on_host else None
            else:
                chosen = queue.pop(0) if queue and not left[queue[0]] else None
            if chosen is not None:
                running.add(stream)
                heapq.heappush(events, (now + seconds[chosen[1]], chosen, stream))
        if not events:
            break
        now = events[0][0]
        # All that ends at one time has ended before another begins.
        while events and events[0][0] <= now:
            _, done, stream = heapq.heappop(events)
            running.discard(stream)
            end_s[done] = now
            for each in readers.get(done, ()):
                left[each] -= 1
                if not left[each] and graph.op_stream[each[1]] == Stream.HOST:
                    heapq.heappush(ready_on_host, ((block_of[each[1]], each), each))
    assert len(end_s) == NUM_STEPS * count
    compute = np.flatnonzero(graph.op_stream == Stream.COMPUTE)
    ends = [max(end_s[n, op] for op in compute) for n in range(NUM_STEPS)]
    return ends[-1] - ends[-2]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_step_among_many_is_the_last_of_several(data):
    count = BLOCKS.num_blocks
    policies = data.draw(st.lists(POLICIES, min_size=count, max_size=count))
    step = step_of(policies, loss_chunks=data.draw(st.sampled_from([1, 4])))
    found = async_step_s(step, USES)
    graph, seconds = step.rewritten.graph, step.problem.costs.op_s[0]
    busiest_s = max(seconds[graph.op_stream == stream].sum() for stream in Stream)
    assert found == pytest.approx(max(event_by_event_s(step), busiest_s), rel=1e-6)


def test_without_host_updates_it_is_the_step_alone():
    for activations in ("kept", "offloaded", "recomputed"):
        step = step_of([{"activations": activations}] * BLOCKS.num_blocks)
        alone = simulate(step.problem, step.plan).makespan_s
        assert async_step_s(step, USES) == pytest.approx(alone)


def test_updates_that_overlap_the_next_step_make_it_shorter():
    step = step_of([{"parameters": "streamed", "update": "host"}] * BLOCKS.num_blocks)
    assert async_step_s(step, USES) < simulate(step.problem, step.plan).makespan_s
