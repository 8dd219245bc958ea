"""Routes of the service: what they do, and how they say no."""

from __future__ import annotations

import inspect
import json
import os
import re
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.rest_service import Service, serving, wait_until

from hocket.service.executors.executor import AttemptName
from hocket.service.records import EventRecord
from hocket.service.rest import attempts, fleet, health, jobs, logs, rounds
from hocket.service.rest.rounds import _find


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("fleet")) as service:
        yield service


@pytest.fixture(autouse=True)
def nobody_left(request):
    """Tests of this file share a fleet: each leaves it without jobs."""
    yield
    if "service" in request.fixturenames:
        service: Service = request.getfixturevalue("service")
        for job in service.client.get("/v1/jobs?live=true&limit=1000").json()["jobs"]:
            service.client.delete(f"/v1/jobs/{job['id']}")
        wait_until(lambda: not service.client.get("/v1/jobs?live=true").json()["jobs"])


def is_problem(answer, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    return body


def test_a_submitted_job_runs_and_ends(service):
    job = service.submit(name="resnet", total_steps=10, environment={"SECRET": "s3cret"})
    number = job["id"]
    assert job["spec"]["environment"] == {"SECRET": "…"}
    running = service.wait_for(number, "running")
    assert running["devices"]
    service.executor.exit(AttemptName(number, 1), 0)
    ended = service.wait_for(number, "succeeded")
    assert ended["ended_s"] >= ended["started_s"] >= ended["submitted_s"]
    (attempt,) = service.client.get(f"/v1/jobs/{number}/attempts").json()["attempts"]
    assert attempt["outcome"] == "finished"
    assert attempt["exit_code"] == 0
    assert "token" not in attempt
    assert "succeeded" in service.client.get(f"/v1/jobs/{number}/explain").json()["sentence"]


def test_where_a_job_is_found(service):
    answer = service.client.post("/v1/jobs", json={"name": "a", "command": ["true"]})
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    again = service.client.get(answer.headers["location"])
    assert again.json()["id"] == answer.json()["id"]
    assert again.headers["etag"] == f'"{again.json()["version"]}"'


def test_the_same_key_gives_the_same_job(service):
    headers = {"idempotency-key": "k-1"}
    body = {"name": "once", "command": ["true"]}
    first = service.client.post("/v1/jobs", json=body, headers=headers)
    second = service.client.post("/v1/jobs", json=body, headers=headers)
    assert first.status_code == second.status_code == 201
    assert first.json()["id"] == second.json()["id"]
    other = service.client.post("/v1/jobs", json={**body, "name": "other"}, headers=headers)
    assert is_problem(other, 422)["code"] == "key-reused"


def test_jobs_come_in_pages(service):
    numbers = [service.submit(name=f"job {at}")["id"] for at in range(5)]
    service.client.delete(f"/v1/jobs/{numbers[1]}")
    service.wait_for(numbers[1], "cancelled")
    found, after = [], numbers[0] - 1
    while after is not None:
        page = service.client.get(f"/v1/jobs?after={after}&limit=2").json()
        assert len(page["jobs"]) <= 2
        found += [job["id"] for job in page["jobs"]]
        after = page["next_after"]
    assert found == numbers
    live = service.client.get("/v1/jobs?live=true&limit=3").json()
    assert [job["id"] for job in live["jobs"]] == [numbers[0], numbers[2], numbers[3]]
    assert live["next_after"] == numbers[3]
    cancelled = service.client.get(f"/v1/jobs?status=cancelled&after={numbers[0]}").json()
    assert [job["id"] for job in cancelled["jobs"]] == [numbers[1]]
    assert cancelled["next_after"] is None


def test_pause_resume_cancel(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    assert service.client.post(f"/v1/jobs/{number}:pause").json()["status"] in (
        "stopping",
        "paused",
    )
    service.wait_for(number, "paused")
    explained = service.client.get(f"/v1/jobs/{number}/explain").json()
    assert "paused" in explained["sentence"]
    assert explained["status"] == "paused"
    service.client.post(f"/v1/jobs/{number}:resume")
    service.wait_for(number, "running")
    service.client.delete(f"/v1/jobs/{number}")
    service.wait_for(number, "cancelled")
    is_problem(service.client.post(f"/v1/jobs/{number}:pause"), 409)
    is_problem(service.client.post(f"/v1/jobs/{number}:resume"), 409)


def test_a_change_of_an_older_version_is_refused(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    tag = service.client.get(f"/v1/jobs/{number}").headers["etag"]
    stale = {"if-match": '"1"'}
    assert tag != stale["if-match"], "it changed when it started"
    for change in (
        service.client.post(f"/v1/jobs/{number}:pause", headers=stale),
        service.client.delete(f"/v1/jobs/{number}", headers=stale),
        service.client.delete(f"/v1/jobs/{number}", headers={"if-match": "nonsense"}),
    ):
        is_problem(change, 412)
    assert service.job(number)["status"] == "running"
    paused = service.client.post(f"/v1/jobs/{number}:pause", headers={"if-match": tag})
    assert paused.status_code == 200
    star = service.client.post(f"/v1/jobs/{number}:resume", headers={"if-match": "*"})
    assert star.status_code == 200


def test_an_unchanged_job_is_not_sent_again(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    tag = service.client.get(f"/v1/jobs/{number}").headers["etag"]
    same = service.client.get(f"/v1/jobs/{number}", headers={"if-none-match": tag})
    assert same.status_code == 304
    assert not same.content
    assert service.client.get(f"/v1/jobs/{number}", headers={"if-none-match": '"0"'}).json()


def test_an_explanation_counts_from_the_moment_it_is_asked_for(service, monkeypatch):
    numbers = [service.submit(total_steps=1000.0)["id"] for _ in range(4)]
    service.wait_for(numbers[0], "running")
    asked_s = service.daemon.state.time_s

    def left_s(after_s: float) -> float:
        monkeypatch.setattr(jobs.time, "time", lambda: asked_s + after_s)
        sentence = service.client.get(f"/v1/jobs/{numbers[-1]}/explain").json()["sentence"]
        return float(re.search(r"next round begins in (\d+) s", sentence)[1])

    assert left_s(1.0) - left_s(101.0) == pytest.approx(100.0, abs=1.0)


def test_a_waiting_job_is_explained(service):
    for _ in range(3):
        service.submit(total_steps=1000)
    last = service.submit(total_steps=1000)["id"]
    explained = service.client.get(f"/v1/jobs/{last}/explain").json()
    assert explained["status"] == "queued"
    assert "expected to start" in explained["sentence"]
    assert explained["estimated_start_s"] > 0
    assert {kind["kind"] for kind in explained["evidence"]["kinds"]} == {"v100", "k80"}


def test_what_is_under_way_is_told(service, monkeypatch):
    service.executor.are_stubborn = True
    number = service.submit()["id"]
    service.wait_for(number, "running")
    service.client.post(f"/v1/jobs/{number}:pause")
    told = service.client.get(f"/v1/jobs/{number}/explain").json()
    assert "attempt 1 is still being stopped" in told["sentence"]
    service.executor.are_stubborn = False
    monkeypatch.setattr(type(service.daemon), "trouble", "the engine is away")
    told = service.client.get(f"/v1/jobs/{number}/explain").json()
    assert told["sentence"].endswith("; trouble: the engine is away")
    service.executor.kill(AttemptName(number, 1))
    service.wait_for(number, "paused")


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"command": []}, "command"),
        ({"gang": 0}, "gang"),
        ({"gang": True}, "gang"),
        ({"weight": "2"}, "weight"),
        ({"gong": 1}, "gong"),
        ({"weight": float("nan")}, "weight"),
        ({"throughputs": {"h100": 1.0}}, "h100"),
        ({"folder": "relative"}, "relative"),
        ({"name": "\ud800"}, "name"),
        ({"environment": {"A=B": "x"}}, "environment"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(service, spec, word):
    body = json.dumps({"name": "x", "command": ["true"], **spec})
    answer = service.client.post(
        "/v1/jobs", content=body, headers={"content-type": "application/json"}
    )
    assert word in json.dumps(is_problem(answer, 422))


@pytest.mark.parametrize(
    "body", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"]
)
def test_a_body_that_is_no_json_is_refused(service, body):
    before = len(service.daemon.jobs(limit=1000))
    answer = service.client.post(
        "/v1/jobs", content=body, headers={"content-type": "application/json"}
    )
    assert is_problem(answer, 400)["title"] == "Bad Request"
    assert len(service.daemon.jobs(limit=1000)) == before


def test_what_is_not_there_is_a_problem_too(service):
    for path in ("", "/explain", "/log", "/attempts", "/checkpoints"):
        is_problem(service.client.get(f"/v1/jobs/4711{path}"), 404)
    is_problem(service.client.delete("/v1/jobs/4711"), 404)
    is_problem(service.client.get("/v1/nothing"), 404)
    is_problem(service.client.get("/v1/rounds/4711"), 404)
    assert is_problem(service.client.put("/v1/jobs"), 405)
    assert "POST" in service.client.put("/v1/jobs").headers["allow"]
    is_problem(service.client.get(f"/v1/jobs/{10**30}"), 422)


def test_an_attempt_reports_with_its_own_token(service):
    number = service.submit(total_steps=100)["id"]
    service.wait_for(number, "running")
    environment = service.executor.processes[AttemptName(number, 1)].assignment.environment
    mine = {"authorization": f"Bearer {environment['HOCKET_TOKEN']}"}
    path = f"/v1/jobs/{number}/attempts/1"
    client = service.bare()
    lease = client.post(f"{path}/report", json={"done_steps": 40}, headers=mine).json()
    assert lease["may_run"] is True
    assert lease["attempt"] == 1
    assert service.job(number)["done_steps"] == 40
    saved = client.post(f"{path}/checkpoints", json={"step": 40, "path": "/c/40"}, headers=mine)
    assert saved.status_code == 201
    (checkpoint,) = service.client.get(f"/v1/jobs/{number}/checkpoints").json()["checkpoints"]
    assert checkpoint["path"] == "/c/40"

    # Neither the token of people nor none is that of the attempt, and it opens nothing else.
    is_problem(service.client.post(f"{path}/report", json={"done_steps": 1}), 409)
    is_problem(client.post(f"{path}/report", json={"done_steps": 1}), 401)
    is_problem(client.get("/v1/jobs", headers=mine), 401)
    is_problem(client.delete(f"/v1/jobs/{number}", headers=mine), 401)

    service.executor.lose(AttemptName(number, 1))
    wait_until(lambda: service.job(number)["attempt"] == 2)
    for route, body in (("report", {"done_steps": 50}), ("checkpoints", {"step": 5, "path": "/x"})):
        stale = client.post(f"{path}/{route}", json=body, headers=mine)
        assert is_problem(stale, 409)["code"] == "stale-attempt"
    assert service.job(number)["done_steps"] == 40


def test_an_attempt_that_says_it_finished_has(service):
    number = service.submit(total_steps=100)["id"]
    service.wait_for(number, "running")
    environment = service.executor.processes[AttemptName(number, 1)].assignment.environment
    mine = {"authorization": f"Bearer {environment['HOCKET_TOKEN']}"}
    body = {"done_steps": 100, "is_finished": True}
    answer = service.bare().post(f"/v1/jobs/{number}/attempts/1/report", json=body, headers=mine)
    assert answer.json()["may_run"] is False
    # It ends as it likes: what it said counts.
    service.executor.exit(AttemptName(number, 1), 3)
    assert service.wait_for(number, "succeeded")["done_steps"] == 100


def test_logs_whole_tail_and_range(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    path = service.daemon.log_file(number, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"line {at} \x1b[31m\u2028<script>" for at in range(20_000)]
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    whole = service.client.get(f"/v1/jobs/{number}/log")
    assert whole.text == text
    assert whole.headers["content-type"].startswith("text/plain")
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert whole.headers["hocket-attempt"] == "1"
    for num_lines in (0, 1, 3, 6000, 20_000, 30_000):
        tail = service.client.get(f"/v1/jobs/{number}/log?tail={num_lines}")
        wanted = lines[-num_lines:] if num_lines else []
        assert tail.text == "".join(f"{line}\n" for line in wanted)
    data = text.encode()
    for asked, start, stop in (("5-9", 5, 10), ("100-", 100, None), ("-7", -7, None)):
        part = service.client.get(f"/v1/jobs/{number}/log", headers={"range": f"bytes={asked}"})
        assert part.status_code == 206
        assert part.content == data[start:stop]
        assert part.headers["content-range"].endswith(f"/{len(data)}")
    over = service.client.get(f"/v1/jobs/{number}/log", headers={"range": "bytes=99999999-"})
    is_problem(over, 416)
    is_problem(service.client.get(f"/v1/jobs/{number}/log?attempt=2"), 404)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=12), max_size=30), st.integers(0, 40), st.booleans())
def test_the_last_lines_are_found_wherever_blocks_end(lines, num_lines, ends_with_break):
    data = b"\n".join(lines) + (b"\n" if ends_with_break else b"")
    parts = data.split(b"\n")
    kept = [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
    wanted = b"".join(kept[-num_lines:]) if num_lines else b""
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile() as file:
        patch.setattr(logs, "_CHUNK_BYTES", 7)
        file.write(data)
        file.flush()
        assert data[logs._tail_start(Path(file.name), num_lines) :] == wanted


def test_a_followed_log_ends_with_its_attempt(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    path = service.daemon.log_file(number, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"first\n")
    service.executor.exit(AttemptName(number, 1), 0)
    with path.open("ab") as file:
        file.write(b"last\n")
    answer = service.client.get(f"/v1/jobs/{number}/log?follow=true")
    assert answer.text == "first\nlast\n"


def test_a_job_that_never_started_has_no_log(service):
    for _ in range(3):
        service.submit(total_steps=1e9)
    waiting = service.submit(gang=2, total_steps=1e9)["id"]
    assert service.job(waiting)["status"] == "queued"
    is_problem(service.client.get(f"/v1/jobs/{waiting}/log"), 404)


def test_devices_queues_and_allocation(service):
    first = service.submit(team="vision", total_steps=100)["id"]
    service.submit(team="speech", total_steps=100)
    service.wait_for(first, "running")
    devices = service.client.get("/v1/devices").json()["devices"]
    assert {device["name"] for device in devices} == {"v100-0", "v100-1", "k80-0"}
    assert any(first in device["jobs"] for device in devices)
    queues = {q["team"]: q for q in service.client.get("/v1/queues").json()["queues"]}
    assert queues["vision"]["running"] == queues["speech"]["running"] == 1
    assert queues["vision"]["devices"] == 1
    allocation = service.client.get("/v1/allocation").json()
    shares = {job["job"]: job for job in allocation["jobs"]}
    assert shares[first]["devices"]
    assert 0 <= sum(shares[first]["target"].values()) <= 1 + 1e-9


def test_what_if(service):
    for _ in range(6):
        service.submit(total_steps=1000.0)
    now = service.client.post("/v1/simulate", json={}).json()
    more = service.client.post("/v1/simulate", json={"devices": {"v100": 8}}).json()
    assert now["num_jobs"] == more["num_jobs"] == 6
    assert more["last_end_s"] < now["last_end_s"]
    fifo = service.client.post("/v1/simulate", json={"policy": "fifo"}).json()
    assert fifo["policy"] == "fifo"
    wrong = service.client.post("/v1/simulate", json={"policy": "lass"})
    assert "las" in is_problem(wrong, 422)["hint"]
    is_problem(service.client.post("/v1/simulate", json={"devices": {"h100": 1}}), 422)
    is_problem(service.client.post("/v1/simulate", json={"devices": {"v100": -1}}), 422)


def test_metrics_count_what_there_is(service):
    number = service.submit(team='evil"\n\\team')["id"]
    service.wait_for(number, "running")
    text = service.client.get("/metrics").text
    assert 'hocket_jobs{phase="running"} 1' in text
    assert 'hocket_devices{kind="k80",use="free"} ' in text
    assert 'hocket_team_devices{team="evil\\"\\n\\\\team"} 1' in text
    assert all(line.startswith(("# ", "hocket_")) for line in text.splitlines())


def test_health_needs_no_token(service):
    assert service.bare().get("/healthz").json() == {"status": "ok"}
    assert service.bare().get("/readyz").json() == {"status": "ok"}


def test_rounds_are_found_among_many_events():
    class Stored:
        def __init__(self, events):
            self.stored = events

        def last_event(self):
            return self.stored[-1].sequence

        def events(self, after, limit):
            return [event for event in self.stored if event.sequence > after][:limit]

    events, rounds = [], {}
    for sequence in range(1, 1600):
        is_round = (sequence * 7919) % 13 == 0
        if is_round:
            rounds[3 * len(rounds) + 2] = sequence
        detail = {"round": 3 * (len(rounds) - 1) + 2} if is_round else {}
        kind = "round" if is_round else "started"
        events.append(EventRecord(sequence=sequence, time_s=sequence, kind=kind, detail=detail))
    stored = Stored(events[500:])
    for number, sequence in rounds.items():
        if sequence > 500:
            assert _find(stored, number).sequence == sequence
    for number in (0, 1, 2, 3 * len(rounds) + 2):
        with pytest.raises(Exception, match="no record of round"):
            _find(stored, number)


def test_a_parameter_that_does_not_exist_is_refused(service):
    body = is_problem(service.client.get("/v1/jobs?statuss=running"), 422)
    assert body["hint"] == "did you mean 'status'?"
    is_problem(service.client.get("/v1/devices?x=1"), 422)
    is_problem(service.client.post("/v1/jobs?x=1", json={"name": "a", "command": ["b"]}), 422)


def test_a_full_disk_is_told_as_503_and_nothing_is_accepted(service, monkeypatch):
    from hocket.service.errors import UnavailableError

    before = service.submit()["id"]

    def full(batch):
        raise UnavailableError("nothing could be stored: disk full", hint="make room")

    with monkeypatch.context() as patch:
        patch.setattr(service.daemon._store, "commit", full)
        answer = service.client.post("/v1/jobs", json={"name": "x", "command": ["true"]})
        assert is_problem(answer, 503)["hint"] == "make room"
    assert service.submit()["id"] == before + 1


def test_an_unexpected_error_tells_nothing_of_the_inside(service, monkeypatch, caplog):
    def broken():
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(service.daemon, "devices", broken)
    body = is_problem(service.client.get("/v1/devices"), 500)
    assert "secret" not in json.dumps(body)
    assert "ZeroDivisionError" in caplog.text


def test_the_token_file_is_private(tmp_path):
    from hocket.errors import InputFileError
    from hocket.service.token import make_token, read_token

    assert read_token(tmp_path) is None
    token = make_token(tmp_path)
    assert make_token(tmp_path) == token == read_token(tmp_path)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    os.chmod(tmp_path / "token", 0o644)
    with pytest.raises(InputFileError, match="others can read"):
        make_token(tmp_path)
    os.chmod(tmp_path / "token", 0o600)
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(InputFileError, match="no token"):
        make_token(tmp_path)


def test_nothing_but_routes_is_run_in_threads():
    # Each change of threads may cost milliseconds while the daemon decides.
    routers = [module.router for module in (jobs, logs, attempts, fleet, rounds, health)]
    routes = [route for router in routers for route in router.routes]
    seen = {one.call for route in routes for one in route.dependant.dependencies}
    seen |= {
        two.call
        for route in routes
        for one in route.dependant.dependencies
        for two in one.dependencies
    }
    assert len(seen) >= 6
    for call in seen:
        is_coroutine = inspect.iscoroutinefunction(call)
        assert is_coroutine or inspect.iscoroutinefunction(type(call).__call__), call
