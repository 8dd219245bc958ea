"""Ops of a step that tensor parallelism divides, and the step of one tensor-parallel rank.

After Megatron-LM (Shoeybi et al., 2019): a layer widens by matrices whose columns are divided and
narrows by one whose rows are; all between works on a part of the features, and the sum over parts
is made once forward and once backward. Layers are known by the names that families of models give
their matrices, so that the plan matches the execution. A part is the same graph with less
arithmetic, fewer bytes and smaller tensors in these regions, priced like any other. O(ops).
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
"""Autocast reads low-precision copies of weights, and makes their gradients in that precision."""
_LAYER = re.compile(r"((?:.*?\.)?[0-9]+)\.(.+)")
_Flags = BoolArray


class PartSum(NamedTuple):
    """A sum over parts of what an op makes on each."""

    maker: int
    readers: IntArray
    """Ops that wait for it."""
    tensor: int
    """The tensor whose bytes are summed."""


@dataclass(frozen=True, eq=False)
class Regions:
    """Tensor-parallel part of a step."""

    is_divided: _Flags
    """Per op: whether each part does its share of it."""
    is_part: _Flags
    """Per tensor: whether each part has its share of it."""
    sums: tuple[PartSum, ...]


@lru_cache(maxsize=16)
def regions_of(graph: Graph) -> Regions | None:
    """Ops and tensors of a graph that tensor parallelism divides; None for unknown families."""
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
    """Into how many parts the layers of a graph can be divided; empty where they cannot.

    Parts have whole heads, which are seen where attention puts them before its tokens.
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
    """Extents of the tensors that an op is called with."""
    index = int(graph.op_signature[op])
    text = graph.signatures[index] if index >= 0 else ""
    return tensor_shapes(text)


def _matrices(graph: Graph) -> tuple[list[int], list[int]]:
    """Weights that are divided by columns and by rows, in all layers."""
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
    """Mark the forward ops between matrices, and what they make; the products themselves."""
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
    """The sum of what an op made, and who waits for it."""
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
    """Mark backward ops of what is divided; the sums of gradients that go to earlier layers."""
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
        # What goes back through columns is whole, and to be summed; all else is a part.
        is_whole = bool(is_column[op]) & ~is_weight_gradient[graph.root_of[made]]
        is_part[made] = ~is_whole
        if is_whole.any():
            makers.append(op)
    # Each product is summed by itself, as in the runtime: an op that adds two comes between.
    return [_sum_after(graph, op, is_divided, Phase.BACKWARD) for op in makers]


def _updates(graph: Graph, is_weight: _Flags, is_divided: _Flags, is_part: _Flags) -> None:
    """Mark the updates of divided weights, and the optimizer's states of them."""
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        reads, made = graph.reads_of(op), graph.made_by(op)
        if is_weight[graph.root_of[reads]].any():
            is_divided[op] = True
            is_part[reads] = True
            is_part[made.start : made.stop] = True


# ── a part ───────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=16)
def one_part(problem: Problem, degree: int) -> Problem:
    """The problem of one of so many parts; raises `CheckError` where it cannot be divided."""
    regions = regions_of(problem.graph)
    if regions is None:
        raise CheckError(
            f"the matrices of {problem.graph.name} cannot be divided",
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
        # What was measured was the whole op.
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
    """Per op: which share of the bytes that it touches a part touches."""
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
