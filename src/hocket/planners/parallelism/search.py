"""Choose how a transformer's training is divided: scan all divisions, simulate the best.

This is PTD-P (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021) made automatic: instead of rules for tensor, pipeline and data degrees,
all of them go through a closed form of memory and step time, and the best few hundred through the
event simulator, which decides. Unequal device kinds are joined as stages of one pipeline.
O(divisions) array work, then O(actions) per simulated candidate.
"""

from __future__ import annotations

from dataclasses import replace

from hocket.base.errors import InputFileError, NoFeasiblePlanError
from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.step import predict
from hocket.plan.limits import Limits
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.candidates import Comparison
from hocket.planners.parallelism.configuration import (
    Configuration,
    check_configuration,
    filled,
)
from hocket.planners.parallelism.mixed import scan_mixed
from hocket.planners.parallelism.outlook import DivisionOutlook, PoolStages
from hocket.planners.parallelism.pools import pool_clusters, pools_of
from hocket.planners.parallelism.programs import asked_limits
from hocket.planners.parallelism.recheck import RecheckEffort, ranked, recheck, run, simulated
from hocket.planners.parallelism.scan import Scan, scan
from hocket.planners.parallelism.why import Told, explain, explain_one, shortage
from hocket.transformer import Division, Divisions

ROUNDS = 3
"""How many times the best candidates are simulated, the next ones each time, until one fits."""


def compare_divisions(problem: Problem, effort: RecheckEffort | None = None) -> Comparison:
    """All divisions within the problem's limits, the best of them simulated, and the winner."""
    effort = effort or RecheckEffort()
    limits = problem.limits or asked_limits(default_limits(problem), problem.training.software.name)
    scans = [
        scan(problem, pool, limits, ROUNDS * effort.num_simulated)
        for pool in range(len(pools_of(problem)))
    ]
    mixed = scan_mixed(problem, limits, effort.num_simulated)
    fitting = [c for pool, s in enumerate(scans) for c in described(problem, pool, s.fitting)]
    fitting += [judged(problem, pair.division, pair.stages, pair.estimate_s) for pair in mixed]
    fitting.sort(key=lambda candidate: candidate.estimate_s)
    nearly = [c for pool, s in enumerate(scans) for c in described(problem, pool, s.nearly)]
    seen = _recheck_until_one_fits(fitting, effort, limits.num_synthesised)
    return _compared(problem, limits, scans, [*seen, *ranked(nearly)], len(mixed))


def _recheck_until_one_fits(
    candidates: list[DivisionOutlook], effort: RecheckEffort, num_synthesised: int
) -> list[DivisionOutlook]:
    """The first candidates, simulated; further ones only where none of these fits after all."""
    seen: list[DivisionOutlook] = []
    for start in range(0, ROUNDS * effort.num_simulated, effort.num_simulated):
        following = candidates[start : start + effort.num_simulated]
        seen = ranked([*seen, *recheck(following, effort, num_synthesised)])
        if seen and seen[0].feasible:
            break
    return seen


def default_limits(problem: Problem) -> Limits:
    """Everything, with tensor-parallel groups that stay on one host."""
    return Limits(max_tensor=max(pool.per_host for pool in pools_of(problem)))


def _compared(
    problem: Problem,
    limits: Limits,
    scans: list[Scan],
    candidates: list[DivisionOutlook],
    num_mixed: int,
) -> Comparison:
    fits = bool(candidates) and candidates[0].feasible
    if not fits:
        smallest = [c for i, s in enumerate(scans) for c in described(problem, i, s.smallest)]
        candidates = ranked([*candidates, *smallest])
    told = explain(candidates) if fits else shortage(problem, candidates, limits)
    return _comparison(
        problem,
        told,
        fits=fits,
        divisions=sum(s.num_divisions for s in scans) + num_mixed,
        fitting=sum(s.num_fitting for s in scans) + _num_mixed(candidates),
        simulated=sum(candidate.simulated for candidate in candidates),
    )


def _comparison(problem: Problem, told: Told, *, fits: bool, **counts: int) -> Comparison:
    return Comparison(
        problem=problem,
        candidates=tuple(outlook.as_candidate(told.sentence) for outlook in told.outlooks),
        chosen=0 if fits else None,
        why=told.sentence,
        counts=counts,
    )


def _num_mixed(candidates: list[DivisionOutlook]) -> int:
    """Candidates over several kinds of device that fit: the scans of single kinds miss them."""
    return sum(c.feasible and len(c.stages.pools) > 1 for c in candidates)


# ── candidates ───────────────────────────────────────────────────────────────────────────────────


def described(problem: Problem, pool: int, divisions: Divisions) -> list[DivisionOutlook]:
    """Divisions over the devices of one pool, as the closed forms see them."""
    if not len(divisions):
        return []
    own, cluster = pools_of(problem)[pool], pool_clusters(problem)[pool]
    training = problem.training
    held = memory(training.model, divisions, training.software).total_bytes
    prediction = predict(
        training.model, divisions, cluster, training.software, training.coefficients
    )
    parts = prediction.parts()
    return [
        DivisionOutlook(
            problem=problem,
            division=divisions[i],
            stages=PoolStages(pools=(pool,), ranks=(int(divisions.pipeline[i]),)),
            estimate_s=float(prediction.step_s[i]),
            parts_s={name: float(values[i]) for name, values in parts.items()},
            step_s=float(prediction.step_s[i]),
            bubble=float(prediction.bubble[i]),
            peak_bytes=(int(held[i]),) * int(divisions.pipeline[i]),
            simulated=False,
            feasible=bool(held[i] <= own.limit_bytes),
        )
        for i in range(len(divisions))
    ]


def judged(
    problem: Problem, division: Division, stages: PoolStages, estimate_s: float
) -> DivisionOutlook:
    """A division over several pools: parts and memory as the first of them sees it."""
    (first,) = described(problem, stages.pools[0], Divisions.of([division]))
    scale = estimate_s / first.estimate_s
    return replace(
        first,
        stages=stages,
        estimate_s=estimate_s,
        step_s=estimate_s,
        parts_s={name: scale * value for name, value in first.parts_s.items()},
    )


# ── one division ─────────────────────────────────────────────────────────────────────────────────


def single(problem: Problem, asked: Configuration, where: str) -> Comparison:
    """One division alone, simulated; ``where`` names its file in errors."""
    stages, division = _seated(problem, asked, where)
    check_configuration(problem.training.model, division, where)
    (seen,) = described(problem, stages.pools[0], Divisions.of([division]))
    seen = replace(seen, division=division, stages=stages)
    seen = simulated(seen) if division.layers is None else run(seen, division)
    told = explain_one(seen)
    return _comparison(
        problem, told, fits=seen.feasible, divisions=1, fitting=int(seen.feasible), simulated=1
    )


def _seated(problem: Problem, asked: Configuration, where: str) -> tuple[PoolStages, Division]:
    """The pools of a division's ranks: one that holds all, else several, large memory first."""
    pools, tensor = pools_of(problem), asked.division.tensor
    groups = [pool.num_groups(tensor) for pool in pools]
    division = filled(asked, groups)
    per_rank = division.data * division.context
    for index, count in enumerate(groups):
        if count >= per_rank * division.pipeline:
            return PoolStages(pools=(index,), ranks=(division.pipeline,)), division
    left, used = division.pipeline, []
    for index in sorted(range(len(pools)), key=lambda i: (-pools[i].memory_bytes, i)):
        ranks = min(left, groups[index] // per_rank)
        used += [(index, ranks)] if ranks else []
        left -= ranks
    if left:
        raise InputFileError(
            f"{division.num_devices} devices are needed in groups of {tensor}, "
            f"but {problem.cluster.name} has {problem.cluster.num_devices}",
            hint="lower a degree in [division], or name a larger cluster",
            where=where,
        )
    return PoolStages(pools=tuple(p for p, _ in used), ranks=tuple(n for _, n in used)), division


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────


def plan_of(comparison: Comparison) -> Plan:
    """The winner's plan; raises `NoFeasiblePlanError` where nothing fits."""
    winner = comparison.winner
    if winner is None or winner.plan is None:
        raise NoFeasiblePlanError(
            comparison.why, hint="more devices, a smaller model, or wider limits (--max-tensor)"
        )
    return winner.plan
