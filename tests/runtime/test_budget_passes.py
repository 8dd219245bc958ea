"""Models within a budget whose passes go ways of their own: caches, checkpoints, losses beside."""

import copy

import pytest
import torch
from runtime.budget_loops import WAYS, loop_of
from runtime.train_loops import adamw, plain_steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from hocket.base.errors import RunError
from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.model_blocks import uniform


def test_parts_that_keep_what_generation_needs_by_configs_of_their_own_are_computed_again():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(num_layers=1, d_model=32, d_kv=8, d_ff=64, num_heads=4,
                                   vocab_size=64, decoder_start_token_id=0)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    words = torch.randint(2, 64, (2, 8))
    names = ("encoder.block.0", "decoder.block.0")
    blocks = tuple(MemoryBlock(name=name, activations="recomputed") for name in names)
    section = Memory(budget_bytes=(0,), blocks=blocks)
    batch = {"input_ids": words, "labels": words}
    twin = copy.deepcopy(model)
    train = loop_of(model, adamw(model), section, batch)
    torch.manual_seed(1)
    loss = train.step(batch).item()
    assert model.decoder.config.use_cache
    torch.manual_seed(1)
    assert loss == twin(**batch).loss.item()


class _Checkpointed(nn.Module):
    """Calls its layers again in the backward pass, the last one first."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x.square().mean()


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("streamed", range(4))
def test_layers_that_the_model_itself_computes_again_are_not_fetched_while_they_change(
    streamed, update
):
    torch.manual_seed(0)
    model, batch = _Checkpointed(), torch.randn(8, 16)
    twin = copy.deepcopy(model)
    homes = ["streamed" if number == streamed else "resident" for number in range(4)]
    blocks = tuple(
        MemoryBlock(name=f"layers.{n}", parameters=home, update=update)
        for n, home in enumerate(homes)
    )
    train = loop_of(model, adamw(model), Memory(budget_bytes=(0,), blocks=blocks), batch)
    ours = [train.step(batch).item() for _ in range(5)]
    assert ours == plain_steps(twin, adamw(twin), [batch] * 5)


class _Beside(nn.Module):
    """Returns what it was given, and leaves a part of the loss where the model finds it."""

    def __init__(self, width=16):
        super().__init__()
        self.layer, self.found = nn.Linear(width, width), None

    def forward(self, x):
        self.found = self.layer(x).square().mean()
        return x.view(-1, x.shape[-1])


class _LossBeside(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.beside, self.leave = nn.Linear(16, 16), _Beside(), nn.Linear(16, 1)

    def forward(self, x):
        return self.leave(self.beside(self.enter(x))).square().mean() + self.beside.found


@pytest.mark.parametrize("home", ["resident", "streamed"])
@pytest.mark.parametrize("update", ["host", "device"])
def test_gradients_that_come_by_no_result_of_a_module_are_used(home, update):
    torch.manual_seed(0)
    model, batch = _LossBeside(), torch.randn(2, 4, 16)
    twin = copy.deepcopy(model)
    policy = {"activations": "recomputed", "parameters": home, "update": update}
    blocks = tuple(MemoryBlock(name=name, **policy) for name in ("enter", "leave"))
    blocks += (MemoryBlock(name="beside", **{**policy, "activations": "kept"}),)
    train = loop_of(model, adamw(model), Memory(budget_bytes=(0,), blocks=blocks), batch)
    ours = [train.step(batch).item() for _ in range(5)]
    assert ours == plain_steps(twin, adamw(twin), [batch] * 5)


class _Penalised(nn.Module):
    """Differentiates itself by its input, and that is a part of its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4)
        )

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = x
        for layer in self.layers:
            y = layer(y)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_of_gradients_are_of_the_parameters_that_were(way):
    torch.manual_seed(0)
    model, batch = _Penalised(), torch.randn(8, 16)
    twin = copy.deepcopy(model)
    train = loop_of(model, adamw(model), uniform(model, 0, **way), batch)
    ours = [train.step(batch).item() for _ in range(5)]
    assert ours == plain_steps(twin, adamw(twin), [batch] * 5)


class _Overwriting(nn.Module):
    """Changes in place what its backward pass needs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.is_outside = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        grown = x.exp()
        if self.is_outside:
            grown += 1
        return grown.square().mean()


class _OverwritingLayer(nn.Linear):
    def forward(self, x):
        grown = super().forward(x).exp()
        grown += 1
        return grown.square()


@pytest.mark.parametrize("activations", ["kept", "recomputed"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_what_was_changed_in_place_after_it_was_saved_is_refused(activations, is_inside):
    """As PyTorch does: a gradient would be of other numbers than the loss."""
    model, batch = _Overwriting(), torch.randn(8, 16)
    model.is_outside = not is_inside
    if is_inside:
        model.layers[2] = _OverwritingLayer(16, 16)
    section = uniform(model, 0, activations=activations, parameters="streamed", update="host")
    train = loop_of(model, adamw(model), section, batch)
    with pytest.raises(RunError, match="was changed in place after it was saved"):
        train.step(batch)
