"""Enumerate all parallel configs of a transformer on a number of devices, as arrays.

Degrees come from small tables: tensor degrees divide heads and widths, pipeline degrees go up to
the number of layers, context degrees divide the sequence, data degrees divide the batch. Rows of
these tables (*shapes*, which fix everything but the memory options) are combined with the few
memory options (recomputation, ZeRO, sequence parallelism) block by block. So millions of configs
are made by repeating and tiling small columns: O(configs) without Python code per config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import IntArray
from hocket.plan.limits import Limits
from hocket.planners.parallel.pools import Pool
from hocket.transformer import ParallelConfig, ParallelConfigs, Transformer
from hocket.transformer.parallel_config import (
    FOLDED,
    LOOPED,
    MAX_ACTIONS,
    PLAIN,
    RECOMPUTES,
    SCHEDULES,
    SPLIT,
    ScheduleName,
)
from hocket.transformer.rules import broken_degrees

BLOCK_CONFIGS = 1 << 16
"""Configs per block: many enough to amortize the tables of a block, few enough for memory."""
FEW_DEVICES = 128
"""Largest number of devices for which all data degrees are tried; above, only the largest."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ConfigBlock:
    """Configs in rows of ``num_variants``: each row is one shape with all memory options."""

    configs: ParallelConfigs
    num_variants: int
    num_recomputes: int
    """Number of recomputation modes. The variants of a row are sorted by mode."""
    shapes: NDArray[np.intp]
    """Position of each row's shape in the array of shapes."""


def joined(parts: list[ParallelConfigs]) -> ParallelConfigs:
    """Concatenate several sets of configs."""
    return ParallelConfigs(
        **{
            f.name: np.concatenate([getattr(d, f.name) for d in parts])
            for f in fields(ParallelConfigs)
        }
    )


def config_blocks(
    model: Transformer,
    pool: Pool,
    global_batch: int,
    limits: Limits,
    block_configs: int = BLOCK_CONFIGS,
) -> Iterator[ConfigBlock]:
    """Yield all valid configs in a fixed order, in blocks of about ``block_configs``."""
    shapes = _shapes(model, pool, global_batch, limits)
    yield from shape_blocks(shapes, global_batch, limits, block_configs)


def shape_blocks(
    shapes: IntArray, global_batch: int, limits: Limits, block_configs: int = BLOCK_CONFIGS
) -> Iterator[ConfigBlock]:
    """Yield blocks of configs that combine every row of ``shapes`` with every memory option."""
    groups = _variant_group(shapes)
    for group in np.unique(groups).tolist():
        variants = _variants(group, limits)
        own = np.flatnonzero(groups == group)
        if not variants:
            continue
        step = max(1, block_configs // len(variants))
        for start in range(0, len(own), step):
            yield _block(shapes, own[start : start + step], variants, global_batch)


# ── shapes: everything but how memory is spent ───────────────────────────────────────────────────

SHAPE = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "schedule", "chunks")
"""Names of the columns of a shape."""
_T, _P, _D, _C = range(4)
_SCHEDULE = SHAPE.index("schedule")


def _shapes(model: Transformer, pool: Pool, global_batch: int, limits: Limits) -> IntArray:
    """Rows of `SHAPE`: degrees combined with each microbatch size and each schedule."""
    degrees = _degrees(model, pool, global_batch, limits)
    sizes, size_range = _table(
        degrees[:, _D], 1, lambda d: [(b,) for b in microbatches(global_batch // d, limits)]
    )
    orders, order_range = _table(degrees[:, _P], 3, lambda p: _orders(model, p, limits))
    num_orders = order_range[:, 1]
    counts = size_range[:, 1] * num_orders
    row = np.repeat(np.arange(len(degrees)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = sizes[size_range[row, 0] + within // num_orders[row]]
    order = orders[order_range[row, 0] + within % num_orders[row]]
    shapes = np.hstack([degrees[row], size, order[:, :2]])
    num_microbatches = global_batch // (shapes[:, _D] * size[:, 0])
    # Conditions of schedules on the number of microbatches, for all shapes at once.
    is_possible = num_microbatches >= shapes[:, _P] * (order[:, 2] >= _FILLED)
    is_possible &= (order[:, 2] != _IN_ROUNDS) | (num_microbatches % shapes[:, _P] == 0)
    is_possible &= num_microbatches * shapes[:, _P] * order[:, 1] <= MAX_ACTIONS
    return np.ascontiguousarray(shapes[is_possible])


def _table(
    keys: IntArray, width: int, rows_of: Callable[[int], list[tuple[int, ...]]]
) -> tuple[IntArray, IntArray]:
    """Rows of all keys in one array, and (start, count) of each key's rows."""
    distinct, which = np.unique(keys, return_inverse=True)
    rows = [rows_of(key) for key in distinct.tolist()]
    counts = np.array([len(own) for own in rows], dtype=np.int32)
    table = np.array([row for own in rows for row in own], dtype=np.int32).reshape(-1, width)
    ranges = np.stack([np.cumsum(counts) - counts, counts], axis=1)
    return table, ranges[which].astype(np.int32)


def _degrees(model: Transformer, pool: Pool, global_batch: int, limits: Limits) -> IntArray:
    """Rows of tensor, pipeline, data, context and expert degrees."""
    tensors = limits.allowed("tensor", tensor_degrees(model, limits.max_tensor))
    contexts = limits.allowed("context", context_degrees(model, limits.max_context))
    pipelines = limits.allowed("pipeline", list(range(1, model.layers + 1)))
    batch_divisors = divisors(global_batch)
    num_groups = {tensor: pool.num_groups(tensor) for tensor in tensors}
    is_small = pool.num_devices <= FEW_DEVICES
    found = [
        (tensor, pipeline, data, context, expert)
        for tensor, pipeline, context in product(tensors, pipelines, contexts)
        for data in _replicas(
            batch_divisors, num_groups[tensor] // (pipeline * context), is_small, limits
        )
        for expert in limits.allowed("expert", expert_degrees(model, tensor, data * context))
    ]
    return np.array(found, dtype=np.int32).reshape(-1, 5)


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    # Divisors come in pairs, one of them at most the square root.
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def tensor_degrees(model: Transformer, largest: int) -> list[int]:
    """Degrees that give every rank an integer number of heads and equal widths.

    Heads of keys and values are sharded, or each is replicated on several ranks.
    """
    return [
        t
        for t in divisors(model.heads)
        if t <= largest and _is_legal(model, ParallelConfig(tensor=t))
    ]


def context_degrees(model: Transformer, largest: int) -> list[int]:
    """Powers of two c such that the sequence splits into 2 c equal parts.

    Each rank holds one part from the front and one from the back, so that all ranks have equal work
    under a causal mask.
    """
    powers = (2**k for k in range(20))
    return [
        c for c in powers if c <= max(largest, 1) and _is_legal(model, ParallelConfig(context=c))
    ]


def _is_legal(model: Transformer, degrees: ParallelConfig) -> bool:
    return not any(True for _ in broken_degrees(model, degrees))


def expert_degrees(model: Transformer, tensor: int, replicas: int) -> list[int]:
    """Expert degrees that divide both the number of experts and the ranks they are spread over."""
    if model.experts is None:
        return [1]
    return [e for e in divisors(model.experts.count) if (tensor * replicas) % e == 0]


def _replicas(batch_divisors: list[int], most: int, is_small: bool, limits: Limits) -> list[int]:
    """Data degrees; on large clusters only the largest, since idle devices cannot help."""
    possible = limits.allowed("data", [d for d in batch_divisors if d <= most])
    # On large clusters fewer replicas leave devices idle, which is never faster.
    return possible if is_small else possible[-1:]


def microbatches(local_batch: int, limits: Limits) -> list[int]:
    """Microbatch sizes that divide the local batch."""
    sizes = [b for b in divisors(local_batch) if b <= limits.max_microbatch]
    return limits.allowed("microbatch", sizes)


_ANY, _FILLED, _IN_ROUNDS = range(3)
"""Condition on the number of microbatches: any, at least one per rank, or a multiple of ranks."""


def _orders(model: Transformer, pipeline: int, limits: Limits) -> list[tuple[int, ...]]:
    """Rows of schedule, chunks, and the schedule's condition on the number of microbatches.

    A pipeline of one rank runs its microbatches in turn, which is listed as ``1f1b``. With fewer
    microbatches than ranks, chunks and delayed weight gradients only cost time, so the plain
    schedules are enough.
    """
    most = model.layers // pipeline
    options = _schedule_options(most) if pipeline > 1 else [("1f1b", 1, _ANY)]
    return [
        (SCHEDULES.index(name), chunks, asks)
        for name, chunks, asks in options
        if name in limits.schedules and limits.allowed("chunks", [chunks])
    ]


def _schedule_options(most_chunks: int) -> list[tuple[ScheduleName, int, int]]:
    chunks = range(2, most_chunks + 1)
    plain = [(name, 1, _FILLED if name in SPLIT else _ANY) for name in PLAIN]
    looped = [(n, v, _IN_ROUNDS if n == "interleaved" else _FILLED) for n in LOOPED for v in chunks]
    folded = [(name, 2, _FILLED) for name in FOLDED] if most_chunks >= 2 else []
    return [*plain, *looped, *folded]


# ── variants: how memory is spent ────────────────────────────────────────────────────────────────

_DIVIDES_TENSORS, _HAS_REPLICAS, _KEEPS_WEIGHTS, _IS_PIPELINE = 1, 2, 4, 8
_Variant = tuple[int, int, int]


def _variant_group(shapes: IntArray) -> IntArray:
    """Group number of each shape; shapes of a group have the same memory options."""
    split = np.isin(shapes[:, _SCHEDULE], [SCHEDULES.index(name) for name in SPLIT])
    tensor, pipeline, data, context = shapes[:, : _C + 1].T
    bits = [tensor > 1, data * context > 1, split, pipeline > 1]
    weights = np.array(
        [_DIVIDES_TENSORS, _HAS_REPLICAS, _KEEPS_WEIGHTS, _IS_PIPELINE], dtype=np.int32
    )
    return np.asarray(weights @ np.array(bits, dtype=np.int32), dtype=np.int32)


def _variants(group: int, limits: Limits) -> list[_Variant]:
    """Memory options (recomputation, ZeRO, sequence parallelism) of the shapes of one group.

    Sequence parallelism shards over tensor-parallel ranks, and ZeRO over replicas, so both need
    more than one. ZeRO 2 and 3 reduce each weight gradient as it is made and drop gathered weights
    after use. With delayed weight gradients the gathered weights would have to stay, which no
    runtime supports.
    """
    most_zero = 0 if not group & _HAS_REPLICAS else 1 if group & _KEEPS_WEIGHTS else 3
    tried = [z for z in limits.allowed("zero", list(limits.zeros)) if z <= most_zero]
    zeros = [z for z in tried if z in limits.pipelined_zeros or not group & _IS_PIPELINE]
    flags = limits.allowed("sequence_parallel", [0, 1] if group & _DIVIDES_TENSORS else [0])
    recomputes = [RECOMPUTES.index(name) for name in RECOMPUTES if name in limits.recomputes]
    return list(product(recomputes, zeros, flags))


def _block(
    shapes: IntArray, own: NDArray[np.intp], variants: list[_Variant], global_batch: int
) -> ConfigBlock:
    rows, count = shapes[own], len(variants)
    recompute, zero, flag = np.array(variants, dtype=np.int8).T
    columns: dict[str, Any] = {name: np.repeat(rows[:, i], count) for i, name in enumerate(SHAPE)}
    columns |= {
        "schedule": columns["schedule"].astype(np.int8),
        "global_batch": np.full(len(rows) * count, global_batch, dtype=np.int32),
        "recompute": np.tile(recompute, len(rows)),
        "zero": np.tile(zero, len(rows)),
        "sequence_parallel": np.tile(flag.astype(np.bool_), len(rows)),
    }
    return ConfigBlock(
        configs=ParallelConfigs(**columns),
        num_variants=count,
        num_recomputes=len(set(recompute.tolist())),
        shapes=own,
    )
