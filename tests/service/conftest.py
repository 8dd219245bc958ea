"""What tests of local attempts share."""

import pytest
from service.local_attempts import executor_in, kill_everything


@pytest.fixture
def executor(tmp_path):
    """A local executor; nothing that it started outlives the test."""
    made = executor_in(tmp_path)
    yield made
    kill_everything(tmp_path)
    made.close()
