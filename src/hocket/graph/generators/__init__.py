"""Synthetic graphs of any size, for tests and measurements (`generate`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hocket.base.errors import UsageError, unknown_name
from hocket.graph.generators.forward_graphs import chain, layered, series_parallel
from hocket.graph.generators.training_steps import (
    GNMT_MIN_OPS,
    TRANSFORMER_MIN_OPS,
    gnmt,
    transformer,
)
from hocket.graph.graph import Graph

MAX_OPS = 1_000_000
# The largest seed that `numpy.random.RandomState` accepts.
_MAX_SEED = 2**32 - 1


class GraphFamily(NamedTuple):
    """A family of generated graphs."""

    make: Callable[[int, int], Graph]
    min_ops: int
    description: str


FAMILIES = {
    "chain": GraphFamily(chain, 1, "each op reads the one before"),
    "series-parallel": GraphFamily(series_parallel, 1, "nested forks and joins"),
    "layered": GraphFamily(layered, 1, "layers of ops that read earlier layers at random"),
    "gnmt": GraphFamily(gnmt, GNMT_MIN_OPS, "recurrent layers unrolled over time, training step"),
    "transformer": GraphFamily(
        transformer,
        TRANSFORMER_MIN_OPS,
        "attention and MLP blocks, training step",
    ),
}


def generate(family: str, num_ops: int, seed: int = 0) -> Graph:
    """Generate a graph of the family with ``num_ops`` ops; deterministic in its arguments.

    chain, series-parallel and layered have exactly that many ops. gnmt differs by at most one op
    per layer (it has about the cube root of ``num_ops`` layers), transformer by at most 17 ops,
    half a block.
    """
    if family not in FAMILIES:
        raise unknown_name("family of graphs", family, FAMILIES)
    _require_range("number of ops", num_ops, FAMILIES[family].min_ops, MAX_OPS, family)
    _require_range("seed", seed, 0, _MAX_SEED, family)
    return FAMILIES[family].make(num_ops, seed)


def _require_range(what: str, value: int, low: int, high: int, family: str) -> None:
    if not low <= value <= high:
        raise UsageError(
            f"{what} is {value}", hint=f"{family!r} takes from {low} to {high}", where=what
        )
