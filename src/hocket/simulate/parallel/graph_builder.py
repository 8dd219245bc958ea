"""Builder of large graphs: ops and tensors are added in batches of columns, and joined at the end.

Columns have the keys of `hocket.graph.columns`, and ops in addition a device and a priority. Making
names would take most of the time, and searches never read them, so names are made on demand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, pointers, positions
from hocket.cost.demand import TIMES_BESIDE
from hocket.graph.columns import OP_COLUMNS, TENSOR_COLUMNS
from hocket.graph.graph import Graph, read_table
from hocket.graph.topological_order import topological_order
from hocket.plan.problem import Problem

_UNKNOWN = ("signature", "partner", "group", "rng_order")
"""Columns that expanded graphs leave at -1."""
_COPIED = {column.key: column for column in OP_COLUMNS if column.key not in _UNKNOWN}
_OP_DEFAULTS = {key: column.default or 0 for key, column in _COPIED.items()}
_OP_DEFAULTS |= {"device": 0, "priority": 0}
_TENSOR_DEFAULTS = {"bytes": 0, "producer": -1, "role": 0, "alias_of": -1}


@dataclass(frozen=True)
class CopiedNames:
    """Names of some ops or tensors of another graph, with a label appended."""

    names: Sequence[str]
    picked: IntArray
    label: str

    def __len__(self) -> int:
        return len(self.picked)

    def __iter__(self) -> Iterator[str]:
        return (self.names[i] + self.label for i in self.picked.tolist())


class NamesOnDemand(Protocol):
    """Names of ops or tensors, made only when they are iterated over."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...


@dataclass
class StepBuilder:
    """Columns of ops and tensors, in the order in which they were added."""

    kinds: list[str]
    modules: tuple[str, ...]
    is_named: bool = True
    """True to name ops and tensors; otherwise all names are empty."""
    num_ops: int = 0
    num_tensors: int = 0
    _op_names: list[NamesOnDemand] = field(default_factory=list)
    _tensor_names: list[NamesOnDemand] = field(default_factory=list)
    _ops: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: defaultdict(list))
    _tensors: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: defaultdict(list))
    _aliases: list[tuple[IntArray, IntArray]] = field(default_factory=list)
    _op_s: list[FloatArray] = field(default_factory=list)
    _demand: list[FloatArray] = field(default_factory=list)
    _readers: list[NDArray[Any]] = field(default_factory=list)
    _reads: list[NDArray[Any]] = field(default_factory=list)

    def kind(self, name: str) -> int:
        """Return the number of an op kind, adding the kind if it is new."""
        if name not in self.kinds:
            self.kinds.append(name)
        return self.kinds.index(name)

    def add_ops(
        self,
        names: NamesOnDemand,
        op_s: FloatArray,
        demand: FloatArray | None = None,
        **columns: Any,
    ) -> IntArray:
        """Add ops with times ``op_s`` [device type, op]; return their numbers.

        ``demand`` is that of `Costs`; by default each op fills the device.
        """
        self._op_names.append(names)
        self._op_s.append(op_s)
        all_of_it = np.ones_like(op_s)
        self._demand.append(
            np.stack((all_of_it, np.zeros_like(op_s), all_of_it, all_of_it * TIMES_BESIDE))
            if demand is None
            else demand
        )
        _append(self._ops, _OP_DEFAULTS | columns, len(names))
        self.num_ops += len(names)
        return np.arange(self.num_ops - len(names), self.num_ops, dtype=np.int32)

    def copy_ops(
        self,
        source: Problem,
        ops: IntArray,
        label: str,
        device_of: IntArray,
        priority: FloatArray,
        op_s: FloatArray | None = None,
        **changed: Any,
    ) -> IntArray:
        """Add ops of another problem at its costs; ``op_s`` and ``changed`` replace columns."""
        graph, costs = source.graph, source.costs
        columns = {key: getattr(graph, column.field)[ops] for key, column in _COPIED.items()}
        columns |= {"device": device_of[ops], "priority": priority[ops], **changed}
        return self.add_ops(
            CopiedNames(graph.op_names, ops, label),
            costs.op_s[:, ops] if op_s is None else op_s,
            None if costs.demand is None else costs.demand[:, :, ops],
            **columns,
        )

    def add_tensors(self, names: NamesOnDemand, **columns: Any) -> IntArray:
        """Add tensors and return their numbers."""
        self._tensor_names.append(names)
        _append(self._tensors, _TENSOR_DEFAULTS | columns, len(names))
        self.num_tensors += len(names)
        return np.arange(self.num_tensors - len(names), self.num_tensors, dtype=np.int32)

    def set_alias(self, tensors: IntArray, bases: IntArray) -> None:
        """Make existing tensors views of ``bases``."""
        self._aliases.append((tensors, bases))

    def add_reads(self, readers: NDArray[Any], tensors: NDArray[Any]) -> None:
        """Add reads: pairs of an op and a tensor."""
        self._readers.append(np.asarray(readers, dtype=np.int64))
        self._reads.append(np.asarray(tensors, dtype=np.int64))

    def op_s(self) -> FloatArray:
        """[device type, op]: seconds."""
        return np.concatenate(self._op_s, axis=1)[:, self._order]

    def demand(self) -> FloatArray:
        """[quantity, device type, op], as in `Costs`."""
        return np.concatenate(self._demand, axis=2)[:, :, self._order]

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the ops, in the order of the finished graph."""
        found: NDArray[Any] = np.concatenate(self._ops[name])[self._order]
        return found

    def placed(self, ops: IntArray) -> IntArray:
        """Return the numbers of ops in the finished graph; -1 stays -1."""
        found: IntArray = np.where(ops >= 0, self._rank[ops], -1).astype(np.int32)
        return found

    @cached_property
    def _order(self) -> IntArray:
        """Topological order: the order of adding if possible. No op may be added later."""
        producer = np.concatenate(self._tensors["producer"]).astype(np.int32)
        readers, reads = np.concatenate(self._readers), np.concatenate(self._reads)
        by_reader = np.argsort(readers, kind="stable")
        read_ptr = pointers(np.bincount(readers, minlength=self.num_ops))
        names = self._names(self._op_names, np.arange(self.num_ops, dtype=np.int32))
        return topological_order(names, producer, read_ptr, reads[by_reader])

    @cached_property
    def _rank(self) -> IntArray:
        return positions(self._order).astype(np.int32)

    def _names(self, pieces: list[NamesOnDemand], order: NDArray[Any]) -> tuple[str, ...]:
        """Return the names of ops or tensors in an order; empty names if the graph is not named."""
        if not self.is_named:
            return ("",) * len(order)
        names = list(chain.from_iterable(pieces))
        return tuple(map(names.__getitem__, order.tolist()))

    def graph(self, name: str, meta: dict[str, Any]) -> Graph:
        """Return the graph of all ops and tensors that were added."""
        tensors = {key: np.concatenate(values) for key, values in self._tensors.items()}
        producer = self.placed(tensors["producer"])
        order = np.argsort(producer, kind="stable")
        rank = positions(order)
        alias = tensors["alias_of"]
        # Aliases are set after all tensors exist, since a base may be added after its view.
        for views, bases in self._aliases:
            alias[views] = bases
        tensors |= {"producer": producer, "alias_of": np.where(alias >= 0, rank[alias], -1)}
        read_ptr, reads = read_table(
            self._rank[np.concatenate(self._readers)], rank[np.concatenate(self._reads)],
            self.num_ops, self.num_tensors,
        )  # fmt: skip
        columns: dict[str, Any] = {
            column.field: self.column(column.key).astype(column.dtype)
            if column.key in _COPIED
            else np.full(self.num_ops, -1, dtype=column.dtype)
            for column in OP_COLUMNS
        }
        columns |= {c.field: tensors[c.key][order].astype(c.dtype) for c in TENSOR_COLUMNS}
        return Graph(
            name=name,
            op_names=self._names(self._op_names, self._order),
            kinds=tuple(self.kinds),
            modules=self.modules,
            signatures=(),
            tensor_names=self._names(self._tensor_names, order),
            read_ptr=read_ptr,
            reads=reads,
            meta=meta,
            **columns,
        )


def _append(table: dict[str, list[NDArray[Any]]], columns: dict[str, Any], count: int) -> None:
    """Append ``count`` entries to each column, from one value or from one value for each."""
    for key, value in columns.items():
        column = np.asarray(value)
        table[key].append(column if column.ndim else np.full(count, column))
