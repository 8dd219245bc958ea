"""Ops of a step that tensor parallelism splits, and the step of one tensor-parallel rank.

Follows Megatron-LM (Shoeybi et al., 2019): in each layer, matrices split by columns come first and
one split by rows comes last. All ops between them work on a part of the features, and the partial
results are all-reduced once forward and once backward. The matrices are recognized by the names
that families of models give them, so that the plan matches the execution. The step of one rank is
the same graph with fewer FLOPs and bytes and smaller tensors in these regions, and gets its costs
like any other. O(ops).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.base.errors import CheckError
from hocket.cost.roofline import costs_from_settings
from hocket.graph.graph import Graph, Phase, Role
from hocket.graph.signatures import tensor_shapes
from hocket.plan.problem import Problem
from hocket.transformer.families import named_family, without_rule

_HEADS_FIRST = ("aten.transpose", "aten.permute")
_PRODUCTS = ("aten.mm", "aten.addmm")
_CASTS = ("aten._to_copy", "aten.to")
"""Casts that autocast inserts: it rounds weights, and computes their gradients in low precision."""
_LAYER = re.compile(r"((?:.*?\.)?[0-9]+)\.(.+)")
_Flags = BoolArray


class PartSum(NamedTuple):
    """An all-reduce of an op's partial results."""

    maker: int
    readers: IntArray
    """Ops that wait for the all-reduce."""
    tensor: int
    """Tensor that is all-reduced."""


@dataclass(frozen=True, eq=False)
class Regions:
    """Ops and tensors that tensor-parallel ranks split, and the all-reduces between ranks."""

    is_divided: _Flags
    """Per op: True if ranks split its work."""
    is_part: _Flags
    """Per tensor: True if each rank has a part of it."""
    sums: tuple[PartSum, ...]


@lru_cache(maxsize=16)
def regions_of(graph: Graph) -> Regions | None:
    """Return what tensor parallelism splits in a graph; None for unknown families of models."""
    columns, rows = _matrices(graph)
    if not columns or not rows:
        return None
    is_weight = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_weight[[*columns, *rows]] = True
    is_part = is_weight[graph.root_of]
    is_divided = np.zeros(graph.num_ops, dtype=np.bool_)
    row_ops, column_ops = _walk(graph, set(columns), set(rows), is_divided, is_part)
    if not row_ops:
        return None
    sums = [_sum_after(graph, op, is_divided, Phase.FORWARD) for op in row_ops]
    sums += _backward(graph, column_ops, is_divided, is_part)
    _updates(graph, is_weight, is_divided, is_part)
    return Regions(is_divided, is_part, tuple(each for each in sums if len(each.readers)))


def degrees_of(graph: Graph) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that a graph's layers allow; empty if they cannot be
    split.

    The degree must divide the number of attention heads, which is read from the transpose that
    moves heads before tokens, and the extents of the split matrices.
    """
    regions = regions_of(graph)
    if regions is None:
        return ()
    heads, widths = set[int](), set[int]()
    is_forward = graph.op_phase == Phase.FORWARD
    for op in np.flatnonzero(regions.is_divided & is_forward).tolist():
        kind, shapes = graph.kind_of(op), _shapes(graph, op)
        if kind in _HEADS_FIRST and shapes and len(shapes[0]) == 4:
            heads.add(shapes[0][2])
        if kind in _PRODUCTS and len(shapes) > 1:
            widths |= {*shapes[-1]}
    if not heads:
        return ()
    return tuple(d for d in (2, 4, 8) if all(extent % d == 0 for extent in (*heads, *widths)))


def _shapes(graph: Graph, op: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that an op is called with."""
    index = int(graph.op_signature[op])
    text = graph.signatures[index] if index >= 0 else ""
    return tensor_shapes(text)


def _matrices(graph: Graph) -> tuple[list[int], list[int]]:
    """Return the weights that are split by columns and by rows, in all layers."""
    lasting = (graph.tensor_role == Role.PARAMETER) & (graph.tensor_producer < 0)
    layers: dict[str, dict[str, int]] = defaultdict(dict)
    for tensor in np.flatnonzero(lasting & (graph.alias_of < 0)).tolist():
        if match := _LAYER.fullmatch(graph.tensor_names[tensor]):
            layers[match[1]][match[2]] = tensor
    columns, rows = [], []
    for weights in layers.values():
        family = named_family({name.rpartition(".")[0] for name in weights})
        if family is None or without_rule(family, weights):
            continue
        for name, tensor in weights.items():
            module, _, what = name.rpartition(".")
            if module in family.columns:
                columns.append(tensor)
            elif module in family.rows and what == "weight":
                rows.append(tensor)
    return columns, rows


def _walk(
    graph: Graph, columns: set[int], rows: set[int], is_divided: _Flags, is_part: _Flags
) -> tuple[list[int], list[int]]:
    """Mark split forward ops and tensors; return the products with rows and with columns."""
    row_ops: list[int] = []
    column_ops: list[int] = []
    is_lasting = graph.tensor_producer[graph.root_of] < 0
    columns, rows = set(columns), set(rows)
    for op in np.flatnonzero(graph.op_phase == Phase.FORWARD).tolist():
        reads = graph.reads_of(op)
        made = graph.made_by(op)
        roots = set(graph.root_of[reads].tolist())
        is_fed = bool((is_part[reads] & ~is_lasting[reads]).any())
        if not graph.works[op] and not is_fed:
            continue  # a view of a weight
        if graph.kind_of(op) in _CASTS and roots & (columns | rows):
            copies = set(graph.root_of[made.start : made.stop].tolist())
            (columns if roots & columns else rows).update(copies)
            is_divided[op] = True
            is_part[made.start : made.stop] = is_lasting[made.start : made.stop] = True
            continue
        if roots & rows and is_fed:
            row_ops.append(op)
            is_divided[op] = True
            continue  # the sum of its results over parts is whole again
        if roots & columns:
            column_ops.append(op)
        elif not is_fed:
            continue
        is_divided[op] = True
        is_part[made.start : made.stop] = True
    return row_ops, column_ops


def _sum_after(graph: Graph, maker: int, is_divided: _Flags, phase: Phase) -> PartSum:
    """Return the all-reduce of an op's output, with the ops that wait for it."""
    made = graph.made_by(maker)
    readers = {
        int(op) for tensor in made for op in graph.users_of(tensor)
        if graph.op_phase[op] == phase and not is_divided[op]
    }  # fmt: skip
    largest = max(made, key=lambda tensor: int(graph.tensor_bytes[tensor]), default=-1)
    return PartSum(maker, np.array(sorted(readers), np.int32), largest)


def _backward(
    graph: Graph, column_ops: list[int], is_divided: _Flags, is_part: _Flags
) -> list[PartSum]:
    """Mark backward ops of split ops; return the all-reduces of gradients between layers."""
    is_backward = graph.op_phase == Phase.BACKWARD
    partner = np.maximum(graph.partner, 0)
    of_region = is_backward & (graph.partner >= 0) & is_divided[partner]
    is_divided |= of_region
    is_weight_gradient = np.zeros(graph.num_tensors, dtype=np.bool_)
    gradients = np.flatnonzero(graph.tensor_role == Role.GRADIENT)
    is_weight_gradient[graph.root_of[gradients]] = True
    for op in np.flatnonzero(is_backward)[::-1].tolist():
        roots = graph.root_of[list(graph.made_by(op))]
        if graph.kind_of(op) in _CASTS and is_weight_gradient[roots].any():
            is_weight_gradient[graph.root_of[graph.reads_of(op)]] = True
    is_column = np.isin(partner, column_ops) & of_region
    makers: list[int] = []
    for op in np.flatnonzero(of_region).tolist():
        made = np.array(graph.made_by(op), dtype=np.int64)
        # Gradients of inputs of column-parallel products have full size and are all-reduced; all
        # other results are shards.
        is_whole = bool(is_column[op]) & ~is_weight_gradient[graph.root_of[made]]
        is_part[made] = ~is_whole
        if is_whole.any():
            makers.append(op)
    # Each product has its own all-reduce, as in the runtime, although their sum would need only
    # one.
    return [_sum_after(graph, op, is_divided, Phase.BACKWARD) for op in makers]


def _updates(graph: Graph, is_weight: _Flags, is_divided: _Flags, is_part: _Flags) -> None:
    """Mark the updates of split weights, and their optimizer state."""
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        reads, made = graph.reads_of(op), graph.made_by(op)
        if is_weight[graph.root_of[reads]].any():
            is_divided[op] = True
            is_part[reads] = True
            is_part[made.start : made.stop] = True


# ── a part ───────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=16)
def one_part(problem: Problem, degree: int) -> Problem:
    """Return the problem of one tensor-parallel rank; raises `CheckError` for unknown layers."""
    regions = regions_of(problem.graph)
    if regions is None:
        raise CheckError(
            f"the matrices of {problem.graph.name} cannot be split",
            hint="layers with the names of GPT-2, Llama, OPT or BERT can; plan without it",
        )
    graph = _part(problem.graph, regions, degree, problem.costs.settings.get("profile") is not None)
    costs = costs_from_settings(graph, problem.cluster, problem.costs.settings)
    return replace(problem, work=graph, op_costs=costs)


def _part(graph: Graph, regions: Regions, degree: int, is_profiled: bool) -> Graph:
    other = graph.other_batch
    kept = _kept(graph, regions, degree)
    columns = _columns(graph, regions, degree, kept)
    if is_profiled:
        # Profiles have measured the full op, so the signature of a shard must not match.
        unknown = np.where(regions.is_divided, -1, graph.op_signature).astype(np.int32)
        columns["op_signature"] = unknown
    if other is not None:
        columns["other_batch"] = replace(other, **_columns(other, regions, degree, kept))
    return replace(graph, **columns)


def _columns(source: Any, regions: Regions, degree: int, kept: FloatArray) -> dict[str, Any]:
    part = np.where(regions.is_divided, 1 / degree, 1.0)
    size: LongArray = source.tensor_bytes
    return {
        "flops": source.flops * part,
        "bytes_touched": np.rint(source.bytes_touched * kept).astype(np.int64),
        "workspace_bytes": np.rint(source.workspace_bytes * part).astype(np.int64),
        "tensor_bytes": np.where(regions.is_part, -(-size // degree), size),
    }


def _kept(graph: Graph, regions: Regions, degree: int) -> FloatArray:
    """Return the fraction of each op's bytes that one tensor-parallel rank touches."""
    size = graph.tensor_bytes.astype(np.float64)
    own = np.where(regions.is_part, size / degree, size)
    reader = graph.reader
    sums = np.zeros((2, graph.num_ops))
    made = graph.tensor_producer >= 0
    for row, values in enumerate((size, own)):
        np.add.at(sums[row], reader, values[graph.reads])
        np.add.at(sums[row], graph.tensor_producer[made], values[made])
    found: FloatArray = np.where(sums[0] > 0, sums[1] / np.maximum(sums[0], 1), 1.0)
    return np.where(regions.is_divided, found, 1.0)
