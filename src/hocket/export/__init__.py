"""Write a parallel plan for other training programs; refuse plans that they cannot express."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hocket.base.errors import unknown_name
from hocket.export.common import cannot, shard_ranks
from hocket.plan.transformer_plan import TransformerPlan

__all__ = ["TARGETS", "export_plan"]

TARGETS = ("megatron", "torchtitan", "deepspeed", "torch")


def export_plan(plan: TransformerPlan, target: str) -> dict[str, str]:
    """Files for a training program by name; raises `UsageError` if the program cannot express the
    plan.
    """
    from hocket.export.deepspeed import deepspeed_files
    from hocket.export.megatron import megatron_files
    from hocket.export.torch import torch_files
    from hocket.export.torchtitan import torchtitan_files
    from hocket.simulate.pipeline import verify_schedule

    writers: Mapping[str, Callable[[TransformerPlan], dict[str, str]]] = {
        "megatron": megatron_files,
        "torchtitan": torchtitan_files,
        "deepspeed": deepspeed_files,
        "torch": torch_files,
    }
    if target not in writers:
        raise unknown_name("export target", target, writers)
    # An invalid schedule must not leave hocket, because other programs would deadlock on it.
    verify_schedule(plan.schedule)
    if target != "torchtitan" and 1 < shard_ranks(plan) < plan.config.data:
        raise cannot(
            plan, target, "is not configured here to shard state inside groups of replicas",
            "export --to torchtitan, or plan without --options hsdp=N",
        )  # fmt: skip
    return writers[target](plan)
