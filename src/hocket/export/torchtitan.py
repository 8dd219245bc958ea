"""Export to torchtitan: a Python function that returns its ``Trainer.Config``, and the schedule as
CSV.

Field names follow ``ParallelismConfig`` of 2026. The schedule is always exported as CSV, so it is
exactly the planned one; its name in the configuration only selects how stages are placed on ranks.
"""

from __future__ import annotations

from typing import Any

from hocket.export.common import (
    cannot,
    is_looped,
    launch,
    plain,
    refuse_dtype,
    refuse_for_torch,
    shard_ranks,
)
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.schedules.torch_csv import to_torch_csv

_NAME = "torchtitan"
_KNOWN = {"llama3-8b": "llama3_8b", "llama3-70b": "llama3_70b", "llama3-405b": "llama3_405b"}
"""Names of torchtitan's models, by hocket's names for them."""
CSV = "schedule.csv"


def torchtitan_files(plan: TransformerPlan) -> dict[str, str]:
    """A module with the configuration, and the schedule if there is a pipeline."""
    _refuse(plan)
    files = {"hocket_plan.py": _module(plan)}
    if plan.config.pipeline > 1:
        files[CSV] = to_torch_csv(plan.schedule)
    return files


def _refuse(plan: TransformerPlan) -> None:
    config = plan.config
    if config.context == 1 and plan.model.experts is None:
        refuse_for_torch(plan)
    refuse_dtype(plan, _NAME)
    others = config.tensor * config.pipeline * config.context
    if config.data * config.context > 1 and config.zero == 0 and others > 1:
        raise cannot(
            plan, _NAME, "replicates weights (ZeRO 0) only where there is no other parallelism",
            "plan again with --fix zero=1: weights stay whole during a step then, too",
        )  # fmt: skip
    if config.data % shard_ranks(plan):
        raise cannot(
            plan, _NAME,
            f"cannot split {config.data} replicas into groups of {shard_ranks(plan)}",
            "plan with --options hsdp=N for an N that divides them",
        )  # fmt: skip
    if config.pipeline > 1 and not is_looped(plan) and not _is_folded(plan):
        raise cannot(
            plan, _NAME, "places stages in a loop or in a V, not as the plan does",
            "export --to torch",
        )  # fmt: skip
    if plan.model.tied_embeddings and config.pipeline > 1:
        raise cannot(
            plan, _NAME, "cannot tie embeddings over pipeline stages", "plan with --fix pipeline=1"
        )


def _is_folded(plan: TransformerPlan) -> bool:
    """True if the second half of the stages visits the devices in reverse order (a V)."""
    devices: list[int] = plan.schedule.device_of_stage.tolist()
    there = list(range(plan.config.pipeline))
    return devices == there + there[::-1]


def parallelism_fields(plan: TransformerPlan) -> dict[str, Any]:
    """Values of the fields of ``ParallelismConfig``."""
    config = plan.config
    shards = shard_ranks(plan)
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": config.data // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if config.zero == 3 else "never",
        "tensor_parallel_degree": config.tensor,
        "enable_sequence_parallel": config.sequence_parallel,
        "context_parallel_degree": config.context,
        "expert_parallel_degree": config.expert,
        "pipeline_parallel_degree": config.pipeline,
    }
    if config.pipeline > 1:
        fields |= {
            "pipeline_parallel_schedule": _placement(plan),
            "pipeline_parallel_schedule_csv": CSV,
            "pipeline_parallel_microbatch_size": config.microbatch,
            "module_fqns_per_model_part": _module_names(plan),
        }
    return fields


def _placement(plan: TransformerPlan) -> str:
    if not is_looped(plan):
        return "ZBVZeroBubble"
    return "PipelineScheduleMulti" if plan.config.chunks > 1 else "PipelineScheduleSingle"


def _module_names(plan: TransformerPlan) -> list[list[str]]:
    names, first = [], 0
    for count in plan.config.stage_layers(plan.model.layers):
        names.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output"]
    return names


def _training_fields(plan: TransformerPlan) -> dict[str, Any]:
    config = plan.config
    # With a pipeline, torchtitan's local batch is all microbatches of a rank. Without one it is a
    # single microbatch, which torchtitan repeats until the global batch is complete.
    rounds = config.num_microbatches if config.pipeline > 1 else 1
    return {
        "local_batch_size": config.microbatch * rounds,
        "global_batch_size": config.global_batch,
        "seq_len": plan.model.sequence,
        "mixed_precision_param": plan.dtype,
    }


def _module(plan: TransformerPlan) -> str:
    known, name = _KNOWN.get(plan.model.name), plain(plan.model.name)
    start = launch(plan, "-m torchtitan.train --module hocket_plan --config planned")
    lines = [
        f'"""{name} on {plan.config.num_devices} devices of {plain(plan.cluster.name)}.',
        "",
        f"Start on every machine: {start}"
        if known
        else "torchtitan has no such model: call parallelize() on the configuration of your own.",
        '"""',
        "",
        "from torchtitan.trainer import Trainer",
        *([f"from torchtitan.models.llama3.config_registry import {known}"] if known else []),
        "",
        "",
        "def parallelize(config: Trainer.Config) -> Trainer.Config:",
        f'    """Set what the plan decides in a configuration of {name}."""',
        *_assignments("parallelism", parallelism_fields(plan)),
        *_assignments("training", _training_fields(plan)),
        *_recompute_lines(plan),
        "    return config",
        "",
    ]
    if known:
        lines += [
            "",
            "def planned() -> Trainer.Config:",
            '    """torchtitan\'s own configuration of the model, parallelized as planned."""',
            f"    return parallelize({known}())",
            "",
        ]
    return "\n".join(lines)


def _assignments(owner: str, fields: dict[str, Any]) -> list[str]:
    return [f"    config.{owner}.{name} = {value!r}" for name, value in fields.items()]


def _recompute_lines(plan: TransformerPlan) -> list[str]:
    if plan.config.recompute == "full":
        return ['    config.activation_checkpoint.mode = "full"']
    lines = ['    config.activation_checkpoint.mode = "none"']
    if plan.config.recompute == "selective":
        lines.insert(0, "    # The fused attention recomputes its inside by itself, as planned.")
    return lines
