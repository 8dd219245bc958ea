"""What the live page shows, without a browser: values, one job, what if, and bounds."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from service.page_fleets import (
    attempt_of,
    fleet,
    job_with,
    large_fleet,
    lately_of,
    record_of,
    whole_page,
)

from hocket.fleet.forecast import forecast
from hocket.fleet.rounds import FleetDevice, Job, PairTable, Rules, new_state, step
from hocket.fleet.rounds.events import Pause, RemoveDevices, Submit, Tick
from hocket.fleet.rounds.state import RUNNING, WAITING
from hocket.service.page.moments import ago, ahead, clock
from hocket.service.page.rendering import MAX_ROWS, live_page
from hocket.service.page.router import Foresight, job_page
from hocket.service.page.templating import render
from hocket.service.page.what_if import answer_of, what_if_form


def test_page_says_what_runs_waits_and_why():
    state = fleet()
    page = live_page(state, expected=forecast(state))
    stats = {stat.label: stat.value for stat in page.stats}
    assert (stats["Running"], stats["Devices in use"], stats["Policy"]) == ("2", "2 of 2", "las")
    assert [row.job.number for row in page.running.rows] == [1, 2]
    (waiting,) = page.waiting.rows
    assert waiting.job.name == "third"
    assert waiting.start == "in 8 min"
    assert "0 of 2 v100 free" in waiting.reason
    assert page.running.rows[0].end == "in 8 min"
    assert page.title == "2 running, 1 waiting – hocket fleet"


def test_page_shows_shares_received_against_target():
    state = fleet()
    state = step(state, Tick(time_s=1e9 + 300.0))[0]
    shares = {row.job.number: row for row in live_page(state).shares.rows}
    # Two devices for three jobs: each was promised two thirds of 300 s.
    assert shares[1].received == "5 min of 3 min"
    assert shares[1].ratio == pytest.approx(1.5, rel=1e-4)
    assert shares[3].ratio == 0.0
    assert live_page(state).shares.rows[0].job.number == 3


def test_time_in_which_a_job_shares_a_device_counts_towards_its_target():
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    devices = (FleetDevice(name="v100-0", device_type="v100"),)
    state = new_state(("v100",), devices, Rules(slack_rounds=0.0), pair_table=table)
    jobs = tuple(Job(number=n, name="", steps_per_s=(2.0,), profile=0) for n in (1, 2))
    state = step(state, Submit(time_s=0.0, jobs=jobs))[0]
    assert [row.target for row in live_page(state).shares.rows] == ["100 %", "100 %"]


def test_queue_is_in_order_of_expected_starts():
    state = fleet(tuple("abcdef"), num_devices=1, policy="shortest-job-first", slack_rounds=0.0)
    ahead_of = forecast(state)
    shown = [row.job.number for row in live_page(state, expected=ahead_of).waiting.rows]
    assert shown == sorted(shown, key=lambda number: ahead_of.start_of(number))


def test_lost_devices_and_trouble_are_told():
    state = step(fleet(), RemoveDevices(time_s=1e9, names=("v100-1",)))[0]
    page = live_page(state, trouble="no node answers")
    assert [device.state for device in page.devices.rows] == ["in use", "not there"]
    assert "1 not there" in [stat.note for stat in page.stats]
    assert "no node answers" in whole_page(state, trouble="no node answers")
    assert 'class="track down"' in page.picture


def test_paused_jobs_are_named():
    state = step(fleet(), Pause(time_s=1e9, numbers=(2,)))[0]
    assert [job.name for job in live_page(state).paused.rows] == ["second"]
    assert "Paused:" in whole_page(state)


def test_an_empty_fleet_has_a_page():
    state = new_state(("v100",), (), Rules())
    html = whole_page(state)
    assert "Nobody waits." in html
    assert not answer_of(state, {"policy": "fifo"}).is_error


def test_moments_as_people_read_them():
    assert (ahead(0.0), ahead(90.0), ago(0.1), ago(7200.0)) == (
        "now", "in 2 min", "just now", "2.0 h ago"
    )  # fmt: skip
    assert clock(0.0) == "1970-01-01 00:00:00 UTC"


# ── one job ──────────────────────────────────────────────────────────────────────────────────────


def test_page_of_a_job():
    page = job_with("resnet")
    assert page.sentence.startswith("Job 1 runs on")
    assert page.command == "python resnet"
    (attempt,) = page.attempts.rows
    assert (attempt.lasted, attempt.outcome) == ("1 s", "resnet, exit code 3")
    ended = job_page(record_of(message="attempt 1 ended with exit code 3"), 1e9)
    assert ended.sentence == "Job 1 failed: attempt 1 ended with exit code 3."


# ── what if ──────────────────────────────────────────────────────────────────────────────────────


def test_what_if_answers_with_numbers():
    state = fleet(tuple("abcd"))
    answer = answer_of(state, {"policy": "las", "devices-v100": "4"})
    assert not answer.is_error
    assert re.match(r"Jobs would end .* sooner on average, after 8 min instead of", answer.sentence)
    assert [figure.label for figure in answer.figures][1] == "Jobs that end"
    same = answer_of(state, {"policy": "las"})
    assert "about as soon as now" in same.sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "lass"},
        {"devices-v100": "-1"},
        {"devices-v100": "1e9"},
        {"devices-v100": "²"},
        {"devices-v100": "9" * 30},
        {"devices-v100": "999999"},
        {"devices-nothing": "1"},
    ],
)
def test_wrong_questions_are_answered_politely(fields):
    state = fleet()
    answer = answer_of(state, fields)
    assert answer.is_error
    assert answer.sentence.endswith(".")
    render("what_if.html", form=what_if_form(state, fields, answer))


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────


def test_thousands_of_jobs_give_a_page_of_bounded_size_in_time():
    state = large_fleet()
    rows = state.jobs.rows
    running = rows["number"][rows["phase"] == RUNNING].tolist()
    attempts = [attempt_of(state, number, state.time_s - 100.0) for number in running]
    foresight = Foresight()
    whole_page(state, lately=lately_of(*attempts), expected=foresight.of(state))
    start_s = time.process_time()
    html = whole_page(state, lately=lately_of(*attempts), expected=Foresight().of(state))
    assert time.process_time() - start_s < 1.0
    assert len(html) < 500_000
    num_waiting = int((rows["phase"] == WAITING).sum())
    assert f"{num_waiting - MAX_ROWS:,} more jobs wait and are not shown" in html
    assert foresight.of(state) is foresight.of(state)
