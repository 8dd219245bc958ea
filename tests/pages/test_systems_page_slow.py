"""Rows of docs/systems.md whose scripts take longer: PTD-P, Gavel, TensorFlowMem, sensAI."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "systems"
PAGE = (ROOT / "docs" / "systems.md").read_text()


def test_ptdp_row_is_what_its_script_computes() -> None:
    assert runpy.run_path(str(SCRIPTS / "ptdp.py"))["ours"]() in PAGE


def test_gavel_row_is_what_its_script_computes() -> None:
    found = runpy.run_path(str(SCRIPTS / "gavel.py"))
    if not (found["DATA"] / "gavel").is_dir():
        pytest.skip("Gavel's table of throughputs is not here")
    assert found["ours"]() in PAGE


def test_quick_rows_of_tensorflowmem_are_what_its_script_computes() -> None:
    found = runpy.run_path(str(SCRIPTS / "tensorflowmem.py"))
    rows = [found["row"](case) for case in found["CASES"] if case.name in found["QUICK"]]
    assert len(rows) == 2
    assert [row for row in rows if row not in PAGE] == []


def test_sensai_script_splits_serves_and_compares_with_its_controls() -> None:
    pytest.importorskip("onnxruntime")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = (sys.executable, str(SCRIPTS / "sensai.py"), "--quick")
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    for row in ("10 sub-models", "whole net, model parallel", "control, work of one"):
        assert f"| {row} | " in ended.stdout
