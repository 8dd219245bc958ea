"""Generated modules train as in plain PyTorch; benchmarks/thirdparty/fuzz.py runs 500 seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "thirdparty"))
from fuzz import MODES, run

NUM_SEEDS = 32
PLAIN = [mode for mode in MODES if "memory" not in mode]
BUDGETED = [mode for mode in MODES if "memory" in mode]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_generated_module_trains_as_in_plain_pytorch(seed: int) -> None:
    # Memory plans take longer to find, so they are one in four.
    mode = PLAIN[seed % len(PLAIN)] if seed % 4 else BUDGETED[seed // 4 % len(BUDGETED)]
    row = run(seed, mode)
    assert row.result in ("equal", "close"), row
