"""The docs site builds without a warning, and its pages open in a browser without an error."""

import os
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("material", reason="the extra docs is not installed")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs", "--out", folder],
        capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.timeout(600)
def test_the_site_has_reference_examples_and_search(site):
    assert "hocket.training.prepare" in (site / "reference" / "api.html").read_text()
    assert "Candidates" in (site / "live" / "report.html").read_text()
    assert (site / "live" / "fleet.html").stat().st_size > 10_000
    assert (site / "search" / "search_index.json").exists()


@pytest.mark.web
@pytest.mark.timeout(600)
def test_pages_open_without_errors_and_requests_to_other_machines(site, browser):
    handler = partial(QuietHandler, directory=site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    problems = []
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: problems.append(asked.url)
            if not asked.url.startswith((url, "data:", "blob:")) else None)  # fmt: skip
    for file in sorted(site.rglob("*.html")):
        page.goto(f"{url}/{file.relative_to(site)}")
    page.goto(f"{url}/index.html")
    page.set_viewport_size({"width": 1300, "height": 800})
    page.keyboard.press("/")
    page.keyboard.type("memory budget")
    page.wait_for_selector(".md-search-result__item")
    assert problems == []
    server.shutdown()
    server.server_close()
