"""Steps kept within budgets: are they kept, does time fall with room, what do the usual plans take.

    .venv/bin/python benchmarks/memory/budgets.py [--on 1xh200] [--only TEXT] [--num-budgets 24]
    .venv/bin/python benchmarks/memory/budgets.py --monet ../shared/data/memory

For each zoo model one frontier of plans is made; then budgets from the smallest that fits up to the
plain step's peak are asked for. Each chosen plan is carried into the graph and simulated anew by
``verify``. ``--monet`` compares the chain program with published 24-hour solver runs on VGG-16.
Times are predictions of the cost model; seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hocket.api import make_problem
from hocket.capture import capture, load_model
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.chain import Chain, schedule_chain
from hocket.planners.memory.frontier import FULL_OFFLOAD, FULL_RECOMPUTE, PLAIN, find_frontier
from hocket.simulate.verify import verify

GIB = 2**30
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 2, "seq": 128},
    "gpt2-medium": {"batch": 8, "seq": 1024, "dtype": "bfloat16"},
    "llama-1b": {"batch": 4, "seq": 2048, "dtype": "bfloat16"},
    "bert-large": {"batch": 16, "seq": 128},
    "vit-base": {"batch": 32},
    "resnet50": {"batch": 64},
    "wide-resnet": {"batch": 32},
    "gnmt-4": {"batch": 64},
    "mlp": {"batch": 1024},
}


def main() -> int:
    """Print a line per model; exit code 6 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="1xh200")
    parser.add_argument("--only", default="")
    parser.add_argument("--num-budgets", type=int, default=24)
    parser.add_argument("--monet", type=Path)
    options = parser.parse_args()
    if options.monet is not None:
        return monet(options.monet)
    print(
        "| model | ops | blocks | plain | smallest | bound | half | quarter | pairs | broken | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    num_broken = num_pairs = 0
    for name, settings in CASES.items():
        if options.only in name:
            pairs, broken = row(name, settings, options.on, options.num_budgets)
            num_pairs, num_broken = num_pairs + pairs, num_broken + broken
    print(f"{num_pairs} pairs, {num_broken} broken")
    return 6 if num_broken else 0


def row(name: str, settings: dict[str, Any], on: str, num_budgets: int) -> tuple[int, int]:
    """Plan one model for all budgets and print what came out."""
    model, batch = load_model(name, **settings)
    graph = capture(model, batch, name=name)
    problem = make_problem(graph, on)
    plan = empty_plan(problem, "memory").placing(np.zeros(graph.num_ops, dtype=np.int32))
    started = time.process_time()
    frontier = find_frontier(problem, plan)
    seconds = time.process_time() - started
    plain, smallest = frontier.find(PLAIN), frontier.smallest
    assert plain is not None
    budgets = np.geomspace(smallest.peak_bytes, plain.peak_bytes, num_budgets).astype(int).tolist()
    broken, last_s = 0, float("inf")
    for budget in budgets:
        fit = BudgetFit(frontier, max(budget, smallest.peak_bytes))
        verify(fit.plan(), problem)
        assert fit.chosen is not None
        usual = [frontier.find(FULL_RECOMPUTE), frontier.find(FULL_OFFLOAD)]
        slower = any(
            p is not None and p.peak_bytes <= fit.budget_bytes and p.step_s < fit.chosen.step_s
            for p in usual
        )
        broken += fit.chosen.peak_bytes > fit.budget_bytes or fit.chosen.step_s > last_s or slower
        last_s = fit.chosen.step_s
    bound = BudgetFit(frontier, smallest.peak_bytes).lower_bound_bytes
    parts = [_times(frontier, plain.peak_bytes, part) for part in (2, 4)]
    print(
        f"| {name} {' '.join(str(v) for v in settings.values())} | {graph.num_ops:,} | "
        f"{frontier.uses.blocks.num_blocks} | {plain.peak_bytes / GIB:.2f} GiB "
        f"{plain.step_s * 1e3:.1f} ms | {smallest.peak_bytes / GIB:.3f} | {bound / GIB:.3f} | "
        f"{parts[0]} | {parts[1]} | {len(budgets)} | {broken} | {seconds:.1f} |",
        flush=True,
    )
    return len(budgets), broken


def _times(frontier: Any, peak: int, part: int) -> str:
    """Step at a part of the plain peak over the plain step: ours, and full recompute if it fits."""
    plain_s = frontier.find(PLAIN).step_s
    ours, full = frontier.best(peak // part), frontier.find(FULL_RECOMPUTE)
    told = "–" if ours is None else f"{ours.step_s / plain_s:.2f}"
    usual = f"{full.step_s / plain_s:.2f}" if full.peak_bytes <= peak // part else "✗"
    return f"{told} ({usual})"


# ── published solver runs ────────────────────────────────────────────────────────────────────────

_LAYERS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_BATCH = 176
_PARAMETERS_AND_GRADIENTS = 2 * 138_357_544 * 4
_PUBLISHED_MS = {10: 2506.00, 9: 2513.83, 8: 2558.28, 7: None}


def monet(folder: Path) -> int:
    """VGG-16, batch 176, on a P100: the chain program against Checkmate's program under Gurobi."""
    table = json.loads((folder / "monet_zoo_costs_p100.json").read_text())["vgg16_176_normal"]
    ms = {int(node): values[0] for node, values in table["workspace_compute"].items()}
    chain = _vgg(ms)
    base = float(chain.forward_s.sum() + chain.backward_s.sum())
    image = _BATCH * 3 * 224 * 224 * 4
    print("| GiB | published ms | ours | time over published | overhead published | ours | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for budget, published in _PUBLISHED_MS.items():
        started = time.process_time()
        room = budget * GIB - _PARAMETERS_AND_GRADIENTS - image
        found = schedule_chain(chain, room, 1000)
        seconds = time.process_time() - started
        if found is None or published is None:
            told = "infeasible" if found is None else f"{found.seconds:.0f}"
            print(f"| {budget} | {published or 'infeasible'} | {told} | | | | {seconds:.2f} |")
            continue
        print(
            f"| {budget} | {published:.0f} | {found.seconds:.0f} | "
            f"{100 * (found.seconds / published - 1):+.1f} % | "
            f"{100 * (published / base - 1):.1f} % | {100 * (found.seconds / base - 1):.1f} % | "
            f"{seconds:.2f} |"
        )
    return 0


def _vgg(ms: dict[int, float]) -> Chain:
    """Stages of VGG-16: convolution with its activation, pools (with 64-bit indices), classifier.

    The gradient of an activation takes the place of what comes in, as profiled.
    """
    side, channels, node = 224, 3, 0
    outputs: list[int] = []
    kept: list[int] = []
    forward: list[list[int]] = []
    for width in _LAYERS:
        side, channels = (side, width) if width else (side // 2, channels)
        size = _BATCH * channels * side * side * 4
        outputs.append(size)
        kept.append(size if width else 3 * size)
        forward.append([node, node + 1] if width else [node])
        node += len(forward[-1])
    hidden = _BATCH * 4096 * 4
    outputs += [_BATCH * 512 * 49 * 4, hidden, hidden, _BATCH * 1000 * 4]
    kept += [_BATCH * 512 * 49 * 4, 2 * hidden, 2 * hidden, _BATCH * 1000 * 4]
    forward += [[31], [32, 33, 34, 35], [36, 37, 38], [39, 40]]
    backward = [[41, 42], [43, 44, 45, 46], [47, 48, 49, 50, 51], [52]]
    node = 53
    for width in reversed(_LAYERS):
        backward.append(list(range(node, node + (3 if width else 1))))
        node += len(backward[-1])
    output, left = np.array(outputs), np.array(kept)
    before = np.append(0, output[:-1])
    return Chain(
        forward_s=np.array([sum(ms[n] for n in nodes) for nodes in forward]),
        backward_s=np.array([sum(ms[n] for n in nodes) for nodes in backward[::-1]]),
        output=output,
        kept=left,
        gradient=output,
        forward_work=np.zeros_like(output),
        backward_work=np.maximum(left, before) - left - before,
    )


if __name__ == "__main__":
    sys.exit(main())
