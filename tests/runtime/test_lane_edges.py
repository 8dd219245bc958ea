"""Lanes of a graph that was captured on one stream: nothing is overwritten before it is read."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hocket.planners.waves.waiting import Edge
from hocket.runtime.train.graph_nodes import Arrow, calls_of, new_arrows
from hocket.runtime.train.lane_edges import NEVER, Allocations, allocations_of, lane_edges

STREAM, MARKS, OTHER = 7, 8, 9


def entry(action: str, addr: int, size: int, stream: int = STREAM) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream}


def mark() -> list[dict[str, Any]]:
    return [entry("alloc", 10**9, 1, MARKS), entry("free_completed", 10**9, 1, MARKS)]


def test_record_of_the_allocator_says_which_call_was_given_what() -> None:
    trace = [
        *mark(), entry("alloc", 0, 999),  # a call of an earlier capture
        *mark(), entry("alloc", 0, 513), entry("alloc", 5120, 1, OTHER),
        *mark(), entry("alloc", 2048, 1), entry("free_requested", 0, 513),
        entry("free_completed", 0, 513), entry("alloc", 0, 512),
    ]  # fmt: skip
    found = allocations_of(trace, {STREAM}, MARKS, 2)
    assert found.start.tolist() == [0, 2048, 0]
    assert found.stop.tolist() == [1024, 2560, 512]
    assert found.given_to.tolist() == [0, 1, 1]
    assert found.dropped_by.tolist() == [1, NEVER, NEVER]


def test_record_that_misses_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 calls"):
        allocations_of(mark(), {STREAM}, MARKS, 2)


def allocations(*rows: tuple[int, int, int, int]) -> Allocations:
    return Allocations(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def test_a_call_waits_for_who_dropped_its_memory_in_the_other_lane_only() -> None:
    taken = allocations((0, 8, 0, 1), (8, 16, 1, 2), (0, 16, 3, NEVER), (0, 8, 4, NEVER))
    assert lane_edges([0, 0, 0, 1, 0], [], taken, [True] * 5) == [Edge(2, 3)]


def test_calls_that_do_nothing_hand_their_waits_on() -> None:
    taken = allocations((0, 8, 0, 1), (0, 8, 2, NEVER))
    assert lane_edges([0, 0, 1, 1], [], taken, [True, False, False, True]) == [Edge(0, 3)]


def test_later_waits_that_say_no_more_are_left_out() -> None:
    told = [Edge(1, 2), Edge(0, 3), Edge(1, 4), Edge(2, 4)]
    assert lane_edges([0, 0, 1, 1, 1], told, allocations(), [True] * 5) == [Edge(1, 2)]


def test_lanes_that_are_apart_wait_once_for_many_calls() -> None:
    """One lane is ten calls behind the other, and each of its calls needs the same of the other."""
    order = [(0, n) for n in range(10)]
    order += [each for n in range(90) for each in ((0, 10 + n), (1, n))]
    order += [(1, n) for n in range(90, 100)]
    at = {call: number for number, call in enumerate(order)}
    told = [Edge(at[0, n], at[1, n]) for n in range(100)]
    found = lane_edges([lane for lane, _ in order], told, allocations(), [True] * 200)
    assert len(found) <= 11
    assert all(edge.awaited < edge.waiting for edge in found)
    passed = -1
    awaited = {edge.waiting: edge.awaited for edge in found}
    for n in range(100):
        passed = max(passed, awaited.get(at[1, n], -1))
        assert passed >= at[0, n]


def test_nodes_of_calls_are_found_also_where_a_call_forks() -> None:
    # Call 0: 1 -> 2; call 1 adds nothing; call 2: 3 and 4 side by side, joined by what follows.
    arrows = [Arrow(1, 2), Arrow(2, 3), Arrow(2, 4), Arrow(3, 5), Arrow(4, 5, b"\1" * 8)]
    calls = calls_of(arrows, [(2,), (2,), (3, 4), (5,)])
    assert [set(first) for first in calls.first] == [{1}, set(), {3, 4}, {5}]
    assert calls.last == [(2,), (), (3, 4), (5,)]
    assert {(a.src, a.dst) for a in calls.between} == {(2, 3), (2, 4), (3, 5), (4, 5)}
    assert Arrow(4, 5, b"\1" * 8) in calls.between
    assert new_arrows(calls, [(0, 3), (2, 3)]) == [Arrow(2, 5), Arrow(3, 5), Arrow(4, 5)]


def test_a_chain_over_two_streams_is_taken_apart_too() -> None:
    # Calls of lanes 0, 1, 0, 1; each waits for the one before, and for the last of its own stream.
    arrows = [Arrow(1, 2), Arrow(1, 3), Arrow(2, 3), Arrow(3, 4), Arrow(2, 4)]
    calls = calls_of(arrows, [(1,), (2,), (3,), (4,)])
    assert calls.first == calls.last == [(1,), (2,), (3,), (4,)]
    assert sorted(calls.between) == sorted(arrows)


def test_any_order_that_the_lanes_allow_leaves_memory_as_it_was_captured() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        lane, reads, trace, writes = captured(draw)
        taken = allocations_of(trace, {STREAM}, MARKS, len(lane))
        edges = lane_edges(lane, [], taken, [True] * len(lane))
        for _ in range(10):
            assert misreading(draw, lane, reads, writes, edges) == []


def captured(draw: random.Random) -> tuple[list[int], list[Any], list[Any], list[Any]]:
    """Calls of two lanes that read what their own lane holds, by one first-fit allocator."""
    lane: list[int] = []
    reads: list[Any] = []
    writes: list[Any] = []
    trace: list[Any] = []
    held: list[list[tuple[int, int]]] = [[], []]
    for _ in range(60):
        here = draw.randrange(2)
        trace += mark()
        lane.append(here)
        size = draw.choice((512, 1024, 2048))
        taken = sorted(held[0] + held[1])
        address = next(
            at for at in (0, *(stop for _, stop in taken))
            if all(stop <= at or start >= at + size for start, stop in taken)
        )  # fmt: skip
        trace.append(entry("alloc", address, size))
        reads.append(list(held[here]))
        writes.append((address, address + size))
        held[here].append((address, address + size))
        while len(held[here]) > draw.randrange(1, 6):
            gone = held[here].pop(draw.randrange(len(held[here])))
            trace.append(entry("free_completed", gone[0], gone[1] - gone[0]))
    return lane, reads, trace, writes


def misreading(
    draw: random.Random, lane: list[int], reads: list[Any], writes: list[Any], edges: list[Edge]
) -> list[int]:
    """Calls, in some order that their waits allow, that find something else than their lane
    wrote."""
    before: dict[int, set[int]] = {call: set() for call in range(len(lane))}
    for here in (0, 1):
        for first, second in pairwise(at for at in range(len(lane)) if lane[at] == here):
            before[second].add(first)
    for edge in edges:
        before[edge.waiting].add(edge.awaited)
    memory: dict[int, int] = {}
    wrote: dict[tuple[int, int], list[int]] = {}
    for call, block in enumerate(writes):
        wrote.setdefault(block, []).append(call)
    done: set[int] = set()
    found = []
    while len(done) < len(lane):
        ready = [c for c in before if c not in done and before[c] <= done]
        call = draw.choice(ready)
        for start, stop in reads[call]:
            writer = max(w for w in wrote[start, stop] if w < call and lane[w] == lane[call])
            if {memory[at] for at in range(start, stop, 512)} != {writer}:
                found.append(call)
        memory.update(dict.fromkeys(range(*writes[call], 512), call))
        done.add(call)
    return found
