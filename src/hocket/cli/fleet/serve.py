"""``hocket fleet serve``: run the scheduler's daemon with its page and REST API."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from hocket.base.errors import UsageError
from hocket.base.extras import require
from hocket.cli.declare import FOLDER, declare, option
from hocket.cli.fleet.connection import state_folder
from hocket.cli.fleet.given import Round, parse_cluster
from hocket.cli.fleet.simulate import NUM_KERNELS
from hocket.cli.options import ADDRESS, FiniteRange
from hocket.cli.output import emit, say
from hocket.cli.sources import announce_compilation

if TYPE_CHECKING:
    from hocket.fleet.rounds.state import FleetDevice
    from hocket.service.serve import Serving


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """Options of the daemon."""

    on: Annotated[
        str,
        option(
            "What runs the jobs: local (processes of this machine), agents (machines that join by "
            "hocket fleet agent; needs --tls), ray (nodes of the Ray cluster that this machine is "
            "part of; needs --tls), ray://HOST:PORT (of the head with the port that ray start "
            "prints) or slurm.",
            metavar="ENGINE",
        ),
    ] = "local"
    devices: Annotated[
        str | None,
        option(
            "Devices by type, such as v100:2,p100:2; TYPE:COUNTxSIZE for servers of SIZE devices. "
            "[default for local: the GPUs that nvidia-smi lists, as far as CUDA_VISIBLE_DEVICES "
            "names them] Refused for Ray and Slurm, which know their own.",
            metavar="TYPE:COUNT,...",
        ),
    ] = None
    device_types: Annotated[
        str | None,
        option(
            "Device types of Ray or Slurm, the fastest first. [default: those there at the start]",
            metavar="TYPE,...",
        ),
    ] = None
    state: Annotated[
        Path | None,
        option("Folder of the state. [default: hocket/fleet below XDG_STATE_HOME]", type=FOLDER),
    ] = None
    policy: Annotated[str, "How devices are shared; hocket fleet allocate --help lists them."] = (
        "las"
    )
    round_s: Round = 360.0
    reserve_after_s: Annotated[
        float | None,
        option(
            "Wait after which devices are reserved for a job of several that others keep from "
            "starting.  [default: two rounds or the median job, whichever is larger]",
            "--reserve-after",
            type=FiniteRange(min=0.0, max=1e9),
            metavar="SECONDS",
        ),
    ] = None
    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    port: Annotated[
        int,
        option(
            "Port to listen on. [default: that of the last time, or a free one]",
            type=click.IntRange(0, 65535),
        ),
    ] = 0
    names: Annotated[
        tuple[str, ...],
        option(
            "A name that the service is reached under, beside localhost; may be given again.",
            "--name",
        ),
    ] = ()
    allow_remote: Annotated[
        bool,
        "Let --host be an address that other machines reach; the token is still needed.",
    ] = False
    tls: Annotated[
        tuple[str, int] | None,
        option(
            "Also listen here with TLS, for agents and users of other machines; the certificate "
            "is made at the first start and known by its fingerprint, which is printed.",
            type=ADDRESS,
        ),
    ] = None
    agent_lease_s: Annotated[
        float,
        option(
            "An agent without news for so long is lost; its jobs end themselves before that.",
            "--agent-lease",
            type=FiniteRange(min=2.0, max=3600.0),
            metavar="SECONDS",
        ),
    ] = 45.0
    config: Annotated[Path | None, "TOML file that says what users and teams may ask for."] = None
    throughputs: Annotated[
        Path | None,
        option(
            "Table of throughputs of other jobs, from which those of jobs with estimate = true "
            "follow (Gavel's JSON; hocket fleet throughputs writes one).",
            metavar="FILE",
        ),
    ] = None
    discard_state: Annotated[
        bool, "Set aside what is in the state folder, even if damaged, and begin without jobs."
    ] = False


@declare("serve")
def command(
    *,
    request: ServeRequest,
    as_json: bool,
) -> None:
    """Run jobs on devices until Ctrl-C. Jobs go on when the service ends; the next service on the
    same state folder takes them over.

    Commands of the same user find it by the state folder; others need a token (hocket fleet token
    add). The link that is printed opens the page once; hocket fleet login prints another.
    """
    from hocket.fleet.policies import find_policy

    # Checked first, because the imports below would fail with a traceback if the extra is missing.
    for package in ("fastapi", "uvicorn", "jinja2", "prometheus_client"):
        require(package, "hocket fleet serve")
    find_policy(request.policy)
    if request.devices and request.device_types:
        hint = "leave it out: --devices names the device types, in that order"
        raise UsageError("--device-types is for agents, Ray and Slurm", hint=hint)
    named, found = (
        parse_cluster(request.devices, "--devices")
        if request.devices
        else (_device_types(request.device_types), ())
    )
    if request.on == "local" and not request.devices:
        named, found = _found_here(named)

    with _no_garbage_collection():
        from hocket.service.executors.local_devices import limit_warnings
        from hocket.service.serve import ServeSettings, check_engine, serve
        from hocket.service.server_config import read_server_config
    from hocket.fleet.rounds.state import Rules
    from hocket.fleet.throughputs import read_throughputs

    folder = state_folder(request.state).absolute()

    def tell(serving: Serving) -> None:
        url, link, secure_url, fingerprint = serving
        if as_json:
            secure = {"secure_url": secure_url, "fingerprint": fingerprint} if secure_url else {}
            emit({"url": url, "state": folder, "login": link, **secure})
            return
        say(f"serving the fleet of {folder} at {url} (Ctrl-C ends it; jobs go on)")
        say(f"open {link} within ten minutes; it works once")
        if request.on == "agents":
            say("on each machine, with a token of hocket fleet token add NAME --role agent:")
            say(f"  hocket fleet agent --join {secure_url} --fingerprint {fingerprint} --token ...")
        elif secure_url:
            say(f"from other machines: --url {secure_url}, HOCKET_FLEET_FINGERPRINT={fingerprint}")

    check_engine(request.on, found)
    if request.tls is not None:
        require("cryptography", "--tls")
    elif request.on.startswith(("agents", "ray")):
        hint = "add --tls HOST:PORT with an address of this machine, such as 10.0.0.1:7443"
        raise UsageError(f"the machines of --on {request.on} join by TLS", hint=hint)
    settled = read_server_config(request.config)
    for warning in limit_warnings(found, settled) if request.on == "local" else ():
        say(f"warning: {warning}")
    announce_compilation(about=NUM_KERNELS)
    serve(
        ServeSettings(
            folder=folder,
            on=request.on,
            devices=found,
            device_types=named,
            rules=Rules(
                policy=request.policy,
                round_s=request.round_s,
                reserve_after_s=request.reserve_after_s,
            ),
            host=request.host,
            port=request.port,
            names=request.names,
            is_remote_allowed=request.allow_remote,
            tls=request.tls,
            agent_lease_s=request.agent_lease_s,
            discards_state=request.discard_state,
            config=settled,
            reference=None
            if request.throughputs is None
            else read_throughputs(request.throughputs),
        ),
        tell,
    )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector while modules load.

    Loading creates objects but no garbage, and collector passes would take a tenth of the start-up
    time of a restarted service.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Modules live as long as the process: later collections need not traverse them.
        gc.freeze()
        if was_enabled:
            gc.enable()


def _found_here(device_types: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[FleetDevice, ...]]:
    """Find device types and devices of this machine. Print them, because jobs name the types."""
    from hocket.service.executors.local_devices import found_devices

    if device_types:
        hint = "leave it out: the GPUs of this machine tell their types"
        raise UsageError("--device-types is for agents, Ray and Slurm", hint=hint)
    devices = found_devices()
    if devices:
        say(f"found {', '.join(device.name for device in devices)}")
    return tuple(dict.fromkeys(device.device_type for device in devices)), devices


def _device_types(text: str | None) -> tuple[str, ...]:
    device_types = tuple(part.strip() for part in text.split(",")) if text else ()
    if not all(device_types) or len(set(device_types)) < len(device_types):
        raise UsageError(f"cannot read --device-types {text!r}", hint="write each once: v100,p100")
    return device_types
