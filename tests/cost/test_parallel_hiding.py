"""What of the traffic hides behind work, and what does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost.parallel_samples import LLAMA, cluster_of, gpt, parts, step_s

from hocket.cost.parallel import efficiency
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.stages import stage_costs
from hocket.cost.parallel.step import exposed_s, hiding_rounds
from hocket.transformer import ParallelConfig


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
    config = ParallelConfig(**fields, chunks=4, schedule="interleaved")
    after_s = max(stage_costs(model, config, on, program).after_s)
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


def test_chunks_cost_the_same_in_the_simulated_stages():
    program = find_software("megatron-core")
    totals = []
    for chunks, schedule in ((1, "1f1b"), (4, "interleaved")):
        config = ParallelConfig(
            pipeline=4, data=2, global_batch=64, zero=1, chunks=chunks, schedule=schedule
        )
        costs = stage_costs(LLAMA, config, cluster_of("dgx-h100"), program)
        totals.append(sum((*costs.forward_s, *costs.input_gradient_s, *costs.weight_gradient_s)))
    expected_s = 4 * 3 * efficiency.CONSTANTS.chunk_s
    assert totals[1] - totals[0] == pytest.approx(expected_s, rel=1e-3)


def test_gathered_weights_are_waited_for_where_they_take_as_long_as_the_work():
    """Neither hides the other where both are as long; a step's own collectives still hide."""
    one = np.ones(1)
    assert exposed_s(one, one, np.array([True])) == pytest.approx(np.sqrt(2) - 1)
    assert exposed_s(one, one) == pytest.approx(efficiency.CONSTANTS.never_hidden)
    for work, left in ((0.0, 1.0), (100.0, efficiency.CONSTANTS.never_hidden)):
        assert exposed_s(one, work * one, np.array([True])) == pytest.approx(left)
