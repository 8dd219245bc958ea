"""What tests that time ops share."""

import pytest


@pytest.fixture
def one_thread():
    """Threads that wait for each other on a shared machine measure the neighbours."""
    pytest.importorskip("torch")
    from hocket.runtime.process_settings import torch_threads

    with torch_threads(1):
        yield
