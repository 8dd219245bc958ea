"""Embeddings over tables train as torch's own do, on one worker and bulk synchronously on two."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.tables import Embedding, TableOptimizer, TableSpec, local_tables


def batches(seed, count=12):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        numbers = torch.from_numpy(rng.integers(0, 9, (8, 2)))
        yield numbers, torch.from_numpy(rng.standard_normal(8).astype("f4"))


def loss_of(table, numbers, wanted):
    found = table(numbers)
    return ((found[:, 0] * found[:, 1]).sum(1) - wanted).square().mean()


def test_one_worker_trains_as_torch_does():
    with local_tables([TableSpec("rows", 9, 3)]) as group:
        mine = Embedding(group.workers[0]["rows"], std=0.5, seed=3)
        start = mine.weight()
        assert 0.3 < start.std() < 0.7
        torchs = nn.Embedding(9, 3, sparse=True)
        torchs.weight.data.copy_(start)
        own = TableOptimizer([mine], lr=0.1)
        theirs = torch.optim.SGD(torchs.parameters(), lr=0.1)
        for numbers, wanted in batches(0):
            losses = [loss_of(each, numbers, wanted) for each in (mine, torchs)]
            torch.testing.assert_close(*losses)
            for optimizer, loss in zip((own, theirs), losses, strict=True):
                optimizer.zero_grad() if optimizer is theirs else None
                loss.backward()
                optimizer.step()
        torch.testing.assert_close(mine.weight(), torchs.weight.data, atol=1e-6, rtol=1e-5)
        assert "staleness=1" in repr(mine)


def test_two_synchronous_workers_train_as_one_with_both_batches():
    torchs = nn.Embedding(9, 3)
    with local_tables([TableSpec("rows", 9, 3, staleness=0)], num_clients=2) as group:
        embeddings = [Embedding(worker["rows"], std=0.5) for worker in group.workers]
        torchs.weight.data.copy_(embeddings[0].weight())

        def work(embedding, seed):
            optimizer = TableOptimizer([embedding], lr=0.05)
            for numbers, wanted in batches(seed):
                loss_of(embedding, numbers, wanted).backward()
                optimizer.step()

        threads = [
            threading.Thread(target=work, args=(each, seed)) for seed, each in enumerate(embeddings)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = embeddings[0].weight()
    optimizer = torch.optim.SGD(torchs.parameters(), lr=0.05)
    for one, other in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        (loss_of(torchs, *one) + loss_of(torchs, *other)).backward()
        optimizer.step()
    torch.testing.assert_close(found, torchs.weight.data, atol=1e-5, rtol=1e-4)


def test_wrong_use_is_told_and_evaluation_leaves_nothing_behind():
    with local_tables([TableSpec("rows", 9, 3)], num_clients=2) as group:
        one, other = (Embedding(worker["rows"]) for worker in group.workers)
        with pytest.raises(UsageError, match="one worker"):
            TableOptimizer([one, other])
        with pytest.raises(UsageError, match="lr"):
            TableOptimizer([one], lr=0.0)
        one.eval()
        one(torch.tensor([1, 2]))
        assert not one.used
        assert one(torch.tensor([[1, 2], [2, 2]])).shape == (2, 2, 3)
