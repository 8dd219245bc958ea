"""Refusals of the service, each with its HTTP status.

UsageError
├── NotFoundError      404  there is no such job, attempt or log
├── ForbiddenError     403  the job is another user's, or the token's role does not permit it
├── ConflictError      409  the job has changed since, or has ended
├── StaleAttemptError  409  the attempt does not hold the job, or its token is missing or wrong
└── KeyReusedError     422  the idempotency key belongs to another job
RunError
└── UnavailableError   503  nothing was changed: the disk is full, or the service shuts down
    └── BusyError      503  too many requests at once
"""

from __future__ import annotations

from hocket.base.errors import RunError, UsageError


class NotFoundError(UsageError):
    """There is no such job, attempt or log."""

    code = "not-found"


class ForbiddenError(UsageError):
    """The token is valid, but its role or owner does not allow this."""

    code = "forbidden"


class ConflictError(UsageError):
    """The request does not fit the present state of the job."""

    code = "conflict"


class StaleAttemptError(UsageError):
    """The attempt has ended, or its token is wrong: it may neither report nor commit."""

    code = "stale-attempt"


class KeyReusedError(UsageError):
    """An idempotency key was sent a second time, with another job."""

    code = "key-reused"


class UnavailableError(RunError):
    """The service cannot execute the request now; nothing was changed, and a retry is safe."""

    code = "unavailable"


class BusyError(UnavailableError):
    """Too many requests at once; a retry after a moment succeeds."""

    code = "busy"
