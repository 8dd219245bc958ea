"""Unequal devices for real: three processes, two of them slowed down, and what each split takes.

    .venv/bin/python benchmarks/placement/cpu.py               # some minutes on two calm cores
    .venv/bin/python benchmarks/placement/cpu.py mlp           # names that contain a word

Each plan is carried out by gloo processes with one thread each; ops of the two slow devices take
three times as long. The cluster file that the plans are made for says the same. What must come out
is the same ranking as in the simulator. Results: ``docs/concepts/placement.md``.
"""

from __future__ import annotations

import sys

from hocket.capture import capture, load_model
from hocket.hardware.files import cluster_from_dict
from hocket.plan.make import make_problem
from hocket.planners import PLANNERS
from hocket.planners.candidates import propose
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunOptions

SLOWDOWN = 3.0
PLANNED = ("layer-blocks", "device-map-auto", "auto")
MODELS = (
    ("gpt2", {"batch": 1, "seq": 128}),
    ("resnet50", {"batch": 4}),
    ("bert-large", {"batch": 1, "seq": 64}),
    ("mlp", {"batch": 64}),
)
STEPS = 6


def processes() -> dict[str, object]:
    """One fast and two slow processes on this machine, as a cluster file says it."""

    def kind(factor: float) -> dict[str, object]:
        return {
            "memory": "16GiB",
            "memory_bandwidth": f"{8 / factor}GB/s",
            "peak": {"float32": f"{40 / factor}GFLOP/s"},
            "launch": f"{5 * factor}us",
        }

    names = ("fast", "slow0", "slow1")
    return {
        "name": "three processes",
        "kinds": {"fast": kind(1.0), "slow": kind(SLOWDOWN)},
        "devices": [{"kind": name.rstrip("01"), "name": name} for name in names],
        "links": [
            {"ends": [name, "host"], "bandwidth": "2GB/s", "latency": "100us"} for name in names
        ],
    }


def main() -> None:
    words = sys.argv[1:]
    cluster = cluster_from_dict(processes(), "processes")
    options = RunOptions(
        steps=STEPS, backend="gloo", threads=1, slowdown={"slow0": SLOWDOWN, "slow1": SLOWDOWN}
    )
    print("| model | planner | predicted, ms | measured, ms | predicted / auto | measured / auto |")
    print("|---|---|---|---|---|---|")
    for name, sizes in MODELS:
        if words and not any(word in name for word in words):
            continue
        model, batch = load_model(name, **sizes)
        problem = make_problem(capture(model, batch, name=name, device="cpu"), cluster)
        rows = []
        for planner in PLANNED:
            candidate = propose(problem, planner, PLANNERS[planner])
            assert candidate.plan is not None
            assert candidate.step_s is not None
            result = run_plan(problem, candidate.plan, options)
            rows.append((planner, candidate.step_s, result.median_step_s))
        _, best_s, best_measured_s = rows[-1]
        for planner, step_s, measured_s in rows:
            print(
                f"| {name} | {planner} | {1e3 * step_s:,.4g} | {1e3 * measured_s:,.4g} | "
                f"{step_s / best_s:.2f} | {measured_s / best_measured_s:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
