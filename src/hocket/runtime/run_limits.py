"""Refuse runs that need more memory than this machine has, and estimate step times on its CPU.

`require_memory_here` checks predicted peaks, `require_memory_for_states` checks weights, gradients
and optimizer states of a transformer plan, and `cpu_step_s` estimates long steps on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from hocket.base.errors import UsageError
from hocket.base.units import format_bytes
from hocket.cost.roofline import estimate_costs
from hocket.graph.graph import Role
from hocket.hardware.detect import PROCESS_BYTES, available_bytes, detect_cpu
from hocket.plan.problem import Problem
from hocket.plan.transformer_plan import TransformerPlan
from hocket.runtime.transformer_model import TransformerModel
from hocket.simulate import Timeline
from hocket.transformer import Transformer


def require_memory_here(
    problem: Problem,
    predicted: Timeline,
    places: Mapping[int, str],
    *,
    num_processes: int,
) -> None:
    """Refuse a run whose predicted peaks exceed the free memory of the devices that run it.

    ``places`` maps devices of the plan to real devices.
    """
    graph = problem.graph
    stays = np.isin(graph.tensor_role, (Role.PARAMETER, Role.BUFFER)) & (graph.tensor_producer < 0)
    held = int(graph.held_bytes[stays].sum())
    needed: dict[str, int] = {}
    for device, place in places.items():
        needed[place] = needed.get(place, 0) + int(predicted.peak_bytes[device])
    for place, peak_bytes in needed.items():
        if place == "cpu":
            # The process that starts the ranks builds the model as well.
            peak_bytes += held + num_processes * PROCESS_BYTES
            free_bytes = available_bytes()
        else:
            free_bytes = torch.cuda.mem_get_info(torch.device(place))[0]
        if peak_bytes > free_bytes:
            raise UsageError(
                f"running {graph.name} here takes {format_bytes(peak_bytes)} on {place}, and "
                f"{format_bytes(free_bytes)} are free",
                hint="plan a smaller batch, run one microbatch after the other with --backend "
                "single, or use a machine with more memory",
            )


_MAX_PROCESSES = 64
_INSTEAD = (
    "check the configuration at small size (--check-only), or export the plan and start it where "
    "it is to run (hocket export … --to torch)"
)


def require_memory_for_states(plan: TransformerPlan, dtype: torch.dtype) -> None:
    """Refuse a run of a transformer plan whose weights and states alone exceed free memory."""
    model, config = plan.model, plan.config
    if config.num_devices > _MAX_PROCESSES:
        raise UsageError(
            f"the plan takes {config.num_devices} devices; on one machine at most "
            f"{_MAX_PROCESSES} processes are started",
            hint=_INSTEAD,
        )
    # Each rank builds the whole model; gradients and both moments of Adam follow the sharding.
    gradients = 1 if config.zero == 3 else config.data
    moments = 1 if config.zero else config.data
    copies = config.num_devices + gradients + 2 * moments
    needed = num_parameters(model) * dtype.itemsize * copies
    needed += config.num_devices * PROCESS_BYTES
    available = available_bytes()
    if needed > available:
        raise UsageError(
            f"training {model.name} here takes {format_bytes(needed)} for weights, gradients and "
            f"optimizer alone, and {format_bytes(available)} are free",
            hint=_INSTEAD,
        )


def num_parameters(model: Transformer) -> int:
    """Count the parameters of the built-in model of a shape."""
    with torch.device("meta"):
        small = TransformerModel(replace(model, layers=1))
    layer = sum(parameter.numel() for parameter in small.layers.parameters())
    whole = sum(parameter.numel() for parameter in small.parameters())
    # A model with one layer is built, because all layers have the same size.
    return whole + (model.layers - 1) * layer


_QUICK_FLOPS = 1e12
"""Minimum FLOPs of a step to be estimated; smaller steps take only seconds on any CPU."""


def cpu_step_s(problem: Problem) -> float | None:
    """Estimate the seconds of a step on this CPU; None with a GPU, or if a step is short."""
    if problem.graph.flops.sum() < _QUICK_FLOPS or torch.cuda.device_count():
        return None
    # The processes of a run share the cores, so their work adds up.
    return float(estimate_costs(problem.graph, detect_cpu()).op_s[0].sum())
