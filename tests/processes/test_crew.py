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
from processes.crews import TESTS, spec

from hocket.processes import crew as crew_module
from hocket.processes import start
from hocket.processes.blame import ProcessError
from hocket.processes.crew import Crew
from hocket.processes.member import CrewMember, ProcessSpec
from hocket.processes.patience import Patience


def is_gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_frames_of_any_size_go_both_ways_at_once():
    sizes = [0, 1, 3_000_000, 70_000]
    sent = [np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8) for n in sizes]
    with Crew([spec("echo", name=f"echo {n}") for n in range(2)]) as crew:
        # All are said before any answer is heard: neither side may wait for the other.
        for number in range(3):
            for index in range(2):
                crew.tell(index, {"number": number, "text": "Ä\n"}, sent)
        heard = [crew.hear(100) for _ in range(6)]
        assert crew.hear(0) is None
    for index in range(2):
        mine = [message for message in heard if message.sender == index]
        assert [message.header["number"] for message in mine] == [0, 1, 2]
        for message in mine:
            assert message.header["text"] == "Ä\n"
            assert all(map(np.array_equal, map(np.frombuffer, message.buffers,
                                               [np.uint8] * len(sizes)), sent))  # fmt: skip


def test_a_crew_needs_neither_torch_nor_numpy_and_ends_when_its_work_is_done():
    with Crew([spec("report_then_work")]) as crew:
        (message,) = crew.messages()
        assert crew.hear() is None
    assert not {"torch", "numpy", "numba", "ray"} & set(message.header["modules"])


def blamed(*works, patience=None, then=lambda crew: None):
    with Crew([spec(work) for work in works], patience=patience) as crew:
        then(crew)
        with pytest.raises(ProcessError) as caught:
            list(crew.messages())
    return caught.value


def hurt(index, number):
    def signal_it(crew):
        crew.tell(index, {})
        os.kill(crew.process_ids[index], number)

    return signal_it


def test_who_was_killed_is_named_and_not_who_lost_it():
    error = blamed("lose_another", "sleep", then=hurt(1, signal.SIGKILL))
    assert error.message == "sleep was killed by signal 9 (SIGKILL) while at 0.0"
    assert error.blame.index == 1
    assert "memory" in error.hint


def test_who_is_stopped_is_named():
    error = blamed("echo", "sleep", patience=Patience(stopped_s=0.3), then=hurt(1, signal.SIGSTOP))
    assert error.message.startswith("sleep has stopped answering for ")
    assert error.blame.cause == "silent"


def test_an_error_is_told_with_its_first_line_and_what_was_done():
    error = blamed("fail", "sleep")
    assert error.message == "fail failed while at 2.7: ValueError: no such thing"
    assert error.exit_code == 5


def test_an_exit_is_told_with_the_last_words():
    assert blamed("leave").message == "leave ended with code 3 while at 0.0: last words"


def test_what_is_printed_without_end_does_not_fill_the_disk():
    largest = 0

    def nudge(crew):
        nonlocal largest
        words = crew._members[0]._words
        for _ in range(6):
            assert crew.hear(100) is not None
            assert crew.hear(0.15) is None
            largest = max(largest, os.fstat(words.fileno()).st_size)
            crew.tell(0, {})

    error = blamed("print_without_end", then=nudge)
    assert error.message.endswith("ended with code 4 while at 0.0: the end")
    assert largest < 20_000_000, "of 27 MB that were printed"


def test_lines_that_processes_print_are_not_mixed(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    specs = [spec("print_a_line_in_pieces", shows_output=True) for _ in range(2)]
    with Crew(specs) as crew:
        for _ in specs:
            assert crew.hear(100) is not None
        for member in range(2):
            crew.tell(member, {})
        assert list(crew.messages()) == []
    assert capfd.readouterr().err == "first second\nfirst second\n"


def test_slow_is_not_dead():
    seen = []
    with Crew([spec("count_in_one_piece")], patience=Patience(silence_s=0.1),
              on_wait=lambda positions: seen.extend(positions)) as crew:  # fmt: skip
        crew.tell(0, {"count": 12_000_000})
        assert list(crew.messages()) == []
    assert {position.step for position in seen} >= {1}


def test_silence_counts_where_nothing_is_at_work(monkeypatch):
    monkeypatch.setattr(CrewMember, "is_stopped", False)
    patience = Patience(silence_s=0.1)  # four times as long before the first step
    error = blamed("sleep", patience=patience, then=lambda crew: (
        wait_until(lambda: crew._members[0].progress.read().beat_s),
        hurt(0, signal.SIGSTOP)(crew)))  # fmt: skip
    assert error.blame.cause == "silent"


def test_a_time_limit_ends_the_waiting_and_not_the_process():
    with Crew([spec("echo"), spec("sleep")]) as crew:
        assert crew.hear(0.05) is None
        crew.tell(0, {"a": 1})
        assert crew.hear(100).header == {"a": 1}


def test_what_processes_start_ends_with_them_in_other_sessions_too():
    with Crew([spec("start_others")]) as crew:
        pids = crew.hear(100).header["pids"]
        assert not any(map(is_gone, pids))
    assert all(map(is_gone, pids))


def test_a_process_that_cannot_be_started_leaves_nothing():
    with pytest.raises(FileNotFoundError), Crew([spec("echo"), spec("echo", folder="/nonsense")]):
        pass


def test_the_exit_of_a_process_that_says_nothing_more_is_waited_for(monkeypatch):
    monkeypatch.setattr(crew_module, "_CAUSE_S", 0.0)
    assert blamed("leave_slowly").message == "leave_slowly ended with code 3 while at 0.0"


def test_a_module_that_is_not_there_is_told_in_its_own_words():
    told = r"nobody ended with code 1: .*No module named hocket\.nonsense"
    nobody = ProcessSpec(name="nobody", module="hocket.nonsense")
    with Crew([nobody]) as crew, pytest.raises(ProcessError, match=told):
        crew.hear()


def test_one_that_ends_while_it_is_looked_at_is_blamed_for_how_it_ended(monkeypatch):
    """Its pipes close a moment before its exit code is there."""
    sighting, seen = CrewMember.sighting, []

    def then_it_ends(self, *arguments, **options):
        seen.append(sighting(self, *arguments, **options))
        return seen[-1]

    monkeypatch.setattr(CrewMember, "sighting", then_it_ends)
    with Crew([spec("leave")]) as crew:
        process = crew._members[0].process
        poll = process.poll
        wait_until(lambda: poll() is not None)
        monkeypatch.setattr(process, "poll", lambda: poll() if seen else None)
        with pytest.raises(ProcessError, match="ended with code 3"):
            crew.hear()
    assert seen[0].exit_code is None


def test_another_thread_can_make_the_waiting_end():
    with Crew([spec("sleep")]) as crew:
        threading.Timer(0.1, crew.kill).start()
        with pytest.raises(ProcessError, match="SIGKILL"):
            crew.hear()


def test_a_crew_outlives_the_thread_that_started_it():
    """The kernel takes the thread that made a process for its parent."""
    crew = Crew([spec("echo")])
    starting = threading.Thread(target=crew.__enter__)
    starting.start()
    starting.join()
    try:
        crew.tell(0, {"a": 1})
        assert crew.hear(100).header == {"a": 1}
    finally:
        crew.close()


def test_a_forked_process_neither_ends_the_crew_nor_lacks_one_of_its_own():
    with Crew([spec("echo")]) as crew:
        forked = os.fork()
        if not forked:
            code = 1
            with contextlib.suppress(BaseException):
                crew.close()
                start.start_module("this", output=subprocess.DEVNULL).wait()
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
        crew.tell(0, {"a": 1})
        assert crew.hear(100).header == {"a": 1}


PARENT = """
import os, sys, time
from processes.crews import spec
from hocket.processes.crew import Crew
with Crew([spec("start_others"), spec("sleep")]) as crew:
    found = crew.hear(100).header["pids"]
    if not os.fork():
        # One that holds all descriptors of its parent open, as forked servers do.
        time.sleep(60)
    print(*found, *crew.process_ids, crew._keeper.pid, flush=True)
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
