"""What happened lately, as the page follows it from the events of a daemon."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from service.page_fleets import attempt_of, fleet

import hocket.service.daemon as daemon_package
from hocket.service.page.recent import MAX_ATTEMPTS, MAX_ENDED, recent_history
from hocket.service.page.templating import static_files
from hocket.service.records import (
    ENDED,
    HeldAttempt,
    JobRecord,
    ending_of,
)
from hocket.service.spec import JobSpec


@pytest.mark.parametrize(
    ("status", "message", "told"),
    [
        ("cancelled", "cancelled", "job 7 was cancelled"),
        ("succeeded", "finished", "job 7 succeeded"),
        ("failed", "exit code 3", "job 7 failed: exit code 3"),
        ("failed", "", "job 7 failed"),
    ],
)
def test_endings_do_not_repeat_themselves(status, message, told):
    spec = JobSpec(name="a", command=("true",))
    record = JobRecord(number=7, spec=spec, status=status, submitted_s=0.0, message=message)
    assert ending_of(record) == told


def test_the_script_listens_to_every_type_of_event():
    folder = Path(daemon_package.__file__).parent
    noted = {
        device_type
        for path in folder.glob("*.py")
        for device_type in re.findall(r'\bnote\(\s*"([a-z-]+)"', path.read_text())
    }
    script = static_files()["page.js"][0].decode()
    listened = set(re.findall(r'"([a-z -]+)"', script.split("EVENTS = [")[1].split("]")[0]))
    assert {"submitted", "started"} <= noted
    assert noted | set(ENDED) <= listened


def test_history_is_read_from_the_store(rig):
    for name in ("first", "second"):
        rig.submit(name=name)
    rig.look(2)
    rig.executor.exit(rig.executor.running()[0], 0)
    rig.look(2)
    seen = recent_history(rig.store, 0.0)
    assert {one.job: one.outcome for one in seen.attempts} == {1: "finished", 2: ""}
    assert seen.names == {1: "first", 2: "second"}
    assert [one.number for one in seen.ended] == [1]
    rig.later(100.0)
    later = recent_history(rig.store, rig.time.now_s - 50.0)
    assert [one.job for one in later.attempts] == [2], "what runs is never left out"


def test_history_is_bounded():
    record = attempt_of(fleet(), 1, 0.0)
    held = [
        HeldAttempt(replace(record, job=at, ended_s=at or None), "", "", "x")
        for at in range(2 * MAX_ATTEMPTS)
    ]
    daemon = SimpleNamespace(held_since=lambda _: held, last_ended=lambda limit: range(limit))
    seen = recent_history(daemon, 0.0)
    assert (len(seen.attempts), len(seen.ended)) == (MAX_ATTEMPTS, MAX_ENDED)
    assert seen.attempts[-1].ended_s is None
