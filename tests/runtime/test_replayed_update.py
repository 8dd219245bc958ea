"""Updates that are replayed are those that would be called."""

import copy

import pytest
import torch
from torch import nn

from hocket.runtime.replay import ReplayedUpdate


class Captures:
    """Stands in for CUDA graphs: what is captured is not run, a replay runs it."""

    def __init__(self):
        self.num_captured = self.num_replayed = 0

    def __call__(self, run):
        self.num_captured += 1

        def replay():
            self.num_replayed += 1
            run()

        return replay


def trained(update, make, steps, *, between=lambda step, optimizer: None, lend=True):
    """Parameters after some steps, with gradients that stay where they are."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    gradients = {p: torch.empty_like(p) for p in model.parameters()}
    for step in range(steps):
        between(step, optimizer)
        for number, parameter in enumerate(model.parameters()):
            if not lend:
                gradients[parameter] = torch.empty_like(parameter)
            parameter.grad = gradients[parameter].fill_(step + number)
        update(optimizer)
    return [p.detach() for p in model.parameters()], optimizer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def called(make, steps, **options):
    """Parameters after steps that are called one by one."""
    return trained(lambda optimizer: optimizer.step(), make, steps, **options)[0]


def are_equal(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def replayed(make, steps, **options):
    """Whether parameters are those of called steps, and how many were captured and replayed."""
    captures = Captures()
    found, _ = trained(ReplayedUpdate(captures), make, steps, **options)
    is_same = are_equal(found, called(make, steps, **options))
    return is_same, captures.num_captured, captures.num_replayed


def test_updates_are_replayed_once_they_repeat():
    # Of the first step there are no states yet.
    assert replayed(adamw, 8) == (True, 1, 5)
    assert replayed(sgd, 8) == (True, 1, 5)


def test_a_changed_setting_is_called_and_captured_anew():
    def schedule(step, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 5 else 0.01

    def fall(step, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)

    assert replayed(adamw, 9, between=schedule) == (True, 2, 4)
    assert replayed(adamw, 9, between=fall) == (True, 0, 0)


def test_states_that_were_loaded_are_seen():
    def load(step, optimizer):
        if step == 5:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    assert replayed(adamw, 10, between=load) == (True, 2, 5)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
    lambda p: type("Own", (torch.optim.AdamW,), {})(p, lr=0.1, fused=True),
])  # fmt: skip
def test_optimizers_that_keep_something_on_the_host_are_called(make):
    assert replayed(make, 6) == (True, 0, 0)
    update = ReplayedUpdate(Captures())
    trained(update, make, 3)
    assert update.message in (
        "eager: its optimizer was not made with fused=True",
        "eager: RMSprop may keep state on the host",
        "eager: Own may keep state on the host",
    )


def test_who_looks_on_is_not_left_out():
    seen = []

    def hook(step, optimizer):
        if step == 4:
            optimizer.register_step_post_hook(lambda *_: seen.append(step))

    assert replayed(adamw, 7, between=hook) == (True, 1, 1)
    assert len(seen) == 2 * 3


def test_what_cannot_be_captured_is_called():
    def refuse(run):
        raise RuntimeError("no graphs here")

    update = ReplayedUpdate(refuse)
    assert are_equal(trained(update, adamw, 6)[0], called(adamw, 6))
    assert update.message == "eager: RuntimeError: no graphs here"
