"""Enumeration of configs against the rules, stated one by one, on every combination."""

import time
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.every_config import enumerate_configs

from hocket.base.errors import UsageError
from hocket.hardware import cluster_from_text
from hocket.plan.limits import Limits
from hocket.plan.problem import Problem
from hocket.planners.parallel.pools import Pool, pool_clusters, pools_of, rank_devices
from hocket.planners.parallel.search_limits import fixed_limits
from hocket.planners.parallel.space import (
    FEW_DEVICES,
    config_blocks,
    tensor_degrees,
)
from hocket.transformer import RECOMPUTES, SCHEDULES, Experts, ParallelConfig, Transformer
from hocket.transformer.rules import broken_rules

SMALL = Transformer(
    name="small", hidden=48, layers=4, heads=6, kv_heads=2, head_width=8, mlp_width=96,
    mlp="swiglu", vocabulary=1000, sequence=32, tied_embeddings=False, learned_positions=False,
    biases=False, dropout=False,
)  # fmt: skip
GPT3 = Transformer(
    name="gpt3-175b", hidden=12288, layers=96, heads=96, kv_heads=96, head_width=128,
    mlp_width=49152, mlp="gelu", vocabulary=51200, sequence=2048, tied_embeddings=True,
    learned_positions=True, biases=True, dropout=True,
)  # fmt: skip


def on(cluster):
    """A problem of which only the cluster matters."""
    return Problem(work=None, cluster=cluster)


def _pool(text):
    return pools_of(on(cluster_from_text(text)))[0]


def _all(model, pool, batch, limits):
    configs = enumerate_configs(model, pool, batch, limits)
    return [configs[i] for i in range(len(configs))]


@cache
def _all_small():
    return _all(SMALL, _pool("8xa100-80g"), 8, Limits(max_tensor=8))


@pytest.mark.parametrize(
    ("sizes", "degrees"),
    [
        ({}, [1, 2, 6]),
        ({"mlp_width": 98}, [1, 2]),
        ({"mlp_width": 97}, [1]),
        ({"hidden": 50}, [1, 2]),
        ({"kv_heads": 3}, [1, 3, 6]),
        ({"heads": 5, "kv_heads": 1}, [1]),
    ],
)
def test_tensor_degrees_divide_heads_and_widths(sizes, degrees):
    model = replace(SMALL, **sizes)
    assert tensor_degrees(model, 8) == degrees
    whole = ParallelConfig(global_batch=8)
    allowed = [t for t in range(1, 9) if not any(broken_rules(model, replace(whole, tensor=t)))]
    assert allowed == degrees


def _brute_force(model, pool, batch, max_tensor):
    """Every combination of numbers that keeps the rules and has the devices."""
    degrees = range(1, pool.num_devices + 1)
    expert_degrees = range(1, (model.experts.count if model.experts else 1) + 1)
    for tensor, pipeline, data, context in product(degrees, repeat=4):
        groups = sum(len(host) // tensor for host in pool.hosts)
        power = context & (context - 1) == 0
        few = tensor <= max_tensor and power and pipeline * data * context <= groups
        shape = ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, context=context)
        if not few or any(broken_rules(model, replace(shape, global_batch=batch))):
            continue
        sizes = [b for b in range(1, batch + 1) if batch % (b * data) == 0]
        for expert, size, order, chunks, mode, zero, flag in product(
            expert_degrees, sizes, SCHEDULES, range(1, model.layers + 1),
            RECOMPUTES, range(4), (False, True),
        ):  # fmt: skip
            config = ParallelConfig(
                tensor=tensor, pipeline=pipeline, data=data, context=context, expert=expert,
                chunks=chunks, microbatch=size, global_batch=batch, schedule=order,
                recompute=mode, zero=zero, sequence_parallel=flag,
            )  # fmt: skip
            # Names for the same thing: looped orders with one chunk, any order on one rank.
            repeats = order in ("interleaved", "looped-bfs") and chunks == 1
            repeats |= pipeline == 1 and (order != "1f1b" or chunks > 1)
            if not repeats and not any(broken_rules(model, config)):
                yield config


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (SMALL, 4),
        (replace(SMALL, layers=3, kv_heads=6), 6),
        (replace(SMALL, experts=Experts(count=4, active=2, mlp_width=96), layers=2), 2),
    ],
    ids=["grouped heads", "odd layers", "experts"],
)
@pytest.mark.parametrize("cluster", ["4xa100-80g", "3xa100-80g"])
def test_all_configs_and_no_others(model, batch, cluster):
    pool = _pool(cluster)
    found = _all(model, pool, batch, Limits(max_tensor=pool.per_host))
    assert len(set(found)) == len(found)
    assert set(found) == set(_brute_force(model, pool, batch, pool.per_host))


def test_blocks_are_rows_of_one_shape_and_join_to_the_whole():
    pool, limits = _pool("16xa100-80g"), Limits(max_tensor=8)
    whole = enumerate_configs(SMALL, pool, 32, limits)
    blocks = list(config_blocks(SMALL, pool, 32, limits, block_configs=50))
    assert sum(len(block.configs) for block in blocks) == len(whole)
    for block in blocks:
        for name in ("tensor", "pipeline", "data", "microbatch", "schedule", "chunks"):
            rows = getattr(block.configs, name).reshape(-1, block.num_variants)
            assert np.all(rows == rows[:, :1])


def test_large_clusters_take_the_most_replicas():
    pool = _pool("32xdgx-a100-80g")
    assert pool.num_devices > FEW_DEVICES
    limits = Limits(max_tensor=8, recomputes=("full",), schedules=("1f1b",), zeros=(1,))
    configs = enumerate_configs(GPT3, pool, 48, limits)
    groups = np.array([pool.num_groups(tensor) for tensor in configs.tensor.tolist()])
    for more in (d for d in range(1, 49) if 48 % d == 0):
        is_larger = more > configs.data
        assert np.all((configs.pipeline * configs.context * more > groups)[is_larger])


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    fixed=st.dictionaries(
        st.sampled_from(["tensor", "pipeline", "data", "microbatch", "chunks", "zero"]),
        st.integers(1, 3), max_size=3,
    ),
    recompute=st.sampled_from(RECOMPUTES),
)  # fmt: skip
def test_fixed_fields_leave_exactly_their_configs(fixed, recompute):
    pool, limits = _pool("8xa100-80g"), Limits(max_tensor=8)
    text = ",".join(
        [*(f"{name}={value}" for name, value in fixed.items()), f"recompute={recompute}"]
    )
    found = _all(SMALL, pool, 8, fixed_limits(limits, text))
    wanted = [
        config
        for config in _all_small()
        if config.recompute == recompute
        and all(getattr(config, name) == value for name, value in fixed.items())
    ]
    assert set(found) == set(wanted)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensr=8", "did you mean 'tensor'?"),
        ("tensor", "tensor=8"),
        ("tensor=eight", "whole number"),
        ("tensor=0", "whole number"),
        ("recompute=ful", "did you mean 'full'?"),
        ("schedule=1f1", "did you mean '1f1b'?"),
    ],
)
def test_wrong_limits_are_refused(text, said):
    with pytest.raises(UsageError) as caught:
        fixed_limits(Limits(max_tensor=8), text)
    assert said in str(caught.value)


def test_millions_of_configs_of_gpt3_on_4096_devices():
    pool = _pool("512xdgx-a100-80g")
    limits = Limits(max_tensor=32, max_context=32)
    started = time.process_time()
    count = sum(len(block.configs) for block in config_blocks(GPT3, pool, 1536, limits))
    assert count >= 5_000_000
    assert time.process_time() - started < 1.5


# ── pools ────────────────────────────────────────────────────────────────────────────────────────


def test_groups_stay_on_their_host():
    pool = _pool("2xdgx-a100-80g")
    assert [pool.num_groups(t) for t in (1, 2, 3, 4, 6, 8, 12, 16)] == [16, 8, 4, 4, 2, 2, 0, 1]
    for tensor in (1, 2, 3, 6, 8, 16):
        groups = pool.groups(tensor)
        assert len(groups) == pool.num_groups(tensor)
        names = [name for group in groups for name in group]
        assert len(set(names)) == len(names) == tensor * len(groups)
        if tensor <= 8:
            assert all(len({name.split(".")[0] for name in group}) == 1 for group in groups)


def test_kinds_have_pools_of_their_own_and_ranks_take_them_in_turn():
    cluster = cluster_from_text("4xa100-80g+8xv100-16g")
    pools = pools_of(on(cluster))
    assert [(pool.kind.name, pool.num_devices) for pool in pools] == [
        ("a100-80g", 4), ("v100-16g", 8),
    ]  # fmt: skip
    ranks = rank_devices(pools, (1, 2), 2, 2)
    kinds = {device.name: device.kind.name for device in cluster.devices}
    assert [{kinds[name] for name in rank} for rank in ranks] == [
        {"a100-80g"}, {"v100-16g"}, {"v100-16g"},
    ]  # fmt: skip
    assert len({name for rank in ranks for name in rank}) == 12
    again = rank_devices((pools[1], pools[0], pools[1]), (1, 1, 1), 2, 2)
    assert sorted(again) == sorted(ranks), "a pool that comes again gives its next devices"


def test_a_pool_alone_keeps_its_links():
    cluster = cluster_from_text("4xa100-80g+8xv100-16g")
    own = pool_clusters(on(cluster))[1]
    assert own.num_devices == 8
    assert {device.kind.name for device in own.devices} == {"v100-16g"}
    kept = {device.name for device in own.devices}
    assert all(kept & set(link.ends) or "gpu" not in str(link.ends) for link in own.links)
    assert own.routes is not None


def test_uneven_hosts_offer_what_each_has():
    kind = _pool("4xa100-80g").kind
    host = _pool("8xa100-80g").hosts[0]
    pool = Pool(kind, (host[:5], host[5:8]))
    assert [pool.num_groups(t) for t in (1, 2, 3, 4, 5, 8)] == [8, 3, 2, 1, 1, 0]
