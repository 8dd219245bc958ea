"""Routes of jobs and their attempts: what they do, and how they say no."""

from __future__ import annotations

import json
import re

import pytest
from patience import wait_until
from service.rest_service import is_problem

from hocket.service.executors.executor import AttemptName

pytestmark = pytest.mark.usefixtures("nobody_left")


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


def test_an_explanation_counts_from_the_moment_it_is_asked_for(service, monkeypatch):
    numbers = [service.submit(total_steps=1000.0)["id"] for _ in range(4)]
    service.wait_for(numbers[0], "running")
    asked_s = service.daemon.state.time_s

    def left_s(after_s: float) -> float:
        monkeypatch.setattr(service.daemon, "now_s", lambda: asked_s + after_s)
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
    assert {
        device_type["device_type"] for device_type in explained["evidence"]["device_types"]
    } == {"v100", "k80"}


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
    before = len(service.daemon.store.jobs(limit=1000))
    answer = service.client.post(
        "/v1/jobs", content=body, headers={"content-type": "application/json"}
    )
    assert is_problem(answer, 400)["title"] == "Bad Request"
    assert len(service.daemon.store.jobs(limit=1000)) == before


def test_what_is_not_there_is_a_problem_too(service):
    for path in ("", "/explain", "/log", "/attempts", "/checkpoints"):
        is_problem(service.client.get(f"/v1/jobs/4711{path}"), 404)
    is_problem(service.client.delete("/v1/jobs/4711"), 404)
    is_problem(service.client.get("/v1/nothing"), 404)
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


def test_the_newest_jobs_come_on_one_page(service):
    numbers = [service.submit(name="new")["id"] for _ in range(3)]
    page = service.client.get("/v1/jobs?newest=true&limit=2").json()
    assert [job["id"] for job in page["jobs"]] == numbers[1:]
    assert page["next_after"] is None
    for others in ("live=true", "after=1"):
        answer = service.client.get(f"/v1/jobs?newest=true&{others}")
        assert is_problem(answer, 422)["code"] == "usage"
