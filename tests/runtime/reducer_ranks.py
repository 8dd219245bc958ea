"""What ranks do in the tests of the gradient reducer, each beside one process with all samples."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from runtime.divided_ranks import shared
from torch import nn

import hocket
from hocket.capture.sizes import capture_sizes
from hocket.plan import gradient_buckets
from hocket.plan.sections import Priority
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.planned_optimizer import planned_update
from hocket.transformer import ParallelConfig

FRACTIONS = (2 / 3, 1 / 3)
"""What each rank's loss counts."""


class Branches(nn.Module):
    """A tied weight, a branch that samples choose, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.chosen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, is_chosen: bool) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.last(self.chosen(x) if is_chosen else x)


def _start() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Branches().double()
    return model, [torch.randn(6, 4, dtype=torch.float64) for _ in range(8)]


def hooked(tell: Any) -> dict[str, Any]:
    """Eager steps: branches, freezing, accumulation; the collectives that each step issues."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gradient_buckets.BUCKET_BYTES = gradient_buckets.FIRST_BUCKET_BYTES = 100
    model, batches = _start()
    twin = copy.deepcopy(model)
    plain, own = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (twin, model))
    reducer = GradientReducer([(dist.group.WORLD, list(model.parameters()))])
    reducer.watch_autograd()
    issued, error = [], 0.0
    all_reduce = dist.all_reduce

    def logged(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        issued.append((tensor.numel(), sum(p.grad is not None for p in model.parameters())))
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = logged
    for step, batch in enumerate(batches):
        for each in (model, twin):
            each.first.bias.requires_grad_(step not in (3, 4))
        num_parts = 2 if step == 5 else 1
        reducer.begin()
        rows = (batch[:4], batch[4:])[rank]
        is_chosen = [step % 2 == 0, step in (0, 6)]
        for part in range(num_parts):
            reducer.is_enabled = part + 1 == num_parts
            loss = model(rows[part::num_parts], is_chosen=is_chosen[rank]).square().mean()
            (loss * FRACTIONS[rank] / num_parts).backward()
            for other, fraction in enumerate(FRACTIONS):
                rows_of = (batch[:4], batch[4:])[other][part::num_parts]
                found = twin(rows_of, is_chosen=is_chosen[other]).square().mean()
                (found * fraction / num_parts).backward()
        reducer.finish()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), step
            if p.grad is not None:
                error = max(error, float((p.grad - q.grad).abs().max()))
        for optimizer in (plain, own):
            optimizer.step()
            optimizer.zero_grad()
        issued.append((-1, step))
    dist.all_reduce = all_reduce
    sizes = [size for size, _ in issued]
    first_of_step = [issued[at + 1][1] for at, size in enumerate(sizes[:-1]) if size == -1]
    dist.destroy_process_group()
    return {"error": error, "sizes": sizes, "first": first_of_step}


def in_bfloat16(tell: Any) -> dict[str, Any]:
    """Gradients of bfloat16 summed in their own dtype, and in float32."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for name, dtype in (("own", None), ("float32", torch.float32)):
        parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
        reducer = GradientReducer([(dist.group.WORLD, [parameter])], dtype=dtype)
        reducer.begin()
        parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16()
        reducer.finish()
        assert parameter.grad.dtype == torch.bfloat16
        found[name] = parameter.grad.float().tolist()
    dist.destroy_process_group()
    return found


def own_loop(tell: Any) -> float:
    """The user's own backward, clipping and step on traced steps: as one process, on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    batches = [torch.randn(9, 6, dtype=torch.float64) for _ in range(6)]

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    plan = ParallelConfig(data=2, global_batch=9, shares=(5, 4))
    train = hocket.prepare(model, optimizers[0], batches[0], plan=plan, forward=loss_of)
    error = 0.0
    for step, batch in enumerate(batches):
        loss = train(batch)
        loss.backward()
        if step == 3:  # two batches make one update
            train(batches[0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad(set_to_none=step % 2 == 0)
        expected = loss_of(twin, batch)
        expected.backward()
        if step == 3:
            loss_of(twin, batches[0]).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizers[1].step()
        optimizers[1].zero_grad()
        error = max(error, abs(loss.item() - expected.item()))
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(error, *(float((p - q).abs().max()) for p, q in pairs))


def traced(tell: Any) -> list[list[int]]:
    """All-reduces of traced steps: how many gradients were there when each was issued.

    Of a batch that is accumulated, of one that makes an update alone, and of the last of two.
    """
    gradient_buckets.BUCKET_BYTES = gradient_buckets.FIRST_BUCKET_BYTES = 1
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    batch = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = hocket.prepare(
        model, optimizer, batch, plan=ParallelConfig(data=2, global_batch=4),
        forward=lambda model, x: model(x).square().mean(),
    )  # fmt: skip
    issued: list[int] = []
    all_reduce = dist.all_reduce

    def logged(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        issued.append(sum(p.grad is not None for p in model.parameters()))
        return all_reduce(tensor, *args, **options)

    def of_step(**options: Any) -> list[int]:
        issued.clear()
        train.step(batch, **options)
        return issued.copy()

    train.step(batch)
    dist.all_reduce = logged
    plain = of_step()
    alone = of_step(accumulate=True)
    found = [alone, plain, of_step()]
    dist.all_reduce = all_reduce
    return found


def by_strategy(tell: Any, device: str, strategy: str, dtype: str) -> tuple[list[float], ...]:
    """Losses of ranks over gloo, several of which may share one GPU, beside those of one process.

    ``ddp`` sums buckets beside the backward pass, ``replayed`` after it, ``priority`` crosses the
    end of a step; every third update accumulates two batches.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    model = made.to(device, getattr(torch, dtype))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    batches = [torch.randn(9, 16).to(device, getattr(torch, dtype)) for _ in range(10)]
    plan: Any = ParallelConfig(data=2, global_batch=9, shares=(6, 3))
    if strategy == "priority":
        update = planned_update(optimizers[0], model)
        graph = capture_sizes(model, batches[0], forward=_loss_of, optimizer=update, device=device)
        plan = shared(graph, (((), (6,)), ((), (3,))), holds_less=False)
        plan = replace(plan, plan=plan.plan.having(Priority(slice_bytes=256)))
    train = hocket.prepare(model, optimizers[0], batches[0], plan=plan, forward=_loss_of)
    if strategy == "replayed":
        train._strategy._reducer.overlaps = False
    found, expected, is_partial = [], [], False
    for step, batch in enumerate(batches):
        is_partial = step % 4 == 2
        found.append(train.step(batch, accumulate=is_partial).item())
        loss = _loss_of(twin, batch)
        loss.backward()
        expected.append(loss.item())
        if not is_partial:
            optimizers[1].step()
            optimizers[1].zero_grad()
    return found, expected


def _loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()
