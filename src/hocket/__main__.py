"""``python -m hocket`` and the command ``hocket``: run, and end by Ctrl-C at any time.

Only the standard library is imported before an interrupt is understood, so that it never shows a
traceback. An interrupt inside a destructor is swallowed by Python, which only reports it; it is
sent again.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in hocket/__init__.py
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = 130
_AGAIN_S = 0.02
"""After this long the destructor that swallowed an interrupt should be done."""


def main() -> None:
    """Run one command."""
    try:
        sys.unraisablehook = _report
        from hocket.cli import main as run

        run()
    except KeyboardInterrupt:
        # Anything that still runs may be half imported: say it and go.
        os.write(2, b"hocket: interrupted\n")
        os._exit(INTERRUPTED)


def _report(unraisable: Any) -> None:
    """As Python reports what it could not raise, but for an interrupt, which comes again."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import signal
    import threading

    # Not now: this runs inside of the destructor, which would swallow it again.
    target = threading.main_thread().ident
    timer = threading.Timer(_AGAIN_S, signal.pthread_kill, (target, signal.SIGINT))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
