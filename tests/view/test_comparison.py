"""Each of ``hocket plan`` and ``hocket parallel`` says when the other one could serve better."""

import pytest

from hocket.api.parallel_configs import make_training
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.planners.candidates import Candidate, Comparison
from hocket.view import comparison as view

_FITS = Candidate(
    planner="any", plan=None, timeline=None, feasible=True, reason="", plan_seconds=0.0
)


def _comparison(problem, *, fits=True):
    return Comparison(
        problem=problem, candidates=(_FITS,), chosen=0 if fits else None, why="because"
    )


@pytest.mark.parametrize(("on", "is_told"), [("4xa100-80g", False), ("2xa100-80g+2xt4", True)])
def test_parallel_points_to_plan_where_devices_are_unequal(on, is_told):
    problem = make_training("gpt-3.6b", on, 8, dtype="float16")
    assert ("hocket plan" in view.elsewhere(_comparison(problem))) == is_told


@pytest.mark.parametrize(
    ("on", "fits", "is_transformer", "is_told"),
    [
        ("4xa100-80g", True, True, False),
        ("4xa100-80g", False, True, True),
        ("16xa100-80g", True, True, True),
        ("16xa100-80g", False, False, False),
    ],
)
def test_plan_points_to_parallel_for_transformers_on_many_devices_or_where_nothing_fits(
    on, fits, is_transformer, is_told, monkeypatch
):
    if is_transformer:
        monkeypatch.setattr(view, "degrees_of", lambda graph: (2,))
    comparison = _comparison(make_problem(generate("chain", 5), on), fits=fits)
    assert ("hocket parallel" in view.elsewhere(comparison)) == is_told
