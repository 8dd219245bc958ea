"""Rows of docs/systems.md hold what their scripts compute (those that take seconds)."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "systems"
ROWS = {
    line.split(" | ")[0].removeprefix("| "): line
    for line in (ROOT / "docs" / "systems.md").read_text().splitlines()
    if line.startswith("| ")
}
QUICK = {
    "Baechi": "baechi",
    "ParDNN": "pardnn",
    "P3": "p3",
    "Blink": "blink",
    "Wavelet": "wavelet",
}


@pytest.mark.parametrize(("system", "script"), QUICK.items())
def test_row_is_what_its_script_computes(
    system: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scripts import the models beside them.
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    computed = runpy.run_path(str(SCRIPTS / f"{script}.py"))["ours"]()
    assert computed in ROWS[system]


def test_scripts_of_all_rows_exist() -> None:
    named = re.findall(r"`(benchmarks/\S+\.py)`", "\n".join(ROWS.values()))
    assert len(named) >= 11
    assert [name for name in named if not (ROOT / name).is_file()] == []
