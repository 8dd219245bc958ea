"""Calls of the Slurm programs without a shell, in text formats that all Slurm versions write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.base.errors import RunError, UsageError
from hocket.service.executors.executor import AttemptName
from hocket.service.executors.slurm_nodes import SlurmNode
from hocket.service.executors.supervisor import INHERITED

_TIMEOUT_S = 30.0
_TRANSIENT = re.compile(
    r"unable to contact|connection|timed out|timeout|temporarily|try again|communication|"
    r"slurm_persist|zero bytes",
    re.IGNORECASE,
)
"""Messages of Slurm after which a retry may succeed."""
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
_ROW = re.compile(r"([0-9]+)\|([A-Z_]+)\|(hocket-[0-9a-f]+)\|hocket-([0-9]{1,18})-([0-9]{1,18})")


class SlurmUnreachableError(RunError):
    """Slurm does not respond; its jobs continue to run."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A Slurm job of an attempt; one component if the job is heterogeneous."""

    id: str
    state: str

    @property
    def has_ended(self) -> bool:
        """True if Slurm has ended all of its processes."""
        return self.state in _ENDED


def require_slurm() -> None:
    """Raise `UsageError` if the Slurm programs are not installed."""
    for program in ("sbatch", "squeue", "scontrol", "scancel"):
        if shutil.which(program) is None:
            raise UsageError(
                f"there is no program {program!r}",
                hint="install Slurm's client programs, or put their folder into PATH",
            )


def jobs_of(fleet: str) -> dict[AttemptName, list[SlurmJob]]:
    """Slurm jobs of the attempts of a fleet, including recently ended ones."""
    text = _ask(["squeue", "--noheader", "--me", "--states=all", "--format=%A|%T|%k|%j"])
    found: dict[AttemptName, list[SlurmJob]] = {}
    for line in text.splitlines():
        row = _ROW.fullmatch(line.strip())
        if row and row[3] == fleet:
            name = AttemptName(int(row[4]), int(row[5]))
            found.setdefault(name, []).append(SlurmJob(id=row[1], state=row[2]))
    return found


def show_nodes() -> str:
    """The nodes of the cluster as text that `parse_nodes` reads."""
    return _ask(["scontrol", "--oneliner", "show", "node"])


def submit(
    name: AttemptName,
    fleet: str,
    folder: Path,
    parts: Sequence[Sequence[str]],
    options: Sequence[str],
    command: Sequence[str],
) -> str:
    """Submit a job to Slurm and return its id; raises `UsageError` if Slurm refuses it."""
    # Slurm reads % as the start of a pattern.
    output = str(folder / "slurm.log").replace("\\", "\\\\").replace("%", "%%")
    common = [
        *options,
        f"--job-name=hocket-{name}",
        f"--comment={fleet}",
        "--no-requeue",
        "--export=ALL",
        "--open-mode=append",
        f"--output={output}",
        "--chdir=/",
    ]
    components: list[str] = []
    for part in parts:
        components += [*([":"] if components else []), *common, *part]
    answer = _run(["sbatch", "--parsable", *components, *command])
    return answer.strip().partition(";")[0]


def cancel_waiting(jobs: Iterable[SlurmJob]) -> None:
    """Withdraw jobs that have not begun."""
    _signal(jobs, ["--state=PENDING"])


def ask_to_end(jobs: Iterable[SlurmJob]) -> None:
    """Send SIGTERM to the supervisors alone."""
    _signal(jobs, ["--batch", "--signal=TERM"])


def cancel(jobs: Iterable[SlurmJob]) -> None:
    """Have Slurm end jobs with all their processes."""
    _signal(jobs, [])


def parts_of(per_node: Mapping[str, int], nodes: Mapping[str, SlurmNode]) -> list[list[str]]:
    """Options for sbatch, one part per group of nodes on which devices are asked for alike."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, count in per_node.items():
        groups.setdefault(_device_options(nodes[name], count), []).append(name)
    return [
        [
            f"--nodelist={','.join(names)}",
            f"--nodes={len(names)}",
            f"--ntasks={len(names)}",
            "--ntasks-per-node=1",
            *options,
        ]
        for options, names in groups.items()
    ]


def _device_options(node: SlurmNode, count: int) -> tuple[str, ...]:
    if node.cpus_per_device:
        return (f"--cpus-per-task={count * node.cpus_per_device}", f"-C{node.device_type}")
    type_and_count = f"{node.gpu_type}:{count}" if node.gpu_type else str(count)
    return (f"--gres=gpu:{type_and_count}",)


def _signal(jobs: Iterable[SlurmJob], options: list[str]) -> None:
    ids = [job.id for job in jobs if not job.has_ended]
    if ids:
        # A job that ended meanwhile is no error.
        _call(["scancel", "--quiet", *options, *ids])


def _ask(command: list[str]) -> str:
    """Output of a query; raises `SlurmUnreachableError` for every failure."""
    try:
        return _run(command)
    except UsageError as error:
        raise SlurmUnreachableError(error.message) from None


def _run(command: list[str]) -> str:
    answer = _call(command)
    if answer.returncode == 0:
        return answer.stdout
    complaint = answer.stderr.strip()[:500] or f"exit code {answer.returncode}"
    raise (SlurmUnreachableError if _TRANSIENT.search(answer.stderr) else UsageError)(complaint)


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmUnreachableError(f"{command[0]}: {error}") from None


def _environment() -> dict[str, str]:
    """Variables that Slurm needs and keeps with each job; none of them is a secret of the
    daemon."""
    return {
        name: text
        for name, text in os.environ.items()
        if name in INHERITED or name == "SLURM_CONF" or name.startswith(("LC_", "SBATCH_"))
    }
