"""Rank feasible plans by a goal: the shortest step, the lowest cost, the least memory.

If the caller passes the error range of the ratio of two steps, steps that differ by less are tied.
Ties go to the simplest candidate (one device, data parallel, sharded, pipeline, tensor,
combinations, op placement), then to fewer devices, less money, less memory. O(candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hocket.base.units import format_percent
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Memory, Parallel, Priority, Waves
from hocket.planners.candidates import Candidate
from hocket.simulate.analysis import price_per_hour, used_devices
from hocket.simulate.timeline import Timeline
from hocket.transformer.parallel_config import SPLIT

Goal = Literal["time", "cost", "memory"]
GOALS: dict[str, Goal] = {
    "step": "time", "throughput": "time", "time": "time", "cost": "cost", "memory": "memory",
}  # fmt: skip
"""User-facing objectives and the goal that each minimises.

The shortest step also has the most samples per second.
"""
TIED = 0.005
"""Relative difference below which two steps are tied."""
_SAMPLES_PRICED = 1_000_000
_SECONDS_PER_HOUR = 3600
WORTHWHILE = 1.5
"""Ratio of device counts from which a cheaper plan is mentioned next to a faster one."""


def ranked(
    problem: Problem, tried: Sequence[Candidate], goal: Goal, tied_part: float = TIED
) -> list[int]:
    """Positions of the candidates that fit, the preferred one first.

    Candidates within ``tied_part`` of the best are tied, and the simplest of them is preferred.
    Memory is counted exactly rather than predicted, so for that goal only differences below `TIED`
    are ties.
    """
    tied_part = TIED if goal == "memory" else tied_part
    fitting = [i for i, candidate in enumerate(tried) if _fits(candidate)]
    found = goal_values([(problem, tried[i]) for i in fitting], goal)
    values = dict(zip(fitting, found, strict=True))
    best = min(values.values(), default=0.0)
    tied = [i for i in values if values[i] <= best * (1 + tied_part)]
    rest = [i for i in values if i not in tied]
    return [
        *sorted(tied, key=lambda i: (*_preference(problem, tried[i]), values[i], i)),
        *sorted(rest, key=lambda i: (values[i], i)),
    ]


def efficient(tried: Sequence[Candidate], chosen: int) -> int | None:
    """Index of the candidate with the least device time per step; None if the chosen one is close.

    Of several that are tied, the first, which is the simplest.
    """
    fitting = {i: _device_s(candidate) for i, candidate in enumerate(tried) if _fits(candidate)}
    least_s = min(fitting.values())
    cheapest = next(i for i, device_s in fitting.items() if device_s <= least_s * (1 + TIED))
    if num_devices(tried[chosen]) < WORTHWHILE * num_devices(tried[cheapest]):
        return None
    # Steps of 0 s would divide by zero.
    gain = _device_s(tried[chosen]) / max(_device_s(tried[cheapest]), 1e-30)
    return cheapest if gain >= WORTHWHILE else None


def cost_efficiency_text(tried: Sequence[Candidate], chosen: int) -> str:
    """Describe a more cost-efficient candidate than the chosen one; empty if there is none."""
    cheapest = efficient(tried, chosen)
    if cheapest is None:
        return ""
    other_s, best_s = tried[cheapest].value_s or 0.0, tried[chosen].value_s or 0.0
    if other_s <= best_s:  # if memory was the goal, the chosen step may be the longer one
        return ""
    longer = format_percent(other_s / best_s - 1) if best_s > 0 else "no"
    count = num_devices(tried[cheapest])
    return (
        f"{tried[cheapest].planner} takes {longer} longer on {devices_text(count)} instead of "
        f"{num_devices(tried[chosen])} (--objective cost)"
    )


def objective_text(
    problem: Problem,
    best: Candidate,
    others: Sequence[Candidate],
    goal: Goal,
    tied_part: float = TIED,
) -> str:
    """Describe the advantage of the chosen candidate over the next one, in terms of the goal."""
    assert best.value_s is not None
    assert others[0].value_s is not None
    mine, next_one, *rest = goal_values([(problem, c) for c in (best, *others)], goal)
    least, shortest = min(zip((next_one, *rest), others, strict=True), key=lambda pair: pair[0])
    # The chosen candidate is not the cheapest, so it was preferred as the simplest of a tie.
    if goal != "memory" and mine > least * (1 + TIED):
        what = "cheaper" if goal == "cost" else "shorter"
        return (
            f"it is the simplest within the error range: {shortest.planner} is "
            f"{format_percent(1 - least / mine)} {what}, and predictions of two candidates are "
            f"comparable within {format_percent(tied_part)}"
        )
    less = 1 - mine / (next_one or mine or 1.0)
    name, gain = others[0].planner, format_percent(less)
    longer = best.value_s / others[0].value_s - 1 if others[0].value_s else 0.0
    price = "" if longer <= TIED else f", and its step {format_percent(longer)} longer"
    if goal == "memory":
        message = f"its fullest device is {format_percent(mine)} full"
        return f"{message}, where {name} fills {format_percent(next_one)}{price}"
    if goal == "cost":
        thing = "money" if is_priced([(problem, c) for c in (best, *others)]) else "device time"
        message = f"{gain} less" if less > 0 else "no more"
        return f"its steps take {message} {thing} than {name}{price}"
    return (
        f"its step is {gain} shorter than {name}" if less > 0 else f"it takes no longer than {name}"
    )


def devices_text(count: int) -> str:
    """Format a number of devices."""
    return "1 device" if count == 1 else f"{count} devices"


def num_devices(candidate: Candidate) -> int:
    """Number of devices that compute."""
    return 0 if candidate.timeline is None else len(used_devices(candidate.timeline))


def samples_per_s(problem: Problem, step_s: float) -> float:
    """Samples of the global batch per second."""
    other = problem.graph.other_batch
    return (1 if other is None else other.num_samples) / step_s


def dollars_per_million(problem: Problem, candidate: Candidate) -> float | None:
    """Dollars per million samples; None if a device price is unknown."""
    if candidate.timeline is None or not candidate.step_s:
        return None
    hourly = price_per_hour(problem, candidate.timeline)
    if hourly is None:
        return None
    return hourly / _SECONDS_PER_HOUR * _SAMPLES_PRICED / samples_per_s(problem, candidate.step_s)


def goal_values(tried: Sequence[tuple[Problem, Candidate]], goal: Goal) -> list[float]:
    """Values that the goal minimises: step or load, its cost, or the fullest device's memory use.

    All candidates must fit. Each comes with its own problem, so that clusters can be compared.
    """
    if goal == "cost" and is_priced(tried):
        return [_price(problem, c.timeline) * (c.value_s or 0.0) for problem, c in tried]
    if goal == "cost":
        return [_device_s(candidate) for _, candidate in tried]
    if goal == "memory":
        return [_fullest(problem, candidate) for problem, candidate in tried]
    return [candidate.value_s or 0.0 for _, candidate in tried]


def is_priced(tried: Sequence[tuple[Problem, Candidate]]) -> bool:
    """True if all prices are known, so that cost is in money; otherwise it is in device time."""
    return all(
        price_per_hour(problem, candidate.timeline) is not None
        for problem, candidate in tried
        if candidate.timeline is not None
    )


def _fullest(problem: Problem, candidate: Candidate) -> float:
    """Fraction of its memory that the fullest device uses."""
    assert candidate.timeline is not None
    return float((candidate.timeline.peak_bytes / problem.memory_bytes).max())


def _fits(candidate: Candidate) -> bool:
    return candidate.value_s is not None and candidate.timeline is not None


def _preference(problem: Problem, candidate: Candidate) -> tuple[int, int, int, float, int]:
    """Tie-break key: family and number of extra features, then devices, dollars per hour, bytes."""
    timeline = candidate.timeline
    assert timeline is not None
    family, num_extras = _complexity(candidate)
    num_bytes = int(timeline.peak_bytes.sum())
    return family, num_extras, num_devices(candidate), _price(problem, timeline), num_bytes


def _complexity(candidate: Candidate) -> tuple[int, int]:
    """Position of the plan's family, simplest first, and the number of extra features it uses.

    Families, simplest first: one device, data parallel, sharded, pipeline, tensor parallel, two or
    three of these combined, op placement.
    """
    plan = candidate.plan
    assert plan is not None
    parallel = plan.get(Parallel)
    if parallel is None:
        is_placed = num_devices(candidate) > 1
        return 6 * is_placed, plan.get(Memory) is not None
    degrees = (len(parallel.replicas) > 1, parallel.is_staged, parallel.tensor > 1)
    # Numbers of families as listed in the docstring; sharding is a variant of data parallel.
    family = 5 if sum(degrees) > 1 else degrees[0] + 3 * degrees[1] + 4 * degrees[2]
    numbers = [replica.num_samples for replica in parallel.replicas]
    extras = (
        any(len(replica.microbatches) > 1 for replica in parallel.replicas),
        any(replica.recomputed for replica in parallel.replicas),
        any(replica.update == "host" for replica in parallel.replicas),
        max(numbers) - min(numbers) > 1,
        parallel.schedule in SPLIT,
        *(plan.get(section) is not None for section in (Communication, Priority, Waves)),
    )
    return 2 if parallel.sharded and family == 1 else family, sum(extras)


def _device_s(candidate: Candidate) -> float:
    return num_devices(candidate) * (candidate.value_s or 0.0)


def _price(problem: Problem, timeline: Timeline | None) -> float:
    return 0.0 if timeline is None else price_per_hour(problem, timeline) or 0.0
