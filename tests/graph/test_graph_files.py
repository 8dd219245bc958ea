"""hocket.graph/1: round trips, deterministic bytes, and an error that names the key."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from graph.random_graphs import PlainGraph, plain_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.graph import (
    FAMILIES,
    Graph,
    StatedTimes,
    generate,
    graph_from_dict,
    graph_to_dict,
    read_graph,
    write_graph,
)


def assert_equal(one: Graph, other: Graph) -> None:
    for spec in fields(Graph):
        if spec.name == "stated":
            continue
        a, b = getattr(one, spec.name), getattr(other, spec.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, spec.name
            assert np.array_equal(a, b), spec.name
        else:
            assert a == b, spec.name
    assert one.content_hash == other.content_hash


@settings(derandomize=True, deadline=None, max_examples=100)
@given(plain_graphs(), st.text(st.characters(codec="utf-8"), max_size=5))
def test_graph_survives_a_round_trip_through_json(plain: PlainGraph, text):
    graph = plain.build(list(range(len(plain.reads))))
    graph = replace(graph, meta={"model": text, "batch": [1, 2.5, None, True]})
    assert_equal(graph_from_dict(json.loads(json.dumps(graph_to_dict(graph))), "x"), graph)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_graph_file_keeps_everything(tmp_path, family, suffix):
    graph = generate(family, 200, 1)
    path = tmp_path / f"g{suffix}"
    write_graph(graph, path)
    assert_equal(read_graph(path), graph)
    assert path.read_bytes().startswith(b"\x1f\x8b") == (suffix == ".json.gz")


def test_graph_file_keeps_stated_times_with_infinity_as_null(tmp_path):
    graph = generate("chain", 3)
    stated = StatedTimes({"*": np.array([0.1, np.inf, 1e-7]), "cpu": np.zeros(3)}, None)
    write_graph(replace(graph, stated=stated), tmp_path / "g.json")
    assert json.loads((tmp_path / "g.json").read_text())["stated"]["op_s"]["*"] == [0.1, None, 1e-7]
    again = read_graph(tmp_path / "g.json").stated
    assert again is not None
    assert again.tensor_s is None
    assert again.op_s["*"].tolist() == [0.1, np.inf, 1e-7]


def test_graph_file_bytes_are_the_same_every_time(tmp_path):
    graph = generate("layered", 300, 7)
    graph = replace(graph, meta={"b": 1, "a": 2})
    for suffix in ("json", "json.gz"):
        write_graph(graph, tmp_path / f"one.{suffix}")
        again = replace(read_graph(tmp_path / f"one.{suffix}"), meta={"a": 2, "b": 1})
        write_graph(again, tmp_path / f"two.{suffix}")
        one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two


def test_graph_file_leaves_out_columns_that_are_all_default():
    data = graph_to_dict(generate("chain", 5))
    assert set(data["ops"]) == {"name", "kind", "flops", "bytes_touched"}
    assert set(data["tensors"]) == {"name", "bytes", "producer", "role"}


def test_read_graph_accepts_a_gzipped_file_under_any_name(tmp_path):
    graph = generate("chain", 5)
    write_graph(graph, tmp_path / "g.json")
    (tmp_path / "h.txt").write_bytes(gzip.compress((tmp_path / "g.json").read_bytes()))
    assert read_graph(tmp_path / "h.txt").content_hash == graph.content_hash


def _at(data: dict, path: str) -> tuple[dict, str]:
    *parents, last = path.split(".")
    for key in parents:
        data = data[key]
    return data, last


WRONG_VALUES = [
    ("schema", "hocket.graph/2", "schema is 'hocket.graph/2'", "expected 'hocket.graph/1'"),
    ("name", 5, "name is 5", "expected a text"),
    ("meta", [], "meta is []", "expected an object"),
    ("kinds", "op", "kinds is 'op'", "expected a list"),
    ("kinds", ["op", 3], "kinds[1] is 3", "expected a text"),
    ("ops", [], "ops is []", "expected an object"),
    ("ops.name", ["a", None, "c"], "ops.name[1] is None", "expected a text"),
    ("ops.flops", [1, 2], "ops.flops has 2 entries, expected 3", "one entry per op"),
    ("ops.flops", [1, True, 2], "ops.flops[1] is True", "a number from 0"),
    ("ops.flops", [1, "2", 2], "ops.flops[1] is '2'", "a number from 0"),
    ("ops.flops", [1, -2.0, 2], "ops.flops[1] is -2.0", "a number from 0"),
    ("ops.flops", [1, 10**400, 2], "ops.flops[1] is 1000", "a number from 0"),
    ("ops.kind", [0, 0, 1], "kind of op 'op2' is 1", "from 0 to 0"),
    ("ops.kind", [0, 0.0, 0], "ops.kind[1] is 0.0", "an integer from 0"),
    ("ops.phase", [0, False, 0], "ops.phase[1] is False", "an integer from 0 to 2"),
    ("ops.bytes_touched", [0, 10**30, 0], "ops.bytes_touched[1] is 1000", "an integer"),
    ("ops.partner", [-1, 3, -1], "partner of op 'op1' is 3", "to 2"),
    ("ops.rng_order", [0, -2, 1], "ops.rng_order[1] is -2", "an integer from -1"),
    ("tensors.bytes", {}, "tensors.bytes is {}", "expected a list"),
    ("tensors.bytes", [1.5, 1, 1], "tensors.bytes[0] is 1.5", "an integer"),
    ("tensors.role", [0, 0, 9], "tensors.role[2] is 9", "an integer from 0 to 7"),
    ("tensors.producer", [0, 1, 5], "producer of tensor 'op2.out' is 5", "to 2"),
    ("tensors.alias_of", [-1, -1, 2], "'op2.out' aliases 'op2.out'", "a view reads"),
    ("reads.ptr", [0, 1, 2], "reads.ptr has 3 entries, expected 4", "one entry"),
    ("reads.ptr", [0, 1, 1, 9], "table of reads", "read_ptr starts at 0"),
    ("reads.tensor", [0, 7], "op 'op2' reads tensor 7", "of the same graph"),
    ("reads.tensor", [0, -1], "reads.tensor[1] is -1", "an integer from 0"),
    ("reads.tensor", [2, 0], "op 'op1' reads 'op2.out' before it is made", "a cycle has no such"),
    ("stated", {"op_s": {"*": [1, 2, float("inf")]}}, "not a JSON number", ""),
    ("stated", {"op_s": {"*": [1, 2]}}, "stated.op_s['*'] has 2 entries", "one entry"),
    ("stated", {"op_s": {"*": [1, 2, -1]}}, "stated.op_s['*'][2] is -1", "a number from 0"),
    ("stated", {"op_s": [1]}, "stated.op_s is [1]", "an object"),
    ("stated", {"op_s": {}, "tensor_s": [0, 0, None]}, "tensor_s[2] is None", "a number"),
    ("stated", {}, "stated has no key 'op_s'", "add 'op_s'"),
]  # fmt: skip


def three_ops() -> dict:
    graph = generate("chain", 3)
    data = graph_to_dict(replace(graph, name="three"))
    data["tensors"] = {"name": ["op0.out", "op1.out", "op2.out"], "bytes": [1, 1, 1],
                       "producer": [0, 1, 2]}  # fmt: skip
    data["reads"] = {"ptr": [0, 0, 1, 2], "tensor": [0, 1]}
    return data


@pytest.mark.parametrize(("path", "value", "message", "hint"), WRONG_VALUES)
def test_read_graph_names_the_key_that_is_wrong(tmp_path, path, value, message, hint):
    data = three_ops()
    section, key = _at(data, path)
    section[key] = value
    file = tmp_path / "g.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputFileError) as caught:
        read_graph(file)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.hint
    assert caught.value.where == str(file)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("kind", "did you mean 'kinds'?"),
        ("ops.flop", "did you mean 'flops'?"),
        ("tensors.byte", "did you mean 'bytes'?"),
        ("reads.tensors", "did you mean 'tensor'?"),
        ("qqqq", "known: "),
    ],
)
def test_read_graph_refuses_unknown_keys_with_a_suggestion(tmp_path, path, hint):
    data = three_ops()
    section, key = _at(data, path)
    section[key] = 1
    (tmp_path / "g.json").write_text(json.dumps(data))
    with pytest.raises(InputFileError, match="unknown key") as caught:
        read_graph(tmp_path / "g.json")
    assert hint in caught.value.hint


@pytest.mark.parametrize("path", ["ops", "kinds", "ops.kind", "tensors.producer", "reads.ptr"])
def test_read_graph_refuses_missing_keys(tmp_path, path):
    data = three_ops()
    section, key = _at(data, path)
    del section[key]
    (tmp_path / "g.json").write_text(json.dumps(data))
    with pytest.raises(InputFileError, match=f"has no key '{key}'"):
        read_graph(tmp_path / "g.json")


def test_read_graph_refuses_a_graph_without_ops(tmp_path):
    empty = {"schema": "hocket.graph/1", "kinds": [], "ops": {"name": [], "kind": []},
             "tensors": {"name": [], "bytes": [], "producer": []},
             "reads": {"ptr": [0], "tensor": []}}  # fmt: skip
    (tmp_path / "g.json").write_text(json.dumps(empty))
    with pytest.raises(InputFileError, match="no ops"):
        read_graph(tmp_path / "g.json")


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": "hocket.plan/1"}', '{"format": "x"}'])
def test_read_graph_says_what_it_expects_of_other_json(tmp_path, text):
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(InputFileError) as caught:
        read_graph(tmp_path / "g.json")
    assert caught.value.hint
    assert caught.value.where == str(tmp_path / "g.json")


def test_read_graph_tells_a_plan_from_a_graph(tmp_path):
    (tmp_path / "plan.json").write_text('{"schema": "hocket.plan/3", "claims": {}}')
    with pytest.raises(InputFileError, match="is a plan, not a graph"):
        read_graph(tmp_path / "plan.json")
