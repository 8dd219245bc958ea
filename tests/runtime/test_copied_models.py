"""A model that trains within a budget can be copied, saved whole and captured."""

import copy
import io

import pytest
import torch
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, plain_steps

import hocket
from hocket.base.errors import UsageError


@pytest.fixture
def training():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    model.eval()  # without dropout
    train = hocket.prepare(model, adamw(model), batches[0], forward=forward, memory=90_000)
    assert any(block.parameters == "streamed" for block in train.memory.section.blocks)
    train.step(batches[0])
    return model, batches, forward, train


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    # Nothing of hocket is needed to read it.
    assert b"hocket" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, loaded])
def test_a_copy_is_a_plain_model_with_the_newest_weights(training, copied):
    model, batches, forward, train = training
    other = copied(model)
    assert all(torch.equal(value, other.state_dict()[name])
               for name, value in train.state_dict()["model"].items())  # fmt: skip
    fresh = MODELS["blocks"]()[0].eval()
    fresh.load_state_dict(model.state_dict())
    ours = plain_steps(other, adamw(other), batches, forward=forward)
    assert ours == plain_steps(fresh, adamw(fresh), batches, forward=forward)
    assert train.step(batches[0]).isfinite()


def test_a_model_in_training_is_captured_and_planned_as_it_is(training):
    model, batches, forward, train = training
    other = copy.deepcopy(model)
    ours, theirs = (hocket.capture(each, batches[0], forward=forward) for each in (model, other))
    assert ours.op_names == theirs.op_names
    planned = hocket.auto(model, batches[0], forward=forward, on="1xh200")
    assert planned.problem.graph.op_names == theirs.op_names
    before = copy.deepcopy(other)
    losses = [train.step(batch).item() for batch in batches[1:]]
    assert all(parameter.grad is None for parameter in other.parameters())
    assert len(losses) == len(batches) - 1
    assert all(
        torch.equal(a, b) for a, b in zip(before.parameters(), other.parameters(), strict=True)
    )


def test_asynchronous_updates_are_waited_for_by_a_copy_and_refuse_a_file():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    train = hocket.prepare(
        model, adamw(model), batches[0], forward=forward, memory=90_000, async_update=True
    )
    train.step(batches[0])
    other = copy.deepcopy(model)
    state = train.state_dict()["model"]
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    with pytest.raises(UsageError, match="async_update=True cannot be pickled"):
        torch.save(model, io.BytesIO())
