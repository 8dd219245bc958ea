"""What tests of local attempts and of the daemon share."""

import pytest
from service.daemon_rig import Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices
from service.local_attempts import executor_in, kill_everything


@pytest.fixture
def executor(tmp_path):
    """A local executor; nothing that it started outlives the test."""
    made = executor_in(tmp_path)
    yield made
    kill_everything(tmp_path)
    made.close()


@pytest.fixture
def engine():
    """Devices and processes that exist only in the test."""
    return FakeExecutor(fleet_devices(v100=1))


@pytest.fixture
def rig(tmp_path, engine):
    """A daemon without threads on a real store."""
    rig = Rig(tmp_path, engine, Time())
    rig.look()
    yield rig
    for life in rig.lives:
        life.die()
