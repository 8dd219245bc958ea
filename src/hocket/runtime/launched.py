"""A person's script as one rank: ``python -m hocket.runtime.launched``, started by `launch`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback

from hocket.base.errors import RunError
from hocket.processes.child import Parent, live
from hocket.runtime.lost import lost_another
from hocket.runtime.rank_output import name_lines


def run_script(parent: Parent) -> None:
    """Run the script with its arguments, as Python itself would."""
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    if int(os.environ["WORLD_SIZE"]) > 1:
        name_lines(int(os.environ["RANK"]))
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RunError(f"{script} ended with code {end.code}") from None
    except Exception as error:
        if lost_another(error):
            from hocket.runtime.ranks import CommunicationError

            raise CommunicationError(f"lost another rank: {error}") from error
        # Where it failed is told by the script's own lines, not by ours.
        traceback.print_exc()
        raise


if __name__ == "__main__":
    live(run_script)
