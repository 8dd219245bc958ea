"""Rows that tiles fetch: enough for the same bits, and no more than the body can name."""

from __future__ import annotations

import numpy as np
import pytest
from loops.catalogue import LOOPS
from loops.harness import Looked

from hocket.loops import prefetch
from hocket.loops.job import exchange, finish, run_in_turn


def plain(text, options):
    """A generated kernel in plain Python, which takes no time to compile."""
    space = {"OPTIONS_": {}}
    exec(text.replace("from numba import njit", "def njit(**_): return lambda f: f"), space)
    return space["kernel"]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    for module in ("prefetch", "job"):
        monkeypatch.setattr(f"hocket.loops.{module}.compiled", plain)


def jobs(name):
    """The job of a loop of the catalogue, twice, on arrays of their own."""
    function, data, _, _, permit = LOOPS[name]
    for _ in range(2):
        looked = Looked(function, data, permit=permit, workers=2).record()
        runner, decision, values, owners = looked.decisions[0]
        if decision.execution != "parallel":
            return
        own = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in values.items()}
        own |= {n: own[o] for n, o in owners.items()}
        yield runner.job(decision, own, owners)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(LOOPS))
def test_tiles_with_fetched_rows_give_the_bits_of_tiles_in_turn(name):
    pair = list(jobs(name))
    if not pair:
        return
    expected, job = pair
    in_turn = run_in_turn(expected)
    shared = {n: job.values[n] for n in sorted(job.written) if n not in job.replicated}
    kernel, found = job.kernel(), job.find_prefetch()
    owns = [{n: job.replica(n) for n in job.replicated} for _ in range(job.tiling.num_workers)]
    step, results = 0, []
    for tile in job.tiling.tiles:
        if tile.step != step:
            step = tile.step
            exchange(job, owns)
        # Arrays of a worker elsewhere: nothing is in them but the rows that were fetched.
        away = {n: np.full_like(array, 85) for n, array in shared.items()}
        values = {n: away.get(job.aliases.get(n, n), v) for n, v in job.values.items()}
        values |= {n: owns[tile.worker][o] for n, o in job.aliases.items() if o in job.replicated}
        values |= owns[tile.worker]
        given = {n: values[n] for n in job.source.arguments}
        rows = prefetch.touched_rows(found, away, job.leading(tile), given)
        for n, places in rows.items():
            away[n][places] = shared[n][places]
        results.append(tuple(kernel(*job.leading(tile), *given.values()) or ()))
        for n, places in rows.items():
            shared[n][places] = away[n][places]
    exchange(job, owns)
    finish(job, owns)
    assert results == [tuple(each or ()) for each in in_turn]
    for array in job.written:
        np.testing.assert_array_equal(job.values[array], expected.values[array])


def test_only_rows_that_a_tile_names_are_fetched():
    job = next(jobs("mf_scalar"))
    found = job.find_prefetch()
    assert set(found.arrays) == set(job.written)
    for tile in job.tiling.tiles:
        rows = found.rows(job.leading(tile), job.values)
        first, last = tile.bounds
        (order,) = job.tiling.order
        for name, index in (("W", "u"), ("H", "i")):
            expected = np.unique(job.values[index][order[first:last]])
            np.testing.assert_array_equal(rows[name], expected)


def pairs(u, x, out, total):
    for n in range(len(u)):
        a, out[n] = u[n], 2.0 * x[n]
        total[a] = 0.5 * total[a] + x[n]


def test_a_statement_that_writes_is_no_part_of_the_search_for_rows():
    data = np.arange(12) % 5, np.ones(12), np.zeros(12), np.zeros(5)
    looked = Looked(pairs, data, workers=2).record()
    runner, decision, values, owners = looked.decisions[0]
    job = runner.job(decision, values, owners)
    values["out"][:] = 0.0
    found = job.find_prefetch()
    if found is not None:
        for tile in job.tiling.tiles:
            found.rows(job.leading(tile), values)
    assert not values["out"].any()
