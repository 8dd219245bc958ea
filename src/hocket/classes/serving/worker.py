"""A worker process: one part, one core, one thread; it ends when the front end closes its socket.

It is started as ``python -m hocket.classes.serving.worker SPEC`` with descriptors of its socket,
the shared memory and the part. It loads neither torch nor the web server.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hocket.classes.serving.wire import ANSWER, READY, WAKE, InputLayout, finished
from hocket.classes.session import infer, open_session

Compute = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def main(spec: dict[str, Any]) -> None:
    """Load the part, report that it is ready, and answer requests."""
    if spec["core"] is not None:
        # On one core the part's data stay in the caches of that core.
        os.sched_setaffinity(0, [spec["core"]])
    layout = InputLayout(tuple(spec["shape"]), spec["dtype"])
    with open(spec["model"], "rb") as file:
        model = file.read()
    # A worker without a part answers at once, which measures the cost of reaching workers.
    compute = partial(infer, open_session(model)) if model else _nothing
    memory = mmap.mmap(spec["memory"], layout.total_bytes)
    slots = layout.slots(memory)
    # The first runs allocate memory, which must not delay a request.
    for _ in range(5):
        outputs = compute(np.zeros_like(slots[0]))
    with socket.socket(fileno=spec["socket"]) as channel:
        channel.send(ANSWER.pack(READY, 0) + _raw(outputs))
        _answer(channel, compute, memory, slots, spec["spin_s"])


def _answer(
    channel: socket.socket,
    compute: Compute,
    memory: mmap.mmap,
    slots: list[np.ndarray[Any, Any]],
    spin_s: float,
) -> None:
    while True:
        message = _next(channel, spin_s)
        if not message:
            return
        number, slot = WAKE.unpack(message)
        if number <= finished(memory):
            # Late already: an empty answer tells the front end that the slot is free.
            channel.send(ANSWER.pack(number, 0))
            continue
        start = time.perf_counter_ns()
        outputs = compute(slots[slot])
        spent_ns = time.perf_counter_ns() - start
        channel.send(ANSWER.pack(number, spent_ns) + _raw(outputs))


def _next(channel: socket.socket, spin_s: float) -> bytes:
    """Return the next message; poll for ``spin_s`` seconds before the core may sleep."""
    if spin_s:
        until_s = time.perf_counter() + spin_s
        while time.perf_counter() < until_s:
            try:
                return channel.recv(WAKE.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
    return channel.recv(WAKE.size)


def _nothing(inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.zeros((1, 2), dtype=np.float32)


def _raw(outputs: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(outputs[0], dtype=np.float32).tobytes()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except (ConnectionError, KeyboardInterrupt):
        sys.exit(0)
