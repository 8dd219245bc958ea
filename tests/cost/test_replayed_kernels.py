"""Kernels of a replayed step, from a recorded piece: ResNet-56 with 16 samples, one wave, H200."""

import json
from pathlib import Path

import pytest

from hocket.cost.replayed_kernels import ChipLimits, KernelRun, in_place, kernels_of

H200 = ChipLimits(132, 2048, 65536, 233472)
RECORDED = json.loads((Path(__file__).parent / "data" / "resnet56_replay.json").read_text())
KEYS = [call["signature"] for call in RECORDED["calls"]]
NODES = [call["nodes"] for call in RECORDED["calls"]]
STEP_S = 1e-6 * RECORDED["span_us"]


def found(kernels=None, step_s=STEP_S, nodes=NODES):
    kernels = kernels_of(RECORDED) if kernels is None else kernels
    return in_place(kernels, len(kernels) // sum(NODES), nodes, KEYS, step_s, H200)


def test_ops_take_the_step_together():
    told = found()
    total_s = sum(told[key].seconds for key in KEYS if key in told)
    assert total_s == pytest.approx(STEP_S, rel=0.02)
    assert {key for key, nodes in zip(KEYS, NODES, strict=True) if nodes} == set(told)
    # A step without gaps is its kernels; none takes less.
    tight = found(step_s=0.0)
    assert all(tight[key].seconds < told[key].seconds for key in told)


def test_a_call_has_all_its_kernels():
    (convolution,) = {key for key in KEYS if key.startswith("aten.convolution.default(float32[16,")}
    kernels = kernels_of(RECORDED)[:3]
    told = found(step_s=0.0)[convolution]
    assert told.kernels == 3
    # Two layouts are changed and one product is computed; the same again in three other calls.
    assert told.seconds == pytest.approx(1e-6 * sum(each.length_us for each in kernels), rel=0.1)


def test_a_kernel_that_was_held_up_in_one_replay_does_not_count():
    kernels = kernels_of(RECORDED)
    size, late_us = sum(NODES), 1e6
    third = [each._replace(start_us=each.start_us + late_us) for each in kernels[-size:]]
    slow = [third[0]._replace(length_us=350.0)]
    moved = [each._replace(start_us=each.start_us + 350.0) for each in third[1:]]
    plain, held_up = found(kernels + third), found(kernels + slow + moved)
    assert held_up[KEYS[0]].seconds == pytest.approx(plain[KEYS[0]].seconds, rel=0.05)


@pytest.mark.parametrize(
    ("blocks", "threads", "registers", "shared", "at_once"),
    [
        (32, 512, 48, 33040, 2),  # registers: 16 warps of 1,536 of 65,536
        (32, 128, 119, 122880, 1),  # shared memory
        (8192, 128, 32, 0, 16),  # threads
        (64, 32, 16, 0, 32),  # blocks of a multiprocessor
        (4, 1024, 255, 0, 1),  # one block is there in any case
    ],
)
def test_blocks_fill_what_they_take_of_those_that_are_there_at_once(
    blocks, threads, registers, shared, at_once
):
    kernel = KernelRun(0.0, 1.0, blocks, threads, registers, shared)
    assert kernel.fill(H200) == pytest.approx(min(1.0, blocks / (132 * at_once)))


def test_recorded_kernels_of_a_small_wave_leave_most_of_the_device_free():
    told = found()
    assert all(0 <= each.fill < 0.5 for each in told.values())
    norm = next(key for key in told if key.startswith("aten.cudnn_batch_norm"))
    # 64 channels are as many blocks, of which a multiprocessor takes two.
    assert told[norm].fill == pytest.approx(64 / (132 * 2))


def test_kernels_beside_each_other_count_once():
    kernels = [KernelRun(0.0, 4.0), KernelRun(1.0, 2.0), KernelRun(3.0, 3.0)]
    told = in_place(kernels, 1, [3], ["rnn"], 0.0, H200)
    assert told["rnn"].seconds == pytest.approx(6e-6)


def test_seeds_that_are_set_before_each_replay_are_no_kernels_of_calls():
    kernels, size = kernels_of(RECORDED), sum(NODES)
    seeds = [
        KernelRun(kernels[first].start_us - before, 1.0, 1, 32)
        for first in range(0, len(kernels), size)
        for before in (4.0, 2.0)
    ]
    assert found(sorted(kernels + seeds)) == found(kernels)


def test_a_trace_of_something_else_is_refused():
    with pytest.raises(ValueError, match="replays have 33 each"):
        found(kernels_of(RECORDED)[:-1] + [KernelRun(9e9, 1.0)] * 2)
    with pytest.raises(ValueError, match="replays have 34 each"):
        found(nodes=[NODES[0] + 1, *NODES[1:]])
