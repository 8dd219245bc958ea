"""The picture of devices over time: where bars stand, what they say and how many there may be."""

from __future__ import annotations

import re

import pytest
from service.page_fleets import attempt_of, fleet, lately_of

from hocket.service.page.recent import Lately
from hocket.service.page.rendering import live_page
from hocket.service.records import (
    AttemptRecord,
)
from hocket.view.fleet_live import MAX_BARS, MAX_DEVICES, Bar, DeviceRow, draw_devices


def bars_of(svg: str) -> list[tuple[float, float, float]]:
    found = re.findall(r'<rect class="job-\d+[^"]*" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', svg)
    return [(float(x), float(y), float(width)) for x, y, width in found]


def test_bars_stand_where_and_when_attempts_ran():
    devices = [DeviceRow(name="a", device_type="v100"), DeviceRow(name="b", device_type="v100")]
    bars = [
        Bar(device=0, job=1, label="one", start_s=0.0, end_s=50.0, note=""),
        Bar(device=1, job=2, label="two", start_s=-100.0, end_s=None, note=""),
        Bar(device=1, job=3, label="gone", start_s=-100.0, end_s=-1.0, note=""),
    ]
    svg = draw_devices(devices, bars, 0.0, 100.0).svg
    (x_two, y_two, all_of_it), (x_one, y_one, half) = bars_of(svg)
    assert x_one == x_two
    assert half == pytest.approx(all_of_it / 2, abs=1.0)
    assert y_two > y_one
    assert "gone" not in svg
    assert 'class="job-2 open"' in svg


def test_a_job_keeps_its_colour():
    state = fleet()
    page = live_page(state, lately_of(attempt_of(state, 1, 1e9 - 10)))
    assert page.running.rows[0].job.colour == 1
    assert 'class="job-1' in page.picture


def test_failed_attempts_are_marked():
    state = fleet()
    lost = attempt_of(state, 1, 1e9 - 50, ended_s=1e9 - 10, outcome="lost")
    never = attempt_of(state, 2, 1e9 - 50, started_s=None)
    page = live_page(state, lately_of(lost, never))
    assert 'class="bad"' in page.picture
    assert "40 s, lost" in page.picture
    assert len(bars_of(page.picture)) == 1


def test_the_picture_is_bounded():
    devices = [DeviceRow(name=f"d{at}", device_type="v100") for at in range(MAX_DEVICES + 9)]
    bars = [
        Bar(device=at % 70, job=at, label="x", start_s=at / 100, end_s=at / 100 + 1, note="")
        for at in range(2 * MAX_BARS)
    ]
    drawn = draw_devices(devices, bars, 0.0, 100.0)
    assert drawn.num_hidden_devices == 9
    assert len(bars_of(drawn.svg)) == MAX_BARS
    assert drawn.num_hidden_bars > 0


@pytest.mark.parametrize(
    ("age_s", "window"), [(1.0, "60 s"), (600.0, "10 min"), (1e6, "60 min"), (None, "60 min")]
)
def test_the_picture_goes_no_further_back_than_there_is_something_to_see(age_s, window):
    state = fleet(round_s=360.0)
    attempts = ()
    if age_s is not None:
        start_s = state.time_s - age_s
        attempts = (
            AttemptRecord(
                job=1, attempt=1, devices=("v100-0",), device_type="v100", token="",
                decided_s=start_s, started_s=start_s,
            ),
        )  # fmt: skip
    assert live_page(state, Lately(attempts=attempts)).window == window
