"""Memory of configs against published formulas, figures and measurements."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost.parallel.activations import activation_tables
from hocket.cost.parallel.costs import StageCosts
from hocket.cost.parallel.in_flight import in_flight_chunks
from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.overheads import (
    DEFAULT_OVERHEADS,
    FORMULAS_ONLY,
    GIVEN_BACK,
    MemoryOverheads,
    fit_overheads,
)
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.stage_memory import stage_memory
from hocket.cost.validation import fitted_overheads, load_tables, predict_memory
from hocket.plan.sections.schedule import StageWork
from hocket.planners.parallel.schedules import make_schedule
from hocket.simulate.pipeline import simulate_pipeline
from hocket.transformer import RECOMPUTES, SCHEDULES, Experts, ParallelConfig, ParallelConfigs
from hocket.transformer.counts import parameter_counts
from hocket.transformer.files import find_model
from tests.cost.parallel_samples import gpt
from tests.cost.public_tables import public_tables

PLAIN = Software(name="plain", dtype="float16", attention="plain")
FLASH = Software(name="flash")
GPT = find_model("gpt3-175b")
V_SHAPED = ("zb-v", "dualpipe-v")


def _chunks_of(schedule, chunks):
    if schedule in V_SHAPED:
        return 2
    return chunks if schedule in ("interleaved", "looped-bfs") else 1


CONFIGS = st.builds(
    lambda schedule, chunks, pipeline, data, microbatch, rounds, **rest: ParallelConfig(
        schedule=schedule,
        chunks=_chunks_of(schedule, chunks),
        pipeline=pipeline,
        data=data,
        microbatch=microbatch,
        global_batch=data * microbatch * pipeline * rounds,
        **rest,
    ),
    schedule=st.sampled_from(SCHEDULES),
    chunks=st.sampled_from([2, 3]),
    pipeline=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 4, 16]),
    microbatch=st.sampled_from([1, 2, 4]),
    rounds=st.integers(1, 4),
    tensor=st.sampled_from([1, 2, 4, 8]),
    context=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2, 8]),
    recompute=st.sampled_from(RECOMPUTES),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
)
ONLY_STATE = MemoryOverheads(constant_bytes=0, state_factor=1, activation_factor=0)
SPARSE = replace(
    find_model("mixtral-8x7b"),
    layers=48,
    experts=Experts(count=8, active=2, mlp_width=1000, shared_width=512, dense_layers=3),
)
MODELS = [replace(GPT, layers=48), replace(find_model("llama3-70b"), layers=48), SPARSE]


# ── one config and many ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(config=CONFIGS)
def test_arrays_give_the_fullest_rank_of_the_stages(model, config):
    for software in (PLAIN, FLASH):
        ranks = stage_memory(model, config, software).peak_bytes
        found = memory(model, ParallelConfigs.of([config]), software)[0]
        if model.experts and config.pipeline > 1:
            # There the heavier kind of layer stands for the dense ones.
            assert max(ranks) * (1 - 1e-6) <= found <= max(ranks) * 1.15
        else:
            assert found == pytest.approx(max(ranks), rel=1e-6)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(config=CONFIGS, layers=st.integers(16, 60))
def test_arrays_are_never_too_small_where_layers_do_not_divide(config, layers):
    model = replace(GPT, layers=max(layers, config.num_stages))
    ranks = stage_memory(model, config, PLAIN).peak_bytes
    found = memory(model, ParallelConfigs.of([config]), PLAIN)[0]
    assert found >= max(ranks) * (1 - 1e-6)


def test_no_configs_give_no_figures():
    assert len(memory(GPT, ParallelConfigs.of([]), PLAIN)) == 0


# ── schedules ────────────────────────────────────────────────────────────────────────────────────


def _most_chunks_held(schedule, device):
    held = most = 0
    for action in range(schedule.start[device], schedule.start[device + 1]):
        work = StageWork(int(schedule.work[action]))
        held += work == StageWork.FORWARD
        most = max(most, held)
        held -= work in (StageWork.BACKWARD, StageWork.WEIGHT_GRADIENT)
    return most


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pipeline", [1, 2, 4, 7])
def test_microbatches_in_flight_are_those_of_the_schedules(name, pipeline):
    chunks, num_microbatches = _chunks_of(name, 3), 6 * pipeline
    schedule = make_schedule(name, pipeline, num_microbatches, chunks)
    for rank in range(pipeline):
        arguments = (np.array([float(x)]) for x in (pipeline, chunks, rank))
        bound = min(in_flight_chunks(name, *arguments)[0], num_microbatches * chunks)
        held = _most_chunks_held(schedule, rank)
        assert held <= bound
        if pipeline in (2, 4):
            assert held == bound


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_peaks_are_those_of_the_simulated_schedule(name, recompute):
    chunks = _chunks_of(name, 2)
    config = ParallelConfig(
        tensor=8, pipeline=4, chunks=chunks, data=2, global_batch=48, schedule=name,
        recompute=recompute,
    )  # fmt: skip
    found = stage_memory(GPT, config, FLASH)
    unit = (1.0,) * config.num_stages
    costs = StageCosts(
        forward_s=unit,
        input_gradient_s=unit,
        weight_gradient_s=unit,
        send_s=unit[1:],
        activation_bytes=found.activation_bytes,
        weight_gradient_bytes=found.weight_gradient_bytes,
        state_bytes=found.state_bytes,
        after_s=(0.0,) * 4,
    )
    simulated = simulate_pipeline(make_schedule(name, 4, 24, chunks), costs).peak_bytes
    ratio = simulated / np.array(found.peak_bytes)
    assert ratio.max() < 1.01
    # Ranks at the end of split schedules hold less than the first, which the bound is for.
    assert ratio.min() > 0.9
    assert ratio[0] == pytest.approx(1.0, abs=0.01)


# ── published formulas ───────────────────────────────────────────────────────────────────────────


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    heads=st.sampled_from([16, 64, 96]),
    width=st.sampled_from([64, 128]),
    tensor=st.sampled_from([1, 2, 4, 8]),
    microbatch=st.sampled_from([1, 2, 8]),
)
def test_activations_of_a_gpt_are_those_of_korthikanti(heads, width, tensor, microbatch):
    model = gpt(hidden=heads * width, layers=4, heads=heads, sequence=2048, vocabulary=1000)
    s, b, h, a, t = model.sequence, microbatch, model.hidden, heads, tensor
    published = {
        ("none", False): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        ("none", True): s * b * h / t * (34 + 5 * a * s / h),
        ("selective", False): s * b * h * (10 + 24 / t),
        ("selective", True): 34 * s * b * h / t,
        ("full", False): 2 * s * b * h,
        ("full", True): 2 * s * b * h / t,
    }
    for (recompute, along), layer_bytes in published.items():
        config = ParallelConfig(
            tensor=t, pipeline=4, microbatch=b, global_batch=8 * b, recompute=recompute,
            sequence_parallel=along,
        )  # fmt: skip
        # A stage inside has neither embedding nor logits.
        found = stage_memory(model, config, PLAIN, FORMULAS_ONLY).activation_bytes[1]
        assert found == pytest.approx(layer_bytes, abs=1)
    selective = ParallelConfig(tensor=t, pipeline=4, microbatch=b, global_batch=8 * b)
    found = stage_memory(model, selective, FLASH, FORMULAS_ONLY).activation_bytes[1]
    assert found == pytest.approx(published["selective", False], abs=1)


def test_weight_gradients_of_a_gpt_need_what_the_zero_bubble_paper_says():
    config = ParallelConfig(pipeline=4, global_batch=8, schedule="zb-h1")
    found = stage_memory(GPT, config, PLAIN, FORMULAS_ONLY).weight_gradient_bytes[1]
    assert found == pytest.approx(24 * 32 * GPT.sequence * GPT.hidden, rel=1e-9)


@pytest.mark.parametrize(
    ("zero", "gradient_bytes", "per_parameter"),
    [
        (0, 4, 18), (1, 4, 6 + 12 / 8), (2, 4, 2 + 16 / 8), (3, 4, 18 / 8),
        (0, 2, 20), (1, 2, 4 + 16 / 8), (2, 2, 2 + 18 / 8), (3, 2, 20 / 8),
    ],
)  # fmt: skip
def test_state_per_parameter_is_that_of_megatron_and_zero(zero, gradient_bytes, per_parameter):
    model = replace(GPT, layers=50)
    software = replace(PLAIN, gradient_bytes=gradient_bytes)
    configs = ParallelConfigs.of([ParallelConfig(data=8, global_batch=8, zero=zero)])
    found = memory(model, configs, software, ONLY_STATE)[0]
    layers = 0.0 if zero < 2 else (gradient_bytes + (4 if zero == 3 else 0)) / 50
    expected = parameter_counts(model).total * (per_parameter + layers)
    assert found == pytest.approx(expected, rel=0.01)


def test_tensor_and_pipeline_ranks_together_hold_every_parameter():
    config = ParallelConfig(tensor=4, pipeline=6, global_batch=6)
    held = sum(stage_memory(GPT, config, PLAIN, ONLY_STATE).state_bytes) * 4 / 18
    copy_of_embedding = GPT.vocabulary * GPT.hidden
    assert held == pytest.approx(parameter_counts(GPT).total + copy_of_embedding, rel=1e-3)


def test_experts_are_divided_over_the_expert_degree():
    model = find_model("mixtral-8x7b")
    one = ParallelConfig(data=8, global_batch=8)
    found = memory(model, ParallelConfigs.of([one, replace(one, expert=8)]), FLASH, ONLY_STATE)
    experts = 8 * 3 * 4096 * 14336 * 32
    saved = found[0] - found[1]
    assert saved == pytest.approx(experts * 7 / 8 * 18, rel=1e-6)


def test_untied_embeddings_count_twice_on_one_device_and_once_on_two():
    model = find_model("llama3-8b")
    whole = ParallelConfigs.of([ParallelConfig()])
    tied = replace(model, tied_embeddings=True)
    more = memory(model, whole, FLASH, ONLY_STATE) - memory(tied, whole, FLASH, ONLY_STATE)
    assert more[0] == pytest.approx(18 * model.vocabulary * model.hidden)
    halves = ParallelConfigs.of([ParallelConfig(pipeline=2, global_batch=2)])
    assert memory(model, halves, FLASH, ONLY_STATE) == memory(tied, halves, FLASH, ONLY_STATE)


# ── monotony ─────────────────────────────────────────────────────────────────────────────────────


@settings(derandomize=True, deadline=None, max_examples=100)
@given(config=CONFIGS)
def test_more_sharing_and_recomputing_never_need_more_state_or_activations(config):
    model = replace(GPT, layers=48)

    def peak(**change):
        rows = ParallelConfigs.of([replace(config, **change)])
        return memory(model, rows, PLAIN, FORMULAS_ONLY)[0]

    by_recompute = [peak(recompute=mode) for mode in ("none", "selective")]
    assert by_recompute[0] >= by_recompute[1] * 0.999 or config.pipeline == 1
    assert peak(zero=0) >= peak(zero=1) * (1 - 1e-12)
    assert peak(sequence_parallel=False) >= peak(sequence_parallel=True) * (1 - 1e-12)
    assert peak(microbatch=config.microbatch, context=1) >= peak(context=2) * (1 - 1e-12)


# ── published figures and measurements ───────────────────────────────────────────────────────────


def test_memory_of_korthikanti_figure_1_is_within_five_percent():
    rows = load_tables()["korthikanti-memory"]
    measured = np.array([row.memory_bytes for row in rows])
    errors = np.abs(predict_memory(rows, FORMULAS_ONLY) / measured - 1)
    assert len(rows) == 8
    assert errors.max() < 0.03


def test_activations_of_korthikanti_figure_1_are_exact():
    gibibytes = {"22B": (59.25, 9.5625), "175B": (66.84375, 12.3515625),
                 "530B": (114.0234375, 23.076171875), "1T": (131.25, 26.5625)}  # fmt: skip
    for row in load_tables()["korthikanti-memory"]:
        config, ones = row.config, np.ones(1)
        is_second = config.recompute == "selective"
        published = gibibytes[row.row.split()[0]][is_second] * 2**30
        tables = activation_tables(row.model, row.software, config.tensor)
        layer = tables.dense_layer[config.tensor, int(config.sequence_parallel), int(is_second)]
        arguments = (config.pipeline * ones, config.chunks * ones, 0 * ones)
        held = in_flight_chunks(config.schedule, *arguments)[0] / config.chunks
        num_layers = row.model.layers / config.pipeline
        found = layer * num_layers * min(held, config.num_microbatches) * config.microbatch
        assert found == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "percent"),
    [
        ((6144, 48, 64, 4), (66.84, 49.42, 16.18, 7.64)),
        ((12288, 96, 96, 1), (62.04, 56.53, 18.49, 8.71)),
        ((20480, 105, 128, 1), (58.31, 62.04, 20.27, 9.42)),
        ((25600, 128, 160, 1), (58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_activations_of_korthikanti_figure_7_are_within_five_percent(shape, percent):
    hidden, layers, heads, microbatch = shape
    model = gpt(hidden=hidden, layers=layers, heads=heads, sequence=2048, vocabulary=1)
    # Layers of a stage inside: Fig. 7 counts no embedding.
    base = ParallelConfig(
        tensor=8, pipeline=3, microbatch=microbatch, global_batch=3 * microbatch,
        layers=(1, layers - 2, 1),
    )  # fmt: skip

    def layer_bytes(**change):
        found = stage_memory(model, replace(base, **change), PLAIN, FORMULAS_ONLY)
        return found.activation_bytes[1]

    variants = (
        {"sequence_parallel": True},
        {"recompute": "selective"},
        {"recompute": "selective", "sequence_parallel": True},
        {"recompute": "full"},
    )
    for variant, published in zip(variants, percent, strict=True):
        found = 100 * layer_bytes(**variant) / layer_bytes()
        assert found == pytest.approx(published, rel=0.05), variant


def test_overheads_are_found_again_from_what_they_made():
    rng = np.random.default_rng(5)
    state, activations = rng.uniform(5e9, 60e9, (2, 40))
    true = MemoryOverheads(constant_bytes=3e9, state_factor=1.1, activation_factor=1.2)

    def total(overheads):
        factors = overheads.state_factor * state + overheads.activation_factor * activations
        return overheads.constant_bytes + factors

    measured = total(true)
    measured[3] *= 1.4
    found = fit_overheads(state, activations, measured)
    assert np.abs(total(found) / total(true) - 1).max() < 0.02


def test_overheads_stay_near_the_default_where_one_row_says_little():
    found = fit_overheads([20e9], [10e9], [38.5e9])
    assert found.state_factor == pytest.approx(DEFAULT_OVERHEADS.state_factor, abs=0.1)
    assert found.constant_bytes == pytest.approx(DEFAULT_OVERHEADS.constant_bytes, abs=2e9)


@pytest.mark.skipif(not public_tables(), reason="no ../shared/data beside the repository")
def test_bloom_memory_holds_for_any_ten_runs_that_calibrate_it():
    rows = public_tables()["bloom"]
    known = [row for row in rows if row.memory_bytes]
    out = np.array([row.is_oom for row in rows])
    rng = np.random.default_rng(1)
    means, alarms = [], []
    for _ in range(8):
        chosen = set(rng.permutation(len(known))[:10].tolist())
        overheads = fitted_overheads([known[index] for index in sorted(chosen)])
        rest = [row for index, row in enumerate(known) if index not in chosen]
        measured = np.array([row.memory_bytes for row in rest])
        means.append(np.mean(np.abs(predict_memory(rest, overheads) / measured - 1)))
        needed = predict_memory(rows, overheads) / GIVEN_BACK
        alarms.append(int((needed[~out] > 80 * 2**30).sum()))
    assert np.mean(means) < 0.06
    assert max(alarms) <= 1
