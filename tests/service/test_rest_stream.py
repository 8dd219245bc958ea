"""Streams and slow readers, through a real server on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time

import pytest
from patience import wait_until
from service.rest_server import Served
from service.rest_service import TOKEN, serving

from hocket.service.rest import prompt, stream

uvicorn = pytest.importorskip("uvicorn")
HOSTILE = 'x\n\ndata: forged\nevent: evil\r\u2028"<script>\x1b[2J'


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("fleet")) as service:
        served = Served(service)
        yield served
        served.close()


@pytest.fixture
def served(shared):
    yield shared
    for connection in shared.connections:
        connection.close()
    shared.connections.clear()


def events_of(answer, until) -> list[dict]:
    """Events as a browser would read them, until one fulfils ``until``."""
    found: list[dict] = []
    fields: dict[str, str] = {}
    while not (found and until(found[-1])):
        line = answer.readline().decode()
        assert line, "the stream ended"
        if line == "\n":
            if "data" in fields:
                event = json.loads(fields["data"])
                assert str(event["sequence"]) == fields["id"]
                assert event["kind"] == fields["event"]
                found.append(event)
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.rstrip("\n").partition(": ")
            assert name in ("id", "event", "data", "retry")
            fields[name] = value
    return found


def test_events_come_as_they_happen_and_go_on_where_they_were(served):
    live = served.open("/v1/events")
    assert live.headers["content-type"].startswith("text/event-stream")
    number = served.service.submit(name=HOSTILE, team=HOSTILE)["id"]

    def has_started(event):
        return event["kind"] == "started" and event["job"] == number

    seen = events_of(live, has_started)
    assert next(event["kind"] for event in seen if event["job"] == number) == "submitted"
    everything = events_of(served.open("/v1/events?after=0"), has_started)
    assert [event["sequence"] for event in everything] == list(range(1, len(everything) + 1))
    assert everything[-len(seen) :] == seen
    last = {"Last-Event-ID": str(everything[2]["sequence"])}
    again = events_of(served.open("/v1/events?after=0", **last), has_started)
    assert again == everything[3:]


def test_a_reader_that_does_not_read_holds_up_nobody(served, monkeypatch):
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.connect(("127.0.0.1", served.port))
    lazy.sendall(
        f"GET /v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
    )
    with lazy:
        keen = served.open("/v1/events?after=0")
        # Far more than the buffers between two sockets hold.
        detail = {"text": "x" * 20_000}
        events = served.service.daemon.store.events(0, 1)
        many = [
            stream.EventRecord(sequence=at, time_s=0.0, kind="filler", detail=detail)
            for at in range(events[0].sequence, 800)
        ]
        monkeypatch.setattr(
            served.service.daemon.store,
            "events",
            lambda after, limit: [one for one in many if one.sequence > after][:limit],
        )
        number = served.service.submit()["id"]
        start_s = time.monotonic()
        seen = events_of(keen, lambda event: event["sequence"] == 799)
        assert len(seen) >= 700
        assert served.service.job(number)["id"] == number
        assert time.monotonic() - start_s < 60.0


def test_a_quiet_stream_shows_that_it_lives(served, monkeypatch):
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.05)
    answer = served.open("/v1/events?after=100000")
    lines = [answer.readline() for _ in range(6)]
    assert lines.count(b": nothing new\n") >= 2


def test_streams_have_a_limit_and_give_their_place_back(served, monkeypatch):
    monkeypatch.setattr(stream, "MAX_STREAMS", 2)
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.05)

    def opened() -> http.client.HTTPResponse | None:
        answer = served.open("/v1/events")
        return answer if answer.status == 200 else None

    # Streams of the tests before may still have their places.
    first, second = wait_until(opened), wait_until(opened)
    third = served.open("/v1/events")
    assert third.status == 503
    assert json.loads(third.read())["status"] == 503
    first.close()
    for connection in served.connections[:-2]:
        connection.close()
    wait_until(opened)
    assert second.status == 200


def second_is_cut(port: int) -> bool:
    """Begin a second request; False where the first was cut, for a busy machine was too slow."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as slow:
        try:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                if not (more := slow.recv(4096)):
                    return False
                received += more
            assert b"200 OK" in received
            slow.sendall(b"GET /heal")
        except ConnectionError:
            return False
        start_s = time.monotonic()
        assert slow.recv(100) == b""
        # What a whole request may take is 30 seconds.
        assert time.monotonic() - start_s < 20.0
        return True


def test_a_request_that_never_gets_to_the_point_is_cut(served, monkeypatch):
    monkeypatch.setattr(prompt, "HEAD_TIMEOUT_S", 0.2)
    for beginning in (b"", b"GET /v1/jobs HTTP/1.1\r\nHost: local"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=120) as slow:
            slow.sendall(beginning)
            assert slow.recv(100) == b""
    # The second request of a connection is held to the same.
    while not second_is_cut(served.port):
        continue


def test_a_refused_request_does_not_keep_its_connection_by_sending_on(served, monkeypatch):
    monkeypatch.setattr(prompt, "REQUEST_TIMEOUT_S", 0.5)
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as slow:
        slow.sendall(head)
        assert slow.recv(100).startswith(b"HTTP/1.1 401")

        def is_cut() -> bool:
            try:
                slow.sendall(b"x")
            except OSError:
                return True
            return False

        wait_until(is_cut)


LAZY = {
    "nothing": b"",
    "half a head": b"GET /healthz HTTP/1.1\r\nHost: loc",
    "half a body": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\nx",
    "a refused body": b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\nx",
    "an answered request": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("sent", LAZY.values(), ids=LAZY)
def test_connections_that_keep_the_service_waiting_shut_nobody_out(served, monkeypatch, sent):
    for connection in served.connections:
        connection.close()
    connections = served.server.server_state.connections
    wait_until(lambda: not connections)
    monkeypatch.setattr(prompt, "MAX_CONNECTIONS", 3)
    address = ("127.0.0.1", served.port)
    lazy = []
    for _ in range(5):
        lazy.append(socket.create_connection(address, timeout=120))
        lazy[-1].sendall(sent)
        for _ in range(2):
            assert served.open("/healthz").status == 200
            assert len(connections) <= 3
    for one in lazy:
        one.close()


def connections_of(served):
    """The server's connections, none of which is open."""
    for connection in served.connections:
        connection.close()
    connections = served.server.server_state.connections
    wait_until(lambda: not connections)
    return connections


def test_the_oldest_idle_connection_is_closed_first(served, monkeypatch):
    connections, address = connections_of(served), ("127.0.0.1", served.port)
    monkeypatch.setattr(prompt, "MAX_CONNECTIONS", 2)
    with socket.create_connection(address, 120) as old:
        wait_until(lambda: len(connections) == 1)
        with socket.create_connection(address, 120) as new:
            wait_until(lambda: len(connections) == 2)
            assert served.open("/healthz").status == 200
            new.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert new.recv(100).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionResetError):
            assert old.recv(100) == b"", "nothing more comes"


def test_a_body_of_a_known_user_keeps_its_connection(served, monkeypatch):
    connections, address = connections_of(served), ("127.0.0.1", served.port)
    monkeypatch.setattr(prompt, "MAX_CONNECTIONS", 1)
    with socket.create_connection(address, 120) as known:
        known.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {TOKEN}\r\nContent-Length: 900\r\n\r\n{{".encode()
        )
        wait_until(lambda: [one for one in connections if one.scope])
        with socket.create_connection(address, 120) as more:
            assert more.recv(100).startswith(b"HTTP/1.1 503")


def test_requests_under_way_keep_their_connections(served, monkeypatch):
    for connection in served.connections:
        connection.close()
    connections = served.server.server_state.connections
    wait_until(lambda: not connections)
    monkeypatch.setattr(prompt, "MAX_CONNECTIONS", 3)
    streams = [served.open("/v1/events") for _ in range(3)]
    address = ("127.0.0.1", served.port)
    with socket.create_connection(address, timeout=120) as more:
        assert more.recv(100).startswith(b"HTTP/1.1 503")
    wait_until(lambda: len(connections) == 3)
    assert not any(stream.closed for stream in streams)


def test_answers_are_sent_at_once(served):
    # Otherwise each waits for the reader's delayed acknowledgement, 40 ms.
    served.open("/healthz")
    (connection, *_) = served.server.server_state.connections
    its_socket = connection.transport.get_extra_info("socket")
    assert its_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_head_that_is_too_large_is_refused(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as large:
        large.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
        assert large.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("failure", [OSError("gone"), TimeoutError()])
def test_a_stream_is_closed_when_its_reader_is_gone(failure):
    """At once, not when somebody collects what is left, which may be after the event loop."""
    ends = []

    async def content():
        try:
            yield b"some"
        finally:
            ends.append("closed")

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            raise failure

    async def answer() -> list[str]:
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        await stream.TimedStream(content(), "text/plain")(scope, None, send)
        return list(ends)

    assert asyncio.run(answer()) == ["closed"]


def test_the_end_of_the_service_ends_streams_at_once(served):
    # The last test of this file: those before share the service that ends here.
    number = served.service.submit()["id"]
    served.service.wait_for(number, "running")
    served.service.log_path(number).write_bytes(b"some output\n")
    events = served.open("/v1/events")
    log = served.open(f"/v1/jobs/{number}/log?follow=true")
    assert log.readline() == b"some output\n"
    assert served.close() < 4.0
    assert log.read() == b""
    assert b"retry" in events.read()
