"""Dependencies, arrays, retries, time limits and drained devices of the daemon."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.base.errors import UsageError
from hocket.service.daemon import commands, decision_log, observations
from hocket.service.executors.executor import AttemptName
from hocket.service.metrics import FleetMetrics
from hocket.service.server_config import ServerConfig, TeamConfig, UserLimits
from hocket.service.spec import parse_after


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("12", ("12", "ok")),
        ("12:failed", ("12", "failed")),
        ("prep:any", ("prep", "any")),
        ("a:b", ("a:b", "ok")),
        (":any", (":any", "ok")),
    ],
)
def test_after_is_a_job_and_a_condition(text, meaning):
    assert parse_after(text) == meaning


def test_a_job_starts_after_the_success_of_another(rig, engine):
    rig.submit("prep")
    rig.submit("train", after=("prep",))
    rig.look(2)
    assert (rig.status(1), rig.status(2)) == ("running", "blocked")
    rig = rig.again()
    rig.look()
    assert rig.status(2) == "blocked"
    engine.exit(AttemptName(1, 1), 0)
    rig.look(3)
    assert (rig.status(1), rig.status(2)) == ("succeeded", "running")
    with pytest.raises(UsageError, match="there is no job 'prep'"):
        rig.submit("late", after=("prep",))
    assert rig.status(rig.submit("late", after=("1",))) != "blocked"
    with pytest.raises(UsageError, match=r"job 1 has ended \(succeeded\).*its failure"):
        rig.submit("never", after=("1:failed",))


@pytest.mark.parametrize("how", ["cancel", "limit", "report", "silence"])
def test_a_job_starts_only_when_no_process_of_the_other_is_left(rig, engine, how):
    rig.submit("prep", retries=0, time_limit_s=90.0, grace_s=3600.0)
    rig.submit("eval", after=("prep:any",))
    rig.look(2)
    first = AttemptName(1, 1)
    engine.processes[first].is_stubborn = True
    if how == "cancel":
        rig.change("cancel", 1)
    elif how == "limit":
        rig.later(91.0)
    elif how == "report":
        rig.report(first, 10.0, is_finished=True)
    else:
        rig.ask(observations.silent, name=first, silence_s=1.0)
    late = rig.submit("late", after=("1:any",))
    rig = rig.again()
    for _ in range(3):
        rig.later(61.0)
        rig.look()
        assert rig.status(1) == "stopping"
        assert {rig.status(2), rig.status(late)} == {"blocked"}
    engine.exit(first, -15)
    rig.look(2)
    assert rig.status(1) not in ("stopping", "running")
    assert "blocked" not in (rig.status(2), rig.status(late))


def test_the_end_of_a_stopping_job_is_known_to_later_jobs(rig, engine):
    rig.submit("prep")
    rig.look(2)
    rig.change("cancel", 1)
    with pytest.raises(UsageError, match=r"job 1 has ended \(cancelled\).*its success"):
        rig.submit("train", after=("1",))
    rig.submit("train", after=("1:any",))
    assert rig.status(2) == "blocked"
    engine.exit(AttemptName(1, 1), -15)
    rig.look(2)
    assert rig.status(2) in ("starting", "running")


def test_arrays_with_too_many_dependencies_are_refused(rig):
    rig.submit("first", array=1000)
    with pytest.raises(UsageError, match="at most 10,000 dependencies"):
        rig.submit("second", array=11, after=("1:any",))
    with pytest.raises(UsageError, match="at most 10,000 dependencies"):
        rig.submit("often", after=("1:any",) * 11)
    last = rig.submit("second", array=10, after=("1:any",))
    assert len(rig.service_state.state.dependencies) == 10_000
    rig.change("cancel", 2)
    assert len(rig.service_state.state.dependencies) == 9_990
    assert rig.status(last) == "blocked"


def test_a_command_that_cannot_run_ends_those_after_its_success(rig, engine):
    rig.submit("prep")
    rig.submit("train", after=("prep",))
    rig.submit("repair", after=("prep:failed",))
    rig.look(2)
    engine.exit(AttemptName(1, 1), 127)
    rig.look(3)
    assert [rig.status(number) for number in (1, 2, 3)] == ["failed", "cancelled", "running"]
    assert "did not end as it must" in rig.job(2).message


def test_an_array_is_many_jobs_with_an_index(rig, engine):
    first = rig.submit("sweep", array=3)
    assert rig.submit("sweep", array=3) == first
    assert [rig.job(number).array_index for number in (1, 2, 3)] == [0, 1, 2]
    after = rig.submit("report", after=("1",))
    for number in (1, 2, 3):
        assert rig.status(after) == "blocked"
        rig.look(2)
        told = engine.processes[AttemptName(number, 1)].assignment
        assert told.environment["HOCKET_ARRAY_INDEX"] == str(number - 1)
        engine.exit(AttemptName(number, 1), 0)
        rig.look(2)
    assert rig.status(after) in ("starting", "running")


def test_a_job_that_reaches_its_limit_has_timed_out(rig, engine):
    rig.submit("long", time_limit_s=90.0)
    rig.submit("sorry", after=("long:failed",))
    rig.look(2)
    rig.time.now_s += 89.0
    rig.ask(commands.tick)
    assert rig.status(1) == "running"
    rig.time.now_s += 1.5
    rig.ask(commands.tick)
    assert rig.status(1) == "stopping"
    rig.look(1)
    engine.exit(AttemptName(1, 1), -15)
    rig.look(2)
    assert rig.status(1) == "timed out"
    assert "90 s, its time limit" in rig.job(1).message
    assert rig.status(2) in ("starting", "running")


def test_retries_decide_how_often_a_job_is_started(rig, engine):
    rig.submit("once", retries=0)
    rig.look(2)
    engine.exit(AttemptName(1, 1), 1)
    rig.look(2)
    assert rig.status(1) == "failed"


def test_drained_devices_take_no_jobs_and_the_store_remembers(rig, engine):
    rig.look(1)
    names = rig.service_state.state.device_names
    rig.ask(commands.drain, names=names)
    rig.submit("waits")
    assert rig.status(1) == "queued"
    rig = rig.again()
    assert rig.status(1) == "queued"
    rig.ask(commands.reopen, names=names)
    assert rig.status(1) == "starting"


def test_quotas_and_priorities_are_those_of_the_config_also_after_a_restart(rig, engine):
    config = ServerConfig(
        users={"ann": UserLimits(weight=2.0, max_devices=0)},
        teams={"vision": TeamConfig(weight=3.0, is_open=True, device_hours_per_week=1.0)},
        priorities={"urgent": 2},
    )
    rig = rig.again(config=config)
    rig.look()
    rig.submit("hers", owner="ann")
    rig.submit("late", owner="bob", team="vision")
    rig.submit("soon", owner="bob", priority="urgent")
    with pytest.raises(UsageError, match="unknown priority class 'urgnt'"):
        rig.submit("typo", priority="urgnt")
    assert [rig.status(number) for number in (1, 2, 3)] == ["queued", "starting", "queued"]
    assert rig.service_state.state.jobs.rows["priority"].tolist() == [0, 0, 2]
    rig = rig.again(config=config.model_copy(update={"users": {}}))
    state = rig.service_state.state
    assert state.users == ("", "ann", "bob")
    assert state.user_weight.tolist() == [1.0, 1.0, 1.0]
    assert np.isinf(state.user_quota).all()
    assert state.team_quota[1].tolist() == [np.inf, 3600.0]
    rig.ask(commands.change_job, change="cancel", number=2, version=None, find_job=rig.store.job)
    assert rig.status(3) == "starting", "the urgent one is first in line"


def test_every_decision_is_a_line_of_the_log(rig, engine):
    rig.submit("first", preemptible=False, total_steps=600.0, throughputs={"v100": 1.0})
    rig.submit("next", total_steps=600.0, throughputs={"v100": 1.0})
    rig.look(2)
    engine.exit(AttemptName(1, 1), 0)
    rig.look(2)
    lines = (rig.folder / "decisions.log").read_text().splitlines()
    said = [line.split(" ", 1)[1] for line in lines]
    assert said[0] == (
        "job 1 starts attempt 1 on v100-0: waited 0 s, gets 100.0% of its time, deficit 0.0 rounds"
    )
    assert said[1] == "job 1 stops attempt 1: finished"
    assert said[2].startswith("job 2 starts attempt 1 on v100-0: waited ")
    rig = rig.again()
    rig.ask(commands.drain, names=("v100-0",))
    more = (rig.folder / "decisions.log").read_text().splitlines()
    assert more[: len(lines)] == lines, "a restart keeps what was written"
    assert more[-1].endswith("job 2 stops attempt 1: drained")


def test_full_logs_of_decisions_are_kept_some_deep(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_BYTES", 10)
    log = decision_log.DecisionLog(tmp_path)
    for number in range(7):
        log.write(0.0, [f"decision {number}"])
    kept = [path.read_text().split()[-1] for path in sorted(tmp_path.iterdir())]
    assert kept == ["6", "5", "4", "3", "2"]


def test_a_job_that_has_timed_out_has_failed_for_those_after_it(rig, engine):
    rig.submit("slow", time_limit_s=30.0)
    rig.look(2)
    rig.later(31.0)
    rig.look(3)
    assert rig.status(1) == "timed out"
    assert rig.status(rig.submit("repair", after=("1:failed",))) != "blocked"
    with pytest.raises(UsageError, match=r"job 1 has ended \(timed out\)"):
        rig.submit("next", after=("1",))


def test_device_time_counts_from_the_start_of_the_process_that_measures(rig, engine):
    rig.submit("long")
    rig.look(2)
    rig.later(100.0)
    metrics = FleetMetrics(lambda: rig.service_state, rig.time)
    rig.later(7.0)
    found = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert found["hocket_device_seconds_total"] == 7.0


def test_the_limit_of_a_job_counts_before_that_of_the_server(rig):
    rig = rig.again(config=ServerConfig(time_limit_s=50.0))
    rig.submit("own", time_limit_s=900.0)
    rig.submit("default")
    assert rig.service_state.state.jobs.rows["time_limit_s"].tolist() == [900.0, 50.0]


def test_a_name_means_a_job_of_ones_own_before_those_of_others(rig):
    for owner in ("ann", "bob"):
        rig.submit(name="prep", owner=owner)
    rig.submit(name="train", owner="ann", after=("prep",))
    assert rig.service_state.state.dependencies[:, :2].tolist() == [[3, 1]]


def test_a_number_that_no_job_can_have_is_refused(rig):
    with pytest.raises(UsageError, match="there is no job '9999"):
        rig.submit("late", after=("9" * 30,))
