"""Layers of each virtual stage, and the pipeline rank that each stage is on."""

from __future__ import annotations

from hocket.base.parts import even_parts
from hocket.transformer.parallel_config import ParallelConfig
from hocket.transformer.shape import Transformer

_V_SHAPED = ("zb-v", "v-half", "dualpipe-v")


def stage_layers(model: Transformer, division: ParallelConfig) -> tuple[int, ...]:
    """Layers of each virtual stage; where they do not divide, the first stages have one more."""
    return division.layers or even_parts(model.layers, division.num_stages)


def stage_ranks(division: ParallelConfig) -> tuple[int, ...]:
    """The pipeline rank of each virtual stage: round after round, or down and up again (V)."""
    pipeline = division.pipeline
    ranks = []
    for stage in range(division.num_stages):
        turn, rank = divmod(stage, pipeline)
        goes_back = division.schedule in _V_SHAPED and turn % 2 == 1
        ranks.append(pipeline - 1 - rank if goes_back else rank)
    return tuple(ranks)
