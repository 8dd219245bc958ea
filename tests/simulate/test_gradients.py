"""Orders in which gradients travel: bounds, closed forms and what P3 promises."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.planners.communication.priority import choose_propagation
from hocket.simulate.gradients import (
    GradientChannel,
    GradientOrder,
    LayerWork,
    lower_bound_s,
    step_s,
)

FIFO = GradientOrder("fifo", by_priority=False, crosses=False)
LAYERS = st.lists(
    st.builds(
        LayerWork,
        st.floats(0.001, 1.0),
        st.floats(0.001, 1.0),
        st.integers(0, 10**7),
    ),
    min_size=1,
    max_size=8,
)


def priority(slice_bytes: float) -> GradientOrder:
    return GradientOrder("p3", True, True, slice_bytes=slice_bytes)


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.floats(1e5, 1e8))
def test_no_order_beats_the_bound_and_priority_never_loses_to_wait_free(layers, rate_bps) -> None:
    channel = GradientChannel(rate_bps)
    bound_s, fifo_s = lower_bound_s(layers, channel), step_s(layers, channel, FIFO)
    late = GradientOrder("late", by_priority=False, crosses=False, overlaps=False)
    sliced_s = step_s(layers, channel, priority(1e5))
    assert bound_s <= sliced_s * (1 + 1e-9)
    assert sliced_s <= fifo_s * (1 + 1e-9)
    assert fifo_s <= step_s(layers, channel, late) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(LAYERS, st.floats(1e5, 1e8))
def test_after_backward_and_with_a_barrier_all_times_add_up(layers, rate_bps) -> None:
    late = GradientOrder("late", by_priority=False, crosses=False, overlaps=False)
    computes_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    travels_s = sum(layer.gradient_bytes for layer in layers) / rate_bps
    found_s = step_s(layers, GradientChannel(rate_bps), late)
    assert found_s == pytest.approx(computes_s + travels_s)


def test_a_large_last_layer_is_where_priority_gains_and_slices_alone_do_not() -> None:
    layers = [LayerWork(0.05, 0.1, 10**5)] * 9 + [LayerWork(0.05, 0.1, 5 * 10**6)]
    channel = GradientChannel(sum(layer.gradient_bytes for layer in layers) / 1.5)
    fifo_s = step_s(layers, channel, FIFO)
    only_sliced = GradientOrder("slices", by_priority=False, crosses=False, slice_bytes=1e5)
    assert step_s(layers, channel, only_sliced) == pytest.approx(fifo_s, rel=0.02)
    assert fifo_s / step_s(layers, channel, priority(1e5)) > 1.2


def test_the_choice_is_off_where_there_is_nothing_to_gain() -> None:
    layers = [LayerWork(0.05, 0.1, 10**6)] * 10
    assert choose_propagation(layers, GradientChannel(inf)).chosen.how.name == "wait-free"
    short = choose_propagation(layers, GradientChannel(10**7 / 0.25))
    assert short.chosen.how.name == "wait-free"
    assert "17 %" in short.why
    layers = [LayerWork(0.025, 0.05, 10**6)] * 20
    even = choose_propagation(layers, GradientChannel(2 * 10**7 / 1.5))
    assert even.chosen.how.crosses
    assert even.gain() > 1.2
    assert even.chosen.step_s <= 1.1 * even.lower_bound_s
