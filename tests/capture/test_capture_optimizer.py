"""Optimizers as people hand them over: those of torch.optim, with their settings."""

import copy

import pytest
import torch
from runtime.executed_program import execute, named_tensors
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture import capture, capture_program
from hocket.capture.optimizer import OPTIMIZER_STATES, TORCH_OPTIMIZERS, optimizer_of_meta
from hocket.cli.options import _OPTIMIZERS
from hocket.cost.families import family_of
from hocket.graph import Phase, Role


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(4, 5)


MADE = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.4, weight_decay=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.7, weight_decay=0.1),
}


@pytest.mark.parametrize("name", MADE)
def test_three_steps_are_those_of_the_optimizer_with_its_settings(name):
    model, batch = net()
    plain = copy.deepcopy(model)
    graph, program = capture_program(
        model, batch, loss="mse", optimizer=MADE[name](model.parameters())
    )
    assert graph.meta["optimizer"] == name
    update = MADE[name](plain.parameters())
    tensors = named_tensors(model, batch)
    for step in (1, 2, 3):
        tensors |= execute(program, tensors, step=step).state
        update.zero_grad()
        plain(batch).square().mean().backward()
        update.step()
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(tensors[key], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_graph_notes_the_settings_so_that_the_step_can_be_captured_again():
    model, batch = net()
    given = torch.optim.SGD(model[0].parameters(), lr=0.25)
    graph = capture(model, batch, loss="mse", optimizer=given)
    updates = [graph.op_names[op] for op in range(graph.num_ops)
               if graph.op_phase[op] == Phase.OPTIMIZER]  # fmt: skip
    assert len(updates) == 2  # weight and bias of the first layer alone
    again = capture(model, batch, loss="mse", optimizer=optimizer_of_meta(graph.meta))
    assert again.content_hash == graph.content_hash
    assert again.meta["optimizer_settings"] == {"lr": 0.25}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS computes the loss several times"),
        (lambda p: torch.optim.SGD([torch.zeros(1, requires_grad=True)]), "not the model's"),
        (lambda p: 7, "cannot be of type 'int'"),
        (lambda p: torch.optim.AdamW, "AdamW is a class of optimizers"),
        (lambda p: "sgb", "unknown optimizer 'sgb'"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(make, message):
    model, batch = net()
    with pytest.raises(UsageError, match=message):
        capture(model, batch, optimizer=make(list(model.parameters())))


@pytest.mark.parametrize(
    ("make", "num_states"),
    [
        (lambda p: torch.optim.RMSprop(p), 1),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), 1),
        (lambda p: torch.optim.Adafactor(p), 0),
        (lambda p: torch.optim.NAdam(p), 2),
        (lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 1}]), 2),
        (lambda p: "rmsprop", 1),
    ],
)
def test_any_optimizer_is_planned_by_what_it_keeps(make, num_states):
    model, batch = net()
    graph = capture(model, batch, loss="mse", optimizer=make(list(model.parameters())))
    is_given = graph.tensor_producer < 0
    parameters, states = (
        sorted(graph.tensor_bytes[is_given & (graph.tensor_role == role)].tolist())
        for role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
    )
    assert states == sorted(num_states * parameters)
    moved = int(graph.bytes_touched[graph.op_phase == Phase.OPTIMIZER].sum())
    assert moved == sum(parameters) * (2 * (2 + num_states) - 1)
    again = capture(model, batch, loss="mse", optimizer=optimizer_of_meta(graph.meta))
    assert again.content_hash == graph.content_hash


def test_the_command_line_names_the_optimizers_that_capture_knows():
    assert {*_OPTIMIZERS} == {*OPTIMIZER_STATES, *TORCH_OPTIMIZERS, "none"}


def test_sparse_gradients_are_refused_with_what_to_change():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(UsageError, match="makes sparse gradients") as caught:
        capture(model, torch.zeros(3, dtype=torch.long))
    assert "sparse=False" in caught.value.hint
    assert "SparseAdam" in caught.value.hint
    assert capture(model, torch.zeros(3, dtype=torch.long), optimizer=None).num_ops


def test_muon_counts_the_products_of_its_iterations():
    graph = capture(nn.Linear(64, 32, bias=False), torch.zeros(4, 64), optimizer="muon")
    update = graph.op_phase == Phase.OPTIMIZER
    assert graph.flops[update].tolist() == [5 * (4 * 32**2 * 64 + 2 * 32**3)]
    assert family_of("optimizer.muon") == "matmul"
    assert family_of("optimizer.rmsprop") == "optimizer"
