"""Agents of other machines: leases of both sides, repeated orders, logs, checkpoints, TLS."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest
from patience import wait_until
from service.local_attempts import DEVICES, WAITS, assignment, kill_everything, left_of, python

from hocket.base.errors import InputFileError, RunError, UsageError
from hocket.fleet.rounds.state import FleetDevice
from hocket.service.agent import Agent
from hocket.service.errors import ConflictError
from hocket.service.executors import agent_executor, attempt_folder
from hocket.service.executors.agent_executor import AgentExecutor
from hocket.service.executors.executor import EXITED, LOST, RUNNING, STARTING, AttemptName, Status
from hocket.service.pinned_tls import (
    PinnedConnection,
    WrongCertificateError,
    checked_fingerprint,
    open_tls,
)
from hocket.service.rest.agents import AgentAttempt, _append, _store_part

NAME = AttemptName(7, 2)
LEASE_S = 20.0


class Direct:
    """What an agent's client does, without a network; it may be cut."""

    def __init__(self, executor: AgentExecutor, name: str, folder: Path) -> None:
        self.executor, self.name, self.folder = executor, name, folder
        self.is_cut = False
        self.checkpoints: list[list] = []

    def ask(self, path, body):
        if self.is_cut:
            raise RunError("cut")
        sent = json.loads(json.dumps(body["attempts"]))
        statuses = [AgentAttempt(**one).status for one in sent]
        orders = self.executor.sync(
            self.name, body["identity"], "10.0.0.9", body["devices"], statuses
        )
        return json.loads(json.dumps({**orders, "checkpoints": self.checkpoints}))

    def call(self, method, path, body, device_type):
        if self.is_cut:
            raise RunError("cut")
        path, _, query = path.partition("?")
        fields = dict(part.split("=") for part in query.split("&"))
        _, what, *numbers = path.split("/")
        offset = int(fields["offset"])
        if what == "logs":
            log = self.executor.log_file(self.name, AttemptName(*map(int, numbers)))
            if log is None:
                raise UsageError("there is no such attempt")
            return json.dumps({"size_bytes": _append(log, offset, body, 1 << 30)}).encode()
        whole = self.folder / f"{numbers[0]}.tar"
        if method == "GET":
            return whole.read_bytes()[offset:][: 1 << 16]
        size_bytes = _store_part(whole.with_suffix(".part"), offset, body)
        if "is_whole" in fields:
            os.replace(whole.with_suffix(".part"), whole)
        return json.dumps({"size_bytes": size_bytes}).encode()


class Net:
    """A daemon's side and agents in one process."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.executor = self.opened()
        self.agents: dict[str, Agent] = {}
        self.clients: dict[str, Direct] = {}

    def opened(self) -> AgentExecutor:
        return AgentExecutor(self.tmp_path / "daemon", "https://d:1", "f" * 64, lease_s=LEASE_S)

    def restart(self) -> None:
        self.executor = self.opened()
        for client in self.clients.values():
            client.executor = self.executor

    def join(self, name: str, devices=DEVICES) -> Agent:
        self.clients[name] = Direct(self.executor, name, self.tmp_path)
        agent = Agent(self.tmp_path / name, devices, self.clients[name])
        self.agents[name] = agent
        agent.step()
        return agent

    def start(self, *command: str, devices=("a/v100-0",), **changes) -> None:
        values = {"name": NAME, "devices": devices, **changes}
        self.executor.start(assignment(self.tmp_path, *command, **values))

    def turn(self) -> None:
        for name, agent in self.agents.items():
            if not self.clients[name].is_cut:
                agent.step()
                agent._send_logs()

    def status(self, name: AttemptName = NAME):
        return next((one for one in self.executor.poll().attempts if one.name == name), None)

    def wait_for(self, *phases: str):
        def reached():
            self.turn()
            status = self.status()
            return status if status is not None and status.phase in phases else None

        return wait_until(reached, f"{NAME} is {' or '.join(phases)}")

    def close(self) -> None:
        for name, agent in self.agents.items():
            agent._executor.kill_all()
            kill_everything(self.tmp_path / name)
            agent.release()


@pytest.fixture
def net(tmp_path):
    net = Net(tmp_path)
    yield net
    net.close()


@pytest.fixture
def clock(monkeypatch):
    """Time of the daemon's side."""

    class Hands:
        now_s = 1000.0

    monkeypatch.setattr(agent_executor.time, "monotonic", lambda: Hands.now_s)
    return Hands


def test_an_attempt_runs_and_its_output_comes_whole(net):
    net.join("a")
    assert [device.name for device in net.executor.poll().devices] == ["a/v100-0", "a/v100-1"]
    net.start(*python("import os; print('x' * 3000000); print(os.environ['HOCKET_URL'])"))
    net.start(*python("print('never')"))
    status = net.wait_for(EXITED)
    assert status.exit_code == 0
    text = (net.tmp_path / "log").read_text()
    assert len(text) == 3000001 + len("https://d:1\n"), "all of it, before the end is told"
    net.executor.forget(NAME)
    net.turn()
    net.turn()
    assert net.status() is None
    assert net.agents["a"]._executor.poll().attempts == []
    assert not list((net.tmp_path / "daemon" / "assigned").iterdir())


def test_an_agent_without_news_is_given_up_after_its_lease_and_not_before(net, clock):
    net.join("a")
    net.join("b")
    net.start(*python(WAITS))
    net.clients["a"].is_cut = True
    clock.now_s += LEASE_S
    net.turn()
    assert net.status().phase == STARTING
    clock.now_s += 0.1
    status = net.status()
    assert status.phase == LOST
    assert "no contact with agent a" in status.detail
    assert {device.server for device in net.executor.poll().devices} == {"b"}
    # It comes back: what it was told meanwhile is not started any more.
    net.executor.forget(NAME)
    net.clients["a"].is_cut = False
    net.turn()
    assert {device.server for device in net.executor.poll().devices} == {"a", "b"}
    assert net.status() is None


def test_attempts_end_by_themselves_when_their_lease_is_over(net):
    agent = net.join("a")
    net.start(*python(WAITS), grace_s=20.0)
    net.wait_for(RUNNING)
    wait_until(lambda: "ready" in (net.tmp_path / "a/logs/7/attempt-2.log").read_text())
    # Nobody is there any more who could end it.
    now_s = attempt_folder.boot_time_s()
    attempt_folder.renew_lease(agent._lease, now_s - 0.1, 3.0)
    wait_until(lambda: attempt_folder.read_result(net.tmp_path / "a/attempts" / str(NAME)))
    assert left_of(net.tmp_path / "a", NAME) == []
    status = net.wait_for(EXITED, LOST)
    assert status.phase == LOST
    assert "without contact to the daemon" in status.detail


def test_the_agents_lease_is_over_before_that_of_the_daemon(net, clock, monkeypatch):
    agent = net.join("a")
    sent_s = attempt_folder.boot_time_s()
    answer = net.clients["a"].ask("/sync", {"identity": agent._identity, "attempts": [],
                                           "devices": [["v100-0", "v100"]]})  # fmt: skip
    assert answer["ends_after_s"] + answer["grace_s"] < answer["lease_s"] * 0.8
    content = json.loads(agent._lease.read_text())
    assert content["until_s"] <= sent_s + answer["ends_after_s"]
    # An answer that took longer than that renews nothing.
    late = attempt_folder.boot_time_s()
    times = iter([late, late + 1e6])
    monkeypatch.setattr(attempt_folder, "boot_time_s", lambda: next(times))
    before = agent._lease.read_text()
    agent.step()
    assert agent._lease.read_text() == before


def test_a_daemon_that_restarts_gives_up_nothing(net, clock):
    net.join("a")
    net.start(*python(WAITS))
    net.wait_for(RUNNING)
    net.restart()
    assert net.status().phase == STARTING
    assert len(net.executor.poll().devices) == 2
    net.turn()
    assert net.status().phase == RUNNING
    net.restart()
    clock.now_s += LEASE_S + 0.1
    assert net.status().phase == LOST
    net.executor.forget(NAME)
    net.restart()
    assert net.executor.poll().attempts == []


def test_an_agent_that_restarts_keeps_its_attempts_and_its_name(net):
    net.join("a")
    net.start(*python(WAITS))
    net.wait_for(RUNNING)
    with pytest.raises(InputFileError, match="daemon or agent runs"):
        net.join("a")
    net.agents["a"].release()
    net.join("a")
    assert net.status().phase == RUNNING
    net.executor.stop(NAME, 20.0)
    assert net.wait_for(EXITED).exit_code == -15
    with pytest.raises(ConflictError, match="another agent"):
        net.executor.sync("a", "0" * 32, "x", [], [])


def test_an_attempt_that_was_stopped_before_its_agent_heard_of_it_never_runs(net):
    net.join("a")
    net.start(*python("open('ran', 'w')"))
    net.executor.kill(NAME)
    status = net.wait_for(EXITED)
    assert "before it began" in status.detail
    assert not (net.tmp_path / "ran").exists()


def test_whoever_asks_again_gives_no_more_time_than_before(net):
    net.join("a")
    net.start(*python(WAITS))
    net.wait_for(RUNNING)
    for grace_s in (20.0, 3.0, 600.0):
        net.executor.stop(NAME, grace_s)
    agent = net.executor._agents["a"]
    orders = net.executor.sync(
        "a", agent.identity, agent.address, [["v100-0", "v100"]],
        [Status(name=NAME, phase="running", was_asked=False)],
    )  # fmt: skip
    assert orders["stops"] == [[*NAME, 3.0]]


def test_an_attempt_that_its_agent_lost_is_lost(net):
    agent = net.join("a")
    net.start(*python(WAITS))
    net.wait_for(RUNNING)
    for _ in range(2):
        orders = net.executor.sync("a", agent._identity, "10.0.0.9", [["v100-0", "v100"]], [])
        assert orders["starts"] == [], "an attempt begins at most once"
    assert net.status().phase == LOST


def test_what_nobody_asked_for_is_told_so_that_it_is_ended(net):
    net.join("a")
    net.start(*python(WAITS))
    net.wait_for(RUNNING)
    (net.tmp_path / "daemon" / "assigned" / f"{NAME}.json").unlink()
    net.restart()
    net.turn()
    assert net.status().phase == RUNNING
    net.executor.kill(NAME)
    assert net.wait_for(EXITED, LOST).phase == EXITED
    net.executor.forget(NAME)
    net.turn()
    net.turn()
    assert net.status() is None


def test_a_log_that_nobody_wants_any_more_holds_up_no_other(net):
    net.join("a")
    stale = net.tmp_path / "a/logs/3/attempt-1.log"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an attempt that was given up")
    net.start(*python("print('new')"))
    assert net.wait_for(EXITED).exit_code == 0
    assert (net.tmp_path / "log").read_text() == "new\n"


# ── gangs of several machines ──


# One write a line: two ranks of a machine share a log, and unbuffered prints write word by word.
RANKS = """
import os
keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
os.write(1, (" ".join(os.environ[key] for key in keys) + chr(10)).encode())
"""


def test_a_gang_of_two_machines_knows_its_ranks(net):
    for name in ("a", "b"):
        net.join(name)
    devices = ("a/v100-0", "a/v100-1", "b/v100-0")
    net.start(*python(RANKS), devices=devices, processes="per-device")
    assert net.wait_for(EXITED).exit_code == 0
    net.turn()
    first = sorted((net.tmp_path / "log").read_text().splitlines())
    assert first == ["0 3 0 10.0.0.9", "1 3 1 10.0.0.9"]
    assert (net.tmp_path / "log.1.log").read_text() == "2 3 0 10.0.0.9\n"


def test_a_gang_that_lost_a_rank_is_ended(net):
    for name in ("a", "b"):
        net.join(name)
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    devices = ("a/v100-0", "b/v100-0")
    net.start(*python(code), devices=devices, processes="per-device")
    status = net.wait_for(EXITED)
    assert status.exit_code != 0


def test_one_process_cannot_be_on_two_machines(net):
    for name in ("a", "b"):
        net.join(name)
    net.start("true", devices=("a/v100-0", "b/v100-0"))
    status = net.status()
    assert (status.phase, status.exit_code) == (EXITED, 126)
    assert "per-device" in status.detail
    net.start("true", devices=("c/v100-0",), name=AttemptName(8, 1))
    assert "agent c is not connected" in net.status(AttemptName(8, 1)).detail


# ── checkpoints ──


def test_a_checkpoint_moves_to_the_next_machine(net):
    for name in ("a", "b"):
        net.join(name)
    net.start(*python("import os; os.mkdir('ck'); open('ck/w', 'w').write('weights')"),
              has_own_folder=True)  # fmt: skip
    net.wait_for(EXITED)
    path = net.tmp_path / "a/jobs/7/ck"
    net.clients["a"].checkpoints = [[7, 5.0, str(path)]]
    net.turn()
    net.agents["a"]._send_checkpoints()
    # Files elsewhere are not sent, though a job names them.
    secret = net.tmp_path / "secret"
    secret.write_text("s")
    net.agents["a"]._checkpoints = {8: (1.0, str(secret)), 9: (1.0, str(path))}
    net.agents["a"]._send_checkpoints()
    assert [file.name for file in net.tmp_path.glob("*.tar")] == ["7.tar"]

    shutil.rmtree(path)
    again = AttemptName(7, 3)
    code = "import os; print(open(os.environ['HOCKET_CHECKPOINT'] + '/w').read())"
    net.start(
        *python(code), name=again, devices=("b/v100-0",), has_own_folder=True,
        environment={"HOCKET_CHECKPOINT": str(path)}, log_file=net.tmp_path / "again",
    )  # fmt: skip
    wait_until(lambda: (net.turn(), net.status(again).phase == EXITED)[1])
    assert (net.tmp_path / "again").read_text() == "weights\n"


# ── TLS ──


def answer_one(listener: socket.socket, context: ssl.SSLContext, received: list[bytes]) -> None:
    connection, _ = listener.accept()
    with connection:
        try:
            with context.wrap_socket(connection, server_side=True) as secure:
                received.append(secure.recv(1000))
                secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        except OSError:
            pass


def test_only_the_service_with_the_fingerprint_is_spoken_to(tmp_path):
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    right, wrong = open_tls(tmp_path / "right"), open_tls(tmp_path / "wrong")
    assert right.fingerprint != wrong.fingerprint
    assert open_tls(tmp_path / "right").fingerprint == right.fingerprint, "it is kept"
    for path in (tmp_path / "right").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    for pinned, is_right in ((right, True), (wrong, False)):
        received: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(
                target=answer_one, args=(listener, right.context, received), daemon=True
            )
            thread.start()
            place = f"127.0.0.1:{listener.getsockname()[1]}"
            connection = PinnedConnection(place, pinned.fingerprint, 60.0)
            try:
                connection.request("GET", "/", headers={"Authorization": "Bearer secret"})
                assert connection.getresponse().read() == b"ok"
                assert is_right
            except (WrongCertificateError, http.client.HTTPException):
                assert not is_right
            finally:
                connection.close()
            thread.join(60)
        assert any(b"secret" in data for data in received) == is_right
    assert checked_fingerprint(right.fingerprint.upper()) == right.fingerprint


def test_devices_of_an_agent_carry_its_name(net):
    net.join("a", (FleetDevice(name="cpu-0", device_type="cpu"),))
    (device,) = net.executor.poll().devices
    assert (device.name, device.device_type, device.server) == ("a/cpu-0", "cpu", "a")


def test_a_lease_holds_until_its_end_and_not_after_a_reboot(tmp_path, monkeypatch):
    path = tmp_path / "lease.json"
    assert attempt_folder.lease_grace_s(path) == 0.0, "without a lease nothing may run on"
    attempt_folder.renew_lease(path, attempt_folder.boot_time_s() + 100.0, 3.0)
    assert attempt_folder.lease_grace_s(path) is None
    attempt_folder.renew_lease(path, attempt_folder.boot_time_s() - 0.1, 3.0)
    assert attempt_folder.lease_grace_s(path) == 3.0
    attempt_folder.renew_lease(path, attempt_folder.boot_time_s() + 100.0, 3.0)
    monkeypatch.setattr(attempt_folder.system, "boot", lambda: "a later one")
    assert attempt_folder.lease_grace_s(path) == 0.0
