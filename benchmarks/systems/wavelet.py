"""Wavelet's headlines: two waves of ResNet-56 on V100s, round-robin partitions of GPT-2.

    python benchmarks/systems/wavelet.py [--quick]

Simulated. Model parallel: throughput over plain model parallelism, which runs one partition at a
time, and the control: 1F1B with as many microbatches. Data parallel: published jobs keep a device
40 % busy, and so does every op here; two waves hold at most 1.3 times the memory of one. With the
published synchronisation parameters change after every wave by the mean of its gradients and those
of the wave before, so gradients are exchanged once per wave, and the exchange of one wave is hidden
behind the other as far as it is not longer: the better case. The control is one wave at a time with
an exchange after each, overlapped with its backward pass. On two machines the exchange crosses the
network. benchmarks/waves/published.py prints more columns.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "waves"))

from workloads import resnet56

from hocket.api.collectives import plan_collective
from hocket.capture import load_model
from hocket.capture.sizes import capture_sizes
from hocket.cost.demand import BESIDE, FILL, NUM_SHARES, ON_DEVICE, TIMES_BESIDE
from hocket.cost.roofline import costs_from_settings
from hocket.graph.graph import Role
from hocket.plan.make import find_cluster, make_problem
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica
from hocket.planners.waves.round_robin import even_cuts, round_robin
from hocket.planners.waves.wave_candidate import simulated
from hocket.planners.waves.wave_search import even_split, fit_waves
from hocket.simulate.engine import simulate_parallel

WAVE = 8
"""Samples of a wave of GPT-2."""
BUSY, SAMPLES, WAVES = 0.4, 128, 8
"""Share of a device that a wave of ResNet-56 keeps busy; its samples; waves until all is steady."""
MACHINES = {"2 GPUs of one machine": "2xv100-16g", "2 machines of 8 GPUs": "2xdgx1-v100"}


def gains(count: int) -> tuple[float, float]:
    """Throughput of round-robin waves and of 1F1B over plain model parallelism."""
    model, batch = load_model("gpt2", batch=WAVE * count, seq=512)
    problem = make_problem(capture_sizes(model, batch), f"{count}xv100-16g")
    cuts, names = even_cuts(problem, count), problem.cluster.device_names

    def samples_per_s(*microbatches: int) -> float:
        replica = Replica(devices=names, microbatches=microbatches, cuts=cuts)
        timeline = simulate_parallel(problem, Parallel(replicas=(replica,)))[1]
        return sum(microbatches) / timeline.makespan_s

    plain = samples_per_s(WAVE)
    waves = round_robin(problem, cuts, WAVE).samples_per_s
    return waves / plain, samples_per_s(*[WAVE] * count) / plain


def _busy(problem: Problem) -> Problem:
    """Ops are launched from graphs, and each keeps its device busy for one share of its time."""
    settings = {**problem.costs.settings, "launches": "replayed"}
    costs = costs_from_settings(problem.graph, problem.cluster, settings)
    demand = np.zeros((NUM_SHARES, *costs.op_s.shape))
    demand[ON_DEVICE], demand[FILL], demand[BESIDE] = BUSY, 1.0, TIMES_BESIDE
    # Wavelet's two processes share memory by an allocator of their own, unlike captured streams.
    costs = replace(costs, demand=demand, settings=problem.costs.settings)
    return replace(problem, op_costs=costs)


def data_parallel(on: str) -> tuple[float, float, float]:
    """Gain of two waves with an exchange after each; seconds of a wave computed and exchanged."""
    one = _busy(make_problem(capture_sizes(*resnet56(WAVES * SAMPLES)), "1xv100-16g"))
    budget_bytes = round(1.3 * simulated(one, even_split(one, WAVES)).peak_bytes)
    fit = fit_waves(one, num_waves=WAVES, budget_bytes=budget_bytes)
    wave_s = (fit.chosen or fit.smallest).step_s / WAVES
    cluster = find_cluster(on)
    count = cluster.num_devices
    problem = _busy(make_problem(capture_sizes(*resnet56(count * SAMPLES)), cluster))
    replicas = tuple(
        Replica(devices=(name,), microbatches=(SAMPLES,)) for name in cluster.device_names
    )
    alone_s = simulate_parallel(problem, Parallel(replicas=replicas))[1].makespan_s
    graph = problem.graph
    gradient_bytes = int(graph.tensor_bytes[graph.tensor_role == Role.PARAMETER].sum())
    plan = plan_collective(cluster, "allreduce", size_bytes=gradient_bytes)
    exchange_s = plan.chosen.times.time_s(gradient_bytes)
    return alone_s / max(wave_s, exchange_s), wave_s, exchange_s


def ours() -> str:
    """The figures of the row in docs/systems.md."""
    cells = []
    for count in (4, 8):
        waves, piped = gains(count)
        cells.append(f"{waves:.1f}x on {count} devices (1F1B {piped:.1f}x)")
    return f"model parallel simulated: {', '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="model parallel alone")
    print(ours())
    if parser.parse_args().quick:
        return
    print("| two waves on | published | gain | wave, ms | exchange, ms |")
    print("|---|---|---|---|---|")
    for (label, on), published in zip(MACHINES.items(), ("1.88x", "1.18x"), strict=True):
        gain, wave_s, exchange_s = data_parallel(on)
        cells = f"{gain:.2f}x | {1e3 * wave_s:.2f} | {1e3 * exchange_s:.2f}"
        print(f"| {label} | {published} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
