"""The whole question answered: the best way of each family, what people do by hand, and why.

Families are what a person would name: one device, data parallel, a pipeline, both, op placement of
the unsplit batch. The best of each stands in the comparison, the winner says what its parts
contribute, and the bound says what it bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from hocket.base.errors import UsageError
from hocket.base.units import format_percent, format_seconds
from hocket.cost.ranges import ratio_range
from hocket.graph.graph import Stream
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Memory, Parallel, Priority, Replica
from hocket.plan.words import in_words
from hocket.planners.auto import portfolio
from hocket.planners.bounds import lower_bound
from hocket.planners.candidates import Candidate, Comparison, empty_plan, propose
from hocket.planners.goal import TIED, Goal, merit_told, num_devices, thrift_told
from hocket.planners.goal import ranked as rank
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.placement.devices import workers
from hocket.planners.placement.layer_blocks import layer_of
from hocket.planners.registry import BASE
from hocket.planners.waves.candidate import in_lanes
from hocket.planners.whole.bound import shares_bound
from hocket.planners.whole.budget import Budget
from hocket.planners.whole.groups import even_sizes
from hocket.planners.whole.must import ANYTHING, Must
from hocket.planners.whole.search import shared_ways
from hocket.planners.whole.sharded import checkpointed, equal_shards, unequal_shards
from hocket.planners.whole.tables import Tables, largest_size, tables_of
from hocket.planners.whole.travelling import by_priority
from hocket.simulate.analysis import bottleneck
from hocket.simulate.timeline import Timeline
from hocket.transformer.parallel_config import SPLIT

# Baselines: strategies that take no planner. A baseline that the search cannot better stays the
# only row of its family.

DDP = "DDP (baseline)"
FSDP = "FSDP (baseline)"
DEEPSPEED = "DeepSpeed offload (baseline)"
GPIPE = "GPipe (baseline)"
UNSPLIT = {
    "one-device": "1 GPU, full batch (baseline)",
    "device-map-auto": 'device_map="auto" (baseline)',
}
"""Planners of the full batch among the baselines."""
_GPIPE_MICROBATCHES = 4
"""Microbatches per stage: what GPipe's authors found enough to hide the bubble."""


def unsplit_baselines(problem: Problem) -> Iterator[tuple[str, Candidate]]:
    """Placements of the unsplit batch that take no planning."""
    for name, title in UNSPLIT.items():
        yield title, propose(problem, name, BASE[name])


def ddp(tables: Tables, devices: list[int]) -> Parallel | None:
    """Equal shares of the batch on all devices, in as few microbatches as the smallest allows."""
    ranks = devices[: tables.num_samples]
    if len(ranks) < 2:
        return None
    spare = tables.largest_bucket_bytes
    sizes = [largest_size(tables, d, is_repeated=False, spare_bytes=spare) for d in ranks]
    share = -(-tables.num_samples // len(ranks))
    size = min(sizes)
    if size < share:
        size = min(largest_size(tables, d, is_repeated=True, spare_bytes=spare) for d in ranks)
    names = tables.problem.cluster.device_names
    counts = even_sizes(tables.num_samples, share)
    replicas = tuple(
        Replica(devices=(names[device],), microbatches=even_sizes(count, max(size, 1)))
        for device, count in zip(ranks, counts, strict=False)
    )
    return Parallel(replicas=replicas)


def gpipe(tables: Tables, devices: list[int]) -> Parallel | None:
    """Stages of equally many layers on all devices in their order, all forward passes first."""
    graph, count = tables.problem.graph, len(devices)
    layer = layer_of(graph)
    num_layers = int(layer.max(initial=0)) + 1
    if count < 2 or num_layers < count:
        return None
    first = [stage * num_layers // count for stage in range(1, count)]
    cuts = tuple(int(np.flatnonzero(layer >= number)[0]) for number in first)
    if len(set(cuts)) < len(cuts) or min(cuts) < 1:
        return None
    number = min(tables.num_samples, _GPIPE_MICROBATCHES * count)
    names = tables.problem.cluster.device_names
    replica = Replica(
        devices=tuple(names[device] for device in devices),
        microbatches=even_sizes(tables.num_samples, -(-tables.num_samples // number)),
        cuts=cuts,
    )
    return Parallel(replicas=(replica,), schedule="gpipe")


# Where no way of sharing fits: one device that fetches its parameters from the host as it goes.
#
# The memory planner's plans for the whole batch on the roomiest device (`hocket.planners.memory`):
# parameters at home on the host, streamed block by block, activations offloaded or recomputed, the
# loss in chunks. It takes longer than all the rest and is asked only where nothing else is left.

STREAMED = "1 GPU, parameter offload"
_LEVELS = 8
"""Budgets between the plain step and the leanest for which a plan is made."""
_MOST_OPS = 20_000


def streamed(problem: Problem) -> Candidate | None:
    """The best plan of the whole batch on the roomiest device; None where even that needs more."""
    if problem.graph.num_ops > _MOST_OPS:
        return None
    started = time.perf_counter()
    devices = workers(problem)
    device = int(devices[np.argmax(problem.memory_bytes[devices])])
    place = np.full(problem.graph.num_ops, device, dtype=np.int32)
    try:
        frontier = find_frontier(
            problem, empty_plan(problem, "memory").placing(place), num_levels=_LEVELS
        )
    except UsageError:
        return None  # no training step
    fit = BudgetFit(frontier, int(problem.memory_bytes[device]))
    if fit.chosen is None:
        return None
    return Candidate(
        planner=STREAMED, plan=fit.plan(), timeline=fit.chosen.timeline, feasible=True, reason="",
        plan_seconds=time.perf_counter() - started,
    )  # fmt: skip


PLACEMENT = "op placement"
HOW = "how"
"""The note of a plan that says in words what it does."""
_MOST_PLACED_OPS = 20_000
"""Above this many ops placements are not searched, which would take longer than all the rest."""
_FEW_OPS = 2_000
"""Up to this many ops placements are searched wherever a bound allows them to win."""
_HOPELESS = 1.5
"""A search is not begun where quick placements are so many times as long as the best way."""
_QUICK = ("m-etf", "m-sct", "pardnn")
"""What places ops before a search, or instead of it; a second or two for 200,000 ops."""


def can_share(problem: Problem) -> bool:
    """Whether the samples of the problem's batch can be shared out at all."""
    other = problem.graph.other_batch
    is_asked = problem.objective == "latency" and not problem.contiguous
    return is_asked and other is not None and other.num_samples > 1 and problem.graph.stated is None


def compare_whole(
    problem: Problem, goal: Goal = "time", must: Must = ANYTHING, num_degrees: int = 0
) -> Comparison:
    """Best candidate of each parallelism family, compared with common baselines.

    Up to ``num_degrees`` further rows name the best candidate of each combination of degrees; they
    do not change which candidate is chosen.
    """
    problem = must.on(problem)
    tables, devices = tables_of(problem), workers(problem).tolist()
    budget = Budget(problem)
    named: list[tuple[str, Candidate]] = list(unsplit_baselines(problem))
    if len(devices) == 1 and goal != "memory":
        only = _limited(problem, titled(*named[0]), must)
        if only.feasible:
            return _alone(problem, only, tables)
    plain, staged = ddp(tables, devices), gpipe(tables, devices)
    if plain is not None:
        named.append((DDP, checkpointed(tables, budget.simulated(plain), budget)))
    named += [] if staged is None else [(GPIPE, budget.simulated(staged))]
    shards = ((FSDP, equal_shards(tables, devices, budget)),
              (DEEPSPEED, equal_shards(tables, devices, budget, "host")))  # fmt: skip
    named += [(name, checkpointed(tables, found, budget)) for name, found in shards if found]
    unequal_shards(tables, devices, budget)
    ways = shared_ways(problem, budget, goal, must)
    tried = [titled(name, candidate) for name, candidate in named]
    by_name = {id(candidate.plan) for _, candidate in named}
    tried += [
        titled(name, way)
        for name, way in _families(problem, ways, goal)
        if id(way.plan) not in by_name
    ]
    tried += in_lanes(problem, tried)
    tried += [titled(way.planner, way) for way in by_priority(problem, tried)]
    best_s = min((c.step_s for c in tried if c.step_s is not None), default=float("inf"))
    tried.append(_placed(problem, best_s))
    if all(candidate.step_s is None for candidate in tried):
        tried += [found] if (found := streamed(problem)) is not None else []
    fitting = [c for c in (*tried, *budget.seen.values()) if c.step_s is not None]
    tried = [_limited(problem, candidate, must) for candidate in tried]
    order = rank(problem, tried, goal, ratio_range(problem.costs.settings))
    bound = shares_bound(tables, devices)
    counts = {"ways": len(budget.seen), "simulated": budget.num_simulated}
    if not order:
        return Comparison(
            problem=problem, candidates=tuple(tried), chosen=None, bound=bound, counts=counts,
            why=must.missed_by(problem, fitting) if fitting else _shortage(tables, tried),
        )  # fmt: skip
    best = tried[order[0]]
    why = explained(problem, best, [tried[i] for i in order[1:]], ways, goal)
    thrift = thrift_told(tried, order[0])
    why += f"; {thrift}" if thrift else ""
    tried += _by_degrees(ways, num_degrees)
    told = [with_reason(c, best) if c is not best else c for c in tried]
    return Comparison(
        problem=problem, candidates=tuple(told), chosen=order[0], why=why, bound=bound,
        counts=counts,
    )  # fmt: skip


def _alone(problem: Problem, only: Candidate, tables: Tables) -> Comparison:
    """One device that holds the whole batch: there is nothing to share and nothing to compare."""
    assert only.timeline is not None
    limit = _placed_limit(problem, only.timeline)
    why = f"there is one device, and it holds the whole batch; {limit}"
    return Comparison(
        problem=problem, candidates=(only,), chosen=0, why=why, counts={"ways": 1, "simulated": 1},
        bound=shares_bound(tables, workers(problem).tolist()),
    )  # fmt: skip


def family_of(shares: Parallel) -> str:
    """Common name of a parallel strategy: ``DDP x pipeline``."""
    if shares.sharded:
        return "FSDP"
    degrees = (
        ("DDP", len(shares.replicas) > 1),
        ("tensor", shares.tensor > 1),
        ("pipeline", shares.is_staged),
    )
    used = [name for name, is_used in degrees if is_used]
    if not used:
        return "1 GPU, accumulation"
    return "tensor parallel" if used == ["tensor"] else " x ".join(used)


def degrees_name(shares: Parallel) -> str:
    """Degrees of parallelism as text: ``data 2 x pipeline 1``."""
    stages = sorted({shares.num_stages(replica) for replica in shares.replicas})
    deep = " and ".join(map(str, stages))
    name = f"data {len(shares.replicas)} x pipeline {deep}"
    name += f" x tensor {shares.tensor}" if shares.tensor > 1 else ""
    return f"{name}, sharded" if shares.sharded else name


def _by_degrees(ways: list[Candidate], most: int) -> list[Candidate]:
    """The best candidate of each combination of degrees, the shortest step first."""
    best: dict[str, Candidate] = {}
    for way in ways:
        assert way.plan is not None
        best.setdefault(degrees_name(way.plan[Parallel]), way)
    return [titled(name, way) for name, way in list(best.items())[:most]]


def _families(
    problem: Problem, ways: list[Candidate], goal: Goal
) -> Iterable[tuple[str, Candidate]]:
    """The wanted way of each family, in the order of their quickest."""
    by_family: dict[str, list[Candidate]] = {}
    for way in ways:
        assert way.plan is not None
        by_family.setdefault(family_of(way.plan[Parallel]), []).append(way)
    for name, members in by_family.items():
        if goal == "time":
            yield name, min(members, key=_plainness)
        else:
            yield name, members[rank(problem, members, goal)[0]]


def _plainness(way: Candidate) -> tuple[int, int, float]:
    """Of ways that differ by less than a thousandth, the one with the fewest microbatches."""
    assert way.plan is not None
    assert way.step_s is not None
    num_passes = sum(len(replica.microbatches) for replica in way.plan[Parallel].replicas)
    return round(math.log(way.step_s) * 1000), num_passes, way.step_s


def titled(name: str, candidate: Candidate) -> Candidate:
    """The candidate under a family's name, with its own words in its plan."""
    plan = candidate.plan
    if plan is not None and plan.get(Parallel) is not None:
        planned = ", all-reduce over planned trees" if plan.get(Communication) is not None else ""
        order = ", gradients by priority" if plan.get(Priority) is not None else ""
        plan = replace(plan, notes={**plan.notes, HOW: in_words(plan[Parallel]) + planned + order})
    return replace(candidate, planner=name, plan=plan)


def _placed(problem: Problem, best_s: float) -> Candidate:
    """The best placement of the unsplit batch, searched only where it could win."""
    bound = lower_bound(problem)
    if bound.seconds >= best_s:
        told = (
            f"not searched: its lower bound with the full batch is {format_seconds(bound.seconds)}"
        )
        return Candidate(
            planner=PLACEMENT, plan=None, timeline=None, feasible=False, plan_seconds=0.0,
            reason=told,
        )  # fmt: skip
    num_ops, quick = problem.graph.num_ops, list[Candidate]()
    if num_ops > min(_FEW_OPS, _MOST_PLACED_OPS):
        quick = [propose(problem, name, BASE[name]) for name in _QUICK]
        nearest_s = min((_length_s(candidate) for candidate in quick), default=math.inf)
        if num_ops > _MOST_PLACED_OPS or nearest_s > _HOPELESS * best_s:
            order = rank(problem, quick, "time")
            return replace(quick[order[0] if order else 0], planner=PLACEMENT)
    return replace(portfolio(problem, quick)[-1], planner=PLACEMENT)


def _length_s(candidate: Candidate) -> float:
    """What a step takes, also where it does not fit."""
    return math.inf if candidate.timeline is None else candidate.timeline.makespan_s


def _limited(problem: Problem, candidate: Candidate, must: Must) -> Candidate:
    broken = must.broken_by(problem, candidate)
    return replace(candidate, feasible=False, reason=broken) if broken else candidate


# ── why ──────────────────────────────────────────────────────────────────────────────────────────


def with_reason(candidate: Candidate, best: Candidate) -> Candidate:
    """A loser with by how much it is longer than the best."""
    if candidate.step_s is None or not best.step_s:
        return candidate
    longer = candidate.step_s / best.step_s - 1
    told = f"{format_percent(longer)} longer" if longer > 0 else "no shorter"
    if longer < -TIED:
        told = f"{format_percent(-longer)} shorter, less than the error range; less simple"
    return replace(candidate, reason=told)


def explained(
    problem: Problem, best: Candidate, others: list[Candidate], ways: list[Candidate], goal: Goal
) -> str:
    """Why the best won, what its parts contribute and what limits it."""
    assert best.plan is not None
    assert best.timeline is not None
    assert best.step_s is not None
    parts, tied_part = [], ratio_range(problem.costs.settings)
    rest = [c for c in others if c.step_s is not None and c.planner != best.planner]
    if rest:
        parts.append(f"chosen because {merit_told(problem, best, rest, goal, tied_part)}")
    shares = best.plan.get(Parallel)
    if shares is None:
        is_rewritten = best.plan.get(Memory) is not None
        limit = _limit if is_rewritten else _placed_limit
        return "; ".join([*parts, limit(problem, best.timeline)])
    parts += contributions(best, ways)
    parts.append(_limit(problem, best.timeline))
    return "; ".join(parts)


def _placed_limit(problem: Problem, timeline: Timeline) -> str:
    return bottleneck(timeline, problem)


def _limit(problem: Problem, timeline: Timeline) -> str:
    """The device that computes longest, and for how much of the step."""
    works = timeline.stream[: timeline.num_works] == Stream.COMPUTE
    seconds = (timeline.op_end_s - timeline.op_start_s)[works]
    busy_s = np.bincount(timeline.op_device[works], seconds, timeline.num_devices)
    device = int(busy_s.argmax())
    share = format_percent(float(busy_s[device]) / timeline.makespan_s)
    return f"limited by compute on {problem.cluster.device_names[device]} ({share} busy)"


def contributions(best: Candidate, ways: list[Candidate]) -> list[str]:
    """What the step would be with one part of the winner switched off, for each part."""
    told = []
    for name, has in FEATURES.items():
        if not has(best):
            continue
        without = [way.step_s for way in ways if way.step_s is not None and not has(way)]
        if without and min(without) >= (best.step_s or 0.0):
            told.append(f"no {name} {format_seconds(min(without))}")
        elif not without and name in EASING:
            told.append(f"no {name}: out of memory")
    return [f"ablation: {', '.join(told)}"] if told else []


def _is_many(way: Candidate) -> bool:
    assert way.plan is not None
    return len(way.plan[Parallel].replicas) > 1


def _is_unequal(way: Candidate) -> bool:
    assert way.plan is not None
    numbers = [replica.num_samples for replica in way.plan[Parallel].replicas]
    return max(numbers) - min(numbers) > 1


def _is_sharded(way: Candidate) -> bool:
    assert way.plan is not None
    return way.plan[Parallel].sharded


def _is_staged(way: Candidate) -> bool:
    assert way.plan is not None
    return way.plan[Parallel].is_staged


def _is_put_off(way: Candidate) -> bool:
    assert way.plan is not None
    return way.plan[Parallel].schedule in SPLIT


def _is_divided(way: Candidate) -> bool:
    assert way.plan is not None
    return way.plan[Parallel].tensor > 1


def _is_split(way: Candidate) -> bool:
    assert way.plan is not None
    return any(len(replica.microbatches) > 1 for replica in way.plan[Parallel].replicas)


def _is_planned(way: Candidate) -> bool:
    assert way.plan is not None
    return way.plan.get(Communication) is not None


def _is_prioritised(way: Candidate) -> bool:
    assert way.plan is not None
    return way.plan.get(Priority) is not None


def _is_recomputed(way: Candidate) -> bool:
    assert way.plan is not None
    return any(replica.recomputed for replica in way.plan[Parallel].replicas)


def _is_hosted(way: Candidate) -> bool:
    assert way.plan is not None
    return any(replica.update == "host" for replica in way.plan[Parallel].replicas)


FEATURES = {
    "data parallel": _is_many,
    "unequal batches": _is_unequal,
    "sharding": _is_sharded,
    "pipeline": _is_staged,
    "zero-bubble schedule": _is_put_off,
    "tensor parallelism": _is_divided,
    "microbatches": _is_split,
    "activation checkpointing": _is_recomputed,
    "optimizer on the host": _is_hosted,
    "planned all-reduce trees": _is_planned,
    "gradient priority": _is_prioritised,
}
"""Parts of a way that can be switched off, and how it is told that a way has them."""
EASING = ("sharding", "microbatches", "activation checkpointing", "optimizer on the host")
"""Those that make ways fit."""


def _shortage(tables: Tables, tried: list[Candidate]) -> str:
    """What is missing where nothing fits."""
    lacking = [c for c in tried if c.timeline is not None]
    if not lacking:
        return "not even one sample fits on any device"
    problem = tables.problem

    def over(candidate: Candidate) -> int:
        assert candidate.timeline is not None
        return int((candidate.timeline.peak_bytes - problem.memory_bytes).clip(min=0).sum())

    nearest = min(lacking, key=lambda c: (over(c), num_devices(c)))
    return f"{nearest.planner} comes nearest: {nearest.reason or 'it does not fit'}"
