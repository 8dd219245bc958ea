"""Refusals of the service, each with the HTTP status that it becomes.

UsageError
├── NotFoundError      404  there is no such job
├── ForbiddenError     403  the job is another user's, or the token may not do that
├── ConflictError      409  the job has changed since, or has ended
├── StaleAttemptError  409  the attempt is not the one that holds the job, or proves nothing
└── KeyReusedError     422  the idempotency key belongs to another job
RunError
└── UnavailableError   503  nothing was changed: the disk is full, or the service ends
    └── BusyError      503  too many ask at once
"""

from __future__ import annotations

from hocket.base.errors import RunError, UsageError


class NotFoundError(UsageError):
    """There is no such job, attempt or log."""

    code = "not-found"


class ForbiddenError(UsageError):
    """The caller is known and may not do that."""

    code = "forbidden"


class ConflictError(UsageError):
    """The request does not fit the present state of the job."""

    code = "conflict"


class StaleAttemptError(UsageError):
    """The attempt has ended, or its token is wrong: it may neither report nor commit."""

    code = "stale-attempt"


class KeyReusedError(UsageError):
    """An idempotency key came again with another job."""

    code = "key-reused"


class UnavailableError(RunError):
    """The service cannot do it now; nothing was changed, and trying again is safe."""

    code = "unavailable"


class BusyError(UnavailableError):
    """Too many ask at once; whoever asks again in a moment is answered."""

    code = "busy"
