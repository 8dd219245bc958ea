"""What the tests of the whole question ask it about; graphs and problems never change."""

from __future__ import annotations

import pytest
import torch
from planners.whole.whole_nets import Stack, Text, problem_on

from hocket.capture.sizes import capture_sizes
from hocket.planners.parallel import compare
from hocket.planners.parallel.compare import compare_parallel


@pytest.fixture(scope="session")
def graph():
    return capture_sizes(Stack(), torch.zeros(12, 256, 512))


@pytest.fixture(scope="session")
def text():
    return capture_sizes(Text(), torch.zeros(4, 256, dtype=torch.long))


@pytest.fixture(scope="session")
def unequal(graph):
    return problem_on(graph, "1xrtx3090+1xv100-16g+1xt4")


@pytest.fixture(scope="session")
def comparison(unequal):
    return compare_parallel(unequal)


@pytest.fixture
def unplaced(monkeypatch):
    """Op placement is left out: a search of its own, which these tests do not look at."""
    monkeypatch.setattr(compare, "_MOST_PLACED_OPS", 0)
