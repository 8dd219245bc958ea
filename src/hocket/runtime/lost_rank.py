"""Errors of a rank that only say that another one is gone, so that it is not the root cause."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.base.errors import RunError
from hocket.processes.root_cause import CONSEQUENCE

_SIGNS = ("connection closed", "connection reset", "broken pipe", "remote process exited")
"""Messages of gloo and NCCL where another rank is gone."""


class CommunicationError(RunError):
    """Another rank went away."""

    code = CONSEQUENCE


def lost_another(error: BaseException) -> bool:
    """True if an error, or its cause, comes from a connection that ended."""
    texts = [f"{type(found).__name__} {found}".lower() for found in _causes(error)]
    return any(sign in text for text in texts for sign in _SIGNS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
