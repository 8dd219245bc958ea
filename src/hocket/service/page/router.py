"""Routes of the live page. Whoever may ask was checked before; see `hocket.service.rest.guard`.

/              the page; with the fields of its form also the answer to "what if"
/live          its changing parts, which the script puts in place
/what-if       the answer alone
/jobs/{number} one job; POST to /cancel, /pause or /resume below it changes the job
/static/...    style sheet, script, icon
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from hocket.base.errors import HocketError, UsageError
from hocket.fleet.explain import Explanation
from hocket.fleet.forecast import at_moment
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import ENDED as STATE_ENDED
from hocket.fleet.rounds.state import PAUSED, FleetState
from hocket.service.credentials import Credentials, form_token
from hocket.service.daemon.world import phase_of
from hocket.service.errors import ForbiddenError, NotFoundError, UnavailableError
from hocket.service.outlook.outlook import FleetOutlook
from hocket.service.page.foresight import Foresight
from hocket.service.page.job import MAX_LOG_BYTES, JobPage, job_page
from hocket.service.page.recent import Recent
from hocket.service.page.rendering import live_page, window_s
from hocket.service.page.shared import Shared
from hocket.service.page.shown import LivePage
from hocket.service.page.templating import render, static_files
from hocket.service.page.what_if import WhatIfForm, answer_of, is_asked, what_if_form
from hocket.service.records import ENDED, JobRecord
from hocket.service.tokens import Holder
from hocket.view.names import inert
from hocket.view.wording import sentence

if TYPE_CHECKING:
    from hocket.service.daemon.daemon import Daemon

_MAX_FIELDS = 200
_KEEP_S = 3600


def page_router(daemon: Daemon, outlook: FleetOutlook) -> APIRouter:
    """The page of a daemon."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    recent, foresight = Recent(daemon), Foresight(outlook)

    def page_now() -> LivePage:
        state = _state_now(daemon)
        lately = recent.look(state, state.time_s - window_s(state))
        return live_page(state, lately, foreseen=foresight.of(state), trouble=daemon.trouble)

    def fleet_now(fields: dict[str, str]) -> str:
        return render("fleet.html", page=page_now(), form=_form(daemon, outlook, fields))

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
        form = _form(daemon, outlook, _fields(request))
        return HTMLResponse(render("what_if.html", form=form))

    @router.get("/jobs/{number}")
    def show_job(number: str, request: Request) -> HTMLResponse:
        credentials: Credentials = request.app.state.credentials
        cookie = credentials.cookie_in(request.headers.getlist("cookie"))
        try:
            holder: Holder = request.scope["hocket.holder"]
            page = _job_now(daemon, outlook, _job_number(number), holder)
        except UsageError as error:
            return _refusal(error)
        return HTMLResponse(render("job.html", page=page, form_token=form_token(cookie)))

    @router.post("/jobs/{number}/{change}")
    def change_job(number: str, change: str, request: Request) -> Response:
        changes = {"cancel": daemon.cancel, "pause": daemon.pause, "resume": daemon.resume}
        try:
            if change not in changes:
                raise NotFoundError(f"A job cannot be asked to {change}")
            holder: Holder = request.scope["hocket.holder"]
            record = changes[change](_job_number(number), only_of=holder.limited_to)
        except (UsageError, UnavailableError) as error:
            return _refusal(error)
        # Loading the answer again must not change anything again.
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


def _form(daemon: Daemon, outlook: FleetOutlook, fields: dict[str, str]) -> WhatIfForm:
    state = _state_now(daemon)
    answer = answer_of(state, fields, outlook) if is_asked(fields) else None
    return what_if_form(state, fields, answer)


def _job_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise NotFoundError("There is no such job", hint="Jobs have numbers.")
    return int(text)


def _job_now(daemon: Daemon, outlook: FleetOutlook, number: int, holder: Holder) -> JobPage:
    record = daemon.job(number)
    state = _state_now(daemon)
    explanation, done_steps = _foreseen(state, record, outlook)
    return job_page(
        record,
        daemon.now_s(),
        explanation=explanation,
        done_steps=done_steps,
        attempts=daemon.attempts(record.number),
        checkpoints=daemon.checkpoints(record.number),
        log=_last_output(daemon, record),
        changes=_changes(state, record, holder),
    )


def _changes(state: FleetState, record: JobRecord, holder: Holder) -> tuple[str, ...]:
    """What a user may do to a job; nothing where it has ended, or will when its processes have."""
    phase = phase_of(state, record.number)
    is_allowed = holder.may_change and holder.limited_to in (None, record.owner)
    if not is_allowed or record.status in ENDED or phase == STATE_ENDED:
        return ()
    return ("resume" if phase == PAUSED else "pause", "cancel")


def _foreseen(
    state: FleetState, record: JobRecord, outlook: FleetOutlook
) -> tuple[Explanation | None, float | None]:
    """Why a job that has not ended waits, and how far it should be."""
    if record.status in ENDED:
        return None, None
    try:
        done_steps = float(state.jobs.rows["done_steps"][state.row_of(record.number)])
        return _explained(state, record.number, outlook), done_steps
    except UsageError:
        # For the state it has ended, or did between the two looks.
        return None, None


def _explained(state: FleetState, number: int, outlook: FleetOutlook) -> Explanation:
    try:
        return outlook.explain(state, state.time_s, number)
    except UnavailableError:
        # Why it waits is known without looking ahead; when it starts is not.
        return Explanation(
            number=number, sentence=f"job {number} {reason(state, number)}", evidence={}
        )


def _last_output(daemon: Daemon, record: JobRecord) -> bytes:
    try:
        log = daemon.log(record.number, record.attempt)
        return log.read(max(log.size_bytes() - MAX_LOG_BYTES, 0), MAX_LOG_BYTES)
    except (OSError, HocketError):
        return b""
