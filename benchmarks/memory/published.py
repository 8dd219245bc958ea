"""Recompute, as a chain and as a graph, against published runs of Checkmate's program under Gurobi.

Five nets on a P100, whose nodes were timed by MONeT (`monet_nets`), under the rules of those runs
(`checkmate_rules`), which took up to 24 hours. The better of both is held against them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from checkmate_rules import Zoo
from monet_nets import Net, googlenet, mobilenet_v2, resnet50, unet, vgg16
from recompute_chain import schedule_chain
from recompute_graph import schedule_graph

GIB = 2**30


def published(folder: Path) -> int:
    """One table of all nets; exit code 6 where a published time is missed by more than 2 %."""
    costs = json.loads((folder / "monet_zoo_costs_p100.json").read_text())
    runs = json.loads((folder / "monet_zoo_solver_logs.json").read_text())
    print("| net | GiB | published ms | chain | graph | time over published | overhead published |"
          " ours | CPU s |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    missed = 0
    for name, (key, is_own, builds) in NETS.items():
        table = costs[key]["workspace_compute"]
        timed_ms = [table[str(number)][0] for number in range(len(table))]
        zoos = [Zoo(build(), timed_ms) for build in builds]
        own = (run for run in runs if is_own(run["log"]))
        told = f"{name}, batch {zoos[0].net.batch}"
        for run in sorted(own, key=lambda run: -_budget(run["log"])):
            missed += _row(told, zoos, run)
            told = ""
    print(f"{missed} rows more than 2 % above the published time")
    return 6 if missed else 0


def _budget(log: str) -> float:
    """The last part of a name that is a number."""
    return next(float(part) for part in reversed(log.split("_")) if part[:1].isdigit())


def _row(name: str, zoos: list[Zoo], run: dict[str, Any]) -> bool:
    """Print one budget; whether the published time is missed."""
    budget, objective = _budget(run["log"]), run["best_objective"]
    room = int(budget * GIB)
    started = time.process_time()
    chains = [schedule_chain(zoo.chain(), room - zoo.there, 1000) for zoo in zoos]
    of_chain_ms = min((found.seconds for found in chains if found), default=inf)
    of_graph = schedule_graph(zoos[0].graph(), room - zoos[0].fixed)
    of_graph_ms = inf if of_graph is None else of_graph.seconds
    seconds = time.process_time() - started
    ours_ms, base_ms = min(of_chain_ms, of_graph_ms), sum(zoos[0].timed_ms)
    cells = [name, f"{budget:g}", "", _told(of_chain_ms), _told(of_graph_ms), "", "", ""]
    is_missed = False
    if objective is None:
        cells[2] = "infeasible" if run["infeasible"] else "none found"
    else:
        theirs_ms = objective / 100
        cells[2] = f"{theirs_ms:.0f}"
        cells[5] = f"{100 * (ours_ms / theirs_ms - 1):+.1f} %"
        cells[6] = f"{100 * (theirs_ms / base_ms - 1):.1f} %"
        is_missed = ours_ms > 1.02 * theirs_ms
    if ours_ms < inf:
        cells[7] = f"{100 * (ours_ms / base_ms - 1):.1f} %"
    print(f"| {' | '.join(cells)} | {seconds:.1f} |", flush=True)
    return is_missed


def _told(milliseconds: float) -> str:
    return "none" if milliseconds == inf else f"{milliseconds:.0f}"


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
"""By name the key of its costs, which runs are its own, and forms of it: the net itself, and others
that are chains in another way, of which the best one for a budget is taken."""
