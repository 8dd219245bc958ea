"""Planned collectives carried out by threads over socket pairs: compiled and in Python."""

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

from hocket.api import plan_collective
from hocket.runtime.collectives import carry as carrying
from hocket.runtime.collectives.carry import Carry, CarryState, Connections, compiled
from hocket.runtime.collectives.layout import layout_of

FORMS = [compiled(), carrying._in_python]


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


def run_all(carries: list[Carry]) -> None:
    states: list[CarryState] = [CarryState.GOES_ON] * len(carries)

    def run(rank: int) -> None:
        states[rank] = carries[rank].go_on(20.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(carries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [CarryState.DONE] * len(carries)


def one(collective: str, gpus: str, given: list[np.ndarray], *, root: str | None = None,
        forms: list | None = None, repeat: int = 1) -> list[np.ndarray]:  # fmt: skip
    """The data of every rank after the collective."""
    plan = plan_collective("dgx1-v100", collective, gpus=gpus, root=root)
    section, count = plan.chosen.section, len(given)
    held = [data.copy() for data in given]
    with joined(count) as connections:
        for sequence in range(repeat):
            carries = []
            for rank in range(count):
                size = given[rank].size
                layout = layout_of(section, rank, size, given[rank].itemsize, 1e9)
                made = Carry(layout, connections[rank], held[rank], sequence=sequence)
                made._call = (forms or [compiled() or FORMS[1]])[rank % len(forms or [0])]
                carries.append(made)
            run_all(carries)
    return held


@pytest.mark.parametrize("gpus", ["0,1", "0,1,2,4", "0-7"])
@pytest.mark.parametrize("size", [0, 1, 7, 40_001])
def test_all_reduce_adds_every_rank_once(gpus: str, size: int) -> None:
    count = len(gpus.split(",")) if "," in gpus else 8
    draw = np.random.default_rng(size)
    given = [draw.integers(-1000, 1000, size).astype(np.float32) for _ in range(count)]
    for found in one("allreduce", gpus, given, repeat=1):
        assert np.array_equal(found, np.sum(given, axis=0))


@pytest.mark.skipif(compiled() is None, reason="no C compiler")
def test_compiled_and_plain_talk_to_each_other_and_give_the_same_bits() -> None:
    draw = np.random.default_rng(0)
    given = [draw.standard_normal(30_000).astype(np.float32) for _ in range(6)]
    both = one("allreduce", "0-5", given, forms=FORMS)
    alone = one("allreduce", "0-5", given, forms=[FORMS[1]])
    for a, b in zip(both, alone, strict=True):
        assert a.tobytes() == b.tobytes() == both[0].tobytes()


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


def made(connections: list[Connections], sizes: list[int], in_python: bool) -> list[Carry]:
    """A sum at the first of three ranks, of data of these sizes."""
    plan = plan_collective("dgx1-v100", "reduce", gpus="0,1,2", root="0")
    # Both others send to it and to nobody else.
    section = next(offer.section for offer in plan.offers if offer.name == "shallow tree")
    return [
        Carry(
            layout_of(section, rank, size, 4, 1e9), connections[rank],
            np.ones(size, dtype=np.float32), sequence=7, in_python=in_python,
        )
        for rank, size in enumerate(sizes)
    ]  # fmt: skip


@pytest.mark.parametrize("in_python", [False, True])
def test_a_rank_that_has_done_its_part_may_leave(in_python: bool) -> None:
    with joined(3) as connections:
        first, *others = made(connections, [10, 10, 10], in_python)
        for carry in others:
            assert carry.go_on(20.0) == CarryState.DONE
            for fd in (fd for fd in carry.connections.fd.tolist() if fd >= 0):
                with socket.socket(fileno=os.dup(fd)) as end:
                    end.shutdown(socket.SHUT_WR)
        assert first.go_on(20.0) == CarryState.DONE
        assert first.data.view(np.float32).tolist() == [3.0] * 10
        again = made(connections, [10, 10, 10], in_python)[0]
        assert again.go_on(20.0) == CarryState.CLOSED


@pytest.mark.parametrize("in_python", [False, True])
def test_a_rank_with_another_message_is_told_from_one_that_comes_late(in_python: bool) -> None:
    with joined(3) as connections:
        first, second, third = made(connections, [10, 10, 11], in_python)
        assert second.go_on(20.0) == third.go_on(20.0) == CarryState.DONE
        assert first.go_on(20.0) == CarryState.GARBLED
        assert int(first.who[0]) == 2
