"""Traces: every format that is around, and lines that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.fleet.throughputs import JobProfile, Throughputs
from hocket.fleet.traces import generate_trace, read_trace, write_trace_csv

DATA = Path(__file__).parents[3] / "shared" / "data" / "cluster"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not here")
TABLE = Throughputs(
    device_types=("fast",),
    profiles=(
        JobProfile("a", 1),
        JobProfile("b", 1),
        JobProfile("a", 2),
        JobProfile("a", 4),
        JobProfile("a", 8),
    ),
    alone=np.array([[2.0], [3.0], [4.0], [5.0], [6.0]]),
    beside=np.zeros((5, 5, 1)),
)


@needs_data
@pytest.mark.parametrize(
    ("path", "num_jobs", "last_arrival_s", "work"),
    [
        ("gavel/traces_physical_cluster/small_test.trace", 20, 0.0, 346.0),
        ("gavel/traces_msr_seed0/0e4a51.trace", 1181, 7363956.0, 95121.0),
        (
            "gavel_generated/gavel_continuous_single_rate5.6_seed0.tsv",
            12400, 8011465.68, 1646636.2758419,
        ),
        ("shockwave/shockwave_120jobs_100_40.trace", 120, 5011.0, 134583.0),
        ("tiresias/60_job.csv", 60, 1779.0, 164.0),
        ("tiresias/yarn-gput1000.csv", 1001, 0.0, 121.0),
        ("philly/philly_duration_gpus.csv", 33192, 0.0, 860662.0),
        ("pollux/workloads/workload-1.csv", 160, 27695.0, 180.0),
    ],
)  # fmt: skip
def test_public_traces(path: str, num_jobs: int, last_arrival_s: float, work: float) -> None:
    trace = read_trace(DATA / path)
    assert len(trace) == num_jobs
    assert trace.arrival_s[-1] == last_arrival_s
    steps, duration_s = trace.total_steps[0], trace.duration_s[0]
    assert (duration_s if np.isnan(steps) else steps) == work
    assert (np.diff(trace.arrival_s) >= 0.0).all()


def test_the_own_format_comes_back(tmp_path: Path) -> None:
    trace = generate_trace(TABLE, num_jobs=50, jobs_per_hour=3.0, seed=1, has_gangs=True)
    write_trace_csv(trace, tmp_path / "trace.csv")
    again = read_trace(tmp_path / "trace.csv")
    assert again.names == trace.names
    assert again.job_types == trace.job_types
    for column in ("arrival_s", "gang", "weight", "total_steps", "duration_s", "slo_s"):
        assert (getattr(again, column) == getattr(trace, column)).all()


def test_names_and_marks_of_other_programs_are_read(tmp_path: Path) -> None:
    names = ("two\nlines", "a, b", 'say "x"', "line\u2028mark")
    trace = replace(generate_trace(TABLE, num_jobs=4, jobs_per_hour=3.0), names=names)
    path = tmp_path / "trace.csv"
    write_trace_csv(trace, path)
    assert read_trace(path).names == names
    path.write_bytes(b"\xef\xbb\xbfarrival_s,duration_s\r\n0,5\r\n")
    assert read_trace(path).duration_s.tolist() == [5.0]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "empty"),
        ("a,b\n1,2\n", 1, "no known trace"),
        ("name,arrival_s,gnag\na,0,1\n", 1, "unknown column 'gnag'"),
        ("name,arrival_s,duration_s\nx,0,1\ny,soon,1\n", 3, "arrival_s"),
        ("arrival_s,duration_s\n0,nan\n", 2, "duration_s"),
        ("arrival_s,duration_s\n0,-1\n", 2, "duration_s"),
        ("arrival_s,gang,duration_s\n0,1.5,1\n", 2, "gang"),
        ("arrival_s,gang,duration_s\n0,inf,1\n", 2, "gang"),
        ("arrival_s,gang,duration_s\n0,-inf,1\n", 2, "gang"),
        ("arrival_s,name\n0,x\n", 2, "no amount of work"),
        ("arrival_s,duration_s\n", None, "no jobs"),
        ("name,time,application,num_replicas,batch_size\nx,0,chess,1,1\n", 2, "chess"),
        ("a\tb\tc\td\t1\t0\t1\na\tb\tc\n", 2, "3 columns"),
        ("duration_s,num_gpus\n5\n", 2, "gang"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputFileError, match=message) as caught:
        read_trace(path)
    assert caught.value.where == (str(path) if line is None else f"{path}:{line}")


def test_random_jobs_have_the_published_mix() -> None:
    trace = generate_trace(TABLE, num_jobs=20_000, jobs_per_hour=5.6, seed=3, has_gangs=True)
    assert np.diff(trace.arrival_s).mean() == pytest.approx(3600 / 5.6, rel=0.03)
    parts = [np.mean(trace.gang == gang) for gang in (1, 2, 4, 8)]
    assert parts == pytest.approx([0.7, 0.1, 0.15, 0.05], abs=0.015)
    minutes = trace.duration_s / 60.0
    assert np.mean(minutes > 1000.0) == pytest.approx(0.2, abs=0.015)
    assert minutes.min() >= 10**1.5
    assert minutes.max() <= 10**4
    again = generate_trace(TABLE, num_jobs=20_000, jobs_per_hour=5.6, seed=3, has_gangs=True)
    assert (again.total_steps == trace.total_steps).all()
    with pytest.raises(UsageError):
        generate_trace(TABLE, num_jobs=0, jobs_per_hour=1.0)


def test_one_job_is_a_trace_and_none_or_no_rate_is_refused() -> None:
    table = Throughputs(
        device_types=("a",),
        profiles=(JobProfile("x", 1),),
        alone=np.ones((1, 1)),
        beside=np.zeros((1, 1, 1)),
    )
    assert len(generate_trace(table, num_jobs=1, jobs_per_hour=1.0)) == 1
    for num_jobs, jobs_per_hour in ((0, 1.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(UsageError, match="at least one job"):
            generate_trace(table, num_jobs=num_jobs, jobs_per_hour=jobs_per_hour)
