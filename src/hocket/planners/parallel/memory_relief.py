"""Make parallel configs fit: recompute the fewest blocks, then move updates to the host.

Recomputing a block frees the activations that it saves less its input, once for every microbatch in
flight. Blocks are recomputed from the first on, since the first ones hold their activations
longest, until the excess that the simulator found is freed. If all blocks are not enough, optimizer
state moves to the host as well. The result is simulated, and eased again if it still does not fit.
O(blocks) per device that overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hocket.base.arrays import LongArray
from hocket.plan.sections import Communication, Parallel, Replica
from hocket.planners.candidates import Candidate
from hocket.planners.parallel.closed_form import Tables, at_size, block_edges
from hocket.planners.parallel.simulated import Budget
from hocket.transformer.parallel_config import SPLIT

_TRIES = 4
_MARGIN = 1.02
"""Factor on the bytes to free: saved activations are known exactly, temporary tensors are not."""


def fitted(
    tables: Tables,
    parallel: Parallel,
    budget: Budget,
    planned: Communication | None = None,
    *,
    below_s: float = float("inf"),
) -> Candidate:
    """Simulate a config, with memory savings if it does not fit without them.

    Savings only lengthen a step, so they are not tried if it is not below ``below_s`` already.
    """
    found = budget.simulated(parallel, planned)
    for _ in range(_TRIES):
        if found.feasible or found.timeline is None or not budget.is_left:
            break
        if found.timeline.makespan_s >= below_s:
            break
        missing = found.timeline.peak_bytes - tables.problem.memory_bytes
        eased = ease(tables, parallel, missing)
        if eased is None:
            break
        parallel = eased
        found = budget.simulated(parallel, planned)
    return found


def ease(tables: Tables, parallel: Parallel, missing_bytes: LongArray) -> Parallel | None:
    """The config with this many bytes less per device; None if it cannot save any more."""
    number = tables.problem.cluster.number_of
    replicas = []
    for replica in parallel.replicas:
        each = missing_bytes[[number[name] for name in replica.devices]]
        missing = each.reshape(-1, parallel.tensor).max(axis=1).tolist()  # of a stage's parts
        eased = _ease(tables, replica, missing)
        if eased is None:
            return None
        replicas.append(eased)
    # Sharded replicas gather parameters together, so they all recompute the same blocks.
    if parallel.sharded:
        most = max((replica.recomputed for replica in replicas), key=len)
        replicas = [replace(replica, recomputed=most) for replica in replicas]
    # Schedules with a split backward pass cannot be combined with recompute.
    if any(replica.recomputed for replica in replicas) and parallel.schedule in SPLIT:
        return None
    found = replace(parallel, replicas=tuple(replicas))
    return None if found == parallel else found


def _ease(tables: Tables, replica: Replica, missing: Sequence[int]) -> Replica | None:
    """One replica with ``missing`` bytes less on the devices of each stage; None if impossible."""
    bounds = (0, *replica.cuts, tables.problem.graph.num_ops)
    count, recomputed = len(replica.microbatches), set(replica.recomputed)
    wants_host = False
    for stage, wanted in enumerate(missing):
        if wanted <= 0:
            continue
        # Under 1F1B the first stages have the most microbatches in flight.
        in_flight = min(len(missing) - stage, count)
        given = 0.0
        for block, num_bytes in _offers(tables, replica, bounds[stage], bounds[stage + 1]):
            if block not in recomputed and given < wanted * _MARGIN:
                recomputed.add(block)
                given += num_bytes * in_flight
        # Only what recompute cannot free makes the host necessary.
        wants_host |= given < wanted
    if wants_host and replica.update == "host" and recomputed == set(replica.recomputed):
        return None
    update = "host" if wants_host else replica.update
    return replace(replica, recomputed=tuple(sorted(recomputed)), update=update)


def _offers(
    tables: Tables, replica: Replica, first: int, stop: int
) -> list[tuple[tuple[int, int], float]]:
    """Blocks inside a stage, with the bytes per microbatch that recomputing each of them frees."""
    size = max(replica.microbatches)
    saved = at_size(tables, tables.saved_bytes, size)
    crossing = at_size(tables, tables.crossing_bytes, size)
    edges = block_edges(tables.problem.graph)
    blocks = [
        (start, end) for start, end in pairwise(edges)
        if first <= start and end <= stop
    ]  # fmt: skip
    offers = [(b, float(saved[b[1]] - saved[b[0]] - crossing[b[0]])) for b in blocks]
    return [(block, num_bytes) for block, num_bytes in offers if num_bytes > 0]
