"""Buttons of the page: plain forms that only the page itself can send."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urlencode

import pytest
from service.rest_service import COOKIE, TOKEN, URL

from hocket.service.credentials import FORM_FIELD, PAGE_HEADER, access_of, form_token

FORM = {"content-type": "application/x-www-form-urlencoded"}
SIGNED_IN = {"cookie": f"NAME={COOKIE}"}
"""NAME stands for that of the fleet's cookie."""


def browser(service, **headers):
    """A client with these headers and no token."""
    cookie = headers.get("cookie", "").replace("NAME", service.credentials.cookie_name)
    return service.bare(**{**headers, "cookie": cookie} if cookie else headers)


class Forms(HTMLParser):
    """The forms of a page as a browser without scripts sends them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.forms: dict[str, dict[str, str]] = {}
        self._fields: dict[str, str] = {}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "form" and given.get("method") == "post":
            self._fields = self.forms.setdefault(given["action"], {})
        elif tag == "input" and given.get("type") == "hidden":
            self._fields[given["name"]] = given["value"]


@pytest.fixture
def job(service) -> int:
    number = service.submit()["id"]
    yield number
    service.client.delete(f"/v1/jobs/{number}")


def page_of(service, number: int) -> str:
    answer = browser(service, **SIGNED_IN).get(f"/jobs/{number}")
    assert answer.status_code == 200
    return answer.text


def press(service, number: int, change: str, **headers: str):
    """Load the page, press the button and follow where it leads."""
    fields = Forms(page_of(service, number)).forms[f"/jobs/{number}/{change}"]
    sent = {**SIGNED_IN, **FORM, "origin": URL, **headers}
    return browser(service, **sent).post(f"/jobs/{number}/{change}", content=urlencode(fields))


def test_a_job_is_paused_resumed_and_cancelled_without_scripts(service, job):
    for change, status in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        answer = press(service, job, change)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job}")
        service.wait_for(job, status)
    assert not Forms(page_of(service, job)).forms, "nothing can be done to a job that has ended"


def test_buttons_are_those_that_fit(service, job):
    assert set(Forms(page_of(service, job)).forms) == {f"/jobs/{job}/pause", f"/jobs/{job}/cancel"}
    press(service, job, "pause")
    assert set(Forms(page_of(service, job)).forms) == {f"/jobs/{job}/resume", f"/jobs/{job}/cancel"}
    html = page_of(service, job)
    (details,) = re.findall(r"<details id=\"cancel-box\">.*?</details>", html, re.DOTALL)
    assert f"/jobs/{job}/cancel" in details, "ending a job takes two steps"


def test_pressing_again_changes_nothing_more(service, job):
    fields = Forms(page_of(service, job)).forms[f"/jobs/{job}/cancel"]
    client = browser(service, **SIGNED_IN, **FORM)
    for _ in range(2):
        assert client.post(f"/jobs/{job}/cancel", content=urlencode(fields)).status_code == 303
    service.wait_for(job, "cancelled")
    late = client.post(f"/jobs/{job}/pause", content=urlencode(fields))
    assert late.status_code == 409
    assert "has ended" in late.text
    assert late.headers["content-type"].startswith("text/html")
    for path in ("/jobs/99999/pause", "/jobs/x/pause"):
        assert client.post(path, content=urlencode(fields)).status_code == 404


FORM_TOKEN = form_token(COOKIE)
GOOD = urlencode({FORM_FIELD: FORM_TOKEN})


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, GOOD, 401),
        ({"cookie": "NAME=wrong"}, GOOD, 401),
        ({"authorization": f"Bearer {FORM_TOKEN}"}, GOOD, 401),
        ({**SIGNED_IN, "origin": "https://evil.example"}, GOOD, 403),
        ({**SIGNED_IN, "origin": "null"}, GOOD, 403),
        ({**SIGNED_IN, "origin": "http://127.0.0.1:9999"}, GOOD, 403),
        ({**SIGNED_IN, "host": "evil.example"}, GOOD, 421),
        (SIGNED_IN, "", 403),
        (SIGNED_IN, urlencode({FORM_FIELD: ""}), 403),
        (SIGNED_IN, urlencode({FORM_FIELD: COOKIE}), 403),
        (SIGNED_IN, urlencode({FORM_FIELD: FORM_TOKEN[:-1]}), 403),
        (SIGNED_IN, f"{GOOD}&{FORM_FIELD}=x", 403),
        (SIGNED_IN, f"{FORM_FIELD}=\u0131".encode(), 403),
        ({**SIGNED_IN, "content-type": "text/plain"}, GOOD, 403),
        ({**SIGNED_IN, "content-type": "multipart/form-data; boundary=x"}, GOOD, 403),
        ({**SIGNED_IN, PAGE_HEADER: "1"}, "", 403),
    ],
)
def test_nobody_else_can_press_a_button(service, job, headers, body, status):
    for change in ("pause", "cancel"):
        sent = {**FORM, **headers}
        answer = browser(service, **sent).post(f"/jobs/{job}/{change}", content=body)
        assert answer.status_code == status
    assert service.wait_for(job, "running"), "nothing happened to it"


def test_what_a_form_carries_opens_nothing_else(service, job):
    """The field stands in the page; it is neither the cookie nor the token, nor leads to them."""
    assert len({TOKEN, COOKIE, FORM_TOKEN}) == 3
    client = browser(service, **SIGNED_IN, **FORM)
    for method, path in (("POST", f"/v1/jobs/{job}:pause"), ("DELETE", f"/v1/jobs/{job}")):
        assert client.request(method, path, content=GOOD).status_code == 403
    for path in ("/", "/live", "/v1/jobs", f"/v1/jobs/{job}", "/login"):
        assert FORM_TOKEN not in client.get(path).text
        assert COOKIE not in client.get(path).text
    assert page_of(service, job).count(COOKIE) == 0
    assert access_of("POST", "/jobs/1/pause/x") == "user"
    assert access_of("GET", "/jobs/1/pause") == "user"
    assert access_of("POST", "/jobs/1/delete") == "user"
