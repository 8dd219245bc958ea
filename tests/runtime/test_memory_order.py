"""Steps carried out in the order that holds least: same bits, and the bytes that were predicted."""

import numpy as np
import pytest
import torch
from runtime.executed_program import named_tensors
from runtime.plain_reference import reference_steps
from runtime.small_zoo import SMALL_ZOO
from runtime.whole_step import WholeStep
from simulate.problems import joined, problem_of

from hocket.capture import capture_program
from hocket.plan.plan import Plan
from hocket.planners.memory.order import release_gradients
from hocket.planners.memory.placed import order_for_memory
from hocket.runtime.device_instructions import Setup, split
from hocket.simulate import simulate
from hocket.simulate.engine import instructions_of

CPU = torch.device("cpu")


def carried_out(model, batch, orders):
    """The step on one device, gradients released by their updates; predicted and measured peaks."""
    graph, program = capture_program(model, batch, device="cpu")
    graph = release_gradients(graph)
    problem = problem_of(graph, joined(1), np.ones((1, graph.num_ops)))
    plan = orders(problem, Plan(planner="one").placing(np.zeros(graph.num_ops, dtype=np.int32)))
    parts = split(graph, instructions_of(problem, plan), order=plan.by_device)
    setup = Setup(graph, program, plan.device_of, parts)
    process = WholeStep(setup, named_tensors(model, batch), [CPU], seed=5)
    records = [process.step(number) for number in (1, 2)]
    predicted = int(simulate(problem, plan).peak_bytes[0])
    start = int(graph.held_bytes[graph.tensor_producer < 0].sum())
    return process, records, predicted, start


@pytest.mark.parametrize("name", ["moe-12x32", "gpt2", "resnet50"])
def test_steps_in_memory_order_are_bitwise_the_same_and_hold_what_was_predicted(name):
    torch.manual_seed(1)
    model, batch = SMALL_ZOO[name]()
    model.train()
    process, records, predicted, start = carried_out(model, batch, order_for_memory)
    _, plain_records, plain, _ = carried_out(model, batch, lambda problem, plan: plan)
    assert [record.peak_bytes[0] for record in records] == [predicted] * 2
    assert plain_records[0].peak_bytes[0] == plain
    assert predicted <= plain
    reference = reference_steps(model, batch, steps=2, seed=5)
    assert [record.loss for record in records] == reference.losses
    results, names = process.results(), process.program.names
    for tensor, source in names.items():
        if source in reference.state:
            assert torch.equal(results[tensor], reference.state[source]), source
    assert predicted - start < 0.75 * (plain - start)
