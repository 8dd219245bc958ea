"""What chips, programs and recipes change, each by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost.parallel_samples import cluster_of, gpt, mixture

from hocket.base.errors import UsageError
from hocket.cost.parallel import efficiency
from hocket.cost.parallel.chips import CHIPS, HOPPER, HOPPER_2023, UNKNOWN, chip_of
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.efficiency import attention_s
from hocket.cost.parallel.memory import FORMULAS_ONLY, memory, stage_memory
from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.setting import setting_of
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.stages import stage_costs
from hocket.cost.parallel.step import exposed_s, hiding_rounds, predict
from hocket.transformer import Division, Divisions, Transformer
from hocket.transformer.files import find_model

LLAMA = find_model("llama3-8b")
ON = "8xdgx-h100"


def parts(model: Transformer, software: Software, on: str = ON, **fields: object) -> dict:
    division = Division(**{"data": 8, "global_batch": 64, "zero": 3, **fields})
    found = predict(model, Divisions.of([division]), cluster_of(on), software)
    return {name: float(value[0]) for name, value in found.parts().items()}


def step_s(model: Transformer, software: Software, on: str = ON, **fields: object) -> float:
    return sum(parts(model, software, on, **fields).values())


def test_kinds_have_the_chip_of_their_name():
    assert chip_of("h100-80g") is HOPPER
    assert chip_of("h100-80g", "2023") is HOPPER_2023
    assert chip_of("a100-80g", "2023") is CHIPS["a100"]
    assert chip_of("h100-96g-500w").matrix_share < HOPPER.matrix_share
    assert chip_of("rtx4090") is UNKNOWN
    assert UNKNOWN.uncertainty > chip_of("b200").uncertainty > HOPPER.uncertainty
    assert all(chip.source for chip in CHIPS.values())


def test_attention_kernels_differ_most_in_long_sequences():
    long, short = (replace(LLAMA, sequence=tokens) for tokens in (65_536, 1024))
    program = find_software("torchtitan")
    times = {
        kernel: [step_s(m, replace(program, attention=kernel)) for m in (long, short)]
        for kernel in ("flash", "flash2", "fused")
    }
    assert times["flash"][0] > 1.3 * times["flash2"][0] > 1.3 * times["fused"][0]
    assert times["flash"][1] < 1.2 * times["fused"][1]


def test_op_by_op_selection_computes_half_of_the_products_again():
    program = find_software("torchtitan")
    none, some, full = (
        step_s(LLAMA, program, recompute=mode, microbatch=2)
        for mode in ("none", "selective", "full")
    )
    assert 0.3 < (some - none) / (full - none) < 0.7
    plain = replace(program, selective="attention")
    inside = step_s(LLAMA, plain, recompute="selective", microbatch=2)
    assert inside < some


def test_op_by_op_selection_keeps_between_nothing_and_all():
    program = find_software("torchtitan")
    held = [
        max(
            stage_memory(
                LLAMA,
                Division(data=8, global_batch=16, microbatch=2, zero=3, recompute=mode),
                program,
                FORMULAS_ONLY,
            ).peak_bytes
        )
        for mode in ("none", "selective", "full")
    ]
    assert held[0] > 1.2 * held[1] > 1.2 * held[2]


def test_compilation_makes_norms_and_activations_again_instead_of_keeping_them():
    """Llama 3 405B as published on 8,192 H100, nothing computed again: it ran in 80 GB."""
    model = find_model("llama3-405b")
    division = Division(
        tensor=8, pipeline=16, data=64, chunks=8, global_batch=2048, schedule="interleaved",
        zero=1, sequence_parallel=True, layers=(0, *[1] * 126, 0),
    )  # fmt: skip
    kept, compiled, chosen = (
        max(stage_memory(model, given, with_options(find_software("torch"), [text])).peak_bytes)
        for given, text in (
            (division, ""),
            (division, "compiled"),
            (replace(division, recompute="selective"), "selective=activations"),
        )
    )
    assert compiled < 80e9 < kept
    assert compiled == pytest.approx(chosen, rel=0.02)


def test_eager_norms_and_rotations_cost_what_compilation_saves():
    eager, compiled = (
        step_s(LLAMA, find_software(name), recompute="selective", microbatch=2)
        for name in ("torchtitan-eager", "torchtitan")
    )
    assert 1.05 < eager / compiled < 1.35  # published: 6,667 against 5,762 tokens per second


def test_a_ring_in_order_waits_for_its_last_rank():
    model = replace(LLAMA, sequence=262_144)
    program = find_software("torchtitan")
    fields = {"data": 1, "context": 8, "global_batch": 1, "recompute": "full"}
    uneven = step_s(model, program, **fields)
    even = step_s(model, replace(program, balances_context=True), **fields)
    assert 1.6 < uneven / even < 15 / 8


def test_eight_bits_are_faster_by_less_than_their_peak():
    program = find_software("megatron-core")
    fields = {"zero": 1, "microbatch": 1}
    ratio = step_s(LLAMA, program, **fields) / step_s(
        LLAMA, replace(program, dtype="float8"), **fields
    )
    assert 1.2 < ratio < 1.8
    by_row = replace(program, dtype="float8", cast_bytes=16.0, float8_rate=0.65)
    assert step_s(LLAMA, by_row, **fields) > step_s(
        LLAMA, replace(program, dtype="float8"), **fields
    )


def test_eight_bit_products_keep_less():
    division = Division(tensor=4, data=2, global_batch=8, zero=1, sequence_parallel=True)
    program = find_software("megatron-core")
    wide, narrow = (
        stage_memory(LLAMA, division, replace(program, dtype=dtype), FORMULAS_ONLY).peak_bytes[0]
        for dtype in ("bfloat16", "float8")
    )
    # One byte less of the inputs of attention, of the MLP and of its second product.
    kept = 2 * LLAMA.hidden + LLAMA.mlp_width
    assert wide - narrow == pytest.approx(LLAMA.layers * LLAMA.sequence * kept / 4, rel=1e-3)


def test_state_per_parameter_is_what_each_program_keeps():
    model = gpt(4096, 32, 32)
    division = Division(data=64, global_batch=64, zero=3)
    single = Division(data=1, global_batch=1)
    parameters = 6.9e9
    for name, total in (("megatron-core", 18), ("torch", 16)):
        program = replace(find_software(name), logit_bytes=0)
        whole = stage_memory(model, single, program, FORMULAS_ONLY).state_bytes[0]
        assert whole == pytest.approx(total * parameters, rel=0.05), name
        divided = stage_memory(model, division, program, FORMULAS_ONLY).state_bytes[0]
        assert divided < 0.06 * whole
    pure = replace(
        find_software("fsdp"), gradient_bytes=2, optimizer_bytes=4, copies_gradients=False
    )
    whole = stage_memory(model, single, pure, FORMULAS_ONLY).state_bytes[0]
    assert whole == pytest.approx(8 * parameters, rel=0.05)


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
    free = replace(efficiency.CONSTANTS, expert_launch_s=0.0)
    monkeypatch.setattr(efficiency, "CONSTANTS", free)
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
    division = Division(tensor=1, data=1, global_batch=1)
    kept, less = (
        stage_memory(LLAMA, replace(division, recompute=mode), program, FORMULAS_ONLY).peak_bytes[0]
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


def test_every_further_chunk_costs_the_host_some():
    program = find_software("megatron-core")
    fields = {"pipeline": 4, "data": 2, "global_batch": 64, "zero": 1, "schedule": "interleaved"}
    two, four = (parts(LLAMA, program, chunks=v, **fields) for v in (2, 4))
    num_microbatches = 32
    least = 2 * num_microbatches * efficiency.CONSTANTS.chunk_s
    assert four["pipeline"] - two["pipeline"] > least
    assert four["bubble"] < two["bubble"]


def test_another_chunk_hides_all_but_a_tenth_of_transfers():
    program = find_software("megatron-core")
    waiting = replace(program, overlaps_pipeline=False)
    fields = {"pipeline": 4, "data": 2, "global_batch": 64, "zero": 1, "schedule": "interleaved"}
    beside, alone = (
        parts(LLAMA, given, chunks=4, **fields)["pipeline"] for given in (program, waiting)
    )
    # Three further chunks of 32 microbatches take the host some, whatever is hidden.
    turns = 32 * 3 * efficiency.CONSTANTS.chunk_s
    assert beside - turns == pytest.approx((alone - turns) / 10)
    plain = {**fields, "schedule": "1f1b", "chunks": 1}
    assert parts(LLAMA, program, **plain) == parts(LLAMA, waiting, **plain)


def test_rounds_of_chunks_hide_the_gradients_of_those_after_them():
    """Megatron's 177B on 96 to 4,608 H100: as far from what was measured on few as on many."""
    model = gpt(12288, 96, 96)
    program = find_software("megatron-core")
    fields = {"tensor": 8, "pipeline": 6, "data": 96, "zero": 1, "sequence_parallel": True}
    fields |= {"global_batch": 1152, "on": "576xdgx-h100"}
    plain = parts(model, program, **fields)["data"]
    chunked = parts(model, program, chunks=4, schedule="interleaved", **fields)["data"]
    assert chunked < 0.3 * plain
    alone = replace(program, overlaps_data=False)
    sent = parts(model, alone, chunks=4, schedule="interleaved", **fields)["data"]
    assert sent == pytest.approx(parts(model, alone, **fields)["data"])
    # What follows the last microbatch is the same in the simulated stages.
    on = cluster_of(fields.pop("on"))
    found = parts(model, program, on.name, chunks=4, schedule="interleaved", **fields)
    division = Division(**fields, chunks=4, schedule="interleaved")
    after_s = max(stage_costs(model, division, on, program).after_s)
    assert after_s == pytest.approx(found["data"] + found["optimizer"])


@pytest.mark.parametrize(
    ("pipeline", "chunks", "count", "rounds"),
    [(8, 4, 64, 6), (8, 4, 2, 2), (8, 1, 64, 1), (1, 1, 1, 1), (2, 2, 8, 1)],
)
def test_no_more_rounds_hide_gradients_than_there_are(pipeline, chunks, count, rounds):
    assert hiding_rounds(*map(np.asarray, (pipeline, chunks, count))) == rounds


def test_gradients_sent_in_fewer_bits_take_less():
    model = gpt(8192, 48, 64)
    program = find_software("megatron-core")
    fields = {"tensor": 8, "data": 8, "global_batch": 8, "zero": 1}
    wide = parts(model, program, **fields)["data"]
    narrow = parts(model, replace(program, reduce_bytes=2), **fields)["data"]
    assert 0.4 < narrow / wide < 0.8


def test_what_hides_the_traffic_of_a_microbatch_cannot_hide_that_of_the_step():
    """Where the network is the slower side, all that is sent counts, whenever it is sent."""
    model = gpt(8192, 48, 64)
    program = find_software("torch")
    fields = {"data": 64, "global_batch": 64, "on": "8xdgx1-v100"}
    program = replace(program, dtype="float16")
    at_the_end = step_s(model, program, zero=1, **fields)
    one_by_one = step_s(model, program, zero=2, **fields)
    assert one_by_one == pytest.approx(at_the_end, rel=0.01)


# TFLOP/s of heads of 128 elements, causal, forward and backward: benchmarks/results, kernels-h200.
MEASURED = {
    ("flash2", 1024): (261, 173), ("flash2", 4096): (321, 261), ("flash2", 65536): (342, 325),
    ("fused", 1024): (450, 328), ("fused", 4096): (565, 487), ("fused", 65536): (602, 530),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "tokens"), MEASURED)
def test_attention_is_as_fast_as_it_was_measured(kernel, tokens):
    model = replace(LLAMA, sequence=tokens)
    cluster = cluster_of("hgx-h200")
    software = replace(find_software("torchtitan"), attention=kernel)
    setting = setting_of(model, software, cluster.kinds[0], cluster.network)
    flops = np.array([1e15])
    forward_s, backward_s = attention_s(flops, setting, Coefficients())
    forward, backward = MEASURED[kernel, tokens]
    assert 0.5 * flops[0] / forward_s[0] == pytest.approx(forward * 1e12, rel=0.12)
    assert 2.5 * 0.5 * flops[0] / backward_s[0] == pytest.approx(backward * 1e12, rel=0.12)


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


def test_chunks_cost_the_same_in_the_simulated_stages():
    program = find_software("megatron-core")
    totals = []
    for chunks, schedule in ((1, "1f1b"), (4, "interleaved")):
        division = Division(
            pipeline=4, data=2, global_batch=64, zero=1, chunks=chunks, schedule=schedule
        )
        costs = stage_costs(LLAMA, division, cluster_of("dgx-h100"), program)
        totals.append(sum((*costs.forward_s, *costs.input_gradient_s, *costs.weight_gradient_s)))
    expected_s = 4 * 3 * efficiency.CONSTANTS.chunk_s
    assert totals[1] - totals[0] == pytest.approx(expected_s, rel=1e-3)


@pytest.mark.parametrize("name", ["megatron-core", "torch", "fsdp", "megatron-deepspeed"])
def test_memory_beside_the_formulas_is_the_program_s(name):
    program = find_software(name)
    division = Division(data=8, global_batch=16, zero=3)
    (whole,) = memory(LLAMA, Divisions.of([division]), program).total_bytes
    assert whole == pytest.approx(max(stage_memory(LLAMA, division, program).peak_bytes), rel=1e-6)
    formulas = max(stage_memory(LLAMA, division, program, FORMULAS_ONLY).peak_bytes)
    assert whole - formulas >= program.overheads.constant_bytes


def test_replicas_that_divide_state_in_groups_hold_more_and_send_less_far():
    program = find_software("torch")
    fields = {"data": 64, "global_batch": 64, "zero": 3}
    model = gpt(5120, 40, 40)
    whole, groups = program, with_options(program, ["hsdp=8"])
    division = Division(**fields)
    held = [stage_memory(model, division, p, FORMULAS_ONLY).state_bytes[0] for p in (whole, groups)]
    parameters = 12.8e9
    assert held[1] - held[0] == pytest.approx(16 * parameters * (1 / 8 - 1 / 64), rel=0.05)
    # Sequences that are short hide only a part of gathering over the network.
    slow = {**fields, "global_batch": 1024, "on": "8xdgx-a100-80g"}
    short = replace(model, sequence=1024)
    assert parts(short, groups, **slow)["data"] < 0.6 * parts(short, whole, **slow)["data"]
    every = with_options(program, ["hsdp=64"])
    assert step_s(model, every, **slow) == pytest.approx(step_s(model, whole, **slow))
    kernel = [
        memory(model, Divisions.of([division]), p, FORMULAS_ONLY).total_bytes[0]
        for p in (whole, groups)
    ]
    assert kernel[1] - kernel[0] == pytest.approx(held[1] - held[0], rel=0.01)


def test_state_in_the_hosts_memory_frees_the_device_and_takes_time():
    program = find_software("torch")
    held = with_options(program, ["offload"])
    division = Division(data=8, global_batch=8, zero=3)
    bytes_ = [
        stage_memory(LLAMA, division, p, FORMULAS_ONLY).state_bytes[0] for p in (program, held)
    ]
    assert bytes_[0] - bytes_[1] == pytest.approx(16 * 8.03e9 / 8, rel=0.02)
    on_device, on_host = (parts(LLAMA, p)["optimizer"] for p in (program, held))
    # A billion parameters of each device: 33 bytes each at an eighth of 200 GB/s, and 4 over PCIe.
    assert on_host == pytest.approx(33 * 8 * 1.0e9 / 200e9 + 4 * 1.0e9 / 24e9, rel=0.05)
    assert on_host > 20 * on_device


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("async-tp", {"overlaps_tensor": True}), ("async-ep", {"overlaps_experts": True}),
        ("eager", {"is_eager": True}),
        ("compiled", {"is_eager": False, "rematerialises": True}),
        ("graphs", {"replays_graphs": True}), ("offload", {"offloads": True}),
        ("hsdp=8", {"shard_ranks": 8}), ("selective=ops", {"selective": "ops"}),
        ("float8=rowwise", {"dtype": "float8", "cast_bytes": 16.0, "float8_rate": 0.65}),
        ("float8=tensorwise, hsdp=4", {"dtype": "float8", "shard_ranks": 4}), ("", {}),
    ],
)  # fmt: skip
def test_options_set_what_they_say(text, changed):
    program = find_software("torch")
    assert with_options(program, [text]) == replace(program, **changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("asinc-tp", "did you mean 'async-tp'"), ("float8", "float8=tensorwise or rowwise"),
        ("graphs=1", "write graphs"), ("hsdp=0", "hsdp=8"), ("hsdp=x", "hsdp=8"),
        ("selective=opps", "did you mean 'ops'"), ("float8=", "rowwise"),
    ],
)  # fmt: skip
def test_options_that_do_not_exist_are_refused(text, message):
    with pytest.raises(UsageError) as caught:
        with_options(find_software("torch"), [text])
    assert message in str(caught.value)


def test_gathered_weights_are_waited_for_where_they_take_as_long_as_the_work():
    """Neither hides the other where both are as long; a step's own collectives still hide."""
    one = np.ones(1)
    assert exposed_s(one, one, np.array([True])) == pytest.approx(np.sqrt(2) - 1)
    assert exposed_s(one, one) == pytest.approx(efficiency.CONSTANTS.never_hidden)
    for work, left in ((0.0, 1.0), (100.0, efficiency.CONSTANTS.never_hidden)):
        assert exposed_s(one, work * one, np.array([True])) == pytest.approx(left)
