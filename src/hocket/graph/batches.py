"""The same training step with another number of samples.

If samples do not interact, the FLOPs, traffic and memory of an op are the sum of a part that
does not depend on the batch (weights, the optimizer) and a part per sample. So two captures of
different batch sizes give the numbers of every other size, by a straight line through the two, op
by op and tensor by tensor; the extents in the ops' signatures follow the same line. A third capture
shows whether the line holds; if it does not (a loss over pairs of samples), the batch is not split.
O(ops + tensors).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import IntArray
from hocket.base.errors import UsageError
from hocket.graph.graph import Graph, OtherBatch

_LOGGER = logging.getLogger(__name__)
_NUMBER = re.compile(r"\d+")
_COLUMNS = ("flops", "bytes_touched", "workspace_bytes", "tensor_bytes")
_SAME = (
    "op_kind", "op_phase", "op_dtype", "partner", "tensor_role", "tensor_producer", "alias_of",
    "read_ptr", "reads",
)  # fmt: skip


def has_same_ops(graph: Graph, other: Graph) -> bool:
    """True if two graphs have the same ops and tensors, except for their sizes."""
    # Signatures may differ, since they contain the sizes; everything else must be equal.
    return graph.kinds == other.kinds and all(
        np.array_equal(getattr(graph, name), getattr(other, name)) for name in _SAME
    )


def with_other_batch(graph: Graph, num_samples: int, other: Graph, other_samples: int) -> Graph:
    """Attach the columns of another capture to a graph; returned unchanged if the ops differ."""
    if num_samples == other_samples or not has_same_ops(graph, other):
        return graph
    columns: dict[str, Any] = {name: getattr(other, name) for name in _COLUMNS}
    seen = OtherBatch(
        num_samples=num_samples,
        other_samples=other_samples,
        signatures=other.signatures,
        op_signature=other.op_signature,
        **columns,
    )
    return replace(graph, other_batch=seen)


def unsplit(graph: Graph, reason: str) -> Graph:
    """Mark a graph's batch as one that cannot be split, with the reason."""
    _LOGGER.debug("the batch of %s cannot be split: %s", graph.name, reason)
    return replace(graph, other_batch=None, meta={**graph.meta, "unsplit": reason})


def at_batch(graph: Graph, num_samples: int) -> Graph:
    """Return the step with another number of samples; raises `UsageError` if sizes are unknown."""
    other = graph.other_batch
    if other is None:
        raise UsageError(
            f"the graph {graph.name!r} does not say what grows with its batch",
            hint="capture the model again: hocket capture MODEL",
        )
    if num_samples == other.num_samples:
        return graph
    # Position on the line: 0 at the graph's own size, 1 at the other.
    position = (num_samples - other.num_samples) / (other.other_samples - other.num_samples)
    signatures, op_signature = _signatures(graph, other, position)
    columns: dict[str, Any] = {
        name: _on_line(getattr(graph, name), getattr(other, name), position) for name in _COLUMNS
    }
    meta = {**graph.meta, "batch": num_samples}
    return replace(
        graph, signatures=signatures, op_signature=op_signature, other_batch=None, meta=meta,
        **columns,
    )  # fmt: skip


def differing_op(graph: Graph, other: Graph) -> str | None:
    """Return the first op at which two graphs with the same ops differ in size; None if none does.

    FLOPs and tensor sizes are compared. The bytes that an op touches may differ a little (rows of a
    table, once most of it is read): the op's cost is then less exact, but not wrong.
    """
    differs = ~np.isclose(graph.flops, other.flops, rtol=1e-6)
    if differs.any():
        return graph.op_names[int(np.argmax(differs))]
    differs = graph.tensor_bytes != other.tensor_bytes
    if not differs.any():
        return None
    # An input has no producer (-1): the first op stands for it.
    return graph.op_names[max(0, int(graph.tensor_producer[int(np.argmax(differs))]))]


def _on_line(own: NDArray[Any], other: NDArray[Any], position: float) -> NDArray[Any]:
    """Inter- or extrapolate between two columns; integers stay integers, negatives become 0."""
    # In floating point, because the products of large integers would overflow.
    value = np.maximum(own + position * (other.astype(np.float64) - own), 0.0)
    moved: NDArray[Any] = np.rint(value).astype(own.dtype) if own.dtype.kind == "i" else value
    return moved


def _signatures(
    graph: Graph, other: OtherBatch, position: float
) -> tuple[tuple[str, ...], IntArray]:
    """Return the distinct signatures at the new batch size, and the index of each op's."""
    if not graph.signatures:
        return graph.signatures, graph.op_signature
    number: dict[tuple[int, int], int] = {}
    index = [
        # Ops with equal signatures at one size may differ at the other, so pairs are numbered.
        -1 if pair[0] < 0 else number.setdefault(pair, len(number))
        for pair in zip(graph.op_signature.tolist(), other.op_signature.tolist(), strict=True)
    ]
    texts = tuple(
        _between(graph.signatures[own], other.signatures[away], position) for own, away in number
    )
    return _interned(texts, index)


def _interned(texts: Sequence[str], index: list[int]) -> tuple[tuple[str, ...], IntArray]:
    number: dict[str, int] = {}
    # The last entry is for ops without a signature, whose index is -1.
    of_text = [number.setdefault(text, len(number)) for text in texts] + [-1]
    return tuple(number), np.array([of_text[i] for i in index], dtype=np.int32)


def _between(own: str, other: str, position: float) -> str:
    """Inter- or extrapolate the numbers in two signatures of the same form."""
    if own == other:
        return own
    numbers, others = _NUMBER.findall(own), _NUMBER.findall(other)
    # Signatures of different form have no numbers to match.
    if len(numbers) != len(others):
        return own
    moved = iter(_moved(a, b, position) for a, b in zip(numbers, others, strict=True))
    return _NUMBER.sub(lambda _: next(moved), own)


def _moved(own: str, other: str, position: float) -> str:
    """Inter- or extrapolate between two numbers; equal ones are constants and stay as written."""
    if own == other:
        return own
    return str(max(0, round(int(own) + position * (int(other) - int(own)))))
