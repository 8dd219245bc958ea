"""Measure host time per op in eager mode: the `HostOverhead` of this machine.

A stack of small transformer-like blocks is trained on tensors so small that kernels hardly take
time. For a GPU the mean time per dispatched op rates this host against the host whose whole steps
were measured (`hocket.cost.host.EAGER`). A CPU does the work itself, so the time of the same ops
called directly is subtracted for each phase. Takes under two seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.cost.families import family_of
from hocket.cost.host import EAGER, REFERENCE_DISPATCH_S, HostOverhead, measured_host
from hocket.cost.timing import wall_s

_WIDTH, _HEADS, _TOKENS, _BLOCKS = 32, 2, 4, 8


class _DispatchBlock(nn.Module):
    """Products, views, normalization, dropout and additions in the proportions of a transformer
    block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.project = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.expand = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.reduce = nn.Linear(2 * _WIDTH, _WIDTH)
        self.act = nn.GELU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        query, key, value = self.project(self.norm(hidden)).split(_WIDTH, dim=2)
        query, key, value = (
            part.view(batch, tokens, _HEADS, -1).transpose(1, 2) for part in (query, key, value)
        )
        mixed = torch.softmax(query @ key.transpose(2, 3), dim=-1) @ value
        hidden = hidden + mixed.transpose(1, 2).reshape(batch, tokens, _WIDTH)
        changed: torch.Tensor = self.reduce(self.act(self.expand(self.norm(hidden))))
        return hidden + torch.dropout(changed, 0.1, train=True)


@dataclass(frozen=True)
class _RecordedPhase:
    """Number of ops that a phase dispatched, and the computing ones, ready to be called again."""

    num_ops: int
    working: tuple[Callable[[], Any], ...]

    def direct_s(self, device: torch.device) -> float:
        """Seconds of the computing ops when called one after the other."""

        def call() -> None:
            with torch.no_grad():
                for op in self.working:
                    op()

        return wall_s(call, device)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every op with its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _recorded(phase: Callable[[], Any]) -> _RecordedPhase:
    recorder = _Recorder()
    with recorder:
        phase()
    working = tuple(
        lambda func=func, args=args, kwargs=kwargs: func(*args, **kwargs)
        for func, args, kwargs in recorder.calls
        if family_of(str(func)) != "view"
    )
    return _RecordedPhase(len(recorder.calls), working)


def measure_host_overhead(device: torch.device) -> HostOverhead:
    """Seconds per dispatched op on this machine, for a model on ``device``."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(*(_DispatchBlock() for _ in range(_BLOCKS))).to(device)
        hidden = torch.randn(2, _TOKENS, _WIDTH, device=device)
    parameters = list(model.parameters())

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(hidden).sum()
        return loss

    losses: list[torch.Tensor] = []

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            parameter.grad = None

    def forward_and_backward() -> None:
        losses.append(forward())
        backward()

    # The recorder only sees ops of its own thread, so autograd must not use others.
    with torch.autograd.set_multithreading_enabled(False):
        forward_ops = _recorded(forward)
        losses.append(forward())
        backward_ops = _recorded(backward)
    forward_s = wall_s(forward, device)
    both_s = wall_s(forward_and_backward, device)
    if device.type == "cuda":
        # On a GPU the ops run asynchronously, so their wall time is the dispatch time.
        return measured_host(both_s / (forward_ops.num_ops + backward_ops.num_ops))
    forward().backward()  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    optimizer_s = wall_s(optimizer.step, device)
    fused_s = wall_s(_fused_step(parameters), device)
    work_s = forward_ops.direct_s(device), backward_ops.direct_s(device), fused_s
    return HostOverhead(
        forward_s=max(0.0, (forward_s - work_s[0]) / forward_ops.num_ops),
        # Noise may make work seem longer than the whole phase.
        backward_s=max(0.0, (both_s - forward_s - work_s[1]) / backward_ops.num_ops),
        optimizer_s=max(0.0, (optimizer_s - work_s[2]) / len(parameters)),
    )


def measure_dispatch_s(device: torch.device) -> float:
    """Mean time to dispatch an op for a GPU, rounded to two digits because the rest is noise."""
    factor = measure_host_overhead(device).forward_s / EAGER.forward_s
    return float(f"{factor * REFERENCE_DISPATCH_S:.2g}")


def _fused_step(parameters: list[nn.Parameter]) -> Callable[[], Any]:
    """The fused update without the optimizer object around it."""
    tensors = [parameter.detach().clone() for parameter in parameters]
    grads, first, second = ([torch.zeros_like(t) for t in tensors] for _ in range(3))
    steps = [torch.ones((), dtype=torch.float32) for _ in tensors]
    return lambda: torch._fused_adamw_(
        tensors, grads, first, second, [], steps, lr=1e-3, beta1=0.9, beta2=0.999,
        weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
