"""The route of past rounds: what was decided then, out of the stored events.

Events are numbered without gaps and rounds rise with them, so a round is found by bisection: each
probe reads on from the middle to the next beginning of a round. O(log events) short reads.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from hocket.service.daemon.daemon import Daemon
from hocket.service.errors import NotFoundError
from hocket.service.records import EventRecord
from hocket.service.rest.bodies import MAX_NUMBER, EventBody, RoundBody, event_body
from hocket.service.rest.context import FOR_USERS, TheDaemon
from hocket.service.rest.problems import answers

router = APIRouter(prefix="/v1/rounds", tags=["fleet"], dependencies=FOR_USERS)

MAX_EVENTS = 5000
_PAGE = 500


@router.get("/{round}", responses=answers(404))
def get_round(round: Annotated[int, Path(ge=0, le=MAX_NUMBER)], daemon: TheDaemon) -> RoundBody:
    """Events from the beginning of a round to that of the next."""
    start = _find(daemon, round)
    events: list[EventBody] = []
    ended_s = None
    after = start.sequence
    while ended_s is None and len(events) < MAX_EVENTS:
        page = daemon.events(after, _PAGE)
        if not page:
            break
        for event in page:
            if event.kind == "round":
                ended_s = event.time_s
                break
            events.append(event_body(event))
        after = page[-1].sequence
    return RoundBody(
        round=round,
        started_s=start.time_s,
        ended_s=ended_s,
        events=events,
        is_cut_off=ended_s is None and len(events) >= MAX_EVENTS,
    )


def _find(daemon: Daemon, number: int) -> EventRecord:
    low, high = 0, daemon.last_event()
    # Rounds begun up to low are earlier; the first one begun after high is this one or later.
    while low < high:
        middle = (low + high) // 2
        event = _next_round(daemon, middle, high)
        if event is None or int(event.detail.get("round", -1)) >= number:
            high = middle
        else:
            low = event.sequence
    event = _next_round(daemon, low, daemon.last_event())
    if event is None or event.detail.get("round") != number:
        raise NotFoundError(f"there is no record of round {number}")
    return event


def _next_round(daemon: Daemon, after: int, last: int) -> EventRecord | None:
    """The first beginning of a round after an event and no later than another."""
    while after < last and (page := daemon.events(after, _PAGE)):
        for event in page:
            if event.kind == "round":
                return event
        after = page[-1].sequence
    return None
