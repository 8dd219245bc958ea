"""Parameters and FLOPs against published formulas and tables."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.transformer.counts import (
    layer_parameters,
    parameter_counts,
    step_flops,
)
from hocket.transformer.files import find_model
from tests.cost.parallel_samples import gpt

SHAPES = st.builds(
    lambda heads, width, layers, sequence, vocabulary: gpt(
        hidden=heads * width,
        layers=layers,
        heads=heads,
        sequence=sequence,
        vocabulary=vocabulary,
    ),
    st.integers(1, 160),
    st.sampled_from([64, 80, 128, 160]),
    st.integers(1, 128),
    st.sampled_from([512, 1024, 2048, 8192]),
    st.integers(1000, 260_000),
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(SHAPES, st.integers(1, 4096))
def test_flops_of_a_gpt_are_the_published_formulas(model, batch):
    s, h, layers, vocabulary = model.sequence, model.hidden, model.layers, model.vocabulary
    f72 = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    f96 = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    assert step_flops(model, batch, "model") == pytest.approx(f72, rel=1e-12)
    assert step_flops(model, batch, "hardware-full-recompute") == pytest.approx(f96, rel=1e-12)
    published = 72 * batch * s * layers * h**2 * (1 + s / (3 * h) + vocabulary / (12 * layers * h))
    assert step_flops(model, batch, "hardware-selective-published") == pytest.approx(published)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(SHAPES)
def test_parameters_of_a_gpt_are_the_published_formula(model):
    s, h, layers, vocabulary = model.sequence, model.hidden, model.layers, model.vocabulary
    published = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))
    # The formula leaves out the last norm.
    assert parameter_counts(model).total == pytest.approx(published + 2 * h, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-1.7b", 1.7), ("gpt-3.6b", 3.6), ("gpt-7.5b", 7.5), ("gpt-18b", 18.4),
        ("gpt-39b", 39.1), ("gpt-76b", 76.1), ("gpt-145b", 145.6), ("gpt-310b", 310.1),
        ("gpt-530b", 529.6), ("gpt-1t", 1008.0), ("gpt3-175b", 174.6), ("mt-nlg-530b", 529.6),
        ("bloom-176b", 176.2), ("llama3-8b", 8.03), ("llama3-70b", 70.55),
        ("llama3-405b", 405.85), ("mixtral-8x7b", 46.7), ("mixtral-8x22b", 140.6),
        ("qwen3-30b-a3b", 30.53), ("mistral-7b", 7.24), ("gemma2-2b", 2.61), ("gemma2-9b", 9.24),
        ("gemma2-27b", 27.2), ("gemma3-1b", 1.0), ("gemma3-4b", 3.88), ("gemma3-12b", 11.77),
        ("gemma3-27b", 27.0), ("phi3-mini", 3.82), ("phi4", 14.66), ("phi4-mini", 3.84),
        ("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.54), ("qwen2.5-3b", 3.09),
        ("qwen2.5-7b", 7.62), ("qwen2.5-14b", 14.77), ("qwen2.5-32b", 32.76),
        ("qwen2.5-72b", 72.7), ("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19), ("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("llama3.2-1b", 1.236),
        ("llama3.2-3b", 3.21),
    ],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name, billions):
    assert parameter_counts(find_model(name)).total / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama3-8b", 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704),
        # Without the bias of the score of each of the experts.
        ("deepseek-v3", 671_026_419_200 - 58 * 256),
    ],
)
def test_presets_have_exactly_the_parameters_of_the_released_weights(name, total):
    assert parameter_counts(find_model(name)).total == total


def test_active_parameters_count_only_visited_experts():
    model = find_model("mixtral-8x7b")
    counts = parameter_counts(model)
    assert counts.active / 1e9 == pytest.approx(12.88, abs=0.01)
    every = replace(model, experts=replace(model.experts, active=8))
    assert parameter_counts(every).active == counts.total
    dense = replace(model, experts=None)
    assert parameter_counts(dense).active == parameter_counts(dense).total


def test_dense_layers_before_experts_count_as_dense():
    model = find_model("mixtral-8x7b")
    with_dense = replace(model, experts=replace(model.experts, dense_layers=3))
    sparse = layer_parameters(model, sparse=True)
    dense = layer_parameters(model, sparse=False)
    fewer = 3 * (sparse - dense)
    assert parameter_counts(with_dense).total == parameter_counts(model).total - fewer


@pytest.mark.parametrize(("name", "ratio"), [("gpt3-175b", 52.8 / 51.4), ("gpt-1t", 57.0 / 56.3)])
def test_published_ratios_of_hardware_to_model_flops(name, ratio):
    model = find_model(name)
    found = step_flops(model, 1, "hardware-selective-published") / step_flops(model, 1, "model")
    assert found == pytest.approx(ratio, abs=0.0015)


def test_half_of_the_pairs_lie_under_a_causal_mask():
    model = find_model("llama3-405b")
    whole, causal = (step_flops(model, 1, way) for way in ("model", "model-causal"))
    pairs = 12 * model.layers * model.sequence**2 * model.heads * model.head_width
    assert whole - causal == pytest.approx(pairs / 2)


def test_ratio_of_the_22b_model():
    model = gpt(hidden=6144, layers=48, heads=64, sequence=2048, vocabulary=51200)
    found = step_flops(model, 1, "hardware-selective-published") / step_flops(model, 1, "model")
    assert found == pytest.approx(43.7 / 41.5, abs=0.0015)
    once = step_flops(model, 1, "hardware-selective-once") / step_flops(model, 1, "model")
    assert 1 < once < found


@pytest.mark.parametrize(
    ("name", "num_devices", "rate", "days"),
    [
        ("gpt3-175b", 384, 144, 90), ("gpt3-175b", 768, 88, 74), ("gpt3-175b", 1536, 44, 74),
        ("gpt3-175b", 384, 153, 84), ("gpt3-175b", 768, 149, 43), ("gpt3-175b", 1536, 141, 23),
        ("gpt-530b", 640, 138, 169), ("gpt-530b", 1120, 98, 137), ("gpt-530b", 2240, 48, 140),
        ("gpt-530b", 560, 171, 156), ("gpt-530b", 1120, 167, 80), ("gpt-530b", 2240, 159, 42),
    ],
)  # fmt: skip
def test_days_for_300_billion_tokens_are_those_of_sc21_table_2(name, num_devices, rate, days):
    model = find_model(name)
    flops = 300e9 / model.sequence * step_flops(model, 1, "hardware-full-recompute")
    found = flops / (num_devices * rate * 1e12) / 86_400
    # Rates are printed with two or three digits, days as whole numbers.
    assert found == pytest.approx(days, abs=0.5 + days * 0.5 / rate)


def test_flops_of_experts_count_visits_not_experts():
    model = find_model("mixtral-8x7b")
    dense = replace(model, experts=None, mlp_width=2 * model.mlp_width)
    router = 3 * 2 * model.sequence * model.layers * model.hidden * model.experts.count
    found = step_flops(model, 1, "model")
    assert found == pytest.approx(step_flops(dense, 1, "model") + router, rel=1e-12)
