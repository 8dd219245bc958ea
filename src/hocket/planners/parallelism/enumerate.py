"""All ways to divide a transformer's training over a number of devices, as arrays.

Degrees come from small tables: tensor degrees that divide heads and widths, pipeline degrees up to
the number of layers, context degrees that divide the sequence, data degrees that divide the batch.
Rows of these tables (*shapes*, which fix all but how memory is spent) are multiplied by the few
ways to spend memory (recomputation, ZeRO, sequence parallelism), block by block, so that millions
of divisions cost some repeats and tiles of small columns: O(divisions) with no Python per division.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np

from hocket.arrays import IntArray
from hocket.transformer import Division, Divisions, Transformer
from hocket.transformer.division import RECOMPUTES, SCHEDULES, Recompute, ScheduleName

BLOCK_DIVISIONS = 1 << 18
"""Divisions of one block: its columns stay in the processor's caches."""
FEW_DEVICES = 128
"""Up to this many devices every number of replicas is tried, else only the largest that fits."""
PLAIN: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""Schedules with one chunk per device."""
LOOPED: tuple[ScheduleName, ...] = ("interleaved", "looped-bfs")
"""Schedules whose chunks go round the devices, two or more per device."""
FOLDED: tuple[ScheduleName, ...] = ("zb-v", "v-half", "dualpipe-v")
"""Schedules with two chunks per device, whose second half goes back the way of the first."""
SPLIT: tuple[ScheduleName, ...] = ("zb-h1", "zb-h2", *FOLDED)
"""Schedules that put off the gradients of weights."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is tried. A field that is fixed (``fixed``) takes that value alone."""

    max_tensor: int
    """Largest tensor degree: the devices of one host unless a wider one is asked for."""
    max_context: int = 16
    max_microbatch: int = 64
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    fixed: tuple[tuple[str, int], ...] = ()
    """Pairs of a whole-number field of `Division` and its value."""

    def allowed(self, name: str, values: list[int]) -> list[int]:
        """Those of the values that a fixed field leaves."""
        wanted = dict(self.fixed).get(name)
        return values if wanted is None else [value for value in values if value == wanted]


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """Divisions in rows of ``num_variants``: a row is one shape with all ways to spend memory."""

    divisions: Divisions
    num_variants: int


def enumerate_divisions(
    model: Transformer, num_devices: int, global_batch: int, limits: Limits
) -> Divisions:
    """All divisions that exist, as one set of arrays; see `division_blocks` for their order."""
    blocks = [b.divisions for b in division_blocks(model, num_devices, global_batch, limits)]
    if not blocks:
        return Divisions.of([])
    return Divisions(
        **{f.name: np.concatenate([getattr(b, f.name) for b in blocks]) for f in fields(Divisions)}
    )


def division_blocks(
    model: Transformer,
    num_devices: int,
    global_batch: int,
    limits: Limits,
    block_divisions: int = BLOCK_DIVISIONS,
) -> Iterator[Block]:
    """All divisions that exist, in blocks of about ``block_divisions`` and in a fixed order."""
    columns = _shapes(model, num_devices, global_batch, limits)
    groups = _variant_group(columns)
    for group in np.unique(groups).tolist():
        variants = _variants(group, limits)
        rows = columns[groups == group]
        if not variants:
            continue
        step = max(1, block_divisions // len(variants))
        for start in range(0, len(rows), step):
            yield _block(rows[start : start + step], variants, global_batch)


def is_regular(model: Transformer, division: Division) -> bool:
    """Whether the layers divide evenly over the virtual stages."""
    return model.layers % division.num_stages == 0


# ── shapes: everything but how memory is spent ───────────────────────────────────────────────────

_SHAPE = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "schedule", "chunks")
_T, _P, _D, _C = range(4)
_SCHEDULE = _SHAPE.index("schedule")


def _shapes(model: Transformer, num_devices: int, global_batch: int, limits: Limits) -> IntArray:
    """Rows of the columns in `_SHAPE`: degrees with each microbatch size and each schedule."""
    degrees = _degrees(model, num_devices, global_batch, limits)
    sizes, size_range = _table(
        {d: [(b,) for b in _microbatches(global_batch // d, limits)] for d in set(degrees[:, _D].tolist())},
        degrees[:, _D],
    )
    orders, order_range = _table(
        {p: _orders(model, p, limits) for p in set(degrees[:, _P].tolist())}, degrees[:, _P]
    )
    num_orders = order_range[:, 1]
    counts = size_range[:, 1] * num_orders
    row = np.repeat(np.arange(len(degrees)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = sizes[size_range[row, 0] + within // num_orders[row]]
    order = orders[order_range[row, 0] + within % num_orders[row]]
    shapes = np.hstack([degrees[row], size, order[:, :2]])
    num_microbatches = global_batch // (shapes[:, _D] * size[:, 0])
    is_possible = (order[:, 2] == 0) | (num_microbatches % shapes[:, _P] == 0)
    return np.ascontiguousarray(shapes[is_possible])


def _table(entries: dict[int, list[tuple[int, ...]]], keys: IntArray) -> tuple[IntArray, IntArray]:
    """The entries of all keys below each other, and where those of each of ``keys`` start, and
    how many they are."""
    starts, start = {}, 0
    for key, rows in entries.items():
        starts[key] = (start, len(rows))
        start += len(rows)
    width = max((len(row) for rows in entries.values() for row in rows), default=1)
    table = np.array([row for rows in entries.values() for row in rows], dtype=np.int32)
    ranges = np.array([starts[key] for key in keys.tolist()], dtype=np.int32)
    return table.reshape(-1, width), ranges.reshape(-1, 2)


def _degrees(model: Transformer, num_devices: int, global_batch: int, limits: Limits) -> IntArray:
    """Tensor, pipeline, data, context and expert degrees."""
    tensors = limits.allowed("tensor", tensor_degrees(model, limits.max_tensor))
    contexts = limits.allowed("context", context_degrees(model, limits.max_context))
    pipelines = limits.allowed("pipeline", list(range(1, model.layers + 1)))
    batch_divisors = divisors(global_batch)
    found = [
        (tensor, pipeline, data, context, expert)
        for tensor, pipeline, context in product(tensors, pipelines, contexts)
        for data in _replicas(
            batch_divisors, num_devices // (tensor * pipeline * context), num_devices, limits
        )
        for expert in limits.allowed("expert", expert_degrees(model, tensor, data * context))
    ]
    return np.array(found, dtype=np.int32).reshape(-1, 5)


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def tensor_degrees(model: Transformer, largest: int) -> list[int]:
    """Degrees that give every rank whole heads and equal widths.

    Heads of keys and values are divided, or each is held by several ranks.
    """
    return [
        t
        for t in divisors(model.heads)
        if t <= largest
        and model.hidden % t == 0
        and model.mlp_width % t == 0
        and (model.kv_heads % t == 0 or t % model.kv_heads == 0)
    ]


def context_degrees(model: Transformer, largest: int) -> list[int]:
    """Powers of two that cut the sequence into twice as many equal parts.

    Each rank takes one part from the front and one from the back, so that all have equal work
    under a causal mask.
    """
    return [1] + [
        c
        for c in (2**k for k in range(1, 20))
        if c <= largest and model.sequence % (2 * c) == 0
    ]


def expert_degrees(model: Transformer, tensor: int, replicas: int) -> list[int]:
    """Degrees that divide the experts and the ranks that may share them."""
    if model.experts is None:
        return [1]
    return [e for e in divisors(model.experts.count) if (tensor * replicas) % e == 0]


def _replicas(
    batch_divisors: list[int], most: int, num_devices: int, limits: Limits
) -> list[int]:
    """Data degrees: on a large cluster only the largest, for replicas left out only lose time."""
    possible = limits.allowed("data", [d for d in batch_divisors if d <= most])
    return possible if num_devices <= FEW_DEVICES else possible[-1:]


def _microbatches(local_batch: int, limits: Limits) -> list[int]:
    """Microbatch sizes that divide what one replica works on."""
    sizes = [b for b in divisors(local_batch) if b <= limits.max_microbatch]
    return limits.allowed("microbatch", sizes)


def _orders(model: Transformer, pipeline: int, limits: Limits) -> list[tuple[int, int, bool]]:
    """Schedule, chunks, and whether microbatches must come in multiples of the pipeline.

    One device needs no schedule but its chunks in turn, which ``1f1b`` says.
    """
    most = model.layers // pipeline
    ways = [("1f1b", 1, False)] if pipeline == 1 else _ways(most)
    return [
        (SCHEDULES.index(name), chunks, divides)
        for name, chunks, divides in ways
        if name in limits.schedules and limits.allowed("chunks", [chunks])
    ]


def _ways(most_chunks: int) -> list[tuple[ScheduleName, int, bool]]:
    looped = [(name, v, name == "interleaved") for name in LOOPED for v in range(2, most_chunks + 1)]
    folded = [(name, 2, False) for name in FOLDED] if most_chunks >= 2 else []
    return [*((name, 1, False) for name in PLAIN), *looped, *folded]


# ── variants: how memory is spent ────────────────────────────────────────────────────────────────

_DIVIDES_TENSORS, _HAS_REPLICAS, _KEEPS_WEIGHTS = 1, 2, 4
_Variant = tuple[int, int, int]


def _variant_group(shapes: IntArray) -> IntArray:
    """Shapes with equal bits have the same variants."""
    split = np.isin(shapes[:, _SCHEDULE], [SCHEDULES.index(name) for name in SPLIT])
    return (
        _DIVIDES_TENSORS * (shapes[:, _T] > 1)
        + _HAS_REPLICAS * (shapes[:, _D] * shapes[:, _C] > 1)
        + _KEEPS_WEIGHTS * split
    ).astype(np.int32)


def _variants(group: int, limits: Limits) -> list[_Variant]:
    """Recomputation, ZeRO and sequence parallelism of shapes of one group.

    Sequence parallelism divides over tensor-parallel ranks, and ZeRO over replicas, so both need
    some. ZeRO 2 and 3 reduce each weight gradient as it is made and drop gathered weights after
    use: where weight gradients are put off, the weights would have to stay, which no runtime does.
    """
    most_zero = 0 if not group & _HAS_REPLICAS else 1 if group & _KEEPS_WEIGHTS else 3
    zeros = [z for z in limits.allowed("zero", list(limits.zeros)) if z <= most_zero]
    flags = limits.allowed("sequence_parallel", [0, 1] if group & _DIVIDES_TENSORS else [0])
    recomputes = [RECOMPUTES.index(name) for name in limits.recomputes]
    return list(product(recomputes, zeros, flags))


def _block(rows: IntArray, variants: list[_Variant], global_batch: int) -> Block:
    count = len(variants)
    shape = {name: np.repeat(rows[:, i], count) for i, name in enumerate(_SHAPE)}
    recompute, zero, flag = np.array(variants, dtype=np.int8).T
    schedule = np.repeat(rows[:, _SCHEDULE].astype(np.int8), count)
    divisions = Divisions(
        **(shape | {"schedule": schedule}),
        global_batch=np.full(len(rows) * count, global_batch, dtype=np.int32),
        recompute=np.tile(recompute, len(rows)),
        zero=np.tile(zero, len(rows)),
        sequence_parallel=np.tile(flag.astype(np.bool_), len(rows)),
    )
    return Block(divisions=divisions, num_variants=count)
