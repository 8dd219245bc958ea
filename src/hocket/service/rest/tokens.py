"""Routes of tokens: list, add and remove them, and make a login link."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from hocket.service.rest.bodies import (
    LinkBody,
    NewTokenBody,
    TokenBody,
    TokenList,
    TokenRequest,
)
from hocket.service.rest.context import FOR_USERS, TheDaemon, TheHolder, TheTokens
from hocket.service.rest.problems import answers

router = APIRouter(prefix="/v1", tags=["tokens"], dependencies=FOR_USERS)

PersonName = Annotated[str, Path(min_length=1, max_length=100)]


@router.get("/tokens", responses=answers())
def list_tokens(tokens: TheTokens) -> TokenList:
    """Names and roles of all tokens; the tokens themselves are not stored."""
    return TokenList(tokens=[TokenBody.model_validate(entry) for entry in tokens.people()])


@router.post("/tokens", status_code=201, responses=answers(409, 415))
def add_token(body: TokenRequest, tokens: TheTokens) -> NewTokenBody:
    """Create a token; it is shown only once."""
    token = tokens.add(body.name, role=body.role)
    return NewTokenBody(name=body.name, role=body.role, token=token)


@router.delete("/tokens/{name}", status_code=204, responses=answers(404))
def remove_token(name: PersonName, tokens: TheTokens) -> Response:
    """Revoke a token and the browser sessions that were opened with it."""
    tokens.remove(name)
    return Response(status_code=204)


@router.post("/login-links", status_code=201, responses=answers())
def make_login_link(tokens: TheTokens, holder: TheHolder, daemon: TheDaemon) -> LinkBody:
    """Make an address that logs a browser in as the caller, once and within ten minutes."""
    return LinkBody(url=f"{daemon.endpoint_url}/login?code={tokens.make_link(holder)}")
