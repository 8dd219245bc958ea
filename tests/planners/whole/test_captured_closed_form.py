"""The closed form of captured ops, which prunes the search, agrees with their simulation."""

import pytest

from hocket.capture import load_model
from hocket.capture.sizes import capture_sizes
from hocket.plan.make import make_problem
from hocket.planners.devices import workers
from hocket.planners.parallel.closed_form import tables_of
from hocket.planners.parallel.search import _estimates
from hocket.simulate.engine import simulate_parallel

CLOSE = 0.03
WITHIN_REACH = 2.0
"""Families that take longer by more cannot win, and pipelines of more stages than layers do."""


@pytest.mark.parametrize(
    ("model", "layers", "batch", "seq", "on"),
    [
        ("llama3-8b", 2, 32, 512, "4xa100-80g"),
        ("gpt-1.7b", 2, 32, 512, "dgx-a100-80g"),
        ("vit-base", None, 128, None, "4xa100-80g"),
    ],
)
def test_best_of_each_family_is_within_three_percent_of_its_simulation(
    model, layers, batch, seq, on
):
    made, tensors = load_model(model, batch=batch, seq=seq, layers=layers)
    problem = make_problem(capture_sizes(made, tensors), on)
    best = {}
    found = _estimates(tables_of(problem), workers(problem).tolist(), takes_all=False)
    for estimate in sorted(found, key=lambda estimate: estimate.seconds):
        samples = {replica.num_samples for replica in estimate.parallel.replicas}
        if len(samples) == 1:
            best.setdefault(estimate.family, estimate)
    least_s = min(estimate.seconds for estimate in best.values())
    hopeful = [each for each in best.values() if each.seconds <= WITHIN_REACH * least_s]
    assert len(hopeful) >= 2
    for estimate in hopeful:
        step_s = simulate_parallel(problem, estimate.parallel)[1].makespan_s
        assert estimate.seconds == pytest.approx(step_s, rel=CLOSE), estimate.parallel
