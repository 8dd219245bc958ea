"""One way per layer within a limit: the least time of all combinations."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.planners.parallel.partition.choice_kernels import choose
from hocket.planners.parallel.partition.choices import new_choices

OPTION = st.tuples(st.integers(0, 20), st.integers(0, 12))
LAYERS = st.lists(st.lists(OPTION, min_size=1, max_size=3), min_size=1, max_size=7)


def _solve(layers, limit, states_per_layer=0):
    state = new_choices(len(layers), 3, states_per_layer)
    for layer, options in enumerate(layers):
        state.num_ways[layer] = len(options)
        for way, (time_s, size) in enumerate(options):
            state.time_s[layer, way], state.memory_bytes[layer, way] = time_s, size
    return choose(state, len(layers), limit), state


def _brute_force(layers, limit):
    fitting = (chosen for chosen in product(*layers) if sum(size for _, size in chosen) <= limit)
    return min((sum(time_s for time_s, _ in chosen) for chosen in fitting), default=np.inf)


@given(LAYERS, st.integers(0, 60))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_choice_equals_brute_force(layers, limit):
    best_s, state = _solve(layers, limit)
    assert best_s == _brute_force(layers, limit)
    if best_s < np.inf:
        chosen = [options[state.chosen[layer]] for layer, options in enumerate(layers)]
        assert sum(size for _, size in chosen) <= limit
        assert sum(time_s for time_s, _ in chosen) == best_s


def test_choice_among_many_layers_alike_needs_few_states():
    layers = [[(10, 100), (13, 60), (17, 7)]] * 200
    best_s, state = _solve(layers, 9_999, states_per_layer=512)
    assert state.num_inexact[0] == 0
    counts = np.bincount(state.chosen[:200], minlength=3)
    assert counts @ [100, 60, 7] <= 9_999
    assert best_s == counts @ [10, 13, 17]
    # By hand over all numbers of layers that are run in each way.
    by_hand = min(
        10 * a + 13 * b + 17 * (200 - a - b)
        for a in range(201)
        for b in range(201 - a)
        if 100 * a + 60 * b + 7 * (200 - a - b) <= 9_999
    )
    assert best_s == by_hand


def test_choice_without_room_for_states_still_fits():
    rng = np.random.default_rng(3)
    layers = [
        [(int(t), int(b)), (int(t + more), int(b / 3))]
        for t, b, more in rng.integers(1, 10_000, (60, 3))
    ]
    limit = sum(options[0][1] for options in layers) // 2
    exact_s, exact = _solve(layers, limit)
    rough_s, rough = _solve(layers, limit, states_per_layer=1)
    assert exact.num_inexact[0] == 0
    assert rough.num_inexact[0] == 1
    held = sum(options[rough.chosen[layer]][1] for layer, options in enumerate(layers))
    assert held <= limit
    assert exact_s <= rough_s == pytest.approx(exact_s, rel=0.05)
