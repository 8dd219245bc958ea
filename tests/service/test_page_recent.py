"""What happened lately, as the page follows it from the events of a daemon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from service.page_fleets import attempt_of, fleet, record_of

import hocket.service.daemon as daemon_package
from hocket.service.page.recent import MAX_ATTEMPTS, MAX_ENDED, Recent
from hocket.service.page.templating import static_files
from hocket.service.records import (
    ENDED,
    AttemptRecord,
    EventRecord,
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


def test_the_script_listens_to_every_kind_of_event():
    folder = Path(daemon_package.__file__).parent
    noted = {
        kind
        for path in folder.glob("*.py")
        for kind in re.findall(r'\bnote\(\s*"([a-z-]+)"', path.read_text())
    }
    script = static_files()["page.js"][0].decode()
    listened = set(re.findall(r'"([a-z -]+)"', script.split("KINDS = [")[1].split("]")[0]))
    assert {"submitted", "started"} <= noted
    assert noted | set(ENDED) <= listened


class StubDaemon:
    """Events and records of a daemon that does nothing."""

    def __init__(self) -> None:
        self.list: list[EventRecord] = []
        self.stored: dict[int, list[AttemptRecord]] = {}
        self.num_asked = 0

    def note(self, time_s: float, kind: str, job: int | None, **detail) -> None:
        self.list.append(
            EventRecord(
                sequence=len(self.list) + 1, time_s=time_s, kind=kind, job=job, detail=detail
            )
        )

    def last_event(self) -> int:
        return len(self.list)

    def events(self, after: int, limit: int) -> list[EventRecord]:
        return self.list[after : after + limit]

    def attempts(self, number: int) -> list[AttemptRecord]:
        self.num_asked += 1
        return self.stored.get(number, [])

    def job(self, number: int) -> JobRecord:
        return record_of(number)


def test_recent_follows_the_events():
    state, daemon = fleet(), StubDaemon()
    # Jobs 1 and 2 run since long ago; only the store knows.
    daemon.stored = {number: [attempt_of(state, number, 1e9 - 500.0)] for number in (1, 2)}
    daemon.note(1e9, "started", 3, attempt=1, devices=["v100-0"])
    recent = Recent(daemon)
    seen = recent.look(state, 0.0)
    assert {record.job: record.started_s for record in seen.attempts} == {
        1: 1e9 - 500.0, 2: 1e9 - 500.0, 3: 1e9
    }  # fmt: skip
    assert seen.ended == ()
    assert seen.names == {1: "first", 2: "second", 3: "third"}
    daemon.note(1e9 + 5, "stopping", 3, attempt=1, reason="preempted")
    daemon.note(1e9 + 6, "stopped", 3, attempt=1, outcome="preempted", exit_code=-15)
    daemon.note(1e9 + 7, "failed", 3, message="boom")
    daemon.note(1e9 + 7, "round", None, round=2)
    seen = recent.look(fleet(("first", "second")), 0.0)
    third = next(record for record in seen.attempts if record.job == 3)
    assert (third.ended_s, third.outcome) == (1e9 + 6, "preempted")
    assert [record.number for record in seen.ended] == [3]
    assert seen.names[3] == "third", "a name outlives its job"
    assert daemon.num_asked == 2
    seen = recent.look(state, 1e9 + 6.5)
    assert sorted(record.job for record in seen.attempts) == [1, 2]


def test_recent_is_bounded():
    state, daemon = fleet(()), StubDaemon()
    for number in range(20_000):
        daemon.note(1e9, "started", number, attempt=1, devices=["v100-0"])
        daemon.note(1e9 + 1, "stopped", number, attempt=1, outcome="finished")
        daemon.note(1e9 + 1, "succeeded", number)
    daemon.note(1e9, "started", 99_999, attempt=1, devices=["v100-1"])
    seen = Recent(daemon).look(state, 0.0)
    assert len(seen.attempts) <= MAX_ATTEMPTS
    assert 99_999 in {record.job for record in seen.attempts}, "what runs is not left out"
    assert [record.number for record in seen.ended] == list(range(19_999, 19_999 - MAX_ENDED, -1))
