"""The one place that reads the environment."""

from __future__ import annotations

import os


def debug() -> bool:
    """Whether unexpected errors show their traceback (``HOCKET_DEBUG=1``)."""
    return os.environ.get("HOCKET_DEBUG", "") not in ("", "0")
