"""Logs that are bounded."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.service.executors.bounded_log import BoundedLog


@given(
    parts=st.lists(st.binary(max_size=400), max_size=30),
    limit_bytes=st.integers(800, 4000),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_log_has_its_beginning_and_end_and_stays_within_its_limit(
    tmp_path_factory, parts, limit_bytes
):
    path = tmp_path_factory.mktemp("log") / "log"
    log = BoundedLog(str(path), limit_bytes)
    written = b""
    for part in parts:
        log.write(part)
        written += part
        assert path.stat().st_size <= limit_bytes
    log.close()
    kept = path.read_bytes()
    if len(written) <= limit_bytes:
        assert kept == written
    assert kept[: limit_bytes // 2] == written[: limit_bytes // 2]
    tail_bytes = min(limit_bytes // 8, len(written))
    assert kept[len(kept) - tail_bytes :] == written[len(written) - tail_bytes :]


def test_a_log_goes_on_where_an_earlier_process_ended(tmp_path):
    for text in (b"one\n", b"two\n"):
        log = BoundedLog(str(tmp_path / "log"), 1000)
        log.write(text)
        log.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_full_disk_does_not_end_a_job(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="No space"):
        Path("/dev/full").write_bytes(b"x")
    opened = "hocket.service.executors.bounded_log.open_plain"
    monkeypatch.setattr(opened, lambda path, flags: os.open("/dev/full", os.O_RDWR))
    log = BoundedLog(str(tmp_path / "log"), 1000)
    log.write(b"x" * 5000)
    log.close()


def test_nodes_of_a_gang_share_a_log_and_its_limit(tmp_path):
    path = tmp_path / "log"
    logs = [BoundedLog(str(path), 8000) for _ in range(3)]
    for number in range(600):
        logs[number % 3].write(f"line {number} of a gang\n".encode())
        assert path.stat().st_size <= 8000
    for log in logs:
        log.close()
    kept = path.read_text()
    assert kept.startswith("line 0 of a gang\nline 1 of a gang\nline 2 of a gang\n")
    assert kept.endswith("line 597 of a gang\nline 598 of a gang\nline 599 of a gang\n")
