import numpy as np
import pytest
from cost.cost_samples import step_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost.memory import allocated_bytes, with_allocator_rounding

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "counted"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (MIB + 1, MIB + 512),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512),
        (12 * MIB - 1, 12 * MIB),
        (2**40, 2**40),
    ],
)
def test_allocated_bytes_of_known_sizes(size, counted):
    assert allocated_bytes(np.array([size])).tolist() == [counted]


@given(st.integers(0, 2**40))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_allocated_bytes_never_less_and_at_most_a_mebibyte_more(size):
    counted = int(allocated_bytes(np.array([size]))[0])
    assert size <= counted <= size + MIB + 512
    assert counted % 512 == 0


def test_allocator_rounding_keeps_all_but_the_sizes():
    graph = step_graph()
    rounded = with_allocator_rounding(graph)
    assert rounded.tensor_bytes.tolist() == [512] * graph.num_tensors
    assert rounded.op_names == graph.op_names
