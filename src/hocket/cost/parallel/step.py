"""Predict the time of a training step in closed form, for any number of configs at once.

A step consists of m microbatches on the most loaded device of a pipeline, the filling and draining
of the pipeline (the bubble), transfers between stages, exposed data-parallel collectives, and the
optimizer (Narayanan et al., SC'21, with explicit terms for communication). Times are computed once
per distinct combination of the fields that they depend on, and looked up for each config:
O(configs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.base.errors import UsageError
from hocket.cost.parallel import efficiency
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.columns import (
    ConfigColumns,
    Places,
    RankPlaces,
    Seen,
    StepTables,
    columns_of,
)
from hocket.cost.parallel.layer import LayerSlices
from hocket.cost.parallel.ranks import Degrees, RankTimes, rank_times
from hocket.cost.parallel.setting import Setting, setting_of
from hocket.cost.parallel.similarity import factors
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.stage import (
    DEPTH,
    DUALPIPE_V,
    FLUSH,
    GATHERED,
    SCARCE,
    V_HALF,
    ZB_H1,
    ZB_H2,
    ZB_V,
    StageTimes,
    stage_times,
)
from hocket.hardware.cluster import Cluster, DeviceKind
from hocket.transformer import SCHEDULES, ParallelConfigs, Transformer
from hocket.transformer.counts import step_flops

# Which configs have equal stages, and which have equal ranks.
#
# Times depend on few fields at once: they are computed for the combinations that occur and looked
# up for each config. Few configs are sorted; many are numbered without sorting, each field by
# its position among the values that it takes. O(configs + product of distinct values).

FEW = 20_000
"""Up to this many configs are sorted instead of numbered: faster than loading compiled code."""
MAX_NUMBERS = 2**25
_SMALL = 128
"""Number of values of a one-byte field."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Keys:
    """Distinct combinations of stage and rank fields, and the position of each config's own."""

    slices: LayerSlices
    pipeline: FloatArray
    crosses_hosts: FloatArray
    degrees: Degrees
    stage: IntArray
    rank: IntArray


def num_devices(configs: ParallelConfigs) -> IntArray:
    """Number of devices of each config."""
    return configs.tensor * configs.pipeline * configs.data * configs.context


def keys_of(configs: ParallelConfigs, devices_per_host: int) -> Keys:
    """Distinct combinations of stage and rank fields among configs."""
    if len(configs) > FEW:
        numbered = _numbered(configs, devices_per_host)
        if numbered is not None:
            return numbered
    crosses = num_devices(configs) > devices_per_host
    values = {
        name: getattr(configs, name)
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


def _numbered(configs: ParallelConfigs, devices_per_host: int) -> Keys | None:
    """Distinct combinations, found without sorting; None if there are too many to number."""
    from hocket.cost.parallel.step_kernels import mark_ranks, mark_stages, mark_values

    columns = columns_of(configs)
    seen = Seen(**{name: np.zeros(_size(columns, name), np.bool_) for name in Seen._fields})
    mark_values(columns, devices_per_host, seen)
    values = {name: np.flatnonzero(flags) for name, flags in seen._asdict().items()}
    stage_sizes = [len(values[name]) for name in Places._fields]
    rank_sizes = [len(values[name]) for name in RankPlaces._fields]
    if max(np.prod(sizes, dtype=np.float64) for sizes in (stage_sizes, rank_sizes)) > MAX_NUMBERS:
        return None
    code, found = _codes(configs, stage_sizes)
    mark_stages(columns, devices_per_host, Places(**_places(seen, Places._fields)), code, found)
    stages = _renamed(code, found, stage_sizes, [values[name] for name in Places._fields])
    rank_code, found = _codes(configs, rank_sizes)
    mark_ranks(columns, RankPlaces(**_places(seen, RankPlaces._fields)), rank_code, found)
    ranks = _renamed(rank_code, found, rank_sizes, [values[name] for name in RankPlaces._fields])
    return _keys(
        dict(zip(Places._fields, stages, strict=True)),
        code,
        dict(zip(RankPlaces._fields, ranks, strict=True)),
        rank_code,
    )


def _size(columns: ConfigColumns, name: str) -> int:
    if name == "crosses":
        return 2
    column = getattr(columns, name)
    return _SMALL if column.dtype == np.int8 else int(column.max()) + 1


def _places(seen: Seen, names: tuple[str, ...]) -> dict[str, IntArray]:
    """Per field: position of each value times the field's stride; sums number combinations."""
    places: dict[str, IntArray] = {}
    stride = 1
    for name in reversed(names):
        flags = getattr(seen, name)
        places[name] = ((np.cumsum(flags) - 1) * stride).astype(np.int32)
        stride *= int(np.count_nonzero(flags))
    return places


def _codes(configs: ParallelConfigs, sizes: list[int]) -> tuple[IntArray, BoolArray]:
    return np.empty(len(configs), dtype=np.int32), np.zeros(int(np.prod(sizes)), np.bool_)


def _renamed(
    code: IntArray, found: BoolArray, sizes: list[int], values: list[NDArray[np.intp]]
) -> list[FloatArray]:
    """Values of the combinations that occur; replaces ``code`` by their positions, in place."""
    from hocket.cost.parallel.step_kernels import rename

    rename(code, (np.cumsum(found) - 1).astype(np.int32))
    parts = np.unravel_index(np.flatnonzero(found), sizes)
    return [own[part].astype(np.float64) for own, part in zip(values, parts, strict=True)]


_PATTERNS = {
    "gpipe": FLUSH, "1f1b": FLUSH, "interleaved": FLUSH, "looped-bfs": FLUSH, "zb-h1": ZB_H1,
    "zb-h2": ZB_H2, "zb-v": ZB_V, "v-half": V_HALF, "dualpipe-v": DUALPIPE_V,
}  # fmt: skip
_PATTERN = np.array([_PATTERNS[name] for name in SCHEDULES], dtype=np.int32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Times:
    """Times of distinct stages and ranks, and the position of each config's own."""

    setting: Setting
    configs: ParallelConfigs
    stages: StageTimes
    ranks: RankTimes
    stage: IntArray
    rank: IntArray

    def parts(self) -> dict[str, FloatArray]:
        """Seconds of each part of the step by name, one entry per config."""
        configs, stages, ranks, stage, rank = (
            self.configs, self.stages, self.ranks, self.stage, self.rank,
        )  # fmt: skip
        count = configs.global_batch // (configs.microbatch * configs.data)
        busy_s, tensor_s, other_s = (
            stages.busy_s[stage],
            stages.tensor_s[stage],
            stages.other_s[stage],
        )
        hidden_s = np.broadcast_to(self.setting.overlaps_data, stages.busy_s.shape)[stage] * busy_s
        each_s = exposed_s(ranks.each_s[rank], hidden_s, configs.zero == GATHERED)
        gathered_s = ranks.each_s[rank] - each_s
        beside_s = (self.setting.overlaps_pipeline * stages.busy_s)[stage] - gathered_s
        sent_s = exposed_exchange_s(stages.exchange_s[stage], beside_s, configs.chunks)
        # Work hides one thing at a time: collectives and transfers of a microbatch, or of the step.
        taken_s = ranks.each_s[rank] + configs.chunks * (stages.exchange_s[stage] - sent_s)
        rounds = hiding_rounds(configs.pipeline, configs.chunks, count)
        left_s = rounds * np.maximum(hidden_s - taken_s, 0.0)
        once_s = exposed_s(ranks.once_s[rank], left_s) + ranks.ends_s[rank]
        return {
            "compute": count * (busy_s - tensor_s - other_s),
            "bubble": self._bubble_s(count, each_s),
            "tensor": count * tensor_s,
            "other": count * other_s,
            "pipeline": count
            * (configs.chunks * sent_s + (configs.chunks - 1) * efficiency.CONSTANTS.chunk_s),
            "data": once_s + count * each_s,
            "optimizer": ranks.optimizer_s[rank],
        }

    def _bubble_s(self, count: IntArray, each_s: FloatArray) -> FloatArray:
        """Seconds that the most loaded device waits while the pipeline fills and drains.

        ``each_s`` is exposed once per microbatch on every stage, so it lengthens the fill as
        well.
        """
        pattern, stage, fill_s = _PATTERN[self.configs.schedule], self.stage, self.stages.fill_s
        others = self.configs.pipeline - 1
        flush_s = (fill_s[FLUSH, stage] + others * each_s) / self.configs.chunks
        # Few microbatches have too few weight gradients to fill the wait.
        enough = np.maximum(np.array(DEPTH)[pattern] * self.configs.pipeline, 1)
        filled = np.minimum(1.0, count / enough)
        split_s = filled * fill_s[pattern, stage] + (1 - filled) * fill_s[SCARCE, stage]
        lag_s = np.where(pattern == V_HALF, count * self.stages.lag_s[stage], 0.0)
        return np.asarray(np.where(pattern == FLUSH, flush_s, split_s + lag_s), dtype=np.float64)

    def step_s(self) -> FloatArray:
        """Seconds of each config's step; computed in compiled code if there are more than `FEW`."""
        if len(self.configs) <= FEW:
            return _sum(self.parts())
        from hocket.cost.parallel.step_kernels import add_up

        tables = StepTables(
            busy_s=self.stages.busy_s,
            exchange_s=self.stages.exchange_s,
            fill_s=self.stages.fill_s,
            lag_s=self.stages.lag_s,
            once_s=self.ranks.once_s,
            each_s=self.ranks.each_s,
            fixed_s=self.ranks.ends_s + self.ranks.optimizer_s,
            pattern=_PATTERN,
        )
        constants = efficiency.CONSTANTS
        hiding = (
            float(self.setting.overlaps_data),
            float(self.setting.overlaps_pipeline),
            constants.never_hidden,
            constants.chunk_s,
        )
        step_s = np.empty(len(self.configs))
        add_up(columns_of(self.configs), self.stage, self.rank, tables, hiding, step_s)
        return step_s


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPrediction:
    """Seconds of a step and its parts, one entry per config; the parts add up to the step."""

    step_s: FloatArray
    times: Times
    tokens_per_sequence: int
    flops_per_sequence: float
    """FLOPs of the model per sequence, without recomputation."""
    factor: FloatArray
    """Correction of the predicted times by measured runs; see `hocket.cost.parallel.similarity`."""

    def __len__(self) -> int:
        return len(self.step_s)

    @cached_property
    def _parts(self) -> dict[str, FloatArray]:
        return {name: self.factor * part_s for name, part_s in self.times.parts().items()}

    def parts(self) -> dict[str, FloatArray]:
        """Seconds of each part of the step, by name."""
        return dict(self._parts)

    @property
    def compute_s(self) -> FloatArray:
        """Seconds of work on the most loaded device, including launches."""
        return self._parts["compute"]

    @property
    def bubble_s(self) -> FloatArray:
        """Seconds that the most loaded device waits while the pipeline fills and drains."""
        return self._parts["bubble"]

    @property
    def tensor_s(self) -> FloatArray:
        """Exposed seconds of tensor-parallel collectives."""
        return self._parts["tensor"]

    @property
    def other_s(self) -> FloatArray:
        """Exposed seconds of traffic of context and expert parallelism."""
        return self._parts["other"]

    @property
    def data_s(self) -> FloatArray:
        """Exposed seconds of data-parallel collectives."""
        return self._parts["data"]

    @property
    def optimizer_s(self) -> FloatArray:
        """Seconds of gradient clipping and the optimizer."""
        return self._parts["optimizer"]

    @property
    def bubble(self) -> FloatArray:
        """Fraction of the step in which the most loaded device waits for the pipeline."""
        return self.bubble_s / self.step_s

    @property
    def tokens_per_s(self) -> FloatArray:
        """Tokens per second of all devices together."""
        return self.times.configs.global_batch * self.tokens_per_sequence / self.step_s

    @property
    def mfu(self) -> FloatArray:
        """Model FLOPs utilization: fraction of the peak, without recomputation."""
        rate = self.times.configs.global_batch * self.flops_per_sequence / self.step_s
        return rate / (num_devices(self.times.configs) * self.times.setting.peak_flops)


def predict(
    model: Transformer,
    configs: ParallelConfigs,
    cluster: Cluster,
    software: Software,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - frozen
) -> StepPrediction:
    """Predict step times of configs of one model, as if all devices were of the slowest type."""
    network = cluster.network
    setting = setting_of(model, software, slowest_kind(cluster, software), network)
    keys = keys_of(configs, network.devices_per_host)
    times = Times(
        setting=setting,
        configs=configs,
        stages=stage_times(setting, keys.slices, keys.pipeline, keys.crosses_hosts, coefficients),
        ranks=rank_times(setting, keys.degrees, coefficients),
        stage=keys.stage,
        rank=keys.rank,
    )
    factor = factors(coefficients.anchors, model, software, configs)
    return StepPrediction(
        step_s=factor * times.step_s(),
        factor=factor,
        times=times,
        tokens_per_sequence=model.sequence,
        flops_per_sequence=step_flops(model, 1, "model"),
    )


def predict_settings(
    setting: Setting, configs: ParallelConfigs, coefficients: Coefficients
) -> FloatArray:
    """Step times of configs with a setting each (model or program), without anchors."""
    index = np.arange(len(configs), dtype=np.int32)
    columns = {f.name: getattr(configs, f.name).astype(np.float64) for f in fields(configs)}
    slices = LayerSlices(**{f.name: columns[f.name] for f in fields(LayerSlices)})
    degrees = Degrees(**{f.name: columns[f.name] for f in fields(Degrees)})
    crosses = (num_devices(configs) > setting.devices_per_host).astype(np.float64)
    times = Times(
        setting=setting,
        configs=configs,
        stages=stage_times(setting, slices, degrees.pipeline, crosses, coefficients),
        ranks=rank_times(setting, degrees, coefficients),
        stage=index,
        rank=index,
    )
    return _sum(times.parts())


def slowest_kind(cluster: Cluster, software: Software) -> DeviceKind:
    """Device type with the lowest peak FLOP/s for the program's dtype."""
    if not cluster.kinds:
        raise UsageError(f"{cluster.name!r} has no devices")
    return min(cluster.kinds, key=lambda kind: kind.peak_flops.get(software.dtype, 0.0))


def exposed_s(
    collective_s: FloatArray, hidden_s: FloatArray, is_waited_for: BoolArray | bool = False
) -> FloatArray:
    """Exposed seconds of collectives that overlap with ``hidden_s`` seconds of work.

    If only the end of both matters, this is what exceeds the work. Gathered weights instead are
    waited for at every layer, sometimes by the work and sometimes by the network: both together
    take sqrt(collectives^2 + work^2), which matches ZeRO-3's published steps within 5 % on
    average.
    """
    waited_s = np.sqrt(collective_s**2 + hidden_s**2) - hidden_s
    left_s = np.where(is_waited_for, waited_s, collective_s - hidden_s)
    return np.maximum(efficiency.CONSTANTS.never_hidden * collective_s, left_s)


def exposed_exchange_s(
    exchange_s: FloatArray, hidden_s: FloatArray, chunks: IntArray
) -> FloatArray:
    """Exposed seconds of one chunk's transfers that overlap with ``hidden_s`` seconds of work."""
    hidden_s = np.maximum(hidden_s, 0.0) / chunks
    return np.where(chunks > 1, exposed_s(exchange_s, hidden_s), exchange_s)


def hiding_rounds(pipeline: IntArray, chunks: IntArray, count: IntArray) -> FloatArray:
    """Number of microbatches whose work can hide the collectives that run once per step.

    With one chunk this is one: the last backward pass. With several, the gradients of a chunk are
    complete as soon as its last microbatches are, and these still have to pass all chunks before
    it, in rounds of as many microbatches as ranks. Likewise the new weights of the last chunk are
    not needed before the first round reaches it.
    """
    return np.clip(pipeline * (chunks - 1) / chunks, 1.0, np.maximum(count, 1))


def _sum(parts: dict[str, FloatArray]) -> FloatArray:
    return np.asarray(sum(parts.values()), dtype=np.float64)
