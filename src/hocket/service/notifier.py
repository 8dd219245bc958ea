"""Notifies users outside the service that jobs have ended: by a webhook, by a command.

[notify]                                  # in the server's config
webhook = "https://chat.example/hook"     # gets a JSON object by POST
command = ["/usr/local/bin/mail-owner"]   # gets the same on standard input
on = "failure"                            # or "end"

One thread sends the notices in a queue. A notice that cannot be sent is retried twice and then
dropped.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import threading
import time
import urllib.request
from typing import Any

from hocket.service.daemon.service_state import ServiceState
from hocket.service.records import ENDED, JobRecord
from hocket.service.server_config import NotifyConfig
from hocket.service.store.tables import Batch

# Time limit of each try, number of tries, and length of the queue.
TIMEOUT_S = 10.0
TRIES = 3
MAX_WAITING = 1000
_RETRY_S = 1.0
_LOG = logging.getLogger("hocket.service")


class Notifier:
    """Sends notices of ended jobs; `observe` is called after each commit and never waits."""

    def __init__(self, config: NotifyConfig) -> None:
        self._config = config
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="fleet-notifies", daemon=True)
        self._thread.start()

    def observe(self, service_state: ServiceState, batch: Batch) -> None:
        """Queue notices of jobs that ended with a commit."""
        for job in batch.jobs:
            if job.status in ENDED and self._is_wanted(job):
                try:
                    self._waiting.put_nowait(notice_of(job))
                except queue.Full:
                    _LOG.warning("too many notices wait; that of job %d is dropped", job.number)

    def close(self) -> None:
        """Stop after the notice that is being sent."""
        with self._waiting.mutex:
            self._waiting.queue.clear()
        self._waiting.put(None)
        self._thread.join(TIMEOUT_S)

    def _is_wanted(self, job: JobRecord) -> bool:
        return self._config.on == "end" or job.status in ("failed", "timed out")

    def _send_all(self) -> None:
        while (notice := self._waiting.get()) is not None:
            data = json.dumps(notice).encode()
            if self._config.webhook:
                self._try(lambda data=data: _post(self._config.webhook, data))
            if self._config.command:
                self._try(lambda data=data: _run(self._config.command, data))

    @staticmethod
    def _try(send: Any) -> None:
        for attempt in range(TRIES):
            try:
                send()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                # The delay grows with each try; there is none after the first.
                _LOG.warning("a notice could not be sent: %s", error)
                time.sleep(_RETRY_S * attempt)
            else:
                return


def notice_of(job: JobRecord) -> dict[str, Any]:
    """Notice about a job."""
    word = "has timed out" if job.status == "timed out" else f"has {job.status}"
    if job.status == "cancelled":
        word = "was cancelled"
    return {
        "job": job.number,
        "name": job.spec.name,
        "status": job.status,
        "user": job.owner,
        "team": job.spec.team,
        "message": job.message,
        "attempt": job.attempt,
        "submitted_s": job.submitted_s,
        "ended_s": job.ended_s,
        # Chat programs show this field of a webhook.
        "text": f"job {job.number} ({job.spec.name}) of {job.owner or 'nobody'} {word}"
        + (f": {job.message}" if job.message else ""),
    }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none: the notice is for the named address."""


def _post(url: str, data: bytes) -> None:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(_NoRedirects)
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        answer.read(1000)


def _run(command: tuple[str, ...], data: bytes) -> None:
    subprocess.run(
        command, input=data, timeout=TIMEOUT_S, check=True, stdout=subprocess.DEVNULL, cwd="/"
    )
