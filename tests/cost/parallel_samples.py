"""Models, clusters and configs for the tests of the step predictor."""

from __future__ import annotations

from functools import cache

import numpy as np

from hocket.cost.parallel.software import Software
from hocket.cost.parallel.step import predict
from hocket.hardware.cluster import Cluster
from hocket.hardware.shorthand import cluster_from_text
from hocket.transformer import (
    RECOMPUTES,
    SCHEDULES,
    Experts,
    ParallelConfig,
    ParallelConfigs,
    Transformer,
)
from hocket.transformer.files import find_model

LLAMA = find_model("llama3-8b")
ON = "8xdgx-h100"


def gpt(hidden: int = 1024, layers: int = 24, heads: int = 16, **others: int) -> Transformer:
    """A GPT with an MLP of four times its width."""
    return Transformer(
        name=f"gpt-{hidden}-{layers}",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_width=hidden // heads,
        mlp_width=4 * hidden,
        mlp="gelu",
        vocabulary=others.get("vocabulary", 51200),
        sequence=others.get("sequence", 2048),
        tied_embeddings=True,
        learned_positions=True,
        biases=True,
        dropout=True,
    )


def mixture() -> Transformer:
    """A small mixture of experts."""
    return Transformer(
        name="mixture",
        hidden=2048,
        layers=16,
        heads=16,
        kv_heads=4,
        head_width=128,
        mlp_width=8192,
        mlp="swiglu",
        vocabulary=32000,
        sequence=4096,
        tied_embeddings=False,
        learned_positions=False,
        biases=False,
        dropout=False,
        experts=Experts(count=16, active=2, mlp_width=4096, shared_width=1024, dense_layers=2),
    )


@cache
def cluster_of(text: str) -> Cluster:
    """A cluster, made once."""
    return cluster_from_text(text)


def random_configs(count: int, seed: int, max_degree: int = 3) -> ParallelConfigs:
    """ParallelConfigs with every field varied, each with at least one microbatch."""
    random = np.random.default_rng(seed)

    def power(top: int) -> np.ndarray:
        return (2 ** random.integers(0, top + 1, count)).astype(np.int32)

    data, microbatch = power(max_degree), power(2)
    return ParallelConfigs(
        tensor=power(max_degree),
        pipeline=power(max_degree),
        data=data,
        context=power(1),
        expert=power(2),
        chunks=random.integers(1, 4, count).astype(np.int32),
        microbatch=microbatch,
        global_batch=(data * microbatch * random.integers(1, 40, count)).astype(np.int32),
        schedule=random.integers(0, len(SCHEDULES), count).astype(np.int8),
        recompute=random.integers(0, len(RECOMPUTES), count).astype(np.int8),
        zero=random.integers(0, 4, count).astype(np.int8),
        sequence_parallel=random.integers(0, 2, count).astype(np.bool_),
    )


def parts(model: Transformer, software: Software, on: str = ON, **fields: object) -> dict:
    config = ParallelConfig(**{"data": 8, "global_batch": 64, "zero": 3, **fields})
    found = predict(model, ParallelConfigs.of([config]), cluster_of(on), software)
    return {name: float(value[0]) for name, value in found.parts().items()}


def step_s(model: Transformer, software: Software, on: str = ON, **fields: object) -> float:
    return sum(parts(model, software, on, **fields).values())
