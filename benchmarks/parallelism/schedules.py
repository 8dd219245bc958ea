"""Speed of making and simulating pipeline schedules.

    python benchmarks/parallelism/schedules.py

200 schedules of 8 to 64 devices, 32 to 200 microbatches and up to 6 chunks, with uneven stages.
"""

import platform
import time

import numpy as np

from hocket.cost.parallel.costs import StageCosts
from hocket.planners.parallel.schedules import make_schedule
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


def time_recheck() -> None:
    generator = np.random.default_rng(3)
    cases = [
        (name, int(p), int(m), chunks)
        for p in (8, 16, 32, 64)
        for m in (32, 64, 100, 128, 200)
        for name, chunks in (
            ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 6), ("zb-h1", 1),
            ("gpipe", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2),
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
    simulate_pipeline(  # compiles
        make_schedule("1f1b", 4, 8), random_costs(np.random.default_rng(0), 4, 1, 0.2)
    )
    time_recheck()


if __name__ == "__main__":
    main()
