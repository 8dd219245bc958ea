"""Small files that would fill the memory are refused before any is taken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hocket.base.errors import InputFileError, UsageError
from hocket.cli.fleet.allocate import command as allocate
from hocket.cli.fleet.given import parse_cluster
from hocket.fleet.problem_file import parse_problem
from hocket.fleet.throughputs import read_throughputs
from hocket.fleet.traces import read_trace


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_a_trace_of_many_short_lines(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"1" + end * 4_000_000, compresslevel=1))
    with pytest.raises(InputFileError, match="the trace has 4,000,000 lines"):
        read_trace(path)


def test_a_table_of_many_jobs(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"v100": {f"('{job}', 1)": {"null": 1.0} for job in range(5000)}}))
    with pytest.raises(InputFileError, match="5,000 job types on 1 device types"):
        read_throughputs(path)


def test_a_problem_of_many_types() -> None:
    jobs = [{"id": "a", "throughputs": {}}]
    with pytest.raises(InputFileError, match="devices has 50,000 types"):
        parse_problem({"devices": dict.fromkeys(map(str, range(50_000)), 1), "jobs": jobs})
    jobs = [{"id": str(job), "throughputs": {}} for job in range(20_001)]
    with pytest.raises(InputFileError, match="20,001 jobs on 1,000 device types"):
        parse_problem({"devices": dict.fromkeys(map(str, range(1000)), 1), "jobs": jobs})
    with pytest.raises(UsageError, match="more than 1000 device types"):
        parse_cluster(",".join(f"k{device_type}:1" for device_type in range(1001)))


@pytest.mark.parametrize("policy", ["las", "fifo", "max-throughput"])
def test_who_can_never_run_is_told_by_every_policy(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "problem.json"
    jobs = [{"id": "large", "gang": 4, "throughputs": {"v100": 1.0}}]
    path.write_text(json.dumps({"devices": {"v100": 2}, "jobs": jobs}))
    result = CliRunner().invoke(allocate, [str(path), "--policy", policy])
    assert "cannot run: large: no device type has enough usable devices" in result.stdout
