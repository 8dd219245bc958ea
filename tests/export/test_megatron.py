"""Megatron's flags, read back by a parser with Megatron's names."""

import argparse
import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.parallel_plans import GPT, LLAMA, divided, plan_of

from hocket.base.errors import UsageError
from hocket.export import export_plan
from hocket.export.megatron import pipeline_layout
from hocket.transformer import Experts

NUMBERS = [
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "kv-channels",
    "seq-length",
    "max-position-embeddings",
    "vocab-size",
    "num-query-groups",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "micro-batch-size",
    "global-batch-size",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "recompute-num-layers",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
]
SWITCHES = [
    "group-query-attention",
    "swiglu",
    "untie-embeddings-and-output-weights",
    "disable-bias-linear",
    "bf16",
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-megatron-fsdp",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "no-gradient-accumulation-fusion",
]
CHOICES = {
    "position-embedding-type": ["learned_absolute", "rope", "mrope", "relative", "none"],
    "normalization": ["LayerNorm", "RMSNorm"],
    "recompute-granularity": ["full", "selective"],
    "recompute-method": ["uniform", "block"],
    "recompute-modules": ["core_attn"],
    "data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "ckpt-format": ["torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"],
}


def _evaluated(text):
    """Megatron, too, takes this flag as Python."""
    return eval(text, {})  # noqa: S307


def parser():
    """The flags of Megatron's `arguments.py` that plans decide; abbreviations are no flags."""
    found = argparse.ArgumentParser(allow_abbrev=False)
    for name in NUMBERS:
        found.add_argument(f"--{name}", type=int)
    for name in SWITCHES:
        found.add_argument(f"--{name}", action="store_true")
    for name, choices in CHOICES.items():
        found.add_argument(f"--{name}", choices=choices)
    for name in ("attention-dropout", "hidden-dropout"):
        found.add_argument(f"--{name}", type=float, default=0.1)
    found.add_argument("--pipeline-model-parallel-layout")
    found.add_argument("--moe-layer-freq", type=_evaluated)
    return found


def read_back(plan):
    text = export_plan(plan, "megatron")["megatron.sh"]
    inside = re.search(r"PLAN=\(\n(.*?)\n\)", text, re.DOTALL)[1]
    return parser().parse_args(shlex.split(inside)), text


def stages_of(layout, pipeline):
    """The list of stages that Megatron makes of a layout: repeats unrolled, split at bars."""
    layout = layout.replace(",", "")
    layout = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout)
    layout = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), layout)
    stages = layout.split("|")
    assert len(stages) % pipeline == 0
    return stages


def test_a_dense_model_comes_back():
    plan = plan_of(
        *divided(LLAMA, "interleaved", 4, microbatches=8, tensor=2, data=2, zero=1, microbatch=3,
                 sequence_parallel=True, recompute="full"),
        on="2xdgx-a100-80g",
    )  # fmt: skip
    found, text = read_back(plan)
    model = plan.model
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size) == (8, 16, 24)
    assert (found.num_attention_heads, found.num_query_groups) == (model.heads, model.kv_heads)
    assert found.group_query_attention
    assert (found.kv_channels, found.seq_length, found.vocab_size) == (4, 8, 32)
    assert found.swiglu
    assert found.untie_embeddings_and_output_weights
    assert found.disable_bias_linear
    assert found.position_embedding_type == "rope"
    assert found.normalization == "RMSNorm"
    assert (found.attention_dropout, found.hidden_dropout) == (0, 0)
    assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == (2, 4)
    assert (found.micro_batch_size, found.global_batch_size) == (3, 48)
    assert found.num_virtual_stages_per_pipeline_rank == 2
    assert found.sequence_parallel
    assert found.use_distributed_optimizer
    assert not found.use_megatron_fsdp
    assert (found.recompute_granularity, found.recompute_method) == ("full", "uniform")
    assert found.recompute_num_layers == 1
    assert "--nproc-per-node=8 --nnodes=2" in text


def test_a_tied_model_and_selective_recompute_come_back():
    found, text = read_back(plan_of(*divided(GPT, "1f1b", 2, recompute="selective")))
    assert not found.untie_embeddings_and_output_weights
    assert not found.group_query_attention
    assert found.position_embedding_type == "learned_absolute"
    assert (found.recompute_granularity, found.recompute_modules) == ("selective", "core_attn")
    assert found.num_virtual_stages_per_pipeline_rank is None
    assert found.pipeline_model_parallel_layout is None
    assert "--standalone" in text


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_becomes_megatrons_fsdp(zero):
    found, text = read_back(plan_of(*divided(GPT, "1f1b", 1, data=4, zero=zero)))
    assert found.use_megatron_fsdp
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in text
    expected = "optim_grads" if zero == 2 else "optim_grads_params"
    assert found.data_parallel_sharding_strategy == expected


def test_experts_come_back():
    experts = Experts(count=8, active=2, mlp_width=12, shared_width=6, dense_layers=1)
    model, config, schedule = divided(replace(LLAMA, experts=experts), "1f1b", 2, data=2)
    found, _ = read_back(plan_of(model, replace(config, expert=2), schedule))
    assert (found.num_experts, found.moe_router_topk, found.moe_ffn_hidden_size) == (8, 2, 12)
    assert found.moe_shared_expert_intermediate_size == 6
    assert found.expert_model_parallel_size == 2
    assert found.moe_layer_freq == [0, 1]


def test_uneven_ends_and_uneven_middles_come_back():
    found, _ = read_back(plan_of(*divided(GPT, "1f1b", 4, layers=(1, 3, 3, 2))))
    assert found.decoder_first_pipeline_num_layers == 1
    assert found.decoder_last_pipeline_num_layers == 2
    assert found.pipeline_model_parallel_layout is None
    found, _ = read_back(plan_of(*divided(GPT, "1f1b", 4, layers=(1, 3, 2, 2))))
    assert stages_of(found.pipeline_model_parallel_layout, 4) == ["Et", "ttt", "tt", "ttL"]
    found, _ = read_back(
        plan_of(*divided(GPT, "interleaved", 2, microbatches=4, layers=(0, 2, 2, 1)))
    )
    assert stages_of(found.pipeline_model_parallel_layout, 2) == ["E", "tt", "tt", "tL"]
    assert found.num_virtual_stages_per_pipeline_rank is None


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_any_layout_is_read_by_megatrons_rules_as_it_was_meant(layers):
    stages = stages_of(pipeline_layout(tuple(layers)), 1)
    assert [stage.count("t") for stage in stages] == layers
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    assert "".join(stages).count("E") == "".join(stages).count("L") == 1


@pytest.mark.parametrize(
    ("schedule", "fields", "message"),
    [
        ("zb-v", {}, "has no schedule 'zb-v'"),
        ("gpipe", {}, "has no schedule 'gpipe'"),
        ("1f1b", {"data": 2, "zero": 2}, "FSDP only"),
    ],
)
def test_what_megatron_cannot_say_is_refused(schedule, fields, message):
    with pytest.raises(UsageError, match=message) as caught:
        export_plan(plan_of(*divided(GPT, schedule, 4, **fields)), "megatron")
    assert caught.value.hint


def test_names_cannot_leave_the_comment():
    model, config, schedule = divided(GPT, "1f1b", 2)
    plan = plan_of(replace(model, name='x\nrm -rf "$HOME" """'), config, schedule)
    text = export_plan(plan, "megatron")["megatron.sh"]
    assert "# x_rm -rf __HOME_ ___ on 2 devices" in text


def test_a_first_stage_without_layers_goes_by_layout():
    """Megatron refuses --decoder-first-pipeline-num-layers 0."""
    found, _ = read_back(plan_of(*divided(LLAMA, "1f1b", 4, layers=(0, 2, 2, 2))))
    assert found.decoder_first_pipeline_num_layers is None
    layout = found.pipeline_model_parallel_layout
    assert stages_of(layout, 4) == ["E", "tt", "tt", "ttL"]


def test_experts_beyond_the_replicas_take_tensor_ranks():
    model = replace(LLAMA, experts=Experts(count=8, active=2, mlp_width=8))
    fields = {"tensor": 2, "sequence_parallel": True}
    found, _ = read_back(plan_of(*divided(model, "1f1b", 1, data=2, expert=4, **fields)))
    assert (found.expert_model_parallel_size, found.expert_tensor_parallel_size) == (4, 1)
    found, _ = read_back(plan_of(*divided(model, "1f1b", 1, data=2, expert=2, **fields)))
    assert (found.expert_model_parallel_size, found.expert_tensor_parallel_size) == (2, None)
    with pytest.raises(UsageError, match="sequence parallelism only"):
        read_back(plan_of(*divided(model, "1f1b", 1, data=2, tensor=2, expert=2)))
    with pytest.raises(UsageError, match="distributes experts over"):
        read_back(plan_of(*divided(model, "1f1b", 1, data=3, expert=2, **fields)))


@pytest.mark.parametrize(
    ("data", "zero", "reduce", "gather"),
    [(1, 0, False, False), (2, 0, True, False), (2, 1, True, True), (2, 3, True, True)],
)
def test_traffic_between_replicas_is_hidden_as_predicted(data, zero, reduce, gather):
    found, _ = read_back(plan_of(*divided(LLAMA, "1f1b", 1, data=data, zero=zero)))
    assert (found.overlap_grad_reduce, found.overlap_param_gather) == (reduce, gather)
    assert not gather or found.use_distributed_optimizer
