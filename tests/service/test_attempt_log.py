"""Reading the log of an attempt leaves no open file, also where there is no log yet."""

from __future__ import annotations

import os
from pathlib import Path

from hocket.service.daemon.assignment import LOGS
from hocket.service.daemon.log import Log


def test_a_log_is_read_by_parts_and_closed_each_time(tmp_path: Path) -> None:
    log = Log(tmp_path, 7, 1)
    assert (log.size_bytes(), log.read(0, 10)) == (0, b"")
    folder = tmp_path / LOGS / "7"
    folder.mkdir(parents=True)
    (folder / "attempt-1.log").write_bytes(b"0123456789")
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert (log.size_bytes(), log.read(2, 3), log.read(10, 3)) == (10, b"234", b"")
    assert len(os.listdir("/proc/self/fd")) < num_open + 10
