"""Wavelet's published gains, simulated: two waves on 2 V100s, round-robin partitions on 4 and 8.

    PYTHONPATH=src .venv/bin/python benchmarks/waves/published.py [--only data|model]

Data parallel: ResNet-56 at the size of CIFAR on two V100s. The published jobs keep a device 40 %
busy on average; every op asks for that share here (and for 50 to 100 %), and a stream has a process
of its own. Eight waves are one step: on one stream, on two, and on one with waves twice as
large, which is what users try first. Both streams together hold at most 1.3 times what one
holds. Published: 1.4 times on average, 1.88 at best.

Model parallel: GPT-2 in as many partitions as devices of a DGX-1, against plain model parallelism
and against 1F1B with as many microbatches, with microbatches so large that it holds as much, and
with four times as many of them before an update. Published: up to 6.7 times plain model
parallelism, pipelines about 2.5; 4 % switching, 15 % transfers, 4 % exchange.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from workloads import resnet56

from hocket.capture import load_model
from hocket.capture.sizes import capture_sizes
from hocket.cost.demand import BESIDE, FILL, NUM_SHARES, ON_DEVICE, TIMES_BESIDE
from hocket.cost.roofline import costs_from_settings
from hocket.plan.make import make_problem
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica
from hocket.planners.waves.round_robin import even_cuts, round_robin
from hocket.planners.waves.wave_candidate import simulated
from hocket.planners.waves.wave_search import even_split, fit_waves
from hocket.simulate.engine import simulate_parallel

ALL, ALONE = (0.04, 0.15, 0.04), (0.15,)
"""Published shares of a step for switching, transfers of activations and the exchange; one wave
alone has transfers."""
BUSY = (0.4, 0.5, 0.6, 0.8, 1.0)
WAVE = 128
"""Samples of a wave on each device."""
STEADY = 8
"""Waves of one step, so that its beginning and end count little."""


def asking(problem: Problem, share: float) -> Problem:
    """Every op is on its device, and fills it, for one share of its time; no host is in the way."""
    demand = np.zeros((NUM_SHARES, *problem.costs.op_s.shape))
    demand[ON_DEVICE], demand[FILL], demand[BESIDE] = share, 1.0, TIMES_BESIDE
    return replace(problem, op_costs=replace(problem.costs, demand=demand))


def data_parallel() -> None:
    """Two waves on two V100s by how busy one of them keeps the device."""
    num_devices = 2
    problem = make_problem(
        capture_sizes(*resnet56(STEADY * WAVE * num_devices)), f"{num_devices}xv100-16g"
    )
    settings = {**problem.costs.settings, "launches": "replayed"}
    costs = costs_from_settings(problem.graph, problem.cluster, settings)
    # Wavelet's two processes share memory by an allocator of their own, unlike captured streams.
    problem = replace(problem, op_costs=replace(costs, settings=problem.costs.settings))
    names = problem.cluster.device_names
    print(
        "| busy with one wave | one stream, samples/s | two streams | gain | larger waves | peak |"
    )
    print("|---|---|---|---|---|---|")
    for share in BUSY:
        stated = asking(problem, share)
        alone = simulated(stated, even_split(stated, STEADY))
        one = alone.peak_bytes
        fit = fit_waves(stated, num_waves=STEADY, budget_bytes=round(1.3 * one))
        larger = [Replica(devices=(n,), microbatches=(2 * WAVE,) * (STEADY // 2)) for n in names]
        twice_s = simulate_parallel(stated, Parallel(replicas=tuple(larger)))[1].makespan_s
        base, found = fit.accumulated.samples_per_s, fit.chosen or fit.smallest
        print(
            f"| {share:.0%} | {base:,.0f} | {found.samples_per_s:,.0f} | "
            f"{found.samples_per_s / base:.2f} x | "
            f"{found.parallel.num_samples / twice_s / base:.2f} x | "
            f"{found.peak_bytes / fit.one_wave_bytes:.2f} x one wave |",
            flush=True,
        )


def model_parallel(count: int, wave: int) -> None:
    """Partitions in turn on a DGX-1 of V100s, beside one wave at a time and 1F1B."""
    model, batch = load_model("gpt2", batch=wave * count, seq=512)
    problem = make_problem(capture_sizes(model, batch), f"{count}xv100-16g")
    cuts = even_cuts(problem, count)
    names = problem.cluster.device_names
    found = round_robin(problem, cuts, wave)

    def piped(*microbatches: int) -> tuple[float, int]:
        replica = Replica(devices=names, microbatches=microbatches, cuts=cuts)
        timeline = simulate_parallel(problem, Parallel(replicas=(replica,)))[1]
        return sum(microbatches) / timeline.makespan_s, int(timeline.peak_bytes.max())

    plain, plain_peak = piped(wave)
    equal = max(n for n in range(wave, 2 * wave + 1)
                if piped(*[n] * count)[1] <= found.peak_bytes)  # fmt: skip
    # Of a wave alone, all devices together compute as long as one of them does for all waves.
    busy_s = float(found.timeline.busy_s.max())
    told, alone = (count * wave / (busy_s * (1 + sum(shares))) for shares in (ALL, ALONE))
    rows = (
        ("plain model parallel", plain, plain_peak, plain),
        (f"1F1B, {count} x {wave} samples", *piped(*[wave] * count), plain),
        (f"1F1B, {count} x {equal}: as much memory", *piped(*[equal] * count), plain),
        (f"1F1B, {4 * count} x {wave}: a quarter of the updates", *piped(*[wave] * 4 * count),
         plain),
        ("round-robin waves", found.samples_per_s, found.peak_bytes, plain),
        ("both with the published overheads", told, found.peak_bytes, alone / count),
    )  # fmt: skip
    for name, samples_per_s, peak, base in rows:
        print(
            f"| {count} | {name} | {samples_per_s:,.1f} | {samples_per_s / base:.2f} x | "
            f"{peak / 2**30:.2f} GiB |",
            flush=True,
        )


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["data", "model"], default=None)
    only = parser.parse_args().only
    if only != "model":
        data_parallel()
    if only != "data":
        print("| devices | candidate | samples/s | over plain | peak of a device |")
        print("|---|---|---|---|---|")
        for count in (4, 8):
            model_parallel(count, 8)


if __name__ == "__main__":
    main()
