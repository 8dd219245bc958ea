"""In which order workers take files, so that none is left with a long one at the end, and where.

Tests that need a GPU are asked for with ``-m gpu``; all others see none.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# What another test has found is not found again: each finds its own.
os.environ["HOCKET_DISK_CACHE"] = "0"
# What collecting imports stays: looking for garbage in it would take a fifth of the time again.
gc.disable()
FOLDER = Path(__file__).parent
LONG = (
    "runtime/test_divided.py",
    "runtime/test_killed_ranks.py",
    "fleet/test_simulator.py",
    "service/test_ray.py",
    "runtime/test_run_command.py",
    "service/test_slurm.py",
    "runtime/test_launch.py",
    "classes/test_digits.py",
    "runtime/test_parallel_gradients.py",
    "runtime/test_shares_run.py",
    "runtime/collectives/test_group.py",
    "runtime/test_budget_prepare.py",
    "runtime/test_foreseen.py",
    "service/test_fleet_commands.py",
    "runtime/test_parallel_run.py",
    "service/test_daemon_kill.py",
    "runtime/test_ranks.py",
    "runtime/test_single.py",
    "pages/test_readme_commands.py",
    "pages/test_others_commands.py",
    "pages/test_parallelism_commands.py",
    "service/test_page_in_browser.py",
    "export/test_torch_script.py",
    "service/test_local_chaos.py",
    "service/test_lease_examples.py",
    "service/test_daemon_crashes.py",
    "cost/test_predict_script.py",
    "test_imports.py",
    "runtime/test_memory_order.py",
    "pages/test_site.py",
    "planners/test_hash_seeds.py",
    "fleet/test_planned_throughputs.py",
    "runtime/test_given_models.py",
)
"""Few tests that take long, most of it waiting for processes. A wrong list costs only time."""
WHOLE_PROGRAMS = (
    "pages/test_gallery.py",
    "capture/test_capture_zoo.py",
    "classes/test_digits.py",
    "cost/test_predict_script.py",
    "distribution/test_notebook.py",
    "distribution/test_wheel.py",
    "export/test_torch_script.py",
    "integrations/test_torchrun.py",
    "pages/test_fleet_commands.py",
    "pages/test_others_commands.py",
    "pages/test_parallelism_commands.py",
    "pages/test_readme_commands.py",
    "pages/test_systems_page_slow.py",
    "planners/test_hash_seeds.py",
    "runtime/test_train_examples.py",
    "service/test_agents_storm.py",
    "service/test_daemon_kill.py",
    "service/test_lease_examples.py",
    "service/test_local_chaos.py",
    "service/test_local_kills.py",
    "service/test_page_in_browser.py",
    "service/test_ray.py",
    "service/test_ray_nodes.py",
    "service/test_rest_schema.py",
    "service/test_slurm.py",
    "service/test_slurm_nodes.py",
    "tables/test_ray.py",
    "view/test_report_in_browser.py",
)
"""Third-party engines, namespaces, browsers, fuzzing, examples and pages as they are typed: run by
``make test-all``, or where a file of them is named."""
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test-all` ask for everything."""
    parser.addoption("--whole-programs", action="store_true", help="also run WHOLE_PROGRAMS")


def pytest_configure(config: pytest.Config) -> None:
    """Take the order below and not that of the number of tests; let Ctrl-C reach what tests start.

    A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    """
    if config.option.markexpr != "gpu":
        # What is compared with a processor runs on one, whatever the machine has.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # On a busy machine drawing examples takes long, too, and so does the first call of a kernel.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    config.option.loadscopereorder = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out whole programs that nobody asked for; put long files first.

    Every second file is a long one, until all have started; of the others the largest comes first.
    """
    if not config.getoption("whole_programs"):
        named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
        left_out = {FOLDER / name for name in WHOLE_PROGRAMS} - named
        config.hook.pytest_deselected(items=[item for item in items if item.path in left_out])
        items[:] = [item for item in items if item.path not in left_out]
    if not hasattr(config, "workerinput"):
        return
    num_tests = Counter(item.path for item in items)
    long = [path for name in LONG if (path := FOLDER / name) in num_tests]
    others = sorted(num_tests.keys() - set(long), key=lambda path: (-num_tests[path], path))
    place = {path: 2 * index for index, path in enumerate(long)}
    place |= {path: min(2 * index + 1, index + len(long)) for index, path in enumerate(others)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Collect garbage among what tests make, and not again and again among all that is imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window that asks nobody for anything."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on the path: install it with 'apt-get install chromium'")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium, args=list(BROWSER_FLAGS))
        yield running
        running.close()
