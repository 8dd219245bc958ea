"""Jobs of a trace that take as many devices as are best, with a plan of their own for each size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.fleet.gangs import ANY_KIND, Chosen, ElasticJob, GangSpeeds, choose_gangs
from hocket.fleet.rounds.events import GangSize, Resize
from hocket.fleet.rounds.state import ENDED, PAUSED, RUNNING, FleetState
from hocket.fleet.simulator.bind import TraceWork
from hocket.fleet.throughputs.table import Throughputs


def elastic_speeds(work: TraceWork, throughputs: Throughputs) -> list[GangSpeeds]:
    """What each job does with every size of gang that the table has for its kind of job."""
    table, trace = throughputs.on(work.kinds), work.trace
    rows: dict[str, list[tuple[int, int]]] = {}
    for row, profile in enumerate(table.profiles):
        rows.setdefault(profile.job_type, []).append((profile.gang, row))
    known: dict[tuple[str, float], GangSpeeds] = {}
    found = []
    for job, job_type in enumerate(trace.job_types):
        if job_type not in rows:
            raise UsageError(
                f"the table has no jobs of kind {job_type!r}, so they cannot be elastic",
                hint="make one with hocket fleet throughputs MODEL --planned --gang 1,2,4,8",
            )
        sizes = sorted(rows[job_type])
        key = job_type, _scale(work, job, dict(sizes), table)
        if key not in known:
            speeds = key[1] * table.alone[[row for _, row in sizes]]
            gangs = tuple(gang for gang, _ in sizes)
            known[key] = GangSpeeds(gangs=gangs, steps_per_s=speeds)
        found.append(known[key])
    return found


def _scale(work: TraceWork, job: int, rows: dict[int, int], table: Throughputs) -> float:
    """Steps of a job per step of the table: work of which only a time is known has other steps."""
    gang = int(work.trace.gang[job])
    if gang not in rows:
        return 1.0
    measured, bound = table.alone[rows[gang]], work.steps_per_s[job]
    return float(next((b / m for b, m in zip(bound, measured, strict=True) if m > 0.0), 1.0))


class Elastic:
    """Decides how many devices of which kind each job of a running fleet takes."""

    def __init__(self, speeds: Sequence[GangSpeeds], total_steps: FloatArray) -> None:
        """``speeds`` and ``total_steps`` are those of the jobs of a trace, in its order."""
        self._speeds, self._total_steps = speeds, total_steps
        self._seen: tuple[int, ...] = ()

    def begin(self, state: FleetState, number: int) -> GangSize:
        """The size with which a job begins beside those that are there."""
        left_steps = float(self._total_steps[number])
        fresh = ElasticJob(
            number=number, left_steps=left_steps, speeds=self._speeds[number], now=None
        )
        found = choose_gangs([*self._jobs(state), fresh], state.num_devices, state.rules.restart_s)
        gang = found[number].gang if number in found else self._speeds[number].gangs[0]
        return self._size(number, Chosen(gang, ANY_KIND))

    def resize(self, state: FleetState, time_s: float) -> Resize | None:
        """What changes at the beginning of a round, where jobs came or went since the last."""
        jobs = self._jobs(state)
        seen = tuple(job.number for job in jobs)
        if seen == self._seen:
            return None
        self._seen = seen
        found = choose_gangs(jobs, state.num_devices, state.rules.restart_s)
        sizes = [self._size(number, chosen) for number, chosen in found.items()]
        changed = tuple(size for size in sizes if not _has(state, size))
        return Resize(time_s=time_s, sizes=changed) if changed else None

    def _jobs(self, state: FleetState) -> list[ElasticJob]:
        """Jobs that have not ended and are not paused."""
        rows = state.jobs.rows
        wanting = rows[(rows["phase"] != ENDED) & (rows["phase"] != PAUSED)]
        return [
            ElasticJob(
                number=int(row["number"]),
                left_steps=max(1.0, float(row["total_steps"] - row["done_steps"])),
                speeds=self._speeds[int(row["number"])],
                now=Chosen(int(row["gang"]), int(row["kind"])) if row["phase"] == RUNNING else None,
            )
            for row in wanting
        ]

    def _size(self, number: int, chosen: Chosen) -> GangSize:
        speeds = self._speeds[number]
        row = speeds.steps_per_s[speeds.gangs.index(chosen.gang)]
        if chosen.kind != ANY_KIND:
            row = np.where(np.arange(len(row)) == chosen.kind, row, 0.0)
        return GangSize(number=number, gang=chosen.gang, steps_per_s=tuple(row.tolist()))


def _has(state: FleetState, size: GangSize) -> bool:
    """Whether a job has this size already; one that runs where it shall is left alone."""
    at = state.row_of(size.number)
    row, known = state.jobs.rows[at], state.jobs.steps_per_s[at]
    if row["gang"] != size.gang:
        return False
    stays = row["phase"] == RUNNING and size.steps_per_s[int(row["kind"])] > 0.0
    return bool(stays) or bool(np.array_equal(known, size.steps_per_s))
