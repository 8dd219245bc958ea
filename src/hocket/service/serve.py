"""The service as a process: daemon and web server, until SIGTERM or SIGINT.

Running jobs continue when the process ends, for whatever reason. The next service on the same
folder takes them over.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import ipaddress
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import uvicorn

from hocket.base.errors import InputFileError, UsageError, system_reason, unknown_name
from hocket.fleet.rounds.state import FleetDevice, Rules
from hocket.fleet.throughputs.table import Throughputs
from hocket.service.daemon import Daemon
from hocket.service.endpoint import read_endpoint, write_endpoint
from hocket.service.executors.agent_executor import LEASE_S, AgentExecutor
from hocket.service.executors.isolation import make_private
from hocket.service.executors.local import LocalExecutor, end_set_aside
from hocket.service.executors.local_devices import with_cuda_indexes
from hocket.service.forecasts.process import ForecastProcess
from hocket.service.local_socket import LocalSocket
from hocket.service.pinned_tls import ServerTls, open_tls
from hocket.service.ray_agents import RayDriver
from hocket.service.rest.app import make_app
from hocket.service.rest.prompt import MAX_CONNECTIONS, PromptProtocol
from hocket.service.rest.stream import EventNotifier
from hocket.service.server_config import ServerConfig
from hocket.service.store import Store
from hocket.service.tokens import Holder, Tokens

if TYPE_CHECKING:
    from hocket.service.executors.executor import Executor

# Connections that wait to be accepted.
_BACKLOG = 128
_MAX_HEADER_BYTES = 32768
# Time that open requests get on shutdown.
_SHUTDOWN_S = 5
# Time limit of a TLS handshake.
HANDSHAKE_S = 10.0
SWITCH_S = 0.001
"""Interval after which Python switches between threads."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a service."""

    folder: Path
    on: str = "local"
    devices: tuple[FleetDevice, ...] = ()
    device_types: tuple[str, ...] = ()
    """Device types in the order of tables; empty for those that the engine has at the start."""
    rules: Rules = field(default_factory=Rules)
    host: str = "127.0.0.1"
    port: int = 0
    """Port; 0 for the last used one if it is free, else any."""
    names: tuple[str, ...] = ()
    """Host names of the service besides the loopback ones."""
    is_remote_allowed: bool = False
    tls: tuple[str, int] | None = None
    """Host and port of the additional TLS listener for other machines; None for none."""
    agent_lease_s: float = LEASE_S
    discards_state: bool = False
    config: ServerConfig = field(default_factory=ServerConfig)
    reference: Throughputs | None = None
    """Throughputs of other jobs, from which those of unknown jobs are estimated."""


class Serving(NamedTuple):
    """Addresses of a running service."""

    url: str
    login: str
    """URL that logs a browser in, once."""
    secure_url: str = ""
    fingerprint: str = ""


def serve(settings: ServeSettings, on_ready: Callable[[Serving], None]) -> None:
    """Serve a fleet until SIGTERM or SIGINT; ``on_ready`` gets the address once it answers."""
    make_private()
    check_engine(settings.on, settings.devices)
    _check_host(settings)
    # The daemon's thread holds the GIL for long periods. With the default switch interval of 5 ms,
    # each switch between threads while a request is served would wait that long.
    sys.setswitchinterval(SWITCH_S)
    store = Store.open(settings.folder, discard=settings.discards_state)
    try:
        tokens = Tokens(store.folder, local=Holder(name=_user_name(), role="admin"))
        with contextlib.ExitStack() as opened:
            listener = _bound(settings.host, settings.port, _last_port(store.folder))
            opened.enter_context(listener)
            secure = None
            if settings.tls is not None:
                secure = SecureListener(_bound(*settings.tls, 0), open_tls(store.folder))
                opened.enter_context(secure.listener)
            executor = open_engine(settings, store.folder, secure)
            opened.callback(executor.close)
            _run(settings, store, executor, tokens, listener, secure, on_ready)
    finally:
        store.close()


class SecureListener(NamedTuple):
    """A socket where the service is reached by TLS."""

    listener: socket.socket
    tls: ServerTls


# Engines by name; ``ray`` may be followed by an address.
ENGINES = ("local", "agents", "ray", "slurm")
JOINED = ("agents", "ray")
"""Engines whose machines each join through an agent."""


def check_engine(on: str, devices: tuple[FleetDevice, ...]) -> None:
    """Raise `UsageError` for an engine that is unknown or cannot be used like this."""
    name = engine_name(on)
    if name == "local" and not devices:
        hint = "name what jobs share, such as --devices v100:2,p100:2 or --devices cpu:4"
        raise UsageError(
            "no GPU was found that may be used, so local jobs need --devices", hint=hint
        )
    if name != "local" and devices:
        hint = f"leave it out: {name} knows its own; --device-types says which come first"
        raise UsageError(f"--devices is not for {name}", hint=hint)


def engine_name(on: str) -> str:
    """``ray`` of ``ray://10.0.0.1:6379``; raises `UsageError` for an unknown engine."""
    name = on.partition("://")[0]
    if name not in ENGINES or ("://" in on and name != "ray"):
        raise unknown_name("engine", on, ENGINES)
    return name


def open_engine(settings: ServeSettings, folder: Path, secure: SecureListener | None) -> Executor:
    """The engine of a service; ``secure`` is where its machines join."""
    name = engine_name(settings.on)
    if name in JOINED:
        assert secure is not None, "machines join by TLS"
        url, fingerprint = _secure_url(settings, secure), secure.tls.fingerprint
        return AgentExecutor(folder / "agents", url, fingerprint, lease_s=settings.agent_lease_s)
    if name == "slurm":
        from hocket.service.executors.slurm import SlurmExecutor

        return SlurmExecutor(folder / "attempts", device_types=settings.device_types)
    end_set_aside(folder)
    return LocalExecutor(folder / "attempts", with_cuda_indexes(settings.devices))


def _run(
    settings: ServeSettings,
    store: Store,
    executor: Executor,
    tokens: Tokens,
    listener: socket.socket,
    secure: SecureListener | None,
    on_ready: Callable[[Serving], None],
) -> None:
    url = _url(settings, listener)
    daemon = Daemon(
        store,
        executor,
        settings.rules,
        settings.device_types
        or tuple(sorted({device.device_type for device in executor.poll().devices})),
        config=settings.config,
        endpoint_url=url,
        # Local devices are all there will be, so larger jobs are refused. Other engines may get
        # more devices later.
        capacity=Counter(one.device_type for one in settings.devices)
        if settings.on == "local"
        else None,
        reference=settings.reference,
        shares_devices=engine_name(settings.on) != "slurm",
    )
    write_endpoint(store.folder, url)
    daemon.start()
    forecaster = ForecastProcess()
    local_socket = LocalSocket(store.folder, tokens.local_token)
    closing = contextlib.ExitStack()
    for opened in (daemon, forecaster, local_socket):
        closing.callback(opened.close)
    with closing:
        agents = executor if isinstance(executor, AgentExecutor) else None
        hosts = (settings.host, *settings.names)
        serving = Serving(url, f"{url}/login?code={tokens.make_link(tokens.local)}")
        if secure is not None and settings.tls is not None:
            hosts = (*hosts, settings.tls[0], socket.gethostname())
            serving = serving._replace(
                secure_url=_secure_url(settings, secure), fingerprint=secure.tls.fingerprint
            )
            if engine_name(settings.on) == "ray":
                address = settings.on.removeprefix("ray").removeprefix("://") or "auto"
                driver = RayDriver(address, store.folder, serving.secure_url, serving.fingerprint)
                closing.callback(driver.close)
        app = make_app(daemon, tokens, hosts=hosts, forecaster=forecaster, agents=agents)
        server = _Server(
            server_config(app), app.state.event_notifier, lambda: on_ready(serving), secure
        )
        server.serve_on(listener)


def _user_name() -> str:
    """Name of the user who runs the service."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.geteuid()}"


def server_config(app: Any) -> uvicorn.Config:
    """Settings of the web server: its limits, and nothing logged of requests."""
    return uvicorn.Config(
        app,
        http=PromptProtocol,
        ws="none",
        lifespan="on",
        # Proxies are not supported: headers in which a proxy names the caller are ignored.
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="error",
        # Idle connections count for this limit too; `PromptProtocol` closes those.
        limit_concurrency=MAX_CONNECTIONS + 1,
        backlog=_BACKLOG,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
    )


class QuietServer(uvicorn.Server):
    """A server that reports when it answers, and shuts down without output."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT; returns normally after both."""
        # The base class raises the received signals again at its end; these handlers ignore them.
        before = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self.run(sockets=[listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down. Signals that follow change nothing: uvicorn would drop what it ends
        in the middle, with a traceback, and the end is at most seconds away."""
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open for requests."""
        await super().startup(sockets)
        await self.open_more()
        self._on_ready()

    async def open_more(self) -> None:
        """Open further listeners before the server reports that it is ready."""


class _Server(QuietServer):
    """A server that also ends open streams on shutdown."""

    def __init__(
        self,
        config: uvicorn.Config,
        event_notifier: EventNotifier,
        on_ready: Callable[[], None],
        secure: SecureListener | None = None,
    ) -> None:
        super().__init__(config, on_ready)
        self._event_notifier = event_notifier
        self._secure = secure

    async def open_more(self) -> None:
        """Open the TLS listener."""
        if self._secure is not None:
            self._secure.listener.setblocking(False)
            made = await asyncio.get_running_loop().create_server(
                lambda: PromptProtocol(self.config, self.server_state, self.lifespan.state),
                sock=self._secure.listener,
                ssl=self._secure.tls.context,
                ssl_handshake_timeout=HANDSHAKE_S,
                backlog=_BACKLOG,
            )
            self.servers.append(made)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down."""
        self._event_notifier.close()
        super().handle_exit(sig, frame)


# ── addresses ────────────────────────────────────────────────────────────────────────────────────


def _check_host(settings: ServeSettings) -> None:
    if not is_loopback(settings.host) and not settings.is_remote_allowed:
        raise UsageError(
            f"--host {settings.host} can be reached from other machines",
            hint="add --allow-remote if that is wanted; traffic is not encrypted",
        )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _last_port(folder: Path) -> int:
    try:
        return urlsplit(read_endpoint(folder)).port or 0
    except (UsageError, InputFileError, ValueError):
        return 0


def _bound(host: str, port: int, last_port: int) -> socket.socket:
    """A listening socket, on the last port if it is free, since running jobs know that one."""
    for wanted in (port,) if port else (last_port, 0):
        try:
            return listening_socket(host, wanted)
        except OSError as error:
            reason = system_reason(error)
            if wanted == 0 or port:
                hint = (
                    "leave out --port for a free one" if port else "--host is one of this machine"
                )
                raise UsageError(
                    f"cannot listen on {host}{f' port {port}' if port else ''}: {reason}", hint=hint
                ) from None
    raise AssertionError("a port is always tried")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address; raises `OSError` if that fails."""
    # The protocol is given explicitly, since asyncio sets TCP_NODELAY only for sockets whose
    # protocol is TCP. Without it every response takes 40 ms more.
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _url(settings: ServeSettings, listener: socket.socket) -> str:
    """The address under which jobs of this machine reach the service."""
    return _address("http", settings.host, settings.names, "127.0.0.1", listener)


def _secure_url(settings: ServeSettings, secure: SecureListener) -> str:
    """The address under which other machines reach the service."""
    assert settings.tls is not None
    name = socket.gethostname()
    return _address("https", settings.tls[0], settings.names, name, secure.listener)


def _address(
    scheme: str, host: str, names: tuple[str, ...], otherwise: str, listener: socket.socket
) -> str:
    if host in ("0.0.0.0", "::"):
        host = names[0] if names else otherwise
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listener.getsockname()[1]}"
