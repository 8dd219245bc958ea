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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.base.errors import UsageError
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.efficiency import CONSTANTS
from hocket.cost.parallel.layer import LayerSlices
from hocket.cost.parallel.ranks import Degrees, RankTimes, rank_times
from hocket.cost.parallel.setting import Setting, setting_of
from hocket.cost.parallel.similarity import factors
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.stage import (
    DEPTH,
    FLUSH,
    GATHERED,
    PATTERN,
    SCARCE,
    StageTimes,
    stage_times,
)
from hocket.hardware.cluster import Cluster, DeviceKind
from hocket.transformer import SCHEDULES, ParallelConfigs, Transformer

# Times depend on few fields at once, so they are computed for the distinct combinations of these
# fields and looked up for each config.

STAGE_FIELDS = (*(field.name for field in fields(LayerSlices)), "pipeline", "crosses_hosts")
"""Fields that the times of a pipeline stage depend on."""
RANK_FIELDS = tuple(field.name for field in fields(Degrees))
"""Fields that collectives and state of a rank depend on."""


def num_devices(configs: ParallelConfigs) -> IntArray:
    """Number of devices of each config."""
    return configs.tensor * configs.pipeline * configs.data * configs.context


def distinct(columns: Mapping[str, NDArray[Any]]) -> tuple[dict[str, FloatArray], IntArray]:
    """Distinct combinations of the columns' values, and the position of each row's combination.

    Rows are numbered column by column, so only the few values of a column and one number per row
    are sorted. O(rows log rows).
    """
    code: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
    values = {name: np.unique(column) for name, column in columns.items()}
    for name, column in columns.items():
        # Combinations are numbered in mixed radix, one digit per column.
        code = code * len(values[name]) + np.searchsorted(values[name], column)
    found, index = np.unique(code, return_inverse=True)
    places = np.unravel_index(found, [len(own) for own in values.values()])
    combinations = {
        name: own[place].astype(np.float64)
        for (name, own), place in zip(values.items(), places, strict=True)
    }
    return combinations, index.astype(np.int32)


_PATTERN = np.array([PATTERN.get(name, FLUSH) for name in SCHEDULES], dtype=np.int32)


class ExposedTimes(NamedTuple):
    """Seconds of collectives and transfers that no work hides, one entry per config."""

    each_s: FloatArray
    """Data-parallel collectives, per microbatch."""
    sent_s: FloatArray
    """Transfers between stages, per chunk of a microbatch."""
    once_s: FloatArray
    """Data-parallel collectives, once per step."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Times:
    """Times of distinct stages and ranks, and the position of each config's own."""

    setting: Setting
    configs: ParallelConfigs
    stages: StageTimes
    ranks: RankTimes
    stage: IntArray
    rank: IntArray

    @property
    def count(self) -> IntArray:
        """Microbatches per pipeline in a step."""
        return self.configs.global_batch // (self.configs.microbatch * self.configs.data)

    def exposed(self) -> ExposedTimes:
        """Exposed seconds of collectives and transfers."""
        configs, stages, ranks, stage = self.configs, self.stages, self.ranks, self.stage
        each_s, exchange_s = ranks.each_s[self.rank], stages.exchange_s[stage]
        hidden_s = (self.setting.overlaps_data * stages.busy_s)[stage]
        beside_s = (self.setting.overlaps_pipeline * stages.busy_s)[stage]
        left_each_s = exposed_s(each_s, hidden_s, configs.zero == GATHERED)
        beside_s = np.maximum(beside_s - (each_s - left_each_s), 0.0) / configs.chunks
        # With one chunk, the next microbatch waits for the transfer.
        sent_s = np.where(configs.chunks > 1, exposed_s(exchange_s, beside_s), exchange_s)
        # Work hides one thing at a time: collectives and transfers of a microbatch, or those of the
        # step.
        taken_s = each_s + configs.chunks * (exchange_s - sent_s)
        rounds = hiding_rounds(configs.pipeline, configs.chunks, self.count)
        left_s = rounds * np.maximum(hidden_s - taken_s, 0.0)
        once_s = exposed_s(ranks.once_s[self.rank], left_s) + ranks.ends_s[self.rank]
        return ExposedTimes(left_each_s, sent_s, once_s)

    def parts(self) -> dict[str, FloatArray]:
        """Seconds of each part of the step by name, one entry per config."""
        count, chunks, found = self.count, self.configs.chunks, self.exposed()
        busy_s, tensor_s, other_s = (
            column[self.stage]
            for column in (self.stages.busy_s, self.stages.tensor_s, self.stages.other_s)
        )
        return {
            "compute": count * (busy_s - tensor_s - other_s),
            "bubble": self._bubble_s(count, found.each_s),
            "tensor": count * tensor_s,
            "other": count * other_s,
            "pipeline": (found.sent_s * chunks + CONSTANTS.chunk_s * (chunks - 1)) * count,
            "data": found.once_s + count * found.each_s,
            "optimizer": self.ranks.optimizer_s[self.rank],
        }

    def _bubble_s(self, count: IntArray, each_s: FloatArray) -> FloatArray:
        """Seconds that the most loaded device waits while the pipeline fills and drains.

        ``each_s`` is exposed once per microbatch on every stage, so it lengthens the fill as
        well.
        """
        pattern, stage, fill_s = _PATTERN[self.configs.schedule], self.stage, self.stages.fill_s
        others = self.configs.pipeline - 1
        flush_s = (fill_s[FLUSH, stage] + others * each_s) / self.configs.chunks
        # With few microbatches there are too few weight gradients to fill the wait.
        enough = np.maximum(np.array(DEPTH)[pattern] * self.configs.pipeline, 1)
        filled = np.minimum(1.0, count / enough)
        split_s = filled * fill_s[pattern, stage] + (1 - filled) * fill_s[SCARCE, stage]
        return np.asarray(np.where(pattern == FLUSH, flush_s, split_s), dtype=np.float64)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPrediction:
    """Seconds of a step and its parts, one entry per config; the parts add up to the step."""

    step_s: FloatArray
    times: Times
    factor: FloatArray
    """Correction of the predicted times by measured runs; see `hocket.cost.parallel.similarity`."""

    def __len__(self) -> int:
        return len(self.step_s)

    def parts(self) -> dict[str, FloatArray]:
        """Seconds of each part of the step, by name."""
        return {name: self.factor * part_s for name, part_s in self.times.parts().items()}

    @property
    def bubble(self) -> FloatArray:
        """Fraction of the step in which the most loaded device waits for the pipeline."""
        return self.parts()["bubble"] / self.step_s


def predict(
    model: Transformer,
    configs: ParallelConfigs,
    cluster: Cluster,
    software: Software,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - frozen
) -> StepPrediction:
    """Predict step times of configs of one model, as if all devices were of the slowest type."""
    kind = slowest_kind(cluster, software)
    setting = setting_of(model, software, kind, cluster.network, coefficients)
    columns = _columns(setting, configs)
    stages = distinct({name: columns[name] for name in STAGE_FIELDS})
    ranks = distinct({name: columns[name] for name in RANK_FIELDS})
    times = _times(setting, configs, stages, ranks)
    factor = factors(coefficients.anchors, model, software, configs)
    return StepPrediction(step_s=factor * _sum(times.parts()), factor=factor, times=times)


def times_of_each(setting: Setting, configs: ParallelConfigs) -> Times:
    """Times of configs, each with its own entry in the setting (another model or program)."""
    index = np.arange(len(configs), dtype=np.int32)
    columns = {
        name: values.astype(np.float64) for name, values in _columns(setting, configs).items()
    }
    return _times(setting, configs, (columns, index), (columns, index))


def predict_settings(setting: Setting, configs: ParallelConfigs) -> FloatArray:
    """Step times of configs with a setting each, without anchors."""
    return _sum(times_of_each(setting, configs).parts())


def slices_of(columns: Mapping[str, FloatArray]) -> LayerSlices:
    """Fields of configs that a layer's time depends on."""
    return LayerSlices(**{field.name: columns[field.name] for field in fields(LayerSlices)})


def _columns(setting: Setting, configs: ParallelConfigs) -> dict[str, NDArray[Any]]:
    return {**vars(configs), "crosses_hosts": num_devices(configs) > setting.devices_per_host}


def _times(
    setting: Setting,
    configs: ParallelConfigs,
    stages: tuple[Mapping[str, FloatArray], IntArray],
    ranks: tuple[Mapping[str, FloatArray], IntArray],
) -> Times:
    """Times of combinations of fields, each with the position of every config's combination."""
    by_stage, stage = stages
    by_rank, rank = ranks
    pipeline, crosses_hosts = by_stage["pipeline"], by_stage["crosses_hosts"]
    return Times(
        setting=setting,
        configs=configs,
        stages=stage_times(setting, slices_of(by_stage), pipeline, crosses_hosts),
        ranks=rank_times(setting, Degrees(**{name: by_rank[name] for name in RANK_FIELDS})),
        stage=stage,
        rank=rank,
    )


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
    return np.maximum(CONSTANTS.never_hidden * collective_s, left_s)


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
