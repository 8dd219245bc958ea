"""Export to Megatron-LM: the flags of ``pretrain_gpt.py`` in a shell script.

Flag names follow ``megatron/training/arguments.py`` of core 0.13 and later. Ranks are numbered in
the order tensor, context, data, pipeline, as in plans. Uneven stages become
``--decoder-first/last-pipeline-num-layers`` if only the ends differ, else
``--pipeline-model-parallel-layout``.
"""

from __future__ import annotations

import shlex
from itertools import groupby

from hocket.export.common import cannot, is_even, is_looped, launch, plain
from hocket.plan.transformer_plan import TransformerPlan
from hocket.transformer import Transformer

_NAME = "Megatron-LM"
_OWN_SCHEDULES = ("1f1b", "interleaved")
Flags = dict[str, str | None]
"""Value of each flag; None for a flag without a value."""

_DTYPE_FLAGS: dict[str, Flags] = {
    "float16": {"--fp16": None},
    "bfloat16": {"--bf16": None},
    "float8": {"--bf16": None, "--fp8-format": "hybrid"},
    "float32": {},
}


def megatron_files(plan: TransformerPlan) -> dict[str, str]:
    """A shell script with all flags that the plan decides; data and learning rate are the
    user's."""
    flags = megatron_flags(plan)
    lines = [
        f"  {name}" if value is None else f"  {name} {shlex.quote(value)}"
        for name, value in flags.items()
    ]
    text = "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {plain(plan.model.name)} on {plan.config.num_devices} devices of "
            f"{plain(plan.cluster.name)}.",
            "# Run it in the folder of Megatron-LM and add data, tokenizer and learning rate:",
            "#   ./megatron.sh --data-path … --tokenizer-type … --lr … --train-iters …",
            "set -euo pipefail",
            # Without FSDP Megatron relies on one hardware queue, so that communication kernels
            # start in launch order. Its FSDP needs several queues to overlap.
            *([] if "--use-megatron-fsdp" in flags else ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]),
            "PLAN=(",
            *lines,
            ")",
            launch(plan, 'pretrain_gpt.py "${PLAN[@]}" "$@"'),
            "",
        ]
    )
    return {"megatron.sh": text}


def megatron_flags(plan: TransformerPlan) -> Flags:
    """All flags that a plan decides."""
    _refuse(plan)
    return {
        **_model_flags(plan.model),
        **_degree_flags(plan),
        **_stage_flags(plan),
        **_data_flags(plan),
        **_recompute_flags(plan),
    }


def _refuse(plan: TransformerPlan) -> None:
    config = plan.config
    is_own = config.schedule in _OWN_SCHEDULES and plan.schedule.name in _OWN_SCHEDULES
    if config.pipeline > 1 and not (is_own and is_looped(plan)):
        raise cannot(
            plan, _NAME, f"has no schedule {plan.schedule.name!r}; it runs 1f1b and interleaved",
            "plan again with --schedule 1f1b or interleaved, or export --to torch",
        )  # fmt: skip
    if config.zero >= 2 and config.pipeline > 1:
        raise cannot(
            plan, _NAME, "shards gradients and weights (ZeRO 2, 3) by its FSDP only, which is not "
            "exported together with a pipeline",
            "plan again with --fix zero=1",
        )  # fmt: skip
    if config.num_microbatches % config.pipeline and config.chunks > 1:
        raise cannot(
            plan, _NAME, "interleaves only where microbatches divide by the pipeline degree",
            "choose another batch or microbatch size",
        )  # fmt: skip
    if plan.model.experts is not None and config.tensor > 1 and not config.sequence_parallel:
        raise cannot(
            plan, _NAME, "trains experts beside tensor parallelism with sequence parallelism only",
            "plan again with --fix sequence_parallel=true",
        )  # fmt: skip
    replicas = config.data * config.context
    if replicas % config.expert and config.expert % replicas:
        raise cannot(
            plan, _NAME, "distributes experts over some or all of data x context, or tensor ranks",
            "plan again with an expert degree that divides data x context",
        )  # fmt: skip


def _model_flags(model: Transformer) -> Flags:
    flags: Flags = {
        "--num-layers": str(model.layers),
        "--hidden-size": str(model.hidden),
        "--ffn-hidden-size": str(model.mlp_width),
        "--num-attention-heads": str(model.heads),
        "--kv-channels": str(model.head_width),
        "--seq-length": str(model.sequence),
        "--max-position-embeddings": str(model.sequence),
        "--vocab-size": str(model.vocabulary),
        "--position-embedding-type": "learned_absolute" if model.learned_positions else "rope",
        # Biases mark the GPT family, which uses LayerNorm; models without biases use RMSNorm, as
        # Llama does.
        "--normalization": "LayerNorm" if model.biases else "RMSNorm",
    }
    if model.kv_heads != model.heads:
        flags |= {"--group-query-attention": None, "--num-query-groups": str(model.kv_heads)}
    if model.mlp == "swiglu":
        flags["--swiglu"] = None
    if not model.tied_embeddings:
        flags["--untie-embeddings-and-output-weights"] = None
    if not model.biases:
        flags["--disable-bias-linear"] = None
    if not model.dropout:
        flags |= {"--attention-dropout": "0", "--hidden-dropout": "0"}
    return flags | _latent_flags(model) | _expert_flags(model)


def _latent_flags(model: Transformer) -> Flags:
    latent = model.latent
    if latent is None:
        return {}
    flags: Flags = {
        "--multi-latent-attention": None,
        "--kv-lora-rank": str(latent.key_rank),
        "--qk-head-dim": str(model.head_width - latent.rope_width),
        "--qk-pos-emb-head-dim": str(latent.rope_width),
        "--v-head-dim": str(latent.value_width),
    }
    return flags | ({"--q-lora-rank": str(latent.query_rank)} if latent.query_rank else {})


def _expert_flags(model: Transformer) -> Flags:
    experts = model.experts
    if experts is None:
        return {}
    flags: Flags = {
        "--num-experts": str(experts.count),
        "--moe-router-topk": str(experts.active),
        "--moe-ffn-hidden-size": str(experts.mlp_width),
    }
    if experts.shared_width:
        flags["--moe-shared-expert-intermediate-size"] = str(experts.shared_width)
    if experts.dense_layers:
        rest = model.layers - experts.dense_layers
        flags["--moe-layer-freq"] = f"[0]*{experts.dense_layers}+[1]*{rest}"
    return flags


def _degree_flags(plan: TransformerPlan) -> Flags:
    config = plan.config
    flags: Flags = {
        "--tensor-model-parallel-size": str(config.tensor),
        "--pipeline-model-parallel-size": str(config.pipeline),
        "--micro-batch-size": str(config.microbatch),
        "--global-batch-size": str(config.global_batch),
    }
    flags |= _DTYPE_FLAGS[plan.dtype]
    if config.context > 1:
        flags["--context-parallel-size"] = str(config.context)
    if plan.model.experts is not None:
        flags["--expert-model-parallel-size"] = str(config.expert)
        replicas = config.data * config.context
        if config.expert > replicas:
            # With more expert ranks than replicas, some tensor-parallel ranks hold other experts,
            # so fewer of them share each matrix.
            flags["--expert-tensor-parallel-size"] = str(config.tensor * replicas // config.expert)
    if config.sequence_parallel:
        flags["--sequence-parallel"] = None
    return flags


def _stage_flags(plan: TransformerPlan) -> Flags:
    """Flags that assign layers to stages."""
    config, layers = plan.config, plan.config.stage_layers(plan.model.layers)
    if config.pipeline == 1:
        return {}
    if is_even(layers):
        if config.chunks == 1:
            return {}
        return {"--num-virtual-stages-per-pipeline-rank": str(config.chunks)}
    middle = layers[1:-1]
    # Megatron accepts these flags only if both ends have layers.
    if config.chunks == 1 and middle and is_even(middle) and layers[0] and layers[-1]:
        return {
            "--decoder-first-pipeline-num-layers": str(layers[0]),
            "--decoder-last-pipeline-num-layers": str(layers[-1]),
        }
    return {"--pipeline-model-parallel-layout": pipeline_layout(layers)}


def pipeline_layout(layers: tuple[int, ...]) -> str:
    """Stages in Megatron's notation: ``E`` embedding, ``t`` a layer, ``L`` loss, ``|`` a stage
    boundary.
    """
    stages = ["t" * count for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    parts = []
    for stage, same in groupby(stages[:-1]):
        count = len(list(same))
        parts.append(f"({stage}|)*{count}" if count > 1 and stage else f"{stage}|" * count)
    return "".join(parts) + stages[-1]


def _data_flags(plan: TransformerPlan) -> Flags:
    strategies = {2: "optim_grads", 3: "optim_grads_params"}
    zero = plan.config.zero
    if plan.config.data * plan.config.context == 1:
        return {}
    # Predictions for Megatron-Core assume overlap of gradient reduction with the backward pass,
    # which Megatron does only with this flag.
    flags: Flags = {"--overlap-grad-reduce": None}
    if zero == 0:
        return flags
    flags |= {"--use-distributed-optimizer": None, "--overlap-param-gather": None}
    if zero == 1:
        return flags
    return flags | {
        "--use-megatron-fsdp": None,
        "--data-parallel-sharding-strategy": strategies[zero],
        "--no-gradient-accumulation-fusion": None,
        "--ckpt-format": "fsdp_dtensor",
    }


def _recompute_flags(plan: TransformerPlan) -> Flags:
    if plan.config.recompute == "none":
        return {}
    if plan.config.recompute == "selective":
        return {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
    return {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
    }
