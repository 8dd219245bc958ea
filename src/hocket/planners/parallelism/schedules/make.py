"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from hocket.base.errors import UsageError, unknown_name
from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallelism.schedules.dualpipe_v import dualpipe_v
from hocket.planners.parallelism.schedules.gpipe import gpipe
from hocket.planners.parallelism.schedules.interleaved import interleaved
from hocket.planners.parallelism.schedules.looped_bfs import looped_bfs
from hocket.planners.parallelism.schedules.one_forward_one_backward import one_forward_one_backward
from hocket.planners.parallelism.schedules.v_half import v_half
from hocket.planners.parallelism.schedules.zb_h1 import zb_h1
from hocket.planners.parallelism.schedules.zb_h2 import zb_h2
from hocket.planners.parallelism.schedules.zb_v import zb_v

ONE_CHUNK: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h2": zb_h2,
}
"""One stage per device."""
LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
}
"""Any number of chunks per device, in rounds over all devices."""
FOLDED: dict[str, Callable[[int, int], Schedule]] = {
    "zb-v": zb_v,
    "v-half": v_half,
    "dualpipe-v": dualpipe_v,
}
"""Two chunks per device, as a V."""


def make_schedule(
    name: str, num_devices: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """A known schedule; its arrays are shared and read-only.

    ``chunks`` are stages per device: 1 where not given, 2 for schedules that need two. With one
    chunk, ``interleaved`` is ``1f1b`` and ``looped-bfs`` is ``gpipe``.
    """
    known = {**ONE_CHUNK, **LOOPED, **FOLDED}
    if name not in known:
        raise unknown_name("schedule", name, known)
    if num_devices < 1 or num_microbatches < 1:
        raise UsageError(
            f"a schedule needs devices and microbatches, not {num_devices} and {num_microbatches}"
        )
    if chunks is None:
        chunks = 2 if name in FOLDED or name in ("interleaved", "looped-bfs") else 1
    _check_chunks(name, chunks)
    if chunks == 1:
        name = {"interleaved": "1f1b", "looped-bfs": "gpipe"}.get(name, name)
    return _made(name, num_devices, num_microbatches, chunks)


def known_schedules(
    num_devices: int, num_microbatches: int, chunks: int, *, is_folded: bool
) -> Iterator[Schedule]:
    """All known schedules of a layout of stages, the usual ones first."""
    if is_folded:
        names = ["zb-v", "dualpipe-v", "v-half"]
    elif chunks == 1:
        names = ["1f1b", "gpipe", "zb-h1", "zb-h2"]
    else:
        names = ["interleaved", "looped-bfs", "zb-h1"]
    for name in names:
        yield make_schedule(name, num_devices, num_microbatches, chunks)


def _check_chunks(name: str, chunks: int) -> None:
    if chunks < 1 or (name in ONE_CHUNK and chunks != 1):
        raise UsageError(
            f"schedule {name!r} has one chunk per device, not {chunks}",
            hint="'interleaved', 'looped-bfs' and 'zb-h1' take more",
        )
    if name in FOLDED and chunks != 2:
        raise UsageError(f"schedule {name!r} has two chunks per device, not {chunks}")


# A search asks for the same schedule again and again; one of 64 devices takes megabytes.
@lru_cache(maxsize=32)
def _made(name: str, num_devices: int, num_microbatches: int, chunks: int) -> Schedule:
    if name in LOOPED:
        schedule = LOOPED[name](num_devices, num_microbatches, chunks)
    else:
        schedule = {**ONE_CHUNK, **FOLDED}[name](num_devices, num_microbatches)
    for array in (schedule.start, schedule.work, schedule.stage, schedule.microbatch,
                  schedule.device_of_stage):  # fmt: skip
        array.setflags(write=False)
    return schedule
