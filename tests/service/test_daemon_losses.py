"""Work that is lost when a job is stopped; jobs that may not be stopped, or can never run."""

from __future__ import annotations

import dataclasses

import pytest
from service.daemon_rig import RULES, Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices

from hocket.base.errors import UsageError
from hocket.service.daemon import commands
from hocket.service.executors.executor import AttemptName
from hocket.service.records import ENDED
from hocket.service.spec import JobSpec, is_preemptible

FIRST = AttemptName(1, 1)
EAGER = dataclasses.replace(RULES, stickiness_rounds=0.0, slack_rounds=0.0)
"""Takes devices from one job and gives them to another whenever its deficit is larger."""


@pytest.fixture
def one_device(tmp_path):
    rig = Rig(tmp_path, FakeExecutor(fleet_devices(v100=1)), Time(), rules=EAGER)
    rig.look()
    yield rig
    for life in rig.lives:
        life.die()


def preemptible(rig, number: int) -> bool:
    state = rig.service_state.state
    return bool(state.jobs.rows["preemptible"][state.row_of(number)] > 0)


@pytest.mark.parametrize(
    ("spec", "may_be"),
    [
        ({}, None),
        ({"resume": ("--resume",)}, True),
        ({"preemptible": True}, True),
        ({"resume": ("--resume",), "preemptible": False}, False),
    ],
)
def test_who_may_be_stopped_for_others(one_device, spec, may_be):
    rig = one_device
    assert is_preemptible(JobSpec(name="x", command=("y",), **spec)) is may_be
    rig.submit(**{"preemptible": None, **spec})
    rig.submit()
    starts = []
    for _ in range(12):
        rig.later(60.0)
        rig.look(2)
        starts.append(rig.executor.running()[0].job)
    assert (2 in starts) is bool(may_be)
    assert rig.job(1).attempt == (1 if not may_be else rig.job(1).attempt)


def test_jobs_that_cannot_save_all_end(one_device):
    """Two jobs of thirty rounds on one device, which took turns and never came to an end."""
    rig = one_device
    for _ in range(2):
        rig.submit(preemptible=None)
    for number in (1, 2):
        for _ in range(30):
            rig.later(60.0)
            rig.look(2)
        (name,) = rig.executor.running()
        assert name == AttemptName(number, 1)
        rig.executor.exit(name, 0)
        rig.look(2)
        assert rig.job(number).status == "succeeded"


def test_jobs_that_lose_their_work_are_stopped_more_and_more_seldom(one_device):
    rig = one_device
    rig.look()
    rig.submit(resume=("--resume",), preemptible=None)
    rig.submit()
    attempts, was_running = [], 0
    for _ in range(80):
        rig.later(60.0)
        rig.look(3)
        attempts.append(rig.job(1).attempt)
        was_running += any(name.job == 1 for name in rig.executor.running())
    rows = rig.service_state.state.jobs.rows
    losses = (
        rows["losses"][rig.service_state.state.row_of(1)],
        rows["losses"][rig.service_state.state.row_of(2)],
    )
    # The processes die of the signal: nothing shows that they saved anything.
    assert 1 <= max(losses) <= 5
    assert max(attempts) <= 6
    assert 20 <= was_running <= 60
    assert [event.kind for event in rig.store.events(0, 10_000)].count("work-lost") == sum(losses)


def test_what_was_saved_is_no_loss(one_device):
    rig = one_device
    rig.executor.stop_exit_code = 0
    rig.submit(total_steps=1e6)
    rig.submit(total_steps=1e6)
    rig.look(2)
    for _ in range(40):
        rig.time.now_s += 59.0
        (name,) = rig.executor.running()
        done_steps = rig.job(name.job).done_steps + 59.0
        rig.report(name, done_steps)
        rig.checkpoint(name, done_steps)
        rig.later(1.0)
        rig.look(3)
    assert rig.job(1).attempt > 3
    assert not rig.service_state.state.jobs.rows["losses"].any()
    # One that reported more than it saved loses the difference, though it ended as it was asked to.
    for _ in range(12):
        rig.time.now_s += 59.0
        (name,) = rig.executor.running()
        rig.report(name, rig.job(name.job).done_steps + 59.0)
        rig.later(1.0)
        rig.look(3)
    assert rig.service_state.state.jobs.rows["losses"].any()
    numbers = [event.job for event in rig.store.events(0, 10_000) if event.kind == "work-lost"]
    job = rig.job(numbers[-1])
    assert job.done_steps <= rig.service_state.checkpoints[job.number].step + 59.0 * 12


def test_steps_that_a_pause_loses_are_lost(one_device):
    rig = one_device
    rig.submit(total_steps=1e6)
    rig.look(2)
    rig.later(60.0)
    rig.report(FIRST, 60.0)
    rig.change("pause", 1)
    rig.look(2)
    row = rig.service_state.state.jobs.rows[0]
    assert rig.status(1) == "paused"
    # The process dies of the signal, with no checkpoint.
    assert (row["losses"], row["done_steps"]) == (1, 0.0)
    assert [event.kind for event in rig.store.events(0, 10_000)].count("work-lost") == 1


def test_a_lease_that_saves_and_a_checkpoint_make_a_job_one_that_may_be_stopped(one_device):
    rig = one_device
    rig.submit(preemptible=None)
    rig.look(2)
    rig.report(FIRST, 1.0)
    assert not preemptible(rig, 1)
    rig.report(FIRST, 2.0, can_save=True)
    assert preemptible(rig, 1)
    rig.submit(preemptible=None)
    rig.submit(preemptible=False)
    for number in (1, 2):
        rig.executor.exit(AttemptName(number, 1), 0)
        rig.look(3)
        name = AttemptName(number + 1, 1)
        rig.report(name, 1.0, can_save=number == 2)
        rig.checkpoint(name, 1.0)
        assert preemptible(rig, number + 1) is (number == 1)


def test_a_checkpoint_of_fewer_steps_does_not_count(rig, engine):
    rig.submit(total_steps=1000.0)
    rig.look(2)
    rig.checkpoint(FIRST, 70.0)
    answer = rig.checkpoint(FIRST, 40.0)
    assert answer.step == 70.0
    assert rig.service_state.checkpoints[1].step == 70.0
    assert rig.service_state.state.jobs.rows["saved_steps"][0] == 70.0
    assert [one.step for one in rig.store.checkpoints(1)] == [70.0]
    assert rig.again().service_state.checkpoints[1].step == 70.0


@pytest.mark.parametrize("exit_code", [126, 127])
def test_a_command_that_cannot_be_run_is_not_tried_again(rig, engine, exit_code):
    rig.submit()
    rig.look(2)
    engine.exit(FIRST, exit_code)
    rig.look(2)
    job = rig.job(1)
    assert (job.status, job.failures, job.attempt) == ("failed", 1, 1)
    assert f"exit code {exit_code}" in job.message
    assert engine.running() == []
    assert job.status in ENDED
    assert not rig.service_state.state.jobs.rows["phase"].tolist().count(1)


def test_a_gang_that_can_never_fit_is_refused(rig):
    def submit(gang, **spec):
        return rig.ask(
            commands.submit, spec=JobSpec(name="x", command=("y",), gang=gang, **spec), key=None,
            config=rig.config, find_key=rig.store.key, capacity={"v100": 2, "k80": 4},
        )  # fmt: skip

    assert submit(4) == 1
    assert submit(2, throughputs={"v100": 1.0}) == 2
    for gang, spec in ((5, {}), (3, {"throughputs": {"v100": 1.0, "k80": 0.0}})):
        with pytest.raises(UsageError, match=f"has {gang} devices"):
            submit(gang, **spec)
    assert rig.service_state.last_number == 2
