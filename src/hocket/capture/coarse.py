"""Merge a graph of ops into one of modules: consecutive ops of one module and phase become one op.

Only consecutive ops are merged, so the result has no cycles. All that a merged op makes in one
storage becomes one tensor; storages that it makes and frees again become its workspace.
O(ops + reads).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hocket.base.joined import JoinedSets
from hocket.graph import DTYPES, Graph, GraphBuilder, Phase, Role


def merge_modules(graph: Graph, class_names: Mapping[str, str], meta: Mapping[str, Any]) -> Graph:
    """The graph with one op per run of ops of a module; classes are given by module path."""
    step = _merged_numbers(graph)
    root = _roots(graph)
    builder = GraphBuilder(graph.name)
    members = np.split(np.arange(graph.num_ops), np.flatnonzero(np.diff(step)) + 1)
    names: dict[str, int] = {}
    for ops in members if graph.num_ops else []:
        _add_op(builder, graph, ops, class_names, names)
    _link_ops(builder, graph, step)
    kept = _add_tensors(builder, graph, step, root)
    for op, ops in enumerate(members if graph.num_ops else []):
        builder.ops[op]["workspace_bytes"] = _workspace_bytes(graph, ops, step, root, kept)
    return builder.build(meta=meta)


def _merged_numbers(graph: Graph) -> Any:
    """Number of the merged op of each op."""
    if not graph.num_ops:
        return np.zeros(0, dtype=np.int64)
    same = (graph.op_module[1:] == graph.op_module[:-1]) & (
        graph.op_phase[1:] == graph.op_phase[:-1]
    )
    # Updates stay apart: each one belongs to its parameter.
    same &= graph.op_phase[1:] != Phase.OPTIMIZER
    return np.concatenate(([0], np.cumsum(~same)))


def _roots(graph: Graph) -> list[int]:
    """The tensor that owns each tensor's storage."""
    root = list(range(graph.num_tensors))
    for tensor, base in enumerate(graph.alias_of.tolist()):
        if base >= 0:
            root[tensor] = root[base]
    return root


def _add_op(
    builder: GraphBuilder,
    graph: Graph,
    ops: Any,
    class_names: Mapping[str, str],
    names: dict[str, int],
) -> None:
    first = int(ops[0])
    module, phase = graph.module_of(first), Phase(graph.op_phase[first])
    if phase == Phase.OPTIMIZER:
        name, kind = graph.op_names[first], graph.kind_of(first)
    else:
        name = (module or "model") + (".backward" if phase == Phase.BACKWARD else "")
        kind = f"module.{class_names.get(module, 'Module')}"
    count = names[name] = names.get(name, -1) + 1
    heaviest = ops[int(np.argmax(graph.flops[ops]))]
    drawn = graph.rng_order[ops]
    builder.op(
        f"{name}:{count}" if count else name,
        kind,
        phase=phase,
        dtype=DTYPES[int(graph.op_dtype[heaviest])],
        flops=float(graph.flops[ops].sum()),
        bytes_touched=int(graph.bytes_touched[ops].sum()),
        rng_order=int(drawn[drawn >= 0][0]) if np.any(drawn >= 0) else -1,
        module=module,
    )


def _link_ops(builder: GraphBuilder, graph: Graph, step: Any) -> None:
    """Partners and colocation groups of the merged ops."""
    for op in np.flatnonzero(graph.partner >= 0)[::-1]:
        builder.ops[step[op]]["partner"] = int(step[graph.partner[op]])
    groups = JoinedSets(len(builder.ops))
    first_of: dict[int, int] = {}
    for op in np.flatnonzero(graph.group >= 0):
        own = int(step[op])
        groups.join(first_of.setdefault(int(graph.group[op]), own), own)
    grouped = sorted({int(step[op]) for op in np.flatnonzero(graph.group >= 0)})
    number: dict[int, int] = {}
    for op in grouped:
        builder.ops[op]["group"] = number.setdefault(groups.find(op), len(number))


def _add_tensors(
    builder: GraphBuilder, graph: Graph, step: Any, root: list[int]
) -> dict[tuple[int, int], int]:
    """Add one tensor per (merged producer, storage) that others need; return their numbers."""
    crossing = _crossing(graph, step, root)
    numbers: dict[tuple[int, int], int] = {}
    for tensor in range(graph.num_tensors):
        key = _key(graph, step, root, tensor)
        if key not in crossing:
            continue
        if key in numbers:
            spec = builder.tensors[numbers[key]]
            if graph.is_held[tensor] and spec["role"] == Role.ACTIVATION:
                spec["role"] = Role(graph.tensor_role[tensor])
            if spec["alias_of"] >= 0:
                spec["bytes"] = max(spec["bytes"], int(graph.tensor_bytes[tensor]))
            continue
        owner = root[tensor]
        is_owner = key == _key(graph, step, root, owner)
        numbers[key] = builder.tensor(
            graph.tensor_names[tensor],
            int(graph.tensor_bytes[owner if is_owner else tensor]),
            producer=key[0],
            role=Role(graph.tensor_role[tensor]),
        )
    for op in range(graph.num_ops):
        _add_reads(builder, graph, step, root, numbers, op)
    return numbers


def _add_reads(
    builder: GraphBuilder,
    graph: Graph,
    step: Any,
    root: list[int],
    numbers: dict[tuple[int, int], int],
    op: int,
) -> None:
    merged = int(step[op])
    for tensor in graph.reads_of(op).tolist():
        key = _key(graph, step, root, tensor)
        if key[0] == merged:
            continue
        builder.read(merged, numbers[key])
        made = numbers.get((merged, root[tensor]))
        if made is not None:
            builder.tensors[made]["alias_of"] = numbers[key]


def _crossing(graph: Graph, step: Any, root: list[int]) -> set[tuple[int, int]]:
    """Keys of tensors that exist before the step, are held, or are read by another merged op."""
    keys = {
        _key(graph, step, root, tensor)
        for tensor in range(graph.num_tensors)
        if graph.tensor_producer[tensor] < 0 or graph.is_held[tensor]
    }
    for op in range(graph.num_ops):
        for tensor in graph.reads_of(op).tolist():
            key = _key(graph, step, root, tensor)
            if key[0] != step[op]:
                keys.add(key)
    return keys


def _key(graph: Graph, step: Any, root: list[int], tensor: int) -> tuple[int, int]:
    producer = int(graph.tensor_producer[tensor])
    return (int(step[producer]) if producer >= 0 else -1), root[tensor]


def _workspace_bytes(
    graph: Graph, ops: Any, step: Any, root: list[int], kept: dict[tuple[int, int], int]
) -> int:
    """Most bytes of storages that live only inside a merged op, at one time."""
    inner: dict[int, int] = {}
    for op in ops.tolist():
        for tensor in (*graph.made_by(op), *graph.reads_of(op).tolist()):
            owner = root[tensor]
            if (int(step[op]), owner) not in kept and graph.tensor_producer[owner] >= ops[0]:
                inner[owner] = op
    current = peak = 0
    for op in ops.tolist():
        current += sum(int(graph.held_bytes[t]) for t in graph.made_by(op) if t in inner)
        peak = max(peak, current)
        current -= sum(int(graph.held_bytes[t]) for t, last in inner.items() if last == op)
    return peak
