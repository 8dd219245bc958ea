"""Parse memory budgets that users write, and check them against the device.

A budget larger than the device is an error; one that leaves no headroom gets a warning.
"""

from __future__ import annotations

from numbers import Real

from hocket.base.errors import UsageError
from hocket.base.units import MOST_BYTES, format_bytes, parse_bytes
from hocket.hardware.cluster import Cluster, Device
from hocket.plan.problem import Problem


class BudgetWarning(UserWarning):
    """Warning that a budget exceeds what tensors may fill of the device."""


def budget_of(memory: int | str) -> int:
    """Parse a budget such as ``10GB`` into bytes; raises `UsageError` if it is invalid."""
    if not isinstance(memory, str):
        # bool is a subclass of int: ``memory=True`` must not mean one byte.
        is_number = isinstance(memory, Real) and not isinstance(memory, bool)
        if not is_number or not 0 <= memory <= MOST_BYTES or memory != int(memory):
            raise UsageError(
                f"memory: {memory} is not a number of bytes", hint="write it like '8GiB'"
            )
        return int(memory)
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise UsageError(
            f"memory: {error}", hint="write it like '8GiB', or give a number of bytes"
        ) from None


def require_memory(device: Device, budget_bytes: int) -> None:
    """Raise `UsageError` if the budget exceeds the memory of the device."""
    if budget_bytes > device.memory_bytes:
        raise UsageError(
            f"a budget of {format_bytes(budget_bytes)} is more than {device.name} has: "
            f"{format_bytes(device.memory_bytes)}",
            # Rounded down, so that the size in the hint is really usable.
            hint=f"give it {device.usable_bytes // 2**20}MiB, or name another device",
        )


def unusable_note(problem: Problem, budget_bytes: int, device: int = 0) -> str:
    """Message if the budget leaves less than the headroom on the device; else empty."""
    usable = int(problem.memory_bytes[device])
    if budget_bytes <= usable:
        return ""
    has = problem.cluster.devices[device]
    return (
        f"a budget of {format_bytes(budget_bytes)} is more than tensors may fill of {has.name}: "
        f"{format_bytes(usable)} of its {format_bytes(has.memory_bytes)} are usable beside the "
        "headroom for context, workspaces and fragmentation"
    )


def require_one_device(cluster: Cluster) -> None:
    """Raise `UsageError` if the cluster has several devices."""
    if cluster.num_devices != 1:
        raise UsageError(
            f"{cluster.name} has {cluster.num_devices} devices; a memory plan is for one",
            hint="name one device, such as 1xh200, or machine.toml:gpu0 of a cluster file; "
            "hocket plan spreads a step over several",
        )
