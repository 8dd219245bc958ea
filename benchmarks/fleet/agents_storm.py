"""One daemon and several agents in network namespaces, jobs, kills and cut links.

    sudo python benchmarks/fleet/agents_storm.py --jobs 200 --kills 60 --cuts 10

Every machine is a network namespace with a link of its own to the daemon's. While jobs come, the
daemon, agents, supervisors and commands of jobs are killed (SIGKILL) and links are cut, at random.
Each command holds a lock on its job and its device as long as it lives. Checked: all jobs succeed,
no job and no device is used twice at a time, no process is left, how long the daemon was away.
Needs root, iproute2 and Linux. Prints a JSON object; ends with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hocket.base.errors import HocketError
from hocket.processes import system
from hocket.service.client import FleetClient, find_service, patiently
from hocket.service.executors.attempt_folder import BEGUN, RUNNING, mark_of, read_json

JOB = """
import fcntl, os, pathlib, sys, time
shared, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
machine = pathlib.Path.cwd().parts[-3]
held = []
for name in (f"job-{os.environ['HOCKET_JOB']}", f"{machine}-{os.environ['HOCKET_DEVICES']}"):
    held.append(open(shared / f"lock-{name}", "w"))
    try:
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with open(shared / "conflicts", "a") as file:
            file.write(f"{name} {os.environ['HOCKET_ATTEMPT']} {machine}\\n")
print("begun", os.environ["HOCKET_ATTEMPT"], flush=True)
time.sleep(seconds)
print("done", flush=True)
"""


class Storm:
    """The machines, the daemon and what is done to them."""

    def __init__(self, folder: Path, num_machines: int, lease_s: float, seed: int) -> None:
        self.folder, self.lease_s = folder, lease_s
        self.random = random.Random(seed)
        self.state, self.shared = folder / "state", folder / "shared"
        self.shared.mkdir()
        tag = f"h{os.getpid() % 10000}"
        self.subnet = f"10.{200 + os.getpid() % 50}"
        self.machines = [f"{tag}m{at}" for at in range(num_machines)]
        self.daemon: subprocess.Popen[str] | None = None
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.tokens: dict[str, str] = {}
        self.place: dict[str, Any] = {}
        self.away_s: list[float] = []
        self.cut_until_s: dict[str, float] = {}
        self.done: dict[str, int] = {}

    # ── machines ──

    def open(self) -> None:
        """Make the namespaces; the daemon lives in ours, at one address of each link."""
        for at, name in enumerate(self.machines):
            near, far = f"{name}a", f"{name}b"
            _ip("netns", "add", name)
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
            _ip("addr", "add", f"{self.subnet}.{at}.1/24", "dev", near)
            _ip("link", "set", near, "up")
            for words in (
                ("addr", "add", f"{self.subnet}.{at}.2/24", "dev", far),
                ("link", "set", far, "up"), ("link", "set", "lo", "up"),
                ("route", "add", f"{self.subnet}.0.0/16", "via", f"{self.subnet}.{at}.1"),
            ):  # fmt: skip
                _ip("-n", name, *words)

    def close(self) -> None:
        """End everything, and remove the namespaces."""
        for process in (*self.agents.values(), self.daemon):
            if process is not None:
                process.kill()
                process.wait()
        for folder in self.folder.glob("*/attempts/*-*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                begun = read_json(folder / BEGUN)
                if begun is not None:
                    who = system.Process(begun["pid"], begun["start_ticks"], 0)
                    system.send(who, signal.SIGKILL)
                system.send_all(system.marked(mark_of(folder)), signal.SIGKILL)
        for name in self.machines:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", f"{name}a"], check=False, capture_output=True)

    def serve(self) -> None:
        """Start the daemon; later ones take the port of the first."""
        port = self.place.get("secure_url", ":0").rpartition(":")[2]
        words = ["--on", "agents", "--device-types", "cpu", "--round", "2"]
        words += ["--tls", f"0.0.0.0:{port}"]
        words += ["--agent-lease", str(self.lease_s), "--state", str(self.state), "--json"]
        words += [
            w for at in range(len(self.machines)) for w in ("--name", f"{self.subnet}.{at}.1")
        ]
        with open(self.folder / "daemon.err", "a") as errors:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "hocket", "fleet", "serve", *words],
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self.daemon.stdout is not None
        lines: list[str] = []
        while (line := self.daemon.stdout.readline()) and line != "}\n":
            lines.append(line)
        if not line:
            raise SystemExit((self.folder / "daemon.err").read_text())
        self.place = json.loads("".join([*lines, line]))

    def join(self, name: str) -> None:
        """Start the agent of a machine."""
        at = self.machines.index(name)
        if name not in self.tokens:
            body = {"name": name, "role": "agent"}
            self.tokens[name] = self.client.post("/v1/tokens", body)["token"]
        port = self.place["secure_url"].rpartition(":")[2]
        words = ["--join", f"https://{self.subnet}.{at}.1:{port}", "--name", name]
        words += ["--fingerprint", self.place["fingerprint"], "--devices", "cpu:2"]
        words += ["--state", str(self.folder / name)]
        with open(self.folder / f"{name}.err", "a") as errors:
            self.agents[name] = subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "hocket", "fleet", "agent",
                 *words],
                stderr=errors, env={**os.environ, "HOCKET_FLEET_TOKEN": self.tokens[name]},
            )  # fmt: skip

    @property
    def client(self) -> FleetClient:
        return find_service(self.state)

    # ── harm ──

    def harm(self, what: str) -> bool:
        """Do one thing to somebody; False where there was nobody."""
        victim = self.random.choice(self.machines)
        if what == "daemon":
            assert self.daemon is not None
            self.daemon.kill()
            self.daemon.wait()
            start_s = time.monotonic()
            self.serve()
            self.away_s.append(time.monotonic() - start_s)
        elif what == "agent":
            self.agents[victim].kill()
            self.agents[victim].wait()
            self.join(victim)
        elif what == "cut":
            _ip("link", "set", f"{victim}a", "down")
            # Some are back before the lease is over, some after.
            self.cut_until_s[victim] = time.monotonic() + self.lease_s * self.random.uniform(
                0.2, 2.0
            )
        else:
            file = BEGUN if what == "supervisor" else RUNNING
            found = [one for path in sorted(self.folder.glob(f"*/attempts/*-*/{file}"))
                     if not (path.parent / "result.json").exists()
                     and (one := _process_in(path)) is not None]  # fmt: skip
            if not found:
                return False
            return system.send(self.random.choice(found), signal.SIGKILL)
        return True

    def mend(self, *, is_all: bool = False) -> None:
        """Join links whose time is over."""
        for name, until_s in list(self.cut_until_s.items()):
            if is_all or time.monotonic() >= until_s:
                _ip("link", "set", f"{name}a", "up")
                del self.cut_until_s[name]

    def storm(self, num_jobs: int, kills: list[str], job_s: float, patience_s: float) -> None:
        """Submit jobs and do harm, until all have ended."""
        numbers: list[int] = []
        kills, num_harms, misses = kills[:], max(len(kills), 1), 0
        until_s = time.monotonic() + patience_s
        next_harm_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            self.mend()
            # Jobs come as harm is done, so that there is always something to hit.
            due = num_jobs * (0.15 + 1.0 - len(kills) / num_harms) + misses
            if len(numbers) < min(num_jobs, due):
                seconds = self.random.uniform(0.3, 1.7) * job_s
                spec = {
                    "name": f"job {len(numbers)}", "retries": 100, "grace_s": 2.0,
                    "command": [sys.executable, "-S", "-c", JOB, str(self.shared), str(seconds)],
                }  # fmt: skip
                numbers.append(self.client.submit(spec)["id"])
            if kills and time.monotonic() >= next_harm_s:
                device_type = kills.pop()
                if self.harm(device_type):
                    self.done[device_type] = self.done.get(device_type, 0) + 1
                else:
                    # Nobody was there: another kind first, and one more job; after the last job
                    # an agent in place of what is no more.
                    misses += 1
                    is_late = len(numbers) == num_jobs and not self._live()
                    kills.insert(0, "agent" if is_late else device_type)
                next_harm_s = time.monotonic() + self.random.uniform(0.2, 1.5)
            if len(numbers) == num_jobs and not kills and not self._live():
                return
            time.sleep(0.05 if len(numbers) < num_jobs else 0.3)

    def _live(self) -> int:
        found = patiently(lambda: self.client.get("/v1/jobs", live=True, limit=1), 30.0)
        return len(found["jobs"])

    def report(self) -> dict[str, Any]:
        """What became of everything."""
        self.mend(is_all=True)
        jobs = list(self.client.pages("/v1/jobs", "jobs", limit=500))
        statuses: dict[str, int] = {}
        for job in jobs:
            statuses[job["status"]] = statuses.get(job["status"], 0) + 1
        unfinished = [job["id"] for job in jobs if not _is_done(self.client, job["id"])]
        conflicts = self.shared / "conflicts"
        deadline_s = time.monotonic() + 30.0
        while (left := self._left()) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        return {
            "jobs": len(jobs), "statuses": statuses,
            "attempts": sum(job["attempt"] for job in jobs), "harm": self.done,
            "without_whole_output": unfinished,
            "conflicts": conflicts.read_text().splitlines() if conflicts.exists() else [],
            "processes_left": left,
            "daemon_back_s": {"most": max(self.away_s, default=0.0),
                              "median": sorted(self.away_s)[len(self.away_s) // 2]
                              if self.away_s else 0.0},
        }  # fmt: skip

    def _left(self) -> int:
        wanted = os.fsencode(str(self.shared))
        return sum(wanted in _command_line(one.pid) for one in system.processes()
                   if one.pid != os.getpid() and b"flock" in _command_line(one.pid))  # fmt: skip


def _is_done(client: FleetClient, number: int) -> bool:
    """True if the output of the last attempt is there to its end."""
    try:
        log = b"".join(client.blocks(f"/v1/jobs/{number}/log"))
    except HocketError:
        return False
    return log.endswith(b"done\n")


def _process_in(path: Path) -> system.Process | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = read_json(path)
        if content is not None:
            one = content["commands"][0] if "commands" in content else content
            return system.Process(one["pid"], one["start_ticks"], 0)
    return None


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _harms(num_kills: int, num_cuts: int, seed: int) -> list[str]:
    device_types = ("daemon", "agent", "supervisor", "command")
    found = [device_types[at % len(device_types)] for at in range(num_kills)] + ["cut"] * num_cuts
    random.Random(seed).shuffle(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--lease", type=float, default=12.0, help="seconds")
    parser.add_argument("--job-seconds", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=900.0, help="give up after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="agents-storm-"))
    storm = Storm(folder, options.machines, options.lease, options.seed)
    start_s = time.monotonic()
    try:
        storm.open()
        storm.serve()
        for name in storm.machines:
            storm.join(name)
        harms = _harms(options.kills, options.cuts, options.seed)
        storm.storm(options.jobs, harms, options.job_seconds, options.seconds)
        report = storm.report() | {"took_s": time.monotonic() - start_s}
    finally:
        storm.close()
    holds = (
        report["statuses"] == {"succeeded": options.jobs}
        and not report["conflicts"]
        and not report["without_whole_output"]
        and not report["processes_left"]
        and sum(report["harm"].values()) == options.kills + options.cuts
    )
    print(json.dumps({**report, "holds": holds, "folder": str(folder)}, indent=1))
    if holds:
        shutil.rmtree(folder)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
