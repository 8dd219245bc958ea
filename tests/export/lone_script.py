"""A script run in a rank, apart from the test module: a fork server imports this by its name."""

import contextlib
import io
import runpy
import sys


def run_without_us(tell, script, arguments):
    """What a script prints where hocket cannot be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "hocket"]:
        sys.modules[name] = None
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
