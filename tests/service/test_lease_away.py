"""A lease whose daemon is away, is not the one it was, or has given the attempt away."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from patience import wait_until
from ports import reserved_port
from service.lease_server import Saves, leaves

from hocket.base.errors import RunError
from hocket.service import lease as module
from hocket.service.lease import StaleLeaseError, lease


def test_training_goes_on_while_the_daemon_is_away(in_fleet, monkeypatch, tmp_path):
    endpoint = tmp_path / "endpoint.json"
    monkeypatch.setenv("HOCKET_ENDPOINT", str(endpoint))
    monkeypatch.setattr(module, "_LONGEST_RETRY_S", 0.05)
    with reserved_port() as port:
        endpoint.write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
        made = lease(save=Saves(), report_every_s=0.01)
        for step in made.steps(0, 20):
            if step == 3:
                assert made.commit(3, "three") is False
                assert made.commit(4, "four") is False
            if step == 10:
                assert in_fleet.served == 0
                endpoint.write_text(json.dumps({"url": in_fleet.url}))
                wait_until(lambda: in_fleet.checkpoints)
    assert [one["step"] for one in in_fleet.checkpoints] == [4, 20]


@pytest.mark.parametrize("failure", [500, 503, 429])
def test_failures_of_the_daemon_pass(in_fleet, monkeypatch, failure):
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.001)
    in_fleet.failure = failure
    made = lease()
    for step in made.steps(0, 3):
        if step == 1:
            assert made.commit(1, "one") is False
            in_fleet.failure = None
    assert [one["step"] for one in in_fleet.checkpoints] == [1]


@pytest.mark.parametrize("answer", [401, 404, 405, 409, 422])
def test_a_stranger_at_the_address_of_the_daemon_ends_nothing(in_fleet, monkeypatch, answer):
    """The port of a daemon that is away may be another program's, whose refusals mean nothing."""
    monkeypatch.setattr(module, "_LONGEST_RETRY_S", 0.02)
    in_fleet.failure, in_fleet.is_stranger = answer, True
    made = lease(report_every_s=0.01)
    for step in made.steps(0, 5):
        if step == 1:
            assert made.commit(1, "one") is False
            wait_until(lambda: in_fleet.served > 3)
        if step == 3:
            in_fleet.failure = None
            wait_until(lambda: in_fleet.checkpoints)
    assert [one["step"] for one in in_fleet.checkpoints] == [1]
    assert in_fleet.reports[-1] == {"done_steps": 5, "is_finished": False}


def test_an_answer_that_says_nothing_of_a_checkpoint_is_none(in_fleet, monkeypatch):
    monkeypatch.setattr(in_fleet, "answer", lambda *_: (200, {"hello": "service_state"}))
    assert lease().commit(1, "one") is False
    monkeypatch.setattr(in_fleet, "answer", lambda *_: (200, ["step"]))
    assert lease().commit(1, "one") is False


def test_it_gives_up_in_the_end_and_says_so(in_fleet, monkeypatch):
    monkeypatch.setattr(module, "_LAST_RETRY_S", 0.02)
    in_fleet.failure = 503
    _, code = leaves(Saves(), lambda step: signal.raise_signal(signal.SIGTERM))
    assert code == module.UNCOMMITTED
    assert module._LAST_TRIES <= in_fleet.served <= module._LAST_TRIES + 5


def test_it_does_not_outlast_its_grace_where_nobody_answers(in_fleet, monkeypatch):
    monkeypatch.setattr(module, "_LAST_PATIENCE_S", -1.0)
    in_fleet.failure = 503
    _, code = leaves(None, lambda step: signal.raise_signal(signal.SIGTERM))
    assert code == module.UNCOMMITTED
    assert in_fleet.served <= 3


def test_a_request_that_is_wrong_is_an_error_and_not_tried_for_ever(in_fleet):
    in_fleet.failure = 422
    with pytest.raises(RunError, match="as the test says"):
        lease().commit(1, "x")


def test_a_stale_attempt_can_neither_report_nor_commit(in_fleet):
    in_fleet.current = (7, 3)
    with pytest.raises(StaleLeaseError, match="attempt 2 of job 7"):
        lease().commit(1, "one")
    saves = Saves()
    steps = lease(save=saves, report_every_s=0.01).steps(0, None)
    with pytest.raises(StaleLeaseError):
        wait_until(lambda: next(steps) < 0)
    assert saves.steps == []
    assert in_fleet.checkpoints == []
    assert in_fleet.reports == []


def test_a_wrong_token_is_refused(in_fleet, monkeypatch):
    monkeypatch.setenv("HOCKET_TOKEN", "guessed")
    with pytest.raises(StaleLeaseError):
        lease().commit(1, "one")


HALTED = """
import hocket.service.lease as leases, time
def save(step):
    print("saving", flush=True)
    return f"step-{step}"
try:
    for step in leases.lease(save=save, report_every_s=0.02, save_every_s=0.0).steps(0, None):
        print("step", step, flush=True)
        time.sleep(0.01)
except leases.StaleLeaseError as error:
    print("stale", flush=True)
    raise SystemExit(9)
"""


def test_a_worker_that_revives_after_its_attempt_was_given_away(lease_server, tmp_path):
    """Halted (SIGSTOP) in the middle, fenced, continued: nothing of it counts any more."""
    worker = subprocess.Popen(
        [sys.executable, "-c", HALTED],
        env={**os.environ, **lease_server.variables()},
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    try:
        wait_until(lambda: len(lease_server.checkpoints) > 3 and lease_server.reports)
        worker.send_signal(signal.SIGSTOP)
        before = lease_server.give_away((7, 3))
        worker.send_signal(signal.SIGCONT)
        output, _ = worker.communicate(timeout=120)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 9
    assert output.endswith(b"stale\n")
    assert lease_server.refused
    assert (len(lease_server.reports), len(lease_server.checkpoints)) == before


def test_a_report_that_waited_is_not_sent_after_the_last_word(in_fleet):
    """The thread that reports may wait for its turn while the loop says its last word: what it
    would say then is old, and may look like a job that goes on."""
    made = lease(save=Saves())
    for step in made.steps(0, 3):
        if step == 0:
            wait_until(lambda: in_fleet.reports)
        if step == 2:
            made._sending.acquire()
            made._done_steps = 2
            is_over = made._is_over
            waiting = threading.Thread(target=made._report, args=(made._channel, is_over))
            waiting.start()
            time.sleep(0.05)
            is_over.set()
            before = len(in_fleet.reports)
            made._sending.release()
            waiting.join(20)
            assert not waiting.is_alive()
            assert len(in_fleet.reports) == before
    assert in_fleet.reports[-1]["done_steps"] == 3
