"""Real processes: what they say, how they fail, and that nothing is left of them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from patience import wait_until
from processes.groups import TESTS, spec

from hocket.processes import start
from hocket.processes import worker_group as group_module
from hocket.processes.root_cause import ProcessError
from hocket.processes.worker import Worker, WorkerSpec
from hocket.processes.worker_group import Timeouts, WorkerGroup


def is_gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_frames_of_any_size_go_both_ways_at_once():
    sizes = [0, 1, 3_000_000, 70_000]
    sent = [np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8) for n in sizes]
    with WorkerGroup([spec("echo", name=f"echo {n}") for n in range(2)]) as group:
        # All are said before any answer is heard: neither side may wait for the other.
        for number in range(3):
            for index in range(2):
                group.send(index, {"number": number, "text": "Ä\n"}, sent)
        heard = [group.receive(100) for _ in range(6)]
        assert group.receive(0) is None
    for index in range(2):
        mine = [message for message in heard if message.sender == index]
        assert [message.header["number"] for message in mine] == [0, 1, 2]
        for message in mine:
            assert message.header["text"] == "Ä\n"
            assert all(map(np.array_equal, map(np.frombuffer, message.buffers,
                                               [np.uint8] * len(sizes)), sent))  # fmt: skip


def test_a_group_needs_neither_torch_nor_numpy_and_ends_when_its_work_is_done():
    with WorkerGroup([spec("report_then_work")]) as group:
        (message,) = group.messages()
        assert group.receive() is None
    assert not {"torch", "numpy", "numba", "ray"} & set(message.header["modules"])


def blamed(*works, timeouts=None, then=lambda group: None):
    with WorkerGroup([spec(work) for work in works], timeouts=timeouts) as group:
        then(group)
        with pytest.raises(ProcessError) as caught:
            list(group.messages())
    return caught.value


def hurt(index, number):
    def signal_it(group):
        group.send(index, {})
        os.kill(group.process_ids[index], number)

    return signal_it


def test_who_was_killed_is_named_and_not_who_lost_it():
    error = blamed("lose_another", "sleep", then=hurt(1, signal.SIGKILL))
    assert error.message == "sleep was killed by signal 9 (SIGKILL) while at 0"
    assert error.root_cause.index == 1
    assert "memory" in error.hint


def test_who_is_stopped_is_named():
    error = blamed("echo", "sleep", timeouts=Timeouts(stopped_s=0.3), then=hurt(1, signal.SIGSTOP))
    assert error.message.startswith("sleep has stopped answering for ")
    assert error.root_cause.cause == "silent"


def test_an_error_is_told_with_its_first_line_and_what_was_done():
    error = blamed("fail", "sleep")
    assert error.message == "fail failed while at 2: ValueError: no such thing"
    assert error.exit_code == 5


def test_an_exit_is_told_with_the_last_words():
    assert blamed("leave").message == "leave ended with code 3 while at 0: last words"


def test_what_is_printed_without_end_does_not_fill_the_disk():
    largest = 0

    def nudge(group):
        nonlocal largest
        words = group._workers[0]._words
        for _ in range(6):
            assert group.receive(100) is not None
            assert group.receive(0.15) is None
            largest = max(largest, os.fstat(words.fileno()).st_size)
            group.send(0, {})

    error = blamed("print_without_end", then=nudge)
    assert error.message.endswith("ended with code 4 while at 0: the end")
    assert largest < 20_000_000, "of 27 MB that were printed"


def test_lines_that_processes_print_are_not_mixed(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    specs = [spec("print_a_line_in_pieces", shows_output=True) for _ in range(2)]
    with WorkerGroup(specs) as group:
        for _ in specs:
            assert group.receive(100) is not None
        for member in range(2):
            group.send(member, {})
        assert list(group.messages()) == []
    assert capfd.readouterr().err == "first second\nfirst second\n"


def test_slow_is_not_dead():
    seen = []
    with WorkerGroup([spec("count_in_one_piece")], timeouts=Timeouts(silence_s=0.1),
              on_wait=lambda positions: seen.extend(positions)) as group:  # fmt: skip
        group.send(0, {"count": 12_000_000})
        assert list(group.messages()) == []
    assert {position.step for position in seen} >= {1}


def test_silence_counts_where_nothing_is_at_work(monkeypatch):
    monkeypatch.setattr(Worker, "is_stopped", False)
    timeouts = Timeouts(silence_s=0.1)  # four times as long before the first step
    error = blamed("sleep", timeouts=timeouts, then=lambda group: (
        wait_until(lambda: group._workers[0].progress.read().beat_s),
        hurt(0, signal.SIGSTOP)(group)))  # fmt: skip
    assert error.root_cause.cause == "silent"


def test_a_time_limit_ends_the_waiting_and_not_the_process():
    with WorkerGroup([spec("echo"), spec("sleep")]) as group:
        assert group.receive(0.05) is None
        group.send(0, {"a": 1})
        assert group.receive(100).header == {"a": 1}


def test_what_processes_start_ends_with_them_in_other_sessions_too():
    with WorkerGroup([spec("start_others")]) as group:
        pids = group.receive(100).header["pids"]
        assert not any(map(is_gone, pids))
    assert all(map(is_gone, pids))


def test_a_process_that_cannot_be_started_leaves_nothing():
    with (
        pytest.raises(FileNotFoundError),
        WorkerGroup([spec("echo"), spec("echo", folder="/nonsense")]),
    ):
        pass


def test_the_exit_of_a_process_that_says_nothing_more_is_waited_for(monkeypatch):
    monkeypatch.setattr(group_module, "_CAUSE_S", 0.0)
    assert blamed("leave_slowly").message == "leave_slowly ended with code 3 while at 0"


def test_a_module_that_is_not_there_is_told_in_its_own_words():
    told = r"nobody ended with code 1: .*No module named hocket\.nonsense"
    nobody = WorkerSpec(name="nobody", module="hocket.nonsense")
    with WorkerGroup([nobody]) as group, pytest.raises(ProcessError, match=told):
        group.receive()


def test_one_that_ends_while_it_is_looked_at_is_blamed_for_how_it_ended(monkeypatch):
    """Its pipes close a moment before its exit code is there."""
    observe, seen = Worker.observe, []

    def then_it_ends(self, *arguments, **options):
        seen.append(observe(self, *arguments, **options))
        return seen[-1]

    monkeypatch.setattr(Worker, "observe", then_it_ends)
    with WorkerGroup([spec("leave")]) as group:
        process = group._workers[0].process
        poll = process.poll
        wait_until(lambda: poll() is not None)
        monkeypatch.setattr(process, "poll", lambda: poll() if seen else None)
        with pytest.raises(ProcessError, match="ended with code 3"):
            group.receive()
    assert seen[0].exit_code is None


def test_another_thread_can_make_the_waiting_end():
    with WorkerGroup([spec("sleep")]) as group:
        threading.Timer(0.1, group.kill).start()
        with pytest.raises(ProcessError, match="SIGKILL"):
            group.receive()


def test_a_group_outlives_the_thread_that_started_it():
    """The kernel takes the thread that made a process for its parent."""
    group = WorkerGroup([spec("echo")])
    starting = threading.Thread(target=group.__enter__)
    starting.start()
    starting.join()
    try:
        group.send(0, {"a": 1})
        assert group.receive(100).header == {"a": 1}
    finally:
        group.close()


def test_a_forked_process_neither_ends_the_group_nor_lacks_one_of_its_own():
    with WorkerGroup([spec("echo")]) as group:
        forked = os.fork()
        if not forked:
            code = 1
            with contextlib.suppress(BaseException):
                group.close()
                start.start_module("this", output=subprocess.DEVNULL).wait()
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
        group.send(0, {"a": 1})
        assert group.receive(100).header == {"a": 1}


PARENT = """
import os, sys, time
from processes.groups import spec
from hocket.processes.worker_group import WorkerGroup
with WorkerGroup([spec("start_others"), spec("sleep")]) as group:
    found = group.receive(100).header["pids"]
    if not os.fork():
        # One that holds all descriptors of its parent open, as forked servers do.
        time.sleep(60)
    print(*found, *group.process_ids, group._reaper.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("stops_children", [False, True])
def test_nothing_outlives_a_parent_that_was_killed(stops_children):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE,
                              env={**os.environ, "PYTHONPATH": TESTS})  # fmt: skip
    with parent.stdout as output:
        pids = [int(text) for text in output.readline().split()]
    assert len(pids) == 5
    forked = [p for p in psutil.Process(parent.pid).children() if p.pid not in pids]
    if stops_children:
        for pid in pids[:-1]:
            os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    try:
        wait_until(lambda: all(map(is_gone, pids)))
    finally:
        for one in forked:
            one.kill()
