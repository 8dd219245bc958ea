"""hocket chooses how to train a PyTorch model on given hardware, predicts and runs it.

The names below are the public face. They are imported when first used, so that ``import hocket``
and ``hocket --help`` stay instant.
"""

from __future__ import annotations

# Nothing is imported here: the command understands Ctrl-C only once this file has been read, and
# ``typing`` alone takes half of the time until then.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hocket.api.memory import fit
    from hocket.api.parallel_configs import plan_parallel
    from hocket.api.planned import Planned, auto, plan_graph
    from hocket.api.waves import waves
    from hocket.base.checkpoint_folder import write_checkpoint
    from hocket.base.errors import HocketError
    from hocket.capture import capture
    from hocket.graph.files import read_graph, write_graph
    from hocket.graph.graph import Graph
    from hocket.hardware.cluster import Cluster
    from hocket.hardware.shorthand import cluster_from_text
    from hocket.loops.function import parallel_for
    from hocket.plan.files import read_plan, write_plan
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.service.lease import StaleLeaseError, lease
    from hocket.simulate.timeline import Timeline
    from hocket.simulate.verify import verify
    from hocket.training import PadTo, Training, prepare
    from hocket.transformer.parallel_config import ParallelConfig

__version__ = "0.3.0"

__all__ = [
    "Cluster",
    "Graph",
    "HocketError",
    "PadTo",
    "ParallelConfig",
    "Plan",
    "Planned",
    "Problem",
    "StaleLeaseError",
    "Timeline",
    "Training",
    "auto",
    "capture",
    "cluster_from_text",
    "fit",
    "lease",
    "parallel_for",
    "plan_graph",
    "plan_parallel",
    "prepare",
    "read_graph",
    "read_plan",
    "verify",
    "waves",
    "write_checkpoint",
    "write_graph",
    "write_plan",
]

_MODULE_OF = {
    "Cluster": "hocket.hardware.cluster",
    "ParallelConfig": "hocket.transformer.parallel_config",
    "Graph": "hocket.graph.graph",
    "HocketError": "hocket.base.errors",
    "PadTo": "hocket.training",
    "Plan": "hocket.plan.plan",
    "Planned": "hocket.api.planned",
    "Problem": "hocket.plan.problem",
    "StaleLeaseError": "hocket.service.lease",
    "Timeline": "hocket.simulate.timeline",
    "Training": "hocket.training",
    "auto": "hocket.api.planned",
    "capture": "hocket.capture",
    "cluster_from_text": "hocket.hardware.shorthand",
    "fit": "hocket.api.memory",
    "lease": "hocket.service.lease",
    "parallel_for": "hocket.loops.function",
    "plan_graph": "hocket.api.planned",
    "plan_parallel": "hocket.api.parallel_configs",
    "prepare": "hocket.training",
    "read_graph": "hocket.graph.files",
    "read_plan": "hocket.plan.files",
    "verify": "hocket.simulate.verify",
    "waves": "hocket.api.waves",
    "write_checkpoint": "hocket.base.checkpoint_folder",
    "write_graph": "hocket.graph.files",
    "write_plan": "hocket.plan.files",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    import random
    from importlib import import_module

    # Importing rich draws from Python's generator, which a script may have seeded already.
    state = random.getstate()
    try:
        return getattr(import_module(_MODULE_OF[name]), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return __all__
