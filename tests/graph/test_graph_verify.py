"""verify_graph finds every single thing made wrong, and says where."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.graph import Graph, GraphBuilder, Phase, Role, StatedTimes, verify_graph


def small_graph() -> Graph:
    builder = GraphBuilder("small")
    weight = builder.tensor("weight", 100, role=Role.PARAMETER)
    first = builder.op("first", "mm", reads=[weight], rng_order=0, module="m", signature="s")
    x = builder.tensor("x", 10, producer=first)
    second = builder.op("second", "relu", reads=[x], rng_order=1)
    y = builder.tensor("y", 10, producer=second, alias_of=x)
    done = builder.tensor("done", 0, producer=second, role=Role.CONTROL)
    third = builder.op(
        "third", "mm", reads=[x, y, done], phase=Phase.BACKWARD, partner=first, group=1
    )
    builder.tensor("gradient", 100, producer=third, role=Role.GRADIENT)
    stated = StatedTimes({"*": np.array([1.0, 2.0, np.inf])}, np.zeros(5))
    return builder.build(stated=stated)


def changed(field: str, index: int, value: object) -> Graph:
    graph = small_graph()
    column = getattr(graph, field)
    if isinstance(column, tuple):
        return replace(graph, **{field: (*column[:index], value, *column[index + 1 :])})
    array = column.copy()
    array[index] = value
    return replace(graph, **{field: array})


# Ops: first, second, third. Tensors: weight, x, y, done, gradient.
MUTATIONS = [
    ("op_names", 1, "first", "'first'"),
    ("op_names", 1, "", "op 1 is empty"),
    ("op_names", 1, "se\x1b[31mcond", "cannot be printed: 'se\\x1b"),
    ("op_names", 1, "nul\0", "cannot be printed"),
    ("op_names", 1, "\ud800", "cannot be printed"),
    ("op_names", 1, "a\u202eb", "cannot be printed"),
    ("op_names", 1, "n" * 20_000, "20000 characters"),
    ("tensor_names", 2, "x", "'x'"),
    ("kinds", 1, "mm", "'mm'"),
    ("modules", 0, "a\nb", "cannot be printed"),
    ("signatures", 0, "", "signature 0 is empty"),
    ("op_kind", 1, 9, "kind of op 'second' is 9"),
    ("op_kind", 1, -1, "kind of op 'second' is -1"),
    ("op_module", 2, 1, "module of op 'third' is 1"),
    ("op_signature", 2, -2, "signature of op 'third' is -2"),
    ("op_phase", 0, 3, "phase of op 'first' is 3"),
    ("op_dtype", 0, 99, "dtype of op 'first' is 99"),
    ("flops", 1, -1.0, "flops of op 'second'"),
    ("flops", 1, np.nan, "flops of op 'second'"),
    ("flops", 1, np.inf, "flops of op 'second'"),
    ("bytes_touched", 2, -5, "bytes_touched of op 'third'"),
    ("workspace_bytes", 2, 2**51, "workspace_bytes of op 'third'"),
    ("partner", 2, 5, "partner of op 'third' is 5"),
    ("partner", 1, 2, "partner of op 'second' is 2"),
    ("group", 0, -2, "group of op 'first'"),
    ("rng_order", 2, 1, "rng_order of op 'second'"),
    ("tensor_bytes", 1, -1, "bytes of tensor 'x'"),
    ("tensor_bytes", 1, 2**60, "bytes of tensor 'x'"),
    ("tensor_bytes", 3, 7, "tensor 'done' has the role control"),
    ("tensor_role", 4, Role.PARAMETER, "tensor 'gradient' has the role parameter"),
    ("tensor_role", 0, Role.ACTIVATION, "tensor 'weight' has the role activation"),
    ("tensor_role", 1, 50, "role of tensor 'x' is 50"),
    ("tensor_producer", 4, 3, "producer of tensor 'gradient' is 3"),
    ("tensor_producer", 1, 1, "op 'second' reads 'x' before it is made"),
    ("tensor_producer", 4, 0, "tensor 'gradient' comes after"),
    ("alias_of", 2, 0, "tensor 'y' aliases 'weight'"),
    ("alias_of", 2, 77, "alias_of of tensor 'y' is 77"),
    ("alias_of", 2, 2, "tensor 'y' aliases 'y'"),
    ("alias_of", 0, 0, "tensor 'weight' is an alias of itself"),
    ("reads", 2, 66, "op 'third' reads tensor 66"),
    ("reads", 3, 1, "op 'third' reads 'x' twice"),
    ("reads", 1, 4, "op 'second' reads 'gradient' before it is made"),
    ("read_ptr", 1, 4, "reads of op 'second' end before they start"),
    ("read_ptr", 0, 1, "table of reads"),
    ("read_ptr", 3, 3, "table of reads"),
]


@pytest.mark.parametrize(("field", "index", "value", "message"), MUTATIONS)
def test_verify_names_what_is_wrong(field, index, value, message):
    with pytest.raises(InputFileError) as caught:
        verify_graph(changed(field, index, value))
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("op_s", "tensor_s", "message"),
    [
        ([1.0, -1.0, 1.0], [0.0] * 5, "stated time on '*' of op 'second'"),
        ([1.0, np.nan, 1.0], [0.0] * 5, "stated time on '*' of op 'second'"),
        ([1.0, 1e30, 1.0], [0.0] * 5, "stated time on '*' of op 'second'"),
        ([1.0, 1.0], [0.0] * 5, "stated time on '*' has 2 entries"),
        ([1.0] * 3, [0.0, np.inf, 0, 0, 0], "stated transfer time of tensor 'x'"),
        ([1.0] * 3, [0.0] * 4, "stated transfer time has 4 entries"),
    ],
)
def test_verify_names_wrong_stated_times(op_s, tensor_s, message):
    stated = StatedTimes({"*": np.array(op_s)}, np.array(tensor_s))
    with pytest.raises(InputFileError) as caught:
        verify_graph(replace(small_graph(), stated=stated))
    assert message in caught.value.message
    assert caught.value.hint


def test_verify_refuses_tensors_that_alias_each_other_in_a_ring():
    builder = GraphBuilder("ring")
    for index in range(3):
        builder.tensor(f"t{index}", 1, role=Role.BUFFER, alias_of=(index + 1) % 3)
    builder.op("a")
    with pytest.raises(InputFileError, match="'t0' is an alias of itself through others"):
        builder.build()


@pytest.mark.parametrize(("alias", "base"), [(0, 1), (1, 0)])
def test_verify_refuses_an_alias_between_what_is_given_and_what_the_first_op_makes(alias, base):
    builder = GraphBuilder("apart")
    builder.tensor("given", 1, role=Role.BUFFER)
    builder.tensor("made", 1, producer=builder.op("first"))
    graph = builder.build()
    aliases = graph.alias_of.copy()
    aliases[alias] = base
    with pytest.raises(InputFileError, match="which its producer does not read"):
        verify_graph(replace(graph, alias_of=aliases))


def test_verify_accepts_a_long_chain_of_aliases_before_the_step():
    builder = GraphBuilder("chain of views")
    for index in range(100):
        builder.tensor(f"t{index}", 1, role=Role.BUFFER, alias_of=index + 1 if index < 99 else -1)
    builder.op("a")
    assert builder.build().held_bytes.sum() == 1


def test_verify_refuses_a_sum_of_bytes_that_would_overflow():
    builder = GraphBuilder("huge")
    op = builder.op("a")
    for index in range(5000):
        builder.tensor(f"t{index}", 2**50, producer=op)
    with pytest.raises(InputFileError, match="together exceed"):
        builder.build()


ARRAY_FIELDS = [
    f.name for f in fields(Graph) if isinstance(getattr(small_graph(), f.name), np.ndarray)
]


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(ARRAY_FIELDS),
            st.integers(0, 10),
            st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 8),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_verify_raises_nothing_else_whatever_the_arrays_hold(mutations):
    graph = small_graph()
    for field, index, value in mutations:
        array = getattr(graph, field).copy()
        kept = np.iinfo(array.dtype) if array.dtype.kind == "i" else None
        array[index % len(array)] = max(kept.min, min(kept.max, value)) if kept else value
        graph = replace(graph, **{field: array})
    try:
        verify_graph(graph)
    except InputFileError:
        return
    # What passes is a graph that can be walked in every direction.
    assert len(graph.users) == len(graph.reads)
    assert np.all(graph.edges[0] < graph.edges[1])
    assert sum(len(graph.made_by(op)) for op in range(3)) == np.sum(graph.tensor_producer >= 0)
