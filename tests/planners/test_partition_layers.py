"""Layers over stages: near the optimum where one stage is on each rank, within memory always."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.partition_cases import brute_force, layer_costs

from hocket.base.errors import HocketError, NoFeasiblePlanError, UsageError
from hocket.cost.parallel.costs import StageCosts
from hocket.planners.parallel.layer_partition import (
    LayerCosts,
    PipelineRanks,
    in_flight_counts,
)
from hocket.planners.parallel.layer_partition import partition_layers as partition
from hocket.planners.parallel.schedules import make_schedule
from hocket.simulate.pipeline import simulate_pipeline


def partition_layers(
    costs, *, kinds, memory_bytes, in_flight, num_microbatches, rank_of_stage=None, reorder=False
):
    ranks = PipelineRanks(
        device_types=kinds, memory_bytes=memory_bytes, in_flight=in_flight,
        num_microbatches=num_microbatches, rank_of_stage=tuple(rank_of_stage or range(len(kinds))),
    )  # fmt: skip
    return partition(costs, ranks, reorder=reorder)


def _uniform(num_layers, *, num_kinds=1, speed=(1.0,), state=1, kept=1):
    """Layers that take 1 s forward and 2 s backward on a device of speed 1."""
    scale = 1.0 / np.array(speed[:num_kinds])
    return LayerCosts(
        forward_s=np.ones((num_layers, 1)) * scale,
        backward_s=np.ones((num_layers, 1)) * 2.0 * scale,
        activation_bytes=np.full(num_layers, kept),
        state_bytes=np.full(num_layers, state),
        send_s=np.zeros(num_layers),
        counts=np.ones(num_layers, dtype=bool),
    )


@given(layer_costs(), st.data())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_partition_is_found_wherever_one_fits(costs, data):
    num_kinds = costs.forward_s.shape[1]
    kinds = data.draw(st.lists(st.integers(0, num_kinds - 1), min_size=1, max_size=4))
    memory = data.draw(st.lists(st.integers(2, 40), min_size=num_kinds, max_size=num_kinds))
    num_microbatches = data.draw(st.integers(1, 9))
    in_flight = [min(num_microbatches, len(kinds) - i) for i in range(len(kinds))]
    if data.draw(st.booleans()):
        counts = st.integers(1, num_microbatches)
        in_flight = data.draw(st.lists(counts, min_size=len(kinds), max_size=len(kinds)))
    reorder = data.draw(st.booleans())
    best = brute_force(costs, kinds, memory, in_flight, num_microbatches, reorder)
    arguments = {
        "kinds": kinds, "memory_bytes": memory, "in_flight": in_flight,
        "num_microbatches": num_microbatches, "reorder": reorder,
    }  # fmt: skip
    if best is None:
        with pytest.raises(HocketError):
            partition_layers(costs, **arguments)
        return
    found = partition_layers(costs, **arguments)
    assert best * (1 - 1e-9) <= found.step_s <= 1.25 * best
    assert sum(found.layers) == costs.counts.sum()
    assert min(found.layers) >= 1
    assert sorted(found.device_types) == sorted(kinds)
    for peak, kind in zip(found.peak_bytes, found.device_types, strict=True):
        assert peak <= memory[kind]


def random_case(seed):
    """A case made so that most have cuts that fit, and several to choose from."""
    rng = np.random.default_rng(seed)
    num_stages, num_layers = int(rng.integers(2, 5)), int(rng.integers(5, 9))
    num_kinds = int(rng.integers(1, 3))
    costs = LayerCosts(
        forward_s=rng.integers(1, 9, (num_layers, num_kinds)).astype(float),
        backward_s=rng.integers(1, 18, (num_layers, num_kinds)).astype(float),
        activation_bytes=rng.integers(0, 4, num_layers),
        state_bytes=rng.integers(0, 4, num_layers),
        send_s=rng.integers(0, 6, num_layers).astype(float),
        counts=np.ones(num_layers, dtype=bool),
    )
    kinds = rng.integers(0, num_kinds, num_stages).tolist()
    num_microbatches = int(rng.integers(num_stages, 12))
    in_flight = [num_stages - stage for stage in range(num_stages)]
    layers_bytes = costs.state_bytes.sum() + in_flight[0] * costs.activation_bytes.sum()
    memory = [int(layers_bytes * rng.uniform(0.6, 1.2)) for _ in range(num_kinds)]
    return costs, kinds, memory, in_flight, num_microbatches, bool(seed % 2)


def test_nearly_all_partitions_are_the_best():
    ratios = []
    for seed in range(100):
        costs, kinds, memory, in_flight, num_microbatches, reorder = random_case(seed)
        best_s = brute_force(costs, kinds, memory, in_flight, num_microbatches, reorder)
        found = partition_layers(
            costs, kinds=kinds, memory_bytes=memory, in_flight=in_flight,
            num_microbatches=num_microbatches, reorder=reorder,
        )  # fmt: skip
        ratios.append(found.step_s / best_s)
    assert max(ratios) <= 1.05
    assert np.mean(np.array(ratios) <= 1 + 1e-9) >= 0.97


def _simulated(schedule, costs, starts, kinds):
    """The step of cuts in the event simulator."""
    spans = list(zip(pairwise(starts), kinds, strict=True))
    forward = tuple(costs.forward_s[a:b, kind].sum() for (a, b), kind in spans)
    half = tuple(costs.backward_s[a:b, kind].sum() / 2 for (a, b), kind in spans)
    whole = (0,) * len(spans)
    stages = StageCosts(
        forward_s=forward, input_gradient_s=half, weight_gradient_s=half,
        send_s=tuple(costs.send_s[stop - 1] for stop in starts[1:-1]), activation_bytes=whole,
        weight_gradient_bytes=whole, state_bytes=whole, after_s=(0.0,) * len(spans),
    )  # fmt: skip
    return simulate_pipeline(schedule, stages).makespan_s


@pytest.mark.parametrize("seed", range(8))
def test_no_other_cuts_are_much_better_in_the_simulator(seed):
    rng = np.random.default_rng(seed)
    num_ranks, num_microbatches = int(rng.integers(2, 5)), int(rng.integers(2, 30))
    costs = _uniform(10, num_kinds=2, speed=(1.0, 1.7))
    costs.forward_s[:] *= rng.uniform(0.5, 1.5, (10, 1))
    costs.backward_s[:] = 2.0 * costs.forward_s
    costs.send_s[:] = rng.choice([0.0, 0.05])
    kinds = rng.integers(0, 2, num_ranks).tolist()
    schedule = make_schedule("1f1b", num_ranks, num_microbatches, 1)
    found = partition_layers(
        costs, kinds=kinds, memory_bytes=[1000, 1000], num_microbatches=num_microbatches,
        in_flight=in_flight_counts(schedule).tolist(),
    )  # fmt: skip
    simulated_s = _simulated(schedule, costs, found.starts, kinds)
    assert simulated_s == pytest.approx(found.step_s, rel=0.02)
    best_s = min(
        _simulated(schedule, costs, (0, *inner, 10), kinds)
        for inner in combinations(range(1, 10), num_ranks - 1)
    )
    assert simulated_s <= 1.02 * best_s


def test_faster_devices_get_more_layers():
    costs = _uniform(12, num_kinds=2, speed=(1.0, 2.0))
    found = partition_layers(
        costs, kinds=[0, 1], memory_bytes=[100, 100], in_flight=[2, 1], num_microbatches=64
    )
    assert found.layers == (4, 8)
    assert found.step_s == pytest.approx(12.0 + 12.0 + 63 * 12.0)


def test_memory_moves_layers_to_later_stages():
    costs = _uniform(12, kept=1, state=0)
    found = partition_layers(
        costs, kinds=[0] * 3, memory_bytes=[8], in_flight=[3, 2, 1], num_microbatches=64
    )
    assert found.layers[0] <= 2
    assert max(found.peak_bytes) <= 8


def test_reordering_puts_the_large_memory_first():
    costs = _uniform(6, num_kinds=2, speed=(1.0, 1.0), kept=1, state=0)
    arguments = {
        "memory_bytes": [3, 6], "in_flight": [2, 1], "num_microbatches": 8, "reorder": True
    }  # fmt: skip
    found = partition_layers(costs, kinds=[0, 1], **arguments)
    assert found.device_types == (1, 0)
    assert found.layers == (3, 3)


def test_embedding_and_output_are_balanced_against_layers():
    costs = _uniform(14)
    costs.counts[[0, -1]] = False
    costs.backward_s[-1, 0] = 8.0
    found = partition_layers(
        costs, kinds=[0] * 4, memory_bytes=[100], in_flight=[4, 3, 2, 1], num_microbatches=32
    )
    assert sum(found.layers) == 12
    assert found.layers[-1] == min(found.layers)


@pytest.mark.parametrize("num_layers", [24, 26, 30])
def test_interleaved_stages_are_even_over_ranks(num_layers):
    ranks = [0, 1, 2, 3] * 2
    found = partition_layers(
        _uniform(num_layers), kinds=[0] * 4, memory_bytes=[10**6], in_flight=[8] * 8,
        num_microbatches=16, rank_of_stage=ranks,
    )  # fmt: skip
    per_rank = np.bincount(ranks, weights=found.layers)
    assert per_rank.max() == -(-num_layers // 4)
    if num_layers == 24:
        # The closed form of interleaved schedules: (m + (p - 1) / v) times the time of a rank.
        assert found.step_s == pytest.approx((16 + 3 / 2) * 18.0)


def test_interleaved_ranks_share_memory_between_their_stages():
    costs = _uniform(8, kept=0)
    costs.state_bytes[:] = [5, 1, 1, 1, 1, 1, 1, 1]
    found = partition_layers(
        costs, kinds=[0, 0], memory_bytes=[8], in_flight=[1] * 4, num_microbatches=4,
        rank_of_stage=[0, 1, 0, 1],
    )  # fmt: skip
    assert max(found.peak_bytes) <= 8


def test_interleaved_ranks_without_memory_are_refused():
    with pytest.raises(NoFeasiblePlanError, match="lacks"):
        partition_layers(
            _uniform(8, kept=0, state=3), kinds=[0, 0], memory_bytes=[11], in_flight=[1] * 4,
            num_microbatches=4, rank_of_stage=[0, 1, 0, 1],
        )  # fmt: skip


@given(layer_costs(max_layers=8, max_kinds=1), st.integers(6, 60), st.integers(1, 6))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_interleaved_partition_is_legal_and_fits(costs, memory, num_microbatches):
    arguments = {
        "kinds": [0, 0], "memory_bytes": [memory], "in_flight": [3, 2, 2, 1],
        "num_microbatches": num_microbatches, "rank_of_stage": [0, 1, 1, 0],
    }  # fmt: skip
    try:
        found = partition_layers(costs, **arguments)
    except HocketError:
        return
    assert sum(found.layers) == costs.counts.sum()
    assert min(found.layers) >= 1
    held, kept = np.zeros(2), costs.activation_bytes
    for stage, (rank, count) in enumerate(zip([0, 1, 1, 0], [3, 2, 2, 1], strict=True)):
        span = slice(*found.starts[stage : stage + 2])
        held[rank] += count * kept[span].sum() + costs.state_bytes[span].sum()
    assert max(held) <= memory
    assert held.tolist() == list(found.peak_bytes)


def test_in_flight_counts_are_those_of_one_forward_one_backward():
    schedule = make_schedule("1f1b", 4, 6, 1)
    assert in_flight_counts(schedule).tolist() == [4, 3, 2, 1]


def test_error_names_the_stage_that_lacks_memory():
    with pytest.raises(NoFeasiblePlanError, match="stage 1 lacks 2 B"):
        partition_layers(
            _uniform(4, state=0, kept=1), kinds=[0, 0], memory_bytes=[1], in_flight=[2, 1],
            num_microbatches=4,
        )  # fmt: skip


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(UsageError, match="too few"):
        partition_layers(
            _uniform(4), kinds=[0] * 9, memory_bytes=[100], in_flight=[1] * 9, num_microbatches=4
        )
