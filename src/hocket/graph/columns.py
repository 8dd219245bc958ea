"""Columns of numbers in a Graph: keys in files, data types, allowed values and defaults.

`build`, `files` and `verify` follow these tables. Columns of strings and the table of reads are
handled by each of them separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hocket.graph.graph import DTYPES, Graph, Phase, Role, Stream

MAX_BYTES = 2**50
"""Bytes of a tensor or workspace above which it is considered a mistake (one pebibyte)."""
MAX_FLOPS = 10**24
"""FLOPs of an op above which a file is considered wrong."""
MAX_INDEX = 2**31 - 1
"""Largest index: columns of indices are 32-bit integers."""


class Column(NamedTuple):
    """A column: key in files and in `OpColumns`, field of the Graph, allowed values."""

    key: str
    field: str
    dtype: type[np.number[Any]]
    low: int
    high: int
    default: int | None
    """None if the column is required."""

    def high_in(self, graph: Graph) -> int:
        """Largest allowed value in a graph: indices must point at something that exists."""
        sizes: dict[str, Sequence[Any]] = {
            "kind": graph.kinds, "module": graph.modules, "signature": graph.signatures,
            "partner": graph.op_names, "producer": graph.op_names, "alias_of": graph.tensor_names,
        }  # fmt: skip
        return len(sizes[self.key]) - 1 if self.key in sizes else self.high


OP_COLUMNS = (
    Column("kind", "op_kind", np.int32, 0, MAX_INDEX, None),
    Column("module", "op_module", np.int32, -1, MAX_INDEX, -1),
    Column("signature", "op_signature", np.int32, -1, MAX_INDEX, -1),
    Column("phase", "op_phase", np.int8, 0, len(Phase) - 1, Phase.FORWARD),
    Column("dtype", "op_dtype", np.int8, 0, len(DTYPES) - 1, 0),
    Column("bytes_touched", "bytes_touched", np.int64, 0, MAX_BYTES, 0),
    Column("workspace_bytes", "workspace_bytes", np.int64, 0, MAX_BYTES, 0),
    Column("partner", "partner", np.int32, -1, MAX_INDEX, -1),
    Column("group", "group", np.int32, -1, MAX_INDEX, -1),
    Column("rng_order", "rng_order", np.int32, -1, MAX_INDEX, -1),
    Column("stream", "op_stream", np.int8, 0, len(Stream) - 1, Stream.COMPUTE),
    Column("flops", "flops", np.float64, 0, MAX_FLOPS, 0),
)
TENSOR_COLUMNS = (
    Column("bytes", "tensor_bytes", np.int64, 0, MAX_BYTES, None),
    Column("producer", "tensor_producer", np.int32, -1, MAX_INDEX, None),
    Column("role", "tensor_role", np.int8, 0, len(Role) - 1, Role.ACTIVATION),
    Column("alias_of", "alias_of", np.int32, -1, MAX_INDEX, -1),
)
