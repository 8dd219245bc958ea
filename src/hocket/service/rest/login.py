"""Routes that log a browser in by a token or a login link, and log it out."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from hocket.service.credentials import Credentials
from hocket.service.page.templating import render
from hocket.service.tokens import COOKIE_AGE_S, Holder

router = APIRouter(include_in_schema=False)


@router.get("/login")
def show_login(request: Request) -> Response:
    """Show the login form; a valid login link leads to the page at once."""
    code = request.query_params.get("code")
    if code is None:
        return HTMLResponse(render("login.html", is_wrong="wrong" in request.query_params))
    credentials: Credentials = request.app.state.credentials
    holder = credentials.tokens.use_link(code)
    return RedirectResponse("/login?wrong=1", 303) if holder is None else _let_in(request, holder)


@router.post("/login")
async def log_in(request: Request) -> Response:
    """Log in by the form field ``token``; a wrong one leads back to the form."""
    credentials: Credentials = request.app.state.credentials
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=10)
    holder = credentials.tokens.holder_of(fields.get("token", [""])[0].strip())
    return RedirectResponse("/login?wrong=1", 303) if holder is None else _let_in(request, holder)


def _let_in(request: Request, holder: Holder) -> Response:
    credentials: Credentials = request.app.state.credentials
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        credentials.cookie_name,
        credentials.tokens.make_cookie(holder),
        max_age=COOKIE_AGE_S,
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def log_out(request: Request) -> Response:
    """Revoke the cookie, here and in the browser."""
    credentials: Credentials = request.app.state.credentials
    credentials.tokens.forget_cookie(credentials.cookie_in(request.headers.getlist("cookie")))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(credentials.cookie_name, httponly=True, samesite="strict")
    return answer
