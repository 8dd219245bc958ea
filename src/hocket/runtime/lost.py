"""Whether an error of a rank only tells that another one is gone, so that it is not to blame."""

from __future__ import annotations

from collections.abc import Iterator

_SIGNS = ("connection closed", "connection reset", "broken pipe", "remote process exited")
"""What gloo and NCCL say where another rank is gone."""


def lost_another(error: BaseException) -> bool:
    """True if an error, or what caused it, comes from a connection that ended."""
    texts = [f"{type(found).__name__} {found}".lower() for found in _causes(error)]
    return any(sign in text for text in texts for sign in _SIGNS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
