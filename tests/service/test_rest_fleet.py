"""Routes of the whole fleet, and what holds for all routes."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from patience import wait_until
from service.rest_service import is_problem

from hocket.service.executors.executor import AttemptName
from hocket.service.rest import attempts, fleet, health, jobs, logs

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("nobody_left")


def test_devices_and_allocation(service):
    first = service.submit(team="vision", total_steps=100)["id"]
    service.submit(team="speech", total_steps=100)
    service.wait_for(first, "running")
    devices = service.client.get("/v1/devices").json()["devices"]
    assert {device["name"] for device in devices} == {"v100-0", "v100-1", "k80-0"}
    assert any(first in device["jobs"] for device in devices)
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
    assert 'hocket_devices{device_type="k80",use="free"} ' in text
    assert all(line.startswith(("# ", "hocket_")) for line in text.splitlines())


def test_metrics_count_what_happens(service):
    def value(name: str) -> float:
        text = service.client.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    names = {
        "waits": 'hocket_job_wait_seconds_count{user="tester"}',
        "succeeded": 'hocket_jobs_ended_total{status="succeeded",user="tester"}',
        "failures": 'hocket_attempt_failures_total{outcome="failed",user="tester"}',
        "held": 'hocket_device_seconds_total{device_type="k80",user="tester"}',
    }
    before = {key: value(name) for key, name in names.items()}
    number = service.submit(throughputs={"k80": 1.0})["id"]
    service.wait_for(number, "running")
    assert value('hocket_user_devices{device_type="k80",user="tester"}') == 1.0
    service.executor.exit(AttemptName(number, 1), 3)
    wait_until(lambda: service.job(number)["attempt"] == 2)
    service.wait_for(number, "running")
    while_it_runs = value(names["held"])
    wait_until(lambda: value(names["held"]) > while_it_runs)
    service.executor.exit(AttemptName(number, 2), 0)
    service.wait_for(number, "succeeded")
    gained = {key: value(name) - before[key] for key, name in names.items()}
    assert (gained["waits"], gained["succeeded"], gained["failures"]) == (1.0, 1.0, 1.0)
    assert gained["held"] >= while_it_runs - before["held"] > 0.0
    assert value(names["held"]) == value(names["held"]), "nothing is held any more"


def test_the_dashboard_shows_metrics_that_there_are(service):
    """Every metric that the file for Grafana asks for is one of the service."""
    number = service.submit()["id"]
    service.wait_for(number, "running")
    text = service.client.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    dashboard = json.loads((EXAMPLES / "fleet_grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"hocket_\w+", query)}
    assert len(queries) >= 8
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked} <= known


def test_health_needs_no_token(service):
    assert service.bare().get("/healthz").json() == {"status": "ok"}
    assert service.bare().get("/readyz").json() == {"status": "ok"}


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
        patch.setattr(service.daemon.store, "commit", full)
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


def test_nothing_but_routes_is_run_in_threads():
    # Each change of threads may cost milliseconds while the daemon decides.
    routers = [module.router for module in (jobs, logs, attempts, fleet, health)]
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
