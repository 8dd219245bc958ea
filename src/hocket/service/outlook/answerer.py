"""The other side of `ProcessOutlook`: answers what comes by standard input, until it ends."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import IO, Any

from hocket.base.errors import HocketError
from hocket.service.executors.isolation import make_private
from hocket.service.outlook.questions import answered
from hocket.service.store import snapshot

NICENESS = 10
"""Rounds and jobs go first."""


def answer_all(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until nobody asks any more."""
    while line := requests.readline():
        head = json.loads(line)
        packed = requests.read(head["bytes"])
        if len(packed) < head["bytes"]:
            return
        answers.write(json.dumps(_answer(head, packed)).encode() + b"\n")
        answers.flush()


def _answer(head: dict[str, Any], packed: bytes) -> dict[str, Any]:
    try:
        state = snapshot.unpack(packed)
        return {"found": answered(head["question"], state, head["time_s"], head["asked"])}
    except HocketError as error:
        return {"error": error.message, "hint": error.hint}
    except Exception as error:
        # The next question may fare better.
        return {"failure": repr(error)}


def main() -> None:
    """Answer what comes in by standard input."""
    make_private()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        answer_all(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
