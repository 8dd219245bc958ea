"""Refuse transformer plans that cannot be run or exported, before any process starts.

`refuse_plan` checks model, parallel config and schedule; `refuse_degrees` checks the degrees of
parallelism alone. Each error gives the reason and an alternative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.base.errors import UsageError
from hocket.transformer import ParallelConfig, Transformer
from hocket.transformer.rules import broken_shares

if TYPE_CHECKING:
    from hocket.plan.transformer_plan import TransformerPlan

TRAINED_DTYPES = ("bfloat16", "float32")
"""Weight dtypes of the built-in model; float16 and float8 would need loss or product scaling."""


def refuse_plan(plan: TransformerPlan) -> None:
    """Refuse a configuration that cannot be run, and a schedule whose actions wait in a cycle."""
    from hocket.simulate.pipeline import verify_schedule

    refuse(plan.model, plan.config)
    verify_schedule(plan.schedule)


def refuse(model: Transformer, config: ParallelConfig) -> None:
    """Refuse a model with a configuration that can neither be run nor exported."""
    tensor = config.tensor
    _raise_first(config, (
        (config.context > 1,
         "context parallelism is planned and predicted but not run",
         "choose context 1: hocket parallel … --fix context=1"),
        (config.expert > 1 or model.experts is not None,
         "models with experts are planned and predicted but not run",
         "export the plan instead: hocket export … --to megatron"),
        (model.heads % tensor > 0 or model.kv_heads % tensor > 0,
         "the tensor-parallel ranks cannot share the heads evenly",
         "choose a tensor degree that divides heads and key-value heads"),
        (model.mlp_width % tensor > 0,
         "the tensor-parallel ranks cannot share the width of the MLP evenly",
         "choose a tensor degree that divides it"),
        (config.sequence_parallel and model.sequence % tensor > 0,
         "the tensor-parallel ranks cannot share the sequence evenly",
         "turn sequence parallelism off"),
        (0 in (config.layers or ())[1:-1],
         "a stage between the first and the last has no layers, so it has nothing to run",
         "give each stage a layer, or use fewer stages"),
        (model.head_width % 2 > 0 and not model.learned_positions,
         "rotary positions need an even head width",
         "use learned positions"),
    ))  # fmt: skip


def refuse_degrees(config: ParallelConfig) -> None:
    """Refuse degrees of parallelism that no strategy runs."""
    broken = next(broken_shares(config), "") if config.shares is not None else ""
    _raise_first(config, (
        (config.context > 1,
         "context parallelism is planned and predicted but not run",
         "plan without it: hocket parallel … --fix context=1"),
        (config.expert > 1,
         "expert parallelism is planned and predicted but not run",
         "plan without it: hocket parallel … --fix expert=1"),
        (config.zero == 3 and config.pipeline > 1,
         "a pipeline whose replicas shard the weights (ZeRO 3) is not run",
         "use zero=1 or 2, which shard the optimizer's states"),
        (bool(broken), broken, "give one share per replica"),
    ))  # fmt: skip


def _raise_first(config: ParallelConfig, rules: tuple[tuple[bool, str, str], ...]) -> None:
    """Raise the error of the first rule (applies, reason, hint) that applies."""
    for applies, reason, hint in rules:
        if applies:
            raise UsageError(reason, hint=hint, where=str_of(config))


def str_of(config: ParallelConfig) -> str:
    """Format a configuration in a few words."""
    return (
        f"tensor {config.tensor} x pipeline {config.pipeline} x data {config.data}, "
        f"{config.schedule}, zero {config.zero}"
    )
