"""A control group for each attempt: enforced limits, and an end that misses no process.

Version 2 (one tree, ``cgroup.controllers`` at its root) or version 1 (a tree per controller), if
this process may make groups below its own. In a group all processes of an attempt share one memory
limit and one CPU quota, and only processes of that group are killed at the limit. Version 1 also
has device rules, which hide GPUs of other attempts. Only light modules are imported, because every
supervisor imports this file.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from hocket.processes import system

ROOT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"
GPUS = "/proc/driver/nvidia/gpus/*/information"
_BASE = "hocket"
_SELF = "hocket-daemon"
_PERIOD_US = 100_000
_MIN_QUOTA_US = 1_000
_CONTROLLERS = ("memory", "cpu", "devices")
_NVIDIA_MAJOR = 195


class AttemptLimits(NamedTuple):
    """Limits on all processes of an attempt together; None for no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None
    gpus: tuple[int, ...] | None = None
    """Numbers of the GPUs that they may open, as in nvidia-smi."""


class Cgroups(NamedTuple):
    """Parent folders of new groups: one per controller, in version 2 the same for all."""

    version: int
    folders: dict[str, str]

    @property
    def can(self) -> tuple[str, ...]:
        """Controllers that can set limits here."""
        return tuple(name for name in _CONTROLLERS if name in self.folders)

    def make(self, mark: str, limits: AttemptLimits) -> Cgroup:
        """Make a group with these limits; raises `OSError` if a limit cannot be set."""
        name = _name_of(mark)
        group = Cgroup(
            self.version, {key: os.path.join(path, name) for key, path in self.folders.items()}
        )
        for folder in set(group.folders.values()):
            os.makedirs(folder, exist_ok=True)
        _limit(group, limits)
        return group


class Cgroup(NamedTuple):
    """The group of one attempt."""

    version: int
    folders: dict[str, str]

    def is_of(self, mark: str) -> bool:
        """True if this can be the group of the attempt with this mark, and of no other attempt."""
        return all(
            os.path.normpath(path) == path
            and path.startswith(f"{ROOT}/")
            and os.path.basename(path) == _name_of(mark)
            for path in self.folders.values()
        )

    def entries(self) -> list[int]:
        """Open files to which a process writes ``0`` to enter the group.

        Opened here, because the rights of the opening process count.
        """
        folders = sorted(set(self.folders.values()))
        return [os.open(os.path.join(one, "cgroup.procs"), os.O_WRONLY) for one in folders]

    def processes(self) -> list[int]:
        """Process numbers in the group."""
        found: set[int] = set()
        for folder in set(self.folders.values()):
            found |= {int(line) for line in _read(folder, "cgroup.procs").split()}
        return sorted(found)

    def kill(self) -> bool:
        """Kill all processes in the group; True once none is left."""
        living = [one for pid in self.processes() if (one := system.process(pid)) is not None]
        if not living:
            return True
        if self.version == 2:
            with contextlib.suppress(OSError):
                _write(next(iter(self.folders.values())), "cgroup.kill", "1")
        system.send_all(living, signal.SIGKILL)
        return False

    def remove(self) -> None:
        """Remove the group if it is empty."""
        for folder in set(self.folders.values()):
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def num_memory_kills(self) -> int:
        """Number of processes killed at the memory limit."""
        file = "memory.events" if self.version == 2 else "memory.oom_control"
        found = re.search(r"^oom_kill (\d+)$", _read(self.folders.get("memory", ""), file), re.M)
        return int(found[1]) if found else 0


def _name_of(mark: str) -> str:
    """Folder name of the group of the attempt with this mark."""
    return hashlib.sha256(mark.encode()).hexdigest()[:16]


def find_cgroups(root: str = ROOT, own: str = OWN) -> Cgroups | None:
    """Groups below that of this process; None if it may make none, which is tested by making one.

    In version 2 a group with processes cannot have limited subgroups, so this process first moves
    into a group of its own. If other processes share its group, no groups can be made.
    """
    lines = _read("", own).splitlines()
    try:
        if os.path.exists(os.path.join(root, "cgroup.controllers")):
            return _version_2(root, lines)
        return _version_1(root, lines)
    except OSError:
        return None


def _version_2(root: str, lines: Sequence[str]) -> Cgroups | None:
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    own = os.path.join(root, path.strip("/"))
    if os.path.basename(own) == _SELF:
        own = os.path.dirname(own)
    there = _read(own, "cgroup.controllers").split()
    wanted = [name for name in ("memory", "cpu") if name in there]
    if not wanted:
        return None
    base = os.path.join(own, _BASE)
    os.makedirs(base, exist_ok=True)
    text = " ".join(f"+{name}" for name in wanted)
    try:
        _write(own, "cgroup.subtree_control", text)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        os.makedirs(os.path.join(own, _SELF), exist_ok=True)
        _write(os.path.join(own, _SELF), "cgroup.procs", str(os.getpid()))
        _write(own, "cgroup.subtree_control", text)
    _write(base, "cgroup.subtree_control", text)
    return Cgroups(2, dict.fromkeys(wanted, base))


def _version_1(root: str, lines: Sequence[str]) -> Cgroups | None:
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths.update((name, path) for name in controllers.split(","))
    folders = {}
    for name in _CONTROLLERS:
        base = os.path.join(root, name, paths.get(name, "/").strip("/"), _BASE)
        with contextlib.suppress(OSError):
            if os.path.isdir(os.path.join(root, name)):
                os.makedirs(base, exist_ok=True)
                probe = os.path.join(base, f"probe-{os.getpid()}")
                os.mkdir(probe)
                os.rmdir(probe)
                folders[name] = base
    return Cgroups(1, folders) if "memory" in folders else None


def _limit(group: Cgroup, limits: AttemptLimits) -> None:
    memory, cpu = group.folders.get("memory", ""), group.folders.get("cpu", "")
    if limits.memory_bytes is not None:
        text = str(limits.memory_bytes)
        if group.version == 2:
            _write(memory, "memory.max", text)
            with contextlib.suppress(OSError):
                # Not every kernel counts swap. With oom.group all processes are killed together.
                _write(memory, "memory.swap.max", "0")
                _write(memory, "memory.oom.group", "1")
        else:
            _write(memory, "memory.limit_in_bytes", text)
            with contextlib.suppress(OSError):
                _write(memory, "memory.memsw.limit_in_bytes", text)
    if limits.cpus is not None and cpu:
        quota_us = max(round(limits.cpus * _PERIOD_US), _MIN_QUOTA_US)
        if group.version == 2:
            _write(cpu, "cpu.max", f"{quota_us} {_PERIOD_US}")
        else:
            _write(cpu, "cpu.cfs_period_us", str(_PERIOD_US))
            _write(cpu, "cpu.cfs_quota_us", str(quota_us))
    if limits.gpus is not None and group.version == 1 and "devices" in group.folders:
        for minor in hidden_gpus(limits.gpus):
            _write(group.folders["devices"], "devices.deny", f"c {_NVIDIA_MAJOR}:{minor} rwm")


def hidden_gpus(gpus: Sequence[int], pattern: str = "") -> list[int]:
    """Minor numbers of all GPUs except ``gpus``, which are numbered as in nvidia-smi."""
    # The folders are named by the PCI bus address, so their order is that of nvidia-smi.
    minors = []
    for path in sorted(glob.glob(pattern or GPUS)):
        found = re.search(r"^Device Minor:\s*(\d+)", _read("", path), re.M)
        minors.append(int(found[1]) if found else -1)
    return [minor for at, minor in enumerate(minors) if at not in gpus and minor >= 0]


def describe_limits(found: Cgroups | None) -> str:
    """Describe how memory, CPU time and GPUs of jobs are limited here, for ``hocket doctor``."""
    if found is None:
        return (
            "memory of jobs is watched (no cgroup can be made here); CPU time is not limited; GPUs "
            "are hidden by CUDA_VISIBLE_DEVICES, which a job can unset"
        )
    devices = "enforced" if "devices" in found.can and found.version == 1 else (
        "hidden by CUDA_VISIBLE_DEVICES, which a job can unset"
    )  # fmt: skip
    cpu = "limited" if "cpu" in found.can else "not limited"
    memory = "limited" if "memory" in found.can else "watched"
    return f"cgroup v{found.version}: memory {memory}, CPU time {cpu}, GPUs {devices}"


def watched_bytes(pids: Sequence[int]) -> int:
    """Total memory of processes; shared memory is counted once."""
    total = 0
    for pid in pids:
        found = re.search(r"^Pss:\s+(\d+) kB$", _read(f"/proc/{pid}", "smaps_rollup"), re.M)
        total += int(found[1]) * 1024 if found else 0
    return total


def _read(folder: str, name: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(folder, name)) as file:
        return file.read()
    return ""


def _write(folder: str, name: str, text: str) -> None:
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)
