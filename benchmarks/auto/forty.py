"""Auto against what people do by hand and against each of its own families, on many problems.

    python benchmarks/auto/forty.py --out forty.json           # or --first 8 --models 4 of them
    python benchmarks/auto/forty.py --out forty.json --table   # what was found, as Markdown

Each model of the list is captured once and planned on two clusters, an unequal and an equal one in
turn, with the same global batch for every row. A row that does not fit counts as not there. Of op
placement the bound is taken where the bound already says that it loses. Prints one line per problem
and the geometric means; times are processor seconds of planning, without capture. "Single rooms"
are what each room plans without the search: ops placed, one device with accumulation and less
memory, equal configs (DDP, FSDP, GPipe); "families" the best ways of each kind in the search.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from hocket.capture import load_model
from hocket.capture.sizes import capture_sizes
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.make import make_problem
from hocket.planners.bounds import lower_bound
from hocket.planners.parallel.compare import (
    DDP,
    FSDP,
    GPIPE,
    PLACEMENT,
    UNSPLIT,
    compare_parallel,
)

MODELS = (
    ("gpt2", 16, 1024), ("resnet50", 64, None), ("bert-large", 16, 256), ("vit-base", 64, None),
    ("lstm", 64, None), ("gpt2-medium", 8, 1024), ("wide-resnet", 32, None), ("t5-base", 16, 256),
    ("inception-v3", 64, None), ("gnmt-4", 64, None), ("llama-1b", 8, 512), ("resnet101", 64, None),
    ("mlp", 256, None), ("gnmt-8", 64, None), ("gpt2-xl", 4, 512), ("resnet152", 32, None),
    ("mixtral-small", 8, 256), ("moe-12x32", 8, None), ("resnet1001", 64, None),
    ("llama-7b", 4, 256),
)  # fmt: skip
"""Name of the zoo, samples per step, sequence length."""
UNEQUAL = ("mixed-desktop", "1xv100-32g+2xt4")
EQUAL = ("rtx2080x4", "dgx1-v100", "2xrtx2080x4")
BY_HAND = (DDP, FSDP, UNSPLIT["device-map-auto"])
ROOMS = (*BY_HAND, GPIPE, UNSPLIT["one-device"], "1 GPU, accumulation", PLACEMENT)
FAMILIES = ("1 GPU, accumulation", "DDP", "FSDP", "pipeline", PLACEMENT)


def main() -> None:
    """Run the list, or a part of it, and write what was found beside what was there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--out", type=Path, default=Path("forty.json"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else []
    if options.table:
        print("\n".join(_table(found)))
        return
    for index in range(options.first, min(options.first + options.models, len(MODELS))):
        name, batch, seq = MODELS[index]
        graph = _captured(name, batch, seq)
        if graph is None or graph.other_batch is None:
            print(f"{name}: not split", flush=True)
            continue
        for on in (UNEQUAL[index % len(UNEQUAL)], EQUAL[index % len(EQUAL)]):
            found = [row for row in found if (row["model"], row["cluster"]) != (name, on)]
            found.append(_compared(name, graph, on))
            print(_line(found[-1]), flush=True)
            options.out.write_text(json.dumps(found, indent=1))
    print("\n".join(_summaries(found)))


def _summaries(found: list[dict]) -> list[str]:  # type: ignore[type-arg]
    parts = (("unequal", UNEQUAL), ("equal", EQUAL), ("all", (*UNEQUAL, *EQUAL)))
    return [f"{name}: {_summary([r for r in found if r['cluster'] in on])}" for name, on in parts]


def _table(found: list[dict]) -> list[str]:  # type: ignore[type-arg]
    lines = [
        "| model | cluster | step | by | over by hand | over single rooms | planned in |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        step = row["step_s"]
        if step is None:
            lines.append(f"| {row['model']} | {row['cluster']} | nothing fits | | | | |")
            continue
        gains = [_best(row, BY_HAND), _best(row, ROOMS)]
        told = ["–" if best is None else f"{best / step:.2f}x" for best in gains]
        cells = (row["model"], row["cluster"], f"{step * 1e3:.0f} ms", row["winner"], *told,
                 f"{row['plan_cpu_s']:.1f} s")  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, "", *_summaries(found)]


def _captured(name: str, batch: int, seq: int | None) -> Graph | None:
    try:
        model, given = load_model(name, batch=batch, seq=seq, device="meta")
        return capture_sizes(model, given, name=name)
    except Exception as error:
        print(f"{name}: {error}", flush=True)
        return None


def _compared(name: str, graph: Graph, on: str | Cluster) -> dict[str, object]:
    problem = make_problem(graph, on)
    started = time.process_time()
    comparison = compare_parallel(problem)
    seconds = time.process_time() - started
    steps = {c.planner: c.step_s for c in comparison.candidates if c.step_s is not None}
    searched = PLACEMENT in steps
    winner, bound_s = comparison.winner, lower_bound(problem).seconds
    if winner is not None and winner.step_s is not None and bound_s >= winner.step_s:
        # What was not searched, since its bound loses, is taken to be as short as that allows.
        steps.setdefault(PLACEMENT, bound_s)
    return {
        "model": name, "ops": graph.num_ops, "cluster": str(on), "plan_cpu_s": round(seconds, 2),
        "winner": None if winner is None else winner.planner,
        "how": None if winner is None or winner.plan is None else winner.plan.notes.get("how"),
        "step_s": None if winner is None else winner.step_s, "rows": steps,
        "bound_s": None if comparison.bound is None else comparison.bound.seconds,
        "placement_searched": searched,
    }  # fmt: skip


def _line(row: dict) -> str:  # type: ignore[type-arg]
    if row["step_s"] is None:
        return f"{row['model']} on {row['cluster']}: nothing fits"
    best = _best(row, BY_HAND)
    gain = "–" if best is None else f"{best / row['step_s']:.2f}x"
    return (
        f"{row['model']} on {row['cluster']}: {row['step_s'] * 1e3:.0f} ms by "
        f"{row['how'] or row['winner']}, "
        f"{gain} over the best by hand, planned in {row['plan_cpu_s']} s"
    )


def _best(row: dict, names: tuple[str, ...]) -> float | None:  # type: ignore[type-arg]
    return min((row["rows"][name] for name in names if name in row["rows"]), default=None)


def _summary(rows: list[dict]) -> str:  # type: ignore[type-arg]
    rows = [row for row in rows if row["step_s"] is not None]

    def gain(names: tuple[str, ...]) -> str:
        ratios = [best / r["step_s"] for r in rows if (best := _best(r, names)) is not None]
        return f"{_mean(ratios):.2f}x"

    worst = max((row["plan_cpu_s"] for row in rows), default=0.0)
    slow = sum(row["plan_cpu_s"] > 10 for row in rows)
    never = all(row["step_s"] <= 1.005 * min(row["rows"].values()) for row in rows)
    return (
        f"{len(rows)} problems, {gain(BY_HAND)} over the best by hand, {gain(ROOMS)} over the best "
        f"single room, {gain(FAMILIES)} over the best family, never worse: {never}, slowest "
        f"planning {worst} CPU s, {slow} above 10"
    )


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


if __name__ == "__main__":
    main()
