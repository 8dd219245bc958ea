"""What users have at hand is taken as it is: wrappers, DataLoaders, ``(x, y)`` with a loss."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hocket
import hocket.training
from hocket.base.errors import UsageError
from hocket.capture.given import WrapperWarning


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    data = TensorDataset(torch.randn(12, 6), torch.randint(0, 3, (12,)))
    return DataLoader(data, batch_size=4, shuffle=True)


def groups(model: nn.Module) -> list[dict[str, object]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


class Stream(IterableDataset[torch.Tensor]):
    """Rows that are read once, or anew for each pass."""

    def __init__(self, *, once: bool) -> None:
        self.rows = list(torch.randn(8, 6))
        self.read = iter(self.rows) if once else None

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.rows) if self.read is None else self.read


def test_a_loader_that_can_be_read_once_keeps_its_first_batch() -> None:
    model = nn.Sequential(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    squared = {"forward": lambda model, rows: model(rows).square().mean()}
    once, anew = (DataLoader(Stream(once=once), batch_size=4) for once in (True, False))
    with pytest.raises(UsageError, match="would be missing in training"):
        hocket.prepare(model, optimizer, once, **squared)
    assert len(list(once)) == 2
    train = hocket.prepare(model, optimizer, anew, **squared)
    assert len([train.step(batch) for batch in anew]) == 2


@pytest.mark.parametrize("loss", [functional.cross_entropy, nn.CrossEntropyLoss(), "cross-entropy"])
def test_pairs_of_a_loader_train_with_a_loss_of_output_and_target(loss: object) -> None:
    model = built()
    batches, twin = loader(), copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(groups(m), lr=1e-2) for m in (model, twin))
    planned = hocket.auto(model, batches, on="1xv100-16g", loss=loss, optimizer=optimizer)
    assert planned.step_s > 0
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    train = hocket.prepare(model, optimizer, batches, loss=loss)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.array_equal(np.random.get_state()[1], drawn[2])
    torch.manual_seed(3)
    found = [train.step(batch).item() for batch in batches]
    torch.manual_seed(3)
    expected = []
    for x, y in batches:
        plain.zero_grad()
        value = functional.cross_entropy(twin(x), y)
        value.backward()
        plain.step()
        expected.append(value.item())
    assert found == expected


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad])
def test_auto_plans_any_optimizer_and_prepare_follows(make: type[torch.optim.Optimizer]) -> None:
    model, batch = built(), (torch.randn(4, 6), torch.randint(0, 3, (4,)))
    optimizer = make(model.parameters())  # type: ignore[call-arg]
    planned = hocket.auto(model, batch, on="2xv100-16g", planners="auto",
                          loss=functional.cross_entropy, optimizer=optimizer)  # fmt: skip
    train = hocket.prepare(model, optimizer, batch, plan=planned, loss=functional.cross_entropy)
    assert torch.isfinite(train.step(batch))


def test_a_wrapped_model_is_unwrapped() -> None:
    model, batch = built(), torch.randn(4, 6)
    train = hocket.prepare(
        nn.DataParallel(model), torch.optim.SGD(model.parameters(), 0.1), batch, loss="mse"
    )
    assert train.model is model
    assert not train.lost
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(WrapperWarning, match="not the kernels that torch.compile made"):
        train = hocket.prepare(
            compiled, torch.optim.SGD(model.parameters(), 0.1), batch, loss="mse"
        )
    assert train.model is model


@pytest.mark.parametrize("part", ["0", ""])
def test_compiled_parts_train_and_a_warning_says_that_their_kernels_are_not_used(part: str) -> None:
    model, batch = built().eval(), torch.randn(4, 6)
    twin = copy.deepcopy(model)
    model.get_submodule(part).compile(backend="eager")
    with pytest.warns(WrapperWarning, match="not the kernels that torch.compile made"):
        train = hocket.prepare(model, torch.optim.SGD(model.parameters(), 0.1), batch, loss="mse")
    plain = hocket.prepare(twin, torch.optim.SGD(twin.parameters(), 0.1), batch, loss="mse")
    assert [train.step(batch) for _ in range(2)] == [plain.step(batch) for _ in range(2)]


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_data_parallel_of_several_ranks_is_refused_and_of_one_unwrapped(memory: Any) -> None:
    model, batch = built(), torch.randn(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fake_ranks(2):
        wrapped = DistributedDataParallel(model)
        with pytest.raises(UsageError, match=r"DistributedDataParallel of 2 ranks"):
            hocket.prepare(wrapped, optimizer, batch, loss="mse", memory=memory)
        assert hocket.capture(wrapped, batch, loss="mse").num_ops > 0
    with fake_ranks(1):
        wrapped = DistributedDataParallel(model)
        train = hocket.prepare(wrapped, optimizer, batch, loss="mse", memory=memory)
        assert train.model is model
        assert not train.lost


def test_a_model_of_fully_shard_is_refused() -> None:
    model = built()
    with fake_ranks(2):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(UsageError, match="sharded by torch's fully_shard"):
            hocket.prepare(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 6))
