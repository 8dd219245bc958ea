"""CPU time of allocation policies against the number of jobs and device types.

    python benchmarks/fleet/policies.py [--throughputs FILE] [--draws N]

Throughputs are Gavel's (``simulation_throughputs.json``) where the file is at hand, else made up
with the same number of profiles. ``distinct`` scales every entry by its own factor, so that no two
jobs are alike. Times are the least of seven repeats, of three for the largest, of one where jobs
that are all different share devices; after compilation, on one thread. The load of the machine is
printed with them. ``--draws`` tells gaps only, of 2,048 scarce jobs that are all different and
share devices, in so many draws: of jobs from the profiles, then of the slowdown of each pair.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from gavel_cluster import DATA, DEVICE_TYPES, TABLE

from hocket.fleet.allocation import Allocation
from hocket.fleet.cluster_snapshot import ClusterSnapshot, Pairs
from hocket.fleet.policies import POLICIES
from hocket.fleet.solve.check import verify_allocation
from hocket.fleet.throughputs import read_throughputs


def profiles(path: Path, gangs: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Throughputs of profiles alone, beside each other, and their gangs."""
    if not path.exists():
        random = np.random.default_rng(0)
        alone = np.sort(random.lognormal(1.0, 1.0, (26, 3)), axis=1)[:, ::-1]
        beside = alone[:, None, :] * random.uniform(0.3, 1.0, (26, 26, 3))
        return alone, beside, np.ones(26, dtype=np.int64)
    table = read_throughputs(path).on(DEVICE_TYPES)
    table = table.only([at for at, one in enumerate(table.profiles) if one.gang in gangs])
    return table.alone, table.beside, np.array([one.gang for one in table.profiles])


def gavel_snapshot(
    path: Path,
    num_jobs: int,
    *,
    multi: bool = False,
    sharing: bool = False,
    distinct: bool = False,
    seed: int = 3,
) -> ClusterSnapshot:
    random = np.random.default_rng(seed)
    alone, beside, gang = profiles(path, (1, 2, 4, 8) if multi else (1,))
    profile = random.integers(0, len(alone), num_jobs)
    factor = random.uniform(0.7, 1.3, (num_jobs, len(DEVICE_TYPES))) if distinct else 1.0
    pairs = None
    if sharing and distinct:
        rates = beside[profile[:, None], profile[None, :]] * factor[:, None, :]
        pairs = Pairs(profile_of=np.arange(num_jobs), steps_per_s=rates)
    elif sharing:
        pairs = Pairs(profile_of=profile, steps_per_s=beside)
    return _snapshot(
        DEVICE_TYPES, alone[profile] * factor, gang[profile], num_jobs // 4, random, pairs
    )


def wide_snapshot(num_jobs: int, num_types: int, devices: int) -> ClusterSnapshot:
    """Jobs that are all different on many device types."""
    random = np.random.default_rng(7)
    steps = random.lognormal(0.0, 0.7, (num_jobs, num_types)) * np.linspace(4, 1, num_types)
    device_types = tuple(f"type{j}" for j in range(num_types))
    return _snapshot(device_types, steps, np.ones(num_jobs, dtype=np.int64), devices, random, None)


def _snapshot(
    device_types: tuple[str, ...],
    steps: np.ndarray,
    gang: np.ndarray,
    devices: int,
    random: np.random.Generator,
    pairs: Pairs | None,
) -> ClusterSnapshot:
    num_jobs, num_teams = len(steps), 50
    return ClusterSnapshot(
        device_types=device_types,
        num_devices=np.full(len(device_types), devices),
        price_per_hour=np.linspace(3.0, 1.0, len(device_types)),
        ids=tuple(map(str, range(num_jobs))),
        steps_per_s=steps,
        gang=gang,
        weight=np.ones(num_jobs),
        remaining_steps=random.uniform(1e4, 1e6, num_jobs),
        elapsed_s=random.uniform(0.0, 1e5, num_jobs),
        deadline_s=np.full(num_jobs, np.inf),
        isolated_s=random.uniform(0.0, 1e5, num_jobs),
        arrival=np.arange(num_jobs),
        team_of=random.integers(0, num_teams, num_jobs),
        teams=tuple(map(str, range(num_teams))),
        team_weight=random.integers(1, 4, num_teams).astype(float),
        pairs=pairs,
    )


def least_ms(call: Callable[[], Allocation], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start_s = time.process_time()
        call()
        times.append(time.process_time() - start_s)
    return 1e3 * min(times)


def extra_mb(call: Callable[[], Allocation]) -> float:
    """Memory that a first solve takes beyond what the process has, measured in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(write, str((after - before) / 1024).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = float(os.read(read, 100))
    os.close(read)
    os.close(write)
    return found


def report(label: str, policy: str, snapshot: ClusterSnapshot, repeats: int = 7) -> None:
    solve = POLICIES[policy]
    extra = extra_mb(lambda: solve(snapshot))
    answer = solve(snapshot)
    verify_allocation(snapshot, answer)
    cold = least_ms(lambda: solve(snapshot), repeats)
    warm = least_ms(lambda: solve(snapshot, answer.warm), repeats)
    print(
        f"| {label} | {policy} | {snapshot.num_jobs} x {snapshot.num_types} | {cold:.1f} "
        f"| {warm:.1f} "
        f"| {answer.gap:.0e} | {answer.notes.get('classes', '–')} | {extra:.0f} |",
        flush=True,
    )


def report_draws(path: Path, num_draws: int) -> None:
    """Gaps where no two jobs are alike, of pairs that resemble each other and of random ones."""
    print("| seed | gap | gap, slowdowns of pairs drawn |")
    print("|---|---|---|", flush=True)
    for seed in range(num_draws):
        snapshot = gavel_snapshot(path, 2048, sharing=True, distinct=True, seed=seed)
        snapshot = replace(snapshot, num_devices=snapshot.num_devices // 2)
        kept = np.random.default_rng(seed).uniform(0.3, 1.0, (2048, 2048, len(DEVICE_TYPES)))
        pairs = Pairs(
            profile_of=np.arange(2048), steps_per_s=snapshot.steps_per_s[:, None, :] * kept
        )
        answers = [POLICIES["las"](one) for one in (snapshot, replace(snapshot, pairs=pairs))]
        print(f"| {seed} | {answers[0].gap:.0e} | {answers[1].gap:.0e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--throughputs", type=Path, default=DATA / TABLE)
    parser.add_argument("--draws", type=int, help="tell gaps only, of so many draws")
    options = parser.parse_args()
    path = options.throughputs
    if options.draws:
        report_draws(path, options.draws)
        return
    # Compiling and loading scipy is no part of the measured memory.
    POLICIES["las"](gavel_snapshot(path, 64, sharing=True))
    POLICIES["las"](gavel_snapshot(path, 160, sharing=True, distinct=True))
    print("| jobs | policy | size | cold ms | warm ms | gap | classes | extra MB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for num_jobs in (128, 512, 2048, 8192):
        report("classes", "las", gavel_snapshot(path, num_jobs))
    report("classes, gangs", "las", gavel_snapshot(path, 2048, multi=True))
    for num_jobs in (128, 512, 2048, 8192):
        report("distinct", "las", gavel_snapshot(path, num_jobs, distinct=True))
    for policy in ("finish-time-fairness", "makespan", "hierarchical", "hierarchical-fifo"):
        for num_jobs in (512, 2048):
            report("distinct", policy, gavel_snapshot(path, num_jobs, distinct=True))
    report("classes", "hierarchical", gavel_snapshot(path, 2048, multi=True))
    report("distinct, scarce", "makespan", wide_snapshot(2048, 3, 32))
    report("classes, agnostic", "las-agnostic", gavel_snapshot(path, 2048, multi=True))
    report("classes", "max-throughput", gavel_snapshot(path, 2048))
    for devices in (256, 2048):
        report(f"distinct, {devices} of each", "las", wide_snapshot(16384, 8, devices), 3)
    for multi in (False, True):
        snapshot = gavel_snapshot(path, 2048, multi=multi, sharing=True)
        report("classes, shared" + (", gangs" if multi else ""), "las", snapshot)
    for num_jobs in (128, 256, 512, 2048):
        snapshot = gavel_snapshot(path, num_jobs, sharing=True, distinct=True)
        report("distinct, shared", "las", snapshot, 1)
        scarce = replace(snapshot, num_devices=snapshot.num_devices // 2)
        report("distinct, shared, scarce", "las", scarce, 1)
    after = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"\nload averages at the end: {after} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
