"""Answers in a process of their own, which takes no time from the one that decides.

It is started by the first question and asked through its pipes, one question at a time: a line of
JSON that says how long the packed state behind it is, and a line of JSON back. It yields to
everything else on the machine (`nice`). One that dies or takes too long is started anew for the
next question; it ends by itself when the daemon's end of the pipe is closed, however that came.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from hocket.base import config
from hocket.base.errors import UsageError
from hocket.fleet.rounds.state import State
from hocket.service.errors import UnavailableError
from hocket.service.outlook.outlook import Outlook
from hocket.service.store import snapshot

PATIENCE_S = 60.0
"""The first answer includes the start of the process; a machine may be busy with better things."""
_PROGRAM = "hocket.service.outlook.answerer"


class ProcessOutlook(Outlook):
    """An `Outlook` beside this process."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        super().__init__(self._ask_child)
        self._patience_s = patience_s
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._starting = threading.Lock()
        """A process that is started while the service ends must not outlive it."""

    def close(self) -> None:
        """End the process, and with it the question that it works on."""
        with self._starting:
            self._is_closed = True
            child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _ask_child(
        self, question: str, state: State, time_s: float, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        child = self._living()
        packed = snapshot.pack(state)
        head = {
            "question": question, "time_s": time_s, "asked": dict(asked), "bytes": len(packed),
        }  # fmt: skip
        impatience = threading.Timer(self._patience_s, child.kill)
        impatience.start()
        try:
            answer = _exchange(child, json.dumps(head).encode() + b"\n" + packed)
        except (OSError, ValueError):
            self._child = None
            _end(child)
            hint = "try again; the fleet itself goes on"
            raise UnavailableError("no answer was found in time", hint=hint) from None
        finally:
            impatience.cancel()
        if "failure" in answer:
            raise UnavailableError(f"no answer could be found: {answer['failure']}")
        if "error" in answer:
            raise UsageError(answer["error"], hint=answer["hint"])
        found: dict[str, Any] = answer["found"]
        return found

    def _living(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._is_closed:
                raise UnavailableError("the service ends")
            self._child = self._child or _started()
            return self._child


def _started() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env=config.environment_anywhere(),
            start_new_session=True,
        )
    except OSError as error:
        raise UnavailableError(f"nobody can be asked: {error.strerror}") from None


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        # What could not be written is written once more by closing.
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    child.wait()


def _exchange(child: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
    assert child.stdin is not None, "it was started with pipes"
    assert child.stdout is not None, "it was started with pipes"
    child.stdin.write(request)
    child.stdin.flush()
    answer: dict[str, Any] = json.loads(child.stdout.readline())
    return answer
