"""What a wrong rating of the host costs: plans for one rate of updates, simulated at another.

    PYTHONPATH=src:benchmarks/memory python benchmarks/memory/host_ratings.py [LAYERS] [GIB]

A GPT of width 3072 with 16,384 tokens a step on an H200, without weights; copies go at 42 GB/s to
the device and at 48 from it. A row for each rate of the host that is planned for: how many blocks'
state visits the device, and the step at each rate that the host may really have.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import torch
from budget_case import Case
from gpu_models import Gpt, Sizes, forward, word_batch
from gpu_parts import mix_of

from hocket.hardware.cluster import Cluster
from hocket.hardware.host_route import HostRoute, with_host_route
from hocket.plan.make import find_cluster, make_problem
from hocket.planners.memory.maker import Fitted
from hocket.planners.placement.baselines import on_one_device
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.step import budgeted

PLANNED_GBPS = (55, 65, 75, 85, 100, 140)
REAL_GBPS = (60, 73, 90, 120)
ROUTE = HostRoute(out_bps=48e9, in_bps=42e9, latency_s=5e-6)


def rated(update_gbps: float) -> Cluster:
    """An H200 beside a host of this rate."""
    cluster = find_cluster("1xh200")
    cluster = with_host_route(cluster, cluster.devices[0], ROUTE)
    return replace(cluster, host_update_bps=update_gbps * 1e9)


def step_s(case: Case, chosen: Fitted, update_gbps: float) -> float:
    """A step of a plan at another rate."""
    assert chosen.memory is not None
    problem = make_problem(case.graph, rated(update_gbps))
    alone = on_one_device(problem)
    step = budgeted(problem, alone, chosen.memory, uses=chosen.uses)
    return simulate(step.problem, step.plan).makespan_s


def main() -> None:
    """A table."""
    warnings.simplefilter("ignore")
    layers, gib = (*map(float, sys.argv[1:]), *(36, 7.7)[len(sys.argv) - 1 :])
    with torch.device("meta"):
        model = Gpt(3072, int(layers), Sizes())
    case = Case(model, word_batch(Sizes()), forward, on=rated(PLANNED_GBPS[0]))
    print("| planned for | visit | " + " | ".join(f"{rate} GB/s" for rate in REAL_GBPS) + " |")
    print("|---" * (2 + len(REAL_GBPS)) + "|")
    for rate in PLANNED_GBPS:
        case.plan(rated(rate))
        fits = [plan for plan in case.frontier.best_of() if plan.peak_bytes <= gib * 2**30]
        chosen = min(fits, key=lambda plan: plan.rank)
        assert chosen.memory is not None
        steps = [f"{step_s(case, chosen, real):.3f} s" for real in REAL_GBPS]
        visitors = mix_of(chosen.memory).count("V")
        print(f"| {rate} GB/s | {visitors} | {' | '.join(steps)} |", flush=True)


if __name__ == "__main__":
    main()
