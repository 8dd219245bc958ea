"""Issue warnings that point at the user's own line, however deep in hocket they originate."""

from __future__ import annotations

import sys
import warnings


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn with the line of the first caller outside hocket."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, level)


def _is_ours(module: str) -> bool:
    # Context managers of hocket run inside contextlib, whose frames must be skipped too.
    return module.startswith("hocket.") or module in ("hocket", "contextlib")
