"""Addresses: no two blocks overlap while both live, and published cases come out as published."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.memory.step_graphs import graph_of_edges, olla

from hocket.base.errors import UsageError
from hocket.planners.memory import Intervals, lifetimes, pack
from hocket.planners.memory.storages import storages_of

DATA = Path(__file__).parents[4] / "shared" / "data" / "memory"
BLOCKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 9)), max_size=40)


def intervals(rows):
    size, start, end = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Intervals(size, start, end)


@given(BLOCKS)
@settings(max_examples=60, deadline=None)
def test_blocks_that_live_together_never_overlap(rows):
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    blocks = Intervals(columns[0], columns[1], columns[1] + columns[2])
    found = pack(blocks)
    ends = found.address + blocks.num_bytes
    assert found.slab_bytes == ends.max(initial=0) >= found.peak_bytes
    for one in range(len(rows)):
        for other in range(one):
            together = (
                blocks.start[one] <= blocks.end[other] and blocks.start[other] <= blocks.end[one]
            )
            apart = ends[one] <= found.address[other] or ends[other] <= found.address[one]
            assert apart or not together
    live = [
        blocks.num_bytes[(blocks.start <= now) & (now <= blocks.end)].sum() for now in range(60)
    ]
    assert found.peak_bytes == max(live)


def test_a_block_that_ends_before_it_starts_is_refused():
    with pytest.raises(UsageError, match="ends before it starts"):
        pack(intervals([(8, 3, 2)]))


@pytest.mark.skipif(not DATA.exists(), reason="needs the shared cases")
def test_ollas_cases_are_packed_without_waste():
    cases = olla(DATA)
    for case in cases["address_packing"]:
        found = pack(intervals([row[1:] for row in case["blocks"]]))
        assert found.slab_bytes == case["max_address"]
    entry = cases["graphs"]["pathological_address"]
    graph = graph_of_edges("pathological", entry["edges"])
    order = np.array([graph.op_names.index(name) for name in entry["fixed_order"]])
    found = pack(lifetimes(storages_of(graph), order, alignment=1))
    assert found.slab_bytes == 10
    assert found.waste == 0
