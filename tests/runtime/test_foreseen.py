"""What a plan is simulated to hold is what its training holds."""

import pytest
import torch
from runtime.budget_loops import CPU
from runtime.foreseen_models import FORESEEN

from hocket.api.planned import make_problem
from hocket.hardware.detect import detect_processor
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.memory.maker import (
    FULL_RECOMPUTE,
    OFFLOADED_ACTIVATIONS,
    RECOMPUTED_FROM_HOST,
)
from hocket.planners.placement.one_device import one_device
from hocket.planners.registry import ONE_DEVICE
from hocket.runtime.memory.logits import can_be_in_chunks
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsal import rehearsed_peak
from hocket.runtime.train.update import planned_update

NAMES = ("sums outside", "activations outside", "parts outside", "skips", "hf gpt2", "own tied")
NUM_REHEARSED = 10
"""Plans of each model, from the leanest on; ``benchmarks/memory/foreseen.py`` has all."""
USUAL = (FULL_RECOMPUTE, OFFLOADED_ACTIVATIONS, RECOMPUTED_FROM_HOST)
"""Plans that are rehearsed in any case."""


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _planned(model, batch, forward):
    recipe = Recipe(update=planned_update(adamw(model), model), device="cpu", forward=forward)
    graph, _ = recipe.trace(model, batch, "train")
    problem = make_problem(graph, detect_processor())
    alone = one_device(problem, empty_plan(problem, ONE_DEVICE))
    frontier = find_frontier(problem, alone, num_levels=6, in_chunks=can_be_in_chunks(model, graph))
    return recipe, graph, frontier


@pytest.mark.parametrize("name", NAMES)
def test_peaks_of_plans_are_foreseen(name):
    torch.manual_seed(0)
    model, batch, forward = FORESEEN[name]()
    recipe, graph, frontier = _planned(model, batch, forward)
    planned = sorted(
        (p for p in frontier.plans if p.memory is not None), key=lambda p: p.peak_bytes
    )
    step = -(-len(planned) // NUM_REHEARSED)
    chosen = {p.name: p for p in planned if p.name in USUAL} | {p.name: p for p in planned[::step]}
    kinds = set()
    for foreseen_bytes, memory in ((p.peak_bytes, p.memory) for p in chosen.values()):
        held_bytes = rehearsed_peak(
            model, adamw(model), batch, recipe, memory, CPU, graph=graph
        ).num_bytes
        assert 0.98 * held_bytes <= foreseen_bytes <= 1.03 * held_bytes, memory
        kinds |= {block.activations for block in memory.blocks}
    assert kinds == {"kept", "offloaded", "recomputed"}
