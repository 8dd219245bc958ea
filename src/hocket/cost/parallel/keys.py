"""Which divisions share a stage, and which hold weights alike.

Times depend on few fields at once: they are computed for the combinations that occur and looked up
for each division. Few divisions are sorted; many are numbered without sorting, each field by its
position among the values that it takes. O(divisions + product of distinct values).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.cost.parallel.columns import DivisionColumns, Places, RankPlaces, Seen, columns_of
from hocket.cost.parallel.layer import LayerSlices
from hocket.cost.parallel.ranks import Degrees
from hocket.transformer import Divisions

FEW = 20_000
"""Divisions that are sorted rather than numbered: less than loading compiled code takes."""
MAX_NUMBERS = 2**25
_SMALL = 128
"""Values of a field of one byte."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Keys:
    """Distinct stages and ranks, and which of them each division has."""

    slices: LayerSlices
    pipeline: FloatArray
    crosses_hosts: FloatArray
    degrees: Degrees
    stage: IntArray
    rank: IntArray


def num_devices(divisions: Divisions) -> IntArray:
    """Devices that each division takes."""
    return divisions.tensor * divisions.pipeline * divisions.data * divisions.context


def keys_of(divisions: Divisions, devices_per_host: int) -> Keys:
    """The distinct combinations among divisions."""
    if len(divisions) > FEW:
        numbered = _numbered(divisions, devices_per_host)
        if numbered is not None:
            return numbered
    crosses = num_devices(divisions) > devices_per_host
    values = {
        name: getattr(divisions, name)
        for name in {*Places._fields, *RankPlaces._fields} - {"crosses"}
    }
    values["crosses"] = crosses
    stages, stage = _sorted([values[name] for name in Places._fields])
    ranks, rank = _sorted([values[name] for name in RankPlaces._fields])
    return _keys(
        dict(zip(Places._fields, stages, strict=True)),
        stage,
        dict(zip(RankPlaces._fields, ranks, strict=True)),
        rank,
    )


def _keys(
    stages: Mapping[str, FloatArray],
    stage: IntArray,
    ranks: Mapping[str, FloatArray],
    rank: IntArray,
) -> Keys:
    return Keys(
        slices=LayerSlices(**{field.name: stages[field.name] for field in fields(LayerSlices)}),
        pipeline=stages["pipeline"],
        crosses_hosts=stages["crosses"],
        degrees=Degrees(**{field.name: ranks[field.name] for field in fields(Degrees)}),
        stage=stage,
        rank=rank,
    )


def _sorted(columns: list[NDArray[np.generic]]) -> tuple[list[FloatArray], IntArray]:
    rows = np.stack([column.astype(np.int64) for column in columns])
    distinct, index = np.unique(rows, axis=1, return_inverse=True)
    return [row.astype(np.float64) for row in distinct], index.reshape(-1).astype(np.int32)


# ── without sorting ──────────────────────────────────────────────────────────────────────────────


def _numbered(divisions: Divisions, devices_per_host: int) -> Keys | None:
    """As sorting gives; None where there are too many combinations to number."""
    from hocket.cost.parallel.step_kernels import mark_ranks, mark_stages, mark_values

    columns = columns_of(divisions)
    seen = Seen(**{name: np.zeros(_size(columns, name), np.bool_) for name in Seen._fields})
    mark_values(columns, devices_per_host, seen)
    values = {name: np.flatnonzero(flags) for name, flags in seen._asdict().items()}
    stage_sizes = [len(values[name]) for name in Places._fields]
    rank_sizes = [len(values[name]) for name in RankPlaces._fields]
    if max(np.prod(sizes, dtype=np.float64) for sizes in (stage_sizes, rank_sizes)) > MAX_NUMBERS:
        return None
    code, found = _codes(divisions, stage_sizes)
    mark_stages(columns, devices_per_host, Places(**_places(seen, Places._fields)), code, found)
    stages = _renamed(code, found, stage_sizes, [values[name] for name in Places._fields])
    rank_code, found = _codes(divisions, rank_sizes)
    mark_ranks(columns, RankPlaces(**_places(seen, RankPlaces._fields)), rank_code, found)
    ranks = _renamed(rank_code, found, rank_sizes, [values[name] for name in RankPlaces._fields])
    return _keys(
        dict(zip(Places._fields, stages, strict=True)),
        code,
        dict(zip(RankPlaces._fields, ranks, strict=True)),
        rank_code,
    )


def _size(columns: DivisionColumns, name: str) -> int:
    if name == "crosses":
        return 2
    column = getattr(columns, name)
    return _SMALL if column.dtype == np.int8 else int(column.max()) + 1


def _places(seen: Seen, names: tuple[str, ...]) -> dict[str, IntArray]:
    """Positions of values, each times the number of combinations of the fields after it."""
    places: dict[str, IntArray] = {}
    stride = 1
    for name in reversed(names):
        flags = getattr(seen, name)
        places[name] = ((np.cumsum(flags) - 1) * stride).astype(np.int32)
        stride *= int(np.count_nonzero(flags))
    return places


def _codes(divisions: Divisions, sizes: list[int]) -> tuple[IntArray, BoolArray]:
    return np.empty(len(divisions), dtype=np.int32), np.zeros(int(np.prod(sizes)), np.bool_)


def _renamed(
    code: IntArray, found: BoolArray, sizes: list[int], values: list[NDArray[np.intp]]
) -> list[FloatArray]:
    """The values of the combinations that occur; ``code`` becomes their positions."""
    from hocket.cost.parallel.step_kernels import rename

    rename(code, (np.cumsum(found) - 1).astype(np.int32))
    parts = np.unravel_index(np.flatnonzero(found), sizes)
    return [own[part].astype(np.float64) for own, part in zip(values, parts, strict=True)]
