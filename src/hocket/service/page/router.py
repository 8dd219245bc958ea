"""Routes of the live page. Whoever may ask was checked before; see `hocket.service.rest.auth`.

/              the page; with the fields of its form also the answer to "what if"
/live          its changing parts, which the script puts in place
/what-if       the answer alone
/jobs/{number} one job; POST to /cancel, /pause or /resume below it changes the job
/static/...    CSS, script, icon
"""

from __future__ import annotations

import contextlib
import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from hocket.base.errors import HocketError, UsageError
from hocket.base.units import format_percent, words_for_seconds
from hocket.fleet.explain import Explanation
from hocket.fleet.forecast import Forecast, at_moment
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import ENDED as STATE_ENDED
from hocket.fleet.rounds.state import PAUSED, WAITING, FleetState
from hocket.service.daemon.commands import Change
from hocket.service.daemon.service_state import phase_of
from hocket.service.errors import ForbiddenError, NotFoundError, UnavailableError
from hocket.service.forecasts.forecaster import FleetForecaster
from hocket.service.page.moments import ago, clock
from hocket.service.page.recent import recent_history
from hocket.service.page.rendering import live_page, named, window_s
from hocket.service.page.shown import JobName, Listing, LivePage, Row, Stat
from hocket.service.page.templating import render, static_files
from hocket.service.page.what_if import WhatIfForm, answer_of, is_asked, what_if_form
from hocket.service.records import (
    ENDED,
    AttemptRecord,
    CheckpointRecord,
    JobRecord,
    ending_of,
)
from hocket.service.tokens import Holder
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.wording import sentence

if TYPE_CHECKING:
    from hocket.service.daemon.daemon import Daemon


# The page of one job: status, explanation, attempts, checkpoints and last output.

MAX_ATTEMPTS = 30
MAX_CHECKPOINTS = 10
MAX_LOG_LINES = 100
MAX_LOG_BYTES = 64 * 1024
# Longer lines of output are cut.
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
class JobPage:
    """All that the page of a job shows."""

    job: JobName
    status: str
    sentence: str
    stats: tuple[Stat, ...]
    command: str
    folder: str
    attempts: Listing[AttemptRow]
    checkpoints: Listing[CheckpointRecord]
    now_s: float
    log: str
    has_log: bool
    changes: tuple[str, ...]
    """Changes that the user may request; empty for a job that has ended."""


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
    text = explanation.sentence if explanation else ending_of(record)
    command = (*record.spec.command, *(record.spec.resume if record.attempt > 1 else ()))
    return JobPage(
        job=named(record),
        status=record.status,
        sentence=sentence(inert(text, LONGEST_SENTENCE)),
        stats=_stats(record, now_s, record.done_steps if done_steps is None else done_steps),
        command=inert(shlex.join(command), LONGEST_SENTENCE),
        folder=inert(record.spec.folder or "a folder of its own", LONGEST_SENTENCE),
        attempts=_newest([_attempt(one, now_s) for one in attempts], MAX_ATTEMPTS),
        checkpoints=_newest(list(checkpoints), MAX_CHECKPOINTS),
        now_s=now_s,
        log=last_lines(log or b""),
        has_log=bool(log),
        changes=changes,
    )


def last_lines(data: bytes) -> str:
    """The end of an output, without control characters that affect a page or a terminal."""
    text = data[-MAX_LOG_BYTES:].decode("utf-8", "replace")
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(
        inert(line.rstrip("\r").rpartition("\r")[2].expandtabs(), _LONGEST_LINE)
        for line in lines[-MAX_LOG_LINES - 1 :]
    ).rstrip("\n")


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


class Foresight:
    """Expected starts of waiting jobs, computed once per change of the fleet."""

    def __init__(self, forecaster: FleetForecaster | None = None) -> None:
        self._forecaster = forecaster or FleetForecaster()
        self._newest: tuple[object, Forecast | None] = (None, None)

    def of(self, state: FleetState) -> Forecast | None:
        """Forecast of the starts; None if no job waits.

        While the forecaster is busy, the previous forecast is returned.
        """
        rows = state.jobs.rows
        waiting = rows["number"][rows["phase"] == WAITING]
        if not len(waiting):
            return None
        key = (state.round_number, waiting.tobytes(), state.is_up.tobytes())
        if key != self._newest[0]:
            # While the forecaster is busy, the page shows the forecast that it made last.
            with contextlib.suppress(UnavailableError):
                found = self._forecaster.starts(state, state.time_s, waiting.tolist())
                self._newest = (key, found)
        return self._newest[1]


# Results that many viewers request at once are computed once for all of them.

Made = TypeVar("Made")


class Shared(Generic[Made]):
    """Result of ``make``, computed by one thread at a time.

    No caller gets a result whose computation began before the call, so a user sees changes that
    were made just now. Callers that come during a computation share the next one.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._num_begun = 0
        self._is_making = False
        self._newest: tuple[int, Made] | None = None

    def get(self) -> Made:
        """A value whose computation began after this call."""
        with self._changed:
            last_begun = self._num_begun
            while self._is_making:
                self._changed.wait()
                if self._newest is not None and self._newest[0] > last_begun:
                    return self._newest[1]
            self._is_making = True
            self._num_begun += 1
            mine = self._num_begun
        try:
            made = self._make()
            self._newest = (mine, made)
            return made
        finally:
            with self._changed:
                self._is_making = False
                self._changed.notify_all()


# Fields of a query that are read at most, and the time for which browsers keep static files.
_MAX_FIELDS = 200
_KEEP_S = 3600


def page_router(daemon: Daemon, forecaster: FleetForecaster) -> APIRouter:
    """The page of a daemon."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    foresight = Foresight(forecaster)

    def page_now() -> LivePage:
        state = _state_now(daemon)
        lately = recent_history(daemon.store, state.time_s - window_s(state))
        return live_page(state, lately, expected=foresight.of(state), trouble=daemon.trouble)

    def fleet_now(fields: dict[str, str]) -> str:
        return render("fleet.html", page=page_now(), form=_form(daemon, forecaster, fields))

    # Hundreds of people may look at the same moment, such as when a round begins.
    fleet = Shared(lambda: fleet_now({}))
    fragment = Shared(lambda: render("fragment.html", page=page_now()))

    @router.get("/")
    def show_fleet(request: Request) -> HTMLResponse:
        fields = _fields(request)
        return HTMLResponse(fleet_now(fields) if is_asked(fields) else fleet.get())

    @router.get("/live")
    def show_live() -> HTMLResponse:
        return HTMLResponse(fragment.get())

    @router.get("/what-if")
    def show_answer(request: Request) -> HTMLResponse:
        form = _form(daemon, forecaster, _fields(request))
        return HTMLResponse(render("what_if.html", form=form))

    @router.get("/jobs/{number}")
    def show_job(number: str, request: Request) -> HTMLResponse:
        try:
            holder: Holder = request.scope["hocket.holder"]
            page = _job_now(daemon, forecaster, _job_number(number), holder)
        except UsageError as error:
            return _refusal(error)
        return HTMLResponse(render("job.html", page=page))

    @router.post("/jobs/{number}/{change}")
    def change_job(number: str, change: Change, request: Request) -> Response:
        try:
            holder: Holder = request.scope["hocket.holder"]
            record = daemon.change(change, _job_number(number), only_of=holder.limited_to)
        except (UsageError, UnavailableError) as error:
            return _refusal(error)
        # A redirect: reloading the page must not repeat the change.
        return RedirectResponse(f"/jobs/{record.number}", 303)

    @router.get("/static/{name}")
    def show_file(name: str) -> Response:
        if name not in static_files():
            return HTMLResponse(render("error.html", message="Not found", hint=""), 404)
        content, kind = static_files()[name]
        headers = {"cache-control": f"max-age={_KEEP_S}"}
        return Response(content, media_type=kind, headers=headers)

    return router


def _refusal(error: HocketError) -> HTMLResponse:
    if isinstance(error, UnavailableError):
        status = 503
    else:
        known: dict[type[HocketError], int] = {NotFoundError: 404, ForbiddenError: 403}
        status = known.get(type(error), 409)
    page = render("error.html", message=sentence(inert(error.message)), hint=error.hint)
    return HTMLResponse(page, status_code=status)


def _state_now(daemon: Daemon) -> FleetState:
    return at_moment(daemon.state, daemon.now_s())


def _fields(request: Request) -> dict[str, str]:
    return dict(request.query_params.multi_items()[:_MAX_FIELDS])


def _form(daemon: Daemon, forecaster: FleetForecaster, fields: dict[str, str]) -> WhatIfForm:
    state = _state_now(daemon)
    answer = answer_of(state, fields, forecaster) if is_asked(fields) else None
    return what_if_form(state, fields, answer)


def _job_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise NotFoundError("There is no such job", hint="Jobs have numbers.")
    return int(text)


def _job_now(daemon: Daemon, forecaster: FleetForecaster, number: int, holder: Holder) -> JobPage:
    record = daemon.job(number)
    state = _state_now(daemon)
    explanation, done_steps = _expected(state, record, forecaster)
    return job_page(
        record,
        daemon.now_s(),
        explanation=explanation,
        done_steps=done_steps,
        attempts=daemon.store.attempts(record.number),
        checkpoints=daemon.store.checkpoints(record.number),
        log=_last_output(daemon, record),
        changes=_changes(state, record, holder),
    )


def _changes(state: FleetState, record: JobRecord, holder: Holder) -> tuple[str, ...]:
    """Changes that a user may make to a job; none where it has ended, or is about to."""
    phase = phase_of(state, record.number)
    is_allowed = holder.may_change and holder.limited_to in (None, record.owner)
    if not is_allowed or record.status in ENDED or phase == STATE_ENDED:
        return ()
    return ("resume" if phase == PAUSED else "pause", "cancel")


def _expected(
    state: FleetState, record: JobRecord, forecaster: FleetForecaster
) -> tuple[Explanation | None, float | None]:
    """Explanation of a job that has not ended, and its expected progress."""
    if record.status in ENDED:
        return None, None
    try:
        done_steps = float(state.jobs.rows["done_steps"][state.row_of(record.number)])
        return _explained(state, record.number, forecaster), done_steps
    except UsageError:
        # The job has ended between the lookup of its record and that of the state.
        return None, None


def _explained(state: FleetState, number: int, forecaster: FleetForecaster) -> Explanation:
    try:
        return forecaster.explain(state, state.time_s, number)
    except UnavailableError:
        # Without a forecast the reason why it waits is known, but not when it starts.
        return Explanation(
            number=number, sentence=f"job {number} {reason(state, number)}", evidence={}
        )


def _last_output(daemon: Daemon, record: JobRecord) -> bytes:
    try:
        log = daemon.log(record.number, record.attempt)
        return log.read(max(log.size_bytes() - MAX_LOG_BYTES, 0), MAX_LOG_BYTES)
    except (OSError, HocketError):
        return b""
