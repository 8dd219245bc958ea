"""Where the time of a run goes: each kind of op as predicted and as measured, and between ops.

    .venv/bin/python benchmarks/runtime/walk.py MODEL [--planner NAME] [--processes N] [SIZES …]

Profiles MODEL with one thread, plans it on N processes of this machine, runs the plan and compares
op by op. Of every op and of every pause the shortest over all steps is taken, which a busy machine
lengthens little; the sums say what a calm one would need. `hocket.runtime.run` has its constant
from here.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from hocket.cli import main as hocket
from hocket.plan.files import SavedPlan, read_plan
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunCallbacks, RunOptions
from hocket.runtime.step_record import StepRecord
from hocket.simulate import simulate

WARM_UP = 5


def planned(model: list[str], planner: str, processes: int, folder: Path) -> SavedPlan:
    cluster, profile, plan = (str(folder / name) for name in ("c.toml", "p.json", "plan.json"))
    for words in (
        ["detect", "--processes", str(processes), "-o", cluster],
        ["profile", *model, "--seconds", "30", "--device", "cpu", "-o", profile],
        ["plan", *model, "--on", cluster, "--planner", planner, "--profile", profile, "-o", plan],
    ):
        try:
            hocket(words)
        except SystemExit as ended:
            if ended.code:
                raise
    return read_plan(plan)


def shortest(records: list[StepRecord], device_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each op its own time, and the pause after it on its device where none waits for data."""
    ops = range(len(device_of))
    own = np.min([[r.op_end_s[op] - r.op_start_s[op] for op in ops] for r in records], axis=0)
    first, pauses = records[0], []
    for device in np.unique(device_of):
        mine = sorted(np.flatnonzero(device_of == device), key=first.op_start_s.__getitem__)
        pairs = list(itertools.pairwise(mine))
        pauses.append(
            np.min([[r.op_start_s[b] - r.op_end_s[a] for a, b in pairs] for r in records], axis=0)
        )
    return own, np.concatenate(pauses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--planner", default="one-device")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    options, sizes = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        saved = planned([options.model, *sizes], options.planner, options.processes, Path(folder))
        records: list[StepRecord] = []
        run_plan(
            saved.problem, saved.plan, RunOptions(steps=options.steps, threads=1),
            watch=RunCallbacks(on_step=lambda number, record: records.append(record)),
        )  # fmt: skip
    timeline, graph = simulate(saved.problem, saved.plan), saved.problem.graph
    predicted = timeline.op_end_s - timeline.op_start_s
    own, pauses = shortest(records[WARM_UP:], np.asarray(saved.plan.device_of))
    print(f"| kind of op | number | predicted, us | measured, us |\n|{'---|' * 4}")
    kinds = np.array([graph.kind_of(op) for op in range(graph.num_ops)])
    for kind in sorted(set(kinds), key=lambda kind: -own[kinds == kind].sum()):
        of_kind = kinds == kind
        cells = f"{1e6 * predicted[of_kind].mean():.1f} | {1e6 * own[of_kind].mean():.1f}"
        print(f"| {kind} | {of_kind.sum()} | {cells} |")
    print(f"\nall ops: predicted {1e3 * predicted.sum():.2f} ms, measured {1e3 * own.sum():.2f} ms")
    print(f"between ops: {1e6 * np.median(pauses):.1f} us (median), {1e3 * pauses.sum():.2f} ms")


if __name__ == "__main__":
    main()
