"""Output of attempts over the interface: whole, a tail, from a byte on, followed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.rest_service import is_problem

from hocket.service.daemon.log import Log
from hocket.service.executors.executor import AttemptName
from hocket.service.rest import logs

pytestmark = pytest.mark.usefixtures("nobody_left")


def test_logs_whole_tail_and_from_a_byte_on(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    path = service.log_path(number)
    lines = [f"line {at} \x1b[31m\u2028<script>" for at in range(20_000)]
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    whole = service.client.get(f"/v1/jobs/{number}/log")
    assert whole.text == text
    assert whole.headers["content-type"].startswith("text/plain")
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert whole.headers["hocket-attempt"] == "1"
    for num_lines in (0, 1, 3, 6000, 20_000, 30_000):
        tail = service.client.get(f"/v1/jobs/{number}/log?tail={num_lines}")
        wanted = lines[-num_lines:] if num_lines else []
        assert tail.text == "".join(f"{line}\n" for line in wanted)
    data = text.encode()
    for start in (5, len(data) - 7, len(data), 10 * len(data)):
        part = service.client.get(f"/v1/jobs/{number}/log?start={start}")
        assert (part.status_code, part.content) == (200, data[start:])
    is_problem(service.client.get(f"/v1/jobs/{number}/log?attempt=2"), 404)


class InMemory:
    """A log without a file."""

    def __init__(self, data):
        self.data = data

    def read(self, start, length):
        return self.data[start : start + length]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=12), max_size=30), st.integers(0, 40), st.booleans())
def test_the_last_lines_are_found_wherever_blocks_end(lines, num_lines, ends_with_break):
    data = b"\n".join(lines) + (b"\n" if ends_with_break else b"")
    parts = data.split(b"\n")
    kept = [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
    wanted = b"".join(kept[-num_lines:]) if num_lines else b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_CHUNK_BYTES", 7)
        assert data[logs._tail_start(InMemory(data), len(data), num_lines) :] == wanted


def test_a_program_that_prints_meanwhile_does_not_hide_its_last_line(service, monkeypatch):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    path = service.log_path(number)
    path.write_bytes(b"first\nsecond\n")
    size_bytes = Log.size_bytes

    def grows_when_asked(log):
        found = size_bytes(log)
        with path.open("ab") as file:
            file.write(b"another line\n")
        return found

    monkeypatch.setattr(Log, "size_bytes", grows_when_asked)
    assert service.client.get(f"/v1/jobs/{number}/log?tail=1").text == "second\n"


def test_a_followed_log_ends_with_its_attempt(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    path = service.log_path(number)
    path.write_bytes(b"first\n")
    service.executor.exit(AttemptName(number, 1), 0)
    with path.open("ab") as file:
        file.write(b"last\n")
    answer = service.client.get(f"/v1/jobs/{number}/log?follow=true")
    assert answer.text == "first\nlast\n"


def test_a_job_that_never_started_has_no_log(service):
    for _ in range(3):
        service.submit(total_steps=1e9)
    waiting = service.submit(gang=2, total_steps=1e9)["id"]
    assert service.job(waiting)["status"] == "queued"
    is_problem(service.client.get(f"/v1/jobs/{waiting}/log"), 404)
