"""Training by `hocket.prepare` equals plain PyTorch: by plans, placements, ranks and budgets."""

from __future__ import annotations

import copy
import os
import warnings

import forked
import pytest
import torch
from blackbox import tiny_models
from blackbox.command import hocket as command
from blackbox.tiny_models import MODELS

import hocket

STEPS = 4
PLACED = ("mlp", "branches", "batch_norm", "dropout", "lstm", "tied_language", "in_place")
BUDGETED = {"deep_mlp": 120_000, "residual": 90_000, "batch_norm": 7_000, "dropout": 9_000,
            "language": 120_000}  # fmt: skip
"""Bytes that each may hold."""
SHARED = {
    "data": ("residual", "data 2"),
    "pipeline": ("deep_mlp", "pipeline 2"),
    "tensor": ("gpt2", "tensor 2"),
}
"""Model and constraint of its plan for two ranks."""
TOLERANCE = 1e-6
"""Sums of parts of a batch round otherwise than the sum of the whole, in single precision."""


def drawn(build, seed=0):
    torch.manual_seed(seed)
    return build()


def adamw(model):
    """Two groups with settings of their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": 3e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_loss(model, batch):
    returned = model(**batch) if isinstance(batch, dict) else model(*batch)
    return returned["loss"] if isinstance(returned, dict) else returned


def plain_losses(model, optimizer, batch, steps=STEPS):
    losses = []
    for _ in range(steps):
        loss = plain_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(model, batch, optimizer=adamw, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hocket.prepare(model, optimizer(model), batch, **options)


def assert_trains_as_plain(build, make):
    """Compare losses and state bit for bit; ``make`` prepares a model for a batch."""
    model, batch = drawn(build)
    twin = copy.deepcopy(model)
    train = make(model, batch)
    torch.manual_seed(1)
    losses = [train.step(batch).item() for _ in range(STEPS)]
    torch.manual_seed(1)
    assert losses == plain_losses(twin, adamw(twin), batch)
    found, expected = train.model.state_dict(), twin.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    return train


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_prepare_trains_as_plain_pytorch(build):
    assert_trains_as_plain(build, prepared)


@pytest.mark.parametrize("name", PLACED)
def test_ops_on_three_devices_train_as_plain_pytorch(name):
    def make(model, batch):
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = hocket.capture(model, batch)
        planned = hocket.plan_graph(graph, "3xv100-16g", planners="layer-blocks")
        assert sum(peak > 0 for peak in planned.peak_bytes.values()) > 1
        return prepared(model, batch, plan=planned)

    assert_trains_as_plain(getattr(tiny_models, name), make)


@pytest.mark.parametrize(("name", "memory"), BUDGETED.items())
def test_a_memory_budget_is_kept_and_trains_as_plain_pytorch(name, memory):
    train = assert_trains_as_plain(
        getattr(tiny_models, name), lambda model, batch: prepared(model, batch, memory=memory)
    )
    assert train.memory.peak_bytes <= memory


def test_a_budget_that_nothing_keeps_is_refused():
    model, batch = drawn(tiny_models.deep_mlp)
    with pytest.raises(hocket.HocketError, match=r"hint: .*memory"):
        prepared(model, batch, memory=1000)


def test_a_checkpoint_resumes_bit_for_bit(tmp_path):
    model, batch = drawn(tiny_models.dropout)
    train = prepared(model, batch, seed=3)
    for _ in range(2):
        train.step(batch)
    saved = train.save(tmp_path)
    expected = [train.step(batch).item() for _ in range(2)]
    resumed = prepared(drawn(tiny_models.dropout, seed=5)[0], batch, seed=3)
    resumed.load(saved)
    assert [resumed.step(batch).item() for _ in range(2)] == expected


def test_accumulation_and_clipping_are_those_of_plain_pytorch():
    model, batch = drawn(tiny_models.gelu_mlp)
    twin = copy.deepcopy(model)
    train, plain = prepared(model, batch, accumulate=2, clip_norm=0.1), adamw(twin)
    for number in range(1, 5):
        loss = plain_loss(twin, batch)
        (loss / 2).backward()
        assert train.step(batch).item() == loss.item()
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            plain.step()
            plain.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(
        model.state_dict().values(), twin.state_dict().values(), strict=True
    ))  # fmt: skip


@pytest.fixture(scope="module")
def in_ranks(tmp_path_factory):
    """Largest differences of losses and weights from one process, for each way to use two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, (model, must) in SHARED.items():
        path, factory = folder / f"{name}.json", f"blackbox.tiny_models:{model}"
        options = ("--must", must, "--optimizer", "sgd-momentum", "-o", path, "--json")
        made = command("plan", factory, "--on", "2xcpu-core", *options)
        assert made.code == 0, made.stderr
    return forked.answers(2, differences, folder)


def differences(tell, folder):
    """One of two ranks that train each model by its plan."""
    return {name: _difference(folder / f"{name}.json", model)
            for name, (model, _) in SHARED.items()}  # fmt: skip


def _difference(plan, name):
    model, batch = drawn(getattr(tiny_models, name))
    twin = copy.deepcopy(model)
    if int(os.environ["RANK"]):  # the first rank's weights are taken
        for parameter in model.parameters():
            parameter.data.mul_(2.0)
    # Adam would turn differences of tiny gradients into differences of whole steps.
    train = prepared(model, batch, sgd, plan=plan)
    losses = [train.step(batch).item() for _ in range(STEPS)]
    expected = plain_losses(twin, sgd(twin), batch)
    state = train.state_dict()["model"]
    pairs = [(state[name], tensor) for name, tensor in twin.state_dict().items()]
    return max(
        *(abs(one - other) for one, other in zip(losses, expected, strict=True)),
        *((one - other).abs().max().item() for one, other in pairs),
    )


@pytest.mark.parametrize("how", SHARED)
def test_two_ranks_train_as_one_process(in_ranks, how):
    assert all(found[how] < TOLERANCE for found in in_ranks), in_ranks
