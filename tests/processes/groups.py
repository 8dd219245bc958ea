"""Processes for tests."""

import os
from pathlib import Path

from hocket.processes.worker import WorkerSpec

TESTS = str(Path(__file__).resolve().parents[1])


def spec(work, **options):
    """A process that does one of the works of `children`."""
    return WorkerSpec(
        name=options.pop("name", work),
        module="processes.children",
        arguments=(work,),
        environment={"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])},
        describe=lambda position: f"at {position.step}",
        **options,
    )
