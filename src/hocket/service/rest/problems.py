"""Errors as problem details (RFC 9457), the same form for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hocket.base.errors import HocketError, InputFileError, RunError, UsageError
from hocket.base.fields import shown
from hocket.service.errors import ConflictError, ForbiddenError, NotFoundError, StaleAttemptError

MEDIA_TYPE = "application/problem+json"
# Errors of one request that are listed at most.
_MAX_ERRORS = 10
_RETRY_AFTER_S = "1"
_STATUS: tuple[tuple[type[HocketError], int], ...] = (
    (NotFoundError, 404),
    (ForbiddenError, 403),
    (ConflictError, 409),
    (StaleAttemptError, 409),
    (UsageError, 422),
    (InputFileError, 422),
    (RunError, 503),
)
"""Status by error class; the first match counts."""


class FieldProblem(BaseModel):
    """Error in one part of a request."""

    where: str = Field(description="Such as body.gang or query.limit")
    message: str


class ProblemDetails(BaseModel):
    """Problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str = Field(default="", description="Stable name of the kind of error")
    hint: str = Field(default="", description="What to do about it")
    errors: list[FieldProblem] = []


def problem(
    status: int,
    detail: str,
    *,
    code: str = "",
    hint: str = "",
    errors: list[FieldProblem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Make the response for an error."""
    title = HTTPStatus(status).phrase
    code = code or title.lower().replace(" ", "-").replace("'", "")
    body = ProblemDetails(
        title=title, status=status, detail=detail, code=code, hint=hint, errors=errors or []
    )
    # Escaped throughout: a request may hold characters that UTF-8 cannot write.
    content = json.dumps(body.model_dump()).encode()
    sent = {**({"retry-after": _RETRY_AFTER_S} if status == 503 else {}), **(headers or {})}
    return Response(content, status, media_type=MEDIA_TYPE, headers=sent)


class RefusedError(HocketError):
    """A request that is refused with a status of its own."""

    def __init__(self, status: int, message: str, *, code: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route for its OpenAPI entry; those of the middleware are added to all."""
    every = sorted({*statuses, 400, 401, 403, 413, 421, 422, 500, 503})
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in every
    }


def handle_errors(app: FastAPI) -> None:
    """Answer every error that routes raise with problem details."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HocketError, _known)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, str(error.detail), headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(entry["type"] == "json_invalid" for entry in found):
        return problem(400, "the body is no JSON")
    has_body = any(entry["loc"] == ("body",) and entry["type"] != "missing" for entry in found)
    if has_body and not _says_json(request.headers.get("content-type", "")):
        return problem(415, "the body must be JSON", hint="send Content-Type: application/json")
    fields = [
        FieldProblem(where=_place(entry["loc"]), message=str(entry["msg"]))
        for entry in found[:_MAX_ERRORS]
    ]
    detail = "; ".join(f"{field.where}: {field.message}" for field in fields[:3])
    return problem(422, detail or "the request is not understood", errors=fields)


def _says_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(part if len(part := str(entry)) <= 60 else shown(part) for entry in location)


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, HocketError)
    return problem(_status(error), error.message, code=error.code, hint=error.hint)


def _status(error: HocketError) -> int:
    if isinstance(error, RefusedError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
