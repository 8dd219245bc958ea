"""Wavelet's model-parallel headline: round-robin partitions of GPT-2 on 4 and 8 V100s.

Run: python benchmarks/systems/wavelet.py

Simulated. Throughput over plain model parallelism, which runs one partition at a time, and the
control: 1F1B with as many microbatches. benchmarks/waves/published.py prints the whole tables.
"""

from __future__ import annotations

from hocket.api import make_problem
from hocket.capture import load_model
from hocket.capture.sizes import capture_sizes
from hocket.plan.sections import Parallel, Replica
from hocket.planners.waves.round_robin import even_cuts, round_robin
from hocket.simulate.engine import simulate_parallel

WAVE = 8
"""Samples of a wave."""


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


def ours() -> str:
    """The figures of the row in docs/systems.md."""
    cells = []
    for count in (4, 8):
        waves, piped = gains(count)
        cells.append(f"{waves:.1f}x on {count} devices (1F1B {piped:.1f}x)")
    return f"model parallel simulated: {', '.join(cells)}"


if __name__ == "__main__":
    print(ours())
