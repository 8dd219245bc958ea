"""Time capture of the models of the zoo, and compare stamped with full captures.

    python benchmarks/capture.py [MODEL ...]

Each model is captured twice in this process, after one small capture that loads what torch loads on
first use: once with identical blocks stamped out (the default), once in full. Seconds include
building the model; ms per op is that of the default.
"""

import platform
import sys
import time

import torch

from hocket.capture import ZOO, capture, load_model
from hocket.graph import Graph

COLUMNS = f"{'model':<14} {'ops':>6} {'recorded':>8} {'seconds':>8} {'cpu s':>6} {'ms/op':>6} {'full s':>7} identical"


def timed_capture(name: str, *, repeat: bool) -> tuple[Graph, float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    model, batch = load_model(name)
    graph = capture(model, batch, name=name, repeat=repeat)
    return graph, time.perf_counter() - wall_s, time.process_time() - cpu_s


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    timed_capture("mlp", repeat=False)
    timed_capture("gpt2", repeat=False)
    print(COLUMNS)
    for name in sys.argv[1:] or ZOO:
        graph, wall_s, cpu_s = timed_capture(name, repeat=True)
        full, full_s, _ = timed_capture(name, repeat=False)
        same = "yes" if graph.content_hash == full.content_hash else "NO"
        print(
            f"{name:<14} {graph.num_ops:>6} {graph.meta['recorded_ops']:>8} {wall_s:>8.2f} "
            f"{cpu_s:>6.2f} {wall_s / graph.num_ops * 1e3:>6.2f} {full_s:>7.2f} {same}",
            flush=True,
        )


if __name__ == "__main__":
    main()
