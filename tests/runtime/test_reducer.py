"""The gradient reducer: sums of one process, the same collectives on all ranks, and overlap."""

from __future__ import annotations

import forked
import pytest
import torch
from runtime.reducer_ranks import by_strategy, hooked, in_bfloat16, own_loop, traced

from hocket.plan.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, fill_buckets


def test_gradients_of_branches_frozen_and_tied_parameters_are_those_of_one_process() -> None:
    found = forked.answers(2, hooked)
    assert all(rank["error"] < 1e-12 for rank in found)
    assert found[0]["sizes"] == found[1]["sizes"], "ranks issue the same collectives"
    # The first bucket of a step goes before the last gradients are there.
    assert all(num <= 2 for step, num in enumerate(found[0]["first"], 1) if step != 5)


def test_gradients_are_summed_in_their_own_dtype_and_in_float32_on_request() -> None:
    found = forked.answers(2, in_bfloat16)
    parts = [
        torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for rank in range(2)
    ]
    for rank in found:
        assert rank["own"] == (parts[0] + parts[1]).float().tolist()
        assert rank["float32"] == (parts[0].float() + parts[1].float()).bfloat16().float().tolist()


def test_a_loop_with_its_own_backward_clipping_and_step_trains_as_one_process_does() -> None:
    assert max(forked.answers(2, own_loop)) < 1e-12


def test_a_traced_step_issues_buckets_while_it_runs_and_only_in_the_last_microbatch() -> None:
    alone, plain, last = forked.answers(2, traced)[0]
    assert len(alone) == 1, "only the loss of a batch that is accumulated is summed"
    # One bucket per gradient, each issued when the backward pass has made it; then the loss.
    assert plain == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert len(last) == len(plain)


@pytest.mark.parametrize("sizes", [[10], [2**19] * 5, [30 * 2**20, 4, 4]])
def test_the_first_bucket_is_small_and_every_gradient_is_in_one(sizes) -> None:
    buckets = list(fill_buckets(("key", size) for size in sizes))
    assert [at for bucket in buckets for at in bucket] == list(range(len(sizes)))
    limits = [FIRST_BUCKET_BYTES] + [BUCKET_BYTES] * len(buckets)
    for bucket, limit in zip(buckets[:-1], limits, strict=False):
        assert sum(sizes[at] for at in bucket) >= limit
        assert sum(sizes[at] for at in bucket[:-1]) < limit


def _require_same_losses(device: str, strategy: str, dtype: str, count: int = 2) -> None:
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    variables = {"LOCAL_RANK": "0", "HOCKET_CLUSTER": f"{count}xv100-16g"}
    for found, expected in forked.answers(count, by_strategy, device, strategy, dtype, **variables):
        assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_priorities_with_accumulation_train_as_one_process_does(dtype) -> None:
    _require_same_losses("cpu", "priority", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["ddp", "replayed", "priority"])
def test_ranks_that_share_a_gpu_train_as_one_process_does(strategy, dtype) -> None:
    _require_same_losses("cuda", strategy, dtype)
