"""The wheel installs into empty environments, and its commands run there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINORS = ("3.11", "3.12", "3.13")


def other_interpreters():
    """One interpreter per supported minor version that pyenv has."""
    versions = Path("~/.pyenv/versions").expanduser()
    found = [sorted(versions.glob(f"{minor}.*/bin/python")) for minor in MINORS]
    return [str(pythons[-1]) for pythons in found if pythons]


@pytest.mark.timeout(1800)
def test_the_wheel_runs_with_and_without_extras():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "wheel", "--extras"]
        + (other_interpreters() or [sys.executable]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for command in ("plan gpt2", "fit gpt2", "fleet simulate", "collective allreduce"):
        assert f"hocket {command} ok" in done.stdout
