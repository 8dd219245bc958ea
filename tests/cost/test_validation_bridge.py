"""What the reader of Megatron-Bridge's summary takes from its recipes, on rows made up here."""

from dataclasses import replace

import pytest

from hocket.cost.parallel.overheads import FORMULAS_ONLY
from hocket.cost.parallel.stage_memory import stage_memory
from tests.cost.public_tables import converter

bridge = converter()
bridge_dense, bridge_experts = bridge.bridge_dense, bridge.bridge_experts
blackwell_dense, blackwell_experts = bridge.blackwell_dense, bridge.blackwell_experts

ROW = {
    "release": "26.04", "task": "Pre-Training", "model": "Qwen3_30B_a3B", "system": "DGX-H100",
    "n_gpus": "16", "precision": "FP8", "gbs": "1024", "mbs": "1", "seq": "4096", "fsdp": "",
    "tp": "1", "pp": "2", "cp": "1", "vp": "12", "ep": "8", "grad_accum": "",
    "tokens_per_s_per_gpu": "8000", "model_tflops_per_gpu": "",
}  # fmt: skip


def test_a_row_is_in_one_table_alone():
    readers = (bridge_dense, bridge_experts, blackwell_dense, blackwell_experts)
    for change, owner in (
        ({}, 1), ({"model": "LLAMA3_70B"}, 0), ({"system": "DGX-GB200"}, 3),
        ({"system": "DGX-B200", "model": "LLAMA3_8B"}, 2),
    ):  # fmt: skip
        found = [len(read(ROW | change)) for read in readers]
        assert found == [int(index == owner) for index in range(4)]


@pytest.mark.parametrize(
    "change", [{"precision": "NVFP4"}, {"model": "DeepSeekV4 Flash"}, {"task": "SFT"}]
)
def test_rows_that_are_not_described_are_left_out(change):
    assert bridge_experts(ROW | change) == []
    assert blackwell_experts(ROW | change | {"system": "DGX-B200"}) == []


def test_latent_attention_has_a_table_of_its_own():
    deepseek = ROW | {"model": "DeepSeekV3", "system": "DGX-GB200", "pp": "4", "vp": "4"}
    assert bridge_experts(deepseek) == blackwell_experts(deepseek) == []
    (row,) = bridge.bridge_latent(deepseek)
    assert row.cluster == "bridge-gb200-latent"
    assert (row.model.layers, row.model.latent.key_rank) == (62, 512)
    (row,) = bridge.bridge_latent(deepseek | {"model": "DeepSeekV3 (w/o MTP)"})
    assert row.model.layers == 61


def test_degrees_that_a_release_repeats_are_those_of_its_recipe():
    (stated,) = bridge_experts(ROW)
    assert (stated.config.pipeline, stated.config.expert, stated.config.data) == (2, 8, 8)
    (ran,) = bridge_experts(ROW | {"release": "26.02.01"})
    assert (ran.config.pipeline, ran.config.expert, ran.config.data) == (1, 16, 16)


def test_other_slips_of_the_summary_are_those_of_its_recipes():
    (row,) = bridge_experts(ROW | {"release": "25.11", "model": "GPT OSS 120B", "mbs": "4"})
    assert row.config.microbatch == 1
    llama = {"release": "26.02.01", "model": "LLAMA3_70B", "system": "DGX-GB300", "vp": "n/a",
             "precision": "MXFP8", "mbs": "2", "n_gpus": "64", "pp": "4"}  # fmt: skip
    (row,) = blackwell_dense(ROW | llama)
    assert (row.config.chunks, row.config.microbatch) == (5, 1)


def test_activations_of_some_layers_wait_in_the_host_where_weights_are_divided():
    llama = {"model": "LLAMA3_70B", "system": "DGX-GB200", "n_gpus": "64", "pp": "1", "vp": "n/a",
             "mbs": "2", "seq": "8192"}  # fmt: skip
    (divided,) = blackwell_dense(ROW | llama | {"fsdp": "64"})
    (whole,) = blackwell_dense(ROW | llama)
    assert (divided.software.host_share, whole.software.host_share) == (0.5, 0.0)
    on_device = replace(divided.software, host_share=0.0)
    half, full = (
        stage_memory(divided.model, divided.config, software, FORMULAS_ONLY)
        for software in (divided.software, on_device)
    )
    layers = full.peak_bytes[0] - half.peak_bytes[0]
    # What stays: the state, and what the loss keeps.
    assert 0.4 * full.peak_bytes[0] < layers < 0.5 * full.peak_bytes[0]


def test_recipes_say_how_tokens_travel_and_what_is_replayed():
    large = {"model": "Qwen3_235B_a22B", "tp": "2", "pp": "8", "vp": "4", "n_gpus": "256"}
    (small,) = bridge_experts(ROW)
    (wide,) = bridge_experts(ROW | large)
    assert (small.software.sends_once, small.software.overlaps_experts) == (True, False)
    assert (wide.software.sends_once, wide.software.overlaps_experts) == (False, True)
    for release, replays in (("26.04", False), ("26.06", True)):
        (row,) = blackwell_experts(ROW | {"system": "DGX-GB200", "release": release})
        assert row.software.replays_graphs is replays
    (row,) = blackwell_dense(ROW | {"system": "DGX-B200", "model": "LLAMA3_8B"})
    assert row.software.replays_graphs


def test_ends_have_stages_of_their_own_where_chunks_outnumber_layers_by_two():
    (row,) = blackwell_dense(
        ROW | {"system": "DGX-B200", "model": "LLAMA3.1_405B", "n_gpus": "256", "tp": "4",
               "pp": "16", "vp": "8"}
    )  # fmt: skip
    assert row.config.layers == (0, *[1] * 126, 0)
