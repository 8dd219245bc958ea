"""Small random snapshots, and the plain linear programs that policies are compared with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linprog

from hocket.fleet.cluster_snapshot import ClusterSnapshot, Pairs

JOB_COLUMNS = (
    "steps_per_s",
    "gang",
    "weight",
    "remaining_steps",
    "elapsed_s",
    "deadline_s",
    "isolated_s",
    "arrival",
    "team_of",
)


def make_snapshot(
    steps_per_s, num_devices, *, gang=None, weight=None, pairs=None, team_of=None, **changes
) -> ClusterSnapshot:
    steps = np.asarray(steps_per_s, dtype=float)
    n, k = steps.shape
    team = np.zeros(n, dtype=np.int64) if team_of is None else np.asarray(team_of)
    num_teams = int(team.max(initial=0)) + 1
    snapshot = ClusterSnapshot(
        device_types=tuple(f"type{j}" for j in range(k)),
        num_devices=np.asarray(num_devices, dtype=np.int64),
        price_per_hour=np.arange(1.0, k + 1.0),
        ids=tuple(f"job{m}" for m in range(n)),
        steps_per_s=steps,
        gang=np.ones(n, dtype=np.int64) if gang is None else np.asarray(gang, dtype=np.int64),
        weight=np.ones(n) if weight is None else np.asarray(weight, dtype=float),
        remaining_steps=np.full(n, 1e4),
        elapsed_s=np.zeros(n),
        deadline_s=np.full(n, np.inf),
        isolated_s=np.zeros(n),
        arrival=np.arange(n),
        team_of=team,
        teams=tuple(f"team{e}" for e in range(num_teams)),
        team_weight=np.ones(num_teams),
        pairs=pairs,
    )
    return replace(snapshot, **changes)


def random_snapshot(
    seed: int, max_jobs: int = 60, max_kinds: int = 5, num_teams: int = 1
) -> ClusterSnapshot:
    random = np.random.default_rng(seed)
    n, k = int(random.integers(1, max_jobs + 1)), int(random.integers(1, max_kinds + 1))
    num_profiles = int(random.integers(1, n + 1)) if random.random() < 0.5 else n
    table = random.uniform(0.1, 10.0, (num_profiles, k)) * random.uniform(
        0.1, 100, (num_profiles, 1)
    )
    table[random.random(table.shape) < 0.15] = 0.0
    table[:, int(random.integers(0, k))] += 0.05
    profile = np.arange(n) if num_profiles == n else random.integers(0, num_profiles, n)
    return make_snapshot(
        table[profile],
        random.integers(4, 4 + 2 * n, k),
        gang=random.choice([1, 1, 2, 4], n),
        weight=random.choice([1.0, 1.0, 2.0, 5.0], n),
        team_of=random.permutation(np.arange(n) % num_teams),
        team_weight=random.choice([1.0, 2.0], min(n, num_teams)),
        remaining_steps=random.uniform(1e2, 1e6, n),
        elapsed_s=random.uniform(0.0, 1e4, n),
        isolated_s=random.uniform(0.0, 1e4, n),
    )


def shared_snapshot(seed: int, max_jobs: int = 24) -> ClusterSnapshot:
    """Jobs of a few profiles that may share devices, at 0.3 to 1 of their own speed."""
    random = np.random.default_rng(seed)
    n, k, p = (
        int(random.integers(2, max_jobs + 1)),
        int(random.integers(1, 4)),
        int(random.integers(1, 6)),
    )
    alone = random.uniform(1.0, 10.0, (p, k))
    beside = alone[:, None, :] * random.uniform(0.3, 1.0, (p, p, k))
    beside[random.random((p, p)) < 0.2] = 0.0
    profile = random.integers(0, p, n)
    gang = random.choice([1, 2], p)
    return make_snapshot(
        alone[profile],
        random.integers(2, 2 + n, k),
        gang=gang[profile],
        weight=random.choice([1.0, 2.0], n),
        pairs=Pairs(profile_of=profile, steps_per_s=beside),
        remaining_steps=random.uniform(1e2, 1e4, n),
        elapsed_s=random.uniform(0.0, 1e3, n),
    )


def odd_shared_snapshot(seed: int) -> ClusterSnapshot:
    """Few jobs and one to eight types: some without devices, of no use to some, or for nobody else.

    Sizes of throughputs, weights and gangs are far apart; every job can run.
    """
    random = np.random.default_rng(seed)
    n, k = int(random.integers(2, 15)), int(random.choice([1, 2, 3, 8]))
    p = n if random.random() < 0.5 else int(random.integers(1, n + 1))
    alone = random.uniform(0.1, 10.0, (p, k)) * random.choice([1e-3, 1.0, 1e3])
    alone *= random.lognormal(0.0, 1.0, (p, 1))
    if random.random() < 0.6:
        alone[random.random((p, k)) < 0.25] = 0.0
    alone[np.arange(p), random.integers(0, k, p)] += 0.05
    beside = alone[:, None, :] * random.uniform(0.1, 1.0, (p, p, k))
    beside[random.random((p, p)) < random.choice([0.0, 0.2, 0.8])] = 0.0
    lonely = random.random(p) < 0.2
    beside[lonely], beside[:, lonely] = 0.0, 0.0
    beside = np.where(alone[None] > 0.0, beside, 0.0)
    profile = np.arange(n) if p == n else random.integers(0, p, n)
    devices = random.integers(0, max(2, n // 2) + 1, k)
    devices[0] = 2 if devices.max() == 0 else devices[0]
    devices *= 3 if random.random() < 0.3 else 1
    gang = random.choice([1, 1, 2, 3], p)[profile]
    snapshot = make_snapshot(
        alone[profile],
        devices,
        gang=gang if p < n or random.random() < 0.5 else random.choice([1, 2, 4], n),
        weight=random.choice([1.0, 1.0, 2.0, 5.0, 0.01], n),
        pairs=Pairs(profile_of=profile, steps_per_s=beside),
        elapsed_s=random.uniform(0.0, 1e4, n) if random.random() < 0.7 else np.zeros(n),
        remaining_steps=random.uniform(1e2, 1e6, n),
    )
    jobs = np.flatnonzero(snapshot.usable_steps_per_s.any(axis=1))
    rows = {name: getattr(snapshot, name)[jobs] for name in JOB_COLUMNS}
    pairs = Pairs(profile_of=profile[jobs], steps_per_s=beside)
    return replace(snapshot, ids=tuple(snapshot.ids[job] for job in jobs), pairs=pairs, **rows)


def late_shared_snapshot(seed: int) -> ClusterSnapshot:
    """Jobs that share two devices, some so late that they soon run as fast as they can."""
    random = np.random.default_rng(seed)
    alone = random.uniform(1.0, 4.0, (8, 2))
    beside = alone[:, None, :] * random.uniform(0.5, 0.9, (8, 8, 2))
    return make_snapshot(
        alone,
        [1, 1],
        pairs=Pairs(profile_of=np.arange(8), steps_per_s=beside),
        remaining_steps=random.uniform(1.0, 100.0, 8),
        elapsed_s=random.uniform(0.0, 400.0, 8),
        isolated_s=random.uniform(0.0, 100.0, 8),
    )


snapshots = st.builds(random_snapshot, st.integers(0, 10**6))
team_snapshots = st.builds(lambda seed: random_snapshot(seed, num_teams=4), st.integers(0, 10**6))
shared_snapshots = st.builds(shared_snapshot, st.integers(0, 10**6))


class PlainProgram:
    """One variable per job (or pair) and device type, one row per job; no classes, no prices."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.snapshot = snapshot
        n, k = snapshot.steps_per_s.shape
        steps = snapshot.usable_steps_per_s
        self.members: list[tuple[tuple[int, float], ...]] = []
        self.device_type: list[int] = []
        for m in range(n):
            for j in range(k):
                self.members.append(((m, steps[m, j]),))
                self.device_type.append(j)
        if snapshot.pairs is not None:
            profile, beside = snapshot.pairs.profile_of, snapshot.pairs.steps_per_s
            for m in range(n):
                for other in range(m + 1, n):
                    if snapshot.gang[m] != snapshot.gang[other]:
                        continue
                    for j in range(k):
                        mine = beside[profile[m], profile[other], j]
                        theirs = beside[profile[other], profile[m], j]
                        if mine > 0 and theirs > 0 and steps[m, j] > 0:
                            self.members.append(((m, mine), (other, theirs)))
                            self.device_type.append(j)
        size = len(self.device_type)
        self.rate = np.zeros((n, size))
        self.time = np.zeros((n, size))
        self.devices = np.zeros((k, size))
        for column, members in enumerate(self.members):
            for job, rate in members:
                self.rate[job, column] = rate
                self.time[job, column] = 1.0
            self.devices[self.device_type[column], column] = snapshot.gang[members[0][0]]

    def _limits(self):
        rows = np.vstack([self.time, self.devices])
        return rows, np.concatenate([np.ones(len(self.time)), self.snapshot.num_devices])

    def highest_level(self, due, base=None) -> float:
        """The largest t with rate x >= base + t due for all jobs."""
        base = np.zeros(len(due)) if base is None else base
        limits, most = self._limits()
        top = np.hstack([-self.rate, due[:, None]])
        rows = np.vstack([top, np.hstack([limits, np.zeros((len(limits), 1))])])
        cost = np.zeros(rows.shape[1])
        cost[-1] = -1.0
        result = linprog(cost, A_ub=rows, b_ub=np.concatenate([-base, most]), method="highs")
        return -result.fun if result.status == 0 else -np.inf

    def highest_level_of_any_size(self, due) -> float:
        """The same in units of each job, where throughputs are too far apart for a solver."""
        fastest = self.snapshot.usable_steps_per_s.max(axis=1)
        rate, self.rate = self.rate, self.rate / fastest[:, None]
        most = float((due / fastest).max())
        level = self.highest_level(due / fastest / most) / most
        self.rate = rate
        return level

    def largest_sum(self, value, needs=None) -> float:
        """The most sum of value (per step, [job, type]) with needs met; -inf where impossible."""
        limits, most = self._limits()
        cost = np.array(
            [
                -sum(rate * value[job, device_type] for job, rate in members)
                for members, device_type in zip(self.members, self.device_type, strict=True)
            ]
        )
        needs = np.zeros(len(self.time)) if needs is None else needs
        rows, most = np.vstack([-self.rate, limits]), np.concatenate([-needs, most])
        result = linprog(cost, A_ub=rows, b_ub=most, method="highs")
        return -result.fun if result.status == 0 else -np.inf
