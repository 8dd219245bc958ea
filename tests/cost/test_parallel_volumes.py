"""Traffic of divisions against numbers worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost.parallel.software import Software
from hocket.cost.parallel.volumes import volumes
from hocket.transformer import Division, Divisions
from hocket.transformer.files import find_model

MEGATRON = Software(name="megatron")
MODEL = find_model("gpt3-175b")
HIDDEN_BYTES = 2 * 2048 * 12288
"""One sequence's hidden state in 16 bits."""


def _volumes(model=MODEL, software=MEGATRON, **division):
    found = volumes(model, Divisions.of([Division(**division)]), software)
    return {name: float(values[0]) for name, values in vars(found).items()}


def test_one_device_sends_nothing():
    assert set(_volumes(global_batch=4).values()) == {0.0}


def test_tensor_parallelism_reduces_twice_per_layer_and_pass():
    found = _volumes(tensor=8, microbatch=2, global_batch=6)
    ring = 2 * 7 / 8 * 2 * HIDDEN_BYTES
    assert found["tensor_bytes"] == pytest.approx(3 * 96 * 4 * ring)
    again = _volumes(tensor=8, microbatch=2, global_batch=6, recompute="full")
    assert again["tensor_bytes"] == pytest.approx(3 * 96 * 6 * ring)


def test_sequence_parallelism_sends_the_same_and_gathers_twice_more():
    found = _volumes(tensor=8, global_batch=1, sequence_parallel=True)
    gather = 7 / 8 * HIDDEN_BYTES
    assert found["tensor_bytes"] == pytest.approx(96 * (8 + 2) * gather)


def test_pipeline_sends_parts_where_they_are_scattered():
    division = {"tensor": 8, "pipeline": 12, "global_batch": 24, "chunks": 4}
    found = _volumes(**division)
    assert found["pipeline_bytes"] == pytest.approx(2 * 24 * 4 * HIDDEN_BYTES / 8)
    whole = _volumes(software=replace(MEGATRON, scatters_activations=False), **division)
    assert whole["pipeline_bytes"] == pytest.approx(8 * found["pipeline_bytes"])


def test_data_parallelism_by_zero_stage():
    layers = 96 * 12 * 12288**2
    division = {"data": 16, "microbatch": 2, "global_batch": 96}
    by_zero = [_volumes(zero=zero, **division)["data_bytes"] for zero in range(4)]
    ring = 15 / 16 * layers
    # 32-bit gradients: reduced to all, or scattered with 16-bit weights gathered.
    assert by_zero[0] == pytest.approx(ring * 8, rel=1e-3)
    assert by_zero[1] == by_zero[2] == pytest.approx(ring * (4 + 2), rel=1e-3)
    # Three microbatches, weights gathered for the forward and the backward of each.
    assert by_zero[3] == pytest.approx(ring * (4 + 3 * 2 * 2), rel=1e-3)


def test_zero_3_with_one_microbatch_sends_half_as_much_again():
    software = replace(MEGATRON, gradient_bytes=2)
    division = {"data": 8, "global_batch": 8}
    plain = _volumes(software=software, **division)["data_bytes"]
    assert _volumes(software=software, zero=1, **division)["data_bytes"] == pytest.approx(plain)
    zero3 = _volumes(software=software, zero=3, **division)["data_bytes"]
    assert zero3 == pytest.approx(1.5 * plain)


def test_context_parallelism_passes_keys_and_values_around():
    model = find_model("llama3-70b")
    found = _volumes(model=model, context=4, tensor=2, global_batch=1)
    block = 2 * (8 * 128 / 2) * 2 * (8192 / 4)
    assert found["context_bytes"] == pytest.approx(3 * 3 * block * 80)


def test_experts_receive_every_visit_and_send_it_back():
    model = find_model("mixtral-8x7b")
    found = _volumes(model=model, data=8, expert=8, global_batch=8)
    tokens = 2 * 2 * model.sequence * model.hidden
    assert found["expert_bytes"] == pytest.approx(4 * 7 / 8 * tokens * 32)
    assert _volumes(model=model, data=8, global_batch=8)["expert_bytes"] == 0
    # Experts that are divided are reduced over fewer ranks.
    alone = _volumes(model=model, data=8, global_batch=8)["data_bytes"]
    assert found["data_bytes"] < 0.2 * alone


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
    st.integers(0, 3), st.integers(1, 4),
)  # fmt: skip
def test_volumes_grow_with_the_batch_but_gradients_do_not(tensor, pipeline, context, zero, rounds):
    division = {"tensor": tensor, "pipeline": pipeline, "context": context, "zero": zero}
    one = _volumes(**division, global_batch=rounds)
    two = _volumes(**division, global_batch=2 * rounds)
    for name in ("tensor_bytes", "pipeline_bytes", "context_bytes"):
        assert two[name] == pytest.approx(2 * one[name])
    if zero < 3:
        assert two["data_bytes"] == one["data_bytes"]
