"""Runs one attempt until its end: ``python -m hocket.service.executors.supervisor FOLDER``.

A separate process, so that daemons may come and go. It holds the lock of the attempt's folder,
starts the commands in sessions of their own and copies their output to the log. It ends them on
request (`attempt_folder.STOP`, or SIGTERM to the supervisor), and writes the result when nothing of
the attempt runs any more. It knows that exactly: orphans become its children
(PR_SET_CHILD_SUBREAPER), so there is a child to wait for while anything lives. If it is killed
itself, the kernel kills the commands (PR_SET_PDEATHSIG), and the rest is found by their control
group, or by their mark if there is none.

Limits are enforced by the control group. Without one, memory is watched, and an attempt above its
limit is killed at the next look.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pwd
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from hocket.processes import system
from hocket.service.executors import cgroups, isolation
from hocket.service.executors.attempt_folder import (
    BEGUN,
    CGROUP,
    DAMAGED,
    MARK,
    RESULT,
    RUNNING,
    STOP,
    Assignment,
    Result,
    asked_grace_s,
    beat,
    lease_grace_s,
    mark_of,
    read_assignment,
    sync_folder,
    try_lock,
    write_json,
    write_result,
)
from hocket.service.executors.bounded_log import BoundedLog

LOCK_PATIENCE_S = 1.0
"""Seconds to wait for the lock: an executor holds it only for a moment, another supervisor for
good.
"""
LOOK_S = 0.5
"""Seconds between looks at the stop file; SIGTERM makes the supervisor look at once."""
BEAT_S = 2.0
"""Seconds between heartbeats."""
LAST_GRACE_S = 5.0
"""Grace for the remaining processes when a command of the gang has failed or all have ended."""
AFTER_KILL_S = 0.1
MAX_RESULT_TRIES = 1000
CANNOT_RUN = 127
"""Exit code for a command that cannot be run, as in shells."""
NOBODY, COMMANDS, ALL = range(3)
REMOVED = (errno.ENOENT, errno.ESTALE)
"""Error numbers of access to a folder that was removed, on this machine or another."""
_NEVER_WRITABLE = (errno.EISDIR, errno.EACCES, errno.EPERM)
"""Error numbers if the job made writing the result impossible, so that a retry would not help."""

INHERITED = frozenset((
    "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME",
    "TORCH_HOME",
))  # fmt: skip
"""Variables that a job inherits, besides ``LC_...``; none of them is a secret of the daemon."""


def run_attempt(folder: str | os.PathLike[str]) -> int:
    """Run the attempt of a folder unless it began before, and return when nothing of it is left.

    Takes over the process: its working folder, its signals and its children. Returns the exit code
    of the attempt, or 0 if there was nothing to do.
    """
    # As working folder it stays the same when it is renamed; another fleet may use the path
    # afterwards.
    os.chdir(folder)
    isolation.make_private()
    isolation.name_supervisor()
    lock = _lock()
    if lock is None or os.path.exists(RESULT) or os.path.exists(BEGUN):
        return 0
    result = _run()
    _tell(result)
    os.close(lock)
    return result.exit_code


def _lock() -> int | None:
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while (lock := try_lock(".")) is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return lock


def _tell(result: Result) -> None:
    """Write the result, with retries while the disk is full: finished work must count."""
    for _ in range(MAX_RESULT_TRIES):
        try:
            write_result(".", result)
        except OSError as error:
            if error.errno in (*REMOVED, *_NEVER_WRITABLE):
                return
            beat(".")
            time.sleep(LOOK_S)
        else:
            return


def _run() -> Result:
    if os.path.exists(STOP):
        return Result(-signal.SIGTERM, "stopped before it began")
    order = read_assignment(".")
    if order is None:
        return Result(CANNOT_RUN, "the folder of the attempt has no assignment")
    try:
        os.makedirs(os.path.dirname(order.log_file), exist_ok=True)
        log = BoundedLog(str(order.log_file), order.log_limit_bytes)
    except OSError as error:
        return Result(CANNOT_RUN, f"cannot write the log {str(order.log_file)!r}: {error.strerror}")
    try:
        # Signal handlers first: a process that reads the supervisor's id may send a signal at once.
        inputs = _Inputs(log)
        write_json(BEGUN, _identity(os.getpid()))
        sync_folder("..")
        system.adopt_orphans()
        return _supervise(order, inputs)
    finally:
        log.close()


def _identity(pid: int) -> dict[str, int | str]:
    found = system.process(pid)
    start_ticks = found.start_ticks if found else 0
    return {"pid": pid, "start_ticks": start_ticks, "boot": system.boot()}


class _Inputs:
    """Events for which a supervisor waits: output of the commands, and signals."""

    def __init__(self, log: BoundedLog) -> None:
        self.is_asked_to_end = False
        self.is_lease_over = False
        self._log = log
        self._output, self.output_end = os.pipe()
        self._wake, wake_end = os.pipe()
        for descriptor in (self._output, self._wake, wake_end):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._notice)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.is_asked_to_end |= number != signal.SIGCHLD

    def wait(self, timeout_s: float) -> None:
        """Wait for an event, up to ``timeout_s``; output is copied to the log."""
        for descriptor, event in self._poll.poll(timeout_s * 1000):
            data = _read(descriptor)
            if descriptor == self._output:
                self._log.write(data)
            if not data and event & select.POLLHUP:
                # All writers have closed the pipe, which poll would report for ever.
                self._poll.unregister(descriptor)

    def drain(self) -> None:
        """Copy what is still in the pipe."""
        while data := _read(self._output):
            self._log.write(data)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


class _Gang:
    """The commands of an attempt, and all their descendants."""

    def __init__(self) -> None:
        self.rank_of: dict[int, int] = {}
        """Rank of each running command by process number; removed at its end, because numbers are
        reused.
        """
        self.ended: list[tuple[int, int]] = []
        """Rank and exit code of each ended command, in order of their ends."""
        self.is_gone = False
        self.was_asked = False
        """True if a command got a signal before it ended, so that its exit code means little."""
        self.trouble = ""
        """Reason why not all commands could be started."""
        self.group: cgroups.Cgroup | None = None
        self.is_over_memory = False
        self._handles: list[subprocess.Popen[bytes]] = []
        self._starter = ThreadPoolExecutor(1, "starter", isolation.enter_domain)
        """A thread inside the domain that all commands of the gang share.

        The commands may signal each other, but not this process. The thread must live on, because
        the kernel kills its children when it ends.
        """

    def start(self, order: Assignment, rank: int, port: int, output: int) -> None:
        """Start a command; raises `OSError` if that fails."""
        supervisor = os.getpid()
        entries = [] if self.group is None else self.group.entries()

        def enter() -> None:
            for entry in entries:
                os.write(entry, b"0")
            # After the change of user, which would undo it.
            system.die_with(supervisor)

        user = _unix_user(order.unix_user)
        identity: dict[str, Any] = {} if user is None else {
            "user": user.pw_uid,
            "group": user.pw_gid,
            "extra_groups": os.getgrouplist(user.pw_name, user.pw_gid),
        }  # fmt: skip
        try:
            handle: subprocess.Popen[bytes] = self._starter.submit(
                _popen,
                order.command,
                cwd=order.work_folder if user is None else _folder_of(order, user, identity),
                env=_environment(order, rank, port, user),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=enter,
                **identity,
            ).result()
        finally:
            for entry in entries:
                os.close(entry)
        self._handles.append(handle)
        self.rank_of[handle.pid] = rank

    def reap(self) -> None:
        """Collect exit codes of processes that ended."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                rank = self.rank_of.pop(ended[0], None)
                if rank is not None:
                    self.ended.append((rank, os.waitstatus_to_exitcode(ended[1])))
                    # The process was waited for here, so its handle must not wait for the number
                    # again.
                    self._handles[rank].returncode = self.ended[-1][1]
        except ChildProcessError:
            self.is_gone = True

    def ask_to_end(self, *, is_for_all: bool) -> None:
        """Send SIGTERM to the commands, or to all processes, including those in other sessions."""
        everything = system.descendants(os.getpid())
        for one in everything:
            is_command = one.pid in self.rank_of
            if (is_for_all or is_command) and system.send(one, signal.SIGTERM):
                self.was_asked |= is_command
        # A stopped process could neither save its work nor end.
        system.send_all(everything, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to all present processes; they may have started others meanwhile."""
        if self.group is not None:
            self.group.kill()
        system.send_all(system.descendants(os.getpid()), signal.SIGKILL)

    def watch_memory(self, limit_bytes: int) -> None:
        """Kill all processes if together they use more than ``limit_bytes``."""
        everything = [one.pid for one in system.descendants(os.getpid())]
        if cgroups.watched_bytes(everything) > limit_bytes:
            self.is_over_memory = True
            self.kill()

    @property
    def failure(self) -> tuple[int, int] | None:
        """The first rank that failed, and its exit code."""
        return next((ended for ended in self.ended if ended[1] != 0), None)


def _supervise(order: Assignment, inputs: _Inputs) -> Result:
    gang = _Gang()
    gang.group = _make_group(order)
    _start(gang, order, inputs.output_end)
    os.close(inputs.output_end)
    if not gang.trouble:
        # Only users and the executor read this file, so a failure is no reason to end the commands.
        with contextlib.suppress(OSError):
            write_json(RUNNING, {"commands": [_identity(pid) for pid in gang.rank_of]})
    _see_to_the_end(gang, order, inputs)
    inputs.drain()
    if gang.group is not None:
        gang.is_over_memory |= gang.group.num_memory_kills() > 0
        gang.group.remove()
    if gang.trouble:
        return Result(CANNOT_RUN, gang.trouble)
    if inputs.is_lease_over and gang.was_asked:
        return Result(
            -signal.SIGTERM, "its lease ended without contact to the daemon", is_lost=True
        )
    # A command may exit with 0 although a child was killed at the memory limit.
    _, exit_code = gang.failure or (0, -signal.SIGKILL if gang.is_over_memory else 0)
    if exit_code == 0 and (gang.was_asked or inputs.is_asked_to_end) and not os.path.exists(STOP):
        # The stop came from outside the fleet: a queue with a time limit, or an init system, which
        # signals the commands too. A command that obeyed must not look as if it had finished.
        return Result(-signal.SIGTERM, "its supervisor was stopped from outside", is_lost=True)
    return Result(exit_code, _why(gang, order), was_asked=gang.was_asked)


def _make_group(order: Assignment) -> cgroups.Cgroup | None:
    """The control group of the attempt; None if none can be made with its limits."""
    found = cgroups.find_cgroups()
    if found is None:
        return None
    group = None
    try:
        group = found.make(
            mark_of("."), cgroups.AttemptLimits(order.memory_bytes, order.cpus, order.gpus)
        )
        write_json(CGROUP, group._asdict())
    except OSError:
        if group is not None:
            group.remove()
        return None
    return group


def _unix_user(name: str) -> pwd.struct_passwd | None:
    """The user that commands run as; None for the user of this process."""
    if not name or os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise ValueError(f"there is no Unix user {name!r} on this machine") from None


def _popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, **options)


def _folder_of(
    order: Assignment, user: pwd.struct_passwd, identity: dict[str, Any]
) -> str | os.PathLike[str]:
    """Working folder of a user's commands: the one that the job names, or one in the user's home.

    The state folder is closed to other users.
    """
    if not order.has_own_folder:
        return order.work_folder
    folder = os.path.join(user.pw_dir, "hocket-jobs", order.environment.get("HOCKET_JOB", "0"))
    # Created as the user, because symbolic links in a home folder could mislead root.
    subprocess.run(
        ["mkdir", "-p", folder], check=True, cwd="/", stderr=subprocess.DEVNULL, **identity
    )
    return folder


def _start(gang: _Gang, order: Assignment, output: int) -> None:
    num_ranks = len(order.devices) if order.processes == "per-device" else 1
    port = free_port() if order.processes == "per-device" else 0
    try:
        for rank in range(num_ranks):
            gang.start(order, rank, port, output)
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        place = str(getattr(error, "filename", None) or order.command[0])
        gang.trouble = f"cannot run {place!r}: {reason}"
        if place == str(order.work_folder) and not os.path.exists(place):
            gang.trouble = f"its folder {place!r} is not there"


def _see_to_the_end(gang: _Gang, order: Assignment, inputs: _Inputs) -> None:
    deadline_s, asked, next_beat_s = math.inf, NOBODY, 0.0
    watched_bytes = order.memory_bytes if gang.group is None else None
    next_watch_s = 0.0
    gang.reap()
    while not gang.is_gone:
        whom, grace_s = _who_must_end(gang, order, inputs)
        now_s = time.monotonic()
        if now_s >= next_beat_s:
            beat(".")
            next_beat_s = now_s + BEAT_S
        if watched_bytes is not None and now_s >= next_watch_s:
            gang.watch_memory(watched_bytes)
            next_watch_s = now_s + LOOK_S
        deadline_s = min(deadline_s, now_s + grace_s)
        if whom > asked:
            gang.ask_to_end(is_for_all=whom == ALL)
            asked = whom
        if now_s >= deadline_s:
            gang.was_asked |= bool(gang.rank_of)
            gang.kill()
        inputs.wait(min(LOOK_S, max(deadline_s - now_s, AFTER_KILL_S)))
        gang.reap()


def _who_must_end(gang: _Gang, order: Assignment, inputs: _Inputs) -> tuple[int, float]:
    """Processes to end now, and their grace.

    Only the commands get SIGTERM at first, because a training that saves its work needs its data
    loaders. Processes that outlive the commands, such as those of a script, get it afterwards.
    """
    asked_s = _asked_s(order, inputs)
    last_grace_s = min(LAST_GRACE_S, order.grace_s) if asked_s is None else asked_s
    if not gang.rank_of:
        return ALL, last_grace_s
    if gang.failure or gang.trouble:
        return COMMANDS, last_grace_s
    return (NOBODY, math.inf) if asked_s is None else (COMMANDS, asked_s)


def _asked_s(order: Assignment, inputs: _Inputs) -> float | None:
    """Grace that the attempt was given; None if it was not asked to stop."""
    try:
        # A removed folder means that the attempt was given up, and its devices were given to
        # others.
        os.stat(BEGUN)
        asked_s = asked_grace_s(".")
        if asked_s is None and order.lease_file:
            asked_s = lease_grace_s(order.lease_file)
            inputs.is_lease_over |= asked_s is not None
    except DAMAGED:
        asked_s = order.grace_s
    except OSError as error:
        # A temporary failure of the file system is no reason to end the commands.
        asked_s = 0.0 if error.errno in REMOVED else None
    return order.grace_s if asked_s is None and inputs.is_asked_to_end else asked_s


def _why(gang: _Gang, order: Assignment) -> str:
    if gang.failure is None and not gang.is_over_memory:
        return ""
    rank, exit_code = gang.failure or (0, -signal.SIGKILL)
    who = f"rank {rank}" if order.processes == "per-device" else "the command"
    if gang.failure is None:
        who = "one of its processes"
    if gang.is_over_memory and order.memory_bytes is not None:
        return f"{who} was killed: the job used more than its memory limit of " + (
            f"{order.memory_bytes / 2**20:,.0f} MiB"
        )
    if gang.is_over_memory:
        return f"{who} was killed: the machine ran out of memory"
    if exit_code > 0:
        return f"{who} ended with code {exit_code}"
    try:
        return f"{who} was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"{who} was ended by signal {-exit_code}"


def _environment(
    order: Assignment, rank: int, port: int, user: pwd.struct_passwd | None
) -> dict[str, str]:
    """Environment of a command: few inherited variables, the job's own, and its devices."""
    inherited = {
        name: text
        for name, text in os.environ.items()
        if name in INHERITED or name.startswith("LC_")
    }
    if user is not None:
        own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        inherited |= {**own, "SHELL": user.pw_shell}
        for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TMPDIR"):
            inherited.pop(name, None)
    # Output in a buffer would be lost when the command is killed.
    inherited["PYTHONUNBUFFERED"] = "1"
    given = {
        "HOCKET_DEVICES": ",".join(order.devices),
        "HOCKET_DEVICE_TYPE": order.device_type,
        MARK: mark_of(".").partition("=")[2],
    }
    return {**inherited, **_ranks(order, rank, port), **order.environment, **given}


def _ranks(order: Assignment, rank: int, port: int) -> dict[str, str]:
    if order.processes != "per-device":
        return {}
    num_ranks = str(len(order.devices))
    return {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(order.first_rank + rank),
        "LOCAL_RANK": str(rank),
    }


def free_port(address: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(0 if run_attempt(sys.argv[1]) == 0 else 1)
