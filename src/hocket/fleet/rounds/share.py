"""The policy's answer for the jobs of a state, written into their rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot, Pairs
from hocket.fleet.policies import find_policy
from hocket.fleet.policies.agnostic import all_fastest
from hocket.fleet.policies.las import las_level_problem
from hocket.fleet.policies.las_central import CENTRAL, las_program, spread_central
from hocket.fleet.policies.lists import fifo_as_gavel
from hocket.fleet.policies.normalise import isolated_steps_per_s
from hocket.fleet.rounds.assign import keeps_line
from hocket.fleet.rounds.fairness import set_weights
from hocket.fleet.rounds.rules import LONGEST
from hocket.fleet.rounds.state import RUNNING, FleetState, Jobs, PairPlan, Rows, Rules, some_rows
from hocket.fleet.rounds.tables import Ascent, new_alike, new_ascent
from hocket.fleet.solve.centre import Even
from hocket.fleet.solve.levels import level_demand
from hocket.fleet.solve.price_tables import JobClassTable, LevelDemand
from hocket.fleet.solve.prices import MAX_QUESTIONS
from hocket.fleet.solve.setup import set_up, trim
from hocket.fleet.solve.water_filling import MAX_LEVELS
from hocket.kernels.containers import table

# Shares of many jobs of few classes, at the cost of the classes only.
#
# A policy that looks at nothing but throughputs, gang and weight gives jobs with the same three the
# same answer, and which classes there are changes far less often than how many jobs each has. So
# the tables of the solver are kept per set of classes, and only the numbers of jobs are new. The
# tables are a pure function of the classes, put in order of their bytes: what was asked before does
# not show in an answer. O(jobs) and one search for prices.

_MAX_CLASSES = 256
"""More classes than this are hardly met twice."""
_SEES_SPEEDS = {"las": True, "las-agnostic": False}
"""Max-min policies, and whether they look at throughputs or only at where a job can run."""


class Groups(NamedTuple):
    """Jobs that are exactly alike."""

    of: LongArray
    """``[row]``: the class of a job; -1 for one that wants no devices."""
    num_alike: LongArray
    key: bytes
    """Throughputs, gang and weight of all classes, in a fixed order."""


class ClassAnswer(NamedTuple):
    """What the policy says of classes."""

    shares: FloatArray
    """``[class, kind]``."""
    warm: Warm | None
    """What speeds up the next answer."""
    notes: dict[str, str]


class Known(NamedTuple):
    """What follows from a set of classes."""

    job_classes: JobClassTable
    level_demand: LevelDemand
    """On the first level_answer."""
    top: float
    """The level at which everybody is as high as it can be."""
    spread: FloatArray
    """``[column, kind]``: how a share divides over kinds that nobody can tell apart."""
    place: LongArray
    """``[class]``: its row in the job_classes."""


def group_jobs(state: FleetState, jobs: Jobs) -> Groups | None:
    """Classes of the jobs that want devices; None where answers by class are of no use."""
    from hocket.fleet.rounds.kernels.group import group

    sees_speeds = _SEES_SPEEDS.get(state.rules.policy)
    if sees_speeds is None or state.pair_table is not None:
        return None
    alike = new_alike(len(jobs.rows), state.num_kinds, _MAX_CLASSES)
    num_classes = group(jobs, state.layout.largest_server, sees_speeds, _MAX_CLASSES, alike)
    if num_classes < 0:
        return None
    return Groups(alike.of, alike.num_in_order[:num_classes], alike.key[:num_classes].tobytes())


def class_shares(state: FleetState, groups: Groups) -> ClassAnswer | None:
    """Shares of classes; None where classes are nearly equal, or cannot run."""
    if state.rules.mechanism == "gavel":
        return _central_shares(state, groups)
    known = _tables(groups.key, tuple(state.layout.num_devices.tolist()))
    if known is None:
        return None
    num_jobs = np.empty(len(groups.num_alike))
    num_jobs[known.place] = groups.num_alike
    job_classes = known.job_classes._replace(num_jobs=table(num_jobs, np.float64))
    shares, warm, num_levels = _climb(job_classes, known, state.warm)
    notes = {"classes": str(len(num_jobs)), "levels": str(num_levels)}
    return ClassAnswer(trim((shares @ known.spread)[known.place]), warm, notes)


def _central_shares(state: FleetState, groups: Groups) -> ClassAnswer | None:
    """Gavel's solver makes the lowest job highest and leaves the others where it passed them."""
    num_devices = state.layout.num_devices
    even = _central_tables(groups.key, tuple(num_devices.tolist()))
    if even is None:
        return None
    shares, _ = spread_central(even, groups.num_alike, num_devices)
    return ClassAnswer(trim(shares), None, {"classes": str(len(shares)), "levels": "1"})


def _climb(
    job_classes: JobClassTable, known: Known, warm: Warm | None
) -> tuple[FloatArray, Warm, int]:
    """Level by level, as `solve.water_filling.fill`; what the first knew serves next time."""
    from hocket.fleet.rounds.kernels.climb import climb

    num_classes, num_pools = job_classes.rates.shape
    ascent = new_ascent(MAX_QUESTIONS, num_pools, num_classes)
    demands, top, found = known.level_demand, known.top, list[Warm]()
    while len(found) < MAX_LEVELS:
        num_known = _first_questions(ascent, num_pools, warm)
        hint = warm.level if warm is not None and 0.0 < warm.level < top else 0.0
        level, num_asked, num_rising = climb(job_classes, demands, top, hint, num_known, ascent)
        is_used = ascent.weight[:num_asked] > 0
        warm = Warm(prices=ascent.questions[0, :num_asked][is_used], level=level)
        found.append(warm)
        if num_rising == 0:
            break
        cap = ascent.by_class[2].copy()
        demands, top = level_demand(cap), _top(cap)
    return _within_limits(job_classes, ascent.shares), found[0], len(found)


def _first_questions(ascent: Ascent, num_pools: int, warm: Warm | None) -> int:
    prices = ascent.questions[0]
    if warm is None or warm.prices.shape[1] != num_pools or not len(warm.prices):
        prices[0] = 1.0 / num_pools
        return 1
    num_known = min(len(warm.prices), MAX_QUESTIONS // 4)
    prices[:num_known] = warm.prices[:num_known]
    return num_known


def _within_limits(job_classes: JobClassTable, shares: FloatArray) -> FloatArray:
    """Shares that use no more than all devices, and no more than all time of a job."""
    used = (job_classes.gang * job_classes.num_jobs) @ shares
    load = used / job_classes.capacity
    times = shares.sum(axis=1)
    return np.asarray(shares / max(1.0, float(load.max()), float(times.max(initial=0.0))))


def _top(cap: FloatArray) -> float:
    return max(float(cap.max(initial=0.0)), 1e-300)


@lru_cache(maxsize=4096)
def _central_tables(key: bytes, num_devices: tuple[int, ...]) -> Even | None:
    """The program of the kinds that there are; None where a class cannot run."""
    num_kinds = len(num_devices)
    values = np.frombuffer(key).reshape(-1, num_kinds + 2)
    snapshot = _snapshot(values[:, :num_kinds], values[:, -2], values[:, -1], num_devices)
    rates = las_level_problem(snapshot).rates
    if not rates.any(axis=1).all():
        return None
    return las_program(rates, values[:, -2], snapshot.num_devices)


@lru_cache(maxsize=4096)
def _tables(key: bytes, num_devices: tuple[int, ...]) -> Known | None:
    """Tables of the solver with one job of each class; None where classes are nearly equal."""
    num_kinds = len(num_devices)
    values = np.frombuffer(key).reshape(-1, num_kinds + 2)
    snapshot = _snapshot(values[:, :num_kinds], values[:, -2], values[:, -1], num_devices)
    setup = set_up(snapshot, las_level_problem(snapshot))
    if len(setup.classes.first) < len(values) or not setup.can_run.all():
        return None
    cap = np.asarray(setup.job_classes.rates.max(axis=1, initial=0.0))
    return Known(setup.job_classes, level_demand(cap), _top(cap), setup.spread, setup.classes.of)


def _snapshot(
    steps_per_s: FloatArray, gang: FloatArray, weight: FloatArray, num_devices: tuple[int, ...]
) -> ClusterSnapshot:
    count = len(gang)
    zeros, none = np.zeros(count), np.zeros(count, dtype=np.int64)
    return ClusterSnapshot(
        kinds=tuple(map(str, range(len(num_devices)))),
        num_devices=np.array(num_devices),
        price_per_hour=np.ones(len(num_devices)),
        ids=tuple(map(str, range(count))),
        steps_per_s=steps_per_s,
        gang=gang.astype(np.int64),
        weight=weight,
        remaining_steps=np.full(count, np.inf),
        elapsed_s=zeros,
        deadline_s=np.full(count, np.inf),
        isolated_s=zeros,
        arrival=none,
        team_of=none,
        team_weight=np.ones(1),
    )


_ISOLATING = ("finish-time-fairness", "ftf-agnostic")
"""Policies that look at how far a job would be on its own part of the cluster."""
_AS_GAVEL = {**CENTRAL, "fifo": fifo_as_gavel}
"""Policies whose answers Gavel's program gives in its own way."""
_GRID = 1e6
"""Shares are rounded to a millionth, so that noise of a solver decides nothing."""


def share(state: FleetState, jobs: Jobs) -> FleetState:
    """Compute shares; ``jobs`` are writable."""
    if state.rules.policy in _ISOLATING:
        _advance_alone(jobs)
    state = state.but(solved_s=state.time_s, is_dirty=False)
    if state.rules.mechanism != "gavel":
        set_weights(state, jobs)
    has_devices = bool(state.layout.num_devices.any())
    by_class = _share_by_class(state, jobs) if has_devices else None
    if by_class is not None:
        return by_class
    wanting = np.flatnonzero(jobs.rows["phase"] <= RUNNING)
    last_shares = _last_shares(state, jobs, wanting)
    jobs.shares[:] = 0.0
    jobs.rows["pair_share"] = 0.0
    # First come, first served leaves devices idle rather than let anybody overtake.
    jobs.rows["has_share"] = 2 if state.rules.policy.startswith("fifo") else 1
    if not len(wanting) or not has_devices:
        return state.but(pair_plan=_no_pairs(state))
    seen = seen_steps_per_s(state, jobs, wanting)
    snapshot = to_snapshot(state, seen, some_rows(jobs.rows, wanting), last_shares)
    answer = _policy(state)(snapshot, state.warm)
    jobs.shares[wanting] = _coarse(answer.shares)
    if state.rules.policy in _ISOLATING:
        seen_snapshot = all_fastest(snapshot) if state.rules.policy == "ftf-agnostic" else snapshot
        jobs.rows["isolated_rate"][wanting] = isolated_steps_per_s(seen_snapshot)
    return state.but(
        warm=answer.warm,
        notes=answer.notes,
        pair_plan=_pair_plan(state, jobs, wanting, answer),
    )


def _last_shares(state: FleetState, jobs: Jobs, wanting: LongArray) -> FloatArray | None:
    """Where jobs are that a policy leaves there; the improved rounds weigh moves themselves."""
    if state.rules.mechanism == "gavel":
        return jobs.shares[wanting]
    if not keeps_line(state):
        return None
    on = jobs.rows["kind"][wanting][:, None] == np.arange(state.num_kinds)
    return np.asarray(on, dtype=float)


def _policy(state: FleetState) -> Callable[[ClusterSnapshot, Warm | None], Allocation]:
    """Gavel's rounds take what its own program would answer."""
    policy = find_policy(state.rules.policy)
    if state.rules.mechanism != "gavel" or state.pair_table is not None:
        return policy
    return _AS_GAVEL.get(state.rules.policy, policy)


def _share_by_class(state: FleetState, jobs: Jobs) -> FleetState | None:
    """Shares of jobs by what they have in common; None where that is of no use."""
    from hocket.fleet.rounds.kernels.group import write_shares

    groups = group_jobs(state, jobs)
    if groups is None or not len(groups.num_alike):
        return None
    answer = class_shares(state, groups)
    if answer is None:
        return None
    write_shares(jobs, groups.of, _coarse(answer.shares))
    return state.but(warm=answer.warm, notes=answer.notes)


def _coarse(shares: FloatArray) -> FloatArray:
    return np.asarray(np.rint(shares * _GRID) / _GRID)


def seen_steps_per_s(state: FleetState, jobs: Jobs, wanting: LongArray) -> FloatArray:
    """Throughputs of some rows, each gang on as few servers as there can be; 0 for nowhere."""
    gang, largest = jobs.rows["gang"][wanting], state.layout.largest_server
    if gang.max() <= largest.min():
        return jobs.steps_per_s[wanting]
    is_spread = gang[:, None] > largest
    return np.where(is_spread, jobs.spread_steps_per_s[wanting], jobs.steps_per_s[wanting])


def _advance_alone(jobs: Jobs) -> None:
    """Time that the work since the last answer would have taken on an equal part of the cluster."""
    rows = jobs.rows
    rate = rows["isolated_rate"]
    done = np.maximum(rows["done_steps"] - rows["isolated_steps"], 0.0)
    rows["isolated_s"] += np.where(rate > 0.0, done / np.where(rate > 0.0, rate, 1.0), 0.0)
    rows["isolated_steps"] = rows["done_steps"]


def to_snapshot(
    state: FleetState, steps_per_s: FloatArray, rows: Rows, last_shares: FloatArray | None = None
) -> ClusterSnapshot:
    """Input of the policy."""
    pairs = None
    if state.pair_table is not None:
        pairs = Pairs(
            profile_of=np.ascontiguousarray(rows["profile"]),
            steps_per_s=state.pair_table.steps_per_s,
        )
    is_late = _are_late(state.rules, rows, steps_per_s)
    had_steps = rows["held_s"] * steps_per_s.max(axis=1, initial=0.0)
    # Gavel's rounds believe what is said. Here, a job that should have ended long ago is seen as
    # one that is half done: it needs as much again as it has had.
    left = np.asarray(rows["total_steps"] - rows["done_steps"])
    return ClusterSnapshot(
        kinds=state.kinds,
        num_devices=state.num_devices,
        price_per_hour=state.price_per_hour,
        ids=tuple(map(str, rows["number"].tolist())),
        steps_per_s=steps_per_s,
        gang=np.ascontiguousarray(rows["gang"]),
        weight=np.ascontiguousarray(rows["weight"]),
        remaining_steps=np.where(is_late, np.maximum(left, had_steps), left),
        elapsed_s=state.time_s - rows["submitted_s"],
        deadline_s=rows["deadline_s"] - state.time_s,
        isolated_s=np.where(is_late, _alone_s(rows, had_steps), rows["isolated_s"]),
        arrival=np.arange(len(rows)),
        team_of=np.ascontiguousarray(rows["team"]),
        teams=state.teams,
        team_weight=state.team_weight,
        pairs=pairs,
        last_shares=last_shares,
        is_overdue=is_late if is_late.any() else None,
    )


def _are_late(rules: Rules, rows: Rows, steps_per_s: FloatArray) -> BoolArray:
    if rules.mechanism == "gavel":
        return np.zeros(len(rows), dtype=bool)
    return is_overdue(rules, rows, steps_per_s)


def _alone_s(rows: Rows, steps: FloatArray) -> FloatArray:
    """Time that some steps would have taken on an equal part of the cluster."""
    rate = rows["isolated_rate"]
    alone_s = np.divide(steps, rate, out=np.zeros(len(rows)), where=rate > 0.0)
    return np.asarray(np.maximum(alone_s, rows["isolated_s"]))


def is_overdue(rules: Rules, rows: Rows, steps_per_s: FloatArray) -> BoolArray:
    """True if jobs have long had the time that they said to need, even where they are slowest."""
    slowest = np.where(steps_per_s > 0.0, steps_per_s, np.inf).min(axis=1, initial=np.inf)
    # Any speed will do for a job that can run nowhere: it has had no time.
    slowest = np.where(np.isinf(slowest), 1.0, slowest)
    most_s = LONGEST * rows["total_steps"] / slowest + rules.round_s
    worked_s = rows["held_s"] - rows["attempt"] * rules.restart_s
    return np.asarray(worked_s > most_s)


def _no_pairs(state: FleetState) -> PairPlan | None:
    """No pair has a deficit."""
    if state.pair_plan is None:
        return None
    nothing = np.zeros(state.pair_plan.amount.shape)
    return PairPlan(amount=nothing, credit_s=nothing.copy())


def _pair_plan(
    state: FleetState, jobs: Jobs, wanting: LongArray, answer: Allocation
) -> PairPlan | None:
    """Pair time by profile; debts of pairs that are not wanted any more are forgotten."""
    plan = state.pair_plan
    if plan is None:
        return None
    amount = np.zeros(plan.amount.shape)
    shared = answer.shared
    if shared is not None and len(shared.amount):
        low = np.minimum(shared.profile_a, shared.profile_b)
        high = np.maximum(shared.profile_a, shared.profile_b)
        np.add.at(amount, (low, high, shared.kind), _coarse(shared.amount))
    if answer.paired is not None:
        time = np.zeros(len(wanting))
        np.add.at(time, answer.paired.job, answer.paired.amount)
        jobs.rows["pair_share"][wanting] = _coarse(time)
    return PairPlan(amount=amount, credit_s=np.where(amount > 0.0, plan.credit_s, 0.0))
