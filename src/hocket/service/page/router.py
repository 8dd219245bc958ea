"""Routes of the live page. Whoever may ask was checked before; see `hocket.service.rest.guard`.

/              the page; with the fields of its form also the answer to "what if"
/live          its changing parts, which the script puts in place
/what-if       the answer alone
/jobs/{number} one job
/login         the form that the token is given to
/static/...    style sheet, script, icon
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from hocket.errors import HocketError, UsageError
from hocket.fleet.explain import Explanation, explain
from hocket.fleet.forecast import at_moment
from hocket.fleet.rounds.state import State
from hocket.service.page.foresight import Foresight
from hocket.service.page.job import MAX_LOG_BYTES, JobPage, job_page
from hocket.service.page.recent import Recent
from hocket.service.page.rendering import live_page, window_s
from hocket.service.page.shown import LivePage
from hocket.service.page.templating import render, static_files
from hocket.service.page.what_if import Answer, WhatIfForm, answer_of, is_asked, what_if_form
from hocket.service.records import ENDED, JobRecord

if TYPE_CHECKING:
    from hocket.service.daemon.daemon import Daemon

_MAX_FIELDS = 200
_WAIT_S = 5.0
_KEEP_S = 3600


def page_router(daemon: Daemon) -> APIRouter:
    """The page of a daemon."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    recent, foresight, asking = Recent(daemon), Foresight(), threading.Lock()

    def page_now() -> LivePage:
        state = _state_now(daemon)
        lately = recent.look(state, state.time_s - window_s(state))
        return live_page(state, lately, foreseen=foresight.of(state), trouble=daemon.trouble)

    @router.get("/")
    def show_fleet(request: Request) -> HTMLResponse:
        form = _form(daemon, asking, _fields(request))
        return HTMLResponse(render("fleet.html", page=page_now(), form=form))

    @router.get("/live")
    def show_live() -> HTMLResponse:
        return HTMLResponse(render("fragment.html", page=page_now()))

    @router.get("/what-if")
    def show_answer(request: Request) -> HTMLResponse:
        form = _form(daemon, asking, _fields(request))
        return HTMLResponse(render("what_if.html", form=form))

    @router.get("/jobs/{number}")
    def show_job(number: str) -> HTMLResponse:
        try:
            return HTMLResponse(render("job.html", page=_job_now(daemon, number)))
        except UsageError as error:
            page = render("error.html", message=error.message, hint=error.hint)
            return HTMLResponse(page, status_code=404)

    @router.get("/login")
    def show_login(request: Request) -> HTMLResponse:
        return HTMLResponse(render("login.html", is_wrong="wrong" in request.query_params))

    @router.get("/static/{name}")
    def show_file(name: str) -> Response:
        if name not in static_files():
            return HTMLResponse(render("error.html", message="Not found", hint=""), 404)
        content, kind = static_files()[name]
        headers = {"cache-control": f"max-age={_KEEP_S}"}
        return Response(content, media_type=kind, headers=headers)

    return router


def _state_now(daemon: Daemon) -> State:
    return at_moment(daemon.state, time.time())


def _fields(request: Request) -> dict[str, str]:
    return dict(request.query_params.multi_items()[:_MAX_FIELDS])


def _form(daemon: Daemon, asking: threading.Lock, fields: dict[str, str]) -> WhatIfForm:
    state = _state_now(daemon)
    if not is_asked(fields):
        return what_if_form(state, fields, None)
    # One at a time: an answer about a large fleet takes a core for a second or two.
    if not asking.acquire(timeout=_WAIT_S):
        busy = Answer(sentence="Another question is being answered; try again.", is_error=True)
        return what_if_form(state, fields, busy)
    try:
        return what_if_form(state, fields, answer_of(state, fields))
    finally:
        asking.release()


def _job_now(daemon: Daemon, number: str) -> JobPage:
    if not (number.isascii() and number.isdigit() and len(number) < 16):
        raise UsageError("There is no such job", hint="Jobs have numbers.")
    record = daemon.job(int(number))
    state = _state_now(daemon)
    explanation, done_steps = _foreseen(state, record)
    return job_page(
        record,
        max(time.time(), state.time_s),
        explanation=explanation,
        done_steps=done_steps,
        attempts=daemon.attempts(record.number),
        checkpoints=daemon.checkpoints(record.number),
        log=_last_output(daemon, record),
    )


def _foreseen(state: State, record: JobRecord) -> tuple[Explanation | None, float | None]:
    """Why a job that has not ended waits, and how far it should be."""
    if record.status in ENDED:
        return None, None
    try:
        row = state.row_of(record.number)
        return explain(state, record.number), float(state.jobs.rows["done_steps"][row])
    except HocketError:
        # For the state it has ended, or did between the two looks.
        return None, None


def _last_output(daemon: Daemon, record: JobRecord) -> bytes:
    try:
        path = daemon.log_file(record.number, record.attempt)
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - MAX_LOG_BYTES, 0))
            return file.read(MAX_LOG_BYTES)
    except (OSError, HocketError):
        return b""
