"""Demand of ops for a device and its host, to predict two streams that run concurrently.

Four numbers per op: the fraction of its time in which its kernel is on the device (the rest is the
gap to the next kernel or the wait for the host), the fraction in which the host issues it, the
fraction of the device that the kernel fills, and its slowdown beside the other stream. A matrix
product fills one multiprocessor per tile of its result. A memory-bound kernel fills the device by
its bytes over those in flight at the full memory rate: rate times latency (Little's law). Batch
norms run one thread block per channel. A profile of a replayed step gives the thread blocks
directly (`replayed_kernels`). One process issues the ops of both streams.

The engine runs kernels concurrently if they fit together, else they wait: a device assigns its
multiprocessors in the order in which kernels arrive. If a profile has measured the slowdown of two
replays of the same step, all kernels run concurrently with that slowdown. On a CPU an op uses all
threads. O(device types · ops), numpy.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.costs import Costs, TimeSource
from hocket.cost.efficiency import OpWork, peak_flops, work_of
from hocket.cost.families import FAMILIES, MATRIX_FAMILIES
from hocket.cost.roofline import work_on
from hocket.graph.graph import DTYPES, Graph
from hocket.hardware.cluster import Cluster, DeviceKind

NUM_SHARES = 4
ON_DEVICE, ON_HOST, FILL, BESIDE = range(NUM_SHARES)
"""Rows of the demand table: fraction of an op's time with its kernel on the device, fraction in
which the host issues it, fraction of the device that the kernel fills, and slowdown while an op of
the other stream runs."""
TIMES_BESIDE = 1 / 0.83
"""Slowdown of two replayed streams whose kernels fit on the device together, for kernels and gaps.

Pairs of short kernels on an H200 took 1.15 to 1.33 times as long (`benchmarks/results`), a softmax
of few blocks 1.03 times (`docs/concepts/waves.md`).
"""
_TILE_RESULTS_PER_UNIT = 32
"""Results per vector unit: a tile of 64 x 64 uses the 128 vector units (CUDA cores) of a
multiprocessor."""
_CLOCK_HZ = 1.8e9
"""Clock of accelerators (1.4 to 2 GHz); a vector unit does one multiply-add per cycle."""
_MEMORY_LATENCY_S = 0.7e-6
"""Latency of a read from busy device memory."""
_ELEMENT_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
                  "other": 4}  # fmt: skip
_BYTES_BY_DTYPE = np.array([_ELEMENT_BYTES[name] for name in DTYPES])


def demand_of(graph: Graph, cluster: Cluster, costs: Costs) -> FloatArray:
    """Demand of each op; the rows are `ON_DEVICE`, `ON_HOST`, `FILL` and `BESIDE`.

    [row, device type, op]: fractions up to 1, and slowdowns of at least 1.
    """
    shares = [_shares(graph, kind, costs, row) for row, kind in enumerate(cluster.kinds)]
    return np.stack(shares, axis=1)


def _shares(graph: Graph, kind: DeviceKind, costs: Costs, row: int) -> FloatArray:
    takes_s = costs.op_s[row]
    nothing, all_of_it = np.zeros(graph.num_ops), np.ones(graph.num_ops)
    if kind.is_cpu:
        return np.stack((all_of_it, nothing, all_of_it, all_of_it))
    parts = work_on(graph, kind, costs.settings)
    # How a time that a file states splits into device and host is unknown.
    is_stated = costs.op_source[row] == TimeSource.FILE
    works = takes_s > 0
    # Ops of no time must not divide by zero.
    long_s = np.where(works, takes_s, 1.0)
    on_device, on_host = (
        np.where(works, np.minimum(seconds / long_s, 1.0), 0.0)
        for seconds in (np.where(is_stated, takes_s, parts.device_s), parts.host_s)
    )
    # Thread blocks from a profile are more exact than the estimate from bytes and tiles.
    fill = np.where(np.isfinite(parts.fill), parts.fill, _fill(graph, kind))
    fill = np.where(is_stated, 1.0, fill)
    # The measured slowdown of concurrent kernels is more accurate than the share that each fills.
    is_measured = np.isfinite(parts.beside)
    beside = np.where(is_measured, parts.beside, TIMES_BESIDE)
    # Fill 0 lets measured kernels always run concurrently, at their measured slowdown.
    return np.stack((on_device, on_host, np.where(is_measured, 0.0, fill), beside))


def _fill(graph: Graph, kind: DeviceKind) -> FloatArray:
    """Fraction of a device that each op fills while its kernel runs."""
    work = work_of(graph)
    products = np.isin(work.family, [FAMILIES.index(name) for name in MATRIX_FAMILIES])
    num_units = peak_flops(kind, "elementwise", "float32") / (2 * _CLOCK_HZ)
    in_flight = kind.memory_bandwidth_bps * _MEMORY_LATENCY_S
    share = np.where(
        products,
        _num_results(graph, work) / (_TILE_RESULTS_PER_UNIT * num_units),
        work.bytes_touched / in_flight,
    )
    return np.minimum(share, work.shaped_on(kind).fill)


def _num_results(graph: Graph, work: OpWork) -> FloatArray:
    """Number of elements that each op produces."""
    made = graph.tensor_producer >= 0
    makers = graph.tensor_producer[made]
    num_bytes = np.bincount(makers, graph.tensor_bytes[made], minlength=graph.num_ops)
    return np.asarray(num_bytes / _BYTES_BY_DTYPE[work.dtype])
