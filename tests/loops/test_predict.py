"""The predicted time of a pass, and loops that are too short to be shared."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket.loops import decide
from hocket.loops.choice import BYTES_PER_S, STEP_S


def add_pairs(u, i, x, left, right):
    for n in range(len(x)):
        left[u[n]] += x[n] * right[i[n]]
        right[i[n]] += x[n] * left[u[n]]


def squares(x, out):
    for n in range(len(x)):
        out[n] = x[n] * x[n]


def totals(j, k, w):
    for n in range(len(k)):
        w[j[n]] += 0.5 * w[k[n]]


def grid(num_workers):
    """As many iterations in each tile of a rotation as in every other."""
    u, i = (part.ravel() for part in np.meshgrid(np.arange(60), np.arange(60)))
    data = (u, i, np.ones(3600), np.ones(60), np.ones(60))
    found = hocket.parallel_for(workers=num_workers)(add_pairs).explain(*data)
    return found, found.loops[0].candidate


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_rotation_takes_its_steps_and_what_is_handed_over_between_them(num_workers):
    _, candidate = grid(num_workers)
    hand_overs = num_workers * (num_workers - 1)
    tile_s = 3600 / num_workers**2 * candidate.iteration_s + STEP_S
    handed_s = candidate.moved_bytes / hand_overs / BYTES_PER_S
    expected_s = num_workers * tile_s + (num_workers - 1) * handed_s
    assert candidate.predicted_s == pytest.approx(expected_s, rel=1e-9)
    assert candidate.speed_up == pytest.approx(candidate.work_s / expected_s)
    busy_s = [0.0] * num_workers
    for tile, (start_s, end_s) in zip(candidate.tiling.tiles, candidate.spans_s, strict=True):
        assert start_s >= busy_s[tile.worker] - 1e-12
        busy_s[tile.worker] = end_s
        assert all(candidate.spans_s[other][1] <= start_s + 1e-12 for other in tile.after)


def test_a_buffered_array_is_exchanged_after_every_step():
    data = (np.arange(4000) % 7, np.arange(4000) % 5, np.zeros(7))
    loop = hocket.parallel_for(permit={"w": "buffer"}, workers=2, max_delay=500)
    candidate = loop(totals).explain(*data).loops[0].candidate
    steps = candidate.tiling.num_steps
    tile_s = 4000 / 2 / steps * candidate.iteration_s + STEP_S
    expected_s = steps * tile_s + candidate.moved_bytes / BYTES_PER_S
    assert steps > 1
    assert candidate.predicted_s == pytest.approx(expected_s, rel=1e-6)


def test_the_explanation_describes_the_predicted_pass():
    found, candidate = grid(2)
    (told,) = found.as_dict()["loops"]
    assert told["predicted_s"] == candidate.predicted_s
    assert "x one worker" in str(found)


def test_a_loop_that_one_core_does_sooner_is_not_shared(monkeypatch):
    monkeypatch.setattr(decide, "LEAST_SPEED_UP", 1.0)
    run = hocket.parallel_for(workers=2)(squares)
    short, out = np.arange(1000.0), np.zeros(1000)
    run(short, out)
    np.testing.assert_array_equal(out, short**2)
    assert run.decisions()[0].execution == "serial"
    assert "schedule: serial, compiled" in str(run.explain())
    assert "because one core is predicted to take" in str(run.explain())
    long = np.zeros(10_000_000)
    found = run.explain(long, long.copy())
    assert found.loops[0].schedule == "independent"
    assert found.loops[0].candidate.speed_up > 1.5


def roots(x, out):
    for n in range(len(x)):
        out[n] = np.sqrt(x[n])


def exponentials(x, out):
    for n in range(len(x)):
        out[n] = np.exp(x[n])


def roots_by_number(x, out, u):
    for n in range(len(u)):
        place = u[n]
        out[place] = np.sqrt(x[place])


def predicted_s(function, *more):
    x = np.ones(100_000)
    (loop,) = hocket.parallel_for(workers=2)(function).explain(x, x.copy(), *more).loops
    return loop.candidate.work_s


def test_turns_that_the_processor_takes_beside_each_other_are_predicted_shorter():
    """Measured: a root of each cell of an array takes an eighth of what one after another would."""
    assert 5 * predicted_s(roots) < predicted_s(exponentials)
    assert 5 * predicted_s(roots) < predicted_s(roots_by_number, np.arange(100_000))
