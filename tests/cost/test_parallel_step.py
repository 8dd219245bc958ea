"""The step predictor: its parts, its limits, and that nothing depends on how it is asked."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from cost.parallel_samples import cluster_of, gpt, mixture, random_configs
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import UsageError
from hocket.cost.parallel.coefficients import NAMES, Coefficients
from hocket.cost.parallel.setting import setting_of, stack_settings
from hocket.cost.parallel.softwares import SOFTWARES, find_software
from hocket.cost.parallel.step import predict, predict_settings
from hocket.cost.parallel.traffic import RankGroup, all_reduce_s
from hocket.hardware.cluster import Cluster
from hocket.transformer import ParallelConfig, ParallelConfigs, Transformer

MODELS = (gpt(), gpt(4096, 30, 32), mixture())
SOME = settings(derandomize=True, deadline=None, max_examples=15)


def seconds(
    config: ParallelConfig,
    model: Transformer = MODELS[1],
    on: str = "8xdgx-a100-80g",
    software: str = "megatron-2021",
    **coefficients: float,
) -> float:
    prediction = predict(
        model,
        ParallelConfigs.of([config]),
        cluster_of(on),
        find_software(software),
        Coefficients(**coefficients),
    )
    return float(prediction.step_s[0])


@SOME
@given(st.sampled_from(MODELS), st.sampled_from(sorted(SOFTWARES)), st.integers(0, 10**6))
def test_parts_add_up_and_are_not_negative(model: Transformer, software: str, seed: int) -> None:
    configs = random_configs(50, seed)
    prediction = predict(model, configs, cluster_of("8xdgx-a100-80g"), SOFTWARES[software])
    parts = prediction.parts()
    assert tuple(parts) == (
        "compute", "bubble", "tensor", "other", "pipeline", "data", "optimizer",
    )  # fmt: skip
    assert np.allclose(sum(parts.values()), prediction.step_s)
    assert all(np.all(values >= 0) for values in parts.values())
    assert np.all((prediction.bubble >= 0) & (prediction.bubble < 1))
    assert np.all(prediction.parts()["bubble"][configs.pipeline == 1] == 0)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_many_configs_at_once_equal_few_at_a_time(model: Transformer) -> None:
    configs = random_configs(20_000, seed=7)
    # Chunks hide transfers in the one, and weights are gathered for every pass in both.
    program = "megatron-core" if model.experts else "torch"
    cluster, software = cluster_of("8xdgx-a100-80g"), find_software(program)
    together = predict(model, configs, cluster, software)
    part = configs.take(np.arange(0, len(configs), 97))
    apart = predict(model, part, cluster, software)
    assert np.allclose(together.step_s[::97], apart.step_s, rtol=1e-12)
    assert np.allclose(together.parts()["data"][::97], apart.parts()["data"], rtol=1e-12)


def test_settings_of_their_own_equal_one_setting_for_all() -> None:
    configs, cluster = random_configs(30, seed=3), cluster_of("8xdgx-a100-80g")
    programs = [SOFTWARES[name] for name in sorted(SOFTWARES)]
    alone, together = [], []
    for i in range(len(configs)):
        model, program = MODELS[i % 3], programs[i % len(programs)]
        one = predict(model, configs.take(np.array([i])), cluster, program)
        alone.append(one.step_s[0])
        together.append(setting_of(model, program, cluster.kinds[0], cluster.network))
    stacked = predict_settings(stack_settings(together), configs)
    assert np.allclose(stacked, alone, rtol=1e-12)


def test_no_configs_give_no_steps() -> None:
    prediction = predict(
        MODELS[0], ParallelConfigs.of([]), cluster_of("2xdgx-a100-80g"), find_software("torch")
    )
    assert len(prediction) == 0


@SOME
@given(st.sampled_from(NAMES), st.integers(0, 10**6))
def test_no_coefficient_above_one_shortens_a_step(name: str, seed: int) -> None:
    configs, cluster = random_configs(40, seed), cluster_of("8xdgx-a100-80g")
    # Longer weight gradients may fill the bubble of schedules that split the backward pass.
    configs = replace(configs, schedule=(configs.schedule % 4).astype(np.int8))
    software = find_software("megatron-2021")
    usual = predict(MODELS[1], configs, cluster, software).step_s
    slower = predict(MODELS[1], configs, cluster, software, Coefficients(**{name: 2.0})).step_s
    assert np.all(slower >= usual * (1 - 1e-12))


@SOME
@given(st.integers(0, 10**6))
def test_faster_links_never_lengthen_a_step(seed: int) -> None:
    cluster = cluster_of("8xdgx-a100-80g")
    links = tuple(replace(x, bandwidth_bps=3 * x.bandwidth_bps) for x in cluster.links)
    faster: Cluster = replace(cluster, links=links)
    configs, software = random_configs(40, seed), find_software("megatron-2021")
    before = predict(MODELS[1], configs, cluster, software).step_s
    assert np.all(predict(MODELS[1], configs, faster, software).step_s <= before)


def test_one_device_communicates_nothing() -> None:
    prediction = predict(
        MODELS[0],
        ParallelConfigs.of([ParallelConfig(global_batch=8)]),
        cluster_of("1xa100-80g"),
        find_software("megatron-2021"),
    )
    for name in ("bubble", "tensor", "other", "pipeline", "data"):
        assert prediction.parts()[name][0] == 0


def test_work_grows_with_the_batch_and_shrinks_with_ranks() -> None:
    base = ParallelConfig(
        tensor=2, pipeline=2, data=4, microbatch=1, global_batch=64, recompute="full"
    )
    assert seconds(replace(base, global_batch=128)) > 1.8 * seconds(base)
    assert seconds(replace(base, data=8)) < 0.6 * seconds(base)
    assert seconds(replace(base, recompute="none")) < 0.85 * seconds(base)
    assert seconds(base) < seconds(replace(base, recompute="full"), matrix=1.2)


def test_unaligned_heads_are_much_slower() -> None:
    # BLOOM's search: hidden 13824 with 128 heads of width 108 took 147 s, with 96 of 144 107 s.
    config = ParallelConfig(
        tensor=4, pipeline=12, data=8, microbatch=2, global_batch=2048, recompute="full", zero=1
    )
    aligned, unaligned = (
        seconds(config, gpt(13824, 78, heads, vocabulary=250880), "48xdgx-a100-80g",
                "megatron-deepspeed")
        for heads in (96, 128)
    )  # fmt: skip
    assert 1.2 < unaligned / aligned < 1.6


def test_overlap_hides_most_of_what_data_parallel_ranks_send() -> None:
    config = ParallelConfig(data=64, microbatch=4, global_batch=256)
    model, cluster = gpt(4096, 30, 32), cluster_of("8xdgx-a100-80g")
    plain = replace(find_software("torch"), overlaps_data=False)
    shown = predict(model, ParallelConfigs.of([config]), cluster, plain).parts()["data"][0]
    hidden = predict(model, ParallelConfigs.of([config]), cluster, find_software("torch")).parts()[
        "data"
    ][0]
    assert 0 < hidden < 0.3 * shown


@pytest.mark.parametrize(
    ("num_ranks", "size_mib", "measured_us"),
    [
        (8, 4, 96), (8, 16, 232), (8, 64, 580), (8, 256, 2162), (8, 1024, 8193),
        (4, 16, 180), (4, 64, 544), (4, 1024, 7259), (2, 16, 132), (2, 1024, 5443),
    ],
)  # fmt: skip
def test_all_reduce_is_near_what_nccl_takes(
    num_ranks: int, size_mib: int, measured_us: float
) -> None:
    cluster = cluster_of("1xdgx-a100-80g")
    setting = setting_of(MODELS[0], find_software("torch"), cluster.kinds[0], cluster.network)
    group = RankGroup(np.full(1, float(num_ranks)), np.ones(1))
    taken_s = all_reduce_s(np.full(1, size_mib * 2.0**20), group, setting)
    assert taken_s[0] * 1e6 == pytest.approx(measured_us, rel=0.35)


def test_few_microbatches_leave_a_bubble() -> None:
    config = ParallelConfig(tensor=8, pipeline=8, microbatch=1, global_batch=8, recompute="full")
    prediction = predict(
        gpt(8192, 48, 64),
        ParallelConfigs.of([config]),
        cluster_of("8xdgx-a100-80g"),
        find_software("megatron-2021"),
    )
    others = {name: part[0] for name, part in prediction.parts().items() if name != "compute"}
    assert max(others, key=lambda name: others[name]) == "bubble"
    assert prediction.bubble[0] > 0.3


def test_a_device_without_the_arithmetic_is_refused() -> None:
    float8 = replace(find_software("megatron-core"), dtype="float8")
    with pytest.raises(UsageError, match="no rate for 'float8'"):
        predict(
            MODELS[0], ParallelConfigs.of([ParallelConfig()]), cluster_of("1xdgx-a100-80g"), float8
        )


def test_unknown_software_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match="megatron-cor") as raised:
        find_software("megatron-cor")
    assert "megatron-core" in raised.value.hint


def test_there_are_at_most_a_dozen_coefficients() -> None:
    assert len(NAMES) <= 12
    assert {field.name for field in fields(Coefficients)} - set(NAMES) == {"source", "anchors"}
