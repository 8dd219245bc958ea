"""Experts in groups: found by their products, streamed a group at a time, with the same work."""

import numpy as np
import pytest
from planners.memory.steps import MIB, chain_step, experts_step, placed

from hocket.graph import GraphBuilder, Role, Stream
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_finer, cut_step
from hocket.planners.memory.budget import BudgetFit, bound_s
from hocket.planners.memory.frontier import find_frontier, minimum_memory_bytes
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.experts import find_experts
from hocket.simulate.rewriting.step import budgeted, moved_bytes
from hocket.simulate.verify import verify

EXPERT = 4 * MIB
AWAY = {"parameters": "streamed", "update": "host"}


def streamed(graph, groups, **policy):
    cut = cut_step(graph)
    starts = cut.start.tolist()
    return Memory(budget_bytes=(0,), blocks=tuple(
        MemoryBlock(
            name=name, start=starts[n], stop=starts[n + 1], **AWAY, **policy,
            expert_groups=groups if name.startswith("net") else 1,
        )
        for n, name in enumerate(cut.names)
    ))  # fmt: skip


def test_parameters_of_batched_products_are_experts():
    graph = experts_step(experts=8)
    found = find_experts(graph, cut_step(graph))
    assert {graph.tensor_names[root]: each.count for root, each in found.items()} == {
        f"w{n}": 8 for n in range(3)
    }
    for each in found.values():
        assert [each.num_groups(wanted) for wanted in (2, 3, 5, 99)] == [2, 3, 4, 8]
    assert find_experts(chain_step(), cut_step(chain_step())) == {}


@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("policy", [{}, {"activations": "recomputed"}])
def test_groups_do_the_same_work_and_hold_their_part(groups, policy):
    graph = experts_step()
    problem, plan = placed(graph)
    whole = budgeted(problem, plan, streamed(graph, 1, **policy))
    step = budgeted(problem, plan, streamed(graph, groups, **policy))
    new = step.rewritten.graph
    assert new.flops.sum() == pytest.approx(whole.rewritten.graph.flops.sum())
    (out, come), (whole_out, whole_come) = map(moved_bytes, (step.rewritten, whole.rewritten))
    # Every byte of a gradient goes once, and every byte of a parameter comes for each pass, and for
    # what is computed again. Of groups of unequal size each counts as the mean.
    again = np.array([name.endswith("@again") for name in new.op_names])
    come -= int(step.rewritten.moved_bytes[again].sum())
    assert bool(again.any()) is bool(policy)
    assert (out, come) == pytest.approx((whole_out, whole_come), rel=1e-6)
    size, mean = -(-8 // groups) * EXPERT, -(-8 * EXPERT // groups)
    assert new.held_bytes[new.tensor_producer >= 0].max() == mean
    # Two groups in their turns, one gradient that is made and one that leaves, and activations; the
    # input of a layer that ran again is there until its backward pass is over.
    peak = int(simulate(step.problem, step.plan).peak_bytes.max())
    assert 2 * size + 2 * mean < peak <= 2 * size + 2 * mean + (9 if policy else 8) * MIB


def test_plans_of_groups_keep_budgets_that_no_others_keep():
    problem, plan = placed(experts_step())
    frontier = find_frontier(problem, plan, num_levels=12)
    in_groups = [p for p in frontier.plans if p.memory is not None
                 and any(block.expert_groups > 1 for block in p.memory.blocks)]  # fmt: skip
    others = [p for p in frontier.plans if p not in in_groups]
    assert frontier.smallest in in_groups
    assert frontier.smallest.peak_bytes < 0.5 * min(p.peak_bytes for p in others)
    assert minimum_memory_bytes(problem, plan) == frontier.smallest.peak_bytes
    for fitted in frontier.best_of():
        fit = BudgetFit(frontier, fitted.peak_bytes)
        verify(fit.plan(), problem)
        assert fit.lower_bound_bytes <= fitted.peak_bytes
        assert fit.bound_s <= fitted.step_s * (1 + 1e-9)
    for numbers in (frontier.numbers, *frontier.finer):
        assert bound_s(numbers, 2**50) is not None


def test_the_next_group_comes_while_one_is_multiplied_and_no_earlier():
    graph = experts_step(num_layers=1)
    problem, plan = placed(graph)
    step = budgeted(problem, plan, streamed(graph, 8))
    new, timeline = step.rewritten.graph, simulate(step.problem, step.plan)
    comes = [op for op in range(new.num_ops)
             if new.op_stream[op] == Stream.COPY_IN and "f0@" in new.op_names[op]]  # fmt: skip
    parts = [new.op_names.index(f"f0@{n}") for n in range(8)]
    assert len(comes) == 8
    start, end = timeline.op_start_s, timeline.op_end_s
    for number in range(8):
        assert end[comes[number]] <= start[parts[number]]
        if number >= 2:
            assert start[comes[number]] >= end[parts[number - 2]] - 1e-12
        if number >= 1:
            assert start[comes[number]] < end[parts[number - 1]]


def test_lists_of_modules_inside_a_block_are_cut_into_groups_of_neighbours():
    b = GraphBuilder("lists")
    at, own = b.tensor("batch", MIB, role=Role.INPUT), []
    modules = [
        f"net.{layer}.{part}"
        for layer in range(3)
        for part in ("norm", *(f"experts.{n}.0" for n in range(4)), "mix")
    ]
    for number, module in enumerate(modules):
        own.append(b.tensor(f"w{number}", MIB, role=Role.PARAMETER))
        for step in range(2):
            op = b.op(f"f{number}.{step}", "aten.mm", reads=[at, own[-1]], module=module)
            at = b.tensor(f"f{number}.{step}.out", MIB, producer=op)
    graph = b.build()
    sizes = graph.tensor_bytes.astype(np.int64)
    blocks = cut_step(graph)
    assert blocks.names == ("net.0", "net.1", "net.2")
    finest = cut_finer(graph, blocks, sizes, 0)
    assert finest.names[:6] == (
        "net.0", "net.0.experts.0", "net.0.experts.1", "net.0.experts.2", "net.0.experts.3",
        "net.0:1",
    )  # fmt: skip
    # A member reads its input, its parameter and what its first op has made.
    pairs = cut_finer(graph, blocks, np.where(sizes > 0, np.isin(range(len(sizes)), own), 0), 2)
    assert pairs.names == tuple(
        f"net.{n}{part}" for n in range(3) for part in ("", ".experts.0", ".experts.2", ":1")
    )
    assert np.diff(pairs.start).tolist() == [2, 4, 4, 2] * 3
    # Nothing changes where all of them have room together, or where there are no lists inside.
    assert cut_finer(graph, blocks, sizes, 2**40).names == blocks.names
    plain = chain_step()
    assert cut_finer(plain, cut_step(plain), plain.tensor_bytes, 0).names == cut_step(plain).names
