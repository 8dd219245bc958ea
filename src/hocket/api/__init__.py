"""Public Python API, one module per noun.

The names below are imported when they are first used:

planned = hocket.auto(model, batch, on="4xv100-16g")
planned.explain()
planned.save("plan.json")
planned.run(RunOptions(steps=20, model="package.module:function"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.api.collectives import collective_bound, collective_classes, plan_collective
    from hocket.api.parallel_configs import make_training, plan_parallel
    from hocket.api.planned import (
        ON_FILE,
        ON_THIS_MACHINE,
        Planned,
        auto,
        best_of,
        find_cluster,
        make_problem,
        plan_graph,
        run_plan,
    )

__all__ = [
    "ON_FILE",
    "ON_THIS_MACHINE",
    "Planned",
    "auto",
    "best_of",
    "collective_bound",
    "collective_classes",
    "find_cluster",
    "make_problem",
    "make_training",
    "plan_collective",
    "plan_graph",
    "plan_parallel",
    "run_plan",
]

_MODULE_OF = {
    "collective_bound": "collectives",
    "collective_classes": "collectives",
    "plan_collective": "collectives",
    "make_training": "parallel_configs",
    "plan_parallel": "parallel_configs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'planned')}"), name)
