"""The tour runs from top to bottom."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "examples" / "tour.ipynb"


@pytest.mark.timeout(400)
def test_the_tour_runs_and_its_training_goes_on_from_a_checkpoint(tmp_path):
    copy = tmp_path / "tour.ipynb"
    copy.write_bytes(TOUR.read_bytes())
    command = [sys.executable, ROOT / "scripts" / "notebook", copy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in (TOUR, copy):  # as it is kept, and as it runs now
        assert "same next loss: True" in str(json.loads(path.read_text()))
