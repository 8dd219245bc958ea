"""The page of one job: what it does, why it waits, its attempts, checkpoints and last output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.base.units import format_percent, words_for_seconds
from hocket.fleet.explain import Explanation
from hocket.service.page.moments import ago, clock
from hocket.service.page.rendering import named
from hocket.service.page.shown import JobName, Listing, Row, Stat
from hocket.service.records import (
    ENDED,
    AttemptRecord,
    CheckpointRecord,
    JobRecord,
    ending_of,
)
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.wording import sentence

MAX_ATTEMPTS = 30
MAX_CHECKPOINTS = 10
MAX_LOG_LINES = 100
MAX_LOG_BYTES = 64 * 1024
_LONGEST_LINE = 2000


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt as it is shown."""

    attempt: int
    devices: str
    started: str
    started_at: str
    lasted: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One checkpoint as it is shown."""

    attempt: int
    step: str
    path: str
    committed: str


@dataclass(frozen=True, kw_only=True)
class JobPage:
    """All that the page of a job shows."""

    job: JobName
    status: str
    sentence: str
    stats: tuple[Stat, ...]
    command: str
    folder: str
    attempts: Listing[AttemptRow]
    checkpoints: Listing[CheckpointRow]
    log: str
    has_log: bool
    changes: tuple[str, ...]
    """What may be done to it; empty for one that has ended."""


def job_page(
    record: JobRecord,
    now_s: float,
    *,
    explanation: Explanation | None = None,
    done_steps: float | None = None,
    attempts: Sequence[AttemptRecord] = (),
    checkpoints: Sequence[CheckpointRecord] = (),
    log: bytes | None = None,
    changes: tuple[str, ...] = (),
) -> JobPage:
    """The page of a job; ``done_steps`` is how far it should be by now, ``log`` the end of what its
    newest attempt printed, ``changes`` the buttons."""
    told = explanation.sentence if explanation else ending_of(record)
    command = (*record.spec.command, *(record.spec.resume if record.attempt > 1 else ()))
    return JobPage(
        job=named(record),
        status=record.status,
        sentence=sentence(inert(told, LONGEST_SENTENCE)),
        stats=_stats(record, now_s, record.done_steps if done_steps is None else done_steps),
        command=inert(" ".join(_quoted(word) for word in command), LONGEST_SENTENCE),
        folder=inert(record.spec.folder or "a folder of its own", LONGEST_SENTENCE),
        attempts=_newest([_attempt(one, now_s) for one in attempts], MAX_ATTEMPTS),
        checkpoints=_newest([_checkpoint(one, now_s) for one in checkpoints], MAX_CHECKPOINTS),
        log=last_lines(log or b""),
        has_log=bool(log),
        changes=changes,
    )


def last_lines(data: bytes) -> str:
    """The end of an output, with nothing in it that steers a page or a terminal."""
    text = data[-MAX_LOG_BYTES:].decode("utf-8", "replace")
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(
        inert(line.rstrip("\r").rpartition("\r")[2].expandtabs(), _LONGEST_LINE)
        for line in lines[-MAX_LOG_LINES - 1 :]
    ).rstrip("\n")


def _quoted(word: str) -> str:
    return word if word and not set(word) & set(" \t\n'\"") else repr(word)


def _newest(rows: list[Row], most: int) -> Listing[Row]:
    return Listing(rows=tuple(reversed(rows[-most:])), num_more=max(len(rows) - most, 0))


def _stats(record: JobRecord, now_s: float, done_steps: float) -> tuple[Stat, ...]:
    spec = record.spec
    until_s = now_s if record.ended_s is None else record.ended_s
    progress = f"{done_steps:,.0f}"
    if spec.total_steps is not None:
        progress += f" of {spec.total_steps:,.0f}"
    part = format_percent(done_steps / spec.total_steps) if spec.total_steps else ""
    return (
        Stat(label="Status", value=record.status),
        Stat(
            label="Submitted",
            value=ago(now_s - record.submitted_s),
            note=clock(record.submitted_s),
        ),
        Stat(
            label="Took" if record.status in ENDED else "Has taken",
            value=words_for_seconds(max(until_s - record.submitted_s, 0.0)),
        ),
        Stat(label="Steps", value=progress, note=part),
        Stat(label="Devices", value=f"{spec.gang:,}", note="all together" if spec.gang > 1 else ""),
        Stat(
            label="Attempts",
            value=f"{record.attempt:,}",
            note=f"{record.failures:,} failed" if record.failures else "",
        ),
    )


def _attempt(attempt: AttemptRecord, now_s: float) -> AttemptRow:
    start_s = attempt.started_s
    end_s = now_s if attempt.ended_s is None else attempt.ended_s
    outcome = attempt.outcome
    if attempt.ended_s is None:
        outcome = f"is being stopped ({outcome})" if attempt.stopping_since_s else "runs"
        outcome = outcome if start_s is not None else "waits for its devices"
    elif attempt.exit_code is not None:
        outcome = f"{outcome}, exit code {attempt.exit_code}"
    shown = ", ".join(attempt.devices[:6]) + (", …" if len(attempt.devices) > 6 else "")
    return AttemptRow(
        attempt=attempt.attempt,
        devices=inert(shown),
        started="–" if start_s is None else ago(now_s - start_s),
        started_at="" if start_s is None else clock(start_s),
        lasted="–" if start_s is None else words_for_seconds(max(end_s - start_s, 0.0)),
        outcome=inert(outcome, LONGEST_SENTENCE),
    )


def _checkpoint(checkpoint: CheckpointRecord, now_s: float) -> CheckpointRow:
    return CheckpointRow(
        attempt=checkpoint.attempt,
        step=f"{checkpoint.step:,.0f}",
        path=inert(checkpoint.path, LONGEST_SENTENCE),
        committed=ago(now_s - checkpoint.committed_s),
    )
