"""Ways to carry out a plan, by what is carried out and by name; `executor` says what each promises.

A new one is a class with the four members of `executor.PlanExecutor`, and a line here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from hocket.base.errors import UsageError, unknown_name
from hocket.runtime.executors.budget import OneProcessLoop
from hocket.runtime.executors.division import DivisionExecutor
from hocket.runtime.executors.executor import PlanExecutor
from hocket.runtime.executors.ranks import RanksExecutor
from hocket.runtime.executors.shares import OneProcessShares, RankedShares
from hocket.runtime.executors.single import SingleExecutor

if TYPE_CHECKING:
    from hocket.hardware.cluster import Device

Kind = Literal["placement", "division", "shares", "budget", "waves"]

EXECUTORS: dict[Kind, dict[str, PlanExecutor[Any]]] = {
    "placement": {
        "single": SingleExecutor(),
        "gloo": RanksExecutor("gloo"),
        "nccl": RanksExecutor("nccl"),
    },
    "division": {
        "nccl": DivisionExecutor("nccl"),
        "gloo": DivisionExecutor("gloo"),
    },
    "shares": {
        "single": OneProcessShares(),
        "nccl": RankedShares("nccl"),
        "gloo": RankedShares("gloo"),
    },
    "budget": {"single": OneProcessLoop()},
    "waves": {"single": OneProcessLoop()},
}
"""Those of a kind in the order in which ``auto`` asks whether they suit; one always does."""

BACKENDS = ("auto", *dict.fromkeys(name for known in EXECUTORS.values() for name in known))
"""What can be asked for by name, each once."""


def choose(kind: Kind, wanted: str, devices: Sequence[Device]) -> tuple[str, list[str]]:
    """The executor for a plan that uses these devices, and what each is carried out on here."""
    known = EXECUTORS[kind]
    if wanted == "auto":
        wanted = next(name for name, executor in known.items() if executor.suits(devices))
    if wanted not in known:
        if wanted in BACKENDS:
            raise UsageError(f"backend {wanted!r} does not carry out a {kind}",
                             hint=f"use one of {', '.join(('auto', *known))}")  # fmt: skip
        raise unknown_name("backend", wanted, BACKENDS)
    return wanted, known[wanted].places(devices)
