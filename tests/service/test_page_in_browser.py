"""The live page in a real browser, on a real daemon: it follows events, and names do nothing."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import uvicorn
from patience import PATIENCE_S
from service.fake_executor import FakeExecutor, fleet_devices
from service.page_fleets import HOSTILE
from service.rest_service import tokens_of

from hocket.fleet.rounds import Rules
from hocket.service.daemon.daemon import Daemon
from hocket.service.rest.app import make_app
from hocket.service.spec import JobSpec
from hocket.service.store.store import Store

pytestmark = pytest.mark.web
TOKEN = "a-token-that-is-long-enough-for-this"


class Service:
    """A daemon on devices that do not exist, and the page before it."""

    def __init__(self, folder) -> None:
        self.executor = FakeExecutor(fleet_devices(v100=2, k80=1))
        self.store = Store.open(folder)
        rules = Rules(round_s=3600.0)
        self.daemon = Daemon(self.store, self.executor, rules, ("v100", "k80"), poll_s=0.05)
        self.daemon.start()
        self.app = make_app(self.daemon, tokens_of(TOKEN))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(self.app, log_level="error", ws="none")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self.thread.start()

    def submit(self, name: str, **more) -> int:
        spec = JobSpec(name=name, command=("true",), **{"total_steps": 5000.0, **more})
        return self.daemon.submit(spec).number

    def close(self) -> None:
        self.app.state.event_notifier.close()
        self.server.should_exit = True
        self.thread.join()
        self.daemon.close()
        self.store.close()


@pytest.fixture(scope="module")
def one_service(tmp_path_factory):
    running = Service(tmp_path_factory.mktemp("fleet"))
    yield running
    running.close()


@pytest.fixture
def service(one_service):
    """The service, without jobs of the test before."""
    yield one_service
    for number in list(one_service.daemon.service_state.jobs):
        one_service.daemon.change("cancel", number)


@pytest.fixture(scope="module")
def cookies(browser, one_service):
    """Those of somebody who signed in."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(one_service.url)
    assert page.url == f"{one_service.url}/login"
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.url == f"{one_service.url}/")
    kept = context.storage_state()
    (cookie,) = kept["cookies"]
    assert TOKEN not in cookie["value"]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    context.close()
    return kept


@pytest.fixture
def visit(browser, service, cookies):
    """Open the page as somebody who signed in; nothing may fail or be asked of others."""
    contexts = []

    def open_page(**options):
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        context = browser.new_context(storage_state=cookies, **options)
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.requests = [], []
        page.on("console", lambda m: page.complaints.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(service.url)
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            assert page.complaints == []
            assert all(url.startswith(service.url) for url in page.requests)
        context.close()


def wait_until(page, holds):
    """Poll from here: the page's policy forbids the evaluation that playwright's waiting needs."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if holds():
            return
        page.wait_for_timeout(30)
    pytest.fail(f"the page did not change: {page.inner_text('body')}")


def press(page, button):
    """Press a button of a form, until the page that it leads to is there."""
    with page.expect_navigation():
        page.get_by_role("button", name=button).click()


def is_live(page):
    return page.inner_text("#status") == "live"


def test_page_shows_a_new_job_without_being_loaded_again(visit, service):
    page = visit()
    wait_until(page, lambda: is_live(page))
    page.evaluate("window.stillTheSame = true")
    number = service.submit("fresh from the oven")
    wait_until(page, lambda: "fresh from the oven" in page.inner_text("#running"))
    bars = page.locator(f"#devices svg rect.job-{number % 12}")
    wait_until(page, lambda: bars.count() >= 1)
    assert "1 running" in page.title()
    service.executor.exit(service.executor.running()[0], 0)
    wait_until(page, lambda: "fresh from the oven" in page.inner_text("#ended"))
    wait_until(page, lambda: page.title().startswith("0 running"))
    assert page.evaluate("window.stillTheSame")


def test_hostile_names_are_inert_everywhere(visit, service):
    numbers = [service.submit(name, team=name) for name in HOSTILE]
    page = visit()
    wait_until(page, lambda: is_live(page))
    # Also through the stream and the parts that it brings.
    numbers.append(service.submit(HOSTILE[0] + HOSTILE[1], team=HOSTILE[5]))
    wait_until(page, lambda: page.locator(f"#waiting-{numbers[-1]}").count() == 1)
    shown = page.inner_text("#shares")
    assert "<script>alert(1)</script>" in shown
    assert "{{ 7 * 7 }}" in shown
    assert "\\u202eevil" in shown
    assert "x" * 100 not in shown
    assert page.locator("main script, main img, main iframe").count() == 0
    titles = "".join(page.locator("#devices svg g title").all_text_contents())
    assert "<script>alert(1)</script>" in titles
    page.goto(f"{service.url}/jobs/{numbers[0]}")
    assert "<script>alert(1)</script>" in page.title()
    page.goto(f"{service.url}/jobs/{numbers[5]}")
    assert page.inner_text("h1 bdi") == HOSTILE[5]


def test_what_if_gives_a_number_with_and_without_scripts(visit, service):
    for at in range(6):
        service.submit(f"asked {at}")
    for options in ({}, {"java_script_enabled": False}):
        page = visit(**options)
        page.select_option("#what-if-policy", "fifo")
        page.fill("#what-if-type-1", "6")
        page.click("#what-if-form button")
        answer = page.locator("#what-if-answer")
        wait_until(page, lambda: "instead of" in answer.inner_text())  # noqa: B023
        assert "sooner on average" in answer.inner_text()
        assert answer.locator("tbody tr").count() == 5
        # What was asked stays in the form.
        assert page.input_value("#what-if-type-1") == "6"


def test_page_is_used_by_keyboard_and_keeps_the_focus(visit, service):
    number = service.submit("looked at")
    page = visit()
    wait_until(page, lambda: is_live(page))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#device-table summary")
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.evaluate("document.getElementById('device-table').open"))
    page.focus(f"#running-{number}")
    other = service.submit("another")
    wait_until(page, lambda: page.locator(f"#running-{other}").count() == 1)
    assert page.evaluate("document.activeElement.id") == f"running-{number}"
    assert page.evaluate("document.getElementById('device-table').open")
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.url.endswith(f"/jobs/{number}"))
    assert "runs on" in page.inner_text("#summary")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_narrow_screen_and_both_schemes(visit, service, scheme):
    service.submit("n" * 150)
    page = visit(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    paper, ink = (
        page.evaluate(f"getComputedStyle(document.documentElement).{name}")
        for name in ("backgroundColor", "color")
    )
    assert (brightness(paper) > brightness(ink)) == (scheme == "light")


def brightness(colour: str) -> float:
    return sum(map(float, colour.removeprefix("rgb(").removesuffix(")").split(",")))


def test_a_wrong_token_is_refused_and_signing_out_works(browser, service):
    context = browser.new_context()
    page = context.new_page()
    page.goto(service.url)
    page.fill("#token", "nonsense")
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.locator("#wrong").count() == 1)
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.is_visible("#sign-out"))
    page.click("#sign-out")
    wait_until(page, lambda: page.url.endswith("/login"))
    page.goto(service.url)
    assert page.url.endswith("/login")
    context.close()


def test_a_job_that_does_not_exist_has_a_page_that_says_so(visit, service):
    page = visit()
    answer = page.goto(f"{service.url}/jobs/99999")
    assert answer.status == 404
    assert "there is no job 99999" in page.inner_text("h1").lower()
    page.complaints.clear()


@pytest.mark.parametrize("has_scripts", [False, True])
def test_a_job_is_paused_resumed_and_ended_by_buttons(visit, service, has_scripts):
    number = service.submit("mine")
    page = visit(java_script_enabled=has_scripts)
    page.goto(f"{service.url}/jobs/{number}")
    assert not page.get_by_role("button", name=f"End job {number}").is_visible()
    for button, status in (("Pause", "paused"), ("Resume", "running")):
        press(page, button)
        wait_until(page, lambda status=status: service.daemon.job(number).status == status)
        assert page.url == f"{service.url}/jobs/{number}"
    page.get_by_text("Cancel …").click()
    press(page, f"End job {number}")
    wait_until(page, lambda: service.daemon.job(number).status == "cancelled")
    page.reload()
    assert page.locator("form").count() == 0


def test_a_page_of_another_site_cannot_press_a_button(visit, browser, cookies, service):
    """A form that is sent from elsewhere comes without the cookie and with another origin."""
    number = service.submit("mine")
    context = browser.new_context(storage_state=cookies)
    page = context.new_page()
    html = (
        f'<form method="post" action="{service.url}/jobs/{number}/cancel"><button>x</button></form>'
    )
    page.route(
        "http://evil.example/", lambda route: route.fulfill(body=html, content_type="text/html")
    )
    page.goto("http://evil.example/")
    with page.expect_response(f"{service.url}/jobs/{number}/cancel") as answer:
        page.get_by_role("button").click()
    assert answer.value.status == 403
    assert service.daemon.job(number).status != "cancelled"
    context.close()
