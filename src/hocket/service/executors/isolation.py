"""Isolation: jobs of a fleet can neither read nor signal its processes.

Jobs run as the user of the service, and Linux lets a user read all of their own processes: their
environment, memory and open files. Two mechanisms prevent that. A process that declares itself
private (`PR_SET_DUMPABLE` 0) is closed to all but root. And a job is put into its own Landlock
domain (kernel 6.12 and later), whose only rule is that nothing outside of it can be traced, read
through ``/proc`` or signalled. Jobs of root lose the three capabilities that would circumvent that.
Files are not restricted.

Only light modules are imported, because every supervisor imports this file.
"""

from __future__ import annotations

import ctypes
import os
import struct

_LIBRARY = ctypes.CDLL(None, use_errno=True)
"""C library, loaded here because loading libraries between fork and exec is unsafe."""
_SET_DUMPABLE = 4
_SET_NAME = 15
_DROP_CAPABILITY = 24
_SET_NO_NEW_PRIVILEGES = 38
_LOOKS_ANYWHERE = (19, 21, 38)
"""CAP_SYS_PTRACE, CAP_SYS_ADMIN and CAP_PERFMON, with which root can read every process."""
_CREATE_RULESET = 444
_RESTRICT_SELF = 446
_ASK_VERSION = 1
_FIRST_VERSION_WITH_SCOPES = 6
_RULESET = struct.Struct("=QQQ")
"""Layout of the ruleset: handled file rights, handled network rights, scopes."""
_SCOPE_SIGNALS = 2

SUPERVISOR_NAME = b"hocket-attempt"
"""Process name by which the service recognizes supervisors."""


def make_private() -> None:
    """Prevent other processes of the same user from reading this one, if the kernel supports
    that."""
    _LIBRARY.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def name_supervisor() -> None:
    """Set the process name that marks a supervisor; no other process can change it."""
    _LIBRARY.prctl(_SET_NAME, SUPERVISOR_NAME, 0, 0, 0)


def can_isolate() -> bool:
    """True if the kernel has Landlock domains with scopes for signals."""
    version = _LIBRARY.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return bool(version >= _FIRST_VERSION_WITH_SCOPES)


def enter_domain() -> None:
    """Move this thread, and all processes that it starts later, into a new domain for good.

    Has no effect if the kernel has no domains. Other threads stay outside.
    """
    for capability in _LOOKS_ANYWHERE:
        # Only root can drop these capabilities, and only root has them. They are gone from the next
        # exec on.
        _LIBRARY.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
    if not can_isolate():
        return
    rules = ctypes.create_string_buffer(_RULESET.pack(0, 0, _SCOPE_SIGNALS), _RULESET.size)
    size = ctypes.c_size_t(_RULESET.size)
    descriptor = _LIBRARY.syscall(_CREATE_RULESET, rules, size, 0)
    try:
        if _LIBRARY.syscall(_RESTRICT_SELF, descriptor, 0) != 0:
            # Without root, the kernel requires giving up set-user-id programs (sudo) first.
            _LIBRARY.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            if _LIBRARY.syscall(_RESTRICT_SELF, descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), "the job cannot be kept apart")
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def is_part_of_a_job(pid: int) -> bool:
    """True if a process descends from the supervisor of an attempt.

    Orphans of a job become children of its supervisor, so no process escapes while the supervisor
    lives. Processes that a job has started by others (cron, a session bus, ssh) are not detected.
    """
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, rest = file.read().rpartition(b")")
        except OSError:
            # The process is gone, so its owner is unknown: assume the job.
            return True
        if head.partition(b"(")[2] == SUPERVISOR_NAME:
            return True
        pid = int(rest.split()[1])
    return False
