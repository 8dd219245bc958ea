"""Waves: gain of two streams of one training on a device, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.api.memory import budget_of
from hocket.base.errors import unknown_name
from hocket.cost.calibrate import Calibration
from hocket.cost.profile import Profile
from hocket.cost.roofline import LAUNCHES, Launches
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan, write_plan
from hocket.plan.make import ON_THIS_MACHINE, launched, make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections.waves import CHANGES, Changes
from hocket.planners.waves.round_robin import PartitionFit, fit_partitions
from hocket.planners.waves.wave_search import WaveFit, fit_waves

__all__ = [
    "CHANGES", "LAUNCHES", "PartitionFit", "WaveForecast", "fit_partitions", "waves", "waves_of",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class WaveForecast:
    """Gain of waves where the host issues every op, and where graphs are replayed."""

    by_launches: dict[Launches, WaveFit]
    launches: Launches
    """Launch mode of the planned ops."""

    @property
    def fit(self) -> WaveFit:
        """Forecast for the launch mode `launches`."""
        return self.by_launches[self.launches]

    @property
    def other(self) -> WaveFit | None:
        """Forecast for the other launch mode; None on a CPU, which has only one."""
        return next((fit for name, fit in self.by_launches.items() if name != self.launches), None)

    @property
    def pays(self) -> bool:
        """True if two waves are faster than all without them, or all that fits."""
        return self.fit.pays

    @property
    def gain(self) -> float | None:
        """Samples per second over the best without waves; None where one of them does not fit."""
        return self.fit.gain

    def plan(self) -> Plan:
        """The plan of the two waves; raises `NoFeasiblePlanError` where none fit."""
        return self.fit.plan()

    @property
    def planned(self) -> SavedPlan:
        """The plan with its problem, as accepted by `hocket.prepare`."""
        return SavedPlan(self.fit.problem, self.plan())

    def save(self, path: str | Path) -> None:
        """Write the plan, as ``hocket waves -o`` does."""
        write_plan(path, self.fit.problem, self.plan())


def waves(
    model: Any,
    batch: Any,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    memory: int | str | None = None,
    *,
    loss: Callable[[Any], Any] | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = "adamw",
    num_waves: int = 2,
    launches: Launches = "replayed",
    changes: Changes = "step",
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> WaveForecast:
    """Gain of two waves of a model's training step on a cluster, and their plan.

    ``loss``, ``forward`` and ``optimizer`` are as `hocket.capture` takes them; ``batch`` is the
    whole batch of a step. ``memory``, such as ``"8GiB"``, is what each device may hold, by default
    what it has. The other options are those of `waves_of`.
    """
    from hocket.capture.sizes import capture_sizes

    for what, name, known in (("launches", launches, LAUNCHES), ("changes", changes, CHANGES)):
        if name not in known:
            raise unknown_name(what, str(name), known)
    graph = capture_sizes(model, batch, loss=loss, forward=forward, optimizer=optimizer)
    return waves_of(
        make_problem(graph, on, profile=profile, calibration=calibration),
        memory_bytes=None if memory is None else budget_of(memory),
        num_waves=num_waves,
        launches=launches,
        changes=changes,
    )


def waves_of(
    problem: Problem,
    *,
    memory_bytes: int | None = None,
    num_waves: int = 2,
    launches: Launches = "replayed",
    changes: Changes = "step",
) -> WaveForecast:
    """Gain of two waves of a training step on a cluster, and their plan.

    ``memory_bytes`` is what each device may hold, by default what it has; ``launches`` says whether
    a captured graph is replayed, as on GPUs by default, or the host issues op by op. Parameters
    change after every step, or after every wave as published, which is no accumulation any more.
    """
    if all(kind.is_cpu for kind in problem.cluster.kinds):
        launches, tried = LAUNCHES[0], LAUNCHES[:1]
    else:
        tried = LAUNCHES
    found = {
        name: fit_waves(
            launched(problem, name),
            num_waves=num_waves,
            budget_bytes=memory_bytes,
            changes=changes,
        )
        for name in tried
    }
    return WaveForecast(found, launches)
