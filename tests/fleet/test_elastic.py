"""Elastic gangs: jobs take as many devices as are best while others come and go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from fleet.watch import Watch
from hypothesis import given
from hypothesis import strategies as st

from hocket.base.errors import UsageError
from hocket.cli.fleet.simulate import command
from hocket.fleet.gangs import ANY_TYPE, Chosen, ElasticJob, GangSpeeds, choose_gangs
from hocket.fleet.rounds import FleetDevice, Job, Rules, Submit, new_state, step
from hocket.fleet.rounds.events import GangSize, Resize
from hocket.fleet.rounds.sizes import Sizes
from hocket.fleet.simulator import bind, elastic_speeds, simulate
from hocket.fleet.throughputs import JobProfile, Throughputs, write_throughputs
from hocket.fleet.traces import read_trace

GANGS = (1, 2, 4)
SCALES = {"linear": (1.0, 2.0, 4.0), "none": (1.0, 1.0, 1.0), "large": (0.0, 0.0, 3.0)}
TABLE = Throughputs(
    device_types=("a", "b"),
    profiles=tuple(JobProfile(name, gang) for name in SCALES for gang in GANGS),
    alone=np.array([[s, s / 2] for speeds in SCALES.values() for s in speeds]),
    beside=np.zeros((9, 9, 2)),
)


def speeds(name: str) -> GangSpeeds:
    return GangSpeeds(gangs=GANGS, steps_per_s=np.array([[s, s / 2] for s in SCALES[name]]))


def job(number: int, name: str, steps: float = 100.0, now: Chosen | None = None) -> ElasticJob:
    return ElasticJob(number=number, left_steps=steps, speeds=speeds(name), now=now)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(SCALES)), st.floats(1.0, 1e6)), max_size=8),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_gangs_can_run_and_find_devices_of_their_type(names, counts):
    jobs = [job(number, name, steps) for number, (name, steps) in enumerate(names)]
    found = choose_gangs(jobs, np.array(counts), 60.0)
    taken = np.zeros(2, dtype=np.int64)
    for number, (gang, device_type) in found.items():
        able = jobs[number].speeds.on(np.array(counts))[GANGS.index(gang)]
        assert able.any() if device_type == ANY_TYPE else able[device_type] > 0.0
        if device_type != ANY_TYPE:
            taken[device_type] += gang
    assert (taken <= counts).all()
    can_run = [each.number for each in jobs if each.speeds.on(np.array(counts)).any()]
    assert sorted(found) == can_run


def test_devices_go_to_those_that_they_quicken():
    jobs = [job(0, "linear"), job(1, "none"), job(2, "linear")]
    found = choose_gangs(jobs, np.array([9, 0]), 0.0)
    assert {number: gang for number, (gang, _) in found.items()} == {0: 4, 1: 1, 2: 4}
    crowded = choose_gangs(jobs, np.array([2, 0]), 0.0)
    assert set(crowded.values()) == {Chosen(1, ANY_TYPE)}


def test_a_job_grows_only_where_that_is_worth_a_stop_and_shrinks_for_others():
    four = np.array([4, 0])
    one = Chosen(1, 0)
    assert choose_gangs([job(0, "linear", 100.0, one)], four, 60.0) == {0: one}
    assert choose_gangs([job(0, "linear", 9000.0, one)], four, 60.0) == {0: Chosen(4, 0)}
    both = [job(0, "linear", 9000.0, Chosen(4, 0)), job(1, "linear", 9000.0)]
    assert set(choose_gangs(both, four, 60.0).values()) == {Chosen(2, 0)}


def test_of_jobs_that_scale_alike_the_shorter_gets_more():
    scales = GangSpeeds(gangs=(1, 2, 3, 4), steps_per_s=np.array([[1.0], [1.7], [2.3], [2.8]]))
    jobs = [
        ElasticJob(number=number, left_steps=steps, speeds=scales, now=None)
        for number, steps in enumerate((1e3, 1e4, 1e5))
    ]
    found = choose_gangs(jobs, np.array([6]), 0.0)
    assert [found[number].gang for number in range(3)] == [3, 2, 1]
    alike = [ElasticJob(number=n, left_steps=1e3, speeds=scales, now=None) for n in range(3)]
    assert {gang for gang, _ in choose_gangs(alike, np.array([6]), 0.0).values()} == {2}


def test_kinds_without_enough_devices_or_memory_do_not_count():
    large = GangSpeeds(gangs=GANGS, steps_per_s=np.array([[0.0, 0.0], [0.0, 2.0], [6.0, 3.0]]))
    waiting = ElasticJob(number=0, left_steps=1.0, speeds=large, now=None)
    assert choose_gangs([waiting], np.array([4, 2]), 0.0) == {0: Chosen(4, 0)}
    assert choose_gangs([waiting], np.array([3, 2]), 0.0) == {0: Chosen(2, 1)}
    assert choose_gangs([waiting], np.array([2, 1]), 0.0) == {}


def test_a_resized_job_keeps_its_work_and_waits_with_other_needs():
    devices = tuple(FleetDevice(name=f"a{at}", device_type="a") for at in range(4))
    state = new_state(("a",), devices, Rules())
    fresh = Job(number=0, name="j", steps_per_s=(1.0,), total_steps=1000.0)
    state, actions = step(state, Submit(time_s=0.0, jobs=(fresh,)))
    assert len(actions.started) == 1
    size = GangSize(number=0, gang=4, steps_per_s=(4.0,))
    state, actions = step(state, Resize(time_s=100.0, sizes=(size,)))
    assert [stop.reason for stop in actions.stops] == ["resized"]
    assert len(state.devices_of(0)) == 4
    assert state.jobs.rows["done_steps"][0] == pytest.approx(100.0)
    for wrong in (GangSize(number=0, gang=0, steps_per_s=(1.0,)),
                  GangSize(number=0, gang=1, steps_per_s=(1.0, 2.0))):  # fmt: skip
        with pytest.raises(UsageError, match="does not fit"):
            step(state, Resize(time_s=100.0, sizes=(wrong,)))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(
        "name,job_type,arrival_s,gang,total_steps\n"
        "alone,linear,0,1,4000\nlate,linear,500,4,4000\nlarge,large,3000,4,900\n"
    )
    return path


def test_a_simulated_fleet_gives_an_idle_device_to_who_is_there(trace: Path) -> None:
    work = bind(read_trace(trace), ("a", "b"), TABLE)
    devices = tuple(
        FleetDevice(name=f"{device_type}{at}", device_type=device_type)
        for device_type in "ab"
        for at in range(4)
    )
    fixed = simulate(work, devices)
    sized = simulate(work, devices, elastic=elastic_speeds(work, TABLE), check=Watch())
    assert sized.is_finished.all()
    assert sized.end_s[0] == pytest.approx(1000.0, rel=0.4)
    assert fixed.end_s[0] >= 4000.0
    assert sized.jct_s.mean() < 0.8 * fixed.jct_s.mean()


def test_the_command_shows_both(trace: Path, tmp_path: Path) -> None:
    write_throughputs(tmp_path / "table.json", TABLE)
    arguments = [str(trace), "--cluster", "a:4,b:4", "--elastic", "--json"]
    table = ["--throughputs", str(tmp_path / "table.json")]
    told = CliRunner().invoke(command, [*arguments, *table])
    rows = json.loads(told.stdout)
    assert [row["policy"] for row in rows["runs"]] == ["las", "las, elastic gangs"]
    refused = CliRunner().invoke(command, arguments)
    assert isinstance(refused.exception, UsageError)


def test_a_job_that_runs_where_it_shall_is_left_alone():
    devices = tuple(FleetDevice(name=f"a{at}", device_type="a") for at in range(4))
    state = new_state(("a", "b"), devices, Rules())
    sizes = Sizes({0: speeds("linear")})
    size = sizes.begin(state, 0, 100.0)
    new = Job(number=0, name="", steps_per_s=size.steps_per_s, gang=size.gang, total_steps=100.0)
    state, _ = step(state, Submit(time_s=0.0, jobs=(new,)))
    assert (size.gang, len(state.devices_of(0))) == (4, 4)
    assert sizes.resize(state, 1.0) is None


def test_a_job_of_a_trace_grows_when_another_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(
        "name,job_type,arrival_s,gang,total_steps\nshort,linear,0,1,400\nlong,linear,0,1,4000\n"
    )
    work = bind(read_trace(path), ("a",), TABLE)
    devices = tuple(FleetDevice(name=f"a{at}", device_type="a") for at in range(4))
    run = simulate(work, devices, elastic=elastic_speeds(work, TABLE), check=Watch())
    # 4,400 steps on four devices, and at most a round or two with fewer.
    assert run.end_s[1] == pytest.approx(1100.0, abs=720.0)
    assert run.held_s[1] < 1500.0
