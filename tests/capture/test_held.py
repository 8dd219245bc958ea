"""What autograd holds beyond what the backward pass reads is noted, and whose ops are whose."""

from dataclasses import replace

import pytest
import torch
from runtime.foreseen_models import FORESEEN, SavesMore

from hocket.capture import capture
from hocket.graph import Phase, verify_graph
from hocket.simulate.rewriting.uses import as_held


@pytest.fixture(scope="module")
def graph():
    return capture(SavesMore(), torch.randn(4, 64), device="cpu")


def test_what_nobody_reads_is_noted_with_the_last_op_of_its_node(graph):
    assert graph.meta["held"] == {
        f"layers.{layer}/mul.backward:1": [f"layers.{layer}.more/addmm"] for layer in range(4)
    }


@pytest.mark.parametrize("name", ["sums outside", "called twice", "skips", "hf gpt2"])
def test_models_that_save_what_they_read_have_no_note(name):
    model, batch, forward = FORESEEN[name]()
    assert "held" not in capture(model, batch, device="cpu", forward=forward).meta


def test_backward_ops_of_a_function_belong_to_the_module_that_calls_it(graph):
    ops = [op for op in range(graph.num_ops) if graph.op_names[op].startswith("layers.2/mul.back")]
    assert len(ops) == 2
    for op in ops:
        assert graph.op_phase[op] == Phase.BACKWARD
        assert graph.module_of(op) == graph.module_of(graph.partner[op]) == "layers.2"


def test_ops_read_what_their_nodes_hold(graph):
    held = as_held(graph)
    verify_graph(held)
    op = graph.op_names.index("layers.1/mul.backward:1")
    more = {held.tensor_names[t] for t in {*held.reads_of(op)} - {*graph.reads_of(op)}}
    assert more == {"layers.1.more/addmm"}
    assert len(held.reads) == len(graph.reads) + 4


def test_names_that_a_graph_lacks_are_left_out(graph):
    noted = {"layers.1/mul.backward:1": ["gone"], "gone": ["layers.1.more/addmm"]}
    lacking = replace(graph, meta={**graph.meta, "held": noted})
    assert (as_held(lacking).reads == graph.reads).all()
