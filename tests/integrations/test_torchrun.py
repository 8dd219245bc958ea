"""A script that prepares by a plan runs under plain torchrun, with the losses of one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_ranks.py"


def losses(folder, *launcher):
    command = [sys.executable, *launcher, SCRIPT, "--plan", folder / "plan.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.timeout(300)
def test_torchrun_needs_no_hocket_launch(tmp_path):
    alone = losses(tmp_path)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert losses(tmp_path, *ranks) == pytest.approx(alone, abs=2e-6)
    assert len(alone) == 5
