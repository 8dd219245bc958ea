"""Job specification: the file ``job.toml``, and the body of a request.

name = "resnet"
command = ["python", "train.py", "--epochs", "90"]   # run as it is, never through a shell
gang = 2
total_steps = 450000
resume = ["--resume", "latest"]                      # added from the second attempt on

[throughputs]                                        # steps per second of the whole gang
v100 = 10.5
p100 = 4.2
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from hocket.base.checked import checked
from hocket.base.errors import InputFileError
from hocket.base.fields import located
from hocket.base.jsonfile import read_bounded
from hocket.base.toml import parse_toml
from hocket.base.units import parse_bytes
from hocket.fleet.rounds.state import CONDITIONS

MAX_FILE_BYTES = 1_000_000

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
Key = Annotated[
    str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
]
# Strict: a number in quotes, or a yes that would count as 1, is a mistake.
Steps = Annotated[float, Field(gt=0.0, le=1e15, allow_inf_nan=False, strict=True)]
Rate = Annotated[float, Field(ge=0.0, le=1e15, allow_inf_nan=False, strict=True)]
Gang = Annotated[int, Field(ge=1, le=100_000, strict=True)]
After = Annotated[str, StringConstraints(min_length=1, max_length=210, pattern=r"^[^\x00]+$")]
Seconds = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False, strict=True)]


def _checked_memory(text: str) -> str:
    """A text with a number of bytes; raises `ValueError` for others."""
    if len(text) > 40 or not 2**20 <= parse_bytes(text) <= 2**60:
        raise ValueError("a memory limit is at least 1MiB, such as 16GiB")
    return text


Memory = Annotated[str, AfterValidator(_checked_memory)]


class JobSpec(BaseModel):
    """One job. Everything but ``name`` and ``command`` has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    command: Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]
    """Program and arguments; no shell reads them."""
    resume: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """Arguments that are added from the second attempt on."""
    folder: Text | None = None
    """Working folder of the command, an absolute path; None for a fresh folder of the job."""
    environment: Annotated[
        dict[Key, Annotated[str, Field(max_length=65536, pattern=r"^[^\x00]*$")]],
        Field(max_length=1000),
    ] = {}
    """Added to the few variables that a job inherits."""
    gang: Gang = 1
    """Devices that it needs, all together and of one device type."""
    gangs: Annotated[tuple[Gang, ...], Field(min_length=1, max_length=64)] | None = None
    """Numbers of devices of which it takes what is best as others come and go, in place of
    ``gang``. Its ``throughputs`` and ``plans`` are then by number and device type, such as
    ``2xv100``."""
    processes: Annotated[str, Field(pattern=r"^(one|per-device)$")] = "one"
    """One process that sees the whole gang, or one per device with RANK, WORLD_SIZE and so on."""
    throughputs: Annotated[dict[Name, Rate], Field(max_length=1000)] | None = None
    """Steps per second of the whole gang by device type; a device type that is not named is not
    allowed. None where nothing is known: then every device type is allowed and counts the same
    until measured."""
    model: Text | None = None
    """A model of the zoo, ``package.module:function`` or a graph file, of which ``hocket fleet
    submit`` plans a step for every device type: it fills ``throughputs`` and ``plans``."""
    batch: Annotated[int, Field(ge=1, le=2**20, strict=True)] | None = None
    """Samples per step of the model, of the whole gang; None for the model's own."""
    plans: Annotated[dict[Name, Text], Field(max_length=1000)] | None = None
    """By device type, the plan file for a gang of it, which the command gets as ``HOCKET_PLAN``."""
    weight: Annotated[float, Field(ge=1e-6, le=1e6, strict=True)] = 1.0
    team: Annotated[str, Field(max_length=200)] = ""
    total_steps: Steps | None = None
    """None where it is not known when the job ends."""
    deadline_s: Seconds | None = None
    """From its submission."""
    grace_s: Annotated[float, Field(ge=0.0, le=3600.0, strict=True)] = 30.0
    """Time from SIGTERM to SIGKILL."""
    preemptible: Annotated[bool, Field(strict=True)] | None = None
    """True if it may be stopped for others and started again. None: where it has arguments to
    resume with, or once it has shown that it saves (a lease with ``save``, or a checkpoint that it
    committed). One that may not keeps its devices from its start to its end."""
    time_limit_s: Annotated[float, Field(gt=0.0, le=1e9, strict=True)] | None = None
    """Time that it may hold devices, over all attempts; then it is stopped and has timed out. None
    for the server's default. Short jobs with a limit may fill gaps before reserved ones."""
    after: Annotated[tuple[After, ...], Field(max_length=100)] = ()
    """Jobs that must end first, by number or, for jobs that have not ended, by name: ``"12"`` or
    ``"12:ok"`` for success, ``"12:any"`` for any end, ``"12:failed"`` for failure. The number of an
    array means all of its jobs."""
    array: Annotated[int, Field(ge=1, le=1000, strict=True)] | None = None
    """Submit as many jobs, alike but for ``HOCKET_ARRAY_INDEX``, which counts from 0."""
    retries: Annotated[int, Field(ge=0, le=1000, strict=True)] | None = None
    """Times that it is started again after a failure; None for the server's limit."""
    priority: Annotated[str, Field(max_length=200, pattern=r"^[^\x00]*$")] = ""
    """Name of a priority class of the server; empty for the default one."""
    memory: Memory | None = None
    """Memory of all its processes on a machine, such as ``"16GiB"``: what uses more is killed. None
    for the server's default."""
    cpus: Annotated[float, Field(ge=0.01, le=100_000.0, strict=True)] | None = None
    """Limit in CPU cores; None for the server's default."""
    space_sharing: Annotated[bool, Field(strict=True)] = False
    """True if it may share its devices with one other job that says so too, where both together do
    more than in turns; it must save its work when it is stopped. Nothing isolates the two: each
    sees the whole device, and where their memory does not suffice one fails, is started again, and
    they do not share again."""
    estimate: Annotated[bool, Field(strict=True)] = False
    """True if speeds on device types that it was not on are estimated from those of the jobs in
    the server's table (``serve --throughputs``), by ``name`` and ``gang``."""
    silence_s: Annotated[float, Field(ge=1.0, le=1e9, strict=True)] | None = None
    """An attempt that reports nothing for so long is taken for stuck and stopped."""


def on_gang(spec: JobSpec, gang: int, device_type: str) -> str:
    """Key of ``gang`` devices of one type in a job's ``throughputs`` and ``plans``."""
    return device_type if spec.gangs is None else f"{gang}x{device_type}"


def parse_after(text: str) -> tuple[str, str]:
    """Number or name of a job, and the condition on its end."""
    reference, _, condition = text.rpartition(":")
    return (reference, condition) if reference and condition in CONDITIONS else (text, "ok")


def is_preemptible(spec: JobSpec) -> bool | None:
    """True if a job may be preempted; None if its file leaves that open."""
    return True if spec.preemptible is None and spec.resume else spec.preemptible


def _is_pipe(path: str | Path) -> bool:
    """True if a file is a named pipe, which may never get a writer.

    Pipes that a shell makes (``<(...)``) have a writer and do not count.
    """
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode) and not str(path).startswith("/dev/")
    except (OSError, ValueError):
        return False


def read_spec(path: str | Path) -> JobSpec:
    """The job of a TOML file; raises `InputFileError` where it cannot be used."""
    if _is_pipe(path):
        hint = "write it to a file first"
        raise InputFileError("this is a pipe, which may never end", hint=hint, where=str(path))
    data = read_bounded(path, MAX_FILE_BYTES, lambda head: b"\x00" not in head, "TOML")
    with located(str(path)):
        content = parse_toml(data)
        if "gang" in content and "gangs" in content:
            raise InputFileError(
                "a job has a gang or gangs, not both", hint="leave out gang: gangs are tried"
            )
    hint = "docs/how-to/fleet_service.md shows a job file"
    return checked(JobSpec, content, str(path), hint=hint)
