"""Demand of ops on two streams for one device and its host, so that they can run concurrently.

Four numbers per op. Its kernel is on the device for a part of its time: arithmetic or memory
traffic; the rest is the gap between two kernels, or the wait for the host. While it is
there it fills a part of the device. A product is computed in tiles, one per multiprocessor: it
fills as much as its results have tiles. What streams fills as much as it has bytes to move of those
that are in flight when the memory is at its full rate: rate times latency (Little's law). Norms
over batches have one block of threads per channel. Where a profile has the kernels of a replayed
step, their blocks of threads say it (`replayed_kernels`). And its host takes a part of the time to
issue it; one process issues the ops of both streams. The engine lets kernels run beside each other
that fit, and the others wait: a device gives its places in the order in which kernels come. Where a
profile knows how long two rows of a step's own kernels take beside each other, all of them run
beside each other and take that many times as long. On a CPU an op is the work of all its
threads. O(kinds · ops), numpy.
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
"""Of an op's time in which its kernel is on the device, in which the host issues it, of the device
that the kernel fills, and how many times as long it takes while an op of the other stream runs."""
TIMES_BESIDE = 1 / 0.83
"""Slowdown of ops of two streams of a replayed graph whose kernels fit on the device together: of
their kernels and of the gaps to the next. Pairs of short kernels on an H200 took 1.15 to 1.33 times
(`benchmarks/results`), a softmax of few blocks 1.03 times (`docs/concepts/waves.md`)."""
_TILE_RESULTS_PER_UNIT = 32
"""A tile of 64 x 64 results takes the 128 vector units (CUDA cores) of a multiprocessor."""
_CLOCK_HZ = 1.8e9
"""Of accelerators, 1.4 to 2 GHz: a vector unit multiplies and adds once per cycle."""
_MEMORY_LATENCY_S = 0.7e-6
"""From asking for bytes of a busy memory to having them."""
_ELEMENT_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
                  "other": 4}  # fmt: skip
_BYTES_BY_DTYPE = np.array([_ELEMENT_BYTES[name] for name in DTYPES])


def demand_of(graph: Graph, cluster: Cluster, costs: Costs) -> FloatArray:
    """[`ON_DEVICE`, `ON_HOST`, `FILL` or `BESIDE`, kind, op]: shares, and times of 1 or more."""
    shares = [_shares(graph, kind, costs, row) for row, kind in enumerate(cluster.kinds)]
    return np.stack(shares, axis=1)


def _shares(graph: Graph, kind: DeviceKind, costs: Costs, row: int) -> FloatArray:
    takes_s = costs.op_s[row]
    nothing, all_of_it = np.zeros(graph.num_ops), np.ones(graph.num_ops)
    if kind.is_cpu:
        return np.stack((all_of_it, nothing, all_of_it, all_of_it))
    parts = work_on(graph, kind, costs.settings)
    # The split of a time that a file states is unknown.
    is_stated = costs.op_source[row] == TimeSource.FILE
    works = takes_s > 0
    long_s = np.where(works, takes_s, 1.0)
    on_device, on_host = (
        np.where(works, np.minimum(seconds / long_s, 1.0), 0.0)
        for seconds in (np.where(is_stated, takes_s, parts.device_s), parts.host_s)
    )
    fill = np.where(np.isfinite(parts.fill), parts.fill, _fill(graph, kind))
    fill = np.where(is_stated, 1.0, fill)
    # The measured slowdown of concurrent kernels is more accurate than the share that each fills.
    is_measured = np.isfinite(parts.beside)
    beside = np.where(is_measured, parts.beside, TIMES_BESIDE)
    return np.stack((on_device, on_host, np.where(is_measured, 0.0, fill), beside))


def _fill(graph: Graph, kind: DeviceKind) -> FloatArray:
    """The part of a device that each op fills while its kernel runs."""
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
    """Elements that each op makes."""
    made = graph.tensor_producer >= 0
    makers = graph.tensor_producer[made]
    num_bytes = np.bincount(makers, graph.tensor_bytes[made], minlength=graph.num_ops)
    return np.asarray(num_bytes / _BYTES_BY_DTYPE[work.dtype])
