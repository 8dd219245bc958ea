"""Planned collectives executed by threads over socket pairs."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.api.collectives import plan_collective
from hocket.runtime.collectives.rank_tables import tables_of
from hocket.runtime.collectives.tree_executor import Connections, RunState, TreeRun


@contextlib.contextmanager
def joined(count: int) -> Iterator[list[Connections]]:
    fds = [[-1] * count for _ in range(count)]
    with contextlib.ExitStack() as stack:
        for a, b in itertools.combinations(range(count), 2):
            left, right = socket.socketpair()
            stack.enter_context(left)
            stack.enter_context(right)
            left.setblocking(False)
            right.setblocking(False)
            fds[a][b], fds[b][a] = left.fileno(), right.fileno()
        made = [Connections(row) for row in fds]
        try:
            yield made
        finally:
            for each in made:
                each.close()


def run_all(runs: list[TreeRun]) -> None:
    states: list[RunState] = [RunState.RUNNING] * len(runs)

    def run(rank: int) -> None:
        states[rank] = runs[rank].advance(20.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [RunState.DONE] * len(runs)


def one(collective: str, gpus: str, given: list[np.ndarray], *, root: str | None = None,
        repeat: int = 1) -> list[np.ndarray]:  # fmt: skip
    """The data of every rank after the collective."""
    plan = plan_collective("dgx1-v100", collective, gpus=gpus, root=root)
    section, count = plan.chosen.section, len(given)
    held = [data.copy() for data in given]
    with joined(count) as connections:
        for sequence in range(repeat):
            runs = []
            for rank in range(count):
                size = given[rank].size
                tables = tables_of(section, rank, size, given[rank].itemsize, 1e9)
                runs.append(TreeRun(tables, connections[rank], held[rank], sequence=sequence))
            run_all(runs)
    return held


@pytest.mark.parametrize("gpus", ["0,1", "0,1,2,4", "0-7"])
@pytest.mark.parametrize("size", [0, 1, 7, 40_001])
def test_all_reduce_adds_every_rank_once(gpus: str, size: int) -> None:
    count = len(gpus.split(",")) if "," in gpus else 8
    draw = np.random.default_rng(size)
    given = [draw.integers(-1000, 1000, size).astype(np.float32) for _ in range(count)]
    for found in one("allreduce", gpus, given, repeat=1):
        assert np.array_equal(found, np.sum(given, axis=0))


def test_sums_have_the_same_bits_on_every_rank_and_in_every_run() -> None:
    draw = np.random.default_rng(0)
    given = [draw.standard_normal(30_000).astype(np.float32) for _ in range(6)]
    first, again = (one("allreduce", "0-5", given) for _ in range(2))
    assert {found.tobytes() for found in (*first, *again)} == {first[0].tobytes()}


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 7), min_size=2), st.integers(1, 5000), st.data())
def test_every_collective_ends_as_it_should(gpus, size, data) -> None:
    chosen = ",".join(map(str, sorted(gpus)))
    count, draw = len(gpus), np.random.default_rng(size)
    collective = data.draw(st.sampled_from(["broadcast", "allgather", "reducescatter"]))
    given = [draw.integers(-99, 99, size * count).astype(np.int64) for _ in range(count)]
    root = data.draw(st.sampled_from(sorted(gpus)))
    found = one(collective, chosen, given, root=str(root))
    at = sorted(gpus).index(root)
    for rank in range(count):
        shard = slice(rank * size, (rank + 1) * size)
        if collective == "broadcast":
            assert np.array_equal(found[rank], given[at])
        elif collective == "allgather":
            wanted = [given[r][r * size : (r + 1) * size] for r in range(count)]
            assert np.array_equal(found[rank], np.concatenate(wanted))
        else:
            assert np.array_equal(found[rank][shard], np.sum(given, axis=0)[shard])


def made(connections: list[Connections], sizes: list[int]) -> list[TreeRun]:
    """A sum at the first of three ranks, of data of these sizes."""
    plan = plan_collective("dgx1-v100", "reduce", gpus="0,1,2", root="0")
    # Both others send to it and to nobody else.
    section = next(offer.section for offer in plan.offers if offer.name == "shallow tree")
    return [
        TreeRun(
            tables_of(section, rank, size, 4, 1e9), connections[rank],
            np.ones(size, dtype=np.float32), sequence=7,
        )
        for rank, size in enumerate(sizes)
    ]  # fmt: skip


def test_a_rank_that_has_done_its_part_may_leave() -> None:
    with joined(3) as connections:
        first, *others = made(connections, [10, 10, 10])
        for each in others:
            assert each.advance(20.0) == RunState.DONE
            for fd in (fd for fd in each.connections.fd.tolist() if fd >= 0):
                with socket.socket(fileno=os.dup(fd)) as end:
                    end.shutdown(socket.SHUT_WR)
        assert first.advance(20.0) == RunState.DONE
        assert first.data.view(np.float32).tolist() == [3.0] * 10
        again = made(connections, [10, 10, 10])[0]
        assert again.advance(20.0) == RunState.CLOSED


def test_a_rank_with_another_message_is_told_from_one_that_comes_late() -> None:
    with joined(3) as connections:
        first, second, third = made(connections, [10, 10, 11])
        assert second.advance(20.0) == third.advance(20.0) == RunState.DONE
        assert first.advance(20.0) == RunState.MISMATCH
        assert int(first.failed_peer[0]) == 2
