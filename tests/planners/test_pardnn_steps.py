"""Slicing and mapping of ParDNN: equal to a plain twin, and what they promise."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planners import pardnn_oracle as oracle
from planners.pardnn_problems import tied_problems
from simulate.problems import joined, problem_of

from hocket.base.errors import NoFeasiblePlanError
from hocket.graph import GraphBuilder, Role
from hocket.kernels.containers import table
from hocket.planners.placement.pardnn.mapping_ledger import axis_of
from hocket.planners.placement.pardnn.path_mapping import map_paths, spans_of
from hocket.planners.placement.pardnn.path_slices import slice_paths
from hocket.planners.placement.pardnn.unit_work import Devices, devices_of, units, work_of
from hocket.planners.tables import mean_transfer_s

UNIT_S = 2.0**-6


def rounded(seconds):
    """Multiples of a power of two, so that sums in any order are the same."""
    return table(np.round(np.asarray(seconds) / UNIT_S) * UNIT_S, np.float64)


def weighed(problem):
    """Devices and weights whose sums are exact."""
    try:
        devices = devices_of(problem, units(problem))
    except NoFeasiblePlanError:
        assume(False)
    devices = Devices(rounded(devices.op_s), rounded(devices.speed))
    assume(devices.speed.sum() > 0)
    work = work_of(problem, units(problem), devices)
    names = ("op_s", "child_s", "tensor_s")
    return devices, work._replace(**{name: rounded(getattr(work, name)) for name in names})


@given(problem=tied_problems(max_ops=25), num_primary=st.integers(1, 5))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_slicing_equals_its_plain_twin(problem, num_primary):
    _, work = weighed(problem)
    slices, cut = slice_paths(work, num_primary), oracle.slice_paths(work, num_primary)
    assert slices.path.tolist() == cut.path
    assert slices.head.tolist() == [trunk[0] for trunk in cut.trunks]
    assert slices.tail.tolist() == [trunk[-1] for trunk in cut.trunks]
    assert np.flatnonzero(slices.is_trunk).tolist() == sorted(
        op for trunk in cut.trunks for op in trunk
    )
    assert slices.num_primary == cut.num_primary
    assert slices.top_s.tolist() == cut.top_s


@given(problem=tied_problems(max_ops=25))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_mapping_equals_its_plain_twin(problem):
    devices, work = weighed(problem)
    num_primary = int((devices.speed > 0).sum())
    cut = oracle.slice_paths(work, num_primary)
    mapping = map_paths(problem, work, devices, slice_paths(work, num_primary))
    device, num_merged = oracle.map_paths(problem.graph, work, devices, cut)
    assert mapping.ledger.device.tolist() == device
    assert mapping.num_merged == num_merged


@given(problem=tied_problems(max_ops=25), num_primary=st.integers(1, 5))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_every_op_is_in_one_path_and_trunks_are_paths(problem, num_primary):
    _, work = weighed(problem)
    slices = slice_paths(work, num_primary)
    assert slices.path.min() == 0
    assert slices.path.max() == slices.num_paths - 1
    edges = set(zip(*(ends.tolist() for ends in problem.graph.edges), strict=True))
    for path in range(slices.num_paths):
        trunk = np.flatnonzero((slices.path == path) & slices.is_trunk).tolist()
        assert trunk[0] == slices.head[path]
        assert trunk[-1] == slices.tail[path]
        assert all(pair in edges for pair in pairwise(trunk))
    for unit in range(int(work.units.of.max()) + 1):
        assert len(set(slices.path[work.units.of == unit].tolist())) == 1


@given(problem=tied_problems(max_ops=25))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_mapping_keeps_units_together_where_they_can_run(problem):
    devices, work = weighed(problem)
    mapping = map_paths(problem, work, devices, slice_paths(work, int((devices.speed > 0).sum())))
    device = mapping.ledger.device
    assert np.isfinite(devices.op_s[device, np.arange(len(device))]).all()
    for unit in range(int(work.units.of.max()) + 1):
        assert len(set(device[work.units.of == unit].tolist())) == 1


@given(problem=tied_problems(max_ops=25))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_books_agree_with_the_placement_that_they_lead_to(problem):
    devices, work = weighed(problem)
    mapping = map_paths(problem, work, devices, slice_paths(work, int((devices.speed > 0).sum())))
    ledger, graph = mapping.ledger, problem.graph
    num_touching = np.zeros_like(ledger.num_touching)
    for op, device in enumerate(ledger.device):
        num_touching[graph.reads_of(op), device] += 1
        num_touching[list(graph.made_by(op)), device] += 1
    assert np.array_equal(ledger.num_touching, num_touching)
    assert (work.op_s >= 0).all()


@given(problem=tied_problems(max_ops=25), num_primary=st.integers(1, 4))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_spans_hold_the_ops_of_their_path(problem, num_primary):
    devices, work = weighed(problem)
    slices = slice_paths(work, num_primary)
    axis = axis_of(work, devices, slices.top_s)
    first, stop = spans_of(work, slices, axis)
    position = axis.position[:, None]
    inside = (first[slices.path] <= position) & (position < stop[slices.path])
    assert (inside.sum(axis=1) == 1).all(), "in one of two spans that do not overlap"


@given(problem=tied_problems(max_ops=15))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_edges_weigh_the_tensors_that_the_reader_reads(problem):
    try:
        work = work_of(problem, units(problem), devices_of(problem, units(problem)))
    except NoFeasiblePlanError:
        return
    tensor_s, graph = mean_transfer_s(problem), problem.graph
    by_child = []
    for op in range(graph.num_ops):
        for edge in range(work.child_ptr[op], work.child_ptr[op + 1]):
            child = int(work.child[edge])
            sent = [t for t in graph.reads_of(child) if graph.tensor_producer[t] == op]
            assert work.child_s[edge] == pytest.approx(tensor_s[sent].sum())
            by_child.append((op, child))
    by_parent = [
        (int(work.parent[edge]), op)
        for op in range(graph.num_ops)
        for edge in range(work.parent_ptr[op], work.parent_ptr[op + 1])
    ]
    assert by_child == sorted(by_parent)


def two_chains(length):
    """Two chains with heavy tensors inside and one light tensor from the first to the second."""
    builder = GraphBuilder("chains")
    for chain in range(2):
        last = None
        for index in range(length):
            reads = [last] if last is not None else []
            op = builder.op(f"{chain}.{index}", reads=reads)
            last = builder.tensor(f"t{chain}.{index}", 8, producer=op, role=Role.ACTIVATION)
    return builder.build()


def test_two_chains_become_two_primary_paths_on_two_devices():
    graph = two_chains(5)
    problem = problem_of(graph, joined(2), np.ones(graph.num_ops))
    devices = devices_of(problem, units(problem))
    work = work_of(problem, units(problem), devices)
    slices = slice_paths(work, 2)
    assert slices.num_paths == slices.num_primary == 2
    device = map_paths(problem, work, devices, slices).ledger.device
    assert device.tolist() == [0] * 5 + [1] * 5
