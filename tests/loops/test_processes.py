"""Worker processes give the bits of the threads, and a dead one is named."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from loops.catalogue import LOOPS

import hocket
from hocket.base.errors import RunError
from hocket.loops.backends import processes


@pytest.fixture(scope="module", autouse=True)
def ended_team():
    yield
    if processes._team_of.cache_info().currsize:
        processes.team(2).close()
        processes._team_of.cache_clear()


def copied(data):
    return tuple(value.copy() if isinstance(value, np.ndarray) else value for value in data)


@pytest.mark.parametrize("name", ["mf_biases", "lda_buffered", "scratch", "greatest_and_sum"])
def test_processes_give_the_bits_of_threads(name):
    function, data, _, _, permit = LOOPS[name]
    found = []
    for backend in ("threads", "processes"):
        arguments = copied(data)
        run = hocket.parallel_for(workers=2, backend=backend, permit=permit)(function)
        found.append((run(*arguments), arguments))
    (one, threads), (other, separate) = found
    assert one == other
    for left, right in zip(threads, separate, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_killed_worker_is_named_and_the_arrays_stay_as_they_were():
    function, data, *_ = LOOPS["mf_biases"]
    run = hocket.parallel_for(workers=2, backend="processes")(function)
    run(*copied(data))
    os.kill(processes.team(2).group.process_ids[1], signal.SIGKILL)
    arguments = copied(data)
    with pytest.raises(RunError, match="worker 1 was killed by signal 9"):
        run(*arguments)
    for left, right in zip(arguments, data, strict=True):
        np.testing.assert_array_equal(left, right)
    run(*arguments)  # a new team is started


def test_an_error_of_a_worker_is_the_error_of_the_loop():
    run = hocket.parallel_for(workers=2, backend="processes")(_outside)
    with pytest.raises(IndexError):
        run(np.arange(6), np.zeros(3))


def _outside(u, out):
    for n in range(len(u)):
        out[u[n]] = n
