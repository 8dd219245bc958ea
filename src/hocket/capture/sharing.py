"""Ops that must share a device because they share memory that is written in place.

A copy on another device is a copy of one moment: a write to the original does not reach it, and a
write to it does not reach the original. Where an op reads a view that was made before the last
write to its storage, or writes a tensor of the model through a view, the ops that make and write
views of that storage have to sit together. O(calls + reads).
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.capture.program import Program


def sharing_ops(program: Program) -> Iterator[list[int]]:
    """Sets of ops that have to share a device."""
    late = _late_readers(program)
    members: dict[int, list[int]] = {storage: [] for storage in late}
    first_reader: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        for storage in {program.tensors[t].storage: None for t in call.reads}:
            first_reader.setdefault(storage, index)
    for tensor in program.tensors:
        if tensor.storage not in members:
            continue
        maker = tensor.producer if tensor.producer >= 0 else first_reader.get(tensor.storage, -1)
        if maker >= 0:
            members[tensor.storage].append(maker)
    for storage, ops in members.items():
        yield [*ops, *late[storage]]
    yield from _written_through_views(program, first_reader)


def _late_readers(program: Program) -> dict[int, list[int]]:
    """By storage: calls that read a tensor of it made before its last write.

    What the user keeps is read after the last call.
    """
    num_writes: dict[int, int] = {}
    born = [0] * len(program.tensors)
    late: dict[int, list[int]] = {}
    for index, call in enumerate(program.calls):
        for tensor in call.reads:
            storage = program.tensors[tensor].storage
            if storage >= 0 and born[tensor] < num_writes.get(storage, 0):
                late.setdefault(storage, []).append(index)
        for tensor in call.written:
            storage = program.tensors[tensor].storage
            num_writes[storage] = born[tensor] = num_writes.get(storage, 0) + 1
        for output in call.outputs:
            if output is not None and program.tensors[output].producer == index:
                born[output] = num_writes.get(program.tensors[output].storage, 0)
    for tensor in program.outputs:
        storage = program.tensors[tensor].storage
        if born[tensor] < num_writes.get(storage, 0):
            late.setdefault(storage, [])
    return late


def _written_through_views(program: Program, first_reader: dict[int, int]) -> Iterator[list[int]]:
    """Writes to what exists before the step, with the views that they go through."""
    for index, call in enumerate(program.calls):
        for target in call.targets:
            chain = []
            while target >= 0 and program.tensors[target].producer >= 0:
                chain.append(program.tensors[target].producer)
                target = program.tensors[target].alias_of
            if chain and target >= 0:
                yield [index, *chain, first_reader[program.tensors[target].storage]]
