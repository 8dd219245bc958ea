"""Make pipeline schedules by name: GPipe, 1F1B, interleaved, looped BFS, and zero bubble.

Each schedule is described above its function, with the paper that it comes from, its bubble for p
devices and m microbatches, and the number of microbatches that it holds. `make_schedule` finds them
by name and caches the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hocket.base.errors import UsageError, unknown_name
from hocket.base.parts import even_parts
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallel.schedules.rows import Row, code, folded, from_rows, rounds

# DualPipeV: a V of two chunks whose forwards and backwards go in pairs.
#
# DeepSeek-AI, "DeepSeek-V3 technical report" (2024), in the form with one copy of the weights that
# halves DualPipe at its middle. Every forward of one chunk is paired with a backward of the other,
# so that a runtime may hide the transfers of either behind the work of its partner; backwards are
# split only at the start and the end, where others wait for them. p + 1/2 microbatches are held.
# O(actions).

_DUAL_F, _B, _DUAL_I, _DUAL_W = (
    [code(work, chunk) for chunk in (0, 1)]
    for work in (
        StageWork.FORWARD,
        StageWork.BACKWARD,
        StageWork.INPUT_GRADIENT,
        StageWork.WEIGHT_GRADIENT,
    )
)


def dualpipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Make a schedule of two stages per device, placed as a V."""
    # The pattern needs this many microbatches; those that do not exist are removed afterwards.
    count = max(num_microbatches, 2 * num_devices)
    rows = [_dual_row(device, num_devices, count) for device in range(num_devices)]
    return from_rows("dualpipe-v", num_microbatches, folded(num_devices), rows)


def _dual_row(device: int, num_devices: int, count: int) -> Row:
    behind = num_devices - 1 - device
    ending = _ending(device)
    late = [action + 1 for action in ending if action in _DUAL_I]
    parts = [
        np.tile([_DUAL_F[0]], 2 * behind),
        np.tile([_DUAL_F[0], _DUAL_F[1]], device + 1),
        np.tile([_DUAL_I[1], _DUAL_W[1], _DUAL_F[1]], behind),
        np.tile([_DUAL_F[0], _B[1], _DUAL_F[1], _B[0]], count - 2 * num_devices + device + 1),
        np.tile([_B[1], _DUAL_F[1], _B[0]], behind),
        np.array(ending),
    ]
    # Each delayed weight gradient gives its place to the next one, oldest first.
    waiting = [*late, *[_DUAL_W[0]] * behind]
    last = [action for weight in waiting[:behind] for action in (weight, _DUAL_I[0])]
    return np.concatenate([*parts, last, waiting[behind:]]).astype(np.int64)


def _ending(device: int) -> list[int]:
    """Backwards of both chunks in turn; the later half is split."""
    turns = [chunk for _ in range(device + 1) for chunk in (1, 0)]
    return [(_B if index < device + 1 else _DUAL_I)[chunk] for index, chunk in enumerate(turns)]


# ZB-V: two chunks per device laid as a V, so that the device that starts also ends.
#
# Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024), section 6. The first device has the
# first and the last stage; it can begin the backward of a microbatch at once, and with equal times
# of F, B and W nobody waits between its first and last action while p microbatches are held. Each
# step of the rhythm does one of the two chunks forward and the other one backward. O(actions).

_F, _I, _W = StageWork.FORWARD, StageWork.INPUT_GRADIENT, StageWork.WEIGHT_GRADIENT
_FIRST = [code(work, 0) for work in (_F, _I, _W)]
_SECOND = [code(work, 1) for work in (_F, _I, _W)]


def zb_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Make a schedule of two stages per device, placed as a V."""
    # The pattern needs this many microbatches; those that do not exist are removed afterwards.
    count = max(num_microbatches, 2 * num_devices - 1)
    rows = [_row(device, num_devices, count) for device in range(num_devices)]
    return from_rows("zb-v", num_microbatches, folded(num_devices), rows)


def _row(device: int, num_devices: int, count: int) -> Row:
    behind = num_devices - device
    forward, back, weight = _FIRST
    turn_forward, turn_back, _ = _SECOND
    with_forward = count - (2 * num_devices - 1 - device)
    parts = [
        np.tile([forward], 2 * behind - 1),
        np.tile([turn_forward, forward], device),
        np.tile(_SECOND, behind),
        np.tile([*_FIRST, *_SECOND], with_forward),
        np.tile([back, weight, *_SECOND], behind - 1),
        np.tile([back, turn_back], device),
        np.tile([back, weight], behind),
        np.tile([_SECOND[2]], device),
        np.tile([weight], device),
    ]
    return np.concatenate(parts).astype(np.int64)


# Interleaved 1F1B: several chunks of the model per device, for a bubble that much smaller.
#
# Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-
# LM" (SC 2021). Microbatches go in groups of p: a device takes a group through its first chunk,
# then its second, so each microbatch waits a chunk's time, not a device's, for the devices before
# it. The bubble is (p-1)/(v m); the price is v times the transfers. O(actions).


def interleaved(num_devices: int, num_microbatches: int, chunks: int) -> Schedule:
    """Make a schedule of ``chunks`` looped stages per device, for any number of microbatches."""
    groups = microbatch_groups(num_devices, num_microbatches)
    behind = np.arange(num_devices)[::-1]
    warm_up = warm_up_forwards(2 * behind, groups, num_microbatches, chunks)
    return rounds(
        "interleaved", num_devices, num_microbatches, groups, chunks=chunks, warm_up=warm_up
    )


def microbatch_groups(num_devices: int, num_microbatches: int) -> list[int]:
    """Sizes of the groups of microbatches that pass a chunk together.

    There are as many groups as possible with at least one microbatch per device, since a smaller
    group would leave devices waiting for its next chunk. If the devices do not divide the
    microbatches, some groups are larger; with fewer microbatches than devices there is one
    group.
    """
    return list(even_parts(num_microbatches, max(1, num_microbatches // num_devices)))


def warm_up_forwards(
    ahead: NDArray[np.int64], groups: list[int], num_microbatches: int, chunks: int
) -> NDArray[np.int64]:
    """Forwards before the first backward: ``ahead``, and all chunks but one of the first group."""
    forwards: NDArray[np.int64] = ahead + (chunks - 1) * groups[0]
    return np.minimum(forwards, num_microbatches * chunks)


# ZB-H1: 1F1B whose gradients of weights wait, so that gradients of inputs reach others sooner.
#
# Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024). Device i delays i weight gradients and
# computes them when 1F1B would wait at the end. In exchange it holds p-i fewer microbatches in
# flight: every device holds p. The bubble is (p-1)(tF+tB-tW) of one stage; with looped
# chunks, divided by their number. O(actions).


def zb_h1(num_devices: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Make a schedule of ``chunks`` looped stages per device."""
    groups = microbatch_groups(num_devices, num_microbatches)
    device = np.arange(num_devices)
    warm_up = warm_up_forwards(device[::-1], groups, num_microbatches, chunks)
    return rounds(
        "zb-h1",
        num_devices,
        num_microbatches,
        groups,
        chunks=chunks,
        warm_up=warm_up,
        weight_lag=device,
    )


# ZB-H2: twice the warm-up of ZB-H1, so that no device waits between its first and last action.
#
# Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024). Device i starts with 2(p-1-i) forwards
# and delays 2i weight gradients; all hold 2p-1 microbatches. Devices then stop as staggered as they
# start, which saves time only if the next step need not wait for the slowest.
# O(actions).


def zb_h2(num_devices: int, num_microbatches: int) -> Schedule:
    """Make a schedule of one stage per device."""
    device = np.arange(num_devices)
    return rounds(
        "zb-h2",
        num_devices,
        num_microbatches,
        [num_microbatches],
        chunks=1,
        warm_up=np.minimum(2 * device[::-1], num_microbatches),
        weight_lag=2 * device,
    )


# Looped breadth-first: every microbatch through a device's chunk before its next chunk.
#
# Lamy-Poirier, "Breadth-first pipeline parallelism" (MLSys 2023). As GPipe with looped chunks: the
# bubble is (p-1)/(v m), and the gradients of a chunk are complete early, so that summing them over
# data-parallel ranks can hide behind the other chunks. All microbatches are held. O(actions).


def looped_bfs(num_devices: int, num_microbatches: int, chunks: int) -> Schedule:
    """Make a schedule of ``chunks`` looped stages per device."""
    warm_up = np.full(num_devices, num_microbatches * chunks)
    groups = [num_microbatches]
    return rounds(
        "looped-bfs", num_devices, num_microbatches, groups, chunks=chunks, warm_up=warm_up
    )


# 1F1B: a backward as soon as there is one, so that few microbatches are in flight.
#
# Narayanan et al., "PipeDream" (SOSP 2019) and its flushed form in DAPPLE (PPoPP 2021). Device i of
# p does p-1-i forwards, then a forward and a backward by turns, then the remaining backwards. The
# bubble is that of GPipe, with at most p instead of m microbatches held. O(actions).


def one_forward_one_backward(num_devices: int, num_microbatches: int) -> Schedule:
    """Make a schedule of one stage per device."""
    warm_up = np.minimum(np.arange(num_devices)[::-1], num_microbatches)
    groups = [num_microbatches]
    return rounds("1f1b", num_devices, num_microbatches, groups, chunks=1, warm_up=warm_up)


# GPipe: all forwards, then all backwards.
#
# Huang et al., "GPipe" (NeurIPS 2019). The simplest order: a device works off every microbatch
# forward, then every one backward. The bubble is (p-1)/m of the work and every microbatch's
# activations are held at once. O(actions).


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """Make a schedule of one stage per device."""
    warm_up = np.full(num_devices, num_microbatches)
    groups = [num_microbatches]
    return rounds("gpipe", num_devices, num_microbatches, groups, chunks=1, warm_up=warm_up)


ONE_CHUNK: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h2": zb_h2,
}
"""Schedules with one stage per device."""
LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
}
"""Schedules with any number of chunks per device, in rounds over all devices."""
FOLDED: dict[str, Callable[[int, int], Schedule]] = {
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
"""Schedules with two chunks per device, placed as a V."""


def make_schedule(
    name: str, num_devices: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """Return a known schedule by name; its arrays are cached and read-only.

    ``chunks`` is the number of stages per device: by default 1, or 2 for schedules that need two.
    With one chunk, ``interleaved`` is ``1f1b`` and ``looped-bfs`` is ``gpipe``.
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


def _check_chunks(name: str, chunks: int) -> None:
    if chunks < 1 or (name in ONE_CHUNK and chunks != 1):
        raise UsageError(
            f"schedule {name!r} has one chunk per device, not {chunks}",
            hint="'interleaved', 'looped-bfs' and 'zb-h1' take more",
        )
    if name in FOLDED and chunks != 2:
        raise UsageError(f"schedule {name!r} has two chunks per device, not {chunks}")


# A search requests the same schedules repeatedly, and one of 64 devices takes megabytes.
@lru_cache(maxsize=32)
def _made(name: str, num_devices: int, num_microbatches: int, chunks: int) -> Schedule:
    if name in LOOPED:
        schedule = LOOPED[name](num_devices, num_microbatches, chunks)
    else:
        schedule = {**ONE_CHUNK, **FOLDED}[name](num_devices, num_microbatches)
    # Cached arrays are shared by all callers, so they must not be changed.
    for array in (schedule.start, schedule.work, schedule.stage, schedule.microbatch,
                  schedule.device_of_stage):  # fmt: skip
        array.setflags(write=False)
    return schedule
