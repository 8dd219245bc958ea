"""Validity rules of a parallel config, each with a reason for the user."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.transformer.parallel_config import FOLDED, LOOPED, MAX_ACTIONS, SPLIT, ParallelConfig
from hocket.transformer.shape import Transformer


def broken_rules(model: Transformer, config: ParallelConfig) -> Iterator[str]:
    """Reasons why a config is impossible for a model; empty if it is possible."""
    yield from broken_degrees(model, config)
    yield from _batch(config)
    yield from _stages(model, config)
    yield from _modes(config)


def broken_degrees(model: Transformer, config: ParallelConfig) -> Iterator[str]:
    """Degrees that do not divide the sizes that they split."""
    tensor, context, expert = config.tensor, config.context, config.expert
    for what, size in (("heads", model.heads), ("hidden", model.hidden), ("mlp", model.mlp_width)):
        if size % tensor:
            yield f"{what} {size} cannot be divided by tensor {tensor}"
    if model.kv_heads % tensor and tensor % model.kv_heads:
        yield f"{model.kv_heads} heads of keys and values cannot be shared by tensor {tensor}"
    if context > 1 and model.sequence % (2 * context):
        # Each rank takes a part from the start and one from the end, so that all mask alike.
        yield f"a sequence of {model.sequence} cannot be divided by twice context {context}"
    count = model.experts.count if model.experts else 1
    if count % expert:
        yield f"{count} experts cannot be divided by expert {expert}"
    elif (config.data * context * tensor) % expert:
        yield f"expert {expert} does not divide data x context x tensor"


def _batch(config: ParallelConfig) -> Iterator[str]:
    if config.shares is not None:
        yield from broken_shares(config)
    elif config.global_batch % (config.data * config.microbatch):
        yield (
            f"a batch of {config.global_batch} cannot be divided into microbatches of "
            f"{config.microbatch} on {config.data} replicas"
        )
    if config.num_microbatches * config.num_stages > MAX_ACTIONS:
        yield (
            f"{config.num_microbatches} microbatches on {config.num_stages} stages are more "
            f"than {MAX_ACTIONS:,} actions"
        )


def broken_shares(config: ParallelConfig) -> Iterator[str]:
    """Local batches that do not match the replicas or the global batch."""
    shares = config.shares or ()
    if len(shares) != config.data or any(share < 1 for share in shares):
        yield f"shares {list(shares)} for {config.data} replicas, each of which needs a sample"
    elif sum(shares) != config.global_batch:
        yield f"shares {list(shares)} add up to {sum(shares)}, the batch is {config.global_batch}"


def _stages(model: Transformer, config: ParallelConfig) -> Iterator[str]:
    schedule, chunks, pipeline = config.schedule, config.chunks, config.pipeline
    # Stages that are stated may hold the embedding or the output layer alone.
    if config.num_stages > model.layers + (2 if config.layers else 0):
        yield f"{config.num_stages} stages are more than {model.layers} layers"
    if schedule in FOLDED and chunks != 2:
        yield f"schedule {schedule} has 2 chunks, not {chunks}"
    elif schedule not in (*FOLDED, *LOOPED) and chunks != 1:
        yield f"schedule {schedule} has 1 chunk, not {chunks}"
    if schedule == "interleaved" and chunks > 1 and config.num_microbatches % pipeline:
        yield (
            f"interleaved needs microbatches in multiples of pipeline {pipeline}, "
            f"not {config.num_microbatches}"
        )
    elif schedule in (*LOOPED, *SPLIT) and config.num_microbatches < pipeline:
        yield (
            f"{schedule} gains nothing with fewer microbatches ({config.num_microbatches}) than "
            f"pipeline ranks ({pipeline})"
        )
    yield from _layers(model, config)


def _layers(model: Transformer, config: ParallelConfig) -> Iterator[str]:
    layers = config.layers
    if layers is None:
        return
    if len(layers) != config.num_stages:
        yield f"layers of {len(layers)} stages for {config.num_stages}"
    elif sum(layers) != model.layers:
        yield f"the stages have {sum(layers)} layers, the model {model.layers}"


def _modes(config: ParallelConfig) -> Iterator[str]:
    if config.sequence_parallel and config.tensor == 1:
        yield "sequence parallelism divides over tensor-parallel ranks, and there is one"
    if config.zero and config.data * config.context == 1:
        yield f"ZeRO {config.zero} divides over replicas, and there is one"
    if config.zero > 1 and config.schedule in SPLIT and config.pipeline > 1:
        yield (
            f"ZeRO {config.zero} drops weights after use, but {config.schedule} puts their "
            "gradients off"
        )
