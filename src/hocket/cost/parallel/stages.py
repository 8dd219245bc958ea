"""Costs of every virtual stage of one config, for the simulation of its schedule.

Uses the same formulas as `predict`, but each stage has its own number of layers, device type and
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.costs import StageCosts
from hocket.cost.parallel.efficiency import CONSTANTS
from hocket.cost.parallel.layer import boundary_s
from hocket.cost.parallel.setting import Setting, setting_of
from hocket.cost.parallel.similarity import factors
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.stage_memory import stage_memory
from hocket.cost.parallel.step import slices_of, slowest_kind, times_of_each
from hocket.hardware.cluster import Cluster
from hocket.transformer import ParallelConfig, ParallelConfigs, Transformer


def stage_costs(
    model: Transformer,
    config: ParallelConfig,
    cluster: Cluster,
    software: Software,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - frozen
    kinds: Sequence[str] | None = None,
) -> StageCosts:
    """Costs of the virtual stages; ``kinds`` names the device type of each pipeline rank."""
    known = {kind.name: kind for kind in cluster.kinds}
    kind_of_rank = [slowest_kind(cluster, software)] * config.pipeline
    kind_of_rank = kind_of_rank if kinds is None else [known[name] for name in kinds]
    times = {
        kind.name: _kind_times(
            setting_of(model, software, kind, cluster.networks[kind.name], coefficients), config
        )
        for kind in {kind.name: kind for kind in kind_of_rank}.values()
    }
    ranks = config.stage_ranks
    one = ParallelConfigs.of([config])
    factor = factors(coefficients.anchors, model, software, one).item()
    layers = np.array(config.stage_layers(model.layers))
    is_first, is_last = np.arange(len(layers)) == 0, np.arange(len(layers)) == len(layers) - 1
    forward, input_gradient, weight_gradient, embedding, logits, logits_back, each, _ = (
        factor * np.array([times[kind_of_rank[rank].name] for rank in ranks]).T
    )
    # Half of the output layer's backward pass are gradients of its input, half of its weights.
    back = is_last * logits_back / 2
    forward = layers * forward + is_first * embedding / 2 + is_last * logits
    input_gradient = layers * input_gradient + is_first * embedding / 2 + back + each
    weight_gradient = layers * weight_gradient + back
    held = stage_memory(model, config, software)
    between = setting_of(model, software, kind_of_rank[0], cluster.network, coefficients)
    return StageCosts(
        forward_s=tuple(forward.tolist()),
        input_gradient_s=tuple(input_gradient.tolist()),
        weight_gradient_s=tuple(weight_gradient.tolist()),
        send_s=tuple(factor * send_s for send_s in _sends_s(config, ranks, between)),
        activation_bytes=held.activation_bytes,
        weight_gradient_bytes=held.weight_gradient_bytes,
        state_bytes=held.state_bytes,
        after_s=tuple(factor * times[kind.name][-1] for kind in kind_of_rank),
    )


def _kind_times(setting: Setting, config: ParallelConfig) -> tuple[float, ...]:
    """Seconds on one device type.

    Three parts of a layer, the embedding, the output layer forward and backward, the constant part
    of each chunk, and the time after the last backward pass.
    """
    times, chunks = times_of_each(setting, ParallelConfigs.of([config])), config.chunks
    exposed, layer = times.exposed(), times.stages.layer
    each_s = CONSTANTS.microbatch_s + exposed.each_s + (chunks - 1) * CONSTANTS.chunk_s
    columns = (
        layer.forward_s, layer.input_gradient_s, layer.weight_gradient_s, layer.embedding_s,
        layer.logits_s, layer.logits_backward_s, each_s / chunks,
        exposed.once_s + times.ranks.optimizer_s,
    )  # fmt: skip
    return tuple(column.item() for column in columns)


def _sends_s(config: ParallelConfig, ranks: Sequence[int], setting: Setting) -> tuple[float, ...]:
    """Seconds from each stage to the next: 0 on the same rank, less inside a host."""
    per_rank = config.tensor * config.context * config.data
    hosts = [rank * per_rank // int(setting.devices_per_host) for rank in ranks]
    slices = slices_of(vars(ParallelConfigs.of([config])))
    near, far = (boundary_s(setting, slices, np.full(1, flag)).item() for flag in (0.0, 1.0))
    return tuple(
        0.0 if ranks[i] == ranks[i + 1] else near if hosts[i] == hosts[i + 1] else far
        for i in range(len(ranks) - 1)
    )
