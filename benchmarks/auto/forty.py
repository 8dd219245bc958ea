"""Auto against what people do by hand and against each of its own families, on many problems.

    python benchmarks/auto/forty.py --models 20 --out forty.json

Each model of the list is captured once and planned on two clusters, an unequal and an equal one in
turn, with the same global batch for every row. A row that does not fit counts as not there. Of op
placement the bound is taken where the bound already says that it loses. Prints one line per problem
and the geometric means; times are processor seconds of planning, without capture.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from hocket.api import make_problem
from hocket.capture import load_model
from hocket.capture.sizes import capture_sizes
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.planners.whole.compare import PLACEMENT, compare_whole

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
BY_HAND = ("DDP", "FSDP", 'device_map="auto"')


def main() -> None:
    """Run the list and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--out", type=Path, default=Path("forty.json"))
    options = parser.parse_args()
    found = []
    for index, (name, batch, seq) in enumerate(MODELS[: options.models]):
        graph = _captured(name, batch, seq)
        if graph is None or graph.other_batch is None:
            print(f"{name}: not split", flush=True)
            continue
        for on in (UNEQUAL[index % len(UNEQUAL)], EQUAL[index % len(EQUAL)]):
            found.append(_compared(name, graph, on))
            print(_line(found[-1]), flush=True)
            options.out.write_text(json.dumps(found, indent=1))
    for title, on in (("unequal", UNEQUAL), ("equal", EQUAL)):
        rows = [row for row in found if row["cluster"] in on]
        print(f"{title}: {_summary(rows)}")


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
    comparison = compare_whole(problem)
    seconds = time.process_time() - started
    steps = {c.planner: c.step_s for c in comparison.candidates if c.step_s is not None}
    winner = comparison.winner
    return {
        "model": name, "ops": graph.num_ops, "cluster": str(on), "plan_cpu_s": round(seconds, 2),
        "winner": None if winner is None else winner.planner,
        "how": None if winner is None or winner.plan is None else winner.plan.notes.get("how"),
        "step_s": None if winner is None else winner.step_s, "rows": steps,
        "bound_s": None if comparison.bound is None else comparison.bound.seconds,
        "placement_searched": PLACEMENT in steps,
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
    by_hand = [best / row["step_s"] for row in rows if (best := _best(row, BY_HAND)) is not None]
    families = ("one device", "data parallel", "pipeline", PLACEMENT)
    rooms = [best / row["step_s"] for row in rows if (best := _best(row, families)) is not None]
    worst = max((row["plan_cpu_s"] for row in rows), default=0.0)
    never = all(row["step_s"] <= 1.005 * min(row["rows"].values()) for row in rows)
    return (
        f"{len(rows)} problems, {_mean(by_hand):.2f}x over the best by hand, "
        f"{_mean(rooms):.2f}x over the best single family, never worse: {never}, "
        f"slowest planning {worst} CPU s"
    )


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


if __name__ == "__main__":
    main()
