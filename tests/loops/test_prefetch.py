"""Rows that tiles fetch: enough for the same bits, and no more than the body can name."""

from __future__ import annotations

import numpy as np
import pytest
from loops.catalogue import LOOPS
from loops.harness import Looked

from hocket.loops import prefetch
from hocket.loops.backends.ray_workers import RayLoad, RayMember
from hocket.loops.backends.row_store import RemoteRows, RowStore
from hocket.loops.job import exchange, finish


def plain(text, options):
    """A generated kernel in plain Python, which takes no time to compile."""
    space = {"OPTIONS_": {}}
    exec(text.replace("from numba import njit", "def njit(**_): return lambda f: f"), space)
    return space["kernel"]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    pytest.importorskip("zmq")
    from hocket.loops.backends import inturn, ray_workers

    for module in (prefetch, ray_workers):
        monkeypatch.setattr(module, "compiled", plain)
    monkeypatch.setattr("hocket.loops.job.compiled", plain)
    return inturn


def jobs(name):
    """The job of a loop of the catalogue, twice, on arrays of their own."""
    function, data, _, _, permit = LOOPS[name]
    for _ in range(2):
        looked = Looked(function, data, permit=permit, workers=2).record()
        runner, decision, values, owners = looked.decisions[0]
        if decision.way != "parallel":
            return
        own = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in values.items()}
        own |= {n: own[o] for n, o in owners.items()}
        yield runner.job(decision, own, owners)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(LOOPS))
def test_tiles_with_fetched_rows_give_the_bits_of_tiles_in_turn(name, uncompiled):
    pair = list(jobs(name))
    if not pair:
        return
    expected, job = pair
    in_turn = uncompiled.run_in_turn(expected)
    shared = {n: job.values[n] for n in sorted(job.written) if n not in job.replicated}
    shared = {n: np.ascontiguousarray(array) for n, array in shared.items()}
    with RowStore(shared) as store:
        load = RayLoad(
            job.source, job.options, dict(job.aliases), job.replicated,
            {n: (array.shape, array.dtype.str) for n, array in shared.items()},
            job.find_prefetch(), store.address, store.token,
        )  # fmt: skip
        members = [RayMember() for _ in range(job.tiling.num_workers)]
        for member in members:
            given = {n: v for n, v in job.values.items() if n not in shared}
            member.load(load, given | {n: job.replica(n) for n in job.replicated}, job.tiling.order)
            for array in shared:
                member.values[array].view(np.uint8)[...] = 85  # no row is there by chance
        replicas, step, results = [member.own for member in members], 0, []
        for tile in job.tiling.tiles:
            if tile.step != step:
                step = tile.step
                exchange(job, replicas)
            leading = job.leading(tile)[len(job.tiling.order) :]
            results.append(members[tile.worker].run(leading))
        exchange(job, replicas)
        finish(job, replicas)
        for member in members:
            member.remote.close()
    assert results == [tuple(each or ()) for each in in_turn]
    for array in job.written:
        found = shared.get(array, job.values[array])
        np.testing.assert_array_equal(found, expected.values[array])


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


def test_the_store_answers_nobody_without_its_token():
    with RowStore({"a": np.arange(3.0)}) as store:
        stranger = RemoteRows(store.address, "guessed", {"a": np.zeros(3)})
        stranger._socket.send_multipart([b"guessed", b"r", np.arange(3).tobytes()])
        stranger._socket.send_multipart([store.token.encode(), b"r"])
        mine = np.zeros(3)
        known = RemoteRows(store.address, store.token, {"a": mine})
        known.read({"a": np.array([2])})
        assert mine.tolist() == [0, 0, 2]
        assert not stranger._socket.poll(0)
        stranger.close()
        known.close()
