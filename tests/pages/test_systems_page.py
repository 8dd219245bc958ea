"""Rows of docs/systems.md hold what their scripts compute.

Simulated rows are compared figure by figure. Measured ones depend on the machine: Bösen's row is
compared with the recorded runs, Orion's script runs at its quick size. Rows that take longer are in
`test_systems_page_slow.py`.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "systems"
LINES = (ROOT / "docs" / "systems.md").read_text().splitlines()
ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in LINES if line.startswith("| ")}
SIMULATED = {
    "Baechi": "baechi",
    "ParDNN": "pardnn",
    "P3": "p3",
    "Blink": "blink",
    "Wavelet": "wavelet",
}
RECORDED = ROOT / "benchmarks" / "results" / "2026-11-18-bosen.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Scripts import the models beside them.
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    return lambda name: runpy.run_path(str(SCRIPTS / f"{name}.py"))


@pytest.mark.parametrize(("system", "name"), SIMULATED.items())
def test_simulated_row_is_what_its_script_computes(system: str, name: str, script: Any) -> None:
    assert script(name)["ours"]() in ROWS[system]


def test_boesen_row_is_what_its_script_makes_of_the_recorded_runs(script: Any) -> None:
    assert script("bosen")["ours"](json.loads(RECORDED.read_text())) in ROWS["Bösen"]


def test_orion_script_finds_all_its_quick_loops_sound() -> None:
    # In a process of its own: it imports benchmarks/loops/kernels.py, and tests have a `kernels`.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = (sys.executable, str(SCRIPTS / "orion.py"), "--quick")
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "3 of 3 loops that no test contains are sound" in ended.stdout, ended.stderr


def test_scripts_of_all_rows_exist() -> None:
    named = re.findall(r"`(benchmarks/\S+\.py)`", "\n".join(ROWS.values()))
    assert len(named) >= 11
    assert [name for name in named if not (ROOT / name).is_file()] == []
