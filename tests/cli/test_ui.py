"""The page of ``hocket ui``, in a real browser and by plain requests."""

import json
import threading
import urllib.error
import urllib.request

import pytest
from patience import PATIENCE_S

from hocket.cli.ui import make_server

GPT = "model=gpt2&on=1xt4&batch=2&seq=64&amp=none"


@pytest.fixture(scope="module")
def url():
    server = make_server("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_budget_is_answered_with_sections_numbers_and_files(url):
    status, text = fetch(f"{url}/answer?{GPT}&memory=1500MiB")
    assert status == 200, text
    told = json.loads(text)
    assert told["fits"]
    assert "Other budgets" in told["html"]
    assert told["budgets"] == sorted(told["budgets"])
    assert (
        told["command"]
        == "hocket fit gpt2 --batch 2 --seq 64 --amp none --on 1xt4 --memory 1500MiB"
    )
    assert json.loads(fetch(f"{url}/plan.json?{told['files']}")[1])["sections"]["memory"]
    assert "Do this next" in fetch(f"{url}/report.html?{told['files']}")[1]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("model=evil.py:build&on=1xt4", "no model of hocket list models"),
        ("model=gpt2&on=1xt4&batch=-1", "batch must be a whole number"),
        ("model=gpt2&on=1xnothing", "nothing"),
    ],
)
def test_what_cannot_be_planned_is_named(url, query, message):
    status, text = fetch(f"{url}/answer?{query}")
    assert status == 422
    assert message in json.loads(text)["error"]


def test_other_sites_and_other_names_of_this_machine_are_refused(url):
    assert fetch(f"{url}/answer?{GPT}", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert fetch(f"{url}/", Host="rebound.example:80")[0] == 403
    assert fetch(f"{url}/etc/passwd")[0] == 404


@pytest.mark.web
def test_the_page_plans_slides_and_keeps_its_state_in_the_address(url, browser):
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    problems = []
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.set_default_timeout(PATIENCE_S * 1e3)
    page.goto(f"{url}/?{GPT}")
    page.locator("#state", has_text="It trains.").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    before = page.text_content("#at-budget")
    page.evaluate("""() => {
        const slider = document.getElementById('budget');
        slider.value = 0;
        slider.dispatchEvent(new Event('input'));
        slider.dispatchEvent(new Event('change'));
    }""")
    assert page.text_content("#at-budget") != before
    assert page.input_value("[name=memory]").endswith("MiB")
    page.fill("[name=on]", "2xt4")
    page.fill("[name=memory]", "")
    page.click("button[type=submit]")
    page.wait_for_selector("#candidates-title")
    assert "on=2xt4" in page.url
    assert "DDP" in page.inner_text("#answer")
    assert problems == []
