"""Authentication: nobody without a token, from elsewhere, or with too much to say gets in."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlencode

import pytest
from service.rest_service import TOKEN, URL

from hocket.service.credentials import PAGE_HEADER, access_of
from hocket.service.rest import middleware

OPEN = {("GET", "/healthz"), ("GET", "/readyz")}


def routes_of(service) -> list[tuple[str, str]]:
    paths = service.client.get("/openapi.json").json()["paths"]
    return [
        (method.upper(), path.format(job=1, attempt=1, round=1, name="x", agent="a"))
        for path, methods in paths.items()
        for method in methods
    ]


def test_every_route_but_health_needs_a_token(service):
    routes = routes_of(service)
    assert len(routes) > 18
    for method, path in routes:
        for headers in (
            {},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": "Bearer "},
            {"authorization": f"Bearer {TOKEN}x"} if "/attempts/1/" not in path else {},
            {"authorization": TOKEN},
            {"cookie": f"{service.credentials.cookie_name}=wrong"},
        ):
            answer = service.bare(**headers).request(method, path)
            if (method, path) in OPEN:
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401, (method, path, headers)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert answer.headers["content-type"] == "application/problem+json"


def test_a_bad_body_without_token_is_401_not_422(service):
    for body in (b"{", b"x" * 2_000_000):
        answer = service.bare().post("/v1/jobs", content=body)
        assert answer.status_code == 401


def test_paths_that_are_not_listed_are_closed():
    for path in (
        "/v1/new",
        "/metrics",
        "/",
        "/live",
        "/static",
        "/healthz/",
        "/LOGIN",
        "//healthz",
    ):
        assert access_of("GET", path) == "user"
    assert access_of("POST", "/v1/jobs/1/attempts/2/report") == "attempt"
    assert access_of("GET", "/v1/jobs/1/attempts/2/report") == "user"
    assert access_of("POST", "/v1/jobs/1/attempts/2/report/x") == "user"
    assert access_of("POST", "/v1/jobs/1/x/attempts/2/report") == "user"


@pytest.mark.parametrize(
    ("host", "is_fine"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:1234", True),
        ("localhost:80", True),
        ("LOCALHOST", True),
        ("[::1]:80", True),
        ("fleet.example", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("evil.example:127.0.0.1", False),
        ("127.0.0.1/x", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_only_known_names_are_answered(service, host, is_fine):
    answer = service.client.get("/v1/devices", headers={"host": host})
    assert answer.status_code == (200 if is_fine else 421)
    assert service.bare().get("/healthz", headers={"host": host}).status_code == (
        200 if is_fine else 421
    )


@pytest.mark.parametrize(
    ("origin", "is_fine"),
    [
        (URL, True),
        ("http://evil.example", False),
        ("http://127.0.0.1:9999", False),
        ("http://127.0.0.1", False),
        ("null", False),
        ("", False),
        ("file://", False),
        ("javascript://127.0.0.1:8080", False),
    ],
)
def test_pages_of_other_sites_are_refused(service, origin, is_fine):
    for method, path in (("GET", "/v1/devices"), ("OPTIONS", "/v1/jobs"), ("GET", "/healthz")):
        answer = service.client.request(method, path, headers={"origin": origin})
        assert (answer.status_code != 403) == is_fine
        assert "access-control-allow-origin" not in answer.headers


def test_a_header_that_comes_twice_is_refused(service):
    for name in ("host", "origin", "authorization"):
        value = {"host": "127.0.0.1:8080", "origin": URL, "authorization": f"Bearer {TOKEN}"}[name]
        answer = service.bare().get("/v1/devices", headers=[(name, value), (name, value)])
        assert answer.status_code == 400


def test_bodies_have_a_limit(service):
    large = json.dumps({"name": "x" * middleware.MAX_BODY_BYTES, "command": ["true"]}).encode()
    headers = {"content-type": "application/json"}
    assert service.client.post("/v1/jobs", content=large, headers=headers).status_code == 413

    def parts():
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000]

    assert service.client.post("/v1/jobs", content=parts(), headers=headers).status_code == 413


def test_a_body_that_never_ends_is_given_up(service, monkeypatch):
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.05)
    sent = []

    async def receive():
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/jobs", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())],
    }  # fmt: skip
    asyncio.run(service.client.app(scope, receive, send))
    assert sent[0]["status"] == 408


def test_every_answer_carries_the_headers(service):
    for path in ("/v1/devices", "/healthz", "/nothing", "/login", "/", "/v1/jobs/999999"):
        headers = service.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["referrer-policy"] == "same-origin"
    assert service.client.get("/v1/devices").headers["cache-control"] == "no-store"


def log_in(service, token: str):
    return service.bare().post(
        "/login",
        content=urlencode({"token": token}),
        headers={"content-type": "application/x-www-form-urlencoded", "origin": URL},
    )


def test_the_page_is_opened_by_a_cookie(service):
    answer = service.bare(accept="text/html").get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert "set-cookie" not in log_in(service, "wrong" * 10).headers
    answer = log_in(service, TOKEN)
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    browser = service.bare(cookie=cookie.partition(";")[0])
    assert browser.get("/").status_code == 200
    assert browser.get("/v1/jobs").status_code == 200

    # A form of another page could send the cookie, but neither this header nor our origin.
    body = {"name": "x", "command": ["true"]}
    assert browser.post("/v1/jobs", json=body).status_code == 403
    wanted = {PAGE_HEADER: "1"}
    assert browser.post("/v1/jobs", json=body, headers=wanted).status_code == 201
    foreign = {**wanted, "origin": "http://evil.example"}
    assert browser.post("/v1/jobs", json=body, headers=foreign).status_code == 403
    # A wrong token is not made good by a cookie.
    wrong = {"authorization": "Bearer nonsense"}
    assert browser.get("/v1/jobs", headers=wrong).status_code == 401


def test_logging_in_from_elsewhere_is_refused(service):
    answer = service.bare().post(
        "/login", content=urlencode({"token": TOKEN}), headers={"origin": "http://evil.example"}
    )
    assert answer.status_code == 403


def test_the_token_appears_nowhere(service, caplog):
    text = service.client.get("/").text + service.client.get("/openapi.json").text
    text += service.client.get("/metrics").text + repr(service.credentials) + caplog.text
    assert TOKEN not in text
    assert "sha256" not in text


def test_json_must_be_called_json(service):
    """What forms of other sites can send without asking first is no JSON."""
    for device_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = service.client.post(
            "/v1/jobs",
            content=b'{"name": "x", "command": ["true"]}',
            headers={"content-type": device_type},
        )
        assert answer.status_code == 415, device_type
        assert answer.headers["content-type"] == "application/problem+json"


def test_two_lengths_of_a_body_are_one_too_many(service):
    answer = service.client.post(
        "/v1/jobs", content=b"{}", headers={"transfer-encoding": "chunked", "content-length": "2"}
    )
    assert answer.status_code == 400
    assert "stated twice" in answer.json()["detail"]
