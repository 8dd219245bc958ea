"""Limits of the search: the range of parallel configs that planners try."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.transformer.parallel_config import RECOMPUTES, SCHEDULES, Recompute, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Range of the parallel configs to try; a field in ``fixed`` has that one value in all of
    them."""

    max_tensor: int
    """Largest tensor degree: the devices of one host, unless the user asks for more."""
    max_context: int = 16
    max_microbatch: int = 64
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    pipelined_zeros: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that are tried in configs with a pipeline."""
    fixed: tuple[tuple[str, int], ...] = ()
    """Pairs of an integer field of `ParallelConfig` and its value."""

    def allowed(self, name: str, values: list[int]) -> list[int]:
        """Return the values that may be tried for a field: all, or only the fixed one."""
        # A fixed value outside of the possible ones leaves nothing to try.
        wanted = dict(self.fixed).get(name)
        return values if wanted is None else [value for value in values if value == wanted]
