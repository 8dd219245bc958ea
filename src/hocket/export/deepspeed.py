"""Export to DeepSpeed: a JSON configuration, and Python for settings that DeepSpeed takes in code.

Keys follow DeepSpeed's configuration reference. DeepSpeed configures the pipeline degree and
recomputation in code, so they are exported as a module.
"""

from __future__ import annotations

import json
from typing import Any

from hocket.export.common import cannot, is_even, plain
from hocket.plan.transformer_plan import TransformerPlan

_NAME = "DeepSpeed"
_DTYPES: dict[str, dict[str, Any]] = {
    "float16": {"fp16": {"enabled": True}},
    "bfloat16": {"bf16": {"enabled": True}},
    "float32": {},
}


def deepspeed_files(plan: TransformerPlan) -> dict[str, str]:
    """Files of the export by name: the configuration, and a module for settings in code."""
    _refuse(plan)
    files = {"deepspeed.json": json.dumps(deepspeed_config(plan), indent=2) + "\n"}
    if plan.config.pipeline > 1:
        files["pipeline.py"] = _pipeline_module(plan)
    elif plan.config.recompute == "full":
        files["recompute.py"] = _RECOMPUTE
    return files


def _refuse(plan: TransformerPlan) -> None:
    parallel = plan.config
    reasons = (
        (
            parallel.tensor > 1 and parallel.pipeline > 1,
            "joins tensor and pipeline parallelism only inside Megatron-DeepSpeed",
            "export --to megatron",
        ),
        (
            parallel.pipeline > 1 and (parallel.schedule != "1f1b" or parallel.chunks > 1
                                       or plan.schedule.name != "1f1b"),
            f"has no schedule {plan.schedule.name!r}; its pipelines run 1f1b",
            "plan again with --schedule 1f1b",
        ),
        (
            parallel.pipeline > 1 and parallel.zero >= 2,
            "runs pipelines with ZeRO 0 and 1 only",
            "plan again with --fix zero=1",
        ),
        (
            parallel.pipeline > 1 and not is_even(plan.config.stage_layers(plan.model.layers)),
            "takes no list of layers per stage",
            "plan with layers that divide evenly, or export --to megatron",
        ),
        (
            parallel.tensor > 1 and parallel.zero == 3,
            "runs tensor parallelism with ZeRO 0, 1 and 2 only",
            "plan again with --fix zero=2",
        ),
        (
            parallel.sequence_parallel,
            "has no sequence parallelism over tensor-parallel ranks",
            "plan again with --fix sequence_parallel=false",
        ),
        (
            parallel.context > 1,
            "has no ring attention over context-parallel ranks",
            "plan again with --fix context=1",
        ),
        (
            plan.model.experts is not None,
            "takes experts in the code of the model, not in its configuration",
            "export --to megatron",
        ),
        (
            plan.dtype == "float8",
            "has no 8-bit products in its configuration",
            "plan again with --dtype bfloat16, or export --to megatron",
        ),
        (
            parallel.recompute == "selective",
            "cannot recompute the inside of attention alone",
            "plan again with --fix recompute=none: fused attention keeps as little",
        ),
    )  # fmt: skip
    for applies, what, instead in reasons:
        if applies:
            raise cannot(plan, _NAME, what, instead)


def deepspeed_config(plan: TransformerPlan) -> dict[str, Any]:
    """Content of the JSON configuration."""
    parallel = plan.config
    config: dict[str, Any] = {
        "train_batch_size": parallel.global_batch,
        "train_micro_batch_size_per_gpu": parallel.microbatch,
        "gradient_accumulation_steps": parallel.num_microbatches,
        **_DTYPES[plan.dtype],
        "zero_optimization": {"stage": parallel.zero},
    }
    if parallel.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": parallel.tensor}
    return config


def _pipeline_module(plan: TransformerPlan) -> str:
    interval = int(plan.config.recompute == "full")
    return f'''"""The pipeline of {plain(plan.model.name)}: DeepSpeed is configured in code."""

from deepspeed.pipe import PipelineModule

NUM_STAGES = {plan.config.pipeline}
LAYERS_PER_STAGE = {plan.config.stage_layers(plan.model.layers)[0]}
ACTIVATION_CHECKPOINT_INTERVAL = {interval}


def pipelined(layers, loss_fn):
    """Cut a list of layers into stages: embedding, {plan.model.layers} blocks, head."""
    return PipelineModule(
        layers=layers,
        loss_fn=loss_fn,
        num_stages=NUM_STAGES,
        partition_method="type:Block",
        activation_checkpoint_interval=ACTIVATION_CHECKPOINT_INTERVAL,
    )
'''


_RECOMPUTE = '''"""Recomputation of whole layers: DeepSpeed is configured in code."""


def recomputing(model):
    """Turn it on in a model of Hugging Face; other models call deepspeed.checkpointing."""
    model.gradient_checkpointing_enable()
    return model
'''
