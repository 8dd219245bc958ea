"""The loops of a step over all jobs and devices, compiled; imported where they are run."""

from __future__ import annotations


def kernels_are_compiled() -> bool:
    """Whether the next round starts at once instead of compiling first."""
    from hocket.fleet.rounds.kernels.count import count
    from hocket.fleet.rounds.kernels.play import play
    from hocket.fleet.rounds.kernels.release import can_start, take_away
    from hocket.kernels import is_compiled

    return is_compiled(count, play, can_start, take_away)
