"""The time of a training step, for any number of divisions at once.

A step is m microbatches on the most loaded device of a pipeline, the filling and draining of the
pipeline (the bubble), transfers between stages, collectives of data-parallel ranks as far as
nothing hides them, and the optimizer (Narayanan et al., SC'21, with their terms for communication
made explicit). Times are computed for the distinct combinations of fields that they depend on, and
looked up for each division: O(divisions).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.base.errors import UsageError
from hocket.cost.parallel import efficiency
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.columns import StepTables, columns_of
from hocket.cost.parallel.keys import FEW, keys_of, num_devices
from hocket.cost.parallel.layer import LayerSlices
from hocket.cost.parallel.likeness import factors
from hocket.cost.parallel.network import network_of
from hocket.cost.parallel.ranks import Degrees, RankTimes, rank_times
from hocket.cost.parallel.setting import Setting, setting_of
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
from hocket.transformer import SCHEDULES, Divisions, Transformer
from hocket.transformer.counts import step_flops

_WAYS = {
    "gpipe": FLUSH, "1f1b": FLUSH, "interleaved": FLUSH, "looped-bfs": FLUSH, "zb-h1": ZB_H1,
    "zb-h2": ZB_H2, "zb-v": ZB_V, "v-half": V_HALF, "dualpipe-v": DUALPIPE_V,
}  # fmt: skip
_WAY = np.array([_WAYS[name] for name in SCHEDULES], dtype=np.int32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Times:
    """The times of distinct stages and ranks, and which of them each division has."""

    setting: Setting
    divisions: Divisions
    stages: StageTimes
    ranks: RankTimes
    stage: IntArray
    rank: IntArray

    def parts(self) -> dict[str, FloatArray]:
        """The parts of every division's step by name."""
        divisions, stages, ranks, stage, rank = (
            self.divisions, self.stages, self.ranks, self.stage, self.rank,
        )  # fmt: skip
        count = divisions.global_batch // (divisions.microbatch * divisions.data)
        busy_s, tensor_s, other_s = (
            stages.busy_s[stage],
            stages.tensor_s[stage],
            stages.other_s[stage],
        )
        hidden_s = np.broadcast_to(self.setting.overlaps_data, stages.busy_s.shape)[stage] * busy_s
        each_s = exposed_s(ranks.each_s[rank], hidden_s, divisions.zero == GATHERED)
        gathered_s = ranks.each_s[rank] - each_s
        beside_s = (self.setting.overlaps_pipeline * stages.busy_s)[stage] - gathered_s
        sent_s = exposed_exchange_s(stages.exchange_s[stage], beside_s, divisions.chunks)
        # Work hides one thing at a time: collectives and transfers of a microbatch, or of the step.
        taken_s = ranks.each_s[rank] + divisions.chunks * (stages.exchange_s[stage] - sent_s)
        rounds = hiding_rounds(divisions.pipeline, divisions.chunks, count)
        left_s = rounds * np.maximum(hidden_s - taken_s, 0.0)
        once_s = exposed_s(ranks.once_s[rank], left_s) + ranks.ends_s[rank]
        return {
            "compute": count * (busy_s - tensor_s - other_s),
            "bubble": self._bubble_s(count),
            "tensor": count * tensor_s,
            "other": count * other_s,
            "pipeline": count
            * (divisions.chunks * sent_s + (divisions.chunks - 1) * efficiency.CONSTANTS.chunk_s),
            "data": once_s + count * each_s,
            "optimizer": ranks.optimizer_s[rank],
        }

    def _bubble_s(self, count: IntArray) -> FloatArray:
        """Waiting of the most loaded devices while the pipeline fills and drains."""
        way, stage, fill_s = _WAY[self.divisions.schedule], self.stage, self.stages.fill_s
        flush_s = fill_s[FLUSH, stage] / self.divisions.chunks
        # Few microbatches have too few weight gradients to fill the wait.
        enough = np.maximum(np.array(DEPTH)[way] * self.divisions.pipeline, 1)
        filled = np.minimum(1.0, count / enough)
        split_s = filled * fill_s[way, stage] + (1 - filled) * fill_s[SCARCE, stage]
        lag_s = np.where(way == V_HALF, count * self.stages.lag_s[stage], 0.0)
        return np.asarray(np.where(way == FLUSH, flush_s, split_s + lag_s), dtype=np.float64)

    def step_s(self) -> FloatArray:
        """Every division's step; for many in compiled code, which makes no arrays on the way."""
        if len(self.divisions) <= FEW:
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
            way=_WAY,
        )
        constants = efficiency.CONSTANTS
        hiding = (
            float(self.setting.overlaps_data),
            float(self.setting.overlaps_pipeline),
            constants.never_hidden,
            constants.chunk_s,
        )
        step_s = np.empty(len(self.divisions))
        add_up(columns_of(self.divisions), self.stage, self.rank, tables, hiding, step_s)
        return step_s


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPrediction:
    """Seconds of a step and its parts, one entry per division; the parts add up to the step."""

    step_s: FloatArray
    times: Times
    tokens_per_sequence: int
    flops_per_sequence: float
    """Model FLOPs, without what is computed again."""
    factor: FloatArray
    """What measured runs make of the formulas' times; see `hocket.cost.parallel.likeness`."""

    def __len__(self) -> int:
        return len(self.step_s)

    @cached_property
    def _parts(self) -> dict[str, FloatArray]:
        return {name: self.factor * part_s for name, part_s in self.times.parts().items()}

    def parts(self) -> dict[str, FloatArray]:
        """The parts of the step by name, in seconds; see the properties."""
        return dict(self._parts)

    @property
    def compute_s(self) -> FloatArray:
        """Work of the most loaded device, launches included."""
        return self._parts["compute"]

    @property
    def bubble_s(self) -> FloatArray:
        """Its waiting while the pipeline fills and drains."""
        return self._parts["bubble"]

    @property
    def tensor_s(self) -> FloatArray:
        """Exposed collectives of tensor-parallel ranks."""
        return self._parts["tensor"]

    @property
    def other_s(self) -> FloatArray:
        """Exposed traffic of context and expert parallelism."""
        return self._parts["other"]

    @property
    def data_s(self) -> FloatArray:
        """Exposed collectives of data-parallel ranks."""
        return self._parts["data"]

    @property
    def optimizer_s(self) -> FloatArray:
        """Gradient clipping and optimizer."""
        return self._parts["optimizer"]

    @property
    def bubble(self) -> FloatArray:
        """Share of the step in which the most loaded device waits for the pipeline."""
        return self.bubble_s / self.step_s

    @property
    def tokens_per_s(self) -> FloatArray:
        """Tokens per second of all devices together."""
        return self.times.divisions.global_batch * self.tokens_per_sequence / self.step_s

    @property
    def mfu(self) -> FloatArray:
        """Share of the peak that the model's own FLOPs reach."""
        rate = self.times.divisions.global_batch * self.flops_per_sequence / self.step_s
        return rate / (num_devices(self.times.divisions) * self.times.setting.peak_flops)


def predict(
    model: Transformer,
    divisions: Divisions,
    cluster: Cluster,
    software: Software,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - frozen
) -> StepPrediction:
    """The step times of divisions of one model; of unequal devices the slowest kind counts."""
    network = network_of(cluster)
    setting = setting_of(model, software, slowest_kind(cluster, software), network)
    keys = keys_of(divisions, network.devices_per_host)
    times = Times(
        setting=setting,
        divisions=divisions,
        stages=stage_times(setting, keys.slices, keys.pipeline, keys.crosses_hosts, coefficients),
        ranks=rank_times(setting, keys.degrees, coefficients),
        stage=keys.stage,
        rank=keys.rank,
    )
    factor = factors(coefficients.anchors, model, software, divisions)
    return StepPrediction(
        step_s=factor * times.step_s(),
        factor=factor,
        times=times,
        tokens_per_sequence=model.sequence,
        flops_per_sequence=step_flops(model, 1, "model"),
    )


def predict_settings(
    setting: Setting, divisions: Divisions, coefficients: Coefficients
) -> FloatArray:
    """Step times where each division has a setting of its own: another model, or program.

    By the formulas alone: anchors are no part of a setting.
    """
    index = np.arange(len(divisions), dtype=np.int32)
    columns = {f.name: getattr(divisions, f.name).astype(np.float64) for f in fields(divisions)}
    slices = LayerSlices(**{f.name: columns[f.name] for f in fields(LayerSlices)})
    degrees = Degrees(**{f.name: columns[f.name] for f in fields(Degrees)})
    crosses = (num_devices(divisions) > setting.devices_per_host).astype(np.float64)
    times = Times(
        setting=setting,
        divisions=divisions,
        stages=stage_times(setting, slices, degrees.pipeline, crosses, coefficients),
        ranks=rank_times(setting, degrees, coefficients),
        stage=index,
        rank=index,
    )
    return _sum(times.parts())


def slowest_kind(cluster: Cluster, software: Software) -> DeviceKind:
    """The kind of device with the lowest rate for the program's arithmetic."""
    if not cluster.kinds:
        raise UsageError(f"{cluster.name!r} has no devices")
    return min(cluster.kinds, key=lambda kind: kind.peak_flops.get(software.dtype, 0.0))


def exposed_s(
    collective_s: FloatArray, hidden_s: FloatArray, is_waited_for: BoolArray | bool = False
) -> FloatArray:
    """What is left of collectives that overlap with ``hidden_s`` of work.

    The longer of the two decides where all that counts is when both have ended. Gathered weights
    are waited for at every layer, now by the work and now by the network: together the two take the
    root of their squares, which meets ZeRO-3's published steps within 5 % on average.
    """
    waited_s = np.sqrt(collective_s**2 + hidden_s**2) - hidden_s
    left_s = np.where(is_waited_for, waited_s, collective_s - hidden_s)
    return np.maximum(efficiency.CONSTANTS.never_hidden * collective_s, left_s)


def exposed_exchange_s(
    exchange_s: FloatArray, hidden_s: FloatArray, chunks: IntArray
) -> FloatArray:
    """What is left of the transfers of one of several chunks beside ``hidden_s`` of work on all."""
    hidden_s = np.maximum(hidden_s, 0.0) / chunks
    return np.where(chunks > 1, exposed_s(exchange_s, hidden_s), exchange_s)


def hiding_rounds(pipeline: IntArray, chunks: IntArray, count: IntArray) -> FloatArray:
    """Microbatches of work that the collectives of a step can hide behind.

    One, the last backward; with several chunks, gradients of a chunk are complete when the last
    microbatches have left it, and those then pass all chunks before it, a round of as many as ranks
    each (and new weights of the last chunk are not needed before the first round has come to it).
    """
    return np.clip(pipeline * (chunks - 1) / chunks, 1.0, np.maximum(count, 1))


def _sum(parts: dict[str, FloatArray]) -> FloatArray:
    return np.asarray(sum(parts.values()), dtype=np.float64)
