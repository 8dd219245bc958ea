"""Limits of the search: which parallel configs are tried at all."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.transformer.parallel_config import RECOMPUTES, SCHEDULES, Recompute, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Configs to try. A field that is fixed (``fixed``) takes that value alone."""

    max_tensor: int
    """Largest tensor degree: the devices of one host unless a wider one is asked for."""
    max_context: int = 16
    max_microbatch: int = 64
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    pipelined_zeros: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that are tried where there is a pipeline."""
    fixed: tuple[tuple[str, int], ...] = ()
    """Pairs of a whole-number field of `ParallelConfig` and its value."""
    num_synthesised: int = 0
    """Of the best pipelines, how many get a schedule made for them; some seconds each."""

    def allowed(self, name: str, values: list[int]) -> list[int]:
        """Values that may be tried for a field: all, or only the one that it is fixed to."""
        wanted = dict(self.fixed).get(name)
        return values if wanted is None else [value for value in values if value == wanted]
