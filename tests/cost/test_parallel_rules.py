"""What Narayanan et al. (SC'21) and BLOOM's builders found must come out of the formulas."""

from __future__ import annotations

import pytest
from cost.parallel_samples import cluster_of, gpt

from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.step import predict
from hocket.transformer import ParallelConfig, ParallelConfigs, Transformer


def sequences_per_s(
    model: Transformer, configs: list[ParallelConfig], software: str = "megatron-2021"
) -> list[float]:
    num_hosts = max(1, configs[0].num_devices // 8)
    prediction = predict(
        model,
        ParallelConfigs.of(configs),
        cluster_of(f"{num_hosts}xdgx-a100-80g"),
        find_software(software),
    )
    return [
        config.global_batch / step_s
        for config, step_s in zip(configs, prediction.step_s.tolist(), strict=True)
    ]


@pytest.mark.parametrize("batch", [32, 128])
def test_tensor_parallelism_is_best_up_to_the_server_for_162b(batch: int) -> None:
    degrees = [2, 4, 8, 16, 32]
    rates = sequences_per_s(
        gpt(20480, 32, 128),
        [
            ParallelConfig(tensor=t, pipeline=64 // t, global_batch=batch, recompute="full")
            for t in degrees
        ],
    )
    assert degrees[rates.index(max(rates))] == 8


def test_interleaving_gains_more_at_small_batches_for_175b() -> None:
    gains = []
    for batch in (12, 24, 36, 48, 60):
        plain, interleaved = sequences_per_s(
            gpt(12288, 96, 96),
            [
                ParallelConfig(tensor=8, pipeline=12, global_batch=batch, recompute="full"),
                ParallelConfig(
                    tensor=8,
                    pipeline=12,
                    global_batch=batch,
                    recompute="full",
                    chunks=4,
                    schedule="interleaved",
                ),
            ],
        )
        gains.append(interleaved / plain)
    assert all(gain > 1 for gain in gains)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.1


def test_microbatches_of_two_are_best_for_91b() -> None:
    sizes = [1, 2, 4, 8]
    model = gpt(15360, 32, 128)

    def rates(batch: int) -> list[float]:
        return sequences_per_s(
            model,
            [
                ParallelConfig(
                    tensor=8, pipeline=8, microbatch=b, global_batch=batch, recompute="full"
                )
                for b in sizes
            ],
        )

    small, large = rates(128), rates(512)
    assert sizes[small.index(max(small))] == 2
    assert large[1] > 0.99 * max(large)


@pytest.mark.parametrize("batch", [32, 512])
def test_throughput_of_5_9b_falls_with_pipeline_and_with_tensor_degree(batch: int) -> None:
    model = gpt(3840, 32, 32)
    pipelines = sequences_per_s(
        model,
        [
            ParallelConfig(pipeline=p, data=64 // p, global_batch=batch, recompute="full")
            for p in (2, 4, 8, 16, 32)
        ],
    )
    tensors = sequences_per_s(
        model,
        [
            ParallelConfig(tensor=t, data=64 // t, global_batch=batch, recompute="full")
            for t in (2, 4, 8, 16, 32)
        ],
    )
    assert pipelines == sorted(pipelines, reverse=True)
    assert tensors == sorted(tensors, reverse=True)


def test_recomputation_costs_about_a_third() -> None:
    full, none = sequences_per_s(
        gpt(12288, 80, 96),
        [
            ParallelConfig(tensor=8, pipeline=16, global_batch=64, recompute=recompute)
            for recompute in ("full", "none")
        ],
    )
    assert 1.25 < none / full < 1.4


def test_bloom_prefers_half_a_server_of_tensor_parallelism() -> None:
    # Measured: 102.0 s with t = 4 and d = 8 against 121.6 s with t = 8 and d = 4.
    half, whole = sequences_per_s(
        gpt(14336, 70, 64, vocabulary=250880),
        [
            ParallelConfig(
                tensor=t,
                pipeline=12,
                data=32 // t,
                microbatch=2,
                global_batch=2048,
                recompute="full",
                zero=1,
            )
            for t in (4, 8)
        ],
        software="megatron-deepspeed",
    )
    assert half > 1.05 * whole


def test_scattering_activations_helps_where_much_is_sent() -> None:
    config = ParallelConfig(
        tensor=8,
        pipeline=12,
        chunks=4,
        schedule="interleaved",
        global_batch=60,
        recompute="full",
    )
    model = gpt(12288, 96, 96)
    (with_scatter,) = sequences_per_s(model, [config])
    prediction = predict(
        model,
        ParallelConfigs.of([config]),
        cluster_of("12xdgx-a100-80g"),
        # The same program before it sent parts: every rank sends all activations.
        type(find_software("torch"))(
            name="before",
            dtype="float16",
            attention="plain",
            gradient_bytes=2,
            scatters_activations=False,
            fuses_accumulation=False,
        ),
    )
    assert 1.02 < with_scatter * prediction.step_s[0] / config.global_batch < 1.2
