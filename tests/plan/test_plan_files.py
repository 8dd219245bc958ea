import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from simulate.problems import problems

from hocket.api.planned import plan_graph
from hocket.base.errors import InputFileError, UsageError
from hocket.cost.host import HostOverhead
from hocket.cost.profile import Profile, ProfileEntry
from hocket.graph import GraphBuilder, Role
from hocket.graph.files import write_graph
from hocket.graph.generators import generate
from hocket.plan.files import PLAN_SCHEMA, json_schema, read_plan, write_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import OBJECTIVES, TRANSFER_MODES
from hocket.plan.sections import SECTIONS
from hocket.simulate.engine import simulate


@pytest.fixture(scope="module")
def planned():
    return plan_graph(generate("transformer", 120, 3), "2xv100-16g")


@pytest.fixture
def plan_file(planned, tmp_path):
    path = tmp_path / "plan.json"
    planned.save(path)
    return path


def _placement(data):
    return data["sections"]["placement"]


def _graph(data):
    return data["problem"]["work"]["graph"]


def _ordered(data, order):
    data["sections"]["order"] = order


def _edited(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


def test_plan_read_back_simulates_to_the_same_bits(planned, plan_file):
    saved = read_plan(plan_file)
    again = simulate(saved.problem, saved.plan)
    assert again.makespan_s == planned.step_s == saved.plan.claims.step_s
    assert again.peak_bytes.tolist() == planned.timeline.peak_bytes.tolist()
    assert np.array_equal(saved.plan.device_of, planned.plan.device_of)


def test_plan_with_order_and_priority_round_trips(planned, tmp_path):
    problem, device_of = planned.problem, planned.plan.device_of
    order = tuple(
        np.flatnonzero(device_of == device).astype(np.int32)
        for device in range(problem.cluster.num_devices)
    )
    for name, fields in (
        ("order", {"by_device": order}),
        ("priority", {"priority": np.linspace(0, 1, problem.graph.num_ops)}),
    ):
        path = tmp_path / f"{name}.json"
        plan = Plan(planner=name).placing(device_of, **fields)
        write_plan(path, problem, plan)
        read = read_plan(path).plan
        if read.by_device is not None:
            assert all(np.array_equal(a, b) for a, b in zip(read.by_device, order, strict=True))
        else:
            assert np.array_equal(read.priority, plan.priority)


def test_writing_twice_gives_the_same_bytes(planned, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    planned.save(first)
    planned.save(second)
    assert first.read_bytes() == second.read_bytes()


def test_graph_named_by_file_is_found_beside_the_plan(tmp_path):
    graph = generate("chain", 30, 0)
    graph_file = tmp_path / "data" / "g.json.gz"
    graph_file.parent.mkdir()
    write_graph(graph, graph_file)
    path = tmp_path / "plan.json"
    plan_graph(graph, "2xv100-16g").save(path, graph_file=graph_file)
    assert json.loads(path.read_text())["problem"]["work"]["graph"]["file"] == "data/g.json.gz"
    assert read_plan(path).problem.graph.content_hash == graph.content_hash
    moved = tmp_path / "moved.json.gz"
    graph_file.rename(moved)
    with pytest.raises(InputFileError) as caught:
        read_plan(path)
    assert "--graph" in caught.value.hint
    assert read_plan(str(path), graph_file=str(moved)).problem.graph.num_ops == graph.num_ops


def test_plan_of_another_graph_is_refused(tmp_path):
    graph_file = tmp_path / "g.json"
    write_graph(generate("chain", 30, 0), graph_file)
    path = tmp_path / "plan.json"
    plan_graph(generate("chain", 30, 0), "2xv100-16g").save(path, graph_file=graph_file)
    write_graph(generate("chain", 31, 0), graph_file)
    with pytest.raises(InputFileError, match="made for another graph"):
        read_plan(path)


@pytest.mark.parametrize(
    ("edit", "message", "hint"),
    [
        (lambda d: d.update(planer="x"), "unknown key 'planer'", "did you mean 'planner'?"),
        (lambda d: _placement(d).update(device="x"), "unknown key 'device'", "devices"),
        (lambda d: d["problem"].pop("transfers"), "has no key 'transfers'", ""),
        (lambda d: d["problem"].update(transfers="teleport"), "transfers", ""),
        (lambda d: _placement(d)["device_of"].__setitem__(0, 99), "device_of[0] is 99", "to 1"),
        (lambda d: _placement(d)["device_of"].__setitem__(0, -1), "device_of[0] is -1", "from 0"),
        (lambda d: _placement(d)["device_of"].__setitem__(0, 0.5), "0.5", "an integer"),
        (lambda d: _placement(d)["device_of"].pop(), "entries, expected", "each op"),
        (lambda d: _placement(d).update(devices=["a", "b"]), "not the devices", ""),
        (lambda d: d.update(schema="hocket.plan/9"), "not a hocket.plan/3 file", "hocket plan"),
        (lambda d: d["problem"]["cluster"].update(hash="0" * 64), "another cluster", "plan again"),
        (lambda d: _graph(d).update(inline=None), "names no graph", ""),
        (lambda d: _ordered(d, {"by_device": [[10**6], []]}), "by_device[0][0] is 1000000", ""),
        (lambda d: _ordered(d, {"by_device": [[], []], "priority": []}), "has both", ""),
        (lambda d: _ordered(d, {"by_device": [[]]}), "has 1 entries, expected 2", ""),
        (lambda d: _graph(d).update(inline=None, file="x" * 5000), "the plan's graph", "--graph"),
        (lambda d: d["sections"].update(placment={}), "section 'placment'", "mean 'placement'?"),
        (lambda d: d["claims"].update(step_s="short"), "claims.step_s", "a number"),
        (lambda d: d["claims"].update(bound=1.0), "unknown key 'bound'", ""),
        (lambda d: d["notes"].update(x=1), "notes.x", "a text"),
    ],
)
def test_broken_plan_files_are_refused_with_place_and_reason(plan_file, edit, message, hint):
    with pytest.raises(InputFileError) as caught:
        read_plan(_edited(plan_file, edit))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert str(plan_file) in caught.value.where


def test_a_graph_file_is_not_a_plan(tmp_path):
    path = tmp_path / "g.json"
    write_graph(generate("chain", 5, 0), path)
    with pytest.raises(InputFileError, match=r"not a hocket.plan/3 file"):
        read_plan(path)


def test_json_schema_describes_what_is_written(plan_file):
    schema = json_schema()
    written = json.loads(plan_file.read_text())
    assert set(written) <= set(schema["properties"])
    assert set(schema["required"]) <= set(written)
    assert schema["additionalProperties"] is False


def test_json_schema_has_the_fields_and_choices_of_every_section():
    schema = json_schema()
    assert schema["properties"]["schema"]["const"] == PLAN_SCHEMA
    problem = schema["properties"]["problem"]["properties"]
    assert problem["transfers"]["enum"] == list(TRANSFER_MODES)
    assert problem["objective"]["enum"] == list(OBJECTIVES)
    described = schema["properties"]["sections"]["properties"]
    assert list(described) == list(SECTIONS)
    for name, section in SECTIONS.items():
        properties = described[name]["properties"]
        assert set(described[name].get("required", ())) <= set(properties)
        known = {field.name for field in dataclasses.fields(section)}
        assert known & set(properties), name


@given(problem=problems(has_streams=True))
@settings(derandomize=True, deadline=None, max_examples=20)
def test_failed_write_leaves_no_half_file(problem, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    path = folder / "plan.json"
    path.write_text("old")
    plan = Plan(notes={"x": object()}).placing(np.zeros(problem.graph.num_ops, dtype=np.int32))
    with pytest.raises(TypeError):
        write_plan(path, problem, plan)
    assert path.read_text() == "old"
    assert [item.name for item in folder.iterdir()] == ["plan.json"]


def test_make_problem_knows_the_devices_stated_by_a_file():
    with pytest.raises(UsageError, match="states no devices"):
        make_problem(generate("chain", 5, 0), "file")


def _profiled(graph, kind, reserved_bytes):
    entries = tuple(
        ProfileEntry(
            signature=signature, kind="matmul", dtype="float32", flops=1.0, bytes_touched=1,
            count=1, seconds=1e-3, workspace_bytes=1000,
        )
        for signature in sorted(graph.signatures)
    )  # fmt: skip
    return Profile(
        device_kind=kind, device="test", versions={}, host=HostOverhead(),
        reserved_bytes=reserved_bytes, entries=entries,
    )  # fmt: skip


def test_plan_with_a_profile_counts_its_memory_and_reads_back_the_same(tmp_path):
    builder = GraphBuilder("signed")
    previous = builder.tensor("x", 8, role=Role.INPUT)
    for index in range(4):
        op = builder.op(f"op{index}", reads=[previous], flops=1e9, signature=f"s{index}")
        previous = builder.tensor(f"t{index}", 1000, producer=op)
    graph_file = tmp_path / "g.json"
    graph = builder.build()
    write_graph(graph, graph_file)
    profile = _profiled(graph, "t4", reserved_bytes=2**30)
    planned = plan_graph(graph, "2xt4", profile=profile)
    plain = plan_graph(graph, "2xt4")
    assert planned.timeline.peak_bytes.max() > plain.timeline.peak_bytes.max()
    assert (plain.problem.memory_bytes - planned.problem.memory_bytes).tolist() == [2**30] * 2
    for name, file in (("named.json", graph_file), ("inside.json", None)):
        planned.save(tmp_path / name, graph_file=file)
        saved = read_plan(tmp_path / name)
        again = simulate(saved.problem, saved.plan)
        assert again.makespan_s == planned.step_s
        assert again.peak_bytes.tolist() == planned.timeline.peak_bytes.tolist()
        assert saved.problem.memory_bytes.tolist() == planned.problem.memory_bytes.tolist()
