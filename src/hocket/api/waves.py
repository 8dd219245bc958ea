"""``hocket.waves``: predict the gain of two concurrent waves of a training step (Wavelet).

A wave is a microbatch; two streams of one device run two waves at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from hocket.base.errors import unknown_name
from hocket.cost.roofline import LAUNCHES, Launches
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan, write_plan
from hocket.plan.make import ON_THIS_MACHINE, launched, make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections.waves import Changes
from hocket.planners.memory.given_budget import budget_of
from hocket.planners.waves.wave_search import WaveFit, fit_waves


@dataclass(frozen=True, eq=False)
class WaveForecast:
    """Predicted gain of waves in both launch modes: eager ops and CUDA graph replay."""

    by_launches: dict[Launches, WaveFit]
    launches: Launches
    """Launch mode of the plan."""

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
        """True if two waves are faster than every candidate without waves that fits."""
        return self.fit.pays

    @property
    def gain(self) -> float | None:
        """Throughput relative to the best candidate without waves; None if either does not fit."""
        return self.fit.gain

    def plan(self) -> Plan:
        """Return the plan of the two waves; raises `NoFeasiblePlanError` if no waves fit."""
        return self.fit.plan()

    @property
    def planned(self) -> SavedPlan:
        """The plan with its problem, as accepted by `hocket.prepare`."""
        return SavedPlan(self.fit.problem, self.plan())

    def save(self, path: str | Path) -> None:
        """Write the plan, as ``hocket waves -o`` does."""
        write_plan(path, self.fit.problem, self.plan())


class StepOptions(TypedDict, total=False):
    """Options of a captured step, as `hocket.capture` takes them."""

    loss: Callable[[Any], Any] | str | None
    forward: Callable[[Any, Any], Any] | None
    optimizer: Any


def waves(
    model: Any,
    batch: Any,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    memory: int | str | None = None,
    *,
    num_waves: int = 2,
    launches: Launches = "replayed",
    **step: Unpack[StepOptions],
) -> WaveForecast:
    """Predict the gain of two waves of a model's training step on a cluster, and plan them.

    ``batch`` is the global batch of a step; ``memory``, such as ``"8GiB"``, is the budget of each
    device, by default its usable memory. See `waves_of` for ``num_waves`` and ``launches``.
    """
    from hocket.capture.sizes import capture_sizes

    if launches not in LAUNCHES:
        raise unknown_name("launches", str(launches), LAUNCHES)
    graph = capture_sizes(model, batch, **{"optimizer": "adamw", **step})
    budget_bytes = None if memory is None else budget_of(memory)
    problem = make_problem(graph, on)
    return waves_of(problem, memory_bytes=budget_bytes, num_waves=num_waves, launches=launches)


def waves_of(
    problem: Problem,
    *,
    memory_bytes: int | None = None,
    num_waves: int = 2,
    launches: Launches = "replayed",
    changes: Changes = "step",
) -> WaveForecast:
    """Predict the gain of ``num_waves`` microbatches that two streams run concurrently.

    With ``launches="replayed"`` a captured graph is replayed, as on GPUs by default; with
    ``"eager"`` the host issues op by op. Parameters change after every step, or, with
    ``changes="wave"``, after every wave as published, which is not gradient accumulation.
    """
    is_cpu = all(kind.is_cpu for kind in problem.cluster.kinds)
    if is_cpu:
        # A CPU has no graph replay.
        launches = LAUNCHES[0]
    found = {
        name: fit_waves(
            launched(problem, name), num_waves=num_waves, budget_bytes=memory_bytes, changes=changes
        )
        for name in (LAUNCHES[:1] if is_cpu else LAUNCHES)
    }
    return WaveForecast(found, launches)
