"""What a trial of the fleet on one device shows: from what happened to rows of a table.

The service tells when attempts were started, stopped and ended; the ledger of
``gpu_train.py`` tells what their processes did. Used by ``gpu.py``.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("save", "exit", "process", "import", "device", "model", "load", "first step")
"""Of a switch, in their order: from the last step of one job to the first of the next."""
LOSS_LIMIT = 1e-6
"""Largest relative difference of losses that counts as the same training."""
MEMORY_LIMIT_BYTES = 64 * 2**20
"""What may be taken beyond what the first job found when it started."""
SHARE_LIMIT_ROUNDS = 5.0
"""Device time that a job may be off its share: a turn lasts four rounds or more."""


@dataclass(frozen=True)
class Run:
    """One attempt, as the service and as its process saw it."""

    job: str
    attempt: int
    started_s: float
    stopping_since_s: float | None
    ended_s: float | None
    outcome: str
    exit_code: int | None
    events: tuple[Mapping[str, Any], ...]

    def moments(self, what: str) -> list[float]:
        return [event["time_s"] for event in self.events if event["what"] == what]

    def fact(self, what: str, name: str) -> Any:
        """A fact of the first event of a device type; None where it did not happen."""
        return next((event[name] for event in self.events if event["what"] == what), None)

    @property
    def was_preempted(self) -> bool:
        return self.stopping_since_s is not None and self.exit_code == 0


@dataclass
class Findings:
    """Rows of the table, and what was promised."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def tell(self, name: str, value: str, *, holds: bool = True) -> None:
        self.rows.append((name, value if holds else f"{value} — BROKEN"))
        if not holds:
            self.broken.append(name)

    def table(self) -> str:
        return "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in self.rows)])

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"rows": self.rows, "broken": self.broken, **self.facts}
        path.write_text(json.dumps(content, indent=1))


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    path = folder / "ledger"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def runs_of(
    attempts: Mapping[str, Sequence[Mapping[str, Any]]], ledger: Sequence[Mapping[str, Any]]
) -> list[Run]:
    """Attempts that were started, in that order; ``attempts`` by name of the job."""
    events: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for event in ledger:
        events.setdefault((event["job"], event["attempt"]), []).append(event)
    names = ("started_s", "stopping_since_s", "ended_s", "outcome", "exit_code")
    found = [
        Run(
            job,
            one["attempt"],
            **{name: one[name] for name in names},
            events=tuple(events.get((job, one["attempt"]), ())),
        )
        for job, all_of_job in attempts.items()
        for one in all_of_job
        if one["started_s"] is not None
    ]
    return sorted(found, key=lambda run: run.started_s)


def tell_machine(findings: Findings, ledger: Sequence[Mapping[str, Any]]) -> None:
    """What the trainings ran on."""
    found = next(event for event in ledger if event["what"] == "device")
    python = platform.python_version()
    findings.tell("device", f"{found['name']}, torch {found['torch']}, Python {python}")


# ── sharing ──────────────────────────────────────────────────────────────────────────────────────


def tell_shares(
    findings: Findings,
    runs: Sequence[Run],
    weights: Mapping[str, float],
    window_s: tuple[float, float],
    round_s: float,
) -> None:
    """Device time and steps of each job against its weight."""
    start_s, end_s = window_s
    held_s, steps = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0)
    for run in runs:
        until_s = end_s if run.ended_s is None else min(run.ended_s, end_s)
        held_s[run.job] += max(until_s - max(run.started_s, start_s), 0.0)
        steps[run.job] += sum(start_s <= moment <= end_s for moment in run.moments("step"))
    whole_s, all_steps, all_weights = end_s - start_s, sum(steps.values()), sum(weights.values())
    findings.facts["shares"] = {"whole_s": whole_s, "held_s": held_s, "steps": steps}
    for job, weight in weights.items():
        share = weight / all_weights
        is_fair = abs(held_s[job] - share * whole_s) <= SHARE_LIMIT_ROUNDS * round_s
        findings.tell(
            f"job {job}, share {share:.0%}: device time, steps",
            f"{held_s[job]:.0f} s ({held_s[job] / whole_s:.0%}), "
            f"{steps[job]} ({steps[job] / max(all_steps, 1):.0%})",
            holds=is_fair and steps[job] > 0,
        )


def tell_no_double(
    findings: Findings, runs: Sequence[Run], ledger: Sequence[Mapping[str, Any]]
) -> None:
    """One at a time, by the lock that each training takes and by the records of the service."""
    num_doubles = sum(event["what"] == "double" for event in ledger)
    num_overlaps = sum(
        run.ended_s is None or run.ended_s > then.started_s
        for run, then in itertools.pairwise(runs)
    )
    findings.tell(
        f"device held by two at once, of {len(runs)} attempts (lock, records)",
        f"{num_doubles}, {num_overlaps}",
        holds=num_doubles == 0 and num_overlaps == 0,
    )


# ── switches ─────────────────────────────────────────────────────────────────────────────────────


def switches(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Seconds of each part of each change from one preempted job to the next."""
    pairs = itertools.pairwise(runs)
    return [
        {"from": f"{old.job}-{old.attempt}", "to": f"{new.job}-{new.attempt}", **_parts(old, new)}
        for old, new in pairs
        if old.was_preempted and old.moments("step") and old.moments("saved")
        and new.moments("step")
    ]  # fmt: skip


def _parts(old: Run, new: Run) -> dict[str, float]:
    assert old.ended_s is not None, "what was preempted has ended"
    moments = [
        old.moments("step")[-1],
        old.moments("saved")[-1],
        old.ended_s,
        *(new.moments(what)[0] for what in ("process", "imported", "device", "model", "loaded")),
        new.moments("step")[0] - step_s(new),
    ]
    between = (after - before for before, after in itertools.pairwise(moments))
    return dict(zip(PARTS, between, strict=True))


def step_s(run: Run) -> float:
    """A usual step; 0 where there were too few to tell."""
    moments = run.moments("step")
    between = [after - before for before, after in itertools.pairwise(moments)]
    return statistics.median(between) if between else 0.0


def tell_switches(
    findings: Findings, runs: Sequence[Run], whole_s: float, usual_turn_s: float
) -> None:
    """What changes from one job to the next cost."""
    found = switches(runs)
    findings.facts["switches"] = found
    trained = [run for run in runs if run.moments("step") and run.ended_s is not None]
    stopped = [run for run in trained if run.stopping_since_s is not None]
    num_clean = sum(run.was_preempted for run in stopped)
    findings.tell(
        "attempts stopped by rounds, those that saved and left with exit code 0",
        f"{len(stopped)}, {num_clean}",
        holds=num_clean == len(stopped),
    )
    if not found:
        findings.tell("changes from one job to the next", "0", holds=False)
        return
    lost_s = [sum(one[name] for name in PARTS) for one in found]
    median_s = statistics.median(lost_s)
    findings.tell(
        f"lost per change of jobs, of {len(found)}, median and most",
        f"{median_s:.1f} s, {max(lost_s):.1f} s",
    )
    parts = (f"{name} {statistics.median(one[name] for one in found):.2f}" for name in PARTS)
    findings.tell("its parts, medians in seconds", ", ".join(parts))
    findings.tell(f"lost by changes, of {whole_s:.0f} s", f"{sum(lost_s) / whole_s:.0%}")
    findings.tell(
        f"the same at the default round, with turns of {usual_turn_s:.0f} s or more",
        f"{median_s / usual_turn_s:.1%} or less",
    )


# ── losses and memory ────────────────────────────────────────────────────────────────────────────


def tell_losses(
    findings: Findings,
    ledger: Sequence[Mapping[str, Any]],
    jobs: Sequence[str],
    alone: str,
    least_preemptions: Mapping[str, int],
) -> None:
    """Losses of jobs that were stopped in between against those of one that never was.

    A step that was done twice, since it came after the checkpoint, counts twice.
    """
    expected = {one["step"]: one["loss"] for one in ledger if _is_step(one, alone)}
    steps = sorted(expected)
    findings.facts["losses"] = {str(step): expected[step] for step in steps[::10]}
    for job in jobs:
        mine = [one for one in ledger if _is_step(one, job) and one["step"] in expected]
        worst = max(
            (abs(one["loss"] - expected[one["step"]]) / abs(expected[one["step"]]) for one in mine),
            default=float("inf"),
        )
        num_preemptions = len({one["attempt"] for one in mine}) - 1
        findings.tell(
            f"job {job} against the run alone: steps compared, restarts among them (at least "
            f"{least_preemptions[job]}), largest relative difference of the loss "
            f"(limit {LOSS_LIMIT:g})",
            f"{len(mine)}, {num_preemptions}, {worst:.2g}",
            holds=worst <= LOSS_LIMIT and num_preemptions >= least_preemptions[job],
        )
    if steps:
        first, last = expected[steps[0]], expected[steps[-1]]
        findings.tell("loss of the run alone, first and last step", f"{first:.3f}, {last:.3f}")


def _is_step(event: Mapping[str, Any], job: str) -> bool:
    return bool(event["what"] == "step" and event["job"] == job)


def tell_memory(findings: Findings, runs: Sequence[Run]) -> None:
    """What each process found taken when it started, against the first of all."""
    found = [run.fact("device", "used_bytes") for run in runs]
    at_work = [run.fact("memory", "used_bytes") for run in runs]
    found_bytes = [one for one in found if one is not None]
    most_bytes = max((one for one in at_work if one is not None), default=None)
    if not found_bytes or most_bytes is None:
        findings.tell("memory of the device at each start", "not measured: no GPU")
        return
    findings.facts["found_bytes"] = found_bytes
    extra_bytes = max(found_bytes) - found_bytes[0]
    findings.tell(
        f"memory taken when an attempt starts: first, most of {len(found_bytes)}; while one trains",
        f"{_mib(found_bytes[0])}, {_mib(max(found_bytes))}; {_mib(most_bytes)}",
        holds=extra_bytes <= MEMORY_LIMIT_BYTES and most_bytes > found_bytes[0] + extra_bytes,
    )


def tell_saves(findings: Findings, ledger: Sequence[Mapping[str, Any]]) -> None:
    """Checkpoints of the jobs that have a lease, and of the one without."""
    saves = [event for event in ledger if event["what"] == "saved"]
    if not saves:
        return
    seconds = [event["seconds"] for event in saves]
    findings.tell(
        f"a checkpoint, of {len(saves)}: size, seconds to write it, median and most",
        f"{_mib(saves[0]['size_bytes'])}, {statistics.median(seconds):.2f}, {max(seconds):.2f}",
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
