"""Joint search: the best candidate of each parallelism family, common baselines, and the reason.

Families have names that users know: one device, data parallel, pipeline, both, and op placement of
the unsplit batch. The comparison lists the best candidate of each family. For the winner it reports
what each of its features contributes, and for the lower bound what it covers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from hocket.base.errors import UsageError
from hocket.base.units import format_percent, format_seconds
from hocket.cost.ranges import ratio_range
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Memory, Parallel, Priority, Replica
from hocket.plan.sections.memory import Update
from hocket.plan.words import in_words
from hocket.planners.auto import portfolio
from hocket.planners.bounds import lower_bound
from hocket.planners.candidates import (
    Candidate,
    Comparison,
    SimulatedCandidate,
    empty_plan,
    propose,
)
from hocket.planners.devices import workers
from hocket.planners.goal import TIED, Goal, cost_efficiency_text, num_devices, objective_text
from hocket.planners.goal import ranked as rank
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.parallel.batch_bound import batch_bound
from hocket.planners.parallel.closed_form import Tables, largest_size, tables_of
from hocket.planners.parallel.constraints import NO_CONSTRAINTS, Constraints
from hocket.planners.parallel.device_groups import even_sizes
from hocket.planners.parallel.gradient_priority import by_priority
from hocket.planners.parallel.search import search_parallel
from hocket.planners.parallel.sharded import checkpointed, equal_shards, unequal_shards
from hocket.planners.parallel.simulated import Budget
from hocket.planners.placement.baselines import layer_of
from hocket.planners.registry import BASE
from hocket.planners.waves.wave_candidate import two_stream_candidate
from hocket.simulate.analysis import bottleneck
from hocket.simulate.timeline import Timeline
from hocket.transformer.parallel_config import SPLIT

# Baselines: strategies that need no planner. If the search cannot beat a baseline, the baseline
# remains the only row of its family.

DDP = "DDP (baseline)"
FSDP = "FSDP (baseline)"
DEEPSPEED = "DeepSpeed offload (baseline)"
GPIPE = "GPipe (baseline)"
UNSPLIT = {
    "one-device": "1 GPU, full batch (baseline)",
    "device-map-auto": 'device_map="auto" (baseline)',
}
"""Baseline planners that keep the full batch, with their titles."""
_SHARDED_BASELINES: dict[str, Update] = {FSDP: "device", DEEPSPEED: "host"}
_GPIPE_MICROBATCHES = 4
"""Microbatches per stage, which GPipe's authors found enough to hide the bubble."""


def unsplit_baselines(problem: Problem) -> Iterator[tuple[str, Candidate]]:
    """Yield the baselines that keep the full batch: one device, and Hugging Face's device map."""
    for name, title in UNSPLIT.items():
        yield title, propose(problem, name, BASE[name])


def ddp(tables: Tables, devices: list[int]) -> Parallel | None:
    """DDP: equal local batches on all devices, in as few microbatches as memory allows."""
    # Devices beyond the number of samples would get none.
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
    """GPipe: equally many layers per stage on all devices, all forwards before all backwards."""
    graph, count = tables.problem.graph, len(devices)
    layer = layer_of(graph)
    num_layers = int(layer.max(initial=0)) + 1
    if count < 2 or num_layers < count:
        return None
    first = [stage * num_layers // count for stage in range(1, count)]
    cuts = tuple(int(np.flatnonzero(layer >= number)[0]) for number in first)
    # Two stages with the same first op, or a first stage without ops, are no pipeline.
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


# Fallback if no parallel config fits: one device that fetches its parameters from the host.
#
# The memory planner's plans for the full batch on the device with the most memory
# (`hocket.planners.memory`): parameters resident on the host and streamed block by block,
# activations offloaded or recomputed, the loss in chunks. Planning it takes longer than all other
# candidates together, so it is tried only if nothing else fits.

STREAMED = "1 GPU, parameter offload"
_LEVELS = 8
"""Number of memory budgets to plan for, between the minimum-memory step and the plain step."""
_MOST_OPS = 20_000


def streamed(problem: Problem) -> Candidate | None:
    """The best memory plan of the full batch on the device with the most memory, or None."""
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
    return SimulatedCandidate(
        planner=STREAMED, plan=fit.plan(), timeline=fit.chosen.timeline, feasible=True, reason="",
        plan_seconds=time.perf_counter() - started,
    )  # fmt: skip


PLACEMENT = "op placement"
HOW = "how"
"""Key of the plan's note that describes the strategy."""
_MOST_PLACED_OPS = 20_000
"""Placements of larger graphs are not searched: it would take longer than everything else."""
_FEW_OPS = 2_000
"""Placements of graphs up to this size are searched if a lower bound allows them to win."""
_HOPELESS = 1.5
"""Ratio to the best candidate's step above which quick placements are not improved by a search."""
_FEW_DEVICES = 16
"""Largest number of devices for which ParDNN is run on the full batch."""
_QUICK = ("m-etf", "m-sct", "pardnn")
"""Fast placement planners, run before a search or instead of it: 1 to 2 s for 200,000 ops."""


def can_split_batch(problem: Problem) -> bool:
    """True if the batch can be split across ranks or microbatches."""
    other = problem.graph.other_batch
    is_requested = problem.objective == "latency" and not problem.contiguous
    return (
        is_requested
        and other is not None
        and other.num_samples > 1
        and problem.graph.stated is None
    )


def compare_parallel(
    problem: Problem, goal: Goal = "time", must: Constraints = NO_CONSTRAINTS, num_degrees: int = 0
) -> Comparison:
    """Find the best candidate of each parallelism family and compare it with common baselines.

    Up to ``num_degrees`` further rows name the best candidate of each combination of degrees; they
    do not change which candidate is chosen.
    """
    problem = must.on(problem)
    tables, devices = tables_of(problem), workers(problem).tolist()
    full_batch = [titled(name, candidate) for name, candidate in unsplit_baselines(problem)]
    if len(devices) == 1 and goal != "memory":
        only = _limited(problem, full_batch[0], must)
        if only.feasible and isinstance(only, SimulatedCandidate):
            return _one_device(problem, only, tables)
    budget = Budget(problem)
    split = list(_split_baselines(tables, devices, budget))
    # Called for its simulations, which the search finds in the budget.
    unequal_shards(tables, devices, budget)
    found = search_parallel(problem, budget, goal, must)
    candidates = full_batch + [titled(name, candidate) for name, candidate in split]
    # A baseline that also wins its family is listed once, under the baseline's name.
    by_name = {id(candidate.plan) for _, candidate in split}
    candidates += [
        titled(name, candidate)
        for name, candidate in _families(problem, found, goal)
        if id(candidate.plan) not in by_name
    ]
    candidates += two_stream_candidate(problem, candidates)
    candidates += [titled(each.planner, each) for each in by_priority(problem, candidates)]
    candidates += _unsplit(problem, candidates)
    return _ranked(tables, candidates, found, budget, goal, must, num_degrees)


def _split_baselines(
    tables: Tables, devices: list[int], budget: Budget
) -> Iterator[tuple[str, Candidate]]:
    """Yield the baselines that split the batch."""
    plain, staged = ddp(tables, devices), gpipe(tables, devices)
    if plain is not None:
        yield DDP, checkpointed(tables, budget.simulated(plain), budget)
    for name, update in _SHARDED_BASELINES.items():
        sharded = equal_shards(tables, devices, budget, update)
        if sharded is not None:
            yield name, checkpointed(tables, sharded, budget)
    # Last, because its many microbatches on every device take most simulated ops.
    if staged is not None:
        yield GPIPE, budget.simulated(staged)


def _unsplit(problem: Problem, candidates: list[Candidate]) -> list[Candidate]:
    """Op placement of the full batch; also parameter offload if nothing else fits."""
    best_s = min((c.step_s for c in candidates if c.step_s is not None), default=math.inf)
    found = [_placed(problem, best_s)]
    if best_s == math.inf and found[0].step_s is None:
        offloaded = streamed(problem)
        found += [] if offloaded is None else [offloaded]
    return found


def _ranked(
    tables: Tables,
    candidates: list[Candidate],
    found: list[SimulatedCandidate],
    budget: Budget,
    goal: Goal,
    must: Constraints,
    num_degrees: int,
) -> Comparison:
    """Rank the candidates by the goal and explain the choice."""
    problem = tables.problem
    fitting = [c for c in (*candidates, *budget.seen.values()) if c.step_s is not None]
    candidates = [_limited(problem, candidate, must) for candidate in candidates]
    order = rank(problem, candidates, goal, ratio_range(problem.costs))
    bound = batch_bound(tables, workers(problem).tolist())
    counts = {"ways": len(budget.seen), "simulated": len(budget.seen)}
    if not order:
        return Comparison(
            problem=problem, candidates=tuple(candidates), chosen=None, bound=bound, counts=counts,
            why=must.missed_by(problem, fitting) if fitting else _shortage(problem, candidates),
        )  # fmt: skip
    best = candidates[order[0]]
    why = explained(problem, best, [candidates[i] for i in order[1:]], found, goal)
    efficiency = cost_efficiency_text(candidates, order[0])
    why += f"; {efficiency}" if efficiency else ""
    rows = [*candidates, *_by_degrees(found, num_degrees)]
    return Comparison(
        problem=problem, chosen=order[0], why=why, bound=bound, counts=counts,
        candidates=tuple(with_reason(c, best) if c is not best else c for c in rows),
    )  # fmt: skip


def _one_device(problem: Problem, only: SimulatedCandidate, tables: Tables) -> Comparison:
    """Comparison for a single device that holds the full batch, with this as the only candidate."""
    limit = bottleneck(only.timeline, problem)
    why = f"there is one device, and it holds the full batch; {limit}"
    return Comparison(
        problem=problem, candidates=(only,), chosen=0, why=why, counts={"ways": 1, "simulated": 1},
        bound=batch_bound(tables, workers(problem).tolist()),
    )  # fmt: skip


def family_of(parallel: Parallel) -> str:
    """Usual name of a parallel strategy, such as ``DDP x pipeline``."""
    if parallel.sharded:
        return "FSDP"
    degrees = (
        ("DDP", len(parallel.replicas) > 1),
        ("tensor", parallel.tensor > 1),
        ("pipeline", parallel.is_staged),
    )
    used = [name for name, is_used in degrees if is_used]
    if not used:
        return "1 GPU, accumulation"
    return "tensor parallel" if used == ["tensor"] else " x ".join(used)


def degrees_name(parallel: Parallel) -> str:
    """Degrees of parallelism as text, such as ``data 2 x pipeline 1``."""
    stages = sorted({parallel.num_stages(replica) for replica in parallel.replicas})
    # Unequal replicas may have different numbers of stages.
    deep = " and ".join(map(str, stages))
    name = f"data {len(parallel.replicas)} x pipeline {deep}"
    name += f" x tensor {parallel.tensor}" if parallel.tensor > 1 else ""
    return f"{name}, sharded" if parallel.sharded else name


def _by_degrees(found: list[SimulatedCandidate], most: int) -> list[Candidate]:
    """The best candidate of each combination of degrees, shortest step first, at most ``most``."""
    best: dict[str, Candidate] = {}
    for candidate in found:
        best.setdefault(degrees_name(candidate.plan[Parallel]), candidate)
    return [titled(name, candidate) for name, candidate in list(best.items())[:most]]


def _families(
    problem: Problem, found: list[SimulatedCandidate], goal: Goal
) -> Iterator[tuple[str, Candidate]]:
    """Yield the best candidate of each parallelism family, fastest family first."""
    by_family: dict[str, list[SimulatedCandidate]] = {}
    for candidate in found:
        by_family.setdefault(family_of(candidate.plan[Parallel]), []).append(candidate)
    for name, members in by_family.items():
        if goal == "time":
            yield name, min(members, key=_simplicity)
        else:
            yield name, members[rank(problem, members, goal)[0]]


def _simplicity(candidate: SimulatedCandidate) -> tuple[int, int, float]:
    """Sort key: step time within 0.1 %, then the number of microbatches, then the exact step
    time."""
    step_s = candidate.step_s or math.inf
    num_passes = sum(len(replica.microbatches) for replica in candidate.plan[Parallel].replicas)
    return round(math.log(step_s) * 1000), num_passes, step_s


def titled(name: str, candidate: Candidate) -> Candidate:
    """Rename a candidate, and add a description of its strategy to the plan's notes."""
    plan = candidate.plan
    if plan is not None and plan.get(Parallel) is not None:
        planned = ", all-reduce over planned trees" if plan.get(Communication) is not None else ""
        order = ", gradients by priority" if plan.get(Priority) is not None else ""
        plan = replace(plan, notes={**plan.notes, HOW: in_words(plan[Parallel]) + planned + order})
    return replace(candidate, planner=name, plan=plan)


def _placed(problem: Problem, best_s: float) -> Candidate:
    """The best placement of the unsplit batch, searched only if a lower bound allows it to win."""
    bound = lower_bound(problem)
    if bound.seconds >= best_s:
        message = (
            f"not searched: its lower bound with the full batch is {format_seconds(bound.seconds)}"
        )
        return Candidate(
            planner=PLACEMENT, plan=None, timeline=None, feasible=False, plan_seconds=0.0,
            reason=message,
        )  # fmt: skip
    num_ops, quick = problem.graph.num_ops, list[Candidate]()
    if num_ops > min(_FEW_OPS, _MOST_PLACED_OPS):
        # ParDNN emulates hundreds of placements, each over all pairs of devices.
        names = _QUICK if len(workers(problem)) <= _FEW_DEVICES else _QUICK[:2]
        quick = [propose(problem, name, BASE[name]) for name in names]
        nearest_s = min((_length_s(candidate) for candidate in quick), default=math.inf)
        if num_ops > _MOST_PLACED_OPS or nearest_s > _HOPELESS * best_s:
            order = rank(problem, quick, "time")
            return replace(quick[order[0] if order else 0], planner=PLACEMENT)
    return replace(portfolio(problem, quick)[-1], planner=PLACEMENT)


def _length_s(candidate: Candidate) -> float:
    """Simulated step time of a candidate, even if it does not fit."""
    return math.inf if candidate.timeline is None else candidate.timeline.makespan_s


def _limited(problem: Problem, candidate: Candidate, must: Constraints) -> Candidate:
    broken = must.broken_by(problem, candidate)
    return replace(candidate, feasible=False, reason=broken) if broken else candidate


# ── why ──────────────────────────────────────────────────────────────────────────────────────────


def with_reason(candidate: Candidate, best: Candidate) -> Candidate:
    """Set a candidate's reason to the difference of its step time from the best one's."""
    if candidate.step_s is None or not best.step_s:
        return candidate
    longer = candidate.step_s / best.step_s - 1
    message = f"{format_percent(longer)} longer" if longer > 0 else "no shorter"
    if longer < -TIED:
        message = f"{format_percent(-longer)} shorter, less than the error range; less simple"
    return replace(candidate, reason=message)


def explained(
    problem: Problem,
    best: Candidate,
    others: list[Candidate],
    found: list[SimulatedCandidate],
    goal: Goal,
) -> str:
    """Text on the winner: why it was chosen, what its features contribute, and what limits it."""
    rest = [c for c in others if c.step_s is not None and c.planner != best.planner]
    tied_part = ratio_range(problem.costs)
    parts = []
    if rest:
        parts.append(f"chosen because {objective_text(problem, best, rest, goal, tied_part)}")
    if best.plan is None or best.timeline is None:
        return "; ".join(parts)
    is_split = best.plan.get(Parallel) is not None
    if is_split:
        parts += contributions(best.plan, best.step_s or 0.0, found)
    is_rewritten = best.plan.get(Memory) is not None
    # Ops of an expanded or rewritten step are not those of the problem's graph, which the text
    # needs.
    limit = _busiest if is_split or is_rewritten else bottleneck
    return "; ".join([*parts, limit(best.timeline, problem)])


def _busiest(timeline: Timeline, problem: Problem) -> str:
    """Text on the device with the most compute, and its utilization."""
    busy_s = timeline.busy_s
    device = int(busy_s.argmax())
    share = format_percent(float(busy_s[device]) / timeline.makespan_s)
    return f"limited by compute on {problem.cluster.device_names[device]} ({share} busy)"


def contributions(best: Plan, step_s: float, found: list[SimulatedCandidate]) -> list[str]:
    """Ablation as text: the best step time without each feature of the winning plan."""
    steps = []
    for name, has in FEATURES.items():
        if not has(best):
            continue
        without = [c.step_s for c in found if c.step_s is not None and not has(c.plan)]
        # A feature counts only if the step without it is longer.
        if without and min(without) >= step_s:
            steps.append(f"no {name} {format_seconds(min(without))}")
        elif not without and name in EASING:
            steps.append(f"no {name}: out of memory")
    return [f"ablation: {', '.join(steps)}"] if steps else []


def _is_unequal(plan: Plan) -> bool:
    numbers = [replica.num_samples for replica in plan[Parallel].replicas]
    return max(numbers) - min(numbers) > 1


FEATURES: dict[str, Callable[[Plan], bool]] = {
    "data parallel": lambda plan: len(plan[Parallel].replicas) > 1,
    "unequal batches": _is_unequal,
    "sharding": lambda plan: plan[Parallel].sharded,
    "pipeline": lambda plan: plan[Parallel].is_staged,
    "zero-bubble schedule": lambda plan: plan[Parallel].schedule in SPLIT,
    "tensor parallelism": lambda plan: plan[Parallel].tensor > 1,
    "microbatches": lambda plan: any(len(r.microbatches) > 1 for r in plan[Parallel].replicas),
    "activation checkpointing": lambda plan: any(r.recomputed for r in plan[Parallel].replicas),
    "optimizer on the host": lambda plan: any(
        replica.update == "host" for replica in plan[Parallel].replicas
    ),
    "planned all-reduce trees": lambda plan: plan.get(Communication) is not None,
    "gradient priority": lambda plan: plan.get(Priority) is not None,
}
"""Features that a plan may have, with the test for each."""
EASING = ("sharding", "microbatches", "activation checkpointing", "optimizer on the host")
"""Features that save memory."""


def _shortage(problem: Problem, candidates: list[Candidate]) -> str:
    """Message on the missing memory if nothing fits."""
    lacking = [c for c in candidates if isinstance(c, SimulatedCandidate)]
    if not lacking:
        return "a single sample fits on no device"

    def over(candidate: SimulatedCandidate) -> int:
        return int((candidate.timeline.peak_bytes - problem.memory_bytes).clip(min=0).sum())

    nearest = min(lacking, key=lambda c: (over(c), num_devices(c)))
    return f"{nearest.planner} comes closest: {nearest.reason or 'it does not fit'}"
