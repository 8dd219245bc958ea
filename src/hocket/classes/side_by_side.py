"""Trainings of parts in processes of their own, some at a time."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hocket.base.config import environment_anywhere
from hocket.base.errors import RunError
from hocket.classes.material import Progress
from hocket.processes.start import start_module

_LAST_LINES = 8


def train_side_by_side(jobs: int, folder: Path, indices: Sequence[int], progress: Progress) -> None:
    """Train parts whose cuts are in a folder, ``jobs`` at a time."""
    threads = max(1, (os.cpu_count() or 1) // max(1, min(jobs, len(indices))))
    environment = {**environment_anywhere(), "OMP_NUM_THREADS": str(threads)}
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_train, folder, index, environment, progress) for index in indices]
        for each in running:
            each.result()


def _train(folder: Path, index: int, environment: dict[str, str], progress: Progress) -> None:
    with start_module(
        "hocket.classes.part_job",
        [str(folder), str(index)],
        output=subprocess.PIPE,
        environment=environment,
        is_own_session=False,
    ) as process:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            assert process.stdout is not None
            for line in map(bytes.decode, process.stdout):
                words = line.split()
                if len(words) == 2 and all(word.isdecimal() for word in words):
                    progress(f"retrain part {index}", int(words[0]), int(words[1]))
                else:
                    last.append(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise RunError(
            f"training part {index} ended with {process.returncode}: {' '.join(last)}",
            hint="the same command goes on with the parts that are done",
        )
