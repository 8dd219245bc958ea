"""Plans of a transformer's shape that cannot be run or exported, refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.base.errors import UsageError
from hocket.transformer import ParallelConfig, Transformer

if TYPE_CHECKING:
    from hocket.plan.transformer_plan import TransformerPlan


@dataclass(frozen=True)
class Case:
    """A model with its parallel configuration."""

    model: Transformer
    config: ParallelConfig


@dataclass(frozen=True)
class Rule:
    """One combination that is refused."""

    applies: Callable[[Case], bool]
    reason: str
    instead: str


RULES: tuple[Rule, ...] = (
    Rule(
        lambda case: case.config.context > 1,
        "context parallelism is planned and predicted but not run",
        "choose context 1: hocket parallel … --fix context=1",
    ),
    Rule(
        lambda case: case.config.expert > 1 or case.model.experts is not None,
        "models with experts are planned and predicted but not run",
        "export the plan instead: hocket export … --to megatron",
    ),
    Rule(
        lambda case: (
            case.model.heads % case.config.tensor > 0
            or case.model.kv_heads % case.config.tensor > 0
        ),
        "the tensor-parallel ranks cannot share the heads evenly",
        "choose a tensor degree that divides heads and key-value heads",
    ),
    Rule(
        lambda case: case.model.mlp_width % case.config.tensor > 0,
        "the tensor-parallel ranks cannot share the width of the MLP evenly",
        "choose a tensor degree that divides it",
    ),
    Rule(
        lambda case: case.config.sequence_parallel and case.model.sequence % case.config.tensor > 0,
        "the tensor-parallel ranks cannot share the sequence evenly",
        "turn sequence parallelism off",
    ),
    Rule(
        lambda case: 0 in (case.config.layers or ())[1:-1],
        "a stage between the first and the last has no layers, so it has nothing to run",
        "give each stage a layer, or use fewer stages",
    ),
    Rule(
        lambda case: case.model.head_width % 2 > 0 and not case.model.learned_positions,
        "rotary positions need an even head width",
        "use learned positions",
    ),
)


def refuse(model: Transformer, config: ParallelConfig) -> None:
    """Raise where a configuration cannot be run."""
    case = Case(model, config)
    for rule in RULES:
        if rule.applies(case):
            raise UsageError(rule.reason, hint=rule.instead, where=str_of(config))


def refuse_plan(plan: TransformerPlan) -> None:
    """`refuse` the configuration of a plan, and a schedule whose actions wait for each other."""
    from hocket.planners.parallel.schedules import verify_schedule

    refuse(plan.model, plan.config)
    verify_schedule(plan.schedule)


def str_of(config: ParallelConfig) -> str:
    """Format a configuration in a few words."""
    return (
        f"tensor {config.tensor} x pipeline {config.pipeline} x data {config.data}, "
        f"{config.schedule}, zero {config.zero}"
    )


TRAINED_DTYPES = ("bfloat16", "float32")
"""Types in which the built-in model holds weights; others need losses or products to be scaled."""
