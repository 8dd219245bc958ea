"""The byte-counting allocator counts what a backward pass holds without it."""

import threading

import torch

from hocket.runtime.memory.ledger import Ledger

NUM_BYTES = 4000
SMALL_BYTES = 2 * 4
"""The gradient of a loss, and that of a part of it."""


class Summed(torch.autograd.Function):
    """A sum whose gradient is a tensor of its own, and that is told to somebody."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.told = told
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        made = torch.ones(NUM_BYTES // 4)
        ctx.told(made)
        return made, None


class SummedByItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(NUM_BYTES // 4) + torch.ones(NUM_BYTES // 4)


def backward_bytes(loss_of):
    x = torch.zeros(NUM_BYTES // 4, requires_grad=True)
    ledger = Ledger()
    with ledger:
        loss = loss_of(x)
        before = ledger.peak_bytes = ledger.held_bytes
        loss.backward()
    return ledger.peak_bytes - before


def test_gradients_that_nobody_else_looks_at_are_added_up_in_place():
    addresses = []
    loss_of = lambda x: (  # noqa: E731
        Summed.apply(x, lambda made: addresses.append(made.data_ptr()))
        + Summed.apply(x, lambda made: addresses.append(made.data_ptr()))
    )  # fmt: skip
    x = torch.zeros(NUM_BYTES // 4, requires_grad=True)
    loss_of(x).backward()
    assert x.grad.data_ptr() == addresses[0], "as PyTorch does without a ledger"
    assert 0 <= backward_bytes(loss_of) - 2 * NUM_BYTES <= SMALL_BYTES


def test_gradients_that_somebody_looks_at_are_not():
    kept = []
    loss_of = lambda x: Summed.apply(x, kept.append) + Summed.apply(x, kept.append)  # noqa: E731
    x = torch.zeros(NUM_BYTES // 4, requires_grad=True)
    loss_of(x).backward()
    assert x.grad.data_ptr() != kept[0].data_ptr()
    kept.clear()
    assert 0 <= backward_bytes(loss_of) - 3 * NUM_BYTES <= SMALL_BYTES


def test_sums_that_a_function_makes_itself_are_not():
    assert 0 <= backward_bytes(SummedByItself.apply) - 3 * NUM_BYTES <= SMALL_BYTES


def test_what_other_threads_let_go_is_counted_once():
    ledger = Ledger()
    with ledger:
        kept = [torch.ones(1) for _ in range(20_000)]

        def let_go():
            while kept:
                kept.pop()

        thread = threading.Thread(target=let_go)
        thread.start()
        for _ in range(20_000):
            torch.ones(1)
        thread.join()
    assert ledger.held_bytes == 0
