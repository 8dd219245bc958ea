"""Rows of kernels beside each other: what the engine says of pairs that were measured on an H200.

Paces from benchmarks/results/2026-11-17-waves-h200-earlier.md: a row alone over both rows together.
"""

from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from simulate.test_wave_streams import two_rows
from torch.nn import functional

from hocket.capture.model import capture_program
from hocket.cost.demand import FILL, demand_of
from hocket.cost.efficiency import work_of
from hocket.cost.host import REPLAYED
from hocket.cost.roofline import estimate_costs
from hocket.plan.make import make_problem
from hocket.simulate.engine import simulate_placement

ROW_S, MOST = 4e-3, 2000
"""A row is as long, and has at most so many kernels."""
KERNELS = {
    "product 256": (6.7e-6, torch.mm, [(256, 256)] * 2),
    "product 1024": (55.9e-6, torch.mm, [(1024, 1024)] * 2),
    "product 8192": (25504.6e-6, torch.mm, [(8192, 8192)] * 2),
    "relu 0.5": (1.3e-6, torch.relu, [(2**17,)]),
    "relu 16": (5.4e-6, torch.relu, [(2**22,)]),
    "relu 512": (256.2e-6, torch.relu, [(2**27,)]),
    "convolution": (44.3e-6, functional.conv2d, [(128, 16, 32, 32), (16, 16, 3, 3)]),
}
PACES = [
    0.87, 0.69, 0.58, 0.75, 0.59, 0.52, 0.55, 0.58, 0.56, 0.47, 0.64, 0.56, 0.52, 0.60, 0.49, 0.54,
    0.56, 0.57, 0.85, 0.56, 0.51, 0.55, 0.35, 0.50, 0.51, 0.50, 0.51, 0.57,
]  # fmt: skip
UNEXPLAINED = {
    # The tail of a product that fills the device twice leaves more than nothing.
    ("product 256", "product 1024"), ("product 1024", "relu 16"),
    # Two no longer fit into the cache that one fits into.
    ("relu 16", "relu 16"),
}  # fmt: skip


class Called(torch.nn.Module):
    """One call."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


@pytest.fixture(scope="module")
def asked():
    """(seconds, share on the device, on the host, what it fills) of each kernel."""
    found = {}
    for name, (takes_s, function, shapes) in KERNELS.items():
        given = tuple(torch.empty(shape, device="meta") for shape in shapes)
        graph, _ = capture_program(Called(function), given, optimizer=None)
        problem = make_problem(graph, "1xh200")
        costs = estimate_costs(graph, problem.cluster, launches="replayed")
        op = int(costs.op_s[0].argmax())
        fill = float(demand_of(graph, problem.cluster, costs)[FILL, 0, op])
        num_kernels = float(work_of(graph).shaped_on(problem.cluster.kinds[0]).kernels[op])
        on_device = max(0.0, 1 - num_kernels * REPLAYED.forward_s / takes_s)
        found[name] = takes_s, on_device, 0.0, fill
    return found


def pace(first, second):
    """Of two rows of one kernel each, equally long."""
    counts = [max(2, min(MOST, round(ROW_S / kernel[0]))) for kernel in (first, second)]
    longer_s = max(n * kernel[0] for n, kernel in zip(counts, (first, second), strict=True))
    counts = [max(1, round(longer_s / kernel[0])) for kernel in (first, second)]
    problem = two_rows([[first] * counts[0], [second] * counts[1]])
    _, timeline = simulate_placement(problem, np.zeros(sum(counts), np.int32))
    return longer_s / timeline.makespan_s


def test_pairs_take_what_was_measured_where_a_principle_explains_it(asked):
    pairs = list(combinations_with_replacement(KERNELS, 2))
    off = {
        pair: (round(told, 2), measured)
        for pair, measured in zip(pairs, PACES, strict=True)
        if abs((told := pace(*(asked[name] for name in pair))) - measured) > 0.1
    }
    assert set(off) <= UNEXPLAINED, off


def test_kernels_fill_as_much_as_they_have_tiles_or_bytes_in_flight(asked):
    fill = {name: kernel[3] for name, kernel in asked.items()}
    # Sixteen tiles of 64 x 64 results on 132 multiprocessors; 1 of 3.4 MB.
    assert fill["product 256"] == pytest.approx(16 / 132, rel=0.15)
    assert fill["relu 0.5"] == pytest.approx(2**20 / (4.8e12 * 0.7e-6))
    assert all(fill[name] == 1.0 for name in KERNELS if name not in ("product 256", "relu 0.5"))
