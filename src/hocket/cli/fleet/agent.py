"""``hocket fleet agent``: join a fleet service as a machine that runs jobs."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Annotated

from hocket.base.errors import UsageError
from hocket.cli.declare import FOLDER, declare, option
from hocket.cli.fleet.given import parse_cluster
from hocket.cli.output import say


@declare("agent")
def command(
    *,
    url: Annotated[str, option("The service.", "--join", metavar="https://HOST:PORT")],
    token: Annotated[
        str | None,
        "Token of hocket fleet token add NAME --role agent. [default: HOCKET_FLEET_TOKEN]",
    ] = None,
    fingerprint: Annotated[str, "Of its certificate, as serve prints it."],
    name: Annotated[
        str | None, "NAME of the token, under which this machine is known. [default: its hostname]"
    ] = None,
    devices: Annotated[
        str | None,
        option(
            "Devices of this machine, such as v100:2. [default: the GPUs that nvidia-smi lists]",
            metavar="TYPE:COUNT,...",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        option("Folder of this agent. [default: hocket/agent below XDG_STATE_HOME]", type=FOLDER),
    ] = None,
    as_json: bool,
) -> None:
    """Run jobs on this machine for the service at --join, until Ctrl-C.

    Jobs go on while the agent or the service is restarted. If the agent cannot reach the service
    for half of its lease (serve --agent-lease), it ends its jobs, because the service may start
    them elsewhere.
    """
    from hocket.base.config import fleet_folder, fleet_token
    from hocket.service.agent import Agent, AgentClient
    from hocket.service.executors.local_devices import found_devices
    from hocket.service.pinned_tls import checked_fingerprint

    secret = token or fleet_token()
    if secret is None:
        raise UsageError("an agent needs a token", hint="give --token, or set HOCKET_FLEET_TOKEN")
    # The token would be readable on a plain connection.
    if not url.startswith("https://"):
        raise UsageError("agents join by https", hint="take the address that serve --tls prints")
    found = parse_cluster(devices, "--devices")[1] if devices else found_devices()
    if not found:
        hint = "name what jobs share, such as --devices v100:2 or --devices cpu:4"
        raise UsageError("no GPU was found that may be used", hint=hint)
    known_as = name or socket.gethostname()
    client = AgentClient(url, secret, checked_fingerprint(fingerprint), known_as)
    folder = fleet_folder().with_name("agent") if state is None else state
    agent = Agent(folder.absolute(), found, client)
    # SIGTERM is how systemd stops the agent; jobs keep running under their supervisors.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.close())
    try:
        agent.run(
            lambda: say(f"{known_as} has joined {url} with {len(found)} devices"),
            lambda trouble: say(f"trouble: {trouble}"),
        )
    finally:
        agent.release()
