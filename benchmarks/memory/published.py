"""The chain program against published runs of Checkmate's program under Gurobi, up to 24 hours.

Five nets on a P100, whose nodes were timed by MONeT (`monet_nets`), under the rules of those runs
(`checkmate_rules`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkmate_rules import Zoo
from monet_nets import Net, googlenet, mobilenet_v2, resnet50, unet, vgg16

from hocket.planners.memory.chain import Chain, schedule_chain

GIB = 2**30


def published(folder: Path) -> int:
    """A table per net."""
    costs = json.loads((folder / "monet_zoo_costs_p100.json").read_text())
    runs = json.loads((folder / "monet_zoo_solver_logs.json").read_text())
    for name, (key, is_own, builds) in NETS.items():
        table = costs[key]["workspace_compute"]
        timed_ms = [table[str(number)][0] for number in range(len(table))]
        zoos = [Zoo(build(), timed_ms) for build in builds]
        chains = [(zoo.chain(), zoo.there) for zoo in zoos]
        base = sum(timed_ms)
        print(f"{name}, batch {zoos[0].net.batch}, {len(table)} nodes, {len(zoos[0].stages)} "
              f"stages, {base:.0f} ms without recompute\n")  # fmt: skip
        print("| GiB | published ms | ours | time over published | overhead published | ours |"
              " CPU s |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for run in sorted((r for r in runs if is_own(r["log"])), key=lambda r: -_budget(r["log"])):
            _row(chains, run, base)
        print()
    return 0


def _budget(log: str) -> float:
    """The last part of a name that is a number."""
    return next(float(part) for part in reversed(log.split("_")) if part[:1].isdigit())


def _row(chains: list[tuple[Chain, int]], run: dict[str, Any], base: float) -> None:
    budget, objective = _budget(run["log"]), run["best_objective"]
    started = time.process_time()
    tried = [schedule_chain(chain, int(budget * GIB) - there, 1000) for chain, there in chains]
    found = min(filter(None, tried), key=lambda schedule: schedule.seconds, default=None)
    seconds = time.process_time() - started
    ours = "infeasible" if found is None else f"{found.seconds:.0f}"
    if found is None or objective is None:
        theirs = objective and f"{objective / 100:.0f}"
        told = theirs or ("infeasible" if run["infeasible"] else "none found")
        print(f"| {budget:g} | {told} | {ours} | | | | {seconds:.2f} |")
        return
    theirs = objective / 100
    print(
        f"| {budget:g} | {theirs:.0f} | {ours} | {100 * (found.seconds / theirs - 1):+.1f} % | "
        f"{100 * (theirs / base - 1):.1f} % | {100 * (found.seconds / base - 1):.1f} % | "
        f"{seconds:.2f} |"
    )


NETS: dict[str, tuple[str, Callable[[str], bool], list[Callable[[], Net]]]] = {
    "VGG-16": ("vgg16_176_normal", lambda log: log.startswith("checkmate_vgg"), [vgg16]),
    "ResNet-50": ("resnet50_184_normal", lambda log: log.startswith("checkmate_r50"), [resnet50]),
    "MobileNet-V2": (
        "mobilenet_v2_272_normal", lambda log: "checkmate_mobilenet_normal" in log, [mobilenet_v2],
    ),
    "GoogLeNet": ("googlenet_320_normal", lambda log: "checkmate_googlenet" in log, [googlenet]),
    "U-Net": (
        "un_11_normal", lambda log: "checkmate_unet" in log,
        [partial(unet, count) for count in range(5)],
    ),
}  # fmt: skip
"""By name the key of its costs, which runs are its own, and forms of it, of which the best one for
a budget is taken."""
