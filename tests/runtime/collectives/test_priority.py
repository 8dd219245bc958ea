"""Propagation by priority between processes, and how layers are found and cut."""

from __future__ import annotations

import forked
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime.collectives.ranks import priority

from hocket.base.errors import UsageError
from hocket.priority import wrap
from hocket.runtime.collectives.priority_sync import _layers, slices


def test_training_by_priority_is_synchronous_training_bit_for_bit() -> None:
    found = forked.answers(2, priority, HOCKET_CLUSTER="2xv100-16g")
    assert found[0] == found[1]


@given(
    st.lists(st.integers(0, 5000).map(lambda n: 4 * n), min_size=1, max_size=20),
    st.lists(st.floats(0.1, 1.0), min_size=1, max_size=5),
    st.integers(4, 9999),
)
def test_slices_cover_every_layer_once_and_no_other(sizes, shares, slice_bytes) -> None:
    chunks, ends = slices(sizes, shares, slice_bytes=slice_bytes)
    at = 0
    for size, (first, stop) in zip(sizes, ends, strict=True):
        for _, start, end in chunks[first:stop]:
            assert start == at
            assert start < end <= start + slice_bytes
            at = end
        size -= sum(end - start for _, start, end in chunks[first:stop])
        assert size == 0
    carried = [sum(e - s for t, s, e in chunks if t == tree) for tree in range(len(shares))]
    most = max(c / s for c, s in zip(carried, shares, strict=True))
    least = min(c / s for c, s in zip(carried, shares, strict=True))
    assert most - least <= slice_bytes / min(shares) + 1e-6


def test_a_part_that_is_not_called_itself_is_waited_for_by_the_module_that_uses_it() -> None:
    attention = torch.nn.MultiheadAttention(8, 2)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), attention)
    layers, waits = _layers(net, [net, net[0], attention])
    assert [len(layer.parameters) for layer in layers] == [2, 4]
    assert waits == {net[0]: [0], attention: [1]}


def test_without_a_process_group_the_hint_says_what_to_call() -> None:
    net = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="not initialised"):
        wrap(net, torch.optim.SGD(net.parameters()))
