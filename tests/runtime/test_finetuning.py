"""Fine-tuning with LoRA adapters and with a frozen backbone, plain and within a budget."""

import copy

import pytest
import torch
from runtime.train_loops import plain_steps
from torch import nn

import hocket
from hocket.plan.sections import Memory

transformers = pytest.importorskip("transformers")
WORDS = 97


def language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=WORDS,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Adapter(nn.Module):
    """A linear layer with a trained product of low rank beside it, as LoRA has it."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def by_hand():
    model = language_model().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    return model


def by_peft():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(language_model(), config)


def frozen_backbone():
    model = language_model()
    model.model.requires_grad_(False)
    return model


def trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize("build", [by_hand, by_peft, frozen_backbone])
@pytest.mark.parametrize("part", [None, 0.6])
def test_only_what_is_trained_changes_and_losses_are_those_of_pytorch(build, part):
    model = build()
    torch.manual_seed(1)
    batches = [torch.randint(WORDS, (2, 16)) for _ in range(3)]
    start, twin = copy.deepcopy(model), copy.deepcopy(model)
    budget = {}
    if part is not None:
        graph = hocket.capture(model, batches[0], forward=loss_of, device="cpu")
        plain = hocket.fit(graph, "1xh200").chosen.peak_bytes
        budget = {"memory": int(part * plain), "on": "1xh200"}
    train = hocket.prepare(model, trained(model), batches[0], forward=loss_of, **budget)
    if part is not None:
        assert train.plan.get(Memory) is not None
    ours = [train.step(batch).item() for batch in batches]
    assert ours == plain_steps(twin, trained(twin), batches, forward=loss_of)
    state = train.state_dict()["model"]
    for name, parameter in start.named_parameters():
        assert torch.equal(state[name], parameter) is not parameter.requires_grad, name
