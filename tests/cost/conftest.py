"""What tests that time ops share."""

import pytest


@pytest.fixture
def one_thread():
    """Threads that wait for each other on a shared machine measure the neighbours."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
