"""The fleet's service under load: submissions, restarts, and daemons that are killed.

    python benchmarks/fleet/under_load.py [--only submit|restart|queue|kill-daemon] [--trials 100]

submit       2,048 live jobs on 3 device types, rounds of 2 s, a pretended engine: time from
             asking to the answer, which comes after the commit is on disk.
restart      time to open a store with 2,048 live and 10,000 ended jobs, all rows checked.
queue        20,000 live jobs, of which most wait: processor time per submission and of a restart.
kill-daemon  a real daemon process with real job processes is killed (SIGKILL) at random moments;
             the store and the processes' own logs are then checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
from service.fake_executor import FakeExecutor, fleet_devices

from hocket.fleet.rounds.state import Rules, new_state
from hocket.service.daemon import Daemon
from hocket.service.records import AttemptRecord, EventRecord, JobRecord
from hocket.service.spec import JobSpec
from hocket.service.store import Store
from hocket.service.store.tables import Batch

NUM_LIVE = 2048
NUM_ENDED = 10_000
NUM_QUEUED = 20_000
DEVICE_TYPES = ("v100", "p100", "k80")


def make_spec(random: np.random.Generator) -> JobSpec:
    speed = random.lognormal(0.0, 0.5) * np.array([4.0, 2.0, 1.0])
    return JobSpec(
        name="benchmark",
        command=("python", "train.py"),
        throughputs=dict(
            zip(DEVICE_TYPES, (speed * random.uniform(0.8, 1.2, 3)).tolist(), strict=True)
        ),
        total_steps=float(random.uniform(1e5, 1e7)),
        gang=int(random.choice([1, 1, 1, 2, 4])),
    )


def filled(folder: Path, num_jobs: int, round_s: float) -> tuple[Store, Daemon, FakeExecutor]:
    """A daemon with so many live jobs."""
    executor = FakeExecutor(fleet_devices(v100=256, p100=256, k80=256))
    store = Store.open(folder)
    daemon = Daemon(store, executor, Rules(round_s=round_s), DEVICE_TYPES)
    daemon.start()
    random = np.random.default_rng(0)
    specs = [make_spec(random) for _ in range(num_jobs)]
    run_in_threads(16, specs, daemon.submit)
    return store, daemon, executor


def run_in_threads(num: int, items: list[JobSpec], act: Callable[[JobSpec], object]) -> None:
    def some(first: int) -> None:
        for item in items[first::num]:
            act(item)

    threads = [threading.Thread(target=some, args=(first,)) for first in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def submit(folder: Path) -> None:
    store, daemon, executor = filled(folder, NUM_LIVE, 2.0)
    random, waits_ms, cpu_s = np.random.default_rng(1), [], time.process_time()
    began_s, first_round = time.perf_counter(), daemon.state.round_number
    for _ in range(400):
        start_s = time.perf_counter()
        daemon.submit(make_spec(random))
        waits_ms.append(1e3 * (time.perf_counter() - start_s))
        # One job ends for each that comes, so that as many are live all the time.
        for name in executor.running()[:1]:
            executor.exit(name, 0)
        time.sleep(0.02)
    report_waits("one after the other", waits_ms)
    rounds = daemon.state.round_number - first_round
    passed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    print(f"{len(daemon.service_state.jobs)} live jobs, {rounds} rounds in {passed_s:.1f} s, "
          f"{cpu_s:.1f} s CPU")  # fmt: skip
    job_classes_ms: list[float] = []

    def timed(spec: JobSpec) -> None:
        start_s = time.perf_counter()
        daemon.submit(spec)
        job_classes_ms.append(1e3 * (time.perf_counter() - start_s))

    run_in_threads(8, [make_spec(random) for _ in range(400)], timed)
    report_waits("eight at once", job_classes_ms)
    daemon.close()
    store.close()


def report_waits(what: str, waits_ms: list[float]) -> None:
    p50, p99 = np.percentile(waits_ms, [50, 99])
    print(f"submit, {what}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {max(waits_ms):.1f} ms")


def restart(folder: Path) -> None:
    store = Store.open(folder)
    store.commit(ended_jobs())
    store.close()
    store, daemon, executor = filled(folder, NUM_LIVE, 3600.0)
    daemon.close()
    store.close()
    size_mb = sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file()) / 1e6
    start_s, cpu_s = time.perf_counter(), time.process_time()
    store = Store.open(folder)
    opened_s = time.perf_counter() - start_s
    daemon = Daemon(store, executor, Rules(round_s=3600.0), DEVICE_TYPES)
    daemon.start()
    daemon.submit(make_spec(np.random.default_rng(2)))
    passed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    print(
        f"restart with {len(daemon.service_state.jobs)} live and {NUM_ENDED} ended jobs "
        f"({size_mb:.0f} MB): checked in {opened_s:.2f} s, "
        f"first answer after {passed_s:.2f} s ({cpu_s:.2f} s CPU)"
    )
    daemon.close()
    store.close()


def queue(folder: Path) -> None:
    cpu_s = time.process_time()
    store, daemon, executor = filled(folder, NUM_QUEUED, 3600.0)
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / NUM_QUEUED
    print(f"{NUM_QUEUED} jobs, 16 at once: {cpu_ms:.2f} ms CPU per submission")
    random, cpu_s, count = np.random.default_rng(1), time.process_time(), 100
    for _ in range(count):
        daemon.submit(make_spec(random))
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / count
    print(f"{count} more, one after the other: {cpu_ms:.2f} ms CPU per submission")
    daemon.close()
    store.close()
    cpu_s = time.process_time()
    store = Store.open(folder)
    opened_s = time.process_time() - cpu_s
    daemon = Daemon(store, executor, Rules(round_s=3600.0), DEVICE_TYPES)
    daemon.start()
    daemon.submit(make_spec(random))
    cpu_s = time.process_time() - cpu_s
    print(f"restart: opened and checked in {opened_s:.2f} s CPU, first answer after {cpu_s:.2f} s")
    daemon.close()
    store.close()


def ended_jobs() -> Batch:
    """History: each job had one attempt and four events."""
    random, numbers = np.random.default_rng(0), range(1, NUM_ENDED + 1)
    attempt = AttemptRecord(
        job=1, attempt=1, devices=("v100-0",), device_type="v100", token="x" * 32, decided_s=0.0,
        started_s=0.0, ended_s=1.0, outcome="finished", exit_code=0,
    )  # fmt: skip
    return Batch(
        state=new_state(DEVICE_TYPES, (), Rules()),
        jobs=[
            JobRecord(
                number=number,
                spec=make_spec(random),
                status="succeeded",
                submitted_s=0.0,
                attempt=1,
            )
            for number in numbers
        ],
        attempts=[replace(attempt, job=number) for number in numbers],
        events=[
            EventRecord(sequence=sequence, time_s=0.0, kind="started", job=sequence // 4)
            for sequence in range(1, 4 * NUM_ENDED + 1)
        ],
    )


def kill_daemon(folder: Path, trials: int) -> None:
    from service.kill_trials import run_trials

    findings = run_trials(folder, trials)
    print(findings)
    if not findings.is_sound:
        sys.exit("a promise was broken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["submit", "restart", "queue", "kill-daemon"])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="on the disk that counts")
    options = parser.parse_args()
    runs: dict[str, Callable[[Path], None]] = {
        "submit": submit,
        "restart": restart,
        "queue": queue,
        "kill-daemon": lambda folder: kill_daemon(folder, options.trials),
    }
    for name, run in runs.items():
        if options.only in (None, name):
            folder = Path(tempfile.mkdtemp(prefix="fleet-service-", dir=options.folder))
            try:
                run(folder)
            finally:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
