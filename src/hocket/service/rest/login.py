"""Routes that turn the token into the cookie of a browser, and take it away again."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from hocket.service.rest.credentials import Credentials

router = APIRouter(include_in_schema=False)

_COOKIE_AGE_S = 30 * 24 * 3600


@router.post("/login")
async def log_in(request: Request) -> Response:
    """Take the form field ``token``; a wrong one leads back to the form."""
    credentials: Credentials = request.app.state.credentials
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=10)
    if not credentials.is_token(fields.get("token", [""])[0].strip()):
        return RedirectResponse("/login?wrong=1", 303)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        credentials.cookie_name,
        credentials.cookie_value,
        max_age=_COOKIE_AGE_S,
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def log_out(request: Request) -> Response:
    """Forget the cookie."""
    credentials: Credentials = request.app.state.credentials
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(credentials.cookie_name, httponly=True, samesite="strict")
    return answer
