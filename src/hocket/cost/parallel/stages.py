"""Costs of every virtual stage of one config, for the simulation of its schedule.

Uses the same formulas as `predict`, but each stage has its own number of layers, device type and
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError, unknown_name
from hocket.cost.parallel import efficiency
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.costs import StageCosts
from hocket.cost.parallel.layer import LayerSlices, LayerTimes, boundary_s, layer_times
from hocket.cost.parallel.ranks import Degrees, rank_times
from hocket.cost.parallel.setting import Setting, setting_of
from hocket.cost.parallel.similarity import factors
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.stage import GATHERED, stage_times
from hocket.cost.parallel.stage_memory import stage_memory
from hocket.cost.parallel.step import exposed_exchange_s, exposed_s, hiding_rounds, slowest_kind
from hocket.hardware.cluster import Cluster, DeviceKind
from hocket.transformer import RECOMPUTES, ParallelConfig, ParallelConfigs, Transformer
from hocket.transformer.stages import stage_layers, stage_ranks


def stage_costs(
    model: Transformer,
    config: ParallelConfig,
    cluster: Cluster,
    software: Software,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - frozen
    kinds: Sequence[str] | None = None,
) -> StageCosts:
    """Costs of the virtual stages; ``kinds`` names the device type of each pipeline rank."""
    of_rank = _kinds(config, cluster, software, kinds)
    parts = {
        kind.name: _parts(
            config, setting_of(model, software, kind, cluster.networks[kind.name]), coefficients
        )
        for kind in {kind.name: kind for kind in of_rank}.values()
    }
    layers, ranks = stage_layers(model, config), stage_ranks(config)
    last = len(layers) - 1
    times = [
        parts[of_rank[rank].name].stage_s(config, count, stage == 0, stage == last)
        for stage, (count, rank) in enumerate(zip(layers, ranks, strict=True))
    ]
    held = stage_memory(model, config, software)
    (factor,) = factors(
        coefficients.anchors, model, software, ParallelConfigs.of([config])
    ).tolist()
    between = setting_of(model, software, of_rank[0], cluster.network)
    return StageCosts(
        forward_s=tuple(factor * stage[0] for stage in times),
        input_gradient_s=tuple(factor * stage[1] for stage in times),
        weight_gradient_s=tuple(factor * stage[2] for stage in times),
        send_s=tuple(factor * send_s for send_s in _sends_s(config, ranks, between, coefficients)),
        activation_bytes=held.activation_bytes,
        weight_gradient_bytes=held.weight_gradient_bytes,
        state_bytes=held.state_bytes,
        after_s=tuple(factor * parts[kind.name].after_s for kind in of_rank),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _KindTimes:
    """Times of one device type."""

    layer: LayerTimes
    each_s: float
    """Seconds per microbatch of exposed data-parallel collectives."""
    after_s: float
    """Seconds after the last backward pass: exposed data-parallel collectives and the optimizer."""

    def stage_s(
        self, config: ParallelConfig, layers: int, is_first: bool, is_last: bool
    ) -> tuple[float, float, float]:
        """Seconds of one virtual stage: forward, input gradients, weight gradients."""
        times = self.layer
        constants, chunks = efficiency.CONSTANTS, config.chunks
        constant_s = constants.microbatch_s + self.each_s + (chunks - 1) * constants.chunk_s
        constant_s = constant_s / chunks
        embedding_s = times.embedding_s.item() / 2 * is_first
        logits_s = times.logits_s.item() * is_last
        backward_s = times.logits_backward_s.item() / 2 * is_last
        return (
            layers * times.forward_s.item() + embedding_s + logits_s,
            layers * times.input_gradient_s.item() + embedding_s + backward_s + constant_s,
            layers * times.weight_gradient_s.item() + backward_s,
        )


def _parts(config: ParallelConfig, setting: Setting, coefficients: Coefficients) -> _KindTimes:
    slices, degrees = _slices(config), _degrees(config)
    one = np.ones(1)
    ranks = rank_times(setting, degrees, coefficients)
    # A microbatch's work as `predict` sees it is what collectives can hide behind.
    stage = stage_times(setting, slices, degrees.pipeline, one, coefficients)
    hidden_s, chunks = setting.overlaps_data * stage.busy_s, np.asarray(config.chunks)
    each_s = exposed_s(ranks.each_s, hidden_s, config.zero == GATHERED)
    beside_s = setting.overlaps_pipeline * stage.busy_s - (ranks.each_s - each_s)
    sent_s = exposed_exchange_s(stage.exchange_s, beside_s, chunks)
    taken_s = ranks.each_s + chunks * (stage.exchange_s - sent_s)
    rounds = hiding_rounds(np.asarray(config.pipeline), chunks, np.asarray(config.num_microbatches))
    left_s = rounds * np.maximum(hidden_s - taken_s, 0.0)
    after_s = exposed_s(ranks.once_s, left_s) + ranks.ends_s + ranks.optimizer_s
    return _KindTimes(
        layer=layer_times(setting, slices, coefficients),
        each_s=each_s.item(),
        after_s=after_s.item(),
    )


def _kinds(
    config: ParallelConfig, cluster: Cluster, software: Software, names: Sequence[str] | None
) -> list[DeviceKind]:
    """Device type of each pipeline rank."""
    if names is None:
        return [slowest_kind(cluster, software)] * config.pipeline
    if len(names) != config.pipeline:
        raise UsageError(
            f"{len(names)} kinds of device for {config.pipeline} pipeline ranks",
            hint="name one kind per rank",
        )
    known = {kind.name: kind for kind in cluster.kinds}
    for name in names:
        if name not in known:
            raise unknown_name("device kind", name, known, where=cluster.name)
    return [known[name] for name in names]


def _sends_s(
    config: ParallelConfig, ranks: Sequence[int], setting: Setting, coefficients: Coefficients
) -> tuple[float, ...]:
    """Seconds from each stage to the next: 0 on the same rank, less inside a host."""
    per_rank = config.tensor * config.context * config.data
    per_host = int(setting.devices_per_host)
    hosts = [rank * per_rank // per_host for rank in ranks]
    near, far = (
        boundary_s(setting, _slices(config), np.full(1, flag), coefficients).item()
        for flag in (0.0, 1.0)
    )
    return tuple(
        0.0 if ranks[i] == ranks[i + 1] else near if hosts[i] == hosts[i + 1] else far
        for i in range(len(ranks) - 1)
    )


def _slices(config: ParallelConfig) -> LayerSlices:
    return LayerSlices(
        tensor=_one(config.tensor),
        context=_one(config.context),
        expert=_one(config.expert),
        microbatch=_one(config.microbatch),
        recompute=_one(RECOMPUTES.index(config.recompute)),
        sequence_parallel=_one(config.sequence_parallel),
    )


def _degrees(config: ParallelConfig) -> Degrees:
    return Degrees(
        tensor=_one(config.tensor),
        pipeline=_one(config.pipeline),
        data=_one(config.data),
        context=_one(config.context),
        expert=_one(config.expert),
        zero=_one(config.zero),
    )


def _one(value: float) -> FloatArray:
    return np.full(1, value, dtype=np.float64)
