"""Space sharing in the service: two jobs that say so on one device, their interference learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from service.daemon_rig import RULES
from service.fake_executor import fleet_devices
from service.violations import violations

from hocket.base.errors import UsageError
from hocket.fleet.rounds import interference
from hocket.fleet.rounds.state import Rules, new_state
from hocket.fleet.throughputs.table import JobProfile, Throughputs
from hocket.service.daemon import commands
from hocket.service.executors.executor import AttemptName

V100 = {"v100": 4.0}


@pytest.fixture
def engine(engine):
    engine.devices = fleet_devices(v100=1)
    return engine


def submit(rig, name="a", **spec):
    values = {"throughputs": V100, "total_steps": 1e9, "space_sharing": True, **spec}
    return rig.submit(name=name, **values)


def next_round(rig):
    rig.time.now_s = max(rig.time.now_s, rig.service_state.state.next_tick_s)
    rig.ask(commands.tick)
    rig.look(2)


def pair(rig):
    """Two jobs that share the only device."""
    numbers = submit(rig, "a"), submit(rig, "b")
    rig.look(2)
    next_round(rig)
    return numbers


def running(engine):
    return sorted(name.job for name in engine.running())


def work(rig, **steps_per_s):
    """Jobs that run do so until the next round, at speeds by name, and say how far they are."""
    seconds = rig.service_state.state.next_tick_s - rig.time.now_s
    rig.time.now_s += seconds
    for number, job in rig.service_state.jobs.items():
        if job.status == "running":
            done_steps = job.done_steps + steps_per_s[job.spec.name] * seconds
            rig.report(AttemptName(number, job.attempt), done_steps)
    next_round(rig)


def test_two_jobs_that_say_so_share_a_device(rig, engine):
    numbers = list(pair(rig))
    assert running(engine) == numbers
    (device,) = rig.service_state.held
    assert [name.job for name in rig.service_state.held[device]] == numbers
    assert {rig.service_state.jobs[number].status for number in numbers} == {"running"}


def test_a_job_that_does_not_say_so_runs_alone(rig, engine):
    submit(rig, "a")
    submit(rig, "b", space_sharing=False)
    submit(rig, "c", space_sharing=False)
    rig.look(2)
    for _ in range(20):
        next_round(rig)
        assert len(running(engine)) <= 1, "nobody joins a job that did not ask for it"


def test_a_pair_survives_a_restart_of_the_daemon(rig, engine):
    numbers = list(pair(rig))
    held = dict(rig.service_state.held)
    rig = rig.again()
    rig.look(2)
    assert running(engine) == numbers
    assert {device: set(names) for device, names in rig.service_state.held.items()} == {
        device: set(names) for device, names in held.items()
    }
    assert rig.service_state.state.pair_estimates.profiles == ('["", "a", 1]', '["", "b", 1]')


def test_the_device_is_free_only_when_both_have_left(rig, engine):
    one, two = pair(rig)
    engine.exit(AttemptName(one, 1), 0)
    rig.look(2)
    assert rig.service_state.held == {"v100-0": (AttemptName(two, 1),)}
    engine.exit(AttemptName(two, 1), 0)
    rig.look(2)
    assert rig.service_state.held == {}


def test_interference_is_measured_and_ends_a_pair_that_does_not_pay(rig, engine):
    pair(rig)
    for _ in range(3):
        work(rig, a=0.8, b=0.8)
    known = rig.service_state.state.pair_estimates
    assert known.is_measured[1, 0, 0]
    assert known.part[1, 0, 0] == pytest.approx(0.2), "0.8 of 4 steps per second"
    for _ in range(20):
        work(rig, a=0.8, b=0.8)
    assert len(running(engine)) == 1, "0.2 + 0.2 is less than taking turns"


def test_a_pair_that_pays_stays(rig, engine):
    one, two = pair(rig)
    for _ in range(8):
        work(rig, a=3.4, b=3.4)
    assert running(engine) == [one, two]
    assert {name.attempt for name in engine.running()} == {1}, "nobody was moved"


def test_a_failure_beside_another_ends_their_sharing(rig, engine):
    one, two = pair(rig)
    engine.exit(AttemptName(one, 1), 1)
    for _ in range(10):
        next_round(rig)
        assert len(running(engine)) <= 1
    part = rig.service_state.state.pair_estimates.part
    assert part[0, 1, 0] == part[1, 0, 0] == 0.0
    assert two in rig.service_state.jobs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"preemptible": None}, "must save its work"),
        ({"gangs": (1, 2), "throughputs": {"1xv100": 1.0}}, "of several sizes"),
        ({"estimate": True}, "no throughput table to estimate this job from"),
    ],
)
def test_what_cannot_be_shared_is_refused(rig, spec, message):
    with pytest.raises(UsageError, match=message):
        submit(rig, **spec)


def test_first_come_first_served_does_not_share(rig):
    submit(rig, "a")
    fifo = Rules(policy="fifo", round_s=RULES.round_s)
    with pytest.raises(UsageError, match="job 1 may share devices"):
        rig.again(rules=fifo)
    rig = rig.lives[-1].again()
    rig.change("cancel", 1)
    rig.look(2)
    rig = rig.again(rules=fifo)
    assert rig.service_state.state.pair_table is None
    with pytest.raises(UsageError, match="run alone under fifo"):
        submit(rig, "b")


def test_more_device_types_come(rig, engine):
    submit(rig, "a")
    rig = rig.again(device_types=("v100", "k80", "h100"))
    submit(rig, "b")
    rig.look(2)
    next_round(rig)
    assert rig.service_state.state.pair_estimates.part.shape == (2, 2, 3)
    assert running(engine) == [1, 2]


REFERENCE = Throughputs(
    device_types=("v100", "k80"),
    profiles=(
        JobProfile("LM (batch size 5)", 1),
        JobProfile("LM (batch size 80)", 1),
        JobProfile("c", 1),
    ),
    alone=np.array([[8.0, 1.0], [8.0, 1.0], [3.0, 2.0]]),
    beside=np.zeros((3, 3, 2)),
)


def test_an_unseen_job_is_estimated_from_jobs_of_like_names(rig, engine):
    engine.devices = fleet_devices(k80=1)
    rig = rig.again(reference=REFERENCE)
    rig.look(2)
    rig.submit(name="LM (batch size 20)", estimate=True, total_steps=1e9)
    rig.submit(name="other", total_steps=1e9)
    rig.look(2)
    rig.time.now_s += 10.0
    rig.report(AttemptName(1, 1), 20.0)
    speeds = rig.service_state.state.jobs.steps_per_s
    assert speeds[0, 1] == 2.0
    assert 12.0 < speeds[0, 0] < 40.0, "like its family, eight times as fast, and some hope"
    assert speeds[1].tolist() == [1.0, 1.0], "nothing is known of one that did not ask for it"


def test_pairs_of_the_table_are_known_before_they_run(rig):
    beside = np.zeros((3, 3, 2))
    beside[0, 2], beside[2, 0] = (6.0, 0.5), (1.5, 0.0)
    table = Throughputs(
        device_types=REFERENCE.device_types,
        profiles=REFERENCE.profiles,
        alone=REFERENCE.alone,
        beside=beside,
    )
    rig = rig.again(reference=table)
    submit(rig, "LM (batch size 5)")
    submit(rig, "c")
    part = rig.service_state.state.pair_estimates.part
    assert part[0, 1].tolist() == [0.75, 0.5]
    assert part[1, 0].tolist() == [0.5, 0.0], "0: they may not share"


def test_a_job_keeps_at_most_all_of_its_speed_beside_another(rig):
    pair(rig)
    for _ in range(3):
        work(rig, a=9.0, b=9.0)
    assert rig.service_state.state.pair_estimates.part[0, 1, 0] == 1.0


def test_a_profile_that_takes_the_place_of_another_begins_unmeasured(monkeypatch):
    def usual(known):
        return np.full(known.part.shape, 0.6)

    monkeypatch.setattr(interference, "MAX_PROFILES", 1)
    state, first = interference.with_profile(new_state(("v100",), ()), "a", (2.0,), usual)
    known = state.pair_estimates
    state = interference.with_estimates(
        state, replace(known, is_measured=np.ones((1, 1, 1), dtype=bool))
    )
    state, second = interference.with_profile(state, "b", (3.0,), usual)
    assert (first, second) == (0, 0)
    assert state.pair_estimates.profiles == ("b",)
    assert not state.pair_estimates.is_measured.any()
    assert state.pair_estimates.alone.tolist() == [[3.0]]


def test_jobs_run_alone_where_all_profiles_are_in_use(rig, monkeypatch):
    monkeypatch.setattr(interference, "MAX_PROFILES", 1)
    submit(rig, "a")
    submit(rig, "b")
    state = rig.service_state.state
    assert state.jobs.rows["profile"].tolist() == [0, state.num_profiles]


def test_jobs_of_different_gangs_do_not_share(rig, engine):
    engine.devices = fleet_devices(v100=2)
    rig.look(2)
    submit(rig, "a")
    submit(rig, "b", gang=2)
    part = rig.service_state.state.pair_estimates.part
    assert part[0, 1, 0] == part[1, 0, 0] == 0.0
    assert part[0, 0, 0] > 0.0


def test_two_on_a_device_that_did_not_both_say_so_are_a_violation(rig):
    pair(rig)
    assert violations(rig.service_state) == []
    jobs = dict(rig.service_state.jobs)
    alone = jobs[2].spec.model_copy(update={"space_sharing": False})
    jobs[2] = replace(jobs[2], spec=alone)
    (found,) = violations(replace(rig.service_state, jobs=jobs))
    assert found == "device 'v100-0' is given to 1-1 and to 2-1"
