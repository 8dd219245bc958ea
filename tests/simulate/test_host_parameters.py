"""Which updates visit the device together, and in how much room."""

import random

from hocket.simulate.rewriting.host_parameters import (
    NUM_STAGING_BUFFERS,
    PIECE_BYTES,
    runs_within,
    state_chunks,
)
from hocket.simulate.rewriting.updates import Update


def test_runs_have_every_neighbour_once_and_are_as_long_as_they_may_be():
    """Steps of an optimizer are taken run by run: one parameter in two would be updated twice."""
    draws = random.Random(0)
    for _ in range(200):
        sizes = [draws.randint(0, 12) for _ in range(draws.randint(0, 12))]
        runs = runs_within(sizes, 10)
        assert [at for start, stop in runs for at in range(start, stop)] == [*range(len(sizes))]
        for start, stop in runs:
            assert stop == start + 1 or sum(sizes[start:stop]) <= 10
            assert stop == len(sizes) or sum(sizes[start : stop + 1]) > 10


def _update(op, num_bytes, *, is_rounded=False):
    """Of a parameter with two moments."""
    return Update(
        op=op, block=0, readers=frozenset({0}), parameters=(op,), roots=(op,), state=(),
        gradients=(), parameter_bytes=num_bytes, aligned_bytes=num_bytes,
        staging_bytes=3 * num_bytes,
        state_bytes=2 * num_bytes, gradient_bytes=num_bytes, rounded_bytes=num_bytes // 2,
        is_rounded=is_rounded, sent_bytes=num_bytes, host_bytes=0,
    )  # fmt: skip


def test_visitors_take_turns_in_room_for_the_largest_and_for_its_gradient_in_full():
    half = PIECE_BYTES // 2
    plain = {0: [_update(0, half), _update(1, half), _update(2, half)]}
    pieces, room = state_chunks(plain)
    assert pieces == {0: [[0, 1], [2]]}
    assert room == NUM_STAGING_BUFFERS * 3 * PIECE_BYTES
    rounded = {0: [_update(0, half), _update(1, half), _update(2, half, is_rounded=True)]}
    assert state_chunks(rounded) == (pieces, room + half)
    # What is larger than a piece comes in parts.
    assert state_chunks({0: [_update(0, 4 * PIECE_BYTES)]}) == ({0: [[0]]}, room)
    assert state_chunks({}) == ({}, 0)
