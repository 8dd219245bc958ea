"""The rules that a division must keep, one by one, each with the reason for the person."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.transformer.parallel_config import FOLDED, LOOPED, MAX_ACTIONS, SPLIT, ParallelConfig
from hocket.transformer.shape import Transformer


def broken_rules(model: Transformer, division: ParallelConfig) -> Iterator[str]:
    """What makes a division impossible for a model; nothing where it is possible."""
    yield from broken_degrees(model, division)
    yield from _batch(division)
    yield from _stages(model, division)
    yield from _modes(division)


def broken_degrees(model: Transformer, division: ParallelConfig) -> Iterator[str]:
    """Degrees that do not divide what they must."""
    tensor, context, expert = division.tensor, division.context, division.expert
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
    elif (division.data * context * tensor) % expert:
        yield f"expert {expert} does not divide data x context x tensor"


def _batch(division: ParallelConfig) -> Iterator[str]:
    if division.shares is not None:
        yield from broken_shares(division)
    elif division.global_batch % (division.data * division.microbatch):
        yield (
            f"a batch of {division.global_batch} cannot be divided into microbatches of "
            f"{division.microbatch} on {division.data} replicas"
        )
    if division.num_microbatches * division.num_stages > MAX_ACTIONS:
        yield (
            f"{division.num_microbatches} microbatches on {division.num_stages} stages are more "
            f"than {MAX_ACTIONS:,} actions"
        )


def broken_shares(division: ParallelConfig) -> Iterator[str]:
    """Shares of the batch that are not those of its replicas."""
    shares = division.shares or ()
    if len(shares) != division.data or any(share < 1 for share in shares):
        yield f"shares {list(shares)} for {division.data} replicas, each of which needs a sample"
    elif sum(shares) != division.global_batch:
        yield f"shares {list(shares)} add up to {sum(shares)}, the batch is {division.global_batch}"


def _stages(model: Transformer, division: ParallelConfig) -> Iterator[str]:
    schedule, chunks, pipeline = division.schedule, division.chunks, division.pipeline
    # Stages that are stated may hold the embedding or the output layer alone.
    if division.num_stages > model.layers + (2 if division.layers else 0):
        yield f"{division.num_stages} stages are more than {model.layers} layers"
    if schedule in FOLDED and chunks != 2:
        yield f"schedule {schedule} has 2 chunks, not {chunks}"
    elif schedule not in (*FOLDED, *LOOPED) and chunks != 1:
        yield f"schedule {schedule} has 1 chunk, not {chunks}"
    if schedule == "interleaved" and chunks > 1 and division.num_microbatches % pipeline:
        yield (
            f"interleaved needs microbatches in multiples of pipeline {pipeline}, "
            f"not {division.num_microbatches}"
        )
    elif schedule in (*LOOPED, *SPLIT) and division.num_microbatches < pipeline:
        yield (
            f"{schedule} gains nothing with fewer microbatches ({division.num_microbatches}) than "
            f"pipeline ranks ({pipeline})"
        )
    yield from _layers(model, division)


def _layers(model: Transformer, division: ParallelConfig) -> Iterator[str]:
    layers = division.layers
    if layers is None:
        return
    if len(layers) != division.num_stages:
        yield f"layers of {len(layers)} stages for {division.num_stages}"
    elif sum(layers) != model.layers:
        yield f"the stages have {sum(layers)} layers, the model {model.layers}"


def _modes(division: ParallelConfig) -> Iterator[str]:
    if division.sequence_parallel and division.tensor == 1:
        yield "sequence parallelism divides over tensor-parallel ranks, and there is one"
    if division.zero and division.data * division.context == 1:
        yield f"ZeRO {division.zero} divides over replicas, and there is one"
    if division.zero > 1 and division.schedule in SPLIT and division.pipeline > 1:
        yield (
            f"ZeRO {division.zero} drops weights after use, but {division.schedule} puts their "
            "gradients off"
        )
