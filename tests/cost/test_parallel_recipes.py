"""What chips, programs and options change, each by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost.parallel_samples import LLAMA, cluster_of, gpt, parts, step_s

from hocket.base.errors import UsageError
from hocket.cost.chips import CHIPS, chip_of
from hocket.cost.parallel.efficiency import attention_s
from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.overheads import FORMULAS_ONLY
from hocket.cost.parallel.setting import setting_of
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.stage_memory import stage_memory
from hocket.transformer import ParallelConfig, ParallelConfigs
from hocket.transformer.files import find_model


def test_kinds_have_the_chip_of_their_name():
    hopper = chip_of("h100-80g")
    assert hopper.name == "hopper"
    assert chip_of("h100-80g", "2023").name == "hopper-2023"
    assert chip_of("a100-80g", "2023").name == "ampere"
    assert chip_of("h100-96g-500w").matrix_share < hopper.matrix_share
    assert chip_of("rtx4090").name == "unknown"
    assert CHIPS["unknown"].uncertainty > chip_of("b200").uncertainty > hopper.uncertainty
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
                ParallelConfig(data=8, global_batch=16, microbatch=2, zero=3, recompute=mode),
                program,
                FORMULAS_ONLY,
            ).peak_bytes
        )
        for mode in ("none", "selective", "full")
    ]
    assert held[0] > 1.2 * held[1] > 1.2 * held[2]


def test_compilation_makes_norms_and_activations_again_instead_of_keeping_them():
    """Llama 3 405B as published on 8,192 H100, nothing recomputed: it ran in 80 GB."""
    model = find_model("llama3-405b")
    config = ParallelConfig(
        tensor=8, pipeline=16, data=64, chunks=8, global_batch=2048, schedule="interleaved",
        zero=1, sequence_parallel=True, layers=(0, *[1] * 126, 0),
    )  # fmt: skip
    kept, compiled, chosen = (
        max(stage_memory(model, given, with_options(find_software("torch"), [text])).peak_bytes)
        for given, text in (
            (config, ""),
            (config, "compiled"),
            (replace(config, recompute="selective"), "selective=activations"),
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
    config = ParallelConfig(tensor=4, data=2, global_batch=8, zero=1, sequence_parallel=True)
    program = find_software("megatron-core")
    wide, narrow = (
        stage_memory(LLAMA, config, replace(program, dtype=dtype), FORMULAS_ONLY).peak_bytes[0]
        for dtype in ("bfloat16", "float8")
    )
    # One byte less of the inputs of attention, of the MLP and of its second product.
    kept = 2 * LLAMA.hidden + LLAMA.mlp_width
    assert wide - narrow == pytest.approx(LLAMA.layers * LLAMA.sequence * kept / 4, rel=1e-3)


def test_state_per_parameter_is_what_each_program_keeps():
    model = gpt(4096, 32, 32)
    config = ParallelConfig(data=64, global_batch=64, zero=3)
    single = ParallelConfig(data=1, global_batch=1)
    parameters = 6.9e9
    for name, total in (("megatron-core", 18), ("torch", 16)):
        program = replace(find_software(name), logit_bytes=0)
        whole = stage_memory(model, single, program, FORMULAS_ONLY).state_bytes[0]
        assert whole == pytest.approx(total * parameters, rel=0.05), name
        divided = stage_memory(model, config, program, FORMULAS_ONLY).state_bytes[0]
        assert divided < 0.06 * whole
    pure = replace(
        find_software("fsdp"), gradient_bytes=2, optimizer_bytes=4, copies_gradients=False
    )
    whole = stage_memory(model, single, pure, FORMULAS_ONLY).state_bytes[0]
    assert whole == pytest.approx(8 * parameters, rel=0.05)


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
    forward_s, backward_s = attention_s(flops, setting)
    forward, backward = MEASURED[kernel, tokens]
    assert 0.5 * flops[0] / forward_s[0] == pytest.approx(forward * 1e12, rel=0.12)
    assert 2.5 * 0.5 * flops[0] / backward_s[0] == pytest.approx(backward * 1e12, rel=0.12)


@pytest.mark.parametrize("name", ["megatron-core", "torch", "fsdp", "megatron-deepspeed"])
def test_memory_beside_the_formulas_is_the_program_s(name):
    program = find_software(name)
    config = ParallelConfig(data=8, global_batch=16, zero=3)
    (whole,) = memory(LLAMA, ParallelConfigs.of([config]), program)
    assert whole == pytest.approx(max(stage_memory(LLAMA, config, program).peak_bytes), rel=1e-6)
    formulas = max(stage_memory(LLAMA, config, program, FORMULAS_ONLY).peak_bytes)
    assert whole - formulas >= program.overheads.constant_bytes


def test_replicas_that_divide_state_in_groups_hold_more_and_send_less_far():
    program = find_software("torch")
    fields = {"data": 64, "global_batch": 64, "zero": 3}
    model = gpt(5120, 40, 40)
    whole, groups = program, with_options(program, ["hsdp=8"])
    config = ParallelConfig(**fields)
    held = [stage_memory(model, config, p, FORMULAS_ONLY).state_bytes[0] for p in (whole, groups)]
    parameters = 12.8e9
    assert held[1] - held[0] == pytest.approx(16 * parameters * (1 / 8 - 1 / 64), rel=0.05)
    # Sequences that are short hide only a part of gathering over the network.
    slow = {**fields, "global_batch": 1024, "on": "8xdgx-a100-80g"}
    short = replace(model, sequence=1024)
    assert parts(short, groups, **slow)["data"] < 0.6 * parts(short, whole, **slow)["data"]
    every = with_options(program, ["hsdp=64"])
    assert step_s(model, every, **slow) == pytest.approx(step_s(model, whole, **slow))
    kernel = [
        memory(model, ParallelConfigs.of([config]), p, FORMULAS_ONLY)[0] for p in (whole, groups)
    ]
    assert kernel[1] - kernel[0] == pytest.approx(held[1] - held[0], rel=0.01)


def test_state_in_the_hosts_memory_frees_the_device_and_takes_time():
    program = find_software("torch")
    held = with_options(program, ["offload"])
    config = ParallelConfig(data=8, global_batch=8, zero=3)
    bytes_ = [stage_memory(LLAMA, config, p, FORMULAS_ONLY).state_bytes[0] for p in (program, held)]
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
