"""Experts: tokens that travel, weights that are read, a host that launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost.parallel_samples import LLAMA, mixture, parts, step_s

from hocket.cost.parallel import layer
from hocket.cost.parallel.overheads import FORMULAS_ONLY
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.stage_memory import stage_memory
from hocket.transformer import ParallelConfig
from hocket.transformer.files import find_model


def test_tokens_go_to_a_host_once():
    program = replace(find_software("megatron-core"), overlaps_experts=False)
    fields = {"data": 32, "expert": 32, "zero": 1, "global_batch": 64}
    model = mixture()
    experts = replace(model.experts, count=64, active=8)
    model = replace(model, experts=experts)
    once = parts(model, program, **fields)["other"]
    every = parts(model, replace(program, sends_once=False), **fields)["other"]
    assert 1.3 < every / once < 4
    inside = parts(model, program, **{**fields, "expert": 8})["other"]
    assert inside < once / 2


def test_many_experts_at_hand_keep_the_host_busy(monkeypatch):
    model = replace(mixture(), experts=replace(mixture().experts, count=128, active=8))
    program = find_software("megatron-core")
    fields = {"data": 8, "zero": 1, "global_batch": 64}
    compute = {e: parts(model, program, expert=e, **fields)["compute"] for e in (1, 8)}
    assert compute[1] > 1.1 * compute[8]
    free = replace(layer.CONSTANTS, expert_launch_s=0.0)
    monkeypatch.setattr(layer, "CONSTANTS", free)
    without = {e: parts(model, program, expert=e, **fields)["compute"] for e in (1, 8)}
    assert compute[1] - without[1] > 4 * (compute[8] - without[8])


def test_replayed_graphs_leave_the_host_nothing_to_launch():
    program = find_software("megatron-core")
    fields = {"data": 8, "zero": 1, "global_batch": 64}
    small = replace(mixture(), sequence=256)
    for model, least in ((small, 5.0), (replace(LLAMA, sequence=256), 1.3)):
        launched = parts(model, program, **fields)["compute"]
        replayed = parts(model, replace(program, replays_graphs=True), **fields)["compute"]
        assert launched > least * replayed
    large = {**fields, "microbatch": 4}
    launched = parts(LLAMA, program, **large)["compute"]
    replayed = parts(LLAMA, replace(program, replays_graphs=True), **large)["compute"]
    assert replayed < launched < 1.1 * replayed


def test_a_layer_with_experts_takes_the_host_what_one_b200_showed():
    """Qwen3 30B, one sequence at a time on eight B200: 27.1 and 28.2 s for 512 sequences."""
    model = find_model("qwen3-30b-a3b")
    program = replace(find_software("megatron-core"), dtype="float8", overlaps_experts=False)
    fields = {"data": 8, "expert": 8, "zero": 1, "global_batch": 512, "on": "1xdgx-b200"}
    assert step_s(model, program, **fields) == pytest.approx(27.6, rel=0.12)
    dropped = replace(program, routing_host_s=0.8e-3)
    assert step_s(model, dropped, **fields) == pytest.approx(14.5, rel=0.12)


def test_tokens_that_travel_beside_work_cost_a_tenth():
    fields = {"data": 8, "expert": 8, "zero": 1, "global_batch": 64, "microbatch": 4}
    program = find_software("megatron-core")
    hidden = parts(mixture(), program, **fields)["other"]
    alone = parts(mixture(), replace(program, overlaps_experts=False), **fields)["other"]
    assert 5 < alone / hidden < 15


def test_norms_and_activations_computed_again_take_little_and_free_some():
    program = replace(find_software("megatron-core"), selective="activations")
    none, some, full = (
        step_s(LLAMA, program, recompute=mode) for mode in ("none", "selective", "full")
    )
    assert none < some < none + 0.2 * (full - none)
    config = ParallelConfig(tensor=1, data=1, global_batch=1)
    kept, less = (
        stage_memory(LLAMA, replace(config, recompute=mode), program, FORMULAS_ONLY).peak_bytes[0]
        for mode in ("none", "selective")
    )
    again = 2 * (2 * LLAMA.hidden + LLAMA.mlp_width) * LLAMA.sequence
    assert kept - less == pytest.approx((LLAMA.layers - 1) * again, rel=0.01)


def test_experts_over_more_ranks_than_replicas_are_no_smaller():
    """Thirty-two ranks hold an expert each whether sixteen of them are replicas or all."""
    fields = {"zero": 0, "global_batch": 64, "data": 16}
    model = replace(mixture(), experts=replace(mixture().experts, count=32, active=2))
    program = find_software("megatron-core")
    times = [parts(model, program, tensor=2, expert=e, **fields)["optimizer"] for e in (16, 32)]
    assert times[0] == pytest.approx(times[1])


def test_experts_with_few_tokens_take_the_time_to_read_their_weights():
    experts = replace(mixture().experts, count=128, active=1, mlp_width=8192)
    model = replace(mixture(), experts=experts, sequence=128)
    program = find_software("megatron-core")
    compute_s = parts(model, program, data=1, global_batch=1, zero=0)["compute"]
    num_sparse = model.layers - experts.dense_layers
    matrices = 2 if model.mlp == "gelu" else 3
    weights = num_sparse * 128 * matrices * model.hidden * 8192
    # Once forward and once for each gradient.
    assert compute_s > 3 * 2 * weights / 3.35e12
