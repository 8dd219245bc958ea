"""The splits that people get without a planner: Accelerate's rule and files written by hand."""

import json

import pytest

from hocket.base.errors import InputFileError
from hocket.graph import GraphBuilder, Role
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.planners import find_planner
from hocket.planners.placement.baselines import device_map_auto, expert
from hocket.simulate.verify import violations


def layered_model(sizes: dict[str, int]):
    """A chain of forward ops, one per module, each with a weight of the given bytes."""
    builder = GraphBuilder("layers")
    flow = builder.tensor("batch", 4, role=Role.INPUT)
    for module, size in sizes.items():
        weight = builder.tensor(f"{module}.weight", size, role=Role.PARAMETER)
        op = builder.op(f"{module}/mm", module=module, reads=[flow, weight], flops=1e9)
        flow = builder.tensor(f"{module} out", 4, producer=op)
    return builder.build()


def test_device_map_auto_ignores_everything_but_parameter_bytes():
    sizes = {f"block.{i}": 100 for i in range(8)}
    problem = make_problem(layered_model(sizes), "2xv100-16g")
    placed = device_map_auto(problem, Plan()).device_of
    # The first takes 400 and 1.25 blocks, and of these keeps room for one block.
    assert placed.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert violations(Plan().placing(placed), problem) == []


def test_device_map_auto_keeps_room_for_numbered_blocks_not_for_names_that_end_in_a_digit():
    sizes = {"fc1": 400, "fc2": 100, "fc3": 100, "fc4": 100, "fc5": 100}
    problem = make_problem(layered_model(sizes), "2xv100-16g")
    # 400 and 1.25 times the mean of 160, less the 100 that are still to come.
    assert device_map_auto(problem, Plan()).device_of.tolist() == [0, 0, 1, 1, 1]


def test_device_map_auto_splits_as_accelerate_does():
    torch = pytest.importorskip("torch")
    accelerate = pytest.importorskip("accelerate")
    from hocket.capture import capture, load_model

    model, batch = load_model("gpt2", batch=1, seq=8)
    problem = make_problem(capture(model, batch, name="gpt2"), "3xv100-16g")
    memory = {i: int(size) for i, size in enumerate(problem.memory_bytes)}
    limits = accelerate.utils.get_balanced_memory(
        model, memory, no_split_module_classes=["GPT2Block"], dtype=torch.float32
    )
    expected = accelerate.infer_auto_device_map(
        model, limits, no_split_module_classes=["GPT2Block"], dtype=torch.float32
    )
    placed = device_map_auto(problem, Plan()).device_of
    for module, device in expected.items():
        ops = [
            op for op in range(problem.graph.num_ops)
            if problem.graph.module_of(op).startswith(module + ".")
        ]  # fmt: skip
        assert set(placed[ops].tolist()) <= {device}, module


def expert_file(tmp_path, devices, **extra):
    path = tmp_path / "expert.json"
    path.write_text(json.dumps({"schema": "hocket.expert/1", "devices": devices, **extra}))
    return path


def test_expert_file_places_by_the_longest_module_path(tmp_path):
    graph = layered_model({"stem": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1})
    problem = make_problem(graph, "2xv100-16g")
    path = expert_file(tmp_path, {"gpu0": ["stem", "blocks"], "gpu1": ["blocks.2"]})
    plan = expert(path)(problem, Plan())
    assert plan.device_of.tolist() == [0, 0, 0, 1]
    assert violations(plan, problem) == []


def test_expert_file_may_list_a_module_all_of_whose_parts_it_lists(tmp_path):
    problem = make_problem(layered_model({"blocks.0": 1, "blocks.1": 1}), "2xv100-16g")
    path = expert_file(tmp_path, {"gpu0": ["blocks"], "gpu1": ["blocks.0", "blocks.1"]})
    assert expert(path)(problem, Plan()).device_of.tolist() == [1, 1]


def test_expert_file_may_have_a_plus_in_its_name(tmp_path):
    problem = make_problem(layered_model({"stem": 1, "head": 1}), "2xv100-16g")
    path = expert_file(tmp_path, {"gpu0": ["stem"], "gpu1": ["head"]}).rename(tmp_path / "a+b.json")
    for name in (f"expert:{path}", f"expert:{path}+order-topological", f" expert:{path} "):
        assert find_planner(name)(problem, Plan()).device_of.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("devices", "needle"),
    [
        ({"gpu7": ["stem"]}, "unknown device 'gpu7'"),
        ({"gpu0": ["stm"]}, "unknown module or op 'stm'"),
        ({"gpu0": ["stem"]}, "says nothing of op 'blocks.0/mm'"),
        ({"gpu0": ["stem"], "gpu1": ["stem"]}, "on two devices"),
        ({"gpu0": "stem"}, "devices.gpu0"),
    ],
)
def test_expert_file_mistakes_are_named(tmp_path, devices, needle):
    problem = make_problem(layered_model({"stem": 1, "blocks.0": 1}), "2xv100-16g")
    with pytest.raises(InputFileError, match=needle):
        expert(expert_file(tmp_path, devices))(problem, Plan())


def test_expert_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "expert.json"
    path.write_text("[]")
    problem = make_problem(layered_model({"stem": 1}), "2xv100-16g")
    with pytest.raises(InputFileError, match=r"not a hocket\.expert/1 file"):
        expert(path)(problem, Plan())
