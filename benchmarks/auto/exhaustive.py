"""Auto against every way of a space that is small enough to try all of it.

    python benchmarks/auto/exhaustive.py [--only "four devices"]

Up to twelve layers on up to four devices: every set of ordered groups of devices, every number of
samples of each, every cut between two layers, one, two, four or as many microbatches as samples. A
way is simulated unless what its busiest device computes, or one of its replicas without the others,
is already longer than the best way that was found: exchanging gradients only adds to that, so
nothing better is left out. Prints the best of all, the answer of the search, and how far apart they
are.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import torch
from torch import nn

from hocket.capture.sizes import capture_sizes
from hocket.plan.make import make_problem
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica
from hocket.planners.devices import workers
from hocket.planners.parallel.closed_form import Tables, block_edges, tables_of
from hocket.planners.parallel.compare import compare_parallel
from hocket.planners.parallel.device_groups import even_sizes
from hocket.planners.parallel.search import least_s, structures
from hocket.planners.parallel.simulated import simulated

BATCH = 8
COUNTS = (1, 2, 4, 8)
PROBLEMS = (
    ("12 equal layers", (1024,) * 13, "1xrtx3090+1xv100-16g+1xt4", BATCH),
    ("6 layers on four devices", (1024, 2048) * 3 + (1024,), "1xrtx3090+1xv100-16g+2xt4", 4),
    ("5 layers on four unlike devices", (2048,) * 6, "1xrtx3090+1xv100-16g+1xt4+1xtitanx-12g", 4),
    ("8 wide layers on four devices", (4096,) * 9, "rtx2080x4", 4),
    ("12 narrow layers", (256,) * 13, "1xv100-16g+2xt4", BATCH),
    ("12 wide layers on four devices", (4096,) * 13, "rtx2080x4", 4),
    (
        "12 layers on four devices",
        (512, 1024, 2048, 512) * 3 + (512,),
        "1xrtx3090+1xv100-16g+2xt4",
        4,
    ),
    ("12 unequal layers", (512, 1024, 2048, 512) * 3 + (512,), "1xrtx3090+1xv100-16g+2xt4", BATCH),
)


class Stack(nn.Module):
    """Linear layers of some widths."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def main() -> None:
    """Try everything on each problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="Part of the names of problems.")
    asked = parser.parse_args().only
    for name, widths, on, batch in PROBLEMS:
        if asked not in name:
            continue
        graph = capture_sizes(Stack(widths), torch.zeros(batch, 256, widths[0]))
        problem = make_problem(graph, on)
        winner = compare_parallel(problem).winner
        assert winner is not None
        assert winner.step_s is not None
        started = time.process_time()
        best_s, num_ways, num_simulated = _best_of_all(problem, winner.step_s)
        print(
            f"{name} on {on}: search {winner.step_s * 1e3:.3f} ms, best of {num_ways} ways "
            f"{best_s * 1e3:.3f} ms: {winner.step_s / best_s - 1:+.2%} ({num_simulated} simulated, "
            f"{time.process_time() - started:.0f} CPU s)",
            flush=True,
        )


def _best_of_all(problem: Problem, known_s: float) -> tuple[float, int, int]:
    """The least step of all ways, how many there are, and how many were simulated."""
    tables, devices = tables_of(problem), workers(problem).tolist()
    names, alone_s = problem.cluster.device_names, dict[Replica, float]()
    best_s, num_ways = known_s, 0
    num_simulated = [0]

    def judged_s(shares: Parallel) -> float:
        num_simulated[0] += 1
        return simulated(problem, shares).step_s or float("inf")

    def can_win(replica: Replica) -> bool:
        """Whether a replica without the others is shorter than the best way so far."""
        if replica not in alone_s:
            only = Parallel(replicas=(replica,))
            alone_s[replica] = least_s(tables, only)
            if alone_s[replica] < best_s:
                alone_s[replica] = judged_s(only)
        return alone_s[replica] < best_s

    for structure in structures(tables, devices):
        for samples in _partitions(tables.num_samples, len(structure)):
            offers = [_replicas(tables, names, group, number)
                      for group, number in zip(structure, samples, strict=True)]  # fmt: skip
            num_ways += math.prod(map(len, offers))
            for chosen in product(*([r for r in some if can_win(r)] for some in offers)):
                if all(map(can_win, chosen)):
                    best_s = min(best_s, judged_s(Parallel(replicas=chosen)))
    return best_s, num_ways, num_simulated[0]


def _replicas(
    tables: Tables, names: tuple[str, ...], group: tuple[int, ...], number: int
) -> list[Replica]:
    layers = block_edges(tables.problem.graph)[1:]
    counts = sorted({min(count, number) for count in COUNTS})
    return [
        Replica(
            devices=tuple(names[d] for d in group),
            microbatches=even_sizes(number, -(-number // count)),
            cuts=cuts,
        )
        for count in counts
        for cuts in combinations(layers, len(group) - 1)
    ]


def _partitions(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as so many positive numbers, in order."""
    for cuts in combinations(range(1, number), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, number)))


if __name__ == "__main__":
    main()
