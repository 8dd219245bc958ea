from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.classes import split
from hocket.classes.combine import Combiner, OddsCalibration
from hocket.classes.cut import PartCut
from hocket.classes.latency_forecast import FanOut, answer_s, finish_s, places_on, verdict
from hocket.classes.split import larger_budgets, newly_wrong_answers
from hocket.classes.widths import (
    ChannelStream,
    ChosenWidths,
    Floors,
    ResidualBlock,
    WidthLayer,
    WidthModel,
    chosen_widths,
    needed_macs,
)


def chain(widths):
    streams = tuple(ChannelStream(f"s{index}", width, 1) for index, width in enumerate(widths))
    layers = [WidthLayer("first", 3.0 * widths[0], 0, ())]
    for index in range(1, len(widths)):
        into = ((index - 1, 1.0),)
        layers.append(
            WidthLayer(f"l{index}", float(widths[index] * widths[index - 1]), index, into)
        )
    layers.append(WidthLayer("head", 10.0 * widths[-1], -1, ((len(widths) - 1, 1.0),)))
    return WidthModel(streams, tuple(layers))


@given(
    st.lists(st.integers(8, 70), min_size=1, max_size=5), st.floats(0.05, 1.0), st.integers(0, 9)
)
@settings(max_examples=50, deadline=None)
def test_widths_meet_the_budget_or_stand_on_their_floors(widths, share, seed):
    model = chain(widths)
    values = [np.random.default_rng(seed).exponential(size=width) for width in widths]
    floors = Floors()
    budget = share * model.macs(np.ones(len(widths)))
    chosen = chosen_widths(model, values, budget, floors).units
    assert all(floors.floor(s) <= c <= s.units for s, c in zip(model.streams, chosen, strict=True))
    if model.macs(np.array(chosen) / np.array(widths)) > budget:
        blocks = [floors.block(stream) for stream in model.streams]
        gaps = zip(chosen, model.streams, blocks, strict=True)
        assert all((c - 1) // b * b < floors.floor(s) for c, s, b in gaps)


def test_what_is_worth_little_is_cut_first():
    model = chain([32, 32])
    even, skewed = np.ones(32), np.r_[np.ones(8), np.full(24, 1e-3)]
    first, second = chosen_widths(model, [even, skewed], 600, Floors(vector_width=1)).units
    assert first > 2 * second
    assert needed_macs(model, [even, skewed], 0.9) < needed_macs(model, [even, even], 0.9)
    # Half of four: 3 inputs each, and 10 outputs.
    assert needed_macs(chain([4]), [np.ones(4)], 0.5) == 2 * (3 + 10)


def alone(*layers):
    """Streams that nobody reads: units and multiplications of each."""
    streams = tuple(ChannelStream(f"s{n}", units, 1) for n, (units, _) in enumerate(layers))
    made = tuple(WidthLayer(f"s{n}", macs, n, ()) for n, (_, macs) in enumerate(layers))
    return WidthModel(streams, made)


def test_the_last_vector_of_a_width_saves_only_what_fills_it():
    model = alone((20, 1e6), (64, 1e6))
    chosen = chosen_widths(model, [np.ones(20), np.ones(64)], 1.9e6, Floors())
    assert chosen.units == (20, 56)


def test_what_is_worth_more_comes_back_where_one_of_two_fits():
    model = alone((64, 1e6), (64, 1e5), (64, 1e5))
    tails = [np.r_[np.ones(48), np.full(16, each)] for each in (1.0, 0.03, 0.003)]
    assert chosen_widths(model, tails, 0.93e6, Floors(vector_width=16)).units == (48, 64, 48)


def test_layers_that_take_longer_to_read_than_to_compute_are_cut_first():
    """Both layers multiply as often; the second has few positions, and so many weights."""
    layers = [
        WidthLayer(name, 1e6, index, (), weights)
        for index, (name, weights) in enumerate((("wide", 1e3), ("deep", 2.5e5)))
    ]
    model = WidthModel(tuple(ChannelStream(layer.name, 64, 1) for layer in layers), tuple(layers))
    wide, deep = chosen_widths(model, [np.ones(64)] * 2, 1.2e6, Floors()).units
    assert deep <= wide / 2
    assert model.macs(np.array([wide, deep]) / 64) <= 1.2e6


def test_a_stream_that_many_layers_write_to_is_cut_last():
    layers = [WidthLayer(name, 1e6, index, ()) for index, name in enumerate(("few", "many"))]
    streams = (ChannelStream("few", 64, 1, producers=1), ChannelStream("many", 64, 1, producers=6))
    few, many = chosen_widths(
        WidthModel(streams, tuple(layers)), [np.ones(64)] * 2, 1e6, Floors()
    ).units
    assert few < many


def test_what_a_coarse_cut_saves_too_much_comes_back_elsewhere():
    """The heavy stream is cut in blocks that save a lot; the light one fits what is left."""
    layers = (WidthLayer("heavy", 1e6, 0, ()), WidthLayer("light", 1e5, 1, ()))
    model = WidthModel(tuple(ChannelStream(layer.name, 64, 1) for layer in layers), layers)
    values = [np.ones(64), np.r_[np.ones(32), np.full(32, 1e-3)]]
    for budget in np.linspace(3e5, 1.1e6, 17):
        kept = np.array(chosen_widths(model, values, budget, Floors(vector_width=16)).units) / 64
        assert model.macs(kept) <= budget
        for step in ([0.25, 0], [0, 0.25]):
            wider = np.minimum(kept + step, 1)
            assert model.macs(wider) > budget or (wider == kept).all()


def residual(positions=1, readers=4):
    """A stream of 16 that three blocks add to, each through 16 inner channels."""
    macs = 256.0 * positions
    stem = WidthLayer("stem", 3.0 * 16 * positions, 0, ())
    into = [WidthLayer(f"b{k}.in", macs, k + 1, ((0, 1.0),)) for k in range(3)]
    out = [WidthLayer(f"b{k}.out", macs, 0, ((k + 1, 1.0),)) for k in range(3)]
    streams = [
        ChannelStream("stem", 16, readers),
        *(ChannelStream(f"b{k}.in", 16, 1) for k in range(3)),
    ]
    blocks = [ResidualBlock(f"b{k}", 0, (k + 1,), (f"b{k}.in", f"b{k}.out")) for k in range(3)]
    return WidthModel(tuple(streams), (stem, *into, *out), tuple(blocks))


def test_the_block_that_adds_least_is_left_out_where_vectors_cannot_be_narrower():
    model, values = residual(), [np.ones(16)] * 4
    whole = model.macs(np.ones(4))
    influence = [0.3, 0.05, 0.3]
    chosen = chosen_widths(model, values, 0.7 * whole, Floors(vector_width=16), influence)
    assert chosen.omitted == (1,)
    assert chosen.units == (16, 16, 0, 16)
    assert model.macs(np.array(chosen.units) / 16, chosen.omitted) <= 0.7 * whole
    # One of three stays in any case; then channels go, though they save no time.
    least = chosen_widths(model, values, 0.1 * whole, Floors(vector_width=16), influence)
    assert len(least.omitted) == 1
    assert min(least.units[0], least.units[1], least.units[3]) < 16
    assert not chosen_widths(model, values, 0.7 * whole, Floors(vector_width=16)).omitted
    most = chosen_widths(model, values, 0.7 * whole, Floors(vector_width=16), [0.97, 0.95, 0.97])
    assert most.omitted == (1,)


def test_a_whole_block_goes_before_many_are_narrowed_when_its_layers_cost_calls_too():
    """What is cut inside a block is missed by all who read the stream, as the block would be."""
    model, values = residual(10_000, readers=10), [np.ones(16)] * 4
    budget = 0.7 * model.macs(np.ones(4))
    chosen = chosen_widths(model, values, budget, Floors(), [0.2, 0.19, 0.2])
    assert chosen == ChosenWidths((16, 16, 0, 16), (1,))


def test_parts_with_newly_wrong_answers_get_more():
    combiner = Combiner(4, ((0, 1), (2,), (3,)), (OddsCalibration(),) * 3)
    labels = np.array([0, 2, 3, 1])
    whole = np.eye(4)[[0, 2, 3, 0]]
    # The first is wrong now (2 won); the last was wrong before.
    counts = newly_wrong_answers(combiner, np.eye(4)[[2, 2, 3, 0]], whole, labels)
    assert counts.tolist() == [1, 1, 0]
    assert larger_budgets((10, 10, 10), counts, 100) == (14, 14, 10)
    assert larger_budgets((100, 100, 10), counts, 100) is None


def test_an_answer_takes_the_slowest_part_where_every_worker_has_a_core():
    fan_out = FanOut(1e-4, 0)
    assert answer_s([1e-3, 2e-3, 1e-3], 4, fan_out) == pytest.approx(2.1e-3)
    assert answer_s([1e-3, 2e-3, 1e-3], 2, fan_out) == pytest.approx(2.1e-3)
    assert finish_s([2, 2, 2], 2) == 4
    assert places_on([1, 3, 1, 1], 2) == [1, 0, 1, 1]
    assert sorted(places_on([0, 0, 0], 3)) == [0, 1, 2]
    assert "2.5x the work" in verdict(1e-2, 2e-3, [5e5] * 5, 1e6, 8).why
    small = verdict(1e-5, 1e-4, [5e5] * 5, 1e6, 8)
    assert not small.pays
    assert "too small" in small.why
    assert "only 2 cores for 5 workers" in verdict(1e-3, 1e-3, [5e5] * 5, 1e6, 2).why


def test_rounds_that_would_change_no_part_are_left_out(monkeypatch):
    def cut_to(material, classes, budget):
        return PartCut(classes, ((0,) if budget < 25 else (0, 1),))

    monkeypatch.setattr(split, "cut_to", cut_to)
    cuts, counts = [cut_to(None, (each,), 10) for each in (0, 1)], np.array([3.0, 0.0])
    material = SimpleNamespace(whole_macs=100.0)
    assert split._budgets_that_change(material, cuts, (10.0, 10.0), counts) == (
        pytest.approx(10 * 1.4**3), 10.0,
    )  # fmt: skip
    assert split._budgets_that_change(material, cuts, (10.0, 10.0), 0 * counts) is None
