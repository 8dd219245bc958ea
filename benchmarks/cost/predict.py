"""Predicted against measured: step time and peak memory of real training steps.

    python benchmarks/cost/predict.py --device cpu|cuda [--models gpt2,resnet50] [--out DIR]

Each case is captured on fake tensors, its ops are profiled on the device, the costs are predicted
from data sheet, calibration and profile, and then the model is really built and trained. The
calibration is fitted to the cases marked ``fit`` only; the others are held out. Results go to
``results.json`` and ``table.md`` in the output folder, the table also to the screen, last.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clocks import CudaClock, HostClock

from hocket.base.units import format_bytes, format_seconds
from hocket.capture.model import capture_program
from hocket.capture.zoo.load import load_model
from hocket.cost.calibrate import Calibration, calibrate, calibration_errors, write_calibration
from hocket.cost.measure import profile_program
from hocket.cost.memory import with_allocator_rounding
from hocket.cost.profile import Profile, merge_profiles, with_measured_workspace, write_profile
from hocket.cost.roofline import estimate_costs
from hocket.graph import Graph, Phase
from hocket.hardware import Cluster

SKIPPED = "TimeoutError: skipped: the time budget was used up"


@dataclass(frozen=True)
class Case:
    """One training step to predict and to run."""

    model: str
    batch: int
    seq: int
    dtype: str
    role: str
    """``fit``: the calibration sees it; ``held out``: it does not."""

    @property
    def label(self) -> str:
        path = Path(self.model)
        name = path.name.partition(":")[2] or path.stem
        return f"{name} {self.batch}x{self.seq} {self.dtype}"


CASES = {
    # Fit cases first: they must be there when the time budget ends.
    "cuda": (
        Case("gpt2", 32, 1024, "float32", "fit"),
        Case("gpt2", 64, 1024, "bfloat16", "fit"),
        Case("resnet50", 512, 1, "float32", "fit"),
        Case("gpt2-medium", 48, 1024, "bfloat16", "held out"),
        Case("gpt2-xl", 24, 1024, "bfloat16", "held out"),
        Case("bert-large", 96, 512, "bfloat16", "held out"),
        Case("resnet152", 384, 1, "float32", "held out"),
        Case("moe-12x32", 128, 512, "float32", "held out"),
        Case("gpt2-medium", 16, 1024, "float32", "held out"),
        Case("moe-12x32", 128, 512, "bfloat16", "held out"),
    ),
    "cpu": (
        Case("gpt2", 1, 64, "float32", "fit"),
        Case("resnet50", 2, 1, "float32", "fit"),
        Case("mlp", 64, 1, "float32", "held out"),
        Case("resnet152", 1, 1, "float32", "held out"),
        Case("vit-base", 2, 1, "float32", "held out"),
        Case("lstm", 8, 8, "float32", "held out"),
    ),
}
PROFILE_BUDGET_S = {"cuda": 30.0, "cpu": 60.0}
NUM_STEPS = {"cuda": 12, "cpu": 7}
NUM_WARM_UP = 3


@dataclass(frozen=True)
class Captured:
    """What prediction needs of a case after its model is gone."""

    graph: Graph
    profile: Profile


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    if arguments.device == "cpu":
        # More threads than idle cores wait for each other, and the median measures the neighbours.
        torch.set_num_threads(arguments.threads)
    cluster = cluster_for(arguments.device, arguments.on)
    names = arguments.models.split(",") if arguments.models else None
    cases = [case for case in CASES[arguments.device] if names is None or case.model in names]
    if not cases:
        known = ", ".join(dict.fromkeys(case.model for case in CASES[arguments.device]))
        raise SystemExit(f"no case for {arguments.models!r}; known: {known}")
    rows: list[dict[str, Any]] = []
    captured: dict[str, Captured] = {}
    for case in cases:
        if time.perf_counter() - started > arguments.budget:
            rows.append({"case": case.label, **asdict(case), "error": SKIPPED})
            continue
        attempt(case, rows, captured, cluster, arguments.device)
        say(f"{case.label}: done after {time.perf_counter() - started:.0f} s")
        # After every case, so that a crash of the next one loses nothing.
        calibration = predict_calibrated(rows, captured, cluster)
        write_results(arguments.out, rows, captured, cluster, calibration)
    print((arguments.out / "table.md").read_text(), end="", flush=True)


def attempt(
    case: Case,
    rows: list[dict[str, Any]],
    captured: dict[str, Captured],
    cluster: Cluster,
    device: str,
) -> None:
    """A row for the case, with what went wrong where something did."""
    row: dict[str, Any] = {"case": case.label, **asdict(case)}
    rows.append(row)
    try:
        run_case(case, row, captured, cluster, device)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        traceback.print_exc()
    free_memory()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", default="", help="comma-separated names; all by default")
    parser.add_argument("--on", default="", help="cluster whose first device kind this machine has")
    parser.add_argument("--out", type=Path, default=Path("predict-results"))
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch on a CPU")
    parser.add_argument(
        "--budget", type=float, default=400.0, help="seconds after which no case starts"
    )
    return parser.parse_args()


def cluster_for(device: str, text: str) -> Cluster:
    """One device of the kind that this machine has."""
    from hocket.hardware.detect import detect
    from hocket.hardware.shorthand import cluster_from_text

    cluster = cluster_from_text(text) if text else detect()
    wanted = [d for d in cluster.devices if d.kind.is_cpu == (device == "cpu")]
    if not wanted or (device == "cuda" and not torch.cuda.is_available()):
        raise SystemExit(f"no {device} device here or in {cluster!r}; name its kind with --on")
    return replace(cluster, devices=(wanted[0],), links=())


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_case(
    case: Case, row: dict[str, Any], captured: dict[str, Captured], cluster: Cluster, device: str
) -> None:
    """Capture, profile, predict and measure one case, noting each result as soon as it is there."""
    start = time.perf_counter()
    model, batch = load_model(case.model, batch=case.batch, seq=case.seq, dtype=case.dtype)
    graph, program = capture_program(model, batch, name=case.label, device=device)
    row["num_ops"], row["capture_s"] = graph.num_ops, time.perf_counter() - start
    say(f"{case.label}: {graph.num_ops} ops captured in {row['capture_s']:.1f} s")
    start = time.perf_counter()
    kind = cluster.devices[0].kind
    budget_s = PROFILE_BUDGET_S[device]
    profile = profile_program(graph, program, kind, device=device, budget_s=budget_s)
    row["profiling_s"] = time.perf_counter() - start
    row["signatures"], row["missing"] = len(profile.entries), dict(profile.missing)
    say(f"{case.label}: {profile!r} in {row['profiling_s']:.1f} s, {len(profile.missing)} missing")
    del model, batch, program
    free_memory()
    captured[case.label] = Captured(graph, profile)
    row["host"] = asdict(profile.host)
    row["default_s"] = float(estimate_costs(graph, cluster).op_s.sum())
    op_s = estimate_costs(graph, cluster, profile=profile).op_s[0]
    row["profile_s"] = float(op_s.sum())
    row["profile_phases_s"] = {
        phase.name.lower(): float(op_s[graph.op_phase == phase].sum()) for phase in Phase
    }
    row |= measure_case(case, device)
    for phase, measured_s in row["measured_phases_s"].items():
        predicted_s = row["profile_phases_s"][phase]
        say(f"  {phase}: measured {measured_s * 1e3:.1f} ms, profile {predicted_s * 1e3:.1f} ms")
    if device == "cuda":
        row["predicted_peak_bytes"] = predicted_peak_bytes(graph, cluster, profile)
        row["reserved_bytes"] = profile.reserved_bytes


def predicted_peak_bytes(graph: Graph, cluster: Cluster, profile: Profile) -> int:
    """Peak of the one-device plan with allocator rounding, workspaces and library reserves."""
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.simulate.engine import simulate

    counted = with_allocator_rounding(with_measured_workspace(graph, profile))
    costs = estimate_costs(counted, cluster, profile=profile)
    problem = Problem(work=counted, cluster=cluster, op_costs=costs)
    plan = Plan().placing(np.zeros(graph.num_ops, dtype=np.int32))
    return int(simulate(problem, plan).peak_bytes[0]) + profile.reserved_bytes


def measure_case(case: Case, device: str) -> dict[str, Any]:
    """Really build and train the model: median step time, times of its phases, peak memory."""
    torch.manual_seed(0)
    model, batch = load_model(
        case.model, batch=case.batch, seq=case.seq, dtype=case.dtype, device=device
    )
    # A function of one's own builds on the host.
    model, batch = model.to(device), {name: value.to(device) for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    clock = CudaClock() if device == "cuda" else HostClock()
    steps = []
    for index in range(NUM_WARM_UP + NUM_STEPS[device]):
        if index == NUM_WARM_UP and device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        clock.mark("start")
        optimizer.zero_grad(set_to_none=True)
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        del output
        clock.mark("forward")
        loss.backward()
        clock.mark("backward")
        optimizer.step()
        clock.mark("optimizer")
        del loss
        steps.append(clock.marks())
    clock.finish()
    seconds = [clock.seconds(marks) for marks in steps[NUM_WARM_UP:]]
    # Steps follow each other without a pause, so the time from start to start is a step.
    whole = [
        clock.between(first["start"], second["start"])
        for first, second in itertools.pairwise(steps[NUM_WARM_UP:])
    ]
    result: dict[str, Any] = {
        "measured_s": statistics.median(whole),
        "measured_phases_s": {
            phase: statistics.median(step[phase] for step in seconds) for phase in seconds[0]
        },
    }
    if device == "cuda":
        result["measured_peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


def predict_calibrated(
    rows: list[dict[str, Any]], captured: dict[str, Captured], cluster: Cluster
) -> Calibration | None:
    """Fit on the fit cases, predict all of them from the fit alone."""
    fit = [captured[row["case"]].profile for row in rows
           if row["role"] == "fit" and row["case"] in captured]  # fmt: skip
    if not fit:
        return None
    kind = cluster.devices[0].kind
    calibration = calibrate(merge_profiles(fit), kind)
    for row in rows:
        if row["case"] in captured:
            case = captured[row["case"]]
            costs = estimate_costs(case.graph, cluster, calibration=calibration)
            row["calibrated_s"] = float(costs.op_s.sum())
            errors = calibration_errors(calibration, case.profile, kind)
            row["families"] = [{**asdict(error), "error": error.error} for error in errors]
    return calibration


def write_results(
    out: Path,
    rows: list[dict[str, Any]],
    captured: dict[str, Captured],
    cluster: Cluster,
    calibration: Calibration | None,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    first = next((c.profile for c in captured.values()), None)
    machine = {
        "device": first.device if first else "",
        "device_kind": cluster.devices[0].kind.name,
        "versions": dict(first.versions) if first else {},
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }
    summary = summarise(rows)
    results = {"machine": machine, "summary": summary, "cases": rows}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if captured:
        write_profile(merge_profiles([c.profile for c in captured.values()]), out / "profile.json")
    if calibration is not None:
        write_calibration(calibration, out / "calibration.json")
    (out / "table.md").write_text(table(rows, machine, summary))


def summarise(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Median absolute errors over the cases that have both numbers."""

    def median(key: str, measured: str, role: str | None = None) -> float | None:
        errors = [
            abs(row[key] / row[measured] - 1)
            for row in rows
            if key in row and measured in row and role in (None, row["role"])
        ]
        return statistics.median(errors) if errors else None

    return {
        "step, profile": median("profile_s", "measured_s"),
        "step, calibrated, held out": median("calibrated_s", "measured_s", "held out"),
        "step, calibrated, all": median("calibrated_s", "measured_s"),
        "step, data sheet and defaults": median("default_s", "measured_s"),
        "peak memory": median("predicted_peak_bytes", "measured_peak_bytes"),
    }


def table(
    rows: list[dict[str, Any]], machine: dict[str, Any], summary: dict[str, float | None]
) -> str:
    lines = [
        f"{machine['device']} · torch {machine['versions'].get('torch', '?')} · {machine['date']}"
        f" · `python {machine['command']}`",
        "",
        "| case | ops | calibration | step measured | with profile | calibrated | defaults "
        "| peak measured | predicted |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        note = f"; {row['error']}".replace("|", "/") if "error" in row else ""
        cells = [row["case"], str(row.get("num_ops", "")), row["role"] + note]
        measured_s = row.get("measured_s")
        cells.append("–" if measured_s is None else format_seconds(measured_s))
        cells += [
            compared(row.get(key), measured_s, format_seconds)
            for key in ("profile_s", "calibrated_s", "default_s")
        ]
        peak_bytes = row.get("measured_peak_bytes")
        cells.append("–" if peak_bytes is None else format_bytes(peak_bytes))
        cells.append(compared(row.get("predicted_peak_bytes"), peak_bytes, format_bytes))
        lines.append(f"| {' | '.join(cells)} |")
    known = {name: value for name, value in summary.items() if value is not None}
    lines += ["", *(f"- median error, {name}: {value:.1%}" for name, value in known.items())]
    return "\n".join(lines) + "\n"


def compared(predicted: float | None, measured: float | None, shown: Any) -> str:
    if predicted is None:
        return "–"
    if not measured:
        return str(shown(predicted))
    return f"{shown(predicted)} ({predicted / measured - 1:+.1%})"


if __name__ == "__main__":
    main()
