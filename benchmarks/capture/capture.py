"""Time capture of the models of the zoo, and compare stamped with full captures.

    python benchmarks/capture/capture.py [MODEL ...]

Each model is captured twice in this process, after one small capture that loads what torch loads on
first use: once with identical blocks stamped out (the default), once in full. Seconds include
building the model; "recorded" counts the ops that were not stamped out.
"""

import platform
import sys
import time

import torch

from hocket.capture import ZOO, capture, load_model
from hocket.graph import Graph

HEADER = ("model", "ops", "recorded", "seconds", "cpu s", "cpu ms/op", "full s", "identical")
ROW = "{:<14} {:>6} {:>8} {:>8} {:>6} {:>9} {:>7} {:>9}"


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
    print(ROW.format(*HEADER))
    for name in sys.argv[1:] or ZOO:
        graph, wall_s, cpu_s = timed_capture(name, repeat=True)
        full, full_s, _ = timed_capture(name, repeat=False)
        same = "yes" if graph.content_hash == full.content_hash else "NO"
        times = (wall_s, cpu_s, cpu_s / graph.num_ops * 1e3, full_s)
        recorded = graph.meta["recorded_ops"]
        print(ROW.format(name, graph.num_ops, recorded, *(f"{t:.2f}" for t in times), same))


if __name__ == "__main__":
    main()
