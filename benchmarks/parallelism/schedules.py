"""Synthesised schedules against the known ones, and the speed of the simulator.

    python benchmarks/parallelism/schedules.py [INSTANCES]

Random instances have 2 to 8 devices, 1 to 3 chunks or a V, uneven stages, transfers and memory
limits between what one microbatch needs and what all need. For each: is the schedule legal, within
memory, and how long against the best known schedule that fits and against a lower bound.
"""

import platform
import sys
import time

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.cost.parallel.costs import StageCosts
from hocket.planners.parallel.schedules import (
    known_schedules,
    make_schedule,
    synthesise,
    verify_schedule,
)
from hocket.simulate.pipeline import simulate_pipeline


def random_costs(
    generator: np.random.Generator, num_devices: int, chunks: int, spread: float
) -> StageCosts:
    """Stages that differ by up to ``spread`` from each other, with backward about twice forward."""
    num_stages = num_devices * chunks

    def times(mean: float) -> tuple[float, ...]:
        return tuple((mean * (1 + spread * generator.uniform(-0.5, 1, num_stages))).tolist())

    held = generator.integers(50, 150, num_stages)
    send_s = generator.choice([0.0, 0.05, 0.3])
    return StageCosts(
        forward_s=times(1.0),
        input_gradient_s=times(generator.choice([1.0, 1.3])),
        weight_gradient_s=times(generator.choice([1.0, 0.7])),
        send_s=(float(send_s),) * (num_stages - 1),
        activation_bytes=tuple(held.tolist()),
        weight_gradient_bytes=tuple(
            (held * generator.uniform(0, 1, num_stages)).astype(int).tolist()
        ),
        state_bytes=tuple(generator.integers(0, 500, num_devices).tolist()),
        after_s=(0.0,) * num_devices,
    )


def random_instance(
    generator: np.random.Generator,
) -> tuple[StageCosts, int, tuple[int, ...], bool]:
    """Costs, microbatches, memory limits and whether stages lie as a V."""
    num_devices = int(generator.integers(2, 9))
    is_folded = bool(generator.random() < 0.3)
    chunks = 2 if is_folded else int(generator.choice([1, 1, 2, 3]))
    count = int(generator.integers(1, 33))
    costs = random_costs(generator, num_devices, chunks, float(generator.choice([0, 0.2, 1])))
    most = max(costs.activation_bytes) * chunks
    in_flight = generator.choice([1.5, num_devices / 2, num_devices, 1.5 * num_devices, count])
    limit = np.array(costs.state_bytes) + int(most * in_flight)
    return costs, count, tuple(limit.tolist()), is_folded


def check_instances(num_instances: int) -> None:
    generator = np.random.default_rng(1)
    ratios, refused, only, cpu_s = [], 0, 0, time.process_time()
    for _ in range(num_instances):
        costs, count, limit, is_folded = random_instance(generator)
        try:
            schedule = synthesise(costs, count, limit, is_folded=is_folded)
        except NoFeasiblePlanError:
            refused += 1
            continue
        verify_schedule(schedule)
        timeline = simulate_pipeline(schedule, costs)
        assert np.all(timeline.peak_bytes <= limit), "the memory limit is broken"
        known_s = best_known_s(costs, count, limit, is_folded)
        only += bool(np.isinf(known_s))
        if np.isfinite(known_s):
            ratios.append(timeline.makespan_s / known_s)
    cpu_s = time.process_time() - cpu_s
    ratio = np.array(ratios)
    print(
        f"{num_instances} instances in {cpu_s:.1f} s CPU: {refused} lack room for one microbatch,"
    )
    print(f"{only} where no known schedule fits; of the other {len(ratio)}:")
    print(
        f"longer than the best known {np.sum(ratio > 1 + 1e-9)}, shorter "
        f"{np.sum(ratio < 1 - 1e-9)}; mean {ratio.mean():.4f}, best {ratio.min():.4f}"
    )


def best_known_s(costs: StageCosts, count: int, limit: tuple[int, ...], is_folded: bool) -> float:
    num_devices = len(limit)
    chunks = len(costs.forward_s) // num_devices
    best_s = np.inf
    for schedule in known_schedules(num_devices, count, chunks, is_folded=is_folded):
        timeline = simulate_pipeline(schedule, costs)
        if np.all(timeline.peak_bytes <= limit):
            best_s = min(best_s, timeline.makespan_s)
    return best_s


def time_synthesis() -> None:
    generator = np.random.default_rng(2)
    print(f"{'synthesise':<28} {'cpu s':>7} {'makespan':>9} {'best known':>10}")
    for chunks, is_folded, spread in (
        (1, False, 0.0),
        (1, False, 0.2),
        (2, False, 0.2),
        (2, True, 0.2),
    ):
        costs = random_costs(generator, 16, chunks, spread)
        limit = np.array(costs.state_bytes) + max(costs.activation_bytes) * chunks * 16
        start_s = time.process_time()
        schedule = synthesise(costs, 256, limit.tolist(), is_folded=is_folded)
        cpu_s = time.process_time() - start_s
        makespan_s = simulate_pipeline(schedule, costs).makespan_s
        known_s = best_known_s(costs, 256, tuple(limit.tolist()), is_folded)
        shape = "V" if is_folded else f"{chunks} chunks"
        name = f"p=16 m=256 {shape} spread {spread}"
        print(f"{name:<28} {cpu_s:>7.2f} {makespan_s:>9.1f} {known_s:>10.1f}")


def time_recheck() -> None:
    generator = np.random.default_rng(3)
    cases = [
        (name, int(p), int(m), chunks)
        for p in (8, 16, 32, 64)
        for m in (32, 64, 100, 128, 200)
        for name, chunks in (
            ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 6), ("zb-h1", 1),
            ("gpipe", 1), ("zb-h2", 1), ("zb-v", 2), ("v-half", 2), ("dualpipe-v", 2),
        )
    ]  # fmt: skip
    costs = {(p, chunks): random_costs(generator, p, chunks, 0.2) for _, p, _, chunks in cases}
    start_s, actions = time.process_time(), 0
    for name, p, m, chunks in cases:
        schedule = make_schedule(name, p, m, chunks)
        actions += len(schedule.work)
        simulate_pipeline(schedule, costs[p, chunks])
    cpu_s = time.process_time() - start_s
    print(
        f"{len(cases)} schedules made and simulated, {actions / 1e6:.1f} M actions: "
        f"{cpu_s:.2f} s CPU"
    )


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}")
    # Compile first: with room for two microbatches, no known schedule fits.
    warm = random_costs(np.random.default_rng(0), 4, 1, 0.2)
    synthesise(warm, 8, [max(warm.state_bytes) + 2 * max(warm.activation_bytes)] * 4)
    time_recheck()
    time_synthesis()
    check_instances(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)


if __name__ == "__main__":
    main()
