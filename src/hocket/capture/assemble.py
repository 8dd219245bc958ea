"""Turn a Program into a Graph: readable names, sizes, roles and colocation groups. O(calls)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hocket.base.arrays import pointers
from hocket.base.joined import JoinedSets
from hocket.capture.program import Program
from hocket.graph import Graph, OpColumns, Phase, Role, TensorColumns, assemble

# Ops that must share a device because they share memory that is written in place.
#
# A copy on another device does not see later writes to the original, and vice versa. Two cases
# therefore need all ops that create or write views of a storage on one device: an op reads a view
# that is older than the last write to the storage, or an op writes a tensor of the model through a
# view. O(calls + reads).


def sharing_ops(program: Program) -> Iterator[list[int]]:
    """Sets of ops that must be placed on one device because they access the same memory."""
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
    """Calls per storage that read a tensor that is older than the storage's last write.

    Outputs of the program count as read after the last call.
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
    """Groups of an in-place write to a tensor from before the step, and the views in between."""
    for index, call in enumerate(program.calls):
        for target in call.targets:
            chain = []
            while target >= 0 and program.tensors[target].producer >= 0:
                chain.append(program.tensors[target].producer)
                target = program.tensors[target].alias_of
            if chain and target >= 0:
                yield [index, *chain, first_reader[program.tensors[target].storage]]


def graph_of(program: Program, name: str, meta: Mapping[str, Any]) -> Graph:
    """Build the Graph of a program; ops and tensors keep the program's numbers."""
    calls = program.calls
    op_names = unique_names(_op_name(program, op) for op in range(len(calls)))
    drawn = np.cumsum([call.draws for call in calls], dtype=np.int64) - 1
    ops = OpColumns(
        name=op_names,
        kind=[call.cost.kind for call in calls],
        phase=[call.phase for call in calls],
        dtype=[call.cost.dtype for call in calls],
        flops=[call.cost.flops for call in calls],
        bytes_touched=[call.cost.bytes_touched for call in calls],
        partner=[call.partner for call in calls],
        group=_groups(program, meta.get("recurrent", ())),
        rng_order=[int(drawn[i]) if call.draws else -1 for i, call in enumerate(calls)],
        module=[call.module for call in calls],
        signature=[call.cost.signature for call in calls],
    )
    tensors = TensorColumns(
        name=_tensor_names(program, op_names),
        bytes=[_tensor_bytes(program, tensor) for tensor in range(len(program.tensors))],
        producer=[spec.producer for spec in program.tensors],
        role=[spec.role for spec in program.tensors],
        alias_of=[spec.alias_of for spec in program.tensors],
    )
    reads = [tensor for call in calls for tensor in call.reads]
    read_ptr = pointers([len(call.reads) for call in calls])
    return assemble(name, ops, tensors, read_ptr, reads, meta=meta)


def unique_names(wanted: Iterable[str]) -> list[str]:
    """Return the names, with repeated ones made unique by ``:1``, ``:2`` … from the second use."""
    seen: dict[str, int] = {}
    taken: set[str] = set()
    names = []
    for base in wanted:
        name = base
        while name in taken:
            seen[base] = seen.get(base, 0) + 1
            name = f"{base}:{seen[base]}"
        taken.add(name)
        names.append(name)
    return names


def _op_name(program: Program, op: int) -> str:
    call = program.calls[op]
    short = call.cost.kind.partition(".")[2]
    if call.phase == Phase.OPTIMIZER:
        return f"{_source_name(program, call.args[0].number)}/{short}"
    place = f"{call.module}/{short}" if call.module else short
    if op in program.repeats:
        return f"{place}@again"
    return f"{place}.backward" if call.phase == Phase.BACKWARD else place


def _source_name(program: Program, tensor: int) -> str:
    """Return a parameter's name, also for a version of it that the step itself has written."""
    while tensor not in program.names:
        tensor = program.tensors[tensor].alias_of
    return program.names[tensor]


def _tensor_names(program: Program, op_names: list[str]) -> list[str]:
    wanted = []
    position, last = 0, -1
    for tensor, spec in enumerate(program.tensors):
        position = position + 1 if spec.producer == last else 0
        last = spec.producer
        if spec.producer < 0:
            wanted.append(program.names[tensor])
        elif spec.role == Role.CONTROL:
            wanted.append(f"{op_names[spec.producer]}#done")
        else:
            suffix = f"#{position}" if position else ""
            wanted.append(op_names[spec.producer] + suffix)
    return unique_names(wanted)


def _tensor_bytes(program: Program, tensor: int) -> int:
    spec = program.tensors[tensor]
    if spec.layout is None:
        return 0
    # A view counts its own elements; the tensor that allocates counts the entire storage.
    return spec.layout.size_bytes if spec.alias_of >= 0 else spec.storage_bytes


def _groups(program: Program, fused: Iterable[str]) -> list[int]:
    """Return the colocation group of each op, or -1.

    The optimizer update of a parameter is grouped with the first op that computes with the
    parameter, and with the views in between. Further groups are ops that share memory written in
    place, and all ops of a ``fused`` module, which a library runs as one call on one device. Groups
    with a common op are merged.
    """
    updates = {
        program.tensors[call.args[0].number].storage: index
        for index, call in enumerate(program.calls)
        if call.phase == Phase.OPTIMIZER
    }
    groups = JoinedSets(len(program.calls))
    waiting = dict(updates)
    for index, call in enumerate(program.calls):
        if not waiting or call.phase != Phase.FORWARD:
            continue
        for storage in {program.tensors[t].storage: None for t in call.reads}:
            if storage in waiting:
                groups.join(index, updates[storage])
                if not call.is_view:
                    del waiting[storage]
    for ops in (*sharing_ops(program), *_inside(program, fused)):
        for op in ops[1:]:
            groups.join(ops[0], op)
    roots = [groups.find(op) for op in range(len(program.calls))]
    members = np.bincount(roots, minlength=len(roots)) if roots else np.zeros(0, dtype=np.int64)
    number: dict[int, int] = {}
    return [number.setdefault(root, len(number)) if members[root] > 1 else -1 for root in roots]


def _inside(program: Program, modules: Iterable[str]) -> list[list[int]]:
    """Forward and backward ops of each of the given modules that has any."""
    found: dict[str, list[int]] = {module: [] for module in modules}
    for op, call in enumerate(program.calls):
        if call.module in found and call.phase != Phase.OPTIMIZER:
            found[call.module].append(op)
    return [ops for ops in found.values() if ops]
