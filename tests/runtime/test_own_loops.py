"""Loops that a person writes around a model within a budget: the bits of plain PyTorch."""

import copy
import threading
from itertools import pairwise

import pytest
import torch
from runtime.budget_loops import WAYS, loop_of, mixed
from runtime.budget_models import MODELS, Layer, classified
from runtime.train_loops import adamw, assert_same_state, plain_steps
from torch import nn

from hocket.base.errors import UsageError
from hocket.runtime.offload.model_blocks import uniform


def zeroed_between(loss_of, optimizer, batches):
    """As tutorials of PyTorch write it: gradients of the step before go after the forward pass."""
    for batch in batches:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def accumulated(loss_of, optimizer, batches):
    for number, batch in enumerate(batches, 1):
        loss = loss_of(batch)
        loss.backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def in_a_sum(loss_of, optimizer, batches):
    for one, other in pairwise(batches):
        loss = loss_of(one) + loss_of(other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def backward_twice(loss_of, optimizer, batches):
    for batch in batches:
        loss = loss_of(batch)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def forward_for_nothing(loss_of, optimizer, batches):
    for batch in batches:
        loss_of(batches[0])
        yield from zeroed_between(loss_of, optimizer, [batch])


LOOPS = [zeroed_between, accumulated, in_a_sum, backward_twice, forward_for_nothing]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", [0, 1])
def test_own_loops_are_as_in_plain_pytorch(loop, seed):
    torch.manual_seed(seed)
    model, batches, forward = MODELS["blocks"]()
    model.eval()
    twin, batches = copy.deepcopy(model), [*batches, batches[0]]
    optimizer, plain = adamw(model), adamw(twin)
    train = loop_of(model, optimizer, mixed(model, seed), batches[0], forward)
    ours = list(loop(train, optimizer, batches))
    assert ours == list(loop(lambda batch: forward(twin, batch), plain, batches))
    train.state_dict()
    assert_same_state(model, twin)


class Glancing(nn.Module):
    """Calls a layer once more than its loss knows of."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.seen = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            self.seen = layer(x.detach()).detach().mean()
        return x


@pytest.mark.parametrize("way", WAYS[::3])
def test_layers_whose_result_is_not_used_each_time_are_trained(way):
    torch.manual_seed(0)
    model = Glancing().eval()
    twin, batch = copy.deepcopy(model), (torch.randn(8, 16), torch.randint(3, (8,)))
    optimizer, plain = adamw(model), adamw(twin)
    train = loop_of(model, optimizer, uniform(model, 0, **way), batch, classified)
    ours = [train.step(batch).item() for _ in range(3)]
    theirs = list(zeroed_between(lambda each: classified(twin, each), plain, [batch] * 3))
    assert ours == theirs
    train.state_dict()
    assert_same_state(model, twin)


@pytest.mark.parametrize("way", WAYS[:4])
def test_what_is_written_into_parameters_after_an_evaluation_is_trained_on(way):
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    model.eval()
    twin = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(twin)
    train = loop_of(model, optimizer, uniform(model, 0, **way), batches[0], forward)
    ours, theirs = [], []
    for look in (train.evaluate, train.predict):
        ours.append(train.step(batches[0]).item())
        theirs += zeroed_between(lambda batch: forward(twin, batch), plain, batches[:1])
        train.state_dict()  # which waits for updates
        look(batches[0])
        for each in (model, twin):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.9)
    assert ours == theirs
    train.state_dict()
    assert_same_state(model, twin)


@pytest.mark.parametrize("way", WAYS[1:4])
def test_other_memory_for_a_parameter_is_refused_and_training_goes_on_with_its_own(way):
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    train = loop_of(model, adamw(model), uniform(model, 0, **way), batches[0], forward)
    train.step(batches[0])
    train.state_dict()
    weight = model.layers[1].up.weight
    own, weight.data = weight.data, torch.zeros_like(weight)
    for call in (train.step, train.evaluate):
        with pytest.raises(UsageError, match=r"write into it: parameter\.data\.copy_"):
            call(batches[0])
    with pytest.raises(UsageError, match=r"a parameter of 'layers\.1' \(\[64, 16\]\)"):
        train.state_dict()
    weight.data = own
    assert train.step(batches[0]).isfinite()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_what_is_written_into_streamed_parameters_is_read_though_all_lie_in_buffers(num_layers):
    """Buffers of so few blocks hold them all from an evaluation on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))
    twin, batch = copy.deepcopy(model), (torch.randn(4, 3), torch.randint(3, (4,)))
    section = uniform(model, 0, parameters="streamed", update="host")
    train = loop_of(model, adamw(model), section, batch, classified)
    train.step(batch)
    for layer in model:
        train.evaluate(batch)
        with torch.no_grad():
            layer.weight.mul_(-3)
        twin.load_state_dict(model.state_dict())
        assert train.evaluate(batch).item() == classified(twin, batch).item()


class Fragile(nn.Module):
    """Layers between which a backward pass may fail."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.fails = False

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1 and self.fails and x.requires_grad:
                x.register_hook(self._fail)
        return x

    def _fail(self, _):
        raise FloatingPointError("in the backward pass")


def with_failures(model, train_on, batches, look):
    """Losses of steps of which every second fails in its backward pass, and of ``look``s then."""
    for number, batch in enumerate(batches):
        model.fails = bool(number % 2)
        if not model.fails:
            yield train_on(batch).item()
            continue
        with pytest.raises(FloatingPointError):
            train_on(batch)
        look(batch)


@pytest.mark.parametrize("way", [*WAYS[::2], None])
@pytest.mark.parametrize("is_own", [True, False], ids=["own loop", "steps"])
def test_gradients_of_a_backward_pass_that_failed_are_in_no_later_update(way, is_own):
    torch.manual_seed(0)
    model = Fragile().eval()
    twin = copy.deepcopy(model)
    batches = [(torch.randn(8, 16), torch.randint(3, (8,))) for _ in range(6)]
    optimizer, plain = adamw(model), adamw(twin)
    section = mixed(model, 0) if way is None else uniform(model, 0, **way)
    # Gradients that are clipped are gathered first: nothing is updated by a part of them.
    train = loop_of(model, optimizer, section, batches[0], classified, clip_norm=1e9)

    def trained(loss_of, optimizer):
        def train_on(batch):
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9)
            optimizer.step()
            return loss

        return train_on

    ours = trained(train, optimizer) if is_own else train.step
    theirs = trained(lambda batch: classified(twin, batch), plain)
    found = [*with_failures(model, ours, batches, train.predict)]
    assert found == [*with_failures(twin, theirs, batches, lambda batch: None)]
    train.state_dict()
    assert_same_state(model, twin)


class Stumbling(nn.Linear):
    """Fails on demand when its parameters have been brought."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise FloatingPointError("in the forward pass")
        return super().forward(x)


@pytest.mark.parametrize("way", WAYS[1:4])
def test_steps_that_failed_in_their_forward_pass_leave_nothing_in_the_way(way):
    torch.manual_seed(0)
    model = nn.Sequential(*(Stumbling(3, 3) for _ in range(4)))
    twin, batch = copy.deepcopy(model), (torch.randn(4, 3), torch.randint(3, (4,)))
    optimizer, plain = adamw(model), adamw(twin)
    train = loop_of(model, optimizer, uniform(model, 0, **way), batch, classified)
    ours = [train.step(batch).item()]
    for layer in reversed(model):
        layer.fails = True
        with pytest.raises(FloatingPointError):
            train.step(batch)
        layer.fails = False
    ours += [train.step(batch).item() for _ in range(2)]
    assert ours == [*zeroed_between(lambda each: classified(twin, each), plain, [batch] * 3)]
    train.state_dict()
    assert_same_state(model, twin)


class Refusing(torch.optim.SGD):
    """Fails once to update the last layer."""

    last = None

    def step(self, closure=None):
        shapes = [p.shape for group in self.param_groups for p in group["params"]]
        if self.last is not None and self.last.shape in shapes:
            type(self).last = None
            raise OSError("the optimizer's own file is full")
        return super().step(closure)


# Optimizers of unknown packages are called once for all blocks, those of torch block by block.
Refusing.step.__module__ = "torch.optim.sgd"


@pytest.mark.parametrize("way", WAYS[1:3])
def test_gradients_of_an_update_that_failed_are_in_no_later_one(way, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    twin, batch = copy.deepcopy(model), (torch.randn(4, 8), torch.randint(3, (4,)))
    optimizer, plain = Refusing(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    section = uniform(model, 0, **{**way, "parameters": "streamed", "update": "host"})
    train = loop_of(model, optimizer, section, batch, classified)
    monkeypatch.setattr(Refusing, "last", model[2].weight)
    with pytest.raises(OSError, match="is full"):
        train.step(batch)
    found = [train.step(batch).item() for _ in range(2)]
    losses = []
    for _ in range(3):
        loss = classified(twin, batch)
        plain.zero_grad()
        loss.backward()
        if not losses:
            twin[2].zero_grad()
        plain.step()
        losses.append(loss.item())
    assert found == losses[1:]
    train.state_dict()
    assert_same_state(model, twin)


def test_gradients_of_a_clipped_update_that_failed_are_in_no_later_one(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    twin, batch = copy.deepcopy(model), (torch.randn(4, 8), torch.randint(3, (4,)))
    optimizer, plain = Refusing(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    train = loop_of(model, optimizer, uniform(model, 0), batch, classified, clip_norm=1e9)
    monkeypatch.setattr(Refusing, "last", model[2].weight)
    with pytest.raises(OSError, match="is full"):
        train.step(batch)
    found = [train.step(batch).item() for _ in range(3)]
    for loss in found:
        plain.zero_grad()
        expected = classified(twin, batch)
        expected.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
        plain.step()
        assert loss == expected.item()


@pytest.mark.filterwarnings("ignore:.*do not call the same modules")
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
def test_parameters_that_came_after_the_model_was_prepared_are_refused(options):
    model, batches, forward = MODELS["blocks"]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train = loop_of(model, optimizer, uniform(model, 0), batches[0], forward, **options)
    train.step(batches[0])
    model.layers[1] = Layer()
    optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    with pytest.raises(UsageError, match=r"did not have when it was prepared|replaced since"):
        train.step(batches[0])


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[10]], ids=str)
def test_evaluations_of_another_thread_take_turns_with_steps(way):
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    # Generators of random numbers are of the process: what one thread draws another misses.
    model.eval()
    twin, is_over, failed = copy.deepcopy(model), threading.Event(), []
    optimizer, plain = adamw(model), adamw(twin)
    train = loop_of(model, optimizer, uniform(model, 0, **way), batches[0], forward)

    def evaluate():
        try:
            while not is_over.is_set():
                train.evaluate(batches[1])
        except BaseException as error:
            failed.append(error)

    other = threading.Thread(target=evaluate)
    other.start()
    try:
        ours = [train.step(batch).item() for batch in batches * 5]
    finally:
        is_over.set()
        other.join()
    assert not failed
    assert ours == plain_steps(twin, plain, batches * 5, forward=forward)
