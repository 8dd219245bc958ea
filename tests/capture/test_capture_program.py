"""A recorded program, run on real tensors, computes what the model computes."""

import copy
import heapq
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from runtime.executed_program import execute, named_tensors
from runtime.models import STEPS, Patchwork
from runtime.small_zoo import SMALL_ZOO
from torch import nn

from hocket.capture import capture_program
from hocket.capture.zoo import experts, language, recurrent

TINY = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64}
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


class LongShort(nn.Module):
    """A fused recurrent layer, whose weights also hang in a plain list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 5, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0].square().mean()


MODELS = {
    "gpt2": lambda: language.gpt2(
        2, 8, n_layer=6, n_embd=32, n_head=2, vocab_size=64, **SPECIAL_TOKENS
    ),
    "bert": lambda: language.bert_large(2, 8, num_hidden_layers=2, **TINY),
    "llama": lambda: language.llama_7b(
        2, 8, num_hidden_layers=6, num_key_value_heads=1, **TINY, **SPECIAL_TOKENS
    ),
    "t5": lambda: language.t5_base(
        2, 8, num_layers=2, d_model=32, d_kv=8, d_ff=32, num_heads=2, vocab_size=64
    ),
    "vit": lambda: language.vit_base(
        2, 0, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=48,
        image_size=32,
    ),
    "resnet": SMALL_ZOO["resnet50"],
    "moe": lambda: experts.moe(
        2, 8, layers=2, experts=3, width=64, hidden=32, vocabulary=64
    ),
    "gnmt": lambda: recurrent.gnmt(4, 2, 3, vocabulary=32, width=8),
    "lstm": lambda: recurrent.lstm(2, 4, vocabulary=32, width=8),
    "mlp": lambda: experts.mlp(4, 1, width=16),
    "nn.LSTM": lambda: (LongShort(), {"x": torch.randn(2, 4, 6)}),
}  # fmt: skip


def eager_step(model, batch, optimizer):
    torch.manual_seed(7)
    output = model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    update = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    update(model.parameters()).step()
    return loss


def assert_same_step(model, batch, program, optimizer, order=None):
    torch.manual_seed(7)
    executed = execute(program, named_tensors(model, batch), order)
    eager = copy.deepcopy(model)
    loss = eager_step(eager, batch, optimizer)
    assert torch.equal(executed.outputs[0], loss)
    expected = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    assert executed.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(executed.gradients[name], gradient), name
    for name, tensor in (*eager.named_parameters(), *eager.named_buffers()):
        if name in executed.state:
            torch.testing.assert_close(executed.state[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_execute_equals_eager_model_bitwise(name):
    torch.manual_seed(1)
    model, batch = MODELS[name]()
    model.train()
    before = copy.deepcopy(model.state_dict())
    graph, program = capture_program(model, batch)
    assert graph.num_ops == len(program.calls)
    assert graph.num_tensors == len(program.tensors)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), f"capture changed {key}"
    assert all(p.grad is None for p in model.parameters())
    assert_same_step(model, batch, program, "adamw")


def test_execute_sgd_updates_parameters_as_torch_does():
    model, batch = MODELS["mlp"]()
    _, program = capture_program(model, batch, optimizer="sgd")
    assert_same_step(model, batch, program, "sgd")


def test_execute_inference_returns_all_outputs():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(3, 4)
    _, program = capture_program(model, x, optimizer=None)
    (output,) = execute(program, named_tensors(model, x)).outputs
    assert torch.equal(output, model(x))


# ── any order that the graph allows gives the same result ────────────────────────────────────────


def random_order(graph, seed):
    """A topological order drawn at random, with the drawing ops kept in theirs."""
    source, target = graph.edges
    followers = [[] for _ in range(graph.num_ops)]
    waiting = [0] * graph.num_ops
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        followers[a].append(b)
        waiting[b] += 1
    draw = random.Random(seed)
    ready = [(draw.random(), op) for op in range(graph.num_ops) if not waiting[op]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, op = heapq.heappop(ready)
        order.append(op)
        for follower in followers[op]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (draw.random(), follower))
    return order


@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6), st.integers(0, 1000))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_program_is_right_in_every_order_of_the_graph(steps, seed):
    torch.manual_seed(seed)
    model, batch = Patchwork(steps), {"x": torch.randn(4, 4)}
    graph, program = capture_program(model, batch)
    assert_same_step(model, batch, program, "adamw", random_order(graph, seed))


def test_random_order_differs_from_recorded_order():
    graph, _ = capture_program(Patchwork(["linear", "add_"]), torch.randn(4, 4))
    assert random_order(graph, 0) != list(range(graph.num_ops))
