"""AdamW on the host in one pass over memory, with bfloat16 gradients and low-precision copies.

The host updates as fast as its memory allows. PyTorch's fused kernel needs gradients in full
precision, and leaves the low-precision copy of the parameters, which is uploaded, to a second pass.
One pass reads and writes 28 bytes per parameter instead of 34, and gradients are half as large on
the bus. It is used where it gives the bits of PyTorch's kernel. That is checked once, which also
compiles it; `compiled_in_background` does so before training begins.
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
"""Vector length of PyTorch's kernel, which rounds the remaining elements differently."""
_SAMPLE = 256 * _VECTOR
"""Elements on which both kernels are compared."""
_STRIPES = 4
"""Stripes per thread."""
_LOCK = threading.Lock()
"""Some of numba's threading layers allow one parallel loop at a time."""


class AdamCoefficients(NamedTuple):
    """Coefficients of one step."""

    keep: float
    """Factor of the parameter: 1 without weight decay."""
    new: float
    """1 - beta1."""
    old_square: float
    new_square: float
    step_size: float
    """Negative."""
    correction: float
    epsilon: float


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer is a fused AdamW, or Adam without weight decay.

    PyTorch rounds differently where beta1 is below one half.
    """
    is_decoupled = type(optimizer) is torch.optim.AdamW
    return (is_decoupled or type(optimizer) is torch.optim.Adam) and all(
        bool(group.get("fused"))
        and not group.get("amsgrad")
        and not group.get("maximize")
        and 1 - float(group["betas"][0]) < 0.5
        and (is_decoupled or not group["weight_decay"])
        for group in optimizer.param_groups
    )


def fused_adam_step(
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    low_precision: torch.Tensor,
) -> bool:
    """Update a parameter and write its low-precision copy; False where nothing was done, because it
    has no state yet, other types or layouts, or bits would differ."""
    states: tuple[Any, ...] = (parameter, state.get("exp_avg"), state.get("exp_avg_sq"))
    if any(t is None or t.dtype != torch.float32 or t.device.type != "cpu" for t in states):
        return False
    if gradient.dtype != torch.bfloat16 or low_precision.dtype != torch.bfloat16:
        return False
    tensors = (*states, gradient, low_precision)
    have_same_layout = all(t.stride() == parameter.stride() for t in tensors)
    if not have_same_layout or parameter.numel() % _VECTOR or not matches_torch():
        return False
    coefficients = _coefficients(group, float(state["step"]) + 1)
    state["step"] += 1
    _run([_flat(tensor) for tensor in tensors], coefficients, torch.get_num_threads())
    return True


def _coefficients(group: dict[str, Any], step: float) -> AdamCoefficients:
    """Return the coefficients of a group's step with this number."""
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], map(float, group["betas"])
    return AdamCoefficients(
        1 - float(lr) * decay, 1 - beta1, beta2, 1 - beta2, -(float(lr) / (1 - beta1**step)),
        (1 - beta2**step) ** 0.5, group["eps"],
    )  # fmt: skip


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the elements of a dense tensor in the order of memory; of bfloat16 the bits."""
    line = tensor.detach().as_strided((tensor.numel(),), (1,))
    return line.view(torch.int16).numpy() if line.dtype == torch.bfloat16 else line.numpy()


def _run(
    arrays: list[np.ndarray[Any, Any]], coefficients: AdamCoefficients, num_threads: int
) -> None:
    import numba

    from hocket.runtime.offload.host_adam_kernel import adam_loop

    with _LOCK:
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        count = max(1, min(num_threads, most))
        # Once its threads run, numba refuses to compile on a thread with fewer cores unless this
        # variable is set.
        os.environ.setdefault("NUMBA_NUM_THREADS", str(most))
        numba.set_num_threads(count)
        arguments: Any = (*arrays, *map(np.float32, coefficients), _STRIPES * count)
        adam_loop(*arguments)


@contextmanager
def compiled_in_background() -> Iterator[None]:
    """Run `matches_torch` in another thread meanwhile."""
    # In a thread: modes such as that of fake tensors belong to one thread.
    trying = threading.Thread(target=matches_torch, name="hocket-compiles")
    trying.start()
    try:
        yield
    finally:
        trying.join()


@functools.cache
def matches_torch() -> bool:
    """True if the kernel gives the bits of PyTorch's kernel on this CPU."""
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
    coefficients = _coefficients(optimizer.param_groups[0], float(state["step"]))
    low_precision = torch.empty_like(gradient)
    try:
        _run([_flat(tensor) for tensor in (*ours, gradient, low_precision)], coefficients, 1)
    # Whatever the compiler lacks here, PyTorch's kernels work.
    except Exception:
        return False
    return all(map(torch.equal, [*ours, low_precision], [*theirs, theirs[0].bfloat16()]))
