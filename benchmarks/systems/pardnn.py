"""ParDNN's evaluation: batch scaling, other methods, and a wide ResNet under tight memory.

    python benchmarks/systems/pardnn.py [--only MODEL] [--tight] [--one-card]

Simulated on V100s of a DGX-2. A card has 1.1 times the memory that the smallest published batch
takes, so that one card holds that batch and little more, as in the paper. Columns: the largest
batch (powers of two) that ParDNN's plan holds on so many cards, samples per second over those of
one card (in brackets: over that per card; above 1 is superlinear). Methods at the batch of four
cards: linear clustering with clusters balanced over cards (Kim and Browne), the critical path on a
card of its own, and gradient checkpointing on one card (recompute as planned by `hocket.fit`
without host memory). `--one-card` prints the samples per second of one card from the published
batch on: small batches use a card badly, which is where a superlinear speed-up comes from.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from pardnn_models import MODELS, Model, captured

from hocket.api.memory import fit_problem
from hocket.capture import capture, load_model
from hocket.graph.batches import at_batch
from hocket.graph.graph import Graph
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners import find_planner
from hocket.planners.candidates import propose
from hocket.planners.placement.pardnn.path_slices import slice_paths
from hocket.planners.placement.pardnn.unit_work import devices_of, units, work_of
from hocket.planners.registry import BASE
from hocket.simulate import simulate

CARDS = (1, 2, 4, 8, 16)
SLACK = 1.1
MOST_BATCH = 4096
TIGHT = ("m-topo", "m-etf", "m-sct", "pardnn")
TIGHT_GIB = (5.0, 3.5)


def problem_of(graph: Graph, cards: int, memory_bytes: int) -> Problem:
    """The graph on some of a DGX-2's cards, cut to so much memory."""
    cluster = make_problem(graph, f"{cards}xv100-32g").cluster
    cut = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    return make_problem(graph, replace(cluster, devices=cut), headroom_bytes=0)


def memory_of(model: Model, graph: Graph) -> int:
    """Bytes of a card: a little more than the smallest batch takes."""
    problem = make_problem(at_batch(graph, model.batch), "1xv100-32g")
    alone = Plan().placing(np.zeros(problem.graph.num_ops, dtype=np.int32))
    return int(SLACK * simulate(problem, alone).peak_bytes[0])


def pardnn_s(graph: Graph, batch: int, cards: int, memory_bytes: int) -> float | None:
    """Step of ParDNN's plan; None where it does not fit."""
    problem = problem_of(at_batch(graph, batch), cards, memory_bytes)
    if cards == 1:
        return propose(problem, "one-device", BASE["one-device"]).step_s
    # As `hocket plan` does: what lacks memory is mended, or stays on one card where it fits.
    for name in ("pardnn", "pardnn+spread-memory", "one-device"):
        step_s = propose(problem, name, find_planner(name)).step_s
        if step_s is not None:
            return step_s
    return None


def largest(
    model: Model, graph: Graph, cards: int, memory_bytes: int, start: int | None = None
) -> tuple[int, float]:
    """The largest batch that fits, and its samples per second; ``start`` is one to begin with."""
    batch, rate = 0, 0.0
    trial = start or model.batch
    while trial <= MOST_BATCH:
        step_s = pardnn_s(graph, trial, cards, memory_bytes)
        if step_s is None:
            break
        batch, rate = trial, trial / step_s
        trial *= 2
    return batch, rate


def one_card(model: Model) -> str:
    """Samples per second of one uncut card at the published batch of one card and its multiples."""
    graph, cells = captured(model), []
    for batch in (model.batch * factor for factor in (1, 2, 4, 8, 16)):
        problem = make_problem(at_batch(graph, batch), "1xv100-32g")
        alone = Plan().placing(np.zeros(problem.graph.num_ops, dtype=np.int32))
        cells.append(f"batch {batch}: {batch / simulate(problem, alone).makespan_s:.1f}")
    return f"{model.name}, samples/s of one card: {', '.join(cells)}"


def by_paths(problem: Problem, plan: Plan, *, only_first: bool) -> Plan:
    """Linear clusters on the least loaded card each; ``only_first``: the critical path has its own
    card, all else is balanced op by op over the others."""
    unit = units(problem)
    work = work_of(problem, unit, devices_of(problem, unit))
    num_paths = 1 if only_first else problem.cluster.num_devices
    paths = slice_paths(work, num_paths)
    load_s = np.zeros(problem.cluster.num_devices)
    device = np.zeros(problem.graph.num_ops, dtype=np.int32)
    cluster = np.where(paths.path == 0, -1, unit) if only_first else paths.path
    weight = {key: work.op_s[cluster == key].sum() for key in np.unique(cluster).tolist()}
    for key in sorted(weight, key=lambda key: (key != -1, -weight[key])):
        card = 0 if key == -1 else int(np.argmin(load_s))
        device[cluster == key] = card
        load_s[card] += weight[key] if key != -1 else np.inf
    return plan.having(Placement(device))


def methods(graph: Graph, batch: int, memory_bytes: int) -> list[str]:
    """Samples per second of other methods on four cards, and of checkpointing on one."""
    problem = problem_of(at_batch(graph, batch), 4, memory_bytes)
    cells = []
    for only_first in (False, True):
        placed = by_paths(problem, Plan(), only_first=only_first)
        timeline = simulate(problem, placed)
        fits = bool((timeline.peak_bytes <= problem.memory_bytes).all())
        rate = batch / timeline.makespan_s
        cells.append(f"{rate:.3g}" + ("" if fits else " (out of memory)"))
    one = problem_of(at_batch(graph, batch), 1, memory_bytes)
    fitted = fit_problem(one, memory_bytes, host_bytes=0.0).chosen
    cells.append("does not fit" if fitted is None else f"{batch / fitted.step_s:.3g}")
    return cells


def row(model: Model, cards: tuple[int, ...] = CARDS) -> list[str]:
    """The cells of one model."""
    graph = captured(model)
    memory_bytes = memory_of(model, graph)
    found: dict[int, tuple[int, float]] = {}
    batch = model.batch
    for count in cards:
        found[count] = largest(model, graph, count, memory_bytes, batch)
        batch = max(batch, found[count][0])
    one = found[1][1]
    cells = [
        f"{batch}; {rate / one:.1f}x ({rate / one / count:.2f})"
        for count, (batch, rate) in found.items()
    ]
    batch, rate = found[4]
    return [*cells, f"{rate:.3g}", *methods(graph, batch, memory_bytes)]


def tight_steps(gib: float) -> dict[str, str]:
    """Step of each planner for a wide ResNet on four cards of so much memory."""
    graph = capture(*load_model("wide-resnet", batch=32))
    problem = problem_of(graph, 4, int(gib * 2**30))
    return {name: _step_ms(propose(problem, name, BASE[name]).step_s) for name in TIGHT}


def ours() -> str:
    """The figures of the row in docs/systems.md."""
    graph = captured(next(model for model in MODELS if model.name == "E3D"))
    model = next(model for model in MODELS if model.name == "E3D")
    memory_bytes = memory_of(model, graph)
    one, four = (largest(model, graph, count, memory_bytes) for count in (1, 4))
    found = tight_steps(3.5)
    others = f"m-TOPO {found['m-topo']}, m-ETF {found['m-etf']}".replace(" ms", "")
    return (
        f"simulated: E3D batch {one[0]} to {four[0]} on 4 cards, {four[1] / one[1]:.1f}x; "
        f"wide ResNet on 4 cards of 3.5 GiB {found['pardnn']} ({others})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--tight", action="store_true", help="the table of small cards alone")
    parser.add_argument("--one-card", action="store_true", help="small batches on one card alone")
    options = parser.parse_args()
    if options.one_card:
        for model in MODELS:
            if model.name.startswith(options.only):
                print(one_card(model), flush=True)
        return
    if not options.tight:
        heads = " | ".join(f"{count} cards" for count in CARDS)
        print(f"| model | published batches | {heads} | 4 cards, samples/s | linear clustering | "
              "critical path | checkpointing, 1 card |")  # fmt: skip
        print(f"|---|---|{'---|' * len(CARDS)}---|---|---|---|")
        for model in MODELS:
            if model.name.startswith(options.only):
                published = f"{model.batch} to {model.published}"
                print(f"| {model.name} | {published} | {' | '.join(row(model))} |", flush=True)
    print(f"\n| memory of each card | {' | '.join(TIGHT)} |")
    print(f"|---|{'---|' * len(TIGHT)}")
    for gib in TIGHT_GIB:
        print(f"| {gib} GiB | {' | '.join(tight_steps(gib).values())} |", flush=True)


def _step_ms(step_s: float | None) -> str:
    return "does not fit" if step_s is None else f"{1e3 * step_s:.0f} ms"


if __name__ == "__main__":
    main()
