"""Memory plans in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planners.memory.steps import chain_step, placed

from hocket.planners.memory.maker import PlanMaker
from hocket.simulate.rewriting.rewrite import rewrite
from hocket.view.budgeted import WithinBudget, decided, kept_data


@pytest.mark.parametrize("num_streamed", [0, 1, 3])
def test_streamed_parameters_are_those_that_are_away_and_no_copies_of_others(num_streamed):
    """Copies of what the host updates lie on the device in whole pages: they were counted as if
    less than nothing was streamed."""
    graph = chain_step(5, weight=100)
    maker = PlanMaker(*placed(graph), float("inf"))
    memory = maker._all(1, update="host")
    blocks = tuple(
        replace(block, parameters="streamed") if number < num_streamed else block
        for number, block in enumerate(memory.blocks)
    )
    memory = replace(memory, blocks=blocks)
    within = WithinBudget(graph, memory, rewrite(graph, memory).graph)
    assert within.streamed_bytes == num_streamed * 100
    assert kept_data(within)["streamed_bytes"] == num_streamed * 100
    assert ("of parameters streamed" in decided(within)) == (num_streamed > 0)
