"""Shared code of the exports: refusals, placement of ranks on machines, launch commands."""

from __future__ import annotations

import re
from collections import Counter

from hocket.base.errors import UsageError
from hocket.plan.transformer_plan import TransformerPlan
from hocket.runtime.transformer_refusals import TRAINED_DTYPES, refuse_plan, str_of

_LONGEST_NAME = 80


def cannot(plan: TransformerPlan, program: str, what: str, instead: str) -> UsageError:
    """Error for a part of a plan that a program cannot express."""
    return UsageError(f"{program} {what}", hint=instead, where=str_of(plan.config))


def refuse_for_torch(plan: TransformerPlan) -> None:
    """Refuse plans that PyTorch's engines cannot run, or run with wrong gradients and no error."""
    refuse_plan(plan)
    config = plan.config
    if config.shares is not None:
        raise cannot(
            plan, "an exported script", "splits batches evenly",
            "train with unequal batches in your own loop: hocket launch plan.json train.py",
        )  # fmt: skip
    # Observed at small size in comparison with one device, with PyTorch 2.13.
    if config.zero == 3 and plan.schedule.splits_backward and config.data > 1:
        raise cannot(
            plan, "FSDP2 that reshards after each forward (ZeRO 3)",
            "loses gradients of the last stage without an error under a schedule that splits the "
            "backward pass",
            "use zero=2, or a schedule with whole backward passes (1f1b, interleaved)",
        )  # fmt: skip


def refuse_dtype(plan: TransformerPlan, program: str) -> None:
    """Refuse dtypes that need scaled losses or scaled products."""
    if plan.dtype not in TRAINED_DTYPES:
        raise cannot(
            plan, program, f"is written for {' and '.join(TRAINED_DTYPES)}, not for {plan.dtype}",
            "plan with --dtype bfloat16 where devices have it, or export --to megatron",
        )  # fmt: skip


def shard_ranks(plan: TransformerPlan) -> int:
    """Number of replicas that shard weights or state: all, fewer in groups (HSDP), or 1 for
    none."""
    data = plan.config.data
    most = plan.problem.training.software.most_shards
    return 1 if plan.config.zero == 0 else int(min(data, most))


def plain(name: str) -> str:
    """Make a name safe in comments and strings of scripts, because plan files are untrusted."""
    return re.sub(r"[^A-Za-z0-9 ._+:/,()-]", "_", name)[:_LONGEST_NAME]


def is_even(layers: tuple[int, ...]) -> bool:
    """True if all stages have the same number of layers."""
    return len(set(layers)) == 1


def is_looped(plan: TransformerPlan) -> bool:
    """True if stages are assigned to devices round-robin, which is the default of all programs."""
    devices: list[int] = plan.schedule.device_of_stage.tolist()
    return devices == [stage % plan.config.pipeline for stage in range(len(devices))]


def ranks_per_machine(plan: TransformerPlan) -> int:
    """Number of ranks on each machine; raises `UsageError` if machines have different numbers.

    Launchers number ranks machine by machine, which is the order of the plan's devices.
    """
    host_of = {device.name: device.host for device in plan.cluster.devices}
    hosts = [host_of[name] for devices in plan.devices for name in devices]
    counts = Counter(hosts)
    size = counts[hosts[0]]
    groups = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    if any(len(set(group)) > 1 for group in groups) or set(counts.values()) != {size}:
        raise UsageError(
            "the plan's ranks do not fill one machine after another, which launchers need",
            hint="plan for machines of one kind: hocket parallel … --on NxKIND",
        )
    return size


def launch(plan: TransformerPlan, program: str) -> str:
    """Command that starts a program on every machine."""
    size = ranks_per_machine(plan)
    machines = plan.config.num_devices // size
    where = (
        "--standalone"
        if machines == 1
        else f'--nnodes={machines} --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'
    )
    return f"torchrun --nproc-per-node={size} {where} {program}"
