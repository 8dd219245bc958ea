"""The docs site builds without a warning, and its pages open in a browser without an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="the extra docs is not installed")


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
def test_pages_open_fast_without_errors_and_broken_links(site, browser):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "site_check", site],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # Times depend on how busy the machine is: only the script itself holds pages to two seconds.
    lines = [line for line in done.stdout.splitlines()[1:] if "to load" not in line]
    assert lines == [], done.stdout + done.stderr
    assert "pages, " in done.stdout, done.stderr
