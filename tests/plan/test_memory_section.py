import json
from dataclasses import replace

import pytest
from jsonschema import validate

from hocket.base.errors import InputFileError
from hocket.graph.generators import generate
from hocket.plan.files import json_schema, read_plan, write_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Memory, MemoryBlock


@pytest.fixture(scope="module")
def problem():
    return make_problem(generate("transformer", 60, 3), "1xv100-16g")


@pytest.fixture
def memory():
    return Memory(
        budget_bytes=(2**30,),
        blocks=(
            MemoryBlock(name="blocks.0", start=0, stop=10, activations="offloaded", share=0.5),
            MemoryBlock(
                name="blocks.1.attn", start=10, stop=20, activations="recomputed",
                checkpoint="offloaded",
            ),
            MemoryBlock(
                name="blocks.1.attn:1", start=20, stop=30, activations="offloaded",
                parameters="streamed", update="host",
            ),
        ),
        loss_chunks=8,
    )  # fmt: skip


def _wrong(problem, memory):
    return [violation.message for violation in memory.verify(problem, Plan())]


def test_memory_read_back_from_a_plan_file_is_the_same(problem, memory, tmp_path):
    plan = Plan(work_hash=problem.work_hash, cluster_hash=problem.cluster.content_hash)
    path = tmp_path / "plan.json"
    write_plan(path, problem, plan.having(memory))
    validate(json.loads(path.read_text()), json_schema())
    assert read_plan(path).plan[Memory] == memory


def test_memory_that_fits_the_graph_breaks_no_rule(problem, memory):
    assert _wrong(problem, memory) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget_bytes": (1, 2)}, "2 budgets for 1 devices"),
        ({"blocks": (MemoryBlock(name="a"), MemoryBlock(name="a"))}, "2 blocks have the name 'a'"),
        ({"blocks": (MemoryBlock(name="a", stop=10**6),)}, "blocks follow each other"),
        (
            {"blocks": (MemoryBlock(name="a", stop=9), MemoryBlock(name="b", start=8, stop=12))},
            "blocks follow each other",
        ),
        (
            {"blocks": (MemoryBlock(name="blocks.99"),)},
            "'blocks.99' is no module of transformer-60",
        ),
        ({"blocks": (MemoryBlock(name="blocks.0:"),)}, "'blocks.0:' is no module"),
        ({"blocks": (MemoryBlock(name="a", share=1.5),)}, "a share of 1.5"),
    ],
)
def test_memory_says_what_is_wrong_with_it(problem, memory, change, words):
    assert any(words in message for message in _wrong(problem, replace(memory, **change)))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: data["blocks"][0].update(activations="offload"), "activations"),
        (lambda data: data["blocks"][0].update(ops=[1]), "ops has 1 entries"),
        (lambda data: data["blocks"][0].update(ops=[-1, 2]), r"ops\[0\] is -1"),
        (lambda data: data["blocks"][0].update(share=True), "share is True"),
        (lambda data: data["blocks"][0].update(share=1.5), "share is 1.5"),
        (lambda data: data["blocks"][0].update(tensors=["x"]), "unknown key 'tensors'"),
        (lambda data: data.update(loss_chunks=0), "loss_chunks is 0"),
        (lambda data: data.update(loss_chunks=2**31 - 1), "loss_chunks is 2147483647"),
        (lambda data: data.update(prefetch=2**31 - 1), "prefetch is 2147483647"),
        (lambda data: data.pop("prefetch"), "no key 'prefetch'"),
        (lambda data: data.update(budget_bytes=[]), "budget_bytes has 0 entries"),
        (lambda data: data.update(blocks=[]), "blocks is empty"),
    ],
)
def test_memory_file_errors_name_the_key(problem, memory, edit, words):
    data = memory.to_data()
    edit(data)
    with pytest.raises(InputFileError, match=words):
        Memory.from_data(data, problem)
