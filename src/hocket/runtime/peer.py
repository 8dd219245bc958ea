"""One transfer as a rank sees it."""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """What goes to or comes from which rank."""

    tensor: int
    rank: int
    whole: bool
    """True if the whole storage travels."""
    is_host: bool
    """True if it is in the memory of the host even on an accelerator."""
