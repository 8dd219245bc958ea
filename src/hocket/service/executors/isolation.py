"""Processes of a fleet that its jobs can neither look into nor signal.

Jobs run as the user of the service, and Linux lets a user look into all of his processes: their
environment, memory and open files. Two things stand against that. A process that declares itself
private (`PR_SET_DUMPABLE` 0) is closed to all but root. And a job is put into a Landlock domain of
its own (kernel 6.12 and later) whose only rule is that nothing outside of it can be traced, read
through ``/proc`` or signalled. Jobs of root lose the three capabilities that would undo that. Files
are not restricted.
Only light modules are imported: every supervisor loads this file.
"""

from __future__ import annotations

import ctypes
import os
import struct

_LIBRARY = ctypes.CDLL(None, use_errno=True)
"""C library, loaded here because nothing should be loaded between fork and exec."""
_SET_DUMPABLE = 4
_SET_NAME = 15
_DROP_CAPABILITY = 24
_SET_NO_NEW_PRIVILEGES = 38
_LOOKS_ANYWHERE = (19, 21, 38)
"""CAP_SYS_PTRACE, CAP_SYS_ADMIN and CAP_PERFMON, with which root reads every process."""
_CREATE_RULESET = 444
_RESTRICT_SELF = 446
_ASK_VERSION = 1
_FIRST_VERSION_WITH_SCOPES = 6
_RULESET = struct.Struct("=QQQ")
"""Handled rights of files, of the network, and scopes."""
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
    """Put this thread, and all processes that it starts later, into a new domain, for good.

    Has no effect if the kernel has no domains. Other threads stay outside.
    """
    for capability in _LOOKS_ANYWHERE:
        # Only root can drop what only root has; it is gone from the next program on.
        _LIBRARY.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
    if not can_isolate():
        return
    rules = ctypes.create_string_buffer(_RULESET.pack(0, 0, _SCOPE_SIGNALS), _RULESET.size)
    size = ctypes.c_size_t(_RULESET.size)
    descriptor = _LIBRARY.syscall(_CREATE_RULESET, rules, size, 0)
    try:
        if _LIBRARY.syscall(_RESTRICT_SELF, descriptor, 0) != 0:
            # Whoever is not root has to give up programs that change the user (sudo) first.
            _LIBRARY.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            if _LIBRARY.syscall(_RESTRICT_SELF, descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), "the job cannot be kept apart")
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def is_part_of_a_job(pid: int) -> bool:
    """True if a process descends from the supervisor of an attempt.

    Orphans of a job become children of its supervisor, so none leaves it while the supervisor
    lives; whatever a job has others start (cron, a session bus, ssh) is not known by this.
    """
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, rest = file.read().rpartition(b")")
        except OSError:
            # It is gone: nobody can say whose it was.
            return True
        if head.partition(b"(")[2] == SUPERVISOR_NAME:
            return True
        pid = int(rest.split()[1])
    return False
