"""What PyTorch cannot carry out, or carries out wrongly without a word; checked before any run.

Each rule was seen to fail at toy size against one device. Where another program gives the right
gradients for the same division, `data_program` chooses that one and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hocket.base.errors import UsageError
from hocket.transformer import ParallelConfig, Transformer

if TYPE_CHECKING:
    from hocket.plan.transformer_plan import TransformerPlan

DataKind = Literal["none", "ddp", "reduce-after", "fsdp"]
"""How data-parallel ranks agree: not at all, as DDP, by one reduction after the last backward, or
as FSDP2."""


@dataclass(frozen=True)
class DataProgram:
    """How the data-parallel ranks of a division are run."""

    kind: DataKind
    reshards: bool = False
    """Whether FSDP2 gives gathered weights back after each forward."""


@dataclass(frozen=True)
class Case:
    """What rules look at."""

    model: Transformer
    division: ParallelConfig
    splits_backward: bool


@dataclass(frozen=True)
class Rule:
    """One combination that is refused."""

    applies: Callable[[Case], bool]
    reason: str
    instead: str


RULES: tuple[Rule, ...] = (
    Rule(
        lambda case: case.division.context > 1,
        "context parallelism is planned and predicted but not carried out",
        "choose context 1: hocket parallel … --fix context=1",
    ),
    Rule(
        lambda case: case.division.shares is not None,
        "unequal shares of the batch are for one's own loop (hocket.prepare), not for this run",
        "train with it: hocket launch plan.json train.py",
    ),
    Rule(
        lambda case: case.division.expert > 1 or case.model.experts is not None,
        "models with experts are planned and predicted but not carried out",
        "export the plan instead: hocket export … --to megatron",
    ),
    Rule(
        lambda case: case.division.zero == 3 and case.splits_backward and case.division.data > 1,
        "with a schedule that splits the backward pass, FSDP2 that gives weights back after each "
        "forward (ZeRO 3) loses gradients of the last stage without an error",
        "use zero=2, or a schedule with whole backward passes (1f1b, interleaved)",
    ),
    Rule(
        lambda case: (
            case.model.heads % case.division.tensor > 0
            or case.model.kv_heads % case.division.tensor > 0
        ),
        "the tensor-parallel ranks cannot share the heads evenly",
        "choose a tensor degree that divides heads and key-value heads",
    ),
    Rule(
        lambda case: case.model.mlp_width % case.division.tensor > 0,
        "the tensor-parallel ranks cannot share the width of the MLP evenly",
        "choose a tensor degree that divides it",
    ),
    Rule(
        lambda case: (
            case.division.sequence_parallel and case.model.sequence % case.division.tensor > 0
        ),
        "the tensor-parallel ranks cannot share the sequence evenly",
        "turn sequence parallelism off",
    ),
    Rule(
        lambda case: 0 in (case.division.layers or ())[1:-1],
        "a stage between the first and the last has no layers, so it has nothing to run",
        "give each stage a layer, or use fewer stages",
    ),
    Rule(
        lambda case: case.model.head_width % 2 > 0 and not case.model.learned_positions,
        "rotary positions need an even head width",
        "use learned positions",
    ),
)


def refuse(model: Transformer, division: ParallelConfig, *, splits_backward: bool) -> None:
    """Raise where a division cannot be carried out or would train wrongly."""
    case = Case(model, division, splits_backward)
    for rule in RULES:
        if rule.applies(case):
            raise UsageError(rule.reason, hint=rule.instead, where=str_of(division))


def refuse_plan(plan: TransformerPlan) -> None:
    """`refuse` the division of a plan, and a schedule whose actions wait for each other."""
    from hocket.planners.parallel.schedules import verify_schedule

    refuse(plan.model, plan.division, splits_backward=plan.schedule.splits_backward)
    verify_schedule(plan.schedule)


def data_program(division: ParallelConfig, *, splits_backward: bool) -> DataProgram:
    """The program for the data-parallel ranks that gives the right gradients.

    DDP reduces gradients from hooks that a split backward pass does not set off, so there the
    gradients are reduced after the last backward; the same where tensor-parallel ranks hold parts
    of matrices, which DDP does not know. ZeRO 1 and 2 keep weights gathered for the whole step:
    PyTorch's pipelines sum the gradients of microbatches whole and divide them once at the end, so
    both are the same program.
    """
    if division.data == 1:
        return DataProgram("none")
    if division.zero:
        return DataProgram("fsdp", reshards=division.zero == 3)
    if splits_backward or division.tensor > 1:
        return DataProgram("reduce-after")
    return DataProgram("ddp")


def str_of(division: ParallelConfig) -> str:
    """A division in a few words."""
    return (
        f"tensor {division.tensor} x pipeline {division.pipeline} x data {division.data}, "
        f"{division.schedule}, zero {division.zero}"
    )
