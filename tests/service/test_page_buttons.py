"""Buttons of the page: plain forms that only the page itself can send."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from service.rest_service import COOKIE, URL

from hocket.service.credentials import PAGE_HEADER, access_of

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
    assert f"/jobs/{number}/{change}" in Forms(page_of(service, number)).forms
    sent = {**SIGNED_IN, **FORM, "origin": URL, **headers}
    return browser(service, **sent).post(f"/jobs/{number}/{change}")


def test_a_job_is_paused_resumed_and_cancelled_without_scripts(service, job):
    for change, status in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        answer = press(service, job, change)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job}")
        service.wait_for(job, status)
    assert not Forms(page_of(service, job)).forms, "nothing can be done to a job that has ended"


def test_the_page_of_a_job_explains_it_until_it_has_ended(service, job):
    service.wait_for(job, "running")
    assert "runs on" in page_of(service, job)
    press(service, job, "pause")
    service.wait_for(job, "paused")
    assert "is paused until it is resumed" in page_of(service, job)
    press(service, job, "cancel")
    service.wait_for(job, "cancelled")
    assert "is paused until" not in page_of(service, job)


def test_buttons_are_those_that_fit(service, job):
    assert set(Forms(page_of(service, job)).forms) == {f"/jobs/{job}/pause", f"/jobs/{job}/cancel"}
    press(service, job, "pause")
    assert set(Forms(page_of(service, job)).forms) == {f"/jobs/{job}/resume", f"/jobs/{job}/cancel"}
    html = page_of(service, job)
    (details,) = re.findall(r"<details id=\"cancel-box\">.*?</details>", html, re.DOTALL)
    assert f"/jobs/{job}/cancel" in details, "ending a job takes two steps"


def test_pressing_again_changes_nothing_more(service, job):
    client = browser(service, **SIGNED_IN, **FORM, origin=URL)
    for _ in range(2):
        assert client.post(f"/jobs/{job}/cancel").status_code == 303
    service.wait_for(job, "cancelled")
    late = client.post(f"/jobs/{job}/pause")
    assert late.status_code == 409
    assert "has ended" in late.text
    assert late.headers["content-type"].startswith("text/html")
    for path in ("/jobs/99999/pause", "/jobs/x/pause"):
        assert client.post(path).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": URL}, 401),
        ({"cookie": "NAME=wrong", "origin": URL}, 401),
        ({"authorization": "Bearer wrong", "origin": URL}, 401),
        ({**SIGNED_IN, "origin": "https://evil.example"}, 403),
        ({**SIGNED_IN, "origin": "null"}, 403),
        ({**SIGNED_IN, "origin": "http://127.0.0.1:9999"}, 403),
        ({**SIGNED_IN, "host": "evil.example"}, 421),
        (SIGNED_IN, 403),
        ({**SIGNED_IN, PAGE_HEADER: "1"}, 403),
    ],
)
def test_nobody_else_can_press_a_button(service, job, headers, status):
    for change in ("pause", "cancel"):
        sent = {**FORM, **headers}
        answer = browser(service, **sent).post(f"/jobs/{job}/{change}")
        assert answer.status_code == status
    assert service.wait_for(job, "running"), "nothing happened to it"


def test_an_origin_opens_nothing_but_forms(service, job):
    client = browser(service, **SIGNED_IN, **FORM, origin=URL)
    for method, path in (("POST", f"/v1/jobs/{job}:pause"), ("DELETE", f"/v1/jobs/{job}")):
        assert client.request(method, path).status_code == 403
    for path in ("/", "/live", "/v1/jobs", f"/v1/jobs/{job}", f"/jobs/{job}", "/login"):
        assert COOKIE not in client.get(path).text
    assert access_of("POST", "/jobs/1/pause/x") == "user"
    assert access_of("GET", "/jobs/1/pause") == "user"
    assert access_of("POST", "/jobs/1/delete") == "user"
