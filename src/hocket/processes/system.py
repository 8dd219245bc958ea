"""Read process states of Linux, and send signals that cannot reach a wrong process.

Process ids are reused, so a process is identified by its id and its start time, and is signalled
through a handle (pidfd) that is opened first and compared afterwards. Only light modules are
imported, because every process of hocket imports this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from typing import NamedTuple

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36

_GONE = frozenset("ZX")
"""States of processes that no longer run; zombies exist until their parent waits for them."""


class Process(NamedTuple):
    """Identity of a process: its id and its start time."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot."""
    parent: int


def process(pid: int) -> Process | None:
    """The process with this id; None if there is none or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read().decode(errors="replace")
    except OSError:
        return None
    # The program name is in brackets and may contain any characters, brackets too, so fields are
    # counted from the last bracket.
    fields = content.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in _GONE:
        return None
    return Process(pid, int(fields[19]), int(fields[1]))


def processes() -> list[Process]:
    """All processes of the machine."""
    numbers = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [found for number in numbers if (found := process(number)) is not None]


def marked(variable: str) -> list[Process]:
    """Processes with ``variable`` (NAME=value) in their environment, and all their descendants."""
    everything = processes()
    wanted = b"\0" + os.fsencode(variable) + b"\0"
    roots = {found.pid for found in everything if wanted in _environment(found.pid)}
    return _family(everything, roots)


def descendants(pid: int) -> list[Process]:
    """All descendants of a process, without the process itself."""
    return [found for found in _family(processes(), {pid}) if found.pid != pid]


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read() + b"\0"
    except OSError:
        return b""


def _family(everything: Iterable[Process], roots: set[int]) -> list[Process]:
    children: dict[int, list[int]] = {}
    for found in everything:
        children.setdefault(found.parent, []).append(found.pid)
    waiting, members = list(roots), set(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in members:
                members.add(child)
                waiting.append(child)
    return [found for found in everything if found.pid in members]


def send(target: Process, number: signal.Signals) -> bool:
    """Signal a process; False if it is gone, even if its id has been reused."""
    try:
        handle = os.pidfd_open(target.pid)
    except OSError:
        return False
    try:
        # The handle now pins the process, so the comparison of start times cannot become outdated.
        now = process(target.pid)
        if now is None or now.start_ticks != target.start_ticks:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def send_all(targets: Iterable[Process], number: signal.Signals) -> None:
    """Signal each of these processes that still exists."""
    for target in targets:
        send(target, number)


def end_marked(variable: str) -> bool:
    """Kill all processes with ``variable`` in their environment; True when none is left."""
    # Two passes, because a process that starts during the first pass may be missed by it.
    for _ in range(2):
        if left := marked(variable):
            send_all(left, signal.SIGKILL)
            return False
    return True


def is_at_work(pid: int) -> bool:
    """True if a thread of a process runs, is runnable or waits for the disk."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                # The thread name may contain any characters; the state follows the last bracket.
                if file.read().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                    return True
    return False


def memory_kills() -> int:
    """Number of processes killed for lack of memory since boot, also by control-group limits."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def boot() -> str:
    """Identifier of the current boot; process ids of earlier boots are meaningless."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


_LIBRARY = ctypes.CDLL(None)
"""Loaded at import, because loading libraries between fork and exec is unsafe."""


def adopt_orphans() -> None:
    """Make this process the new parent of descendants that lose their parent (subreaper)."""
    _LIBRARY.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Request a signal for this process when its parent ends; for use between fork and exec."""
    _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        # The parent ended before the request, so the kernel will never send the signal.
        signal.raise_signal(number)
