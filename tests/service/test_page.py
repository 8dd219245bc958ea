"""What the live page shows, without a browser: values, bounds and hostile names."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import hocket.service.daemon as daemon_package
from hocket.fleet.explain import explain
from hocket.fleet.forecast import forecast
from hocket.fleet.rounds import Device, Job, Rules, State, new_state, step
from hocket.fleet.rounds.events import Pause, RemoveDevices, Submit, Tick
from hocket.fleet.rounds.state import RUNNING, WAITING
from hocket.service.page.foresight import Foresight
from hocket.service.page.job import MAX_LOG_LINES, job_page, last_lines
from hocket.service.page.moments import ago, ahead, clock
from hocket.service.page.recent import MAX_ATTEMPTS, MAX_ENDED, Lately, Recent
from hocket.service.page.rendering import MAX_ROWS, live_page
from hocket.service.page.templating import render, static_files
from hocket.service.page.what_if import answer_of, what_if_form
from hocket.service.records import (
    ENDED,
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    JobRecord,
    ending_of,
)
from hocket.service.spec import JobSpec
from hocket.view.fleet_live import MAX_BARS, MAX_DEVICES, Bar, DeviceRow, draw_devices

HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\u202eevil\u2066\u200f",
    "\x1b[31mred\x07\r\n\tend",
    "{{ 7 * 7 }}{% include 'login.html' %}",
    "</title></svg></textarea><!--",
    "🙂" * 3,
    "x" * 200,
    "javascript:alert(1)",
    "&lt;b&gt; &amp;",
)


def fleet(
    names: tuple[str, ...] = ("first", "second", "third"), num_devices: int = 2, **rules
) -> State:
    """A fleet of one kind that was given these jobs."""
    devices = tuple(Device(name=f"v100-{at}", kind="v100") for at in range(num_devices))
    state = new_state(("v100",), devices, Rules(**rules), time_s=1e9)
    jobs = tuple(
        Job(number=at + 1, name=name, steps_per_s=(2.0,), total_steps=1000.0)
        for at, name in enumerate(names)
    )
    return step(state, Submit(time_s=1e9, jobs=jobs))[0]


def large_fleet(num_jobs: int = 2048, num_devices: int = 300) -> State:
    random = np.random.default_rng(0)
    kinds = ("v100", "p100", "k80")
    devices = tuple(
        Device(name=f"{kinds[at % 3]}-{at}", kind=kinds[at % 3]) for at in range(num_devices)
    )
    speeds = random.uniform(1.0, 10.0, (num_jobs, 3))
    jobs = tuple(
        Job(number=at + 1, name=f"job {at}", steps_per_s=tuple(speeds[at]), total_steps=1e5)
        for at in range(num_jobs)
    )
    state = step(new_state(kinds, devices, time_s=1e9), Submit(time_s=1e9, jobs=jobs))[0]
    return step(state, Tick(time_s=state.next_tick_s))[0]


def attempt_of(state: State, number: int, start_s: float, **more) -> AttemptRecord:
    devices = state.devices_of(number) or state.device_names[:1]
    return AttemptRecord(
        job=number, attempt=1, devices=devices, kind="v100", token="", decided_s=start_s,
        **{"started_s": start_s, **more},
    )  # fmt: skip


def record_of(number: int = 1, name: str = "first", **more) -> JobRecord:
    spec = JobSpec(name=name, command=("python", name), team=name, folder=f"/{name[:100]}")
    return JobRecord(
        number=number, spec=spec, submitted_s=1e9, **{"status": "failed", "ended_s": 1e9, **more}
    )


class Elements(HTMLParser):
    """All elements and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def whole_page(state: State, **parts) -> str:
    form = what_if_form(state, {}, None)
    return render("fleet.html", page=live_page(state, **parts), form=form)


def lately_of(
    *attempts: AttemptRecord, ended: tuple[JobRecord, ...] = (), name: str = ""
) -> Lately:
    names = {attempt.job: name for attempt in attempts}
    return Lately(attempts=attempts, ended=ended, names=names)


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def test_page_says_what_runs_waits_and_why():
    state = fleet()
    page = live_page(state, foreseen=forecast(state))
    assert page.lead.startswith("2 jobs run and 1 waits on 2 devices under las.")
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


def test_queue_is_in_order_of_expected_starts():
    state = fleet(tuple("abcdef"), num_devices=1, policy="shortest-job-first", slack_rounds=0.0)
    ahead_of = forecast(state)
    shown = [row.job.number for row in live_page(state, foreseen=ahead_of).waiting.rows]
    assert shown == sorted(shown, key=lambda number: ahead_of.start_of(number))


def test_lost_devices_and_trouble_are_told():
    state = step(fleet(), RemoveDevices(time_s=1e9, names=("v100-1",)))[0]
    page = live_page(state, trouble="no node answers")
    assert [device.state for device in page.devices.rows] == ["in use", "not there"]
    assert "1 not there" in [stat.note for stat in page.stats]
    assert "no node answers" in whole_page(state, trouble="no node answers")
    assert 'class="lane down"' in page.picture


def test_paused_jobs_are_named():
    state = step(fleet(), Pause(time_s=1e9, numbers=(2,)))[0]
    assert [job.name for job in live_page(state).paused.rows] == ["second"]
    assert "Paused:" in whole_page(state)


def test_an_empty_fleet_has_a_page():
    state = new_state(("v100",), (), Rules())
    html = whole_page(state)
    assert "0 jobs run and none wait on 0 devices" in html
    assert "Nobody waits." in html
    assert not answer_of(state, {"policy": "fifo"}).is_error


def test_moments_as_people_read_them():
    assert (ahead(0.0), ahead(90.0), ago(0.1), ago(7200.0)) == (
        "now", "in 2 min", "just now", "2.0 h ago"
    )  # fmt: skip
    assert clock(0.0) == "1970-01-01 00:00:00 UTC"


# ── the picture ──────────────────────────────────────────────────────────────────────────────────


def bars_of(svg: str) -> list[tuple[float, float, float]]:
    found = re.findall(r'<rect class="job-\d+[^"]*" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', svg)
    return [(float(x), float(y), float(width)) for x, y, width in found]


def test_bars_stand_where_and_when_attempts_ran():
    devices = [DeviceRow(name="a", kind="v100"), DeviceRow(name="b", kind="v100")]
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
    devices = [DeviceRow(name=f"d{at}", kind="v100") for at in range(MAX_DEVICES + 9)]
    bars = [
        Bar(device=at % 70, job=at, label="x", start_s=at / 100, end_s=at / 100 + 1, note="")
        for at in range(2 * MAX_BARS)
    ]
    drawn = draw_devices(devices, bars, 0.0, 100.0)
    assert drawn.num_hidden_devices == 9
    assert len(bars_of(drawn.svg)) == MAX_BARS
    assert drawn.num_hidden_bars > 0


# ── hostile names ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_add_no_element_and_steer_nothing(name):
    def shape(text: str) -> list[tuple[str, list[str]]]:
        state = fleet((text, "plain", text), num_devices=1)
        state = state.but(device_names=(text,), kinds=(text,), teams=(text,), notes={"note": text})
        attempts = [attempt_of(state, 1, 1e9 - 20, outcome=text)]
        ended = (record_of(9, text, message=text),)
        html = whole_page(state, lately=lately_of(*attempts, ended=ended, name=text))
        html += render("fragment.html", page=live_page(state, trouble=text))
        answer = answer_of(state, {"policy": text, f"devices-{text}": text})
        form = what_if_form(state, {"policy": text, f"devices-{text}": text}, answer)
        html += render("what_if.html", form=form)
        html += render("job.html", page=job_with(text))
        html += render("error.html", message=text, hint=text)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]", html)
        found = Elements(html)
        assert len(html) < 100_000
        for _, attributes in found.tags:
            assert not any(key.startswith("on") or key == "style" for key in attributes)
            for key in ("href", "src", "action"):
                assert (attributes.get(key) or "/").startswith(("/", "#"))
        return [(tag, sorted(attributes)) for tag, attributes in found.tags]

    assert shape(name) == shape("harmless")


def job_with(text: str):
    record = record_of(1, text, message=text, attempt=1)
    state = fleet((text,))
    return job_page(
        record,
        1e9 + 10,
        explanation=explain(state, 1),
        attempts=[attempt_of(state, 1, 1e9, outcome=text, ended_s=1e9 + 1, exit_code=3)],
        checkpoints=[
            CheckpointRecord(job=1, attempt=1, step=5.0, path=text, committed_s=1e9)
        ],
        log=text.encode(),
    )  # fmt: skip


def test_hostile_names_are_still_read():
    html = whole_page(fleet(("<b>bold</b>",)))
    assert "<b>bold" not in html
    assert "<b>bold</b>" in Elements(html).texts


def test_pages_need_nothing_from_outside_and_no_inline_code():
    for html in (whole_page(fleet()), render("login.html", is_wrong=True)):
        found = Elements(html)
        assert "style" not in {tag for tag, _ in found.tags}
        for tag, attributes in found.tags:
            assert tag != "script" or attributes["src"].startswith("/static/page.js?")
    for content, _ in static_files().values():
        text = content.decode()
        assert "url(" not in text
        assert "innerHTML" not in text
        urls = set(re.findall(r"https?://[^\"' ]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}


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
                job=1, attempt=1, devices=("v100-0",), kind="v100", token="", decided_s=start_s,
                started_s=start_s,
            ),
        )  # fmt: skip
    assert live_page(state, Lately(attempts=attempts)).window == window


@pytest.mark.parametrize(
    ("status", "message", "told"),
    [
        ("cancelled", "cancelled", "job 7 was cancelled"),
        ("succeeded", "finished", "job 7 succeeded"),
        ("failed", "exit code 3", "job 7 failed: exit code 3"),
        ("failed", "", "job 7 failed"),
    ],
)
def test_endings_do_not_repeat_themselves(status, message, told):
    spec = JobSpec(name="a", command=("true",))
    record = JobRecord(number=7, spec=spec, status=status, submitted_s=0.0, message=message)
    assert ending_of(record) == told


def test_the_script_listens_to_every_kind_of_event():
    folder = Path(daemon_package.__file__).parent
    noted = {
        kind
        for path in folder.glob("*.py")
        for kind in re.findall(r'\bnote\(\s*"([a-z-]+)"', path.read_text())
    }
    script = static_files()["page.js"][0].decode()
    listened = set(re.findall(r'"([a-z-]+)"', script.split("KINDS = [")[1].split("]")[0]))
    assert {"submitted", "started"} <= noted
    assert noted | set(ENDED) <= listened


def test_every_field_and_table_is_labelled():
    found = Elements(whole_page(fleet(), foreseen=None))
    labelled = {attributes["for"] for tag, attributes in found.tags if tag == "label"}
    fields = {attributes["id"] for tag, attributes in found.tags if tag in ("select", "input")}
    assert fields <= labelled
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all("scope" in attributes for tag, attributes in found.tags if tag == "th")


# ── one job ──────────────────────────────────────────────────────────────────────────────────────


def test_page_of_a_job():
    page = job_with("resnet")
    assert page.sentence.startswith("Job 1 runs on")
    assert page.command == "python resnet"
    (attempt,) = page.attempts.rows
    assert (attempt.lasted, attempt.outcome) == ("1 s", "resnet, exit code 3")
    ended = job_page(record_of(message="attempt 1 ended with exit code 3"), 1e9)
    assert ended.sentence == "Job 1 failed: attempt 1 ended with exit code 3."


def test_output_is_cut_and_inert():
    assert last_lines(b"a\nb\r\nc\td\n") == "a\nb\nc       d"
    assert last_lines(b"10%\r20%\r30%\n\xff\x1b[1m") == "30%\n\ufffd\\x1b[1m"
    many = last_lines(b"".join(b"%d\n" % at for at in range(10_000)))
    assert many.split("\n") == [str(at) for at in range(10_000 - MAX_LOG_LINES, 10_000)]
    assert len(last_lines(b"x" * 10**6)) <= 2000


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
    whole_page(state, lately=lately_of(*attempts), foreseen=foresight.of(state))
    start_s = time.process_time()
    html = whole_page(state, lately=lately_of(*attempts), foreseen=Foresight().of(state))
    assert time.process_time() - start_s < 1.0
    assert len(html) < 500_000
    num_waiting = int((rows["phase"] == WAITING).sum())
    assert f"{num_waiting - MAX_ROWS:,} more jobs wait and are not shown" in html
    assert foresight.of(state) is foresight.of(state)


# ── what happened lately ─────────────────────────────────────────────────────────────────────────


class StubDaemon:
    """Events and records of a daemon that does nothing."""

    def __init__(self) -> None:
        self.list: list[EventRecord] = []
        self.stored: dict[int, list[AttemptRecord]] = {}
        self.num_asked = 0

    def note(self, time_s: float, kind: str, job: int | None, **detail) -> None:
        self.list.append(
            EventRecord(
                sequence=len(self.list) + 1, time_s=time_s, kind=kind, job=job, detail=detail
            )
        )

    def last_event(self) -> int:
        return len(self.list)

    def events(self, after: int, limit: int) -> list[EventRecord]:
        return self.list[after : after + limit]

    def attempts(self, number: int) -> list[AttemptRecord]:
        self.num_asked += 1
        return self.stored.get(number, [])

    def job(self, number: int) -> JobRecord:
        return record_of(number)


def test_recent_follows_the_events():
    state, daemon = fleet(), StubDaemon()
    # Jobs 1 and 2 run since long ago; only the store knows.
    daemon.stored = {number: [attempt_of(state, number, 1e9 - 500.0)] for number in (1, 2)}
    daemon.note(1e9, "started", 3, attempt=1, devices=["v100-0"])
    recent = Recent(daemon)
    seen = recent.look(state, 0.0)
    assert {record.job: record.started_s for record in seen.attempts} == {
        1: 1e9 - 500.0, 2: 1e9 - 500.0, 3: 1e9
    }  # fmt: skip
    assert seen.ended == ()
    assert seen.names == {1: "first", 2: "second", 3: "third"}
    daemon.note(1e9 + 5, "stopping", 3, attempt=1, reason="preempted")
    daemon.note(1e9 + 6, "stopped", 3, attempt=1, outcome="preempted", exit_code=-15)
    daemon.note(1e9 + 7, "failed", 3, message="boom")
    daemon.note(1e9 + 7, "round", None, round=2)
    seen = recent.look(fleet(("first", "second")), 0.0)
    third = next(record for record in seen.attempts if record.job == 3)
    assert (third.ended_s, third.outcome) == (1e9 + 6, "preempted")
    assert [record.number for record in seen.ended] == [3]
    assert seen.names[3] == "third", "a name outlives its job"
    assert daemon.num_asked == 2
    seen = recent.look(state, 1e9 + 6.5)
    assert sorted(record.job for record in seen.attempts) == [1, 2]


def test_recent_is_bounded():
    state, daemon = fleet(()), StubDaemon()
    for number in range(20_000):
        daemon.note(1e9, "started", number, attempt=1, devices=["v100-0"])
        daemon.note(1e9 + 1, "stopped", number, attempt=1, outcome="finished")
        daemon.note(1e9 + 1, "succeeded", number)
    seen = Recent(daemon).look(state, 0.0)
    assert len(seen.attempts) <= MAX_ATTEMPTS
    assert [record.number for record in seen.ended] == list(range(19_999, 19_999 - MAX_ENDED, -1))
