import pytest

from hocket.runtime.process_settings import torch_threads


@pytest.fixture(autouse=True)
def _one_thread():
    """Small models run fastest on one thread, and bitwise the same on every machine."""
    with torch_threads(1):
        yield
