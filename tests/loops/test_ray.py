"""Ray workers, on a real local cluster: the bits of threads, and a killed worker."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from loops.catalogue import LOOPS

import hocket

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    from local_ray import local_ray

    with local_ray():
        yield


def copied(data):
    return tuple(value.copy() if isinstance(value, np.ndarray) else value for value in data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mf_biases", "lda_buffered"])
def test_ray_gives_the_bits_of_threads(name):
    function, data, _, _, permit = LOOPS[name]
    found = []
    for backend in ("threads", "ray"):
        arguments = copied(data)
        hocket.parallel_for(workers=2, backend=backend, permit=permit)(function)(*arguments)
        found.append(arguments)
    for left, right in zip(*found, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_is_named_and_its_pass_repeated(monkeypatch, caplog):
    from hocket.loops.backends import ray_workers

    function, data, *_ = LOOPS["mf_biases"]
    expected, arguments = copied(data), copied(data)
    hocket.parallel_for(workers=2)(function)(*expected)
    original, kills = ray_workers._run_tiles, []

    def killing(engine, job, members, *rest):
        if not kills:
            kills.append(True)
            engine.kill(members[1])
        return original(engine, job, members, *rest)

    monkeypatch.setattr(ray_workers, "_run_tiles", killing)
    with caplog.at_level(logging.WARNING, logger="hocket.loops"):
        hocket.parallel_for(workers=2, backend="ray")(function)(*arguments)
    assert "loop worker 1 died" in caplog.text
    for left, right in zip(arguments, expected, strict=True):
        np.testing.assert_array_equal(left, right)


def towards(j, k, x, w):
    for n in range(len(j)):
        w[j[n]] -= w[k[n]] - x[n]


@pytest.mark.filterwarnings("ignore")
def test_arrays_through_tables_are_those_of_threads_where_there_is_no_delay(monkeypatch):
    from hocket.loops.backends import tabled

    monkeypatch.setattr(tabled, "STALENESS", 0)
    j, k, x = np.arange(300) % 17, np.arange(300) % 13, np.linspace(-1, 1, 300)
    found = []
    for backend in ("threads", "ray"):
        w = np.zeros(20)
        run = hocket.parallel_for(
            permit={"w": "revise"}, workers=1, max_delay=50, rate=0.3, backend=backend
        )(towards)
        run(j, k, x, w)
        run(j, k, x, w)
        found.append(w)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[0].any()
