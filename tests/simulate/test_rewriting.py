"""A memory section carried into the graph: what its ops are, and what they read."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.memory.steps import MIB, chain_step, placed

from hocket.base.errors import CheckError, UsageError
from hocket.graph.build import GraphBuilder
from hocket.graph.graph import Phase, Role, Stream
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_step
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.host_parameters import NUM_STAGING_BUFFERS
from hocket.simulate.rewriting.rewrite import rewrite
from hocket.simulate.rewriting.step import budgeted, moved_bytes, rewritten_step
from hocket.simulate.rewriting.uses import can_run_twice
from hocket.simulate.verify import verify

GRAPH = chain_step(5, logits=64 * MIB)


def _memory(graph, policies, **settings):
    blocks = cut_step(graph)
    return Memory(
        budget_bytes=(2**40,),
        blocks=tuple(
            MemoryBlock(name=name, start=int(start), stop=int(stop), **policy)
            for name, start, stop, policy in zip(
                blocks.names, blocks.start, blocks.start[1:], policies, strict=False
            )
        ),
        **settings,
    )


def _all(graph, settings=None, **policy):
    return _memory(graph, [policy] * cut_step(graph).num_blocks, **(settings or {}))


def _peak(graph, memory):
    step = budgeted(*placed(graph), memory)
    return int(simulate(step.problem, step.plan).peak_bytes[0])


def _roots(graph, tensors, names):
    """Names of the storages behind tensors, without what tells makings of one tensor apart."""
    found = set()
    for tensor in tensors:
        if graph.tensor_role[tensor] != Role.CONTROL:
            name = graph.tensor_names[tensor].partition("@")[0]
            found.add(names[name])
    return found


POLICIES = st.fixed_dictionaries(
    {
        "activations": st.sampled_from(["kept", "offloaded", "recomputed"]),
        "share": st.sampled_from([0.5, 1.0]),
        "checkpoint": st.sampled_from(["kept", "offloaded"]),
        "parameters": st.sampled_from(["resident", "streamed"]),
        "update": st.sampled_from(["device", "host"]),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_plan_becomes_a_step_that_does_the_same_work_in_order(data):
    count = cut_step(GRAPH).num_blocks
    policies = data.draw(st.lists(POLICIES, min_size=count, max_size=count))
    memory = _memory(
        GRAPH, policies, loss_chunks=data.draw(st.sampled_from([1, 4])),
        prefetch=data.draw(st.integers(0, 3)),
    )  # fmt: skip
    done = rewrite(GRAPH, memory)
    names = {
        name: GRAPH.tensor_names[GRAPH.root_of[tensor]]
        for tensor, name in enumerate(GRAPH.tensor_names)
    }
    passing = {GRAPH.tensor_names[t] for t in range(GRAPH.num_tensors)
               if GRAPH.tensor_role[t] in (Role.ACTIVATION, Role.GRADIENT)}  # fmt: skip
    work = np.zeros(GRAPH.num_ops)
    for op, origin in enumerate(done.origin.tolist()):
        if origin < 0:
            continue
        if "@recompute" not in done.graph.op_names[op]:
            work[origin] += done.share[op]
        if done.graph.op_stream[op] == Stream.HOST:
            continue
        wanted = _roots(GRAPH, GRAPH.reads_of(origin), names)
        got = _roots(done.graph, done.graph.reads_of(op), names)
        # What is held until the op ends is among what it reads: activations and gradients.
        held = got - wanted - _roots(GRAPH, GRAPH.made_by(origin), names)
        assert wanted <= got
        assert held <= passing
    assert np.allclose(work, 1.0)
    step = budgeted(*placed(GRAPH), memory)
    timeline = simulate(step.problem, step.plan)
    # Copies and recomputation never make a step shorter than its own compute.
    compute = done.graph.op_stream == Stream.COMPUTE
    assert timeline.makespan_s >= step.problem.costs.op_s[0][compute].sum() * (1 - 1e-9)


def test_nothing_decided_is_the_step_with_updates_after_each_block():
    done = rewrite(GRAPH, _all(GRAPH))
    assert sorted(done.graph.op_names) == sorted(GRAPH.op_names)
    assert moved_bytes(done) == (0, 0)
    heavy = chain_step(5, weight=64 * MIB)
    problem, plan = placed(heavy)
    plain = simulate(problem, plan)
    step = budgeted(problem, plan, _all(heavy))
    timeline = simulate(step.problem, step.plan)
    assert timeline.makespan_s == pytest.approx(plain.makespan_s)
    assert timeline.peak_bytes[0] < plain.peak_bytes[0]


def test_recomputed_blocks_keep_their_input_and_run_again_just_before_their_gradients():
    done = rewrite(GRAPH, _all(GRAPH, activations="recomputed"))
    again = [name for name in done.graph.op_names if name.endswith("@recompute") and name[0] == "f"]
    # The last op of a layer makes only the next layer's input, which nobody needs again.
    assert again == [f"f{n}.{k}@recompute" for n in reversed(range(5)) for k in range(3)]
    position = {name: at for at, name in enumerate(done.graph.op_names)}
    assert position["b3.0"] < position["f2.0@recompute"] < position["b2.3"]
    assert _peak(GRAPH, _all(GRAPH, activations="recomputed")) < _peak(GRAPH, _all(GRAPH))


def test_offloaded_activations_leave_and_come_back():
    memory = _all(GRAPH, activations="offloaded")
    done = rewrite(GRAPH, memory)
    out, back = moved_bytes(done)
    assert out == back
    # What the last two blocks save is there when the backward pass begins.
    assert out >= 14 * 8 * MIB
    assert not any(
        f"f{n}." in name for n in (4, 5) for name in done.graph.op_names if "@fetch" in name
    )
    assert _peak(GRAPH, memory) < _peak(GRAPH, _all(GRAPH))


def test_what_is_offloaded_leaves_as_it_is_made_and_comes_back_the_last_first():
    """A visit of many ops hides its own copies: to the host none waits for the visit's end."""
    graph = chain_step(4, ops_per_layer=12)
    step = budgeted(*placed(graph), _all(graph, activations="offloaded"))
    new, timeline = step.rewritten.graph, simulate(step.problem, step.plan)
    ends, starts = (
        dict(zip(new.op_names, times.tolist(), strict=True))
        for times in (timeline.op_end_s, timeline.op_start_s)
    )
    for n in range(2):
        made = [f"f{n}.{k}" for k in range(11)]
        for name in made[1:]:
            assert starts[f"{name}.out@offload"] == pytest.approx(ends[name])
        assert starts[f"{made[-1]}.out@offload"] < ends[f"f{n}.11"]
        back = [starts[f"{name}.out@fetch"] for name in reversed(made)]
        assert back == sorted(back)
        # The first comes while the backward pass is in the layer above.
        assert back[0] < ends[f"b{n + 1}.0"]


def test_a_share_offloads_about_that_part_of_the_bytes():
    whole = moved_bytes(rewrite(GRAPH, _all(GRAPH, activations="offloaded")))[0]
    half = moved_bytes(rewrite(GRAPH, _all(GRAPH, activations="offloaded", share=0.5)))[0]
    assert 0.3 * whole <= half <= 0.6 * whole


def test_streamed_parameters_come_twice_and_gradients_leave_once():
    memory = _all(GRAPH, parameters="streamed", update="host")
    done = rewrite(GRAPH, memory)
    out, back = moved_bytes(done)
    assert (out, back) == (5 * 4 * MIB, 10 * 4 * MIB)
    at_home = done.graph.op_stream == Stream.HOST
    assert at_home.sum() == 5
    assert Role.PARAMETER not in done.graph.tensor_role
    assert Role.OPTIMIZER_STATE not in done.graph.tensor_role


def test_a_parameter_of_several_blocks_stays_and_is_updated_on_the_host():
    first, second = (GRAPH.tensor_names.index(name) for name in ("w0", "w1"))
    reader = np.repeat(np.arange(GRAPH.num_ops), np.diff(GRAPH.read_ptr))
    shared = (GRAPH.reads == second) & (GRAPH.op_phase[reader] != Phase.OPTIMIZER)
    graph = replace(GRAPH, reads=np.where(shared, first, GRAPH.reads).astype(GRAPH.reads.dtype))
    done = rewrite(graph, _all(graph, parameters="streamed", update="host"))
    names = done.graph.tensor_names
    assert [name for name in names if name.partition("@")[0] == "w0"] == ["w0"]
    assert done.graph.tensor_role[names.index("w0")] == Role.PARAMETER
    updates = done.graph.op_stream[done.graph.op_phase == Phase.OPTIMIZER]
    assert set(updates.tolist()) == {Stream.HOST}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_parameters_that_are_only_rounded_are_copied_rounded(kind):
    """Every reader of a weight is a cast that makes half its bytes: its twin is fetched, gradients
    go as they were made, and the update on the host rounds anew."""
    b = GraphBuilder("rounded")
    at = b.tensor("batch", 64, role=Role.INPUT)
    forward, weights = [], []
    for n in range(4):
        weights.append(b.tensor(f"w{n}", 400, role=Role.PARAMETER))
        cast = b.op(f"c{n}", "aten._to_copy", reads=[weights[n]], module=f"net.{n}")
        low = b.tensor(f"c{n}.out", 200, producer=cast)
        forward.append((b.op(f"f{n}", "aten.mm", reads=[at, low], module=f"net.{n}"), low))
        at = b.tensor(f"f{n}.out", 64, producer=forward[n][0])
    grad = at
    updates = []
    for n in reversed(range(4)):
        made = b.op(f"b{n}", "aten.mm", reads=[grad, forward[n][1]], module=f"net.{n}",
                    phase=Phase.BACKWARD, partner=forward[n][0])  # fmt: skip
        grad = b.tensor(f"b{n}.out", 64, producer=made)
        updates.append((n, b.tensor(f"g{n}", 400, producer=made, role=Role.GRADIENT)))
    for n, gradient in updates:
        b.op(f"u{n}", f"optimizer.{kind}", reads=[weights[n], gradient], bytes_touched=1200,
             phase=Phase.OPTIMIZER, module=f"net.{n}")  # fmt: skip
    graph = b.build()
    memory = _all(graph, activations="recomputed", parameters="streamed", update="host")
    done = rewrite(graph, memory)
    assert moved_bytes(done) == (4 * 200, 2 * 4 * 200)
    at_home = done.graph.op_stream == Stream.HOST
    # In one pass half of a gradient is read and a twin is written; else gradients are made full
    # and parameters rounded.
    more = 200 - 200 if kind == "adamw" else (200 + 400) + (400 + 200)
    assert (done.graph.bytes_touched[at_home] == 1200 + more).all()


def test_streamed_parameters_updated_on_the_device_take_their_state_along():
    done = rewrite(GRAPH, _all(GRAPH, parameters="streamed", update="device"))
    assert moved_bytes(done) == (5 * 12 * MIB, 5 * (4 + 4 + 12) * MIB)
    assert not (done.graph.op_stream == Stream.HOST).any()
    staging = done.graph.tensor_names.index("staging")
    assert done.graph.tensor_bytes[staging] == NUM_STAGING_BUFFERS * 12 * MIB


def test_parameters_of_one_storage_visit_the_device_in_one_piece():
    """Of a layer of cuDNN all weights lie in one piece, and each has an update of its own."""
    b = GraphBuilder("one piece")
    batch = b.tensor("batch", 64, role=Role.INPUT)
    first = b.tensor("w", 800, role=Role.PARAMETER)
    second = b.tensor("v", 400, role=Role.PARAMETER, alias_of=first)
    f = b.op("f", "aten._cudnn_rnn", reads=[batch, first, second], module="net.0.words")
    loss = b.tensor("loss", 4, producer=f, role=Role.OUTPUT)
    g = b.op("g", "aten._cudnn_rnn_backward", reads=[loss, batch, first, second],
             phase=Phase.BACKWARD, partner=f, module="net.0.words")  # fmt: skip
    for name, weight in (("w", first), ("v", second)):
        gradient = b.tensor(f"{name}.grad", 400, producer=g, role=Role.GRADIENT)
        state = b.tensor(f"{name}.m", 400, role=Role.OPTIMIZER_STATE)
        update = b.op(f"{name}.u", "optimizer.adamw", reads=[weight, gradient, state],
                      phase=Phase.OPTIMIZER, module="net.0.words")  # fmt: skip
        b.tensor(f"{name}.new", 400, producer=update, role=Role.PARAMETER, alias_of=weight)
    graph = b.build()
    done = rewrite(graph, _all(graph, parameters="streamed", update="device"))
    fetched = [name for name in done.graph.op_names if name.endswith("u@fetch")]
    assert fetched == ["w.u@fetch"]


@pytest.mark.parametrize("is_drawn", [False, True])
def test_what_cudnn_drops_is_not_dropped_again(is_drawn):
    """It draws from a state of its own, which nobody sets back."""
    b = GraphBuilder("drops")
    batch = b.tensor("batch", 64, role=Role.INPUT)
    draws = {"rng_order": 0} if is_drawn else {}
    f = b.op("f", "aten._cudnn_rnn", reads=[batch], module="net.0.words", **draws)
    b.tensor("out", 64, producer=f, role=Role.OUTPUT)
    graph = b.build()
    assert can_run_twice(graph, 0, 1) is not is_drawn


@pytest.mark.parametrize("chunks", [1, 4])
def test_what_the_host_has_changed_comes_a_block_ahead_of_the_forward_pass(chunks):
    done = rewrite(GRAPH, _all(GRAPH, {"loss_chunks": chunks}, update="host")).graph
    names = list(done.op_names)
    renewed = [name for name in names if name.endswith("@renew")]
    assert renewed == [f"net.{n}@renew" for n in range(5)]
    for n in range(5):
        copy = names.index(f"net.{n}@renew")
        waits = done.tensor_producer[done.reads_of(copy)].tolist()
        assert waits == ([names.index(f"f{n - 2}.3")] if n > 1 else [])
        told = done.made_by(copy)[0]
        assert told in done.reads_of(names.index(f"f{n}.0"))
    # The next step waits for it, nothing of this one.
    at_home = np.flatnonzero(done.op_stream == Stream.HOST)
    assert len(at_home) == 5
    assert not np.isin(done.tensor_producer[done.reads], at_home).any()


def test_loss_in_chunks_holds_a_part_of_the_logits():
    whole, parts = _all(GRAPH), _all(GRAPH, {"loss_chunks": 8})
    assert _peak(GRAPH, parts) < _peak(GRAPH, whole) - 64 * MIB
    done = rewrite(GRAPH, parts)
    parts = [name for name in done.graph.op_names if name.startswith("head@")]
    # Each part goes forward, and once more for its backward pass.
    assert parts == [f"head@{n}" for n in range(8)] + [f"head@recompute{n}" for n in range(8)]
    last = int(cut_step(GRAPH).start[-2])
    twice = GRAPH.flops[last:][GRAPH.op_phase[last:] == Phase.FORWARD].sum()
    assert done.graph.flops.sum() == pytest.approx(GRAPH.flops.sum() + twice)


def test_a_block_waits_for_copies_out_so_that_memory_stays_bounded():
    """A slow way to the host makes the step longer, not the peak higher."""
    slow = chain_step(8, activation=64 * MIB, flops=1e9)
    memory = _all(slow, activations="offloaded")
    step = budgeted(*placed(slow), memory)
    timeline = simulate(step.problem, step.plan)
    copying = step.problem.costs.op_s[0][step.rewritten.graph.op_stream == Stream.COPY_OUT].sum()
    assert timeline.makespan_s > copying
    assert timeline.peak_bytes[0] < simulate(*placed(slow)).peak_bytes[0] * 0.75


def test_simulate_and_verify_take_a_plan_with_a_memory_section():
    problem, plan = placed(GRAPH)
    memory = _all(GRAPH, activations="recomputed", parameters="streamed", update="host")
    peak = _peak(GRAPH, memory)
    kept = plan.having(replace(memory, budget_bytes=(peak,)))
    rewritten, inner = rewritten_step(problem, kept)
    assert simulate(problem, kept).makespan_s == simulate(rewritten, inner).makespan_s
    verify(kept, problem)
    with pytest.raises(CheckError, match="of its budget of"):
        verify(plan.having(replace(memory, budget_bytes=(peak - 1,))), problem)


def test_graphs_whose_passes_are_mixed_are_refused():
    reversed_phases = replace(GRAPH, op_phase=np.full(GRAPH.num_ops, Phase.BACKWARD, np.int8))
    with pytest.raises(UsageError, match="no forward pass"):
        cut_step(reversed_phases)
