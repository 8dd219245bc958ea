"""A private Slurm of one controller and three nodes on this machine, from Debian's packages.

Packages are unpacked into the user's cache and are never installed; only the first run downloads
(3 MB, about 8 s, and half a minute at most where the network hangs). The temporary folder would not
do: what lies there under a known name may be somebody else's, and is run by root here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from ports import reserved_port

PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15", "libmunge2",
)  # fmt: skip
NODES = {"na": ("v100", 4), "nb": ("p100", 2), "nc": ("p100", 2)}
LIBRARIES = "usr/lib/x86_64-linux-gnu"


class NoSlurmError(Exception):
    """Why no Slurm can be had here."""


def unpacked() -> Path:
    """The folder with Slurm's programs; raises `NoSlurmError`."""
    if os.geteuid() != 0:
        raise NoSlurmError("a private Slurm needs root")
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NoSlurmError("there are no Debian packages here")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket-tests/slurm"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as new:
            _unpack(Path(new, "slurm"))
            # Another run may have been quicker.
            with contextlib.suppress(OSError):
                os.rename(Path(new, "slurm"), folder)
    return folder


def _unpack(folder: Path) -> None:
    folder.mkdir()
    patience = ("-o", "Acquire::http::Timeout=10", "-o", "Acquire::Retries=0")
    _prepare(folder, "apt-get", *patience, "download", *PACKAGES)
    for package in sorted(folder.glob("*.deb")):
        _prepare(folder, "dpkg", "-x", package.name, ".")
        package.unlink()


def _prepare(folder: Path, *command: str) -> None:
    try:
        told = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise NoSlurmError(f"{command[0]}: no answer in time") from None
    if told.returncode != 0:
        raise NoSlurmError(f"{command[0]}: {told.stderr.strip()[-200:]}")


class SlurmCluster:
    """Three nodes; what is killed can be started again."""

    def __init__(self, folder: Path) -> None:
        self._root = unpacked()
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = contextlib.ExitStack()
        self.environment = {
            "PATH": f"{self._root}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{self._root}/{LIBRARIES}/slurm-wlm:{self._root}/{LIBRARIES}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        (folder / "state").mkdir()
        for node in NODES:
            (folder / "spool" / node).mkdir(parents=True)
        (folder / "slurm.conf").write_text(self._configuration())

    def start(self, name: str, *options: str) -> None:
        """Start the controller (``slurmctld``) or a node."""
        program = "slurmctld" if name == "slurmctld" else "slurmd"
        command = [f"{self._root}/usr/sbin/{program}-wlm", "-D"]
        if program == "slurmd":
            command += ["-N", name, "-d", f"{self._root}/usr/sbin/slurmstepd-wlm"]
        command += options
        with open(self._folder / f"{name}.out", "ab") as output:
            self._running[name] = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """SIGKILL to the controller or to the daemon of a node."""
        handle = self._running.pop(name)
        handle.kill()
        handle.wait(60)

    def lose(self, node: str) -> None:
        """SIGKILL to the daemon of a node, and have Slurm call it down at once.

        By itself it does so after a time in which a busy machine may silence others, too.
        """
        self.kill(node)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def has_saved_since(self, moment_s: float) -> bool:
        """Whether the controller has written its jobs down; it does so every few seconds."""
        path = self._folder / "state" / "job_state"
        return path.exists() and path.stat().st_mtime > moment_s

    def start_all(self) -> None:
        """Controller and nodes, until all nodes work."""
        for name in ("slurmctld", *NODES):
            self.start(name)
        deadline_s = time.monotonic() + 90
        while self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != str(len(NODES)):
            if time.monotonic() > deadline_s:
                raise NoSlurmError(f"Slurm does not start: {self._trouble()}")
            time.sleep(0.2)

    def call(self, *command: str) -> str:
        """What a program of Slurm prints."""
        told = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return told.stdout

    def close(self) -> None:
        """End everything."""
        if "slurmctld" in self._running:
            self.call("scancel", "--quiet", "--user=root")
            deadline_s = time.monotonic() + 10
            while self.call("squeue", "-h").strip() and time.monotonic() < deadline_s:
                time.sleep(0.2)
        for handle in self._running.values():
            handle.send_signal(signal.SIGTERM)
        for handle in self._running.values():
            try:
                handle.wait(60)
            except subprocess.TimeoutExpired:
                handle.kill()
                handle.wait(60)
        self._ports.close()

    def _trouble(self) -> str:
        told = [(self._folder / f"{name}.out").read_text()[-200:] for name in self._running]
        return " / ".join(text.replace("\n", " ") for text in told)

    def _port(self) -> int:
        """One for the life of the cluster."""
        return self._ports.enter_context(reserved_port())

    def _configuration(self) -> str:
        folder, host = self._folder, socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={self._port()} "
            f"CPUs={cpus} Feature={device_type} State=UNKNOWN"
            for name, (device_type, cpus) in NODES.items()
        ]
        return "\n".join(
            [
                "ClusterName=hocket",
                f"SlurmctldHost={host}(127.0.0.1)",
                f"SlurmctldPort={self._port()}",
                "AuthType=auth/none",
                "CredType=cred/none",
                "SlurmUser=root",
                "SlurmdUser=root",
                f"SlurmctldPidFile={folder}/slurmctld.pid",
                f"SlurmctldLogFile={folder}/slurmctld.log",
                f"SlurmdPidFile={folder}/slurmd-%n.pid",
                f"SlurmdLogFile={folder}/slurmd-%n.log",
                f"SlurmdSpoolDir={folder}/spool/%n",
                f"StateSaveLocation={folder}/state",
                f"PluginDir={self._root}/{LIBRARIES}/slurm-wlm",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "JobAcctGatherType=jobacct_gather/none",
                "AccountingStorageType=accounting_storage/none",
                "MpiDefault=none",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_Core",
                "ReturnToService=2",
                "SlurmdParameters=config_overrides",
                "SlurmdTimeout=60",
                "KillWait=2",
                "MessageTimeout=2",
                "SchedulerParameters=sched_min_interval=100000,sched_interval=1,bf_interval=1,"
                "batch_sched_delay=0",
                *nodes,
                "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
                "",
            ]
        )
