"""What tests of local attempts and of the daemon share."""

import signal

import pytest
from service.daemon_rig import Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices
from service.lease_server import LeaseServer
from service.local_attempts import executor_in, kill_everything
from service.rest_service import serving


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


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """The REST service on devices that exist only in the test, one for all tests of a file."""
    with serving(tmp_path_factory.mktemp("fleet")) as service:
        yield service


@pytest.fixture
def nobody_left(request):
    """Tests that share a fleet leave it without jobs."""
    yield
    if "service" in request.fixturenames:
        request.getfixturevalue("service").cancel_all()


@pytest.fixture
def lease_server():
    """A stand-in for the daemon."""
    with LeaseServer() as made:
        yield made


@pytest.fixture
def in_fleet(lease_server, monkeypatch):
    """The stand-in, and an environment that names it; signals are as they were afterwards."""
    for name, text in lease_server.variables().items():
        monkeypatch.setenv(name, text)
    before = signal.getsignal(signal.SIGTERM)
    yield lease_server
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, before)
