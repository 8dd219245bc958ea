"""The rewritten step op by op: what a fetch waits for, what becomes of roles, how state visits."""

from itertools import pairwise

import pytest
from planners.memory.steps import MIB, chain_step, placed

from hocket.graph import Phase, Role, Stream
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_step
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.async_updates import sent_gradients
from hocket.simulate.rewriting.host_parameters import NUM_STAGING_BUFFERS, PIECE_BYTES
from hocket.simulate.rewriting.step import budgeted, moved_bytes

NUM_LAYERS = 5


def section(graph, *, prefetch=1, chunks=1, **policy):
    cut = cut_step(graph)
    starts = cut.start.tolist()
    blocks = tuple(
        MemoryBlock(name=name, start=starts[n], stop=starts[n + 1], **policy)
        for n, name in enumerate(cut.names)
    )
    return Memory(budget_bytes=(0,), blocks=blocks, loss_chunks=chunks, prefetch=prefetch)


def step_of(graph, **how):
    return budgeted(*placed(graph), section(graph, **how))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_parameters_are_fetched_when_the_pass_so_many_before_begins(prefetch, chunks):
    graph = chain_step(NUM_LAYERS, logits=64 * MIB)
    step = step_of(graph, prefetch=prefetch, chunks=chunks, parameters="streamed", update="host")
    new, origin = step.rewritten.graph, step.rewritten.origin
    blocks = cut_step(graph)
    passes = [("forward", n) for n in range(NUM_LAYERS + 1)]
    passes += [("backward", n) for n in reversed(range(NUM_LAYERS + 1))]
    last = {}
    for op in range(new.num_ops):
        if origin[op] >= 0 and new.op_stream[op] == Stream.COMPUTE:
            # In chunks the last block goes forward once more for its backward pass.
            is_forward = new.op_phase[op] == Phase.FORWARD and "@recompute" not in new.op_names[op]
            block = int(blocks.block_of[origin[op]])
            last["forward" if is_forward else "backward", block] = op
    fetches = [op for op in range(new.num_ops) if "@fetch-" in new.op_names[op]]
    assert len(fetches) == 2 * NUM_LAYERS
    for op in fetches:
        name, _, phase = new.op_names[op].partition("@fetch-")
        place = passes.index((phase, blocks.names.index(name)))
        before = [passes[place - prefetch - 1]] if place > prefetch else []
        made_by = [int(new.tensor_producer[t]) for t in new.reads_of(op).tolist()]
        # Room for it is there from the beginning.
        assert [each for each in made_by if each >= 0] == [last[each] for each in before]
        assert (new.op_phase[op] == Phase.FORWARD) == (phase == "forward")


def test_gradients_go_with_their_updates_and_parameters_are_where_they_live():
    graph = chain_step(NUM_LAYERS)

    def roles(**policy):
        new = step_of(graph, **policy).rewritten.graph
        by_name = dict(zip(new.tensor_names, range(new.num_tensors), strict=True))
        return new, by_name

    new, at = roles()
    for n in range(NUM_LAYERS):
        assert new.tensor_role[at[f"g{n}"]] == Role.ACTIVATION
        assert new.tensor_role[at[f"w{n}.new"]] == Role.PARAMETER
        assert new.alias_of[at[f"w{n}.new"]] == at[f"w{n}"]
    new, at = roles(parameters="streamed", update="device")
    for n in range(NUM_LAYERS):
        # What was changed of a visitor leaves with it.
        assert new.tensor_role[at[f"w{n}.new"]] == Role.ACTIVATION
        fetched = int(new.alias_of[at[f"w{n}.new"]])
        assert new.op_names[new.tensor_producer[fetched]] == f"u{n}@fetch"
    assert not any(new.tensor_role[t] == Role.PARAMETER for t in range(new.num_tensors))


def test_a_gradient_that_no_update_reads_is_kept():
    graph = chain_step(3)
    is_update = graph.op_phase == Phase.OPTIMIZER
    assert is_update.sum() == 3
    frozen = chain_step(3, num_updated=2)
    new = step_of(frozen).rewritten.graph
    kept = [new.tensor_names[t] for t in range(new.num_tensors)
            if new.tensor_role[t] == Role.GRADIENT]  # fmt: skip
    assert kept == ["g2"]


def test_state_of_a_large_parameter_visits_in_parts_that_overlap():
    weight = 8 * PIECE_BYTES
    # The backward pass takes long enough for all that there is room for to come before its end.
    graph = chain_step(2, weight=weight, flops=1e13)
    step = step_of(graph, parameters="streamed", update="device")
    new, timeline = step.rewritten.graph, simulate(step.problem, step.plan)
    at = {name: op for op, name in enumerate(new.op_names)}
    comes = [at[f"u1@fetch:{n}"] for n in range(8)]
    goes = [at[f"u1@return:{n}"] for n in range(8)]
    start, end = timeline.op_start_s, timeline.op_end_s
    for here, left in zip(comes, goes, strict=True):
        assert end[here] <= start[left]
    for early, late in pairwise(range(8)):
        assert start[comes[late]] < end[goes[early]]
    for number in range(NUM_STAGING_BUFFERS, 8):
        assert start[comes[number]] >= end[goes[number - NUM_STAGING_BUFFERS]]
    out, come = moved_bytes(step.rewritten)
    # Parameters for two passes, and parameters with twice as much state for the update.
    assert (out, come) == (2 * 3 * weight, 2 * (2 + 3) * weight)


@pytest.mark.parametrize("parameters", ["streamed", "resident"])
def test_what_updates_on_the_host_wait_for_is_found_by_what_they_read(parameters):
    """Every byte of a gradient goes down, and every byte of a parameter comes up for the next
    forward pass, whatever the copies are called."""
    graph = chain_step(NUM_LAYERS)
    policy = {"parameters": parameters, "update": "host", "activations": "offloaded"}
    step = step_of(graph, **policy)
    new, moved = step.rewritten.graph, step.rewritten.moved_bytes
    comes = (new.op_stream == Stream.COPY_IN) & (new.op_phase == Phase.FORWARD)
    weights = int(graph.tensor_bytes[graph.tensor_role == Role.PARAMETER].max())
    total = weights * int((graph.op_phase == Phase.OPTIMIZER).sum())
    assert moved[sent_gradients(new)].sum() == total
    assert moved[comes].sum() == total
    renewed = [name for name in new.op_names if name.endswith("@renew")]
    assert len(renewed) == (NUM_LAYERS if parameters == "resident" else 0)
