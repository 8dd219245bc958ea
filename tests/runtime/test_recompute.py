"""Recomputed modules: arguments, random numbers and buffers as if they were computed once."""

import copy
import random
import warnings
from contextlib import ExitStack, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from runtime.budget_loops import WAYS, loop_of
from runtime.train_loops import plain_steps
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.base.errors import RunError
from hocket.capture import CaptureWarning
from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.recompute import ModuleState, recomputed


@pytest.mark.parametrize("names", [(), ("value",), ("key", "value")])
def test_what_was_one_tensor_is_one_when_it_is_computed_again(names):
    """Attention multiplies once where query, key and value are one tensor, else three times."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    twin, rows = copy.deepcopy(attention), torch.randn(3, 4, 8)
    made = rows.clone().requires_grad_() * 2  # as what a block before it has made
    args, kwargs = [made] * (3 - len(names)), dict.fromkeys(names, made)
    with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.clone):
        result, _ = recomputed(
            ModuleState([attention]), attention, args, {"need_weights": False, **kwargs}
        )
    result.square().sum().backward()
    twin(*[rows * 2] * 3, need_weights=False)[0].square().sum().backward()
    for ours, plain in zip(attention.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


class _Mixed(nn.Module):
    """Draws, norms, buffers that its result depends on, and state in a tuple."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 8)
        self.cell = nn.LSTMCell(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, rows, state, scale=1.0):
        self.calls.add_(1)
        self.mean = 0.9 * self.mean + rows.detach().float().mean(0)
        rows = rows * self.calls - self.mean
        hidden = torch.dropout(self.norm(self.inner(rows)), 0.5, train=True)
        state = self.cell(hidden, state)
        return state[0] * scale, state


def _trained(module, *, again, autocast=False, times=1):
    torch.manual_seed(1)
    first = nn.Linear(8, 8)
    rows, zero = torch.randn(4, 8), torch.zeros(4, 8)
    state = (first(rows), zero)
    call = partial(recomputed, ModuleState([module]), module) if again else (
        lambda args, kwargs: module(*args, **kwargs))  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result, (_, cell) = call((first(rows), state), {"scale": 2.0})
        loss = result.float().square().sum() + cell.float().sum()
    after = torch.rand(3)  # whoever draws later goes on where the first call ended
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    drawn = torch.rand(3)
    gradients = [p.grad for p in (*first.parameters(), *module.parameters())]
    return [loss.detach(), after, drawn, *gradients, *module.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_what_is_computed_again_is_the_same_to_the_bit(momentum, autocast, times):
    torch.manual_seed(0)
    module = _Mixed(momentum)
    twin = copy.deepcopy(module)
    ours = _trained(module, again=True, autocast=autocast, times=times)
    plain = _trained(twin, again=False, autocast=autocast, times=times)
    for found, expected in zip(ours, plain, strict=True):
        assert torch.equal(found, expected)


class _Own(nn.BatchNorm1d):
    """A norm of a class of its own."""


@pytest.mark.parametrize("kind", [partial(nn.InstanceNorm1d, track_running_stats=True), _Own])
def test_statistics_that_kernels_write_unseen_move_once(kind):
    model = nn.Sequential(nn.Conv1d(3, 4, 1), kind(4), nn.Tanh())
    twin, rows = copy.deepcopy(model), torch.randn(5, 3, 6)
    for _ in range(2):
        recomputed(ModuleState([model]), model, [rows], {}).sum().backward()
        twin(rows).sum().backward()
    for ours, expected in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, expected)


def test_nothing_but_the_input_is_held_between_the_passes():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    rows = torch.randn(32, 64, requires_grad=True)
    held = []
    for again in (False, True):
        tracker = MemoryTracker()
        with tracker:
            given = rows * 1
            result = (
                recomputed(ModuleState([layers]), layers, [given], {}) if again else layers(given)
            )
            held.append(tracker.held_bytes)
        del given, result
    assert held[1] == 2 * rows.nbytes < held[0] / 4


def test_a_function_that_does_something_else_the_second_time_is_told():
    weight = torch.ones(4, requires_grad=True)
    calls = []

    def other(rows):
        calls.append(rows)
        return (rows * weight).exp() if len(calls) == 1 else rows * weight

    result = recomputed(ModuleState([]), other, [torch.ones(4)], {})
    with pytest.raises(RunError, match="2 tensors, then 1"):
        result.sum().backward()


@pytest.mark.parametrize("hooks", [(), (torch.Tensor.detach, torch.Tensor.detach)])
def test_an_input_that_was_changed_in_between_is_told(hooks):
    """Where hooks pack what autograd saves, it does not look whether that was changed."""
    layer, rows = nn.Linear(4, 4), torch.ones(2, 4)
    made = rows.requires_grad_() * 1
    with saved_tensors_hooks(*hooks) if hooks else nullcontext():
        result = recomputed(ModuleState([layer]), layer, [made], {})
    made.add_(1)
    with pytest.raises(RunError, match="was changed in place after its call"):
        result.sum().backward()


def _changing(width=8):
    """Layers that begin with a change of what they are given, not the same a second time."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(width, width), nn.Tanh(),
                            nn.Linear(width, width)) for _ in range(3))  # fmt: skip
    return nn.Sequential(nn.Linear(width, width), *layers, nn.Linear(width, 3))


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("way", [way for way in WAYS if way["activations"] == "recomputed"])
def test_a_part_that_changes_what_it_was_given_trains_as_it_does_by_itself(way):
    batch = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    model, plain = _changing(), _changing()
    blocks = tuple(MemoryBlock(name=str(number), **way) for number in range(5))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    train = loop_of(
        model, optimizers[0], Memory(budget_bytes=(0,), blocks=blocks), batch, forward=_loss
    )
    for _ in range(3):
        loss = _loss(plain, batch)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(train.step(batch).detach(), loss.detach())


@pytest.mark.parametrize("is_first", [True, False])
def test_what_the_backward_pass_is_called_under_does_not_matter(is_first):
    """Precision and the device of new tensors are those of the first call."""
    layer = nn.Linear(8, 8)
    twin, rows = copy.deepcopy(layer), torch.randn(4, 8)

    def under(is_other):
        stack = ExitStack()
        if is_other:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(torch.device("meta"))
        return stack

    def called(layer, rows):
        is_meta = torch.empty(0).is_meta
        return layer(layer(rows).tanh() if is_meta else layer(rows).exp())

    with under(is_first):
        result = recomputed(ModuleState([layer]), called, [layer, rows], {})
        plain = called(twin, rows)
    with under(not is_first):
        for each in (result, plain):
            each.backward(torch.ones_like(each, device="cpu"))
    for ours, expected in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.moves = False

    def forward(self, x):
        if self.moves:
            self.scale.mul_(0.5)
        return (x * self.scale.clone()).tanh()


def test_a_buffer_that_first_moves_in_a_later_step_is_told_once():
    module, rows = _Scaled(), torch.randn(3, 4, requires_grad=True)
    buffers = ModuleState([module])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recomputed(buffers, module, [rows], {}).sum().backward()
    module.moves = True
    with pytest.warns(CaptureWarning, match="scale of a _Scaled first changes"):
        recomputed(buffers, module, [rows], {}).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recomputed(buffers, module, [rows], {}).sum().backward()
    assert module.scale.tolist() == [0.25] * 4


def mean_of(model, batch):
    return model(batch).mean()


class _Noisy(nn.Linear):
    """Draws by other libraries."""

    def forward(self, x):
        noise = torch.from_numpy(np.random.rand(*x.shape).astype("float32")) * random.random()
        return torch.tanh(super().forward(x) * noise)


def test_draws_of_python_and_numpy_are_repeated_where_a_module_is_computed_again():
    torch.manual_seed(0)
    ours = nn.Sequential(*(_Noisy(8, 8) for _ in range(3)), nn.Linear(8, 1))
    plain, batch = copy.deepcopy(ours), torch.randn(4, 8)
    blocks = tuple(MemoryBlock(name=str(at), activations="recomputed") for at in range(4))
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (ours, plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        train = loop_of(ours, optimizer, Memory(budget_bytes=(0,), blocks=blocks), batch)
        random.seed(1)
        np.random.seed(1)
        losses = [train.step(batch).item() for _ in range(4)]
    random.seed(1)
    np.random.seed(1)
    assert losses == plain_steps(plain, other, [batch] * 4, forward=mean_of)


class _Counting(nn.Module):
    """Keeps numbers and a generator of its own, which it makes when it first needs it."""

    def __init__(self):
        super().__init__()
        self.linear, self.num_calls, self.generator = nn.Linear(8, 8), 0, None

    def forward(self, x):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        self.num_calls += 1
        mask = torch.rand(x.shape, generator=self.generator) > 0.3
        return torch.tanh(self.linear(x * self.num_calls) * mask)


def test_numbers_and_generators_of_a_module_are_as_they_were_and_move_once():
    torch.manual_seed(0)
    ours = nn.Sequential(*(_Counting() for _ in range(3)), nn.Linear(8, 1))
    plain, batch = copy.deepcopy(ours), torch.randn(4, 8)
    blocks = tuple(MemoryBlock(name=str(at), activations="recomputed") for at in range(4))
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (ours, plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        train = loop_of(ours, optimizer, Memory(budget_bytes=(0,), blocks=blocks), batch)
        losses = [train.step(batch).item() for _ in range(4)]
    assert losses == plain_steps(plain, other, [batch] * 4, forward=mean_of)
    for one, twin in zip(ours[:3], plain[:3], strict=True):
        assert one.num_calls == twin.num_calls == 4
        assert torch.equal(one.generator.get_state(), twin.generator.get_state())


class _Remembering(nn.Linear):
    """Adds the mean that its last call has left on it."""

    last = None

    def forward(self, x):
        y = torch.tanh(super().forward(x))
        y = y if self.last is None else y * self.last
        self.last = y.detach().mean(0)
        return y


def test_tensors_that_a_module_keeps_are_those_of_the_last_step_in_both_runs():
    torch.manual_seed(0)
    ours = nn.Sequential(*(_Remembering(8, 8) for _ in range(3)), nn.Linear(8, 1))
    plain, batch = copy.deepcopy(ours), torch.randn(4, 8)
    blocks = tuple(MemoryBlock(name=str(at), activations="recomputed") for at in range(4))
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for model in (ours, plain))
    train = loop_of(ours, optimizer, Memory(budget_bytes=(0,), blocks=blocks), batch)
    losses = [train.step(batch).item() for _ in range(4)]
    assert losses == plain_steps(plain, other, [batch] * 4, forward=mean_of)
    for one, twin in zip(ours[:3], plain[:3], strict=True):
        assert torch.equal(one.last, twin.last)


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_gradient_taken_in_the_forward_pass_does_not_end_the_recompute(create_graph):
    """It asks for saved tensors before the function has saved all, and more are saved after it."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(4, 4), torch.randn(3, 4)

    def scored(x):
        hidden = torch.tanh(layer(x))
        (slope,) = torch.autograd.grad(
            hidden.square().sum(), x, create_graph=create_graph, retain_graph=True
        )
        return (hidden.exp() * slope).sin().sum()

    def gradients(call):
        layer.zero_grad()
        x = rows.clone().requires_grad_()
        call(x).backward()
        return x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()

    expected = gradients(scored)
    found = gradients(lambda x: recomputed(ModuleState([layer]), scored, (x,), {}))
    assert all(map(torch.equal, found, expected))
