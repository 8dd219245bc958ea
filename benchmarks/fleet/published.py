"""Gavel's published tables beside ours, and what the improved rounds gain with preemption costs.

    python benchmarks/fleet/published.py [DATA] [--only PART] [--policy NAME] [--rate R]
        [--jobs A:B]

DATA is a folder with Gavel's table (``gavel/simulation_throughputs.json``). Workloads are those of
the published evaluation: its seeded generator is repeated here draw by draw (job types, gangs,
durations and weights from one stream, gaps between arrivals from another), which gives the jobs of
``gavel_generated/`` exactly, and so those of every other rate and of the other tables too.

Parts: ``single`` and ``multi`` (average completion time by rate), ``makespan``, ``weights``, and
``preemptions`` (both mechanisms on ten workloads, at three costs and with four slacks; ``--jobs``
says which jobs count there).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gavel_cluster import BATCHES, DATA, DEVICE_TYPES, devices_of_each_type, gavel_table

from hocket.fleet.rounds import Rules
from hocket.fleet.simulator import FleetRun, TraceWork, bind, simulate
from hocket.fleet.throughputs import Throughputs
from hocket.fleet.traces import Trace

FLEET = devices_of_each_type(36)
GAVEL, IMPROVED = Rules(mechanism="gavel"), Rules()
RARELY = replace(IMPROVED, min_solve_s=1920.0)
NONE = math.nan

SINGLE_RATES = (3.2, 4.8, 5.2, 5.6, 6.0)
SINGLE: dict[str, tuple[float, ...]] = {
    "las-agnostic": (23.59, 35.79, 63.78, 95.99, NONE),
    "las": (16.08, 18.97, 22.02, 28.96, 41.23),
    "las+sharing": (16.18, 18.67, 19.14, 19.64, 20.42),
    "ftf-agnostic": (23.58, 34.93, 64.46, 85.54, 109.14),
    "finish-time-fairness": (16.57, 20.43, 23.38, 30.47, 43.05),
    "fifo-agnostic": (22.21, 99.19, 151.67, NONE, NONE),
    "fifo": (15.95, 22.24, 56.69, 104.12, 150.04),
}
MULTI_RATES = (2.6, 2.8)
MULTI: dict[str, tuple[float, ...]] = {
    "las-agnostic": (70.54, 169.93),
    "las": (36.44, 55.78),
    "las+sharing": (30.51, 38.25),
    "ftf-agnostic": (64.38, NONE),
    "finish-time-fairness": (33.90, 41.56),
    "fifo-agnostic": (304.76, 414.68),
    "fifo": (93.60, 204.44),
}
MAKESPAN_H = {
    "fifo-agnostic": 619.5, "makespan": 244.2, "makespan+sharing": 226.2,
}  # fmt: skip
"""Of 700 jobs that are all there from the start."""
WEIGHTS: dict[tuple[str, float], str] = {
    ("las", 0.2): "18.6 to 20.1 and 17.1 to 20.2, from 0.2 to 2.4 jobs per hour",
    ("las", 0.8): "the same", ("las", 1.6): "the same", ("las", 2.4): "the same",
    ("las-agnostic", 0.2): "27.8 to 28.1 (weight 5), from 0.2 to 0.8 jobs per hour",
    ("las-agnostic", 0.8): "the same",
}  # fmt: skip

STUDY = [(rate, seed) for rate in (4.0, 4.8, 5.2, 5.6, 6.0) for seed in (1, 2)]
"""Not the workload by which defaults were chosen, which is that of seed 0."""
COSTS_S = (0.0, 30.0, 60.0)
SLACKS = (0.0, 30.0, 150.0, 600.0)


class Template(NamedTuple):
    """A kind of job of the published mix."""

    job_type: str
    can_be_gang: bool


def main() -> None:
    """Run all parts, or one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--policy", help="only this row of a table")
    parser.add_argument("--rate", type=float, help="only this rate")
    parser.add_argument("--jobs", default="500:1000", help="jobs that count in preemptions")
    options = parser.parse_args()
    table = gavel_table(options.data)
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(table, options)


# ── the published workloads ──────────────────────────────────────────────────────────────────────


def published_trace(
    table: Throughputs,
    num_jobs: int,
    jobs_per_hour: float,
    seed: int = 0,
    *,
    has_gangs: bool = False,
    has_weights: bool = False,
) -> Trace:
    """The jobs that the published evaluation drew; a rate of 0 for all at once."""
    of_jobs, of_gaps = random.Random(seed + 2), random.Random(seed + 3)
    templates = list(_templates())
    gang, total_steps, duration_s, weight = np.ones((4, num_jobs))
    arrival_s, job_types, time_s = np.zeros(num_jobs), [], 0.0
    for job in range(num_jobs):
        wanted = _draw_gang(of_jobs)
        gang[job] = wanted if has_gangs else 1
        duration_s[job] = _draw_duration_s(of_jobs)
        template = of_jobs.choice(templates)
        while gang[job] > 1 and not template.can_be_gang:
            template = of_jobs.choice(templates)
        if has_weights and of_jobs.uniform(0, 1) <= 0.2:
            weight[job] = 5.0
        speed = table.alone[table.find(template.job_type, int(gang[job])), 0]
        total_steps[job] = duration_s[job] * speed
        arrival_s[job] = time_s
        job_types.append(template.job_type)
        if jobs_per_hour > 0.0:
            time_s += -math.log(1.0 - of_gaps.random()) * 3600.0 / jobs_per_hour
    return Trace(
        names=tuple(map(str, range(num_jobs))),
        job_types=tuple(job_types),
        arrival_s=arrival_s,
        gang=gang.astype(np.int64),
        weight=weight,
        total_steps=total_steps,
        duration_s=duration_s,
        slo_s=np.full(num_jobs, np.inf),
    )


def _templates() -> Iterator[Template]:
    batches = {**BATCHES, "Recommendation": (512, 1024, 2048, 4096, 8192)}
    for model, sizes in batches.items():
        for size in sizes:
            yield Template(f"{model} (batch size {size})", model in BATCHES)
    yield Template("A3C", False)
    yield Template("CycleGAN", False)


def _draw_gang(source: random.Random) -> int:
    part = source.uniform(0, 1)
    return 1 if part < 0.7 else 2 if part <= 0.8 else 4 if part <= 0.95 else 8


def _draw_duration_s(source: random.Random) -> float:
    is_long = source.random() >= 0.8
    return 60.0 * 10.0 ** (source.uniform(3, 4) if is_long else source.uniform(1.5, 3))


# ── the published tables ─────────────────────────────────────────────────────────────────────────


def _run(work: TraceWork, rules: Rules, name: str, measured: tuple[int, int]) -> FleetRun:
    policy = name.removesuffix("+sharing")
    rules = replace(rules, policy=policy)
    is_shared = name.endswith("+sharing")
    return simulate(work, FLEET, rules, shares_devices=is_shared, measured=measured)


def _mechanisms(name: str) -> tuple[Rules, ...]:
    """Jobs share devices in the improved rounds only."""
    if name.endswith("+sharing"):
        return (RARELY,)
    return (GAVEL, IMPROVED)


def _by_rate(
    table: Throughputs,
    options: argparse.Namespace,
    published: dict[str, tuple[float, ...]],
    rates: tuple[float, ...],
    has_gangs: bool,
) -> None:
    for name, hours in published.items():
        for rate, theirs_h in zip(rates, hours, strict=True):
            if options.policy not in (None, name) or options.rate not in (None, rate):
                continue
            if not math.isnan(theirs_h):
                trace = published_trace(table, 16_000, rate, has_gangs=has_gangs)
                _compare(f"{name} {rate}", bind(trace, DEVICE_TYPES, table), name, theirs_h)


def _compare(label: str, work: TraceWork, name: str, theirs_h: float) -> None:
    for rules in _mechanisms(name):
        run = _run(work, rules, name, (4000, 5000))
        ours_h, num_left = (
            float(run.jct_s.mean()) / 3600.0,
            int((~run.is_finished[4000:5000]).sum()),
        )
        print(
            f"{label:26} {rules.mechanism:9} {ours_h:8.2f} h  published {theirs_h:8.2f} h  "
            f"{ours_h / theirs_h - 1.0:+7.1%}  {run.num_preemptions:9,} preemptions  "
            f"{run.cpu_seconds:6.1f} s CPU{f'  {num_left} unfinished' if num_left else ''}",
            flush=True,
        )


def single(table: Throughputs, options: argparse.Namespace) -> None:
    """Jobs of one device, jobs 4000 to 4999 of seed 0."""
    _by_rate(table, options, SINGLE, SINGLE_RATES, has_gangs=False)


def multi(table: Throughputs, options: argparse.Namespace) -> None:
    """The same with gangs of 1, 2, 4 and 8."""
    _by_rate(table, options, MULTI, MULTI_RATES, has_gangs=True)


def makespan(table: Throughputs, options: argparse.Namespace) -> None:
    """700 jobs with gangs that are all there from the start."""
    work = bind(published_trace(table, 700, 0.0, has_gangs=True), DEVICE_TYPES, table)
    for name, theirs_h in MAKESPAN_H.items():
        if options.policy not in (None, name):
            continue
        for rules in _mechanisms(name):
            run = _run(work, rules, name, (0, 700))
            ours_h = float(np.nanmax(run.end_s)) / 3600.0
            print(
                f"{name:18} {rules.mechanism:9} {ours_h:7.1f} h  published {theirs_h:7.1f} h  "
                f"{ours_h / theirs_h - 1.0:+7.1%}  {run.cpu_seconds:6.1f} s CPU",
                flush=True,
            )


def weights(table: Throughputs, options: argparse.Namespace) -> None:
    """Gangs, and every fifth job of weight 5."""
    for (name, rate), theirs in WEIGHTS.items():
        if options.policy not in (None, name) or options.rate not in (None, rate):
            continue
        trace = published_trace(table, 8_000, rate, has_gangs=True, has_weights=True)
        work = bind(trace, DEVICE_TYPES, table)
        is_heavy = trace.weight[4000:5000] > 1.0
        for rules in (GAVEL, IMPROVED):
            run = _run(work, rules, name, (4000, 5000))
            hours = (run.end_s - run.arrival_s)[4000:5000] / 3600.0
            print(
                f"{name:14} {rate} {rules.mechanism:9} weight 5: {hours[is_heavy].mean():6.2f} h, "
                f"weight 1: {hours[~is_heavy].mean():6.2f} h  published {theirs}",
                flush=True,
            )


# ── what preemptions cost ────────────────────────────────────────────────────────────────────────


def preemptions(table: Throughputs, options: argparse.Namespace) -> None:
    """Gavel's rounds and the improved ones, LAS, some jobs of ten workloads."""
    first, end = map(int, options.jobs.split(":"))
    for rate, seed in STUDY:
        if options.rate not in (None, rate):
            continue
        work = bind(published_trace(table, 4_000, rate, seed), DEVICE_TYPES, table)
        for cost_s in COSTS_S:
            where = (f"{rate} {seed}", (first, end))
            base_h = _report_cost(work, *where, replace(GAVEL, restart_s=cost_s), NONE)
            is_last = cost_s == COSTS_S[-1]
            for slack in SLACKS if is_last else (IMPROVED.slack_rounds,):
                rules = replace(IMPROVED, restart_s=cost_s, slack_rounds=slack)
                _report_cost(work, *where, rules, base_h)


def _report_cost(
    work: TraceWork, label: str, measured: tuple[int, int], rules: Rules, base_h: float
) -> float:
    run = _run(work, rules, "las", measured)
    figures, hours = run.figures(), float(run.jct_s.mean()) / 3600.0
    low, tenth, middle = np.percentile(run.share_received, (1, 10, 50))
    name = rules.mechanism if rules.mechanism == "gavel" else f"slack {rules.slack_rounds:g}"
    gain = "" if math.isnan(base_h) else f"{hours / base_h - 1.0:+.1%}"
    print(
        f"{label} {rules.restart_s:4.0f} s {name:10} {hours:7.2f} h {gain:7}"
        f"  p99 {figures['p99_jct_s'] / 3600.0:6.1f} h  {run.num_preemptions:8,} preemptions"
        f"  received over target: p1 {low:.3f} p10 {tenth:.3f} median {middle:.3f}"
        f" deviation {figures['share_deviation']:.3f}"
        f"  worst slowdown {figures['worst_slowdown']:6.1f}  {run.cpu_seconds:5.1f} s CPU",
        flush=True,
    )
    return hours


PARTS = {
    "single": single, "multi": multi, "makespan": makespan, "weights": weights,
    "preemptions": preemptions,
}  # fmt: skip


if __name__ == "__main__":
    main()
