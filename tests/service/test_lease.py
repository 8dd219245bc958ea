"""The lease of a training loop, against a stand-in for the daemon."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.lease_server import LeaseServer
from service.local_attempts import wait_until

from hocket.base.errors import RunError, UsageError
from hocket.service import lease as module
from hocket.service.lease import LEAVE, SAVE, StaleLeaseError, lease


@pytest.fixture
def server():
    with LeaseServer() as made:
        yield made


@pytest.fixture
def in_fleet(server, monkeypatch):
    for name, text in server.variables().items():
        monkeypatch.setenv(name, text)
    before = signal.getsignal(signal.SIGTERM)
    yield server
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, before)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Saves:
    """A save function that takes note."""

    def __init__(self):
        self.steps = []

    def __call__(self, step):
        self.steps.append(step)
        return f"step-{step}"


# ── outside and inside ──


@given(start=st.integers(0, 20), total=st.integers(0, 20))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_outside_a_fleet_it_is_a_plain_loop(start, total):
    saves = Saves()
    before = signal.getsignal(signal.SIGTERM)
    out = lease(save=saves, save_every_s=0.0)
    assert list(out.steps(start, total)) == list(range(start, total))
    assert out.commit(total, "x")
    assert out.checkpoint is None
    assert saves.steps == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loop_reports_saves_at_its_end_and_leaves_the_verdict_to_its_exit_code(in_fleet):
    saves = Saves()
    assert list(lease(save=saves).steps(3, 10)) == list(range(3, 10))
    assert saves.steps == [10]
    assert in_fleet.checkpoints == [{"step": 10, "path": os.path.abspath("step-10")}]
    assert in_fleet.reports[-1] == {"done_steps": 10, "is_finished": False, "can_save": True}


def test_a_loop_that_ends_although_it_was_asked_to_leave_says_that_it_finished(in_fleet):
    for step in lease().steps(0, 5):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
    assert in_fleet.reports[-1] == {"done_steps": 5, "is_finished": True}


def test_progress_is_reported_while_there_is_some(in_fleet):
    for step in lease(report_every_s=0.01).steps(0, None):
        if step == 1:
            wait_until(lambda: in_fleet.reports and in_fleet.reports[-1]["done_steps"] == 1)
            served = in_fleet.served
            time.sleep(0.1)
            assert in_fleet.served <= served + 1, "a loop that is stuck falls silent"
        if step == 2:
            break
    assert [one["done_steps"] for one in in_fleet.reports] == sorted(
        one["done_steps"] for one in in_fleet.reports
    )


def test_work_is_saved_from_time_to_time(in_fleet):
    saves = Saves()
    for _ in lease(save=saves, save_every_s=0.0).steps(0, 4):
        pass
    assert saves.steps == [1, 2, 3, 4]
    assert [one["step"] for one in in_fleet.checkpoints] == [1, 2, 3, 4]


def test_the_time_to_the_next_save_begins_with_the_last_one(in_fleet):
    saves = Saves()
    made = lease(save=saves, save_every_s=1000.0)
    for step in made.steps(0, 6):
        if step == 2:
            made._saved_s -= 1000.0
    assert saves.steps == [3, 6], "when it is due, and at the end"


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_end_of_the_loop_is_the_end_of_the_job(in_fleet, monkeypatch, is_inside):
    """A second loop would go on with a job that was told to be finished, perhaps."""
    if not is_inside:
        for name in in_fleet.variables():
            monkeypatch.delenv(name)
    made = lease()
    for step in made.steps(0, 10):
        if step == 2:
            # A loop that is left early may be entered again.
            break
    assert list(made.steps(2, 4)) == [2, 3]
    with pytest.raises(UsageError, match="all done before"):
        list(made.steps(4, 6))


# ── leaving ──


def _leaves(saves, ask, *, start=0, **options):
    done = []
    try:
        for step in lease(save=saves, **options).steps(start, 1000):
            done.append(step)
            ask(step)
    except SystemExit as leaving:
        return done, leaving.code
    raise AssertionError("it did not leave")


def test_sigterm_saves_commits_and_leaves(in_fleet):
    saves = Saves()
    done, code = _leaves(saves, lambda step: step == 6 and signal.raise_signal(signal.SIGTERM))
    assert (done, code) == (list(range(7)), 0)
    assert saves.steps == [7]
    assert in_fleet.checkpoints == [{"step": 7, "path": os.path.abspath("step-7")}]
    assert in_fleet.reports[-1] == {"done_steps": 7, "is_finished": False, "can_save": True}


def test_an_answer_of_the_daemon_makes_it_leave_too(in_fleet):
    saves = Saves()

    def ask(step):
        in_fleet.may_run = False
        time.sleep(0.01)

    done, code = _leaves(saves, ask, report_every_s=0.01)
    assert code == 0
    assert saves.steps == [len(done)]
    assert in_fleet.checkpoints[-1]["step"] == len(done)


def test_a_loop_that_did_nothing_saves_nothing(in_fleet):
    saves = Saves()
    made = lease(save=saves, agree=lambda wish: LEAVE)
    with pytest.raises(SystemExit):
        list(made.steps(5, 10))
    assert saves.steps == []
    assert in_fleet.reports[-1] == {"done_steps": 5, "is_finished": False, "can_save": True}


def test_a_handler_that_was_there_is_called_too(in_fleet):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        _leaves(Saves(), lambda step: step == 0 and signal.raise_signal(signal.SIGTERM))
        assert called == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_that_another_thread_collects_leaves_no_handler_behind(in_fleet):
    called, failures = [], []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        steps = lease().steps(0, 10)
        next(steps)

        def collect():
            try:
                steps.close()
            except ValueError as error:
                failures.append(error)

        collector = threading.Thread(target=collect)
        collector.start()
        collector.join()
        signal.raise_signal(signal.SIGTERM)
        assert (called, failures) == ([1], [])
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_forked_children_still_end_by_sigterm(in_fleet):
    reader, writer = os.pipe()
    for _ in lease().steps(0, 1):
        child = os.fork()
        if child == 0:
            # Nothing of what tests have set up may run in here, whatever the signal meets.
            with contextlib.suppress(BaseException):
                os.write(writer, b"x")
                while True:
                    signal.pause()
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_ranks_leave_together(in_fleet, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    saves, wishes = Saves(), []

    def agree(wish):
        wishes.append(wish)
        return {2: SAVE, 4: LEAVE}.get(len(wishes) - 1, wish)

    done, code = _leaves(saves, lambda step: None, agree=agree)
    assert (done, code, saves.steps) == ([0, 1, 2, 3], 0, [2, 4])
    assert in_fleet.served == 0, "only rank 0 speaks"


def test_other_ranks_neither_save_nor_speak(in_fleet, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    saves = Saves()
    assert list(lease(save=saves, save_every_s=0.0).steps(0, 3)) == [0, 1, 2]
    assert saves.steps == []
    assert in_fleet.served == 0


# ── the daemon is away ──


def test_training_goes_on_while_the_daemon_is_away(in_fleet, monkeypatch, tmp_path):
    port = _free_port()
    endpoint = tmp_path / "endpoint.json"
    monkeypatch.setenv("HOCKET_ENDPOINT", str(endpoint))
    endpoint.write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
    monkeypatch.setattr(module, "_LONGEST_RETRY_S", 0.05)
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
    monkeypatch.setattr(in_fleet, "answer", lambda *_: (200, {"hello": "world"}))
    assert lease().commit(1, "one") is False
    monkeypatch.setattr(in_fleet, "answer", lambda *_: (200, ["step"]))
    assert lease().commit(1, "one") is False


def test_it_gives_up_in_the_end_and_says_so(in_fleet, monkeypatch):
    monkeypatch.setattr(module, "_LAST_RETRY_S", 0.02)
    in_fleet.failure = 503
    _, code = _leaves(Saves(), lambda step: signal.raise_signal(signal.SIGTERM))
    assert code == module.UNCOMMITTED
    assert module._LAST_TRIES <= in_fleet.served <= module._LAST_TRIES + 5


def test_it_does_not_outlast_its_grace_where_nobody_answers(in_fleet, monkeypatch):
    monkeypatch.setattr(module, "_LAST_PATIENCE_S", -1.0)
    in_fleet.failure = 503
    _, code = _leaves(None, lambda step: signal.raise_signal(signal.SIGTERM))
    assert code == module.UNCOMMITTED
    assert in_fleet.served <= 3


def test_a_request_that_is_wrong_is_an_error_and_not_tried_for_ever(in_fleet):
    in_fleet.failure = 422
    with pytest.raises(RunError, match="as the test says"):
        lease().commit(1, "x")


# ── stale attempts ──


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


def test_a_worker_that_revives_after_its_attempt_was_given_away(server, tmp_path):
    """Halted (SIGSTOP) in the middle, fenced, continued: nothing of it counts any more."""
    worker = subprocess.Popen(
        [sys.executable, "-c", HALTED],
        env={**os.environ, **server.variables()},
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    try:
        wait_until(lambda: len(server.checkpoints) > 3 and server.reports)
        worker.send_signal(signal.SIGSTOP)
        before = server.give_away((7, 3))
        worker.send_signal(signal.SIGCONT)
        output, _ = worker.communicate(timeout=30)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 9
    assert output.endswith(b"stale\n")
    assert server.refused
    assert (len(server.reports), len(server.checkpoints)) == before


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
