"""A worker process: reads jobs as JSON lines, runs its tiles on shared memory, answers per tile.

Started as ``python -m hocket.loops.backends.worker CORE``. It gets the source of the kernel that
was made from the user's function and compiles it as the caller would, so the bits are the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, TextIO

from hocket.loops.backends.segments import AttachedArrays, plain_scalars, scalar_of
from hocket.loops.compile import CompileOptions, compiled


def main() -> None:
    """Serve until the caller closes the pipe."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {int(sys.argv[1])})
    # What the user's code prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(sys.stdin, answers)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests one after another."""
    attached = AttachedArrays()
    job: dict[str, Any] = {}
    arguments: list[Any] = []
    orders: list[Any] = []
    for line in requests:
        request = json.loads(line)
        try:
            if "job" in request:
                job = request["job"]
                arguments = [
                    attached.get(job["arrays"][name]) if name in job["arrays"]
                    else scalar_of(job["scalars"][name])
                    for name in job["arguments"]
                ]  # fmt: skip
                orders = [attached.get(described) for described in job["orders"]]
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = {"result": _run(job, request["bounds"], orders, arguments)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error).partition("\n")[0]]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(
    job: dict[str, Any], bounds: list[int], orders: list[Any], arguments: list[Any]
) -> list[Any]:
    kernel = compiled(job["text"], CompileOptions(**job["options"]))
    found = kernel(*orders, *bounds, *arguments)
    if not found:
        return []
    numbered = {str(place): value for place, value in enumerate(found)}
    return list(plain_scalars(numbered).values())


if __name__ == "__main__":
    main()
