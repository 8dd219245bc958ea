"""Limits of the service over HTTP: pages, threads, readers of events, logs that are cut."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from patience import wait_until
from service.rest_service import TOKEN, serving, tokens_of

from hocket.service.daemon.assignment import LOGS
from hocket.service.daemon.log import Log
from hocket.service.executors.bounded_log import BoundedLog
from hocket.service.records import EventRecord
from hocket.service.rest import jobs, logs, middleware, stream
from hocket.service.rest.app import make_app
from hocket.service.serve import listening_socket, server_config

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("fleet"), v100=1) as service:
        yield service


def test_a_page_of_long_jobs_ends_early_and_none_is_left_out(service, monkeypatch):
    numbers = [service.submit(command=["x", "y" * 4000])["id"] for _ in range(5)]
    monkeypatch.setattr(jobs, "MAX_LIST_SIZE", 9000)
    for live in ({}, {"live": "true"}):
        pages, after = [], numbers[0] - 1
        while after is not None:
            page = service.client.get("/v1/jobs", params={"after": after, **live}).json()
            pages.append([job["id"] for job in page["jobs"]])
            after = page["next_after"]
        assert pages == [numbers[:2], numbers[2:4], numbers[4:]]
    for number in numbers:
        service.client.delete(f"/v1/jobs/{number}")


def test_what_no_process_can_be_given_is_refused_when_it_is_submitted(service):
    for wrong in ({"environment": {"A": "x\0y"}}, {"command": ["x\0"]}, {"folder": "/x\0"}):
        spec = {"name": "job", "command": ["true"], **wrong}
        assert service.client.post("/v1/jobs", json=spec).status_code == 422


@pytest.mark.parametrize("team", ["\u202e", "\x00", "😀" * 50, "\u0000\uffff", "e\u0301", "\x85"])
def test_any_text_is_kept_as_it_is(service, team):
    """What is shown is made inert where it is shown."""
    job = service.submit(team=team, name="n" + team.replace("\0", ""))
    assert service.job(job["id"])["spec"]["team"] == team
    for path in ("/metrics", "/v1/allocation", "/", f"/jobs/{job['id']}"):
        assert service.client.get(path).status_code == 200
    service.client.delete(f"/v1/jobs/{job['id']}")


def test_a_gang_larger_than_the_fleet_waits_and_is_told_why(service):
    number = service.submit(gang=7)["id"]
    told = service.client.get(f"/v1/jobs/{number}/explain").json()
    assert told["estimated_start_s"] is None
    assert "7 devices" in told["sentence"]
    for change in ("pause", "resume"):
        assert service.client.post(f"/v1/jobs/{number}:{change}").status_code == 200
    service.client.delete(f"/v1/jobs/{number}")
    service.wait_for(number, "cancelled")


def test_too_many_questions_are_refused_with_a_time_to_come_back(service):
    first, last = service.submit()["id"], service.submit()["id"]
    service.wait_for(first, "running")
    forecaster = service.client.app.state.forecaster
    while forecaster._places.acquire(blocking=False):
        pass
    try:
        busy = service.client.get(f"/v1/jobs/{last}/explain")
        assert (busy.status_code, busy.json()["code"]) == (503, "busy")
        assert int(busy.headers["retry-after"]) >= 1
        assert service.client.post("/v1/simulate", json={}).status_code == 503
        assert service.client.get(f"/v1/jobs/{first}/explain").status_code == 200
        page = service.client.get(f"/jobs/{last}")
        assert page.status_code == 200
        assert f'<p class="lead">Job {last} ' in page.text, "why it waits needs no forecast"
        assert "are being answered" in service.client.get("/what-if?policy=fifo").text
    finally:
        for _ in range(3):
            forecaster._places.release()
    assert service.client.get(f"/v1/jobs/{last}/explain").status_code == 200


def test_whoever_submits_does_not_wait_for_those_who_look(service, monkeypatch):
    """All threads for pages are taken by readers that wait for one that is being drawn."""
    may_end = threading.Event()
    listener = listening_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(server_config(make_app(service.daemon, tokens_of(TOKEN))))
    serving_it = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    serving_it.start()
    monkeypatch.setattr(service.daemon, "devices", lambda: may_end.wait(120) and [])

    def ask(method: str, path: str, body: object = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, AUTHORIZED)
        status = connection.getresponse().status
        connection.close()
        return status

    readers = [threading.Thread(target=ask, args=("GET", "/v1/devices")) for _ in range(50)]
    try:
        wait_until(lambda: server.started)
        for reader in readers:
            reader.start()
        wait_until(lambda: len(server.server_state.connections) >= 50)
        start_s = time.monotonic()
        assert ask("POST", "/v1/jobs", {"name": "job", "command": ["true"]}) == 201
        report = {"done_steps": 1.0}
        assert ask("POST", "/v1/jobs/1/attempts/1/report", report) == 409
        assert time.monotonic() - start_s < 60.0
        assert not may_end.is_set()
    finally:
        may_end.set()
        for reader in readers:
            reader.join(20)
        server.should_exit = True
        serving_it.join(20)
        listener.close()


# ── events ───────────────────────────────────────────────────────────────────────────────────────


class Happenings:
    """A daemon of which only events are asked."""

    is_closing = False

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.store = self

    def last_event(self) -> int:
        return self.last

    def events(self, after: int, limit: int) -> list[EventRecord]:
        numbers = range(max(after + 1, self.first), self.last + 1)[:limit]
        return [EventRecord(sequence=at, time_s=0.0, kind="round") for at in numbers]

    def wait_for_events(self, after: int, timeout_s: float) -> int:
        time.sleep(0.0 if self.last > after else 0.02)
        return self.last


async def ids_of(daemon, event_notifier, after: int | None, until: int) -> tuple[list[int], int]:
    """Numbers of the events up to one, and how many were said to be gone."""
    ids, num_gone = [], 0
    async for block in stream.events_from(daemon, event_notifier, after):
        lines = block.decode().splitlines()
        for at, line in enumerate(lines):
            if line.startswith("id: "):
                ids.append(int(line[4:]))
            if line == "event: dropped":
                num_gone += int(lines[at + 1].removeprefix("data: "))
        if ids and ids[-1] >= until:
            return ids, num_gone
    raise AssertionError("the stream ended")


def test_a_reader_that_comes_back_too_late_is_told_how_much_is_gone():
    async def read():
        daemon = Happenings(first=50, last=700)
        return await ids_of(daemon, stream.EventNotifier(daemon), 3, 700)

    assert asyncio.run(read()) == (list(range(50, 701)), 46)


@asynccontextmanager
async def watched(daemon):
    """A notifier that rings for a daemon."""
    event_notifier = stream.EventNotifier(daemon)
    watching = asyncio.create_task(event_notifier.watch())
    try:
        yield event_notifier
    finally:
        event_notifier.close()
        await watching


def test_a_number_of_another_fleet_does_not_silence_the_stream():
    """A browser that had the page of a state which was set aside comes with its last number."""

    async def read():
        daemon = Happenings(first=1, last=4)
        async with watched(daemon) as event_notifier:
            reading = asyncio.create_task(ids_of(daemon, event_notifier, 5000, 6))
            await asyncio.sleep(0.1)
            daemon.last = 6
            return await asyncio.wait_for(reading, 20)

    assert asyncio.run(read()) == ([5, 6], 0)


def test_streams_end_with_their_daemon(tmp_path):
    """Nothing waits for a daemon that closed: asking it again and again would take a core."""
    with serving(tmp_path) as service:
        event_notifier = stream.EventNotifier(service.daemon)
    asyncio.run(asyncio.wait_for(event_notifier.watch(), 20))
    assert event_notifier.is_closed


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────


def test_who_follows_a_log_that_is_cut_goes_on_with_what_is_new(tmp_path):
    path = tmp_path / LOGS / "1" / "attempt-1.log"
    path.parent.mkdir(parents=True)
    log = BoundedLog(str(path), 8000)
    log.write(b"a" * 7000)
    store = SimpleNamespace(attempts=lambda job: [SimpleNamespace(attempt=1, ended_s=None)])
    daemon = SimpleNamespace(store=store)
    event_notifier = SimpleNamespace(is_closed=False)

    async def read() -> list[bytes]:
        blocks = logs._followed(daemon, event_notifier, 1, 1, Log(tmp_path, 1, 1), 0)
        found = [await anext(blocks)]
        log.write(b"b" * 2000)
        assert path.stat().st_size < 7000, "its middle was dropped"
        found.append(await anext(blocks))
        log.write(b"news\n")
        found.append(await anext(blocks))
        await blocks.aclose()
        return found

    old, note, news = asyncio.run(asyncio.wait_for(read(), 20))
    log.close()
    assert old == b"a" * 7000
    assert b"shortened" in note
    assert news == b"news\n"


@pytest.mark.parametrize(
    ("length", "status"), [("1e3", 400), ("9" * 13, 400), ("9" * 5000, 400), ("1000001", 413)]
)
def test_a_length_that_is_no_number_or_too_large_is_refused_before_the_body(length, status):
    async def receive():
        raise AssertionError("the body is not read")

    scope = {"type": "http", "headers": [(b"content-length", length.encode())]}
    answer = asyncio.run(middleware.whole_body(scope, receive))
    assert answer.status_code == status


PART = {"type": "http.request", "body": b"x" * 600, "more_body": True}


@pytest.mark.parametrize(
    ("messages", "status"),
    [([PART, PART], 413), ([PART, {"type": "http.disconnect"}], 400)],
)
def test_a_body_that_grows_too_large_or_ends_early_is_refused(messages, status):
    left = list(messages)

    async def receive():
        return left.pop(0)

    scope = {"type": "http", "headers": []}
    assert asyncio.run(middleware.whole_body(scope, receive, 1000)).status_code == status


def test_a_body_in_parts_is_put_together_and_handed_on_once():
    left = [{"type": "http.request", "body": b"a" * 600, "more_body": True},
            {"type": "http.request", "body": b"b" * 400}, {"type": "http.disconnect"}]  # fmt: skip

    async def receive():
        return left.pop(0)

    async def read():
        body = await middleware.whole_body({"type": "http", "headers": []}, receive, 1000)
        give = middleware.again(body, receive)
        return await give(), await give()

    first, second = asyncio.run(read())
    assert first == {"type": "http.request", "body": b"a" * 600 + b"b" * 400, "more_body": False}
    assert second["type"] == "http.disconnect"
