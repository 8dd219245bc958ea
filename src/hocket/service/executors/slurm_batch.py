"""Entry point of a Slurm batch job: ``python -m hocket.service.executors.slurm_batch FOLDER``.

Adds Slurm's variables of the allocation to the assignment, then runs the supervisor. Commands need
``SLURM_...`` to start further processes with srun, and to see their GPUs.
"""

from __future__ import annotations

import os
import sys

from hocket.service.executors.attempt_folder import BEGUN, read_assignment, write_assignment
from hocket.service.executors.supervisor import run_attempt

_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "GPU_DEVICE_ORDINAL",
)


def run_batch(folder: str) -> int:
    """Run the attempt of a folder, as `run_attempt` does."""
    order = read_assignment(folder)
    if order is not None and not os.path.exists(os.path.join(folder, BEGUN)):
        given = {
            name: text
            for name, text in os.environ.items()
            if name.startswith("SLURM_") or name in _DEVICES
        }
        write_assignment(folder, order._replace(environment={**given, **order.environment}))
    return run_attempt(folder)


if __name__ == "__main__":
    sys.exit(0 if run_batch(sys.argv[1]) == 0 else 1)
