"""Predicted against measured steps of third-party models: time, range, peak memory.

    python benchmarks/predict/thirdparty.py measure --out DIR --seconds 480   (on a GPU)
    python benchmarks/predict/thirdparty.py predict --out DIR --on 1xh200     (anywhere)
    python benchmarks/predict/thirdparty.py measure --set drawn --seed 37 --count 12 --out DIR
    python benchmarks/predict/thirdparty.py list --set drawn --seed 37 --count 12

``measure`` trains each model eagerly with fused AdamW and appends a row to ``DIR/rows.jsonl``: the
median step, the peak of allocated bytes, and device time by op and shape. Rows that are there are
kept, so that it can be stopped and started again; large batches come first. ``predict`` captures
the same steps without a GPU and prints a table; ``--detail NAME`` compares op by op, and
``--measured-host`` takes the dispatch time that was measured before each row, as ``hocket detect``
would have found it (rows without one: ``--dispatch-us``).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from drawn import drawn, named, skipped
from held_out import held_out
from models import Batch, Model, models
from torch import nn

from hocket.base.errors import HocketError

WARM_UP, STEPS, MOST_STEPS_S = 3, 10, 2.0
WORKSPACE_BYTES = 64 * 2**20
"""cuBLAS's, of forward and backward: plans count it in the headroom, PyTorch in the peak."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("measure", "predict", "list"))
    parser.add_argument("--out", type=Path, default=Path("thirdparty"))
    parser.add_argument("--seconds", type=float, default=480.0, help="no row starts after it")
    parser.add_argument("--on", default="1xh200")
    parser.add_argument("--only", default="", help="comma-separated names of models")
    parser.add_argument(
        "--set", dest="models", choices=("all", "chosen", "held-out", "drawn"), default="all"
    )
    parser.add_argument("--seed", type=int, default=37, help="of --set drawn")
    parser.add_argument("--count", type=int, default=12, help="models of --set drawn")
    parser.add_argument("--measured-host", action="store_true", help="predict for the rows' host")
    parser.add_argument("--dispatch-us", type=float, default=0.0, help="of rows that lack it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--detail", default="", help="a row whose ops are compared")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = set(filter(None, arguments.only.split(",")))
    every = {
        "all": lambda: [*held_out(), *models()], "chosen": models, "held-out": held_out,
        # Lists of transformers differ between versions: names that were drawn before are kept.
        "drawn": lambda: (
            named(arguments.only.split(","), drawn_tasks(arguments.out / "rows.jsonl"))
            if names else drawn(arguments.seed, arguments.count)
        ),
    }  # fmt: skip
    chosen = [model for model in every[arguments.models]() if not names or model.name in names]
    if arguments.what == "list":
        print("\n".join(f"{model.name} ({model.family})" for model in chosen))
        print("\n".join(f"skipped {name}: {reason}" for name, reason in skipped.items()))
    elif arguments.what == "measure" and arguments.worker:
        measure_all(chosen, arguments.out / "rows.jsonl", arguments.seconds)
    elif arguments.what == "measure":
        # A failed assertion on a GPU breaks the whole process: another one goes on after that row.
        ends = time.monotonic() + arguments.seconds
        while (left := ends - time.monotonic()) > 0:
            again = [sys.executable, *sys.argv, "--worker", "--seconds", str(left)]
            if subprocess.run(again, check=False).returncode == 0:
                break
    else:
        default_s = arguments.dispatch_us * 1e-6 if arguments.measured_host else None
        predict_all(chosen, arguments.out, arguments.on, arguments.detail, default_s)


def dispatch_s() -> float:
    """Dispatch time that ``hocket detect`` measures on this host; it changes with other load."""
    from hocket.cost.dispatch import measure_dispatch_s

    return measure_dispatch_s(torch.device("cuda", 0)) if torch.cuda.is_available() else 0.0


def cases(chosen: list[Model]) -> Iterator[tuple[Model, int, str]]:
    """Large batches in bf16 first, then in fp32, then small ones."""
    for index in range(2):
        for precision in ("bf16", "fp32"):
            for model in chosen:
                if precision in model.precisions and index < len(model.sizes):
                    yield model, model.sizes[index], precision


def label(model: Model, size: int, precision: str) -> str:
    return f"{model.name} {size} {precision}"


def forward(model: nn.Module, batch: Batch, precision: str) -> torch.Tensor:
    is_mixed = precision == "bf16"
    with torch.autocast("cuda", torch.bfloat16) if is_mixed else nullcontext():
        output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def measure_all(chosen: list[Model], path: Path, seconds: float) -> None:
    started = time.perf_counter()
    found = {row["case"] for row in read_rows(path)}
    for model, size, precision in cases(chosen):
        name = label(model, size, precision)
        if name in found:
            continue
        if time.perf_counter() - started > seconds:
            print("out of time", flush=True)
            break
        row: Row = {"case": name, "family": model.family, "dispatch_s": dispatch_s()}
        append(path, row | {"error": "the process died"})
        try:
            row |= measured(model, size, precision)
            print(f"{name}: {row['step_s'] * 1e3:.1f} ms, {row['peak_bytes'] / 2**30:.2f} GiB, "
                  f"device {row['device_s'] * 1e3:.1f} ms", flush=True)  # fmt: skip
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            print(f"{name}: {row['error']}", flush=True)
        append(path, row)
        if "CUDA error" in row.get("error", ""):
            sys.exit(1)
        gc.collect()
        torch.cuda.empty_cache()


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Rows of a file; of those with the same case, the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({row["case"]: row for row in map(json.loads, lines)}.values())


def drawn_tasks(path: Path) -> dict[str, str]:
    """Task of each model that has a row."""
    return {row["case"].partition(" ")[0]: row["family"] for row in read_rows(path)}


def measured(model: Model, size: int, precision: str) -> Row:
    torch.manual_seed(0)
    with torch.device("cuda"):
        net = model.build().train()
    net = net.to("cuda")
    batch = {name: tensor.cuda() for name, tensor in model.batch(size).items()}
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step() -> None:
        forward(net, batch, precision).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started, marks = time.perf_counter(), [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    while len(marks) <= STEPS and (len(marks) < 5 or time.perf_counter() - started < MOST_STEPS_S):
        step()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    host_s = (time.perf_counter() - started) / (len(marks) - 1)
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    peak_bytes = torch.cuda.max_memory_allocated()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step()
        torch.cuda.synchronize()
    entries = [
        [event.key, str(event.input_shapes), event.count, event.self_device_time_total]
        for event in profile.key_averages(group_by_input_shape=True)
        if event.device_type == torch.autograd.DeviceType.CPU and event.self_device_time_total > 0
    ]
    device_us = sum(us for *_, us in entries)
    return {
        "step_s": statistics.median(seconds),
        "host_s": host_s,
        "peak_bytes": peak_bytes,
        "device_s": device_us / 1e6,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "ops": [entry for entry in entries if entry[3] > device_us * 1e-3],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def predict_all(
    chosen: list[Model], out: Path, on: str, detail: str, default_dispatch_s: float | None
) -> None:
    from hocket.api.clusters import with_dispatch
    from hocket.hardware.shorthand import cluster_from_text

    preset = cluster_from_text(on)
    rows = {row["case"]: row for row in read_rows(out / "rows.jsonl")}
    errors, covered = list[tuple[float, float]](), list[bool]()
    print(
        "| case | step | predicted | error | device | predicted | host | predicted | peak | error |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for model, size, precision in cases(chosen):
        name = label(model, size, precision)
        row = rows.get(name)
        if (detail and name != detail) or (rows and (row is None or "error" in row)):
            continue
        host_s = default_dispatch_s and ((row or {}).get("dispatch_s") or default_dispatch_s)
        cluster = with_dispatch(preset, host_s) if host_s else preset
        try:
            found = predicted(model, size, precision, cluster)
        except HocketError as error:
            print(f"| {name} | {error.message} |", flush=True)
            continue
        if row is None:
            print(f"| {name} | – | {found['step_s'] * 1e3:.1f} ms | | | "
                  f"{found['device_s'] * 1e3:.1f} | | {found['host_s'] * 1e3:.1f} | "
                  f"{found['peak_bytes'] / 2**30:.2f} GiB |", flush=True)  # fmt: skip
            continue
        step = found["step_s"] / row["step_s"] - 1
        peak = found["peak_bytes"] / row["peak_bytes"] - 1
        errors.append((step, peak))
        covered.append(found["low"] <= 1 / (1 + step) <= found["high"])
        print(f"| {name} | {row['step_s'] * 1e3:.1f} ms | {found['step_s'] * 1e3:.1f} | "
              f"{step:+.0%} | {row['device_s'] * 1e3:.1f} | {found['device_s'] * 1e3:.1f} | "
              f"{row['host_s'] * 1e3:.1f} | {found['host_s'] * 1e3:.1f} | "
              f"{row['peak_bytes'] / 2**30:.2f} GiB | {peak:+.0%} |", flush=True)  # fmt: skip
        if detail:
            compare_ops(row, found)
    if errors:
        step_errors, peak_errors = np.abs(np.array(errors)).T
        print(f"\nstep: mean {step_errors.mean():.1%}, worst {step_errors.max():.1%}; "
              f"peak: mean {peak_errors.mean():.1%}, worst {peak_errors.max():.1%}; "
              f"{len(errors)} rows")  # fmt: skip
        print(f"80 % ranges cover {np.mean(covered):.0%}")


def predicted(model: Model, size: int, precision: str, cluster: Any) -> Row:
    from hocket.capture import capture
    from hocket.capture.zoo.load import keep_every_layer
    from hocket.cost.memory import with_allocator_rounding
    from hocket.cost.ranges import step_range
    from hocket.cost.roofline import estimate_costs, work_on
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.simulate.engine import simulate

    with torch.device("meta"):
        net = model.build().train()
    keep_every_layer(net)
    graph = capture(
        net, model.batch(size), forward=lambda m, b: forward(m, b, precision), name=model.name
    )
    counted = with_allocator_rounding(graph)
    costs = estimate_costs(counted, cluster)
    problem = Problem(work=counted, cluster=cluster, op_costs=costs)
    timeline = simulate(problem, Plan().placing(np.zeros(graph.num_ops, dtype=np.int32)))
    work = work_on(counted, cluster.kinds[0], costs.settings)
    expected = step_range(costs)
    return {
        "low": expected.low,
        "high": expected.high,
        "step_s": float(timeline.makespan_s),
        "peak_bytes": int(timeline.peak_bytes[0]) + WORKSPACE_BYTES,
        "device_s": float(work.device_s.sum()),
        "host_s": float(work.host_s.sum()),
        "graph": counted,
        "device": work.device_s,
    }


def compare_ops(row: Row, found: Row) -> None:
    """Device time by op, measured and predicted, the largest differences first."""
    graph, device_s = found["graph"], found["device"]
    ours: dict[str, float] = defaultdict(float)
    theirs: dict[str, float] = defaultdict(float)
    for op in range(graph.num_ops):
        ours[_base(graph.kind_of(op))] += float(device_s[op]) * 1e3
    for key, _, _, us in row["ops"]:
        theirs[_base(key)] += us / 1e3
    names = sorted({*ours, *theirs}, key=lambda name: -abs(ours[name] - theirs[name]))
    for name in names[:25]:
        print(f"    {name:48s} measured {theirs[name]:9.3f} ms   predicted {ours[name]:9.3f}")


def _base(name: str) -> str:
    return name.removeprefix("aten.").removeprefix("aten::").partition(".")[0]


if __name__ == "__main__":
    main()
