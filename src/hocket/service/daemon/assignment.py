"""Assignment of an attempt: command, folders, and the environment of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from hocket.base.config import PLAN_VARIABLE
from hocket.base.units import parse_bytes
from hocket.service.daemon.service_state import ServiceState, name_of
from hocket.service.endpoint import NAME as ENDPOINT
from hocket.service.executors.executor import Assignment
from hocket.service.records import AttemptRecord
from hocket.service.server_config import ServerConfig
from hocket.service.spec import JobSpec, on_gang

LOGS = "logs"
"""Folder of logs, separate from job folders, so that a job's files are not mistaken for logs."""


def log_file(folder: Path, number: int, attempt: int) -> Path:
    """Path of the log file of an attempt."""
    return folder / LOGS / str(number) / f"attempt-{attempt}.log"


def assignment_of(
    service_state: ServiceState,
    record: AttemptRecord,
    folder: Path,
    endpoint_url: str,
    config: ServerConfig | None = None,
) -> Assignment:
    """Build the executor's description of an attempt, and create the job's folder."""
    job, config = service_state.jobs[record.job], config or ServerConfig()
    spec, memory = job.spec, job.spec.memory or config.memory
    log = log_file(folder, record.job, record.attempt)
    own = folder / "jobs" / str(record.job)
    for made in (log.parent, own):
        made.parent.mkdir(mode=0o700, exist_ok=True)
        made.mkdir(mode=0o700, exist_ok=True)
    return Assignment(
        name=name_of(record),
        command=spec.command if record.attempt == 1 else (*spec.command, *spec.resume),
        environment=_environment(service_state, record, spec, folder, endpoint_url),
        work_folder=own if spec.folder is None else Path(spec.folder),
        log_file=log,
        devices=record.devices,
        device_type=record.device_type,
        processes=cast(Literal["one", "per-device"], spec.processes),
        grace_s=spec.grace_s,
        memory_bytes=None if memory is None else parse_bytes(memory),
        cpus=config.cpus if spec.cpus is None else spec.cpus,
        unix_user=config.limits_of(job.owner).unix_user,
        has_own_folder=spec.folder is None,
    )


def _environment(
    service_state: ServiceState,
    record: AttemptRecord,
    spec: JobSpec,
    folder: Path,
    endpoint_url: str,
) -> dict[str, str]:
    environment = {
        **spec.environment,
        "HOCKET_URL": endpoint_url,
        "HOCKET_ENDPOINT": str(folder / ENDPOINT),
        "HOCKET_JOB": str(record.job),
        "HOCKET_ATTEMPT": str(record.attempt),
        "HOCKET_TOKEN": record.token,
        "HOCKET_DEVICES": ",".join(record.devices),
        "HOCKET_DEVICE_TYPE": record.device_type,
    }
    if spec.space_sharing:
        environment["HOCKET_SPACE_SHARING"] = "1"
    plan = (spec.plans or {}).get(on_gang(spec, len(record.devices), record.device_type))
    if plan is not None:
        environment[PLAN_VARIABLE] = plan
    array_index = service_state.jobs[record.job].array_index
    if array_index is not None:
        environment["HOCKET_ARRAY_INDEX"] = str(array_index)
    checkpoint = service_state.checkpoints.get(record.job)
    if checkpoint is not None:
        environment["HOCKET_CHECKPOINT"] = checkpoint.path
    return environment
