"""``hocket fleet submit``: submit a job file to the service, and plan its model if it names one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hocket.cli.declare import argument, declare, option
from hocket.cli.fleet.connection import Service, follow
from hocket.cli.output import answer, emit, say, working

if TYPE_CHECKING:
    from hocket.service.client import FleetClient
    from hocket.service.spec import JobSpec


@declare("submit")
def command(
    *,
    job_file: Annotated[Path, argument("JOB.toml")],
    follows: Annotated[
        bool,
        option(
            "Show its output until it has ended; that of an array job by job, in order.", "--follow"
        ),
    ] = False,
    service: Service,
    as_json: bool,
) -> None:
    """Submit the job of JOB.toml. Once it is accepted it is not lost.

    \b
    name = "resnet"
    command = ["python", "train.py"]     # run as it is, never through a shell; a bare python is
                                         # the one that submits
    folder = "."                         # where it runs, as seen from JOB.toml
    gang = 1                             # devices that it needs, all together
    total_steps = 450000
    resume = ["--resume", "latest"]      # added from the second attempt on
    preemptible = true                   # may be stopped for others [default: where it has resume
                                         # or a lease; else it runs from its start to its end]
    [throughputs]                        # steps per second, where known
    v100 = 10.5

    With model = "package.module:function" (or a model of the zoo) and batch = N in place of
    throughputs, the model's step is planned for every device type of the fleet. The command finds
    the plan for the devices that it got in HOCKET_PLAN, as hocket.prepare does by itself.
    """
    client = service.connect()
    body = _body(job_file, client)
    # A service elsewhere may have other paths, so only a local one gets this interpreter.
    if service.url is None:
        body["command"] = _with_this_python(body["command"])
    with working("handing the job to the service"):
        job = client.submit(body)
    if not as_json:
        say(f"job {job['id']} is {job['status']}; see hocket fleet explain {job['id']}")
    if not follows:
        answer(as_json, job, str(job["id"]))
        return
    jobs = [
        _followed(client, number, body.get("array"), as_json)
        for number in range(job["id"], job["id"] + body.get("array", 1))
    ]
    if as_json:
        emit({"jobs": jobs} if "array" in body else jobs[0])
    _check_succeeded(jobs)


def _followed(client: FleetClient, number: int, array: int | None, as_json: bool) -> dict[str, Any]:
    """Follow a job to its end and return it; the output is written meanwhile unless JSON is
    wanted."""
    if array is not None and not as_json:
        say(f"output of job {number}:")
    return follow(client, number, _discard if as_json else write_out)


def write_out(block: bytes) -> None:
    """Write a job's output to stdout unchanged, as bytes."""
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()


def _discard(block: bytes) -> None:
    pass


def _body(job_file: Path, client: FleetClient) -> dict[str, Any]:
    from hocket.service.spec import read_spec

    spec = read_spec(job_file)
    if spec.model is not None and spec.plans is None:
        spec = _planned(spec, job_file, client)
    body: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    if spec.folder is not None:
        # A relative folder is relative to the job file, not to the working directory of the
        # command.
        body["folder"] = str((job_file.absolute().parent / spec.folder).resolve())
    if spec.plans is not None:
        folder = job_file.absolute().parent
        body["plans"] = {
            device_type: str((folder / name).resolve()) for device_type, name in spec.plans.items()
        }
    return body


def _with_this_python(command: list[str]) -> list[str]:
    """Replace a bare ``python`` by the interpreter that runs this command.

    The service has another PATH, and hocket may be run from an environment that is not activated.
    """
    if command[0] not in ("python", "python3") or not sys.executable:
        return command
    say(f"python is {sys.executable}; name a path in command for another one")
    return [sys.executable, *command[1:]]


def _planned(spec: JobSpec, job_file: Path, client: FleetClient) -> JobSpec:
    """Plan the job's model for every device type of the fleet, in a folder beside its file.

    Returns the job with the plans and their throughputs.
    """
    from hocket.api.jobs import planned_job
    from hocket.cli.options import ModelOptions
    from hocket.cli.sources import announce_compilation, load_graph

    assert spec.model is not None
    device_types = sorted(
        {device["device_type"] for device in client.get("/v1/devices")["devices"]}
    )
    graph, _ = load_graph(spec.model, ModelOptions(batch=spec.batch), check=True)
    announce_compilation()
    folder = job_file.absolute().parent / f"{job_file.stem}.plans"
    with working(f"planning {spec.model} for {', '.join(device_types)}"):
        found = planned_job(spec, graph, device_types, folder)
    speeds = ", ".join(
        f"{device_type} {speed:.4g}" for device_type, speed in (found.throughputs or {}).items()
    )
    say(f"planned for this fleet, steps per second: {speeds}")
    return found


def _check_succeeded(jobs: list[dict[str, Any]]) -> None:
    from hocket.base.errors import RunError

    failed = [job for job in jobs if job["status"] != "succeeded"]
    if not failed:
        return
    first = failed[0]
    message = f": {first['message']}" if first["message"] else ""
    others = f"; {len(failed)} of {len(jobs)} jobs did not succeed" if len(jobs) > 1 else ""
    raise RunError(f"job {first['id']} {first['status']}{message}{others}")
