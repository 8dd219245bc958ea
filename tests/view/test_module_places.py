"""The decision by modules: every op told once, in few lines."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.graph.build import GraphBuilder
from hocket.plan.make import make_problem
from hocket.view.module_places import NEARLY_ALL, module_places

PATHS = ("", "embed", "body", "body.h.0", "body.h.0.mlp", "body.h.1", "body.h.2.mlp", "head")


def problem_of(paths, num_devices=3):
    builder = GraphBuilder("net")
    for number, path in enumerate(paths):
        builder.op(f"op{number}", "aten.mm", flops=1e9, module=path)
    return make_problem(builder.build(), f"{num_devices}xv100-16g")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PATHS), st.integers(0, 2)), min_size=1, max_size=24),
    st.integers(1, 12),
)
def test_every_op_is_told_once_and_by_a_module_that_holds_it(ops, max_lines):
    problem = problem_of([path for path, _ in ops])
    places = module_places(problem, np.array([device for _, device in ops]), max_lines)
    assert sum(place.num_ops for place in places) == len(ops)
    for place in places:
        assert place.share.sum() == pytest.approx(1) or place.last != place.path
        inside = {d for path, d in ops if f"{path}.".startswith(f"{place.path}.")}
        assert place.device in inside | {d for p, d in ops if p == place.path}


def test_neighbours_on_one_device_are_one_line_and_a_divided_module_tells_its_parts():
    paths = [f"h.{layer}.{part}" for layer in range(4) for part in ("attn", "mlp")]
    device_of = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    lines = module_places(problem_of(paths), device_of, max_lines=10)
    assert [(line.path, line.last, line.device) for line in lines] == [
        ("h.0", "h.1", 0),
        ("h.2.attn", "h.2.attn", 0),
        ("h.2.mlp", "h.2.mlp", 1),
        ("h.3", "h.3", 1),
    ]
    short = module_places(problem_of(paths), device_of, max_lines=3)
    assert [(line.path, line.last, line.is_whole) for line in short] == [
        ("h.0", "h.1", True), ("h.2", "h.2", False), ("h.3", "h.3", True),
    ]  # fmt: skip
    assert short[1].share.tolist() == [0.5, 0.5, 0.0]
    assert NEARLY_ALL > 0.9
