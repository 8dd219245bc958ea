"""Add host time to op times: the time to dispatch each op, and the waits between host and device.

A device with a queue (CUDA) runs behind the host: an op starts after the previous one has ended and
the host has launched it; in a training loop the launches of one step follow those of the last. The
steady state of this queue has a closed form with one running maximum. A device without a queue (a
CPU) pays dispatch and work one after the other. O(ops), numpy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.families import family_of
from hocket.cost.rates import RATES


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """Host seconds per dispatched op in eager mode, by phase of the step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    overlaps: bool = False
    """True if the device works while the host goes on (a CUDA stream), False if the host does the
    work itself (a CPU)."""

    @property
    def by_phase(self) -> FloatArray:
        """Seconds per op, by `hocket.graph.graph.Phase`."""
        return np.array([self.forward_s, self.backward_s, self.optimizer_s])


EAGER = HostOverhead(forward_s=20e-6, backward_s=25e-6, optimizer_s=12e-6, overlaps=True)
"""Host overhead if none was measured, from an H200's host (``benchmarks/cost/predict_kernels.py``).

A view takes 3 us, an addition 10, a product 17, a linear layer with its module 28, the gradient of
an op 19, AdamW 5 to 16 per parameter. Inside library modules ops take a quarter more: 30 host-bound
steps of 19 models (``benchmarks/predict/thirdparty.py``, 2026-11-18) are predicted within 16 % on
average, and repeated measurements of one step differ by up to 30 %.
"""
REPLAYED = HostOverhead(forward_s=1.2e-6, backward_s=1.2e-6, optimizer_s=1.2e-6, overlaps=True)
"""Overhead of a replayed CUDA graph: the gap between two kernels on the same machine."""
REFERENCE_DISPATCH_S = 13.3e-6
"""Mean dispatch time of the block that `hocket.cost.dispatch` trains, on the host of `EAGER`.

12.6 us forward (``benchmarks/results/2026-11-15-calibration-h200.json``), 12 to 17 us backward
within one run.
"""


def measured_host(dispatch_s: float) -> HostOverhead:
    """Scale `EAGER` to a host with the given mean dispatch time."""
    factor = dispatch_s / REFERENCE_DISPATCH_S
    seconds = (EAGER.forward_s, EAGER.backward_s, EAGER.optimizer_s)
    forward_s, backward_s, optimizer_s = (factor * each_s for each_s in seconds)
    return replace(EAGER, forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s)


ISSUE: Mapping[str, Sequence[float]] = RATES["issue"]
"""Host time per op by family, forward and backward, relative to the mean op of a transformer step;
``rest`` is for unlisted families, ``embedding`` for the gradients of embeddings."""
_SPATIAL_NORM = re.compile(r"(batch|group|instance)_?norm")


CALLS_RECOMPUTED, CALLS_MOVED, CALLS_HOSTED = 0.75, 4.7, 2.0
"""Host time that a memory budget adds, relative to the mean forward op: per recomputed saved
tensor, per storage that is offloaded and fetched, and per parameter that is updated on or fetched
from the host.

CPU time of small steps (``benchmarks/memory/host_time.py``): 12 us; 49 us, and 25 more inside CUDA;
28 us and a launch; the mean op takes 16.
"""


def issue_s(
    host: HostOverhead, kinds: Sequence[str], op_kind: IntArray, op_phase: NDArray[np.int8]
) -> FloatArray:
    """Seconds in which the host issues each op; ``op_kind`` indexes ``kinds``."""
    weights = [_issue(kind) for kind in kinds]
    # All ops of an optimizer take the host about equally long.
    by_kind = np.array([(*pair, 1.0) for pair in weights]).reshape(-1, 3)
    weight = by_kind[op_kind, op_phase] if len(kinds) else np.ones(len(op_kind))
    # A CPU executes the op itself, so dispatch times hardly differ between families.
    return np.asarray(host.by_phase[op_phase] * (weight if host.overlaps else 1.0))


def _issue(kind: str) -> Sequence[float]:
    if _SPATIAL_NORM.search(kind):
        return ISSUE["spatial_norm"]
    if "embedding_dense" in kind:
        return ISSUE["embedding"]
    return ISSUE.get(family_of(kind), ISSUE["rest"])


def with_host_overhead(kernel_s: FloatArray, host_s: FloatArray, overlaps: bool) -> FloatArray:
    """Op times including the wait for their launch; views cost only their dispatch.

    If the device overlaps with the host, a step takes the larger of all kernel times and all
    dispatch times: a device that is always behind hides the host; a host that is always behind
    leaves gaps, and each gap is added to the op after it.
    """
    if not overlaps:
        return kernel_s + host_s
    # The device is always behind, so it hides the host.
    if host_s.sum() <= kernel_s.sum():
        return kernel_s
    # Op i ends at max over j <= i of (launch of j + kernels j..i). If the host is slower, two steps
    # in a row reach the steady state, and the second one is returned.
    kernels, launched = np.tile(kernel_s, 2), np.cumsum(np.tile(host_s, 2))
    work = np.cumsum(kernels)
    ends = work + np.maximum.accumulate(launched - (work - kernels))
    op_s: FloatArray = np.diff(ends[len(kernel_s) - 1 :])
    return op_s
