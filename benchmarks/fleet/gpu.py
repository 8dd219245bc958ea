"""The fleet's service with real trainings of GPT-2 that share one GPU; under 8 minutes.

    PYTHONPATH=src python benchmarks/fleet/gpu.py --device cuda [--round 4] [--output FOLDER]
    python benchmarks/fleet/gpu.py --device cpu --round 6 --window 300 --limit 1200  # small

``hocket fleet serve`` and ``submit`` run as processes. In order: the speed is predicted and
measured; one training runs alone; three share the device with weights 1, 1 and 2, one of them a
script that knows SIGTERM only, and the daemon is killed (-9) meanwhile; a training is killed (-9).
A turn lasts at least four rounds. Prints a table, writes it as JSON, and exits with 1 where a
promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_findings import (
    Findings,
    read_ledger,
    runs_of,
    tell_losses,
    tell_machine,
    tell_memory,
    tell_no_double,
    tell_saves,
    tell_shares,
    tell_switches,
)
from gpu_service import HOCKET, Service, environment, wait_until
from gpu_train import SHAPES

from hocket.fleet.rounds.state import Rules
from hocket.processes import system

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}
PLAIN = "b"
RATE_STEPS = 200
AWAY_S = 3.0


# ── what is tried ────────────────────────────────────────────────────────────────────────────────


def start_prediction() -> subprocess.Popen[str]:
    """``hocket fleet throughputs`` for what is trained on a GPU."""
    shape = SHAPES["cuda"]
    options = ["--batch", str(shape["batch"]), "--seq", str(shape["sequence"])]
    options += ["--dtype", shape["dtype"], "--on", "h200", "--json"]
    command = [*HOCKET, "fleet", "throughputs", "gpt2", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def try_speed(service: Service, findings: Findings, device: str, predicted: str) -> float:
    """Steps per second that the service saw, against the prediction; those seen."""
    service.submit("rate", steps=RATE_STEPS, is_exact=False, save_every_s=300.0)
    seen: list[tuple[float, float]] = []

    def has_ended() -> bool:
        job = service.job("rate")
        done = job["done_steps"]
        is_news = not seen or done > seen[-1][1]
        if job["status"] == "running" and is_news and RATE_STEPS > done >= RATE_STEPS // 10:
            seen.append((time.time(), done))
        return bool(job["ended_s"] is not None)

    wait_until(has_ended, "the speed was measured")
    service.wait_for_success("rate")
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    measured = (last - first) / (last_s - first_s)
    told = json.loads(predicted)["models"][0]["device_types"]["h200"]["step_s"]
    findings.facts["speed"] = {"predicted": 1.0 / told, "measured": measured, "seen": seen}
    compared = f" ({1.0 / told / measured - 1.0:+.0%})" if device == "cuda" else " (another model)"
    findings.tell(
        "steps per second of GPT-2 small on h200: predicted, measured by the service",
        f"{1.0 / told:.2f}, {measured:.2f}{compared}",
    )
    return measured


def try_sharing(service: Service, findings: Findings, window_s: float) -> tuple[float, float]:
    """Three jobs for a while, with a daemon that is killed; from when until when."""
    for name in WEIGHTS:
        service.submit(name, weight=WEIGHTS[name], is_plain=name == PLAIN)
    start_s: float = wait_until(lambda: service.attempts("a")[0]["started_s"], "job a was started")
    end_s = start_s + window_s
    time.sleep(max(start_s + window_s / 3 - time.time(), 0.0))
    kill_daemon(service, findings)
    time.sleep(max(end_s - time.time(), 0.0))
    return start_s, end_s


def kill_daemon(service: Service, findings: Findings) -> None:
    """kill -9 of the daemon while a training is in the middle of its turn."""
    name, attempt = wait_until(lambda: fresh_turn(service), "a training began its turn")
    training = service.training(name)
    service.kill()
    before = len(service.steps_of(name, attempt))
    time.sleep(AWAY_S)
    during = len(service.steps_of(name, attempt)) - before
    began_s = time.monotonic()
    service.start()
    back_s = time.monotonic() - began_s
    newest = service.attempts(name)[-1]
    is_same = training is not None and service.training(name) == training
    is_adopted = newest["attempt"] == attempt and newest["ended_s"] is None and is_same
    findings.tell(
        f"kill -9 of the daemon: steps of the training in {AWAY_S:.0f} s without it; "
        "back after; same process, same attempt",
        f"{during}; {back_s:.1f} s; {'yes' if is_adopted else 'no'}",
        holds=during > 0 and is_adopted,
    )
    over = wait_until(lambda: ended(service, name, attempt), "the new daemon ended the attempt")
    findings.tell(
        "the attempt that was taken over, stopped later by its new daemon: exit code",
        str(over["exit_code"]),
        holds=over["exit_code"] == 0,
    )


def fresh_turn(service: Service) -> tuple[str, int] | None:
    """A job with a lease that has done some steps of its turn, and its attempt."""
    for name in WEIGHTS:
        job = service.job(name)
        steps = service.steps_of(name, job["attempt"]) if job["status"] == "running" else []
        if name != PLAIN and len(steps) >= 3 and time.time() - steps[0]["time_s"] < 3.0:
            return name, job["attempt"]
    return None


def ended(service: Service, name: str, attempt: int) -> dict[str, Any] | None:
    found = next(one for one in service.attempts(name) if one["attempt"] == attempt)
    return found if found["ended_s"] is not None else None


def kill_training(service: Service, findings: Findings, name: str) -> None:
    """kill -9 of a training some time after it saved."""
    for other in WEIGHTS:
        if other != name:
            service.command("cancel", str(service.jobs[other]))
    wait_until(lambda: service.job(name)["status"] == "running", f"job {name} runs")
    attempt = service.job(name)["attempt"]
    first = wait_until(lambda: service.steps_of(name, attempt), f"job {name} trains")[0]["step"]
    wait_until(lambda: service.checkpoint_step(name) > first, f"job {name} saved")
    time.sleep(2.0)
    victim = service.training(name)
    saved, killed_s = service.checkpoint_step(name), time.time()
    is_killed = victim is not None and system.send(victim, signal.SIGKILL)
    over = wait_until(lambda: ended(service, name, attempt), "the service knew of the kill")
    again = wait_until(lambda: service.steps_of(name, attempt + 1), f"job {name} trains again")
    reached = service.steps_of(name, attempt)[-1]["step"] + 1
    start = again[0]["step"]
    holds = is_killed and over["exit_code"] == -signal.SIGKILL and start == saved
    findings.tell(
        f"kill -9 of the training at step {reached}: last checkpoint that counts, "
        "step of the next attempt, steps done again",
        f"{saved}, {start}, {reached - start}",
        holds=holds and service.job(name)["failures"] == 1,
    )
    findings.tell(
        "seconds from that kill until the service knew, until the next step",
        f"{over['ended_s'] - killed_s:.1f}, {again[0]['time_s'] - killed_s:.1f}",
    )


# ── the whole ────────────────────────────────────────────────────────────────────────────────────


def try_all(service: Service, findings: Findings, arguments: argparse.Namespace) -> None:
    prediction = start_prediction()
    service.start()
    predicted = prediction.communicate()[0]
    say("the service answers, the speed is predicted")
    rate = try_speed(service, findings, arguments.device, predicted)
    say(f"{rate:.2f} steps per second")
    tell_machine(findings, read_ledger(service.folder))
    num_steps = round(rate * arguments.alone)
    service.submit("alone", steps=num_steps)
    service.wait_for_success("alone")
    say(f"{num_steps} steps were done alone")
    window_s = try_sharing(service, findings, arguments.window)
    ledger = read_ledger(service.folder)
    shared = runs_of({name: service.attempts(name) for name in WEIGHTS}, ledger)
    usual = Rules()
    tell_shares(findings, shared, WEIGHTS, window_s, arguments.round)
    tell_switches(findings, shared, arguments.window, usual.stickiness_rounds * usual.round_s)
    say("the window is over")
    kill_training(service, findings, "c")
    attempts = findings.facts["attempts"] = {name: service.attempts(name) for name in service.jobs}
    service.close()
    ledger = read_ledger(service.folder)
    runs = runs_of(attempts, ledger)
    tell_no_double(findings, runs, ledger)
    tell_losses(findings, ledger, list(WEIGHTS), "alone", {"a": 1, "b": 1, "c": 2})
    tell_memory(findings, runs)
    tell_saves(findings, ledger)
    left = [one["pid"] for one in ledger if one["what"] == "process" and _lives(one["pid"])]
    findings.tell("processes left at the end", str(len(left)), holds=not left)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextmanager
def told_in_the_end(
    service: Service, findings: Findings, arguments: argparse.Namespace
) -> Iterator[None]:
    """Whatever happens: nothing is left running, and what was found is told."""
    began_s = time.monotonic()
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(arguments.limit)
    try:
        yield
        signal.alarm(0)
    except Exception:
        signal.alarm(0)
        traceback.print_exc()
        print(_logs(service), file=sys.stderr)
        findings.tell("the trial came to its end", "no", holds=False)
        if hasattr(service, "process") and service.process.poll() is None:
            # What is told next must not depend on a service that may be what failed.
            with suppress(Exception):
                service.close()
    findings.tell("the whole trial", f"{time.monotonic() - began_s:.0f} s")
    print(findings.table(), flush=True)
    findings.write(arguments.output / "fleet_gpu.json")
    if (service.folder / "ledger").exists():
        shutil.copy(service.folder / "ledger", arguments.output / "fleet_gpu_ledger.jsonl")


def _give_up(number: int, frame: object) -> None:
    raise RuntimeError("the trial took too long")


def _logs(service: Service) -> str:
    paths = [service.folder / "serve.log", *sorted(service.state.glob("logs/*/attempt-*.log"))]
    ends = [(path, path.read_text(errors="replace")[-1500:]) for path in paths if path.exists()]
    return "\n".join(f"== {path}\n{end}" for path, end in ends)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--round", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--window", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--alone", type=float, default=65.0, metavar="SECONDS")
    parser.add_argument("--limit", type=int, default=540, metavar="SECONDS", help="of the whole")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    arguments = parser.parse_args()
    findings = Findings(
        facts={
            "arguments": {key: str(one) for key, one in vars(arguments).items() if key != "output"}
        }
    )
    with tempfile.TemporaryDirectory(prefix="hocket-fleet-", ignore_cleanup_errors=True) as name:
        service = Service(Path(name), arguments.device, arguments.round)
        service.state.mkdir(mode=0o700)
        with told_in_the_end(service, findings, arguments):
            try_all(service, findings, arguments)
    if findings.broken:
        raise SystemExit(f"broken: {'; '.join(findings.broken)}")


if __name__ == "__main__":
    main()
