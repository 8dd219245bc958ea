"""Rules for valid parallel configs of a transformer, each with a message for the user.

Degrees must divide what they split, the batch must divide into microbatches, and schedules, ZeRO
and sequence parallelism must fit the other degrees.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.transformer.parallel_config import FOLDED, LOOPED, MAX_ACTIONS, SPLIT, ParallelConfig
from hocket.transformer.shape import Transformer


def broken_rules(model: Transformer, config: ParallelConfig) -> Iterator[str]:
    """Yield messages on why a config is impossible for a model."""
    yield from broken_degrees(model, config)
    yield from _batch(config)
    yield from _stages(model, config)
    yield from _modes(config)


def broken_degrees(model: Transformer, config: ParallelConfig) -> Iterator[str]:
    """Yield messages on degrees that do not divide the sizes that they split."""
    tensor, context, expert = config.tensor, config.context, config.expert
    for what, size in (("heads", model.heads), ("hidden", model.hidden), ("mlp", model.mlp_width)):
        if size % tensor:
            yield f"{what} {size} is not divisible by tensor {tensor}"
    if model.kv_heads % tensor and tensor % model.kv_heads:
        yield f"{model.kv_heads} key and value heads are not divisible by tensor {tensor}"
    # Each rank processes one part from the start of the sequence and one from its end, so that the
    # causal mask leaves equal work.
    if context > 1 and model.sequence % (2 * context):
        yield f"a sequence of {model.sequence} is not divisible by twice context {context}"
    count = model.experts.count if model.experts else 1
    if count % expert:
        yield f"{count} experts are not divisible by expert {expert}"
    elif (config.data * context * tensor) % expert:
        yield f"data x context x tensor is not divisible by expert {expert}"


def _batch(config: ParallelConfig) -> Iterator[str]:
    if config.shares is not None:
        yield from broken_shares(config)
    elif config.global_batch % (config.data * config.microbatch):
        yield (
            f"a batch of {config.global_batch} is not divisible into microbatches of "
            f"{config.microbatch} on {config.data} replicas"
        )
    if config.num_microbatches * config.num_stages > MAX_ACTIONS:
        yield (
            f"{config.num_microbatches} microbatches on {config.num_stages} stages are more "
            f"than {MAX_ACTIONS:,} actions"
        )


def broken_shares(config: ParallelConfig) -> Iterator[str]:
    """Yield messages on local batches that do not match the replicas or the global batch."""
    shares = config.shares or ()
    if len(shares) != config.data or any(share < 1 for share in shares):
        yield f"local batches {list(shares)} do not give each of {config.data} replicas a sample"
    elif sum(shares) != config.global_batch:
        yield f"local batches {list(shares)} do not add up to the batch of {config.global_batch}"


def _stages(model: Transformer, config: ParallelConfig) -> Iterator[str]:
    schedule, chunks, pipeline = config.schedule, config.chunks, config.pipeline
    # With explicit layers, two stages may hold only the embedding and the output layer.
    if config.num_stages > model.layers + (2 if config.layers else 0):
        yield f"{config.num_stages} stages are more than {model.layers} layers"
    if schedule in FOLDED and chunks != 2:
        yield f"schedule {schedule} has 2 chunks, not {chunks}"
    elif schedule not in (*FOLDED, *LOOPED) and chunks != 1:
        yield f"schedule {schedule} has 1 chunk, not {chunks}"
    if schedule == "interleaved" and chunks > 1 and config.num_microbatches % pipeline:
        yield (
            f"interleaved needs a multiple of pipeline {pipeline} as number of microbatches, "
            f"not {config.num_microbatches}"
        )
    elif schedule in (*LOOPED, *SPLIT) and config.num_microbatches < pipeline:
        yield (
            f"{schedule} is no faster than 1f1b with fewer microbatches "
            f"({config.num_microbatches}) than pipeline ranks ({pipeline})"
        )
    layers = config.layers
    if layers and len(layers) != config.num_stages:
        yield f"there are layers for {len(layers)} stages instead of {config.num_stages}"
    elif layers and sum(layers) != model.layers:
        yield f"the stages have {sum(layers)} layers instead of {model.layers}"


def _modes(config: ParallelConfig) -> Iterator[str]:
    if config.sequence_parallel and config.tensor == 1:
        yield "sequence parallelism needs two or more tensor-parallel ranks"
    if config.zero and config.data * config.context == 1:
        yield f"ZeRO {config.zero} needs two or more replicas"
    if config.zero > 1 and config.schedule in SPLIT and config.pipeline > 1:
        yield (
            f"ZeRO {config.zero} frees weights after use, but {config.schedule} delays the "
            "gradients that need them"
        )
