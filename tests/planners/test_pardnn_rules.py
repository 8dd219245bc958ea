"""The single rules of ParDNN's refinement and of its two heuristics for memory."""

from types import SimpleNamespace

import numpy as np
import pytest
from planners.pardnn_problems import with_memory
from planners.test_pardnn import towers
from simulate.problems import joined, problem_of

from hocket.graph import GraphBuilder, Role
from hocket.graph.graph import Phase
from hocket.planners.placement.pardnn.memory_moves import (
    Candidates,
    _bucket_capacity,
    _BucketCapacity,
    _fewest_moves,
    _move_enough,
    emulate,
    fit_memory,
    relieve,
    split_critical_path,
    spread_variables,
)
from hocket.planners.placement.pardnn.path_refinement import _match

NUM_BUCKETS = MAX_REFUSED = 256


# ── refinement ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sizes", "spans", "matches"),
    [
        ((2, 4), ((0, 5), (4, 9)), True),
        ((4, 2), ((4, 9), (0, 5)), True),
        ((2, 5), ((0, 5), (4, 9)), False),  # more than twice as many ops
        ((5, 2), ((0, 5), (4, 9)), False),
        ((3, 3), ((0, 5), (5, 9)), False),  # one ends where the other starts
        ((3, 3), ((5, 9), (0, 5)), False),
    ],
)
def test_pieces_change_places_only_if_alike_and_at_the_same_time(sizes, spans, matches):
    pieces = SimpleNamespace(
        ptr=np.cumsum([0, *sizes]),
        first=np.array([[first] for first, _ in spans]),
        stop=np.array([[stop] for _, stop in spans]),
    )
    assert bool(_match.function(pieces, 0, 1)) == matches


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def candidates(potential, damage, incoming=None, start_s=0.0, end_s=1.0):
    """One op each."""
    count = len(potential)
    return Candidates(
        ptr=np.arange(count + 1), op=np.arange(count),
        potential_bytes=np.array(potential, dtype=float),
        incoming_bytes=np.array(potential if incoming is None else incoming, dtype=float),
        damage_s=np.array(damage, dtype=float),
        start_s=np.full(count, start_s), end_s=np.full(count, end_s),
    )  # fmt: skip


def capacity(held, memory=100, num_ops=4):
    """Devices that hold so much all the time, a step of one second."""
    held = np.repeat(np.array(held, dtype=float)[:, None], NUM_BUCKETS, axis=1)
    memory_bytes = np.broadcast_to(memory, len(held)).astype(np.int64)
    able, workers = np.ones((len(held), num_ops), dtype=bool), np.ones(len(held), dtype=bool)
    return _BucketCapacity(held, memory_bytes, 1 / NUM_BUCKETS, able, workers)


def test_a_candidate_goes_where_it_just_fits_and_the_peak_is_lowest():
    one = candidates([10], [1.0], incoming=[10])
    assert capacity([90, 90, 91]).lowest_for(one, 0, 0) == 1
    assert capacity([90, 91, 91]).lowest_for(one, 0, 0) == -1
    assert capacity([0, 40, 30, 35]).lowest_for(one, 0, 0) == 2
    # Peaks count as a part of the memory that a device has.
    assert capacity([0, 40, 30], memory=[100, 200, 100]).lowest_for(one, 0, 0) == 1


def test_a_candidate_does_not_go_where_it_cannot_run_or_nothing_should():
    one = candidates([10], [1.0])
    unable = capacity([90, 0, 50])
    unable.can_run[1, 0] = False
    assert unable.lowest_for(one, 0, 0) == 2
    idle = capacity([90, 0, 50])
    idle.is_worker[1] = False
    assert idle.lowest_for(one, 0, 0) == 2


def test_capacity_is_needed_only_while_the_candidate_lives():
    early = candidates([10], [1.0], start_s=0.0, end_s=0.5)
    late = candidates([10], [1.0], start_s=0.5, end_s=1.0)
    found = capacity([90, 0])
    found.held[1, NUM_BUCKETS // 2 :] = 95
    assert (found.lowest_for(early, 0, 0), found.lowest_for(late, 0, 0)) == (1, -1)
    found.move(early, 0, 0, 1)
    assert (found.held[1, : NUM_BUCKETS // 2] == 10).all()
    assert (found.held[1, NUM_BUCKETS // 2 :] == 95).all()
    assert (found.held[0, : NUM_BUCKETS // 2] == 80).all()
    # What ends with the step, or has no length, still has a bucket.
    for start_s in (0.3, 1.0):
        span = found.span(candidates([1], [1.0], start_s=start_s, end_s=start_s), 0)
        assert 0 <= span.start < span.stop <= NUM_BUCKETS + 1


@pytest.mark.parametrize(
    ("excess", "moved"),
    [(5.0, [1]), (30.0, [1]), (31.0, [1, 2]), (1_000.0, [0, 1, 2])],
)
def test_what_frees_most_for_its_damage_goes_first_until_enough_is_gone(excess, moved):
    device_of = np.zeros(4, dtype=np.int32)
    found = candidates([20, 30, 20, 0], [9.0, 1.0, 2.0, 0.0])
    _move_enough(device_of, capacity([100, 0], memory=1_000), found, 0, excess)
    assert np.flatnonzero(device_of).tolist() == moved


def test_the_search_ends_after_many_refusals_in_a_row_only():
    count = 2 * MAX_REFUSED + 10
    potential = np.arange(count, 0.0, -1.0)
    is_odd = np.arange(count) % 2 == 1
    too_large = 1e9
    for fits, num_moved in ((is_odd, is_odd.sum()), (np.arange(count) > MAX_REFUSED, 0)):
        device_of = np.zeros(count, dtype=np.int32)
        incoming = np.where(fits, 1.0, too_large)
        found = candidates(potential, np.ones(count), incoming=incoming)
        _move_enough(device_of, capacity([0, 0], memory=10_000, num_ops=count), found, 0, 1e12)
        assert (device_of == 1).sum() == num_moved


def test_ops_that_have_gone_are_not_moved_again():
    device_of = np.array([1, 0, 0, 0], dtype=np.int32)
    kept = device_of.copy()
    found = candidates([20], [1.0])
    _move_enough(device_of, capacity([100, 0, 0], memory=1_000), found, 0, 5.0)
    assert (device_of == kept).all()


def test_bytes_are_known_in_every_part_of_the_step():
    graph = towers(2, 100)
    problem = problem_of(graph, joined(2), np.array([1.0, 3.0, 1.0, 3.0]))
    run = emulate(problem, np.zeros(4, dtype=np.int32), None)
    found = _bucket_capacity(problem, run)
    times_s, held = run.timeline.memory_curve(0)
    middle_s = (np.arange(NUM_BUCKETS) + 0.5) * run.timeline.makespan_s / NUM_BUCKETS
    at_middle = held[np.searchsorted(times_s, middle_s, side="right") - 1]
    assert (found.held[0] >= at_middle).all()
    assert found.held[0].max() == run.timeline.peak_bytes[0]
    assert (found.held[1] == 0).all()


def test_overflows_are_relieved_round_by_round_and_the_best_round_counts():
    graph = towers(8, 100)
    roomy = problem_of(graph, joined(4), np.ones(graph.num_ops))
    for memory, fits in ((205, True), (150, False)):
        problem = with_memory(roomy, memory)
        start = emulate(problem, np.zeros(graph.num_ops, dtype=np.int32), None)
        found = relieve(problem, start)
        assert found.overflow_bytes < start.overflow_bytes
        assert (found.overflow_bytes == 0) == fits


def test_even_shares_stay_as_they_are():
    graph = towers(4, 100)
    problem = problem_of(graph, joined(2), np.ones(graph.num_ops))
    even = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=np.int32)
    assert spread_variables(problem, even) == []


def test_the_largest_variable_goes_first_and_only_from_the_fullest_device():
    builder = GraphBuilder("sizes")
    sizes = [10, 300, 20]
    variables = [
        builder.tensor(f"w{at}", size, role=Role.PARAMETER) for at, size in enumerate(sizes)
    ]
    for at, variable in enumerate(variables):
        made = builder.op(f"op{at}", reads=[variable])
        builder.tensor(f"t{at}", 1, producer=made, role=Role.ACTIVATION)
    graph = builder.build()
    problem = problem_of(graph, joined(2), np.ones(3))
    found = spread_variables(problem, np.zeros(3, dtype=np.int32))[-1]
    assert found[1] != found[0] == found[2]


def test_what_fits_is_returned_as_it_is():
    graph = towers(4, 100)
    problem = problem_of(graph, joined(2), np.ones(graph.num_ops))
    given_devices = np.zeros(graph.num_ops, dtype=np.int32)
    peak = int(emulate(problem, given_devices, None).timeline.peak_bytes[0])
    assert fit_memory(with_memory(problem, peak), given_devices) is given_devices
    assert fit_memory(with_memory(problem, peak - 1), given_devices) is not given_devices


def test_no_more_variables_move_than_overflow():
    graph = towers(8, 100)
    # One tower too many for the first device: even shares would move four.
    problem = with_memory(problem_of(graph, joined(2), np.ones(graph.num_ops)), 705)
    start = emulate(problem, np.zeros(graph.num_ops, dtype=np.int32), None)
    placements = spread_variables(problem, start.device_of)
    found = _fewest_moves(problem, start, placements)
    assert found.overflow_bytes == 0
    assert np.count_nonzero(found.device_of) == 2
    assert np.count_nonzero(placements[-1]) == 8


def training_chain(num_layers, saved_bytes):
    """Forward layers that each save an activation, then the backward pass that reads them."""
    builder = GraphBuilder("training chain")
    saved, flowing = [], []
    for layer in range(num_layers):
        op = builder.op(f"forward{layer}", reads=flowing)
        flowing = [builder.tensor(f"a{layer}", saved_bytes, producer=op, role=Role.ACTIVATION)]
        saved += flowing
    for layer in reversed(range(num_layers)):
        op = builder.op(f"backward{layer}", reads=[saved[layer], *flowing], phase=Phase.BACKWARD)
        flowing = [builder.tensor(f"g{layer}", 1, producer=op, role=Role.ACTIVATION)]
    return builder.build()


def test_a_dominating_cluster_is_split_where_forward_and_backward_of_a_layer_stay_together():
    graph = training_chain(8, 100)
    problem = with_memory(problem_of(graph, joined(2), np.ones(graph.num_ops)), 610)
    start = emulate(problem, np.zeros(graph.num_ops, dtype=np.int32), None)
    found = split_critical_path(problem, start)
    assert start.overflow_bytes > 0 == found.overflow_bytes
    forward, backward = found.device_of[:8], found.device_of[8:][::-1]
    assert (forward == backward).all()
    assert np.count_nonzero(np.diff(forward)) == 1, "one cut, so one crossing each way"
