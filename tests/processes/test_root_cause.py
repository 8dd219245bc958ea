"""Who is blamed, and in which words."""

import pytest

from hocket.processes.root_cause import Observation, find_root_cause

LOST = {"kind": "communication", "message": "CommunicationError: lost another rank"}
CASES = {
    "killed": (
        Observation(name="a", exit_code=-9, doing="x"), "killed",
        "a was killed by signal 9 (SIGKILL) while x",
    ),
    "memory": (
        Observation(name="a", exit_code=-9, memory_ran_out=True), "memory",
        "a was killed by signal 9 (SIGKILL)",
    ),
    "crash": (
        Observation(name="a", exit_code=-11, last_words="Fatal error"), "killed",
        "a was killed by signal 11 (SIGSEGV): Fatal error",
    ),
    "odd signal": (
        Observation(name="a", exit_code=-40), "killed",
        "a was killed by signal 40 (a real-time signal)",
    ),
    "error": (
        Observation(name="a", error={"kind": "", "message": "E: m"}, exit_code=1, last_words="w"),
        "error", "a failed: E: m",
    ),
    "silent": (
        Observation(name="a", silent_s=5.4, doing="x"), "silent",
        "a has stopped answering for 5 s while x",
    ),
    "exit": (
        Observation(name="a", exit_code=0, last_words="bye"), "exit", "a ended with code 0: bye",
    ),
    "consequence": (
        Observation(name="a", error=LOST, exit_code=1, last_words="w"), "another",
        "a: CommunicationError: lost another rank",
    ),
    "nothing": (Observation(name="a", doing="x"), "unknown", "a: unknown failure while x"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_end_has_its_words(case):
    seen, cause, message = CASES[case]
    found = find_root_cause([seen])
    assert (found.cause, found.message) == (cause, message)
    assert ("ran out of memory" in found.hint) == (case == "memory")


@pytest.mark.parametrize(
    ("others", "culprit"),
    [
        (["consequence", "exit", "nothing"], "silent"),
        (["consequence", "exit", "silent", "error"], "killed"),
        (["consequence", "nothing"], "exit"),
        (["nothing"], "consequence"),
        (["consequence", "exit", "silent"], "error"),
    ],
)
def test_the_cause_is_blamed_and_not_what_follows_from_it(others, culprit):
    for place in range(len(others) + 1):
        names = [*others[:place], culprit, *others[place:]]
        assert find_root_cause([CASES[name][0] for name in names]).index == place


def test_one_that_has_done_its_work_is_not_blamed_for_its_end():
    done = Observation(name="a", exit_code=0, is_done=True)
    assert find_root_cause([done, CASES["consequence"][0]]).index == 1
