"""Which engine runs the jobs: ``local``, ``agents``, ``ray``, ``ray://host:port``, ``slurm``."""

from __future__ import annotations

from pathlib import Path

from hocket.base.errors import UsageError, unknown_name
from hocket.fleet.rounds.state import FleetDevice
from hocket.service.executors.executor import Executor

NAMES = ("local", "agents", "ray", "slurm")


def check_engine(on: str, devices: tuple[FleetDevice, ...]) -> None:
    """Raise `UsageError` for an engine that is not known or cannot be used so."""
    name = engine_name(on)
    if name == "local" and not devices:
        hint = "name what jobs share, such as --devices v100:2,p100:2 or --devices cpu:4"
        raise UsageError(
            "no GPU was found that may be used, so local jobs need --devices", hint=hint
        )
    if name != "local" and devices:
        hint = f"leave it out: {name} knows its own; --kinds says which come first"
        raise UsageError(f"--devices is not for {name}", hint=hint)


def engine_name(on: str) -> str:
    """``ray`` of ``ray://10.0.0.1:6379``; raises `UsageError` for an unknown one."""
    name = on.partition("://")[0]
    if name not in NAMES or ("://" in on and name != "ray"):
        raise unknown_name("engine", on, NAMES)
    return name


def open_engine(
    on: str, folder: Path, devices: tuple[FleetDevice, ...], kinds: tuple[str, ...]
) -> Executor:
    """The engine for the fleet of a state folder."""
    name, attempts = engine_name(on), folder / "attempts"
    if name == "ray":
        from hocket.service.executors.ray_executor import RayExecutor

        return RayExecutor(on if "://" in on else None, attempts)
    if name == "slurm":
        from hocket.service.executors.slurm import SlurmExecutor

        return SlurmExecutor(attempts, kinds=kinds)
    from hocket.service.executors.local import LocalExecutor, end_set_aside
    from hocket.service.executors.local_devices import with_cuda_indexes

    end_set_aside(folder)
    return LocalExecutor(attempts, with_cuda_indexes(devices))
