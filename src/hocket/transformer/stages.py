"""Layers of each virtual stage, and the pipeline rank of each stage."""

from __future__ import annotations

from hocket.base.parts import even_parts
from hocket.transformer.parallel_config import ParallelConfig
from hocket.transformer.shape import Transformer

_V_SHAPED = ("zb-v", "v-half", "dualpipe-v")


def stage_layers(model: Transformer, config: ParallelConfig) -> tuple[int, ...]:
    """Layers of each virtual stage; if uneven, the first stages have one more."""
    return config.layers or even_parts(model.layers, config.num_stages)


def stage_ranks(config: ParallelConfig) -> tuple[int, ...]:
    """Pipeline rank of each virtual stage: round-robin, or down and up again (V)."""
    pipeline = config.pipeline
    ranks = []
    for stage in range(config.num_stages):
        turn, rank = divmod(stage, pipeline)
        goes_back = config.schedule in _V_SHAPED and turn % 2 == 1
        ranks.append(pipeline - 1 - rank if goes_back else rank)
    return tuple(ranks)
