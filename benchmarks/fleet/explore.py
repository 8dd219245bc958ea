"""What wrong estimates cost a fleet, and what exploring gives back.

python benchmarks/fleet/explore.py ../shared/data/cluster

Jobs of Gavel's table run on a simulated fleet whose estimates come from one measured type, their
model being in no table. Average completion times in hours: with true throughputs; with estimates
that are corrected where a job ran, as `step` does, and the same with a hope of 1 deviation in them,
as a job file may state; with beliefs shared by jobs of one type; and with hope of 1, 2 and 3
deviations for what was not tried. A job that moves loses a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from gavel_cluster import DEVICE_TYPES, devices_of_each_type, gavel_table, model_of

from hocket.base.arrays import FloatArray
from hocket.fleet.rounds import (
    Finish,
    FleetState,
    Job,
    Progress,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.state import RUNNING
from hocket.fleet.throughputs import Throughputs
from hocket.fleet.throughputs.unseen import Belief, belief_from

DEVICES_PER_TYPE = 6
NUM_JOBS = 150
ROUND_S = 360.0


class Attempt(NamedTuple):
    """A job that runs."""

    number: int
    device_type: int
    attempt: int
    ready_s: float


class Guess(Protocol):
    """What the scheduler thinks of jobs."""

    def row(self, number: int) -> tuple[float, ...]:
        """Steps per second on each device type, at submission."""
        ...

    def learn(self, fleet: Fleet, state: FleetState, running: list[Attempt]) -> FleetState:
        """The state with what the round taught."""
        ...


class Fleet:
    """A simulated fleet whose scheduler does not know how fast jobs are."""

    def __init__(self, truth: FloatArray, total_steps: FloatArray, arrival_s: FloatArray) -> None:
        self.truth, self.total_steps, self.arrival_s = truth, total_steps, arrival_s
        self.done = np.zeros(len(truth))
        self.end_s = np.full(len(truth), np.nan)
        self.clock_s = 0.0

    def run(self, guess: Guess) -> float:
        """The average completion time in hours; ``guess`` says and learns how fast jobs are."""
        devices = devices_of_each_type(DEVICES_PER_TYPE)
        state = new_state(
            DEVICE_TYPES, devices, Rules(policy="las", round_s=ROUND_S, restart_s=60.0)
        )
        coming = 0
        while np.isnan(self.end_s).any():
            running = self._running(state)
            ends = self._ends(running)
            first = min(ends, key=ends.__getitem__, default=-1)
            arrival_s = self.arrival_s[coming] if coming < len(self.arrival_s) else np.inf
            time_s = min(arrival_s, ends.get(first, np.inf), state.next_tick_s)
            self._advance(running, time_s)
            if arrival_s == time_s:
                job = Job(
                    number=coming,
                    name=str(coming),
                    steps_per_s=guess.row(coming),
                    total_steps=float(self.total_steps[coming]),
                )
                state, _ = step(state, Submit(time_s=time_s, jobs=(job,)))
                coming += 1
            elif ends.get(first, np.inf) == time_s:
                self.end_s[first] = time_s
                state, _ = step(state, Finish(time_s=time_s, numbers=(first,)))
            else:
                state = self._report(state, running, time_s)
                state = guess.learn(self, state, running)
                state, _ = step(state, Tick(time_s=time_s))
        return float((self.end_s - self.arrival_s).mean() / 3600.0)

    def _running(self, state: FleetState) -> list[Attempt]:
        rows = state.jobs.rows
        return [
            Attempt(
                int(row["number"]),
                int(row["device_type"]),
                int(row["attempt"]),
                float(row["ready_s"]),
            )
            for row in rows[rows["phase"] == RUNNING]
        ]

    def _ends(self, running: list[Attempt]) -> dict[int, float]:
        return {
            number: max(self.clock_s, ready_s)
            + (self.total_steps[number] - self.done[number]) / self.truth[number, device_type]
            for number, device_type, _, ready_s in running
        }

    def _advance(self, running: list[Attempt], time_s: float) -> None:
        for number, device_type, _, ready_s in running:
            worked_s = max(time_s - max(self.clock_s, ready_s), 0.0)
            self.done[number] += worked_s * self.truth[number, device_type]
        self.clock_s = time_s

    def _report(self, state: FleetState, running: list[Attempt], time_s: float) -> FleetState:
        for number, _, attempt, ready_s in running:
            if ready_s < time_s:
                done = float(self.done[number])
                event = Progress(time_s=time_s, number=number, attempt=attempt, done_steps=done)
                state, _ = step(state, event)
        return state


class Rows:
    """Rows that are fixed at submission; `step` corrects them where the job ran."""

    def __init__(self, rows: FloatArray) -> None:
        self.rows = rows

    def row(self, number: int) -> tuple[float, ...]:
        return tuple(self.rows[number].tolist())

    def learn(self, fleet: Fleet, state: FleetState, running: list[Attempt]) -> FleetState:
        return state


class Shared:
    """One belief for each type of job, from all that was measured, with hope."""

    def __init__(self, beliefs: dict[str, Belief], types: list[str], boldness: float) -> None:
        self.beliefs, self.types, self.boldness = beliefs, types, boldness

    def row(self, number: int) -> tuple[float, ...]:
        return tuple(self.beliefs[self.types[number]].steps_per_s(self.boldness).tolist())

    def learn(self, fleet: Fleet, state: FleetState, running: list[Attempt]) -> FleetState:
        for number, device_type, _, ready_s in running:
            if ready_s < state.time_s:
                name = self.types[number]
                speed = float(fleet.truth[number, device_type])
                self.beliefs[name] = self.beliefs[name].after(device_type, speed)
        rows = np.array([self.row(number) for number in state.jobs.rows["number"].tolist()])
        jobs = state.jobs._replace(steps_per_s=rows.reshape(-1, len(DEVICE_TYPES)))
        return state.but(jobs=jobs._replace(spread_steps_per_s=jobs.steps_per_s), is_dirty=True)


def estimates(table: Throughputs, known: str) -> dict[str, Belief]:
    """Beliefs of all jobs of one device, each from one device type and tables without its model."""
    found = {}
    for row, profile in enumerate(table.profiles):
        if profile.gang > 1 or not (table.alone[row] > 0.0).all():
            continue
        model = model_of(profile.job_type)
        others = [at for at, p in enumerate(table.profiles) if model_of(p.job_type) != model]
        speed = float(table.alone[row, table.device_types.index(known)])
        found[profile.job_type] = belief_from(table.only(others), profile, {known: speed})
    return found


def main(folder: Path) -> None:
    """Print average completion times over seeds and known device types."""
    table = gavel_table(folder)
    titles = ("true", "stated", "hope 1", "shared", "hope 1", "hope 2", "hope 3")
    print(" " * 18 + " ".join(f"{title:>8}" for title in titles))
    sums = np.zeros(len(titles))
    for known in DEVICE_TYPES:
        beliefs = estimates(table, known)
        for seed in range(2):
            random = np.random.default_rng(seed)
            types = random.choice(sorted(beliefs), NUM_JOBS).tolist()
            truth = np.array([table.alone[table.find(name, 1)] for name in types])
            hours = np.exp(random.uniform(np.log(0.5), np.log(12.0), NUM_JOBS))
            arrival_s = np.cumsum(random.exponential(0.45 * 3600.0, NUM_JOBS))
            steps = hours * 3600.0 * truth.max(axis=1)
            ways: list[Guess] = [Rows(truth)]
            for boldness in (0.0, 1.0):
                ways.append(Rows(np.array([beliefs[name].steps_per_s(boldness) for name in types])))
            ways += [Shared(dict(beliefs), types, bold) for bold in (0.0, 1.0, 2.0, 3.0)]
            told = [Fleet(truth, steps, arrival_s).run(way) for way in ways]
            sums += told
            cells = " ".join(f"{hours:8.3f}" for hours in told)
            print(f"{known:>4} known, seed {seed} {cells}", flush=True)
    print("mean              " + " ".join(f"{hours:8.3f}" for hours in sums / 6))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
