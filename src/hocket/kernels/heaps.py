"""Operations on heaps and sets in compiled code. O(log n) per heap operation, O(1) per mark."""

from __future__ import annotations

from hocket.kernels import kernel
from hocket.kernels.containers import Heaps, Marks


@kernel
def push(heaps: Heaps, which: int, key: float, item: int) -> None:
    """Add (key, item) to heap number ``which``."""
    base, at = heaps.ptr[which], heaps.size[which]
    heaps.size[which] += 1
    while at > 0:
        above = (at - 1) >> 1
        other = heaps.key[base + above]
        if other < key or (other == key and heaps.item[base + above] < item):
            break
        heaps.key[base + at] = other
        heaps.item[base + at] = heaps.item[base + above]
        at = above
    heaps.key[base + at] = key
    heaps.item[base + at] = item


@kernel
def pop(heaps: Heaps, which: int) -> int:
    """Remove the smallest (key, item) of heap number ``which`` and return its item."""
    base = heaps.ptr[which]
    top: int = heaps.item[base]
    heaps.size[which] -= 1
    size = heaps.size[which]
    key, item = heaps.key[base + size], heaps.item[base + size]
    at = 0
    while 2 * at + 1 < size:
        below = base + 2 * at + 1
        if 2 * at + 2 < size:
            left, right = heaps.key[below], heaps.key[below + 1]
            if right < left or (right == left and heaps.item[below + 1] < heaps.item[below]):
                below += 1
        other = heaps.key[below]
        if key < other or (key == other and item < heaps.item[below]):
            break
        heaps.key[base + at] = other
        heaps.item[base + at] = heaps.item[below]
        at = below - base
    heaps.key[base + at] = key
    heaps.item[base + at] = item
    return top


@kernel
def mark(marks: Marks, item: int) -> None:
    """Add a number to the set, unless it is in it."""
    if not marks.has[item]:
        marks.has[item] = True
        marks.item[marks.size[0]] = item
        marks.size[0] += 1
