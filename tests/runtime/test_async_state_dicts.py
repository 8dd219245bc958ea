"""State dicts between steps, while the host still updates."""

import copy
import io
import time

import pytest
import torch
from runtime.budget_loops import loop_of
from runtime.budget_models import MODELS
from runtime.train_loops import assert_same_state, plain_steps

from hocket.base.errors import UsageError
from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.model_blocks import block_names


class _Slow(torch.optim.SGD):
    """Whoever does not wait reads weights of before."""

    def step(self, closure=None):
        time.sleep(0.05)
        return super().step(closure)


# Optimizers of others update in `step`, as a whole.
_Slow.step.__module__ = "torch.optim.sgd"


def _slow(model):
    return _Slow(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def trained():
    """A loop after a step, whose updates are under way, and plain PyTorch after it."""
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    model.eval()
    twin = copy.deepcopy(model)
    blocks = [MemoryBlock(name=name, parameters="streamed", update="host")
              for name in block_names(model)]  # fmt: skip
    section = Memory(budget_bytes=(0,), blocks=tuple(blocks), async_update=True)
    train = loop_of(model, _slow(model), section, batches[0], forward)
    train.step(batches[0])
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    plain_steps(twin, plain, batches[:1], forward=forward)
    return train, twin, plain


def test_the_models_own_state_dict_waits_for_updates(trained):
    train, twin, _ = trained
    saved = {name: tensor.clone() for name, tensor in train.model.state_dict().items()}
    for name, expected in twin.state_dict().items():
        assert torch.equal(saved[name], expected), name


def test_the_optimizers_own_state_dict_waits_for_updates(trained):
    train, _, plain = trained
    saved = copy.deepcopy(train.optimizer.state_dict()["state"])
    expected = plain.state_dict()["state"]
    assert saved.keys() == expected.keys()
    for number, states in expected.items():
        assert torch.equal(saved[number]["momentum_buffer"], states["momentum_buffer"])


def test_what_is_loaded_is_not_overwritten_by_updates_that_were_under_way(trained):
    train, twin, _ = trained
    zeros = {name: torch.zeros_like(tensor) for name, tensor in twin.state_dict().items()}
    train.model.load_state_dict(zeros)
    train._strategy.leave()
    twin.load_state_dict(zeros)
    assert_same_state(train.model, twin)


def test_a_model_that_was_left_waits_for_nobody(trained):
    train, _, _ = trained
    train._strategy.leave()
    for owner in (train.model, train.optimizer):
        hooks = [value for name, value in vars(owner).items() if name.endswith("_dict_pre_hooks")]
        assert hooks
        assert not any(hooks)


def test_a_copy_of_a_model_waits_for_updates_and_a_file_says_what_to_do(trained):
    train, twin, _ = trained
    assert_same_state(copy.deepcopy(train.model), twin)
    with pytest.raises(UsageError, match=r"save model\.state_dict\(\)"):
        torch.save(train.model, io.BytesIO())
    train._strategy.leave()
    assert_same_state(copy.deepcopy(train.model), twin)


def test_a_model_whose_plan_moves_nothing_can_be_copied_and_pickled():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    model.eval()
    train = loop_of(model, _slow(model), Memory(budget_bytes=(0,), blocks=()), batches[0], forward)
    train.step(batches[0])
    twin = copy.deepcopy(model)
    assert_same_state(twin, model)
    train.step(batches[1])
    plain_steps(twin, _slow(twin), batches[:1], forward=forward)
    assert not torch.equal(twin.enter.weight, model.enter.weight)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert_same_state(torch.load(file, weights_only=False), model)
