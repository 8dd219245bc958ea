"""Trainings of parts as jobs of a fleet: each asks for one device, and waits for its turn there."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.base.config import environment_anywhere
from hocket.base.errors import HocketError, RunError
from hocket.classes.material import Progress
from hocket.service.client import FleetClient, job_path
from hocket.service.records import ENDED

_PAUSE_S = 0.5
_PATIENCE_S = 120.0
"""For a service that is being restarted: what was accepted is not lost."""


def train_on_fleet(
    client: FleetClient, folder: Path, indices: Sequence[int], progress: Progress
) -> None:
    """Train parts whose cuts are in a folder that all devices of the fleet can write to."""
    numbers: list[int] = []
    try:
        for index in indices:
            numbers.append(client.submit(_job(folder.resolve(), index))["id"])
        _wait(client, dict(zip(numbers, indices, strict=True)), progress)
    except BaseException:
        for number in numbers:
            _cancel(client, number)
        raise


def _job(folder: Path, index: int) -> dict[str, Any]:
    paths = environment_anywhere().get("PYTHONPATH", "")
    return {
        "name": f"part {index} of {folder.parent.name}",
        "command": [
            sys.executable, "-P", "-m", "hocket.classes.part_job", str(folder), str(index)
        ],
        "folder": str(folder),
        "environment": {"PYTHONPATH": paths} if paths else {},
    }  # fmt: skip


def _wait(client: FleetClient, index_of: dict[int, int], progress: Progress) -> None:
    left = dict(index_of)
    while left:
        progress("parts trained by the fleet", len(index_of) - len(left), len(index_of))
        for number in list(left):
            job = client.get_patiently(job_path(number), _PATIENCE_S)
            if job["status"] not in ENDED:
                continue
            index = left.pop(number)
            if job["status"] != "succeeded":
                raise RunError(
                    f"job {number}, which trained part {index}, has {job['status']}: "
                    f"{job['message']}",
                    hint=f"hocket fleet logs {number}; the same command goes on with what is done",
                )
        if left:
            time.sleep(_PAUSE_S)


def _cancel(client: FleetClient, number: int) -> None:
    """So that nothing trains for nobody; one that has ended stays as it is."""
    with contextlib.suppress(HocketError):
        client.delete(job_path(number))
