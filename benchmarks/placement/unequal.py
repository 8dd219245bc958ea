"""Unequal GPUs: one V100-32G and two T4, what each split of a training step takes.

    .venv/bin/python benchmarks/placement/unequal.py            # all models, some minutes
    .venv/bin/python benchmarks/placement/unequal.py gpt2       # names that contain a word

Every model of the zoo whose step fits, with PCIe x16 and with PCIe x4 between the cards. Steps are
what the simulator says. What libraries make of some models: ``peers.py``. Results:
``docs/concepts/placement.md``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import suite
from quality import geometric_mean

from hocket.capture import ZOO, capture, load_model
from hocket.hardware import Cluster
from hocket.plan.make import make_problem
from hocket.planners.auto import AUTO, portfolio

BATCH = {
    "gpt2": 8, "gpt2-medium": 4, "gpt2-xl": 1, "bert-large": 8, "llama-1b": 1, "t5-base": 8,
    "vit-base": 32, "mixtral-small": 2, "resnet50": 64, "resnet101": 32, "resnet152": 32,
    "resnet1001": 16, "wide-resnet": 16, "inception-v3": 32, "gnmt-4": 32, "gnmt-8": 16,
    "lstm": 32, "moe-12x32": 2, "mlp": 64,
}  # fmt: skip
SLOW = 0.25
"""Links of PCIe x4 instead of x16."""


def slower(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with the bandwidth of its links multiplied."""
    links = tuple(
        replace(link, bandwidth_bps=link.bandwidth_bps * factor) for link in cluster.links
    )
    return replace(cluster, name=f"{cluster.name}, slow links", links=links)


def main() -> None:
    words = sys.argv[1:]
    fast = suite.cluster_named(suite.UNEQUAL)
    ratios: dict[str, list[float]] = {"device-map-auto": [], "layer-blocks": []}
    print("| model | links | one-device | device-map-auto | layer-blocks | auto | made from |")
    print("|---|---|---|---|---|---|---|")
    for name in ZOO:
        if name not in BATCH or (words and not any(word in name for word in words)):
            continue
        model, batch = load_model(name, batch=BATCH[name])
        graph = capture(model, batch, name=name)
        for label, cluster in (("x16", fast), ("x4", slower(fast, SLOW))):
            found = {c.planner: c for c in portfolio(make_problem(graph, cluster))}
            steps = {planner: c.step_s or math.nan for planner, c in found.items()}
            for planner, list_of in ratios.items():
                list_of.append(steps[planner] / steps[AUTO])
            cells = [f"{1e3 * steps[p]:,.4g}" for p in ("one-device", *ratios, AUTO)]
            plan = found[AUTO].plan
            made_from = plan.claims.made_from if plan is not None else ""
            print(f"| {name} | {label} | {' | '.join(cells)} | {made_from} |", flush=True)
    print("\nSteps in milliseconds; nan: does not fit.\n")
    for planner, values in ratios.items():
        fits = sum(value == value for value in values)
        print(
            f"- {planner} takes {geometric_mean(values):.3f} times as long as auto (geometric mean "
            f"of {fits} that fit of {len(values)})"
        )


if __name__ == "__main__":
    main()
