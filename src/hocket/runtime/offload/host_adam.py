"""AdamW on the host in one pass over memory: gradients come rounded, parameters leave rounded.

The host updates as fast as its memory lets it. PyTorch's fused kernel wants gradients in full, and
leaves the rounded twin of the parameters, which is what is copied to the device, to a second pass.
One pass reads and writes 28 bytes for each parameter where these take 34 and gradients twice the
way (`adam_loop`). It is taken where it gives the bits of PyTorch's kernel: that is tried once,
which also compiles it; `tried_beside` does so before a training begins.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

_VECTOR = 16
"""PyTorch updates so many numbers at once, and rounds what is left over in another way."""
_SAMPLE = 256 * _VECTOR
"""Numbers that PyTorch's kernel is compared on."""
_STRIPES = 4
"""For each thread."""
_LOCK = threading.Lock()
"""Some of the compiler's ways to share out a loop are for one thread at a time."""


class AdamNumbers(NamedTuple):
    """What a step does to each number."""

    keep: float
    """Of a parameter before its step: 1 without decay."""
    new: float
    """Of the mean, what is the gradient's."""
    old_square: float
    new_square: float
    step_size: float
    """Negative."""
    correction: float
    epsilon: float


def is_one_pass(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer's parameters may be updated here: by fused kernels, as AdamW does, or
    Adam without decay; means of mostly new gradients are rounded in another way."""
    is_decoupled = type(optimizer) is torch.optim.AdamW
    return (is_decoupled or type(optimizer) is torch.optim.Adam) and all(
        bool(group.get("fused"))
        and not group.get("amsgrad")
        and not group.get("maximize")
        and 1 - float(group["betas"][0]) < 0.5
        and (is_decoupled or not group["weight_decay"])
        for group in optimizer.param_groups
    )


def update_rounded(
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    twin: torch.Tensor,
) -> bool:
    """A step of a parameter that also writes its rounded twin; False where nothing was done,
    because it has no state yet, its tensors are other ones, or bits would be others."""
    whole: tuple[Any, ...] = (parameter, state.get("exp_avg"), state.get("exp_avg_sq"))
    if any(t is None or t.dtype != torch.float32 or t.device.type != "cpu" for t in whole):
        return False
    if gradient.dtype != torch.bfloat16 or twin.dtype != torch.bfloat16:
        return False
    tensors = (*whole, gradient, twin)
    is_alike = all(t.stride() == parameter.stride() for t in tensors)
    if not is_alike or parameter.numel() % _VECTOR or not has_same_bits():
        return False
    numbers = _numbers(group, float(state["step"]) + 1)
    state["step"] += 1
    _run([_line(tensor) for tensor in tensors], numbers, torch.get_num_threads())
    return True


def _numbers(group: dict[str, Any], step: float) -> AdamNumbers:
    """Those of a group's step with this number."""
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], map(float, group["betas"])
    return AdamNumbers(
        1 - float(lr) * decay, 1 - beta1, beta2, 1 - beta2, -(float(lr) / (1 - beta1**step)),
        (1 - beta2**step) ** 0.5, group["eps"],
    )  # fmt: skip


def _line(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The numbers of a dense tensor in the order of memory; of rounded ones the bits."""
    line = tensor.detach().as_strided((tensor.numel(),), (1,))
    return line.view(torch.int16).numpy() if line.dtype == torch.bfloat16 else line.numpy()


def _run(lines: list[np.ndarray[Any, Any]], numbers: AdamNumbers, num_threads: int) -> None:
    import numba

    from hocket.runtime.offload.host_adam_kernel import adam_loop

    with _LOCK:
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        count = max(1, min(num_threads, most))
        # Once its threads run, numba refuses to compile on a thread that has fewer cores, unless
        # this says how many there are.
        os.environ.setdefault("NUMBA_NUM_THREADS", str(most))
        numba.set_num_threads(count)
        arguments: Any = (*lines, *map(np.float32, numbers), _STRIPES * count)
        adam_loop(*arguments)


@contextmanager
def tried_beside() -> Iterator[None]:
    """Have `has_same_bits` tell without taking time after this: it finds out meanwhile."""
    # By itself: modes of PyTorch, as of tensors without memory, are each thread's own.
    trying = threading.Thread(target=has_same_bits, name="hocket-compiles")
    trying.start()
    try:
        yield
    finally:
        trying.join()


@functools.cache
def has_same_bits() -> bool:
    """True if this processor gives the bits of PyTorch's kernel."""
    draws = torch.Generator().manual_seed(0)
    start, mean, spread = (torch.randn(_SAMPLE, generator=draws) for _ in range(3))
    gradient = torch.randn(_SAMPLE, generator=draws).mul_(spread.exp()).bfloat16()
    ours, theirs = ([start.clone(), mean * 1e-3, spread.square() * 1e-4] for _ in range(2))
    parameter = torch.nn.Parameter(theirs[0])
    parameter.grad = gradient.float()
    optimizer = torch.optim.AdamW(
        [parameter], 1.7e-3, betas=(0.9, 0.957), weight_decay=0.03, fused=True
    )
    state = {"step": torch.tensor(6.0), "exp_avg": theirs[1], "exp_avg_sq": theirs[2]}
    optimizer.state[parameter] = state
    optimizer.step()
    numbers = _numbers(optimizer.param_groups[0], float(state["step"]))
    twin = torch.empty_like(gradient)
    try:
        _run([_line(tensor) for tensor in (*ours, gradient, twin)], numbers, 1)
    # Whatever the compiler lacks here, PyTorch's kernels are there.
    except Exception:
        return False
    return all(map(torch.equal, [*ours, twin], [*theirs, theirs[0].bfloat16()]))
