"""The lease of a training loop, against a stand-in for the daemon."""

import contextlib
import os
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import wait_until
from service.lease_server import Saves, leaves

from hocket.base.errors import UsageError
from hocket.service.lease import LEAVE, SAVE, lease

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


def test_sigterm_saves_commits_andleaves(in_fleet):
    saves = Saves()
    done, code = leaves(saves, lambda step: step == 6 and signal.raise_signal(signal.SIGTERM))
    assert (done, code) == (list(range(7)), 0)
    assert saves.steps == [7]
    assert in_fleet.checkpoints == [{"step": 7, "path": os.path.abspath("step-7")}]
    assert in_fleet.reports[-1] == {"done_steps": 7, "is_finished": False, "can_save": True}


def test_an_answer_of_the_daemon_makes_it_leave_too(in_fleet):
    saves = Saves()

    def ask(step):
        in_fleet.may_run = False
        time.sleep(0.01)

    done, code = leaves(saves, ask, report_every_s=0.01)
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
        leaves(Saves(), lambda step: step == 0 and signal.raise_signal(signal.SIGTERM))
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

    done, code = leaves(saves, lambda step: None, agree=agree)
    assert (done, code, saves.steps) == ([0, 1, 2, 3], 0, [2, 4])
    assert in_fleet.served == 0, "only rank 0 speaks"


def test_other_ranks_neither_save_nor_speak(in_fleet, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    saves = Saves()
    assert list(lease(save=saves, save_every_s=0.0).steps(0, 3)) == [0, 1, 2]
    assert saves.steps == []
    assert in_fleet.served == 0
