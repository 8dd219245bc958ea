import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ORACLE = Path(__file__).parents[2] / "benchmarks" / "memory" / "allocations.py"


@pytest.fixture(autouse=True)
def _one_thread():
    """Small models run fastest on one thread, and bitwise the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _gpu(request):
    """What needs a GPU is skipped without one."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA, and to be asked for with -m gpu")


@pytest.fixture
def allocations(monkeypatch):
    """A function that notes what another one allocates."""
    spec = importlib.util.spec_from_file_location("memory_allocations", ORACLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module.allocations
