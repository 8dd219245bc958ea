"""ParDNN step 1c, last part: moves along the simulated critical path.

The walk goes back from the op that ends last, each time to the cause of its start: its latest input
or the op before it on the device. Where the path crosses devices, moving the sending op to the
receiver, or the receiving op to the sender, saves the transfer and may add one on the op's other
side. Rounds alternate between all moves with an estimated gain and only the best one; a round is
kept only if the simulator reports a shorter step. O(rounds · simulation).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import table, zeros
from hocket.planners.placement.pardnn.mapping_ledger import MappingFacts
from hocket.planners.placement.pardnn.simulated_trials import Trial, Trials, faster
from hocket.planners.placement.pardnn.unit_work import UnitWork
from hocket.simulate.timeline import Timeline

_ON_DEVICE, _BY_DATA, _AT_START = -1, -2, -3
"""Why an op of the path started when it did, if it did not wait for a transfer.

It waited for the op before it on the device, for an input made there, or for nothing.
"""


class _Ran(NamedTuple):
    """A timeline in the form that the walk reads."""

    device: LongArray
    start_s: FloatArray
    end_s: FloatArray
    before: LongArray
    """Per op: the op that ran before it on the same device; -1 if none."""
    key: LongArray
    """Per transfer, ascending: tensor * devices + destination."""
    arrival_s: FloatArray
    """Per entry of ``key``: end of the transfer."""


class _CriticalPath(NamedTuple):
    """The critical path, last op first."""

    op: LongArray
    reason: LongArray
    """Per op of the path: the transfer (by ``key``) it waited for, or a constant above."""
    tensor: LongArray
    """Per op of the path: the tensor it waited for; -1 if none."""
    size: LongArray


class UnitMoves(NamedTuple):
    """Ops to move, each with its unit, and their new devices; the largest gain first."""

    op: LongArray
    device: LongArray


def improve(
    work: UnitWork, facts: MappingFacts, trials: Trials, trial: Trial, num_rounds: int
) -> Trial:
    """Return the best trial after some rounds of moves; its step is never longer."""
    if num_rounds == 0:
        return trial
    moves, takes_all = crossing_moves(work, facts, trials.timeline(trial)), True
    for _ in range(num_rounds):
        if not len(moves.op):
            break
        taken = slice(None) if takes_all else slice(0, 1)
        found = trials(moved(work, trial.device_of, moves.op[taken], moves.device[taken]))
        if faster(trial, found) is found:
            trial, moves = found, crossing_moves(work, facts, trials.timeline(found))
        elif not takes_all:
            # The best move does not help: go on with the others.
            moves = UnitMoves(moves.op[1:], moves.device[1:])
        takes_all = not takes_all
    return trial


def moved(work: UnitWork, device_of: IntArray, op: LongArray, device: LongArray) -> IntArray:
    """Return the placement with the units of ops moved; a unit's first move counts."""
    unit, first = np.unique(work.units.of[op], return_index=True)
    target = np.full(len(work.units.ptr) - 1, -1, dtype=np.int32)
    target[unit] = device[first]
    wanted = target[work.units.of]
    return np.where(wanted >= 0, wanted, device_of).astype(np.int32)


def crossing_moves(work: UnitWork, facts: MappingFacts, timeline: Timeline) -> UnitMoves:
    """Moves of ops where the critical path crosses devices, with an estimated gain above 0."""
    ran, waited_s = _as_ran(timeline)
    num_ops = len(ran.device)
    path = _CriticalPath(zeros(num_ops), zeros(num_ops), zeros(num_ops), zeros(1))
    _walk(facts, ran, path)
    size = int(path.size[0])
    op, reason, tensor = path.op[:size], path.reason[:size], path.tensor[:size]
    # Step i waited for what op i + 1 sent; the last step waited for nothing on the path.
    crossing = np.flatnonzero(reason[:-1] >= 0)
    if not len(crossing):
        return UnitMoves(zeros(0), zeros(0))
    cost_s = np.where(reason >= 0, waited_s[np.maximum(reason, 0)], 0.0)
    # An index of -1 reads some entry, which `np.where` discards.
    link_s = np.where(reason == _BY_DATA, work.tensor_s[tensor], 0.0)
    sender, receiver = op[crossing + 1], op[crossing]
    there, here = ran.device[receiver], ran.device[sender]
    # Moving the sender makes a crossing where it used to follow its own producer on its device.
    send_gain = cost_s[crossing] - link_s[crossing + 1] + _faster(facts, sender, here, there)
    after = np.where(crossing > 0, link_s[np.maximum(crossing - 1, 0)], 0.0)
    receive_gain = cost_s[crossing] - after + _faster(facts, receiver, there, here)
    gain = np.concatenate((send_gain, receive_gain))
    order = np.argsort(-gain, kind="stable")
    order = order[gain[order] > 0]
    return UnitMoves(
        np.concatenate((sender, receiver))[order], np.concatenate((there, here))[order]
    )


def _faster(facts: MappingFacts, op: LongArray, src: LongArray, dst: LongArray) -> FloatArray:
    """Per op: seconds saved on ``dst`` instead of ``src``; -inf if it cannot run there."""
    less_s: FloatArray = facts.op_s[op, src] - facts.op_s[op, dst]
    return less_s


def _as_ran(timeline: Timeline) -> tuple[_Ran, FloatArray]:
    """Return the timeline for the walk and, per transfer, the seconds from ready to its end."""
    num = timeline.num_devices
    device = timeline.op_device
    order = np.lexsort((timeline.op_end_s, timeline.op_start_s, device))
    before = np.full(len(device), -1, dtype=np.int64)
    follows = device[order[1:]] == device[order[:-1]]
    before[order[1:][follows]] = order[:-1][follows]
    key = timeline.transfer_tensor.astype(np.int64) * num + timeline.transfer_dst
    by_key = np.argsort(key, kind="stable")
    ran = _Ran(
        device=table(device, np.int64),
        start_s=table(timeline.op_start_s, np.float64),
        end_s=table(timeline.op_end_s, np.float64),
        before=table(before, np.int64),
        key=table(key[by_key], np.int64),
        arrival_s=table(timeline.transfer_end_s[by_key], np.float64),
    )
    waited_s = (timeline.transfer_end_s - timeline.transfer_ready_s)[by_key]
    return ran, waited_s if len(waited_s) else np.zeros(1)


@kernel
def _find(keys: LongArray, key: int) -> int:
    """Position of a key in ascending keys, or -1."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low if low < len(keys) and keys[low] == key else -1


@kernel
def _step_back(facts: MappingFacts, ran: _Ran, path: _CriticalPath, at: int) -> int:
    """Record why the op at one step of the path started when it did; returns its cause, or -1."""
    op = path.op[at]
    num_devices = facts.op_s.shape[1]
    latest_s, following = 0.0, -1
    for index in range(facts.read_ptr[op], facts.read_ptr[op + 1]):
        tensor = facts.reads[index]
        producer = facts.producer[tensor]
        transfer = _find(ran.key, tensor * num_devices + ran.device[op])
        if transfer >= 0:
            arrived_s = ran.arrival_s[transfer]
        elif producer >= 0:
            arrived_s = ran.end_s[producer]
        else:
            continue
        if arrived_s > latest_s:
            latest_s, following = arrived_s, producer
            path.tensor[at] = tensor
            path.reason[at] = transfer if transfer >= 0 else _BY_DATA
    before = ran.before[op]
    if before >= 0 and ran.end_s[before] > latest_s:
        following = before
        path.tensor[at] = -1
        path.reason[at] = _ON_DEVICE
    return following


@kernel
def _walk(facts: MappingFacts, ran: _Ran, path: _CriticalPath) -> None:
    """Fill the path, from the op that ends last back to one that waited for no other op."""
    op = -1
    for other in range(len(ran.end_s)):
        if op < 0 or ran.end_s[other] > ran.end_s[op]:
            op = other
    while op >= 0 and path.size[0] < len(path.op):
        at = path.size[0]
        path.size[0] += 1
        path.op[at] = op
        path.tensor[at] = -1
        path.reason[at] = _AT_START
        op = _step_back(facts, ran, path, at)
