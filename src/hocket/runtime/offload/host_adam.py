"""AdamW on the host in one pass over memory, with bfloat16 gradients and low-precision copies.

Memory bandwidth limits updates on the host. PyTorch's fused kernel needs full-precision gradients,
and casting the low-precision copy for upload takes a second pass. The kernel of `host_adam_kernel`
does both in one pass, which reads and writes 28 bytes per parameter instead of 34, and its bfloat16
gradients halve the copies from the device. The kernel is used only if its results equal those of
PyTorch's kernel bit for bit. `matches_torch` checks that once per process, and thereby compiles the
kernel: when the host's bandwidth is measured, or when a plan that needs it is prepared.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

_VECTOR = 16
"""Vector length of PyTorch's kernel, which rounds the remaining elements differently."""
_SAMPLE = 256 * _VECTOR
"""Number of elements on which both kernels are compared."""
_STRIPES = 4
"""Stripes per thread in the parallel loop."""
_LOCK = threading.Lock()
"""Lock of parallel loops: some of numba's threading layers run only one at a time."""


class AdamCoefficients(NamedTuple):
    """Coefficients of one Adam step."""

    keep: float
    """Factor of the parameter: 1 - lr * weight decay, for decoupled weight decay."""
    new: float
    """1 - beta1."""
    old_square: float
    new_square: float
    step_size: float
    """-lr / (1 - beta1**step), which is negative."""
    correction: float
    epsilon: float


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer is a fused AdamW, or a fused Adam without weight decay.

    ``amsgrad``, ``maximize`` and beta1 up to one half, where PyTorch rounds differently, are
    excluded.
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
    """Update a parameter and write its low-precision copy; return True on success.

    Returns False, without any change, if the parameter has no state yet, if dtypes or layouts are
    not supported, or if results would differ from PyTorch's kernel.
    """
    states: tuple[Any, ...] = (parameter, state.get("exp_avg"), state.get("exp_avg_sq"))
    if any(t is None or t.dtype != torch.float32 or t.device.type != "cpu" for t in states):
        return False
    if gradient.dtype != torch.bfloat16 or low_precision.dtype != torch.bfloat16:
        return False
    tensors = (*states, gradient, low_precision)
    have_same_layout = all(t.stride() == parameter.stride() for t in tensors)
    # PyTorch rounds the elements after the last full vector differently.
    if not have_same_layout or parameter.numel() % _VECTOR or not matches_torch():
        return False
    coefficients = _coefficients(group, float(state["step"]) + 1)
    state["step"] += 1
    _run([_flat(tensor) for tensor in tensors], coefficients, torch.get_num_threads())
    return True


def _coefficients(group: dict[str, Any], step: float) -> AdamCoefficients:
    """Return the coefficients of a parameter group for the step with this number."""
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], map(float, group["betas"])
    return AdamCoefficients(
        1 - float(lr) * decay, 1 - beta1, beta2, 1 - beta2, -(float(lr) / (1 - beta1**step)),
        (1 - beta2**step) ** 0.5, group["eps"],
    )  # fmt: skip


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the elements of a dense tensor in memory order; bfloat16 elements as bits."""
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


@functools.cache
def matches_torch() -> bool:
    """True if the kernel compiles on this CPU and gives the same bits as PyTorch's kernel."""
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
    # If numba or its compiler fails for any reason, PyTorch's kernels are used.
    except Exception:
        return False
    return all(map(torch.equal, [*ours, low_precision], [*theirs, theirs[0].bfloat16()]))
