"""Time capture of the models of the zoo.

    python benchmarks/capture/capture.py [MODEL ...]

One small capture comes first: it loads what torch loads on first use. Seconds include building the
model.
"""

import platform
import sys
import time

import torch

from hocket.capture import ZOO, capture, load_model

HEADER = ("model", "ops", "seconds", "cpu s", "cpu ms/op")
ROW = "{:<14} {:>6} {:>8} {:>6} {:>9}"


def timed_capture(name: str) -> tuple[int, float, float]:
    """Number of ops, and seconds by the clock and of the CPU."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    model, batch = load_model(name)
    graph = capture(model, batch, name=name)
    return graph.num_ops, time.perf_counter() - wall_s, time.process_time() - cpu_s


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    timed_capture("mlp")
    print(ROW.format(*HEADER))
    for name in sys.argv[1:] or ZOO:
        num_ops, wall_s, cpu_s = timed_capture(name)
        times = (wall_s, cpu_s, cpu_s / num_ops * 1e3)
        print(ROW.format(name, num_ops, *(f"{t:.2f}" for t in times)))


if __name__ == "__main__":
    main()
