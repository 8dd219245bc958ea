"""The agent of a machine: runs attempts on this machine for a service on another machine.

``hocket fleet agent`` polls the service (`AgentExecutor.sync` is the other side), executes its
orders with a `LocalExecutor`, and sends output and checkpoints. After a restart it finds its
attempts in its folder. If the link is cut or this process is gone, supervisors end their attempts
when the lease in ``lease.json`` has expired.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from hocket.base.errors import HocketError, RunError, UsageError, system_reason
from hocket.fleet.rounds.state import FleetDevice
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.executor import EXITED, LOST, RUNNING, Assignment, AttemptName
from hocket.service.executors.local import LocalExecutor
from hocket.service.executors.local_devices import with_cuda_indexes
from hocket.service.pinned_tls import connection_to
from hocket.service.store.lock import FolderLock

CALL_S = 0.3
"""Seconds between two calls to the service; longer after a failed call."""
TIMEOUT_S = 10.0
CHUNK_BYTES = 512 * 1024
_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_WAIT_S = 2.0
_LOG = logging.getLogger("hocket.service")


class AgentClient:
    """Sends requests of an agent; each thread has its own connection, which stays open."""

    def __init__(self, url: str, token: str, fingerprint: str, name: str) -> None:
        self._parts = urlsplit(url)
        self._token, self._fingerprint = token, fingerprint
        self._prefix = f"{self._parts.path.rstrip('/')}/v1/agents/{quote(name, safe='')}"
        self._local = threading.local()

    def call(self, method: str, path: str, body: bytes | None, kind: str) -> bytes:
        """Body of the response to one request.

        Raises `RunError` if there was no response, and `UsageError` if the service refused.
        """
        connection = self._connection()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        try:
            connection.request(method, self._prefix + path, body, headers)
            answer = connection.getresponse()
            data = answer.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = system_reason(error) or type(error).__name__
            raise RunError(f"no answer from {self._parts.netloc}: {reason}") from None
        if answer.status >= 500:
            raise RunError(f"{self._parts.netloc} answered {answer.status}")
        if answer.status >= 300:
            detail = ""
            with contextlib.suppress(ValueError, AttributeError):
                detail = str(json.loads(data).get("detail", ""))
            raise UsageError(f"{self._parts.netloc} refuses: {detail or answer.status}")
        return data

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Response of the service to a JSON body."""
        data = self.call("POST", path, json.dumps(body).encode(), "application/json")
        try:
            content = json.loads(data)
        except ValueError:
            raise RunError(f"{self._parts.netloc} is no hocket fleet service") from None
        assert isinstance(content, dict)
        return content

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            found = connection_to(
                self._parts.scheme, self._parts.netloc, self._fingerprint, TIMEOUT_S
            )
            self._local.connection = found
        return found


class Agent:
    """Agent of one machine; ``folder`` belongs to it alone and keeps its state across restarts."""

    def __init__(self, folder: Path, devices: tuple[FleetDevice, ...], client: AgentClient) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._client = folder, client
        self._lock = FolderLock(folder)
        self._devices = with_cuda_indexes(devices)
        self._executor = LocalExecutor(folder / "attempts", self._devices)
        self._identity = _identity(folder / "identity")
        self._lease = folder / "lease.json"
        self._is_closing = threading.Event()
        self._sent_bytes: dict[AttemptName, int] = {}
        """Number of bytes of each log that the service has received."""
        self._is_sent: set[AttemptName] = set()
        """Ended attempts whose complete output the service has received."""
        self._ended: set[AttemptName] = set()
        self._checkpoints: dict[int, tuple[float, str]] = {}
        self._stored: dict[int, float] = {}
        """Step of the newest checkpoint of each job that the service has received."""

    def run(
        self,
        on_join: Callable[[], None],
        on_trouble: Callable[[str], None],
        patience_s: float = math.inf,
    ) -> None:
        """Call the service until closed, or until no call was answered for ``patience_s``.

        Jobs continue to run afterwards until their lease expires.
        """
        workers = [
            threading.Thread(target=self._repeat, args=(work,), name=f"agent-{name}", daemon=True)
            for name, work in (("logs", self._send_logs), ("checkpoints", self._send_checkpoints))
        ]
        for worker in workers:
            worker.start()
        trouble, has_joined = "", False
        answered_s = time.monotonic()
        while not self._is_closing.is_set() and time.monotonic() < answered_s + patience_s:
            try:
                self.step()
            except HocketError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    on_trouble(trouble)
                if isinstance(error, UsageError) and not has_joined:
                    raise
                self._is_closing.wait(_MAX_WAIT_S)
            else:
                if trouble or not has_joined:
                    on_join()
                trouble, has_joined, answered_s = "", True, time.monotonic()
                self._is_closing.wait(CALL_S)

    def close(self) -> None:
        """Stop the loop of calls."""
        self._is_closing.set()

    def release(self) -> None:
        """Release the folder; attempts continue to run."""
        self._executor.close()
        self._lock.close()

    def step(self) -> None:
        """Report attempts to the service once and execute its orders."""
        sent_s = files.boot_time_s()
        poll = self._executor.poll()
        over = {one.name for one in poll.attempts if one.phase in (EXITED, LOST)}
        statuses = [
            {
                "job": one.name.job, "attempt": one.name.attempt,
                # The output is part of an attempt: followers must receive all of it, so the attempt
                # counts as running until it is sent.
                "phase": RUNNING if one.name in over - self._is_sent else one.phase,
                "exit_code": one.exit_code, "detail": one.detail, "was_asked": one.was_asked,
            }
            for one in poll.attempts
        ]  # fmt: skip
        self._ended = over
        answer = self._client.ask(
            "/sync",
            {
                "identity": self._identity,
                "devices": [[device.name, device.device_type] for device in self._devices],
                "attempts": statuses,
            },
        )
        ends_s = sent_s + float(answer["ends_after_s"])
        if files.boot_time_s() >= ends_s:
            # After such a delay the orders in the response may be outdated.
            return
        files.renew_lease(self._lease, ends_s, float(answer["grace_s"]))
        self._checkpoints = {
            int(job): (float(step), str(path)) for job, step, path in answer["checkpoints"]
        }
        self._obey(answer)

    def _obey(self, answer: dict[str, Any]) -> None:
        for job, attempt, grace_s in answer["stops"]:
            self._executor.stop(AttemptName(job, attempt), float(grace_s))
        for job, attempt in answer["forgets"]:
            self._forget(AttemptName(job, attempt))
        for data in answer["starts"]:
            self._start(Assignment.from_data(data))

    def _start(self, assignment: Assignment) -> None:
        job = assignment.name.job
        own = self._folder / "jobs" / str(job)
        environment = dict(assignment.environment)
        checkpoint = environment.get("HOCKET_CHECKPOINT", "")
        if checkpoint and not os.path.exists(checkpoint):
            environment.pop("HOCKET_CHECKPOINT")
            with contextlib.suppress(HocketError, OSError, tarfile.TarError):
                if found := self._fetch(job, os.path.basename(checkpoint)):
                    environment["HOCKET_CHECKPOINT"] = str(found)
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self._log_file(assignment.name)
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._executor.start(
            assignment._replace(
                environment=environment,
                work_folder=own if assignment.has_own_folder else assignment.work_folder,
                log_file=log,
                lease_file=str(self._lease),
            )
        )

    def _forget(self, name: AttemptName) -> None:
        self._executor.forget(name)
        self._log_file(name).unlink(missing_ok=True)
        self._sent_bytes.pop(name, None)
        self._is_sent.discard(name)

    def _log_file(self, name: AttemptName) -> Path:
        return self._folder / "logs" / str(name.job) / f"attempt-{name.attempt}.log"

    # ── output ──

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._is_closing.is_set():
            try:
                work()
            except HocketError:
                self._is_closing.wait(_MAX_WAIT_S)
            except Exception:
                _LOG.exception("an agent could not send")
            self._is_closing.wait(CALL_S)

    def _send_logs(self) -> None:
        ended = set(self._ended)
        for path in sorted((self._folder / "logs").glob("*/attempt-*.log")):
            name = AttemptName(int(path.parent.name), int(path.stem.partition("-")[2]))
            if name in self._is_sent:
                continue
            try:
                is_whole = self._send_log(name, path)
            except UsageError:
                # The service has given up the attempt, and other logs must not wait behind this
                # one.
                self._is_sent.add(name)
                continue
            if is_whole and name in ended:
                self._is_sent.add(name)
        # An attempt that never printed has no log file.
        self._is_sent |= {name for name in ended if not self._log_file(name).exists()}

    def _send_log(self, name: AttemptName, path: Path) -> bool:
        """Send the next part of a log; True if the service now has all that has been written."""
        sent = self._sent_bytes.get(name, 0)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            # The middle of a log that reached its limit was dropped; new output is at its end.
            file.seek(min(sent, size_bytes))
            data = file.read(CHUNK_BYTES)
            if name in self._sent_bytes and not data:
                return True
            query = f"/logs/{name.job}/{name.attempt}?offset={sent}"
            answer = json.loads(self._client.call("POST", query, data, "application/octet-stream"))
            self._sent_bytes[name] = int(answer["size_bytes"])
            return self._sent_bytes[name] >= size_bytes
        return True

    # ── checkpoints ──

    def _send_checkpoints(self) -> None:
        for job, (step, path) in list(self._checkpoints.items()):
            if self._stored.get(job) != step and self._is_in_its_folder(job, path):
                with _packed(path) as file:
                    offset = 0
                    while data := file.read(CHUNK_BYTES):
                        query = f"/checkpoints/{job}?step={step!r}&offset={offset}"
                        self._client.call("POST", query, data, "application/octet-stream")
                        offset += len(data)
                query = f"/checkpoints/{job}?step={step!r}&offset={offset}&is_whole=true"
                self._client.call("POST", query, b"", "application/octet-stream")
                self._stored[job] = step

    def _is_in_its_folder(self, job: int, path: str) -> bool:
        """True if ``path`` is inside the folder of its job.

        The path comes from the job, and this process may read files that the job may not.
        """
        own = os.path.realpath(self._folder / "jobs" / str(job))
        real = os.path.realpath(path)
        return os.path.exists(real) and os.path.commonpath([own, real]) == own

    def _fetch(self, job: int, name: str) -> Path | None:
        """Local folder with the newest checkpoint that the service has of a job; None if there is
        none.
        """
        target = self._folder / "jobs" / str(job) / "fetched"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700, parents=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            kind, offset = "application/octet-stream", 0
            while data := self._client.call(
                "GET", f"/checkpoints/{job}?offset={offset}", None, kind
            ):
                file.write(data)
                offset += len(data)
            file.seek(0)
            with tarfile.open(fileobj=file) as archive:
                archive.extractall(target, filter="data")
        found = target / name
        return found if found.exists() else None


@contextlib.contextmanager
def _packed(path: str) -> Iterator[Any]:
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(path, os.path.basename(path), filter=_plain)
        file.seek(0)
        yield file


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Archive filter that keeps only files and folders, because a link may lead anywhere."""
    return entry if entry.isreg() or entry.isdir() else None


def _identity(path: Path) -> str:
    """Unique identity of this agent, stored in its folder."""
    if not path.exists():
        path.write_text(os.urandom(16).hex())
    return path.read_text().strip()
