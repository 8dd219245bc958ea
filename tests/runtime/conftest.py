import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Small models run fastest on one thread, and bitwise the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
