"""Rewritten steps call by call: the bits of the recorded step, the bytes that were simulated."""

import pytest
import torch
from runtime.budget_loops import WAYS
from runtime.budget_models import MODELS
from runtime.executed_program import execute, named_tensors
from runtime.rewritten_steps import RewrittenSteps

from hocket.base.errors import UsageError
from hocket.capture.model import capture_program
from hocket.plan.make import make_problem
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_step
from hocket.planners.placement.baselines import on_one_device
from hocket.simulate import simulate
from hocket.simulate.rewriting.step import budgeted


def drawn_plan(graph, draws, **settings):
    """A memory plan with a way of its own for each block."""
    blocks = cut_step(graph)
    return Memory(
        budget_bytes=(2**40,),
        **settings,
        blocks=tuple(
            MemoryBlock(name=name, start=int(start), stop=int(stop),
                        **WAYS[int(torch.randint(len(WAYS), (), generator=draws))])
            for name, start, stop in zip(
                blocks.names, blocks.start, blocks.start[1:], strict=False
            )
        ),
    )  # fmt: skip


def steps_of(name, memory_of):
    """Steps under a plan, with what was recorded, the simulated peak and the first values."""
    torch.manual_seed(0)
    model, batches, forward = MODELS[name]()
    graph, program = capture_program(
        model, batches[0], forward=forward, optimizer="adamw", device="cpu"
    )
    problem, values = make_problem(graph, "1xh200"), named_tensors(model, batches[0])
    memory = memory_of(graph)
    step = budgeted(problem, on_one_device(problem), memory)
    timeline = simulate(step.problem, step.plan)
    steps = RewrittenSteps(graph, program, memory, step, timeline, values, seed=3)
    return steps, program, int(timeline.peak_bytes[0]), values


@pytest.mark.parametrize("name", ["blocks", "tied", "picture", "again"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_the_recorded_ones_and_hold_what_was_simulated(name, seed):
    draws = torch.Generator().manual_seed(seed)
    steps, program, peak_bytes, values = steps_of(
        name, lambda graph: drawn_plan(graph, draws, prefetch=seed % 3)
    )
    done = [steps.step() for _ in range(3)]
    assert [each.peak_bytes for each in done] == [peak_bytes] * 3
    given = dict(values)
    for number, each in enumerate(done, 1):
        recorded = execute(program, given, step=number, seed=3)
        assert each.loss == recorded.outputs[0].item()
        given |= recorded.state
    state = steps.state
    assert state.keys() == recorded.state.keys()
    for key, expected in recorded.state.items():
        assert torch.equal(state[key], expected), key


def test_a_loss_in_chunks_is_refused():
    with pytest.raises(UsageError, match="not carried out call by call"):
        steps_of("tied", lambda graph: drawn_plan(graph, torch.Generator(), loss_chunks=2))
