"""Features of training programs: the schedules, ZeRO stages and modes that they have.

A plan is useless for a program that cannot run it. The search therefore keeps to the features of
the named program, or of the usual one where none is named. A schedule that the user requests and
that the program lacks is for ``hocket run`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hocket.base.errors import UsageError
from hocket.cost.parallel.softwares import DEFAULT_SOFTWARE
from hocket.plan.limits import Limits
from hocket.transformer import RECOMPUTES, SCHEDULES, Recompute, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Features of one training program."""

    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    pipelined_zeros: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that go together with a pipeline."""
    fixed: tuple[tuple[str, int], ...] = ()


_MEGATRON: tuple[ScheduleName, ...] = ("1f1b", "interleaved")
# With a pipeline it keeps weights and gradients whole until the end of the step.
_TITAN = Abilities(
    schedules=("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-v", "dualpipe-v"),
    zeros=(1, 2, 3), pipelined_zeros=(1,),
)  # fmt: skip
PROGRAMS = {
    # The distributed optimizer, selective recomputation and sequence parallelism came in 2022.
    "megatron-2021": Abilities(
        schedules=_MEGATRON, recomputes=("none", "full"), zeros=(0,),
        fixed=(("sequence_parallel", 0), ("context", 1)),
    ),
    "megatron-2022": Abilities(schedules=_MEGATRON, zeros=(0, 1), fixed=(("context", 1),)),
    # DeepSpeed's pipeline engine refuses to divide gradients, which it sums over microbatches.
    "megatron-deepspeed": Abilities(
        schedules=("1f1b",), pipelined_zeros=(0, 1), recomputes=("none", "full"),
        fixed=(("context", 1), ("sequence_parallel", 0)),
    ),
    "deepspeed-zero3": Abilities(
        schedules=("1f1b",), zeros=(3,), recomputes=("none", "full"),
        fixed=(("pipeline", 1), ("context", 1), ("sequence_parallel", 0)),
    ),
    "fsdp": Abilities(
        schedules=("1f1b",), zeros=(2, 3), recomputes=("none", "full"),
        fixed=(("tensor", 1), ("pipeline", 1), ("context", 1), ("expert", 1)),
    ),
    "torchtitan": _TITAN,
    "torchtitan-eager": _TITAN,
    # Its fully divided modes (FSDP) do not combine with its pipelines.
    "megatron-core": Abilities(schedules=_MEGATRON, pipelined_zeros=(0, 1)),
    "megatron-core-2024": Abilities(schedules=_MEGATRON, pipelined_zeros=(0, 1)),
}  # fmt: skip
"""Programs with limits of their own; others run everything."""


def requested_limits(limits: Limits, program: str | None) -> Limits:
    """The limits of a search for a program, or for the usual one where none is named.

    Schedules that the person chose stand where no program is named; a program that has none of
    them is refused.
    """
    narrowed = program_limits(limits, program or DEFAULT_SOFTWARE)
    if limits.schedules == SCHEDULES:
        return narrowed
    if program is None:
        return replace(narrowed, schedules=limits.schedules)
    if not narrowed.schedules:
        raise UsageError(
            f"{program} has no schedule {' or '.join(limits.schedules)}",
            hint=f"it runs {', '.join(PROGRAMS[program].schedules)}; without --software a plan "
            "for hocket run is made",
        )
    return narrowed


def is_hocket_only(program: str, schedule: str) -> bool:
    """True if only ``hocket run`` has a schedule, and the program does not."""
    return program in PROGRAMS and schedule not in PROGRAMS[program].schedules


def program_limits(limits: Limits, program: str) -> Limits:
    """The limits, narrowed to what a program can run."""
    can = PROGRAMS.get(program, Abilities())
    stated = dict(limits.fixed)
    return replace(
        limits,
        schedules=tuple(name for name in limits.schedules if name in can.schedules),
        recomputes=tuple(name for name in limits.recomputes if name in can.recomputes),
        zeros=tuple(zero for zero in limits.zeros if zero in can.zeros),
        pipelined_zeros=tuple(z for z in limits.pipelined_zeros if z in can.pipelined_zeros),
        # Values that the user fixes win over the program's: the user then has to run the plan.
        fixed=(*limits.fixed, *(pair for pair in can.fixed if pair[0] not in stated)),
    )
