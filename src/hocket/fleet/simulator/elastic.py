"""Jobs of a trace that take as many devices as are best, with a plan of their own for each size."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.fleet.gangs import GangSpeeds
from hocket.fleet.rounds.events import GangSize, Resize
from hocket.fleet.rounds.sizes import Sizes
from hocket.fleet.rounds.state import FleetState
from hocket.fleet.simulator.bind import TraceWork
from hocket.fleet.throughputs.table import Throughputs


def elastic_speeds(work: TraceWork, throughputs: Throughputs) -> list[GangSpeeds]:
    """Throughputs of each job with every gang size that the table has for its profile."""
    table, trace = throughputs.on(work.device_types), work.trace
    rows: dict[str, list[tuple[int, int]]] = {}
    for row, profile in enumerate(table.profiles):
        rows.setdefault(profile.job_type, []).append((profile.gang, row))
    known: dict[tuple[str, float], GangSpeeds] = {}
    found = []
    for job, job_type in enumerate(trace.job_types):
        if job_type not in rows:
            raise UsageError(
                f"the table has no jobs of type {job_type!r}, so they cannot be elastic",
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
    """Steps of a job per step of the table: a job with a stated duration counts steps of its
    own."""
    gang = int(work.trace.gang[job])
    if gang not in rows:
        return 1.0
    measured, bound = table.alone[rows[gang]], work.steps_per_s[job]
    return float(next((b / m for b, m in zip(bound, measured, strict=True) if m > 0.0), 1.0))


class Elastic:
    """Decides how many devices of which type each job of a running trace takes."""

    def __init__(self, speeds: Sequence[GangSpeeds], total_steps: FloatArray) -> None:
        """``speeds`` and ``total_steps`` are those of the jobs of a trace, in its order."""
        self._sizes, self._total_steps = Sizes(dict(enumerate(speeds))), total_steps
        self._seen: tuple[int, ...] = ()

    def begin(self, state: FleetState, number: int) -> GangSize:
        """Gang size with which a new job starts, given the other jobs."""
        return self._sizes.begin(state, number, float(self._total_steps[number]))

    def resize(self, state: FleetState, time_s: float) -> Resize | None:
        """Event that resizes jobs at the beginning of a round, if jobs came or went since the
        last."""
        seen = tuple(job.number for job in self._sizes.jobs(state))
        if seen == self._seen:
            return None
        self._seen = seen
        return self._sizes.resize(state, time_s)
