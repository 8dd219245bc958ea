"""Jobs that are exactly alike, by a hash table with open addressing, and shares back to jobs.

O(jobs x kinds), and O(classes^2) to put few classes in order.
"""

from __future__ import annotations

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.rounds.kernels.rates import speed_on
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Alike
from hocket.kernels import kernel

_MULTIPLIER = 0x2545F4914F6CDD1D
_RUNNING = 1
_BYTE = 0xFF


@kernel
def group(
    jobs: Jobs, largest_server: LongArray, sees_speeds: bool, max_classes: int, alike: Alike
) -> int:
    """Find the classes of jobs that want devices, in order of their bytes.

    Returns how many there are; -1 where they are so many that most jobs have nobody alike.
    """
    num_classes, num_wanting = 0, 0
    for slot in range(alike.slots.shape[0]):
        alike.slots[slot] = -1
    for i in range(jobs.rows.shape[0]):
        alike.of[i] = -1
        if jobs.rows.phase[i] > _RUNNING:
            continue
        if num_classes > max_classes:
            return -1
        _describe(jobs, i, largest_server, sees_speeds, alike.values[num_classes])
        slot = _find(alike, num_classes)
        if alike.slots[slot] < 0:
            alike.slots[slot] = num_classes
            alike.num_alike[num_classes] = 0
            num_classes += 1
        alike.of[i] = alike.slots[slot]
        alike.num_alike[alike.of[i]] += 1
        num_wanting += 1
    if num_classes > min(max_classes, (num_wanting + 1) // 2 + 8):
        return -1
    _put_in_order(alike, num_classes)
    for i in range(jobs.rows.shape[0]):
        if alike.of[i] >= 0:
            alike.of[i] = alike.rank[alike.of[i]]
    return num_classes


@kernel
def _describe(
    jobs: Jobs, i: int, largest_server: LongArray, sees_speeds: bool, values: FloatArray
) -> None:
    """All that a policy sees of a job: throughputs, gang and weight."""
    num_kinds: int = largest_server.shape[0]
    for kind in range(num_kinds):
        speed = speed_on(jobs, i, kind, largest_server)
        if not sees_speeds:
            speed = 1.0 if speed > 0.0 else 0.0
        values[kind] = speed
    values[num_kinds] = jobs.rows.gang[i]
    values[num_kinds + 1] = jobs.rows.weight[i]


@kernel
def _find(alike: Alike, one: int) -> int:
    """The slot of the class that equals class ``one``, or the empty slot where it belongs."""
    bits, mask = alike.bits, alike.slots.shape[0] - 1
    digest = 0
    for column in range(bits.shape[1]):
        digest = (digest ^ bits[one, column]) * _MULTIPLIER
        digest ^= digest >> 29
    slot: int = digest & mask
    while alike.slots[slot] >= 0 and not _equal(bits, one, alike.slots[slot]):
        slot = (slot + 1) & mask
    return slot


@kernel
def _equal(bits: LongArray, one: int, other: int) -> bool:
    column = 0
    while column < bits.shape[1] and bits[one, column] == bits[other, column]:
        column += 1
    return bool(column == bits.shape[1])


@kernel
def _put_in_order(alike: Alike, num_classes: int) -> None:
    """Sort classes by their bytes, by insertion; ``rank`` says where each one went."""
    order = alike.slots
    for one in range(num_classes):
        at = one
        while at > 0 and _goes_before(alike.bits, one, order[at - 1]):
            order[at] = order[at - 1]
            at -= 1
        order[at] = one
    for at in range(num_classes):
        alike.rank[order[at]] = at
        alike.num_in_order[at] = alike.num_alike[order[at]]
        for column in range(alike.bits.shape[1]):
            alike.key[at, column] = alike.bits[order[at], column]


@kernel
def _goes_before(bits: LongArray, one: int, other: int) -> bool:
    """True if the bytes of a class, as they lie in memory, come before those of another."""
    column = 0
    while column < bits.shape[1] and bits[one, column] == bits[other, column]:
        column += 1
    if column == bits.shape[1]:
        return False
    mine, its = bits[one, column], bits[other, column]
    shift = 0
    while (mine >> shift) & _BYTE == (its >> shift) & _BYTE:
        shift += 8
    return bool((mine >> shift) & _BYTE < (its >> shift) & _BYTE)


@kernel
def write_shares(jobs: Jobs, of: LongArray, shares: FloatArray) -> None:
    """Give every job the shares of its class, and nothing to jobs without one."""
    for i in range(jobs.rows.shape[0]):
        jobs.rows.has_share[i] = 1
        jobs.rows.pair_share[i] = 0.0
        for kind in range(shares.shape[1]):
            jobs.shares[i, kind] = shares[of[i], kind] if of[i] >= 0 else 0.0
