"""The tensors of a coarse graph: all tensors of one storage that a node makes become one.

A *part* is the set of tensors of one storage that one node makes, or one tensor that exists before
the step. A part that other nodes read or that is held to the end of the step becomes a tensor of
the coarse graph; other parts exist only inside their node. The tensors of a part are merged because
their storage is freed only with the last of them. O(tensors log tensors + reads) in numpy.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.graph.coarsen.nodes import Nodes
from hocket.graph.graph import PERSISTENT_ROLES, Role

_STRENGTH = np.array(
    [3 if role in PERSISTENT_ROLES else {Role.CONTROL: 0, Role.ACTIVATION: 1}.get(role, 2)
     for role in Role],
    dtype=np.int64,
)  # fmt: skip
"""Rank of each role: the highest in a part decides when its bytes are freed."""


class StorageParts:
    """Parts of a graph's storages, sorted by maker; tensors from before the step come first."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        fine = nodes.fine
        # Tensors from before the step have maker -1, so their keys come first.
        num_tensors = fine.num_tensors
        before = np.flatnonzero(nodes.maker < 0)
        key = (nodes.maker.astype(np.int64) + 1) * num_tensors + fine.root_of
        key[before] = before
        order = np.argsort(key, kind="stable")
        is_new = np.diff(key[order], prepend=-1) > 0
        self.part_of = np.empty(num_tensors, dtype=np.int64)
        self.part_of[order] = np.cumsum(is_new) - 1
        self.first: LongArray = order[is_new]
        """Per part: its first tensor."""
        self.maker: IntArray = nodes.maker[self.first]
        self.root: IntArray = np.where(self.maker < 0, self.first, fine.root_of[self.first]).astype(
            np.int32
        )
        """Per part: the tensor that owns its storage; itself for tensors from before the step."""

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.first)

    @cached_property
    def owns(self) -> BoolArray:
        """Per part: True if its storage is allocated with it."""
        fine = self.nodes.fine
        made = self.part_of[self.root] == np.arange(self.num_parts)
        owns: BoolArray = made & (fine.alias_of[self.root] < 0)
        return owns

    @cached_property
    def crossing(self) -> BoolArray:
        """Per entry of ``fine.reads``: True if another node makes the tensor."""
        crosses: BoolArray = self.nodes.reader != self.nodes.maker[self.nodes.fine.reads]
        return crosses

    def sent_as(self, number: LongArray) -> IntArray:
        """Per tensor: number of its part if the tensor reaches other nodes, else -1."""
        leaves = self.nodes.maker < 0
        leaves[self.nodes.fine.reads[self.crossing]] = True
        return np.where(leaves, number[self.part_of], -1).astype(np.int32)

    def any_of(self, mask: BoolArray) -> BoolArray:
        """Per part: True if the mask marks at least one of its tensors."""
        found = np.zeros(self.num_parts, dtype=np.bool_)
        found[self.part_of[mask]] = True
        return found

    def kept(self) -> BoolArray:
        """Per part: True if it exists before the step, another node reads it, or it is held."""
        keep = self.any_of(self.nodes.fine.is_held) | (self.maker < 0)
        keep[self.part_of[self.nodes.fine.reads[self.crossing]]] = True
        return keep

    def chief(self) -> IntArray:
        """Per part: its tensor with the strongest role; the first if several."""
        fine = self.nodes.fine
        strength = _STRENGTH[fine.tensor_role]
        order = np.lexsort((np.arange(fine.num_tensors), -strength, self.part_of))
        starts = np.searchsorted(self.part_of[order], np.arange(self.num_parts))
        return order[starts].astype(np.int32)

    def base(self, is_there: BoolArray | None = None) -> LongArray:
        """Per part: the part whose storage it shares; -1 if it owns its storage.

        ``is_there`` marks the parts that may be shared; they must also be made by earlier nodes.
        """
        fine = self.nodes.fine
        base = np.full(self.num_parts, -1, dtype=np.int64)
        # In reverse, so that the first alias of each part decides.
        alias = np.flatnonzero(fine.alias_of >= 0)[::-1]
        part, target = self.part_of[alias], self.part_of[fine.alias_of[alias]]
        leads_out = target != part
        if is_there is not None:
            is_earlier = (self.maker[target] < self.maker[part]) | (self.maker[part] < 0)
            leads_out &= is_there[target] & is_earlier
        base[part[leads_out]] = target[leads_out]
        return np.where(self.owns, -1, base)

    def num_bytes(self) -> LongArray:
        """Per part: bytes of its storage if it owns it, else of its largest tensor."""
        fine = self.nodes.fine
        largest = np.zeros(self.num_parts, dtype=np.int64)
        np.maximum.at(largest, self.part_of, fine.tensor_bytes)
        return np.where(self.owns, fine.tensor_bytes[self.root], largest)


def legal_roles(roles: NDArray[np.int8], is_made: BoolArray,
                base: LongArray, num_bytes: LongArray) -> NDArray[np.int8]:  # fmt: skip
    """Correct the roles of parts: new tensors cannot be persistent, control has no bytes."""
    new = is_made & (base < 0)
    roles = np.where(new & np.isin(roles, PERSISTENT_ROLES), Role.OUTPUT, roles)
    is_heavy_control = (roles == Role.CONTROL) & (num_bytes > 0)
    return np.where(is_heavy_control, Role.ACTIVATION, roles).astype(np.int8)
