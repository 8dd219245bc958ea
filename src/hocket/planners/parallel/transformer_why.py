"""Explain why a config won, why others lost, and how much memory is missing if none fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.cost.parallel.memory import memory
from hocket.plan.limits import Limits
from hocket.plan.problem import Problem
from hocket.planners.parallel.forecast import ConfigForecast, label
from hocket.planners.parallel.pools import Pool, pools_of
from hocket.planners.parallel.recheck import AS_SHORT
from hocket.planners.parallel.space import config_blocks
from hocket.transformer import ScheduleName
from hocket.transformer.parallel_config import ParallelConfig
from hocket.transformer.rules import broken_degrees

# How many hosts would let a model fit that does not.
#
# Found by evaluating the closed form of memory for more hosts of the same type, by doubling and
# then halving the step.

MOST_TIMES = 64
"""Largest number of hosts to suggest, as a multiple of the present hosts."""


def hosts_needed(problem: Problem, limits: Limits) -> list[str]:
    """Text on the fewest hosts that would be enough within the limits; empty if there is none."""
    pool = max(pools_of(problem), key=lambda pool: pool.num_devices * pool.memory_bytes)
    hosts = _fewest(problem, pool, _least(limits))
    if hosts is None:
        return []
    return [f"{hosts} hosts of {pool.per_host} {pool.kind.name} instead of {len(pool.hosts)}"]


def _fewest(problem: Problem, pool: Pool, limits: Limits) -> int | None:
    """The fewest hosts on which some config fits.

    None if the present hosts are enough, or if `MOST_TIMES` as many are not.
    """
    low = len(pool.hosts)
    if _fits(problem, pool, low, limits):
        return None
    high = 2 * low
    while not _fits(problem, pool, high, limits):
        low, high = high, 2 * high
        if high > MOST_TIMES * len(pool.hosts):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(problem, pool, middle, limits) else (middle, high)
    return high


def _least(limits: Limits) -> Limits:
    """Narrow the limits to the options with the least memory."""
    fixed = dict(limits.fixed)
    small: tuple[ScheduleName, ...] = ("1f1b",) if "1f1b" in limits.schedules else ()
    return replace(
        limits,
        max_microbatch=fixed.get("microbatch", 1),
        schedules=limits.schedules if "chunks" in fixed or not small else small,
        recomputes=limits.recomputes[-1:],
    )


def _fits(problem: Problem, pool: Pool, num_hosts: int, limits: Limits) -> bool:
    """True if some config fits on ``num_hosts`` hosts."""
    more = Pool(pool.kind, (pool.hosts[0],) * num_hosts)
    training = problem.training
    for block in config_blocks(training.model, more, training.global_batch, limits):
        held = memory(training.model, block.configs, training.software)
        if np.any(held <= pool.limit_bytes):
            return True
    return False


PARTS_IN_WORDS = {
    "compute": "arithmetic",
    "bubble": "waiting for other stages",
    "tensor": "tensor-parallel communication",
    "pipeline": "transfers between stages",
    "data": "communication between replicas",
    "other": "communication of context and expert parallelism",
    "optimizer": "the optimizer",
}
"""Descriptions of the parts of a step's time; other parts keep their names."""


DEGREES = ("tensor", "context", "data", "pipeline")
"""Fields of a config whose product is its number of devices."""
A_LITTLE = 0.01
"""Relative difference of step times below which no cause is named."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """Forecasts with their reasons, and a sentence about the choice."""

    forecasts: list[ConfigForecast]
    sentence: str


def _label(candidate: ConfigForecast) -> str:
    return label(candidate.config)


def explain(candidates: list[ConfigForecast]) -> Explanation:
    """Explain why the first candidate won and the others lost."""
    best = candidates[0]
    others = [c for c in candidates[1:] if c.feasible]
    won = replace(best, reason=_advantage(best, others))
    message = [won, *(replace(c, reason=_why_lost(c, best)) for c in candidates[1:])]
    return Explanation(
        message, f"{_label(won)}: chosen because {won.reason}; {limit_sentence(best)}"
    )


def limit_sentence(best: ConfigForecast) -> str:
    """Sentence on the parts of the winner's step time, largest first."""
    parts = sorted(best.parts_s.items(), key=lambda part: -part[1])
    shares = [(PARTS_IN_WORDS.get(name, name), value / best.step_s) for name, value in parts]
    listed = ", ".join(f"{name} {format_percent(share)}" for name, share in shares[:3] if share > 0)
    rank = best.fullest_rank
    peak, capacity = best.peak_bytes[rank], best.capacity_bytes[rank]
    return (
        f"its time is {listed}; memory is {format_percent(peak / capacity)} full on pipeline rank "
        f"{rank} ({format_bytes(peak)} of {format_bytes(capacity)})"
    )


def _advantage(best: ConfigForecast, others: list[ConfigForecast]) -> str:
    if not others:
        return "nothing else fits"
    shorter = 1 - best.step_s / others[0].step_s
    if shorter < AS_SHORT:
        return f"no step is shorter, and it is simpler than the next ({_label(others[0])})"
    amount = f"{100 * shorter:.1f} %" if shorter < 0.02 else format_percent(shorter)
    return f"its step is {amount} shorter than the next ({_label(others[0])})"


def _why_lost(candidate: ConfigForecast, best: ConfigForecast) -> str:
    if not candidate.feasible:
        return lacking(candidate)
    longer = candidate.step_s / best.step_s - 1
    if longer < AS_SHORT:
        return "no shorter, and less simple"
    if longer < A_LITTLE:
        return f"{100 * longer:.1f} % longer"
    return f"{format_percent(longer)} longer: {_cause(candidate, best)}"


def _cause(candidate: ConfigForecast, best: ConfigForecast) -> str:
    """Text on the part of the step that exceeds the winner's the most."""
    theirs = best.parts_s
    more_s = {name: value - theirs.get(name, 0.0) for name, value in candidate.parts_s.items()}
    name = max(more_s, key=lambda name: more_s[name])
    if name == "bubble":
        bubble, instead = format_percent(candidate.bubble), format_percent(best.bubble)
        return f"bubble {bubble} instead of {instead}"
    return f"{PARTS_IN_WORDS.get(name, name)} takes {format_seconds(max(more_s[name], 0.0))} more"


def lacking(candidate: ConfigForecast) -> str:
    """Message on the memory that a candidate lacks, and on which rank."""
    if not candidate.lacking_bytes:
        return candidate.reason
    spare = candidate.problem.spare
    kept = f" ({format_percent(spare)} of memory stay free)" if spare else ""
    return (
        f"lacks {format_bytes(candidate.lacking_bytes)} on pipeline rank {candidate.fullest_rank}"
        f"{kept}"
    )


def _fixed_rule(problem: Problem, limits: Limits) -> str:
    """Text on the rule that the fixed degrees violate; empty if they violate none."""
    fixed = dict(limits.fixed)
    config = ParallelConfig(global_batch=problem.training.global_batch, **fixed)  # type: ignore[arg-type]
    degrees = " x ".join(f"{name} {value}" for name, value in fixed.items() if name in DEGREES)
    if problem.cluster.num_devices % config.num_devices:
        return f"{degrees} does not divide {problem.cluster.num_devices} devices"
    return next(broken_degrees(problem.training.model, config), "")


def shortage(problem: Problem, candidates: list[ConfigForecast], limits: Limits) -> Explanation:
    """Explain that nothing fits: the config that lacks the least, and changes that would help."""
    message = [replace(c, reason=lacking(c)) for c in candidates]
    if not message:
        sentence = "no config exists within the requested limits"
        reason = (
            _fixed_rule(problem, limits) or "allow other degrees, another batch or more devices"
        )
        return Explanation([], f"{sentence}: {reason}")
    least = message[0]
    sentence = f"nothing fits: {_label(least)} {least.reason}, less than any other"
    options = [f"devices with {format_bytes(least.peak_bytes[least.fullest_rank])}"]
    options += hosts_needed(problem, limits)
    return Explanation(message, f"{sentence}; it would fit on {' or '.join(options)}")
