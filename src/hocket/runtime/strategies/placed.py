"""Op placement in one process, or in one rank per device.

A model whose step can be traced is placed op by op; one that cannot is placed module by module,
with a warning that says why and what is lost.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.base.warn import warn_user
from hocket.capture.loss import MEAN
from hocket.capture.model import CaptureWarning, capture
from hocket.capture.trouble import UntraceableError
from hocket.capture.unseen import hooked_modules
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster, Device
from hocket.plan.files import SavedPlan
from hocket.plan.make import ON_THIS_MACHINE, make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.compare import compare
from hocket.planners.placement.baselines import ONE_DEVICE
from hocket.runtime.planned_model import require_same
from hocket.runtime.scaled_batch import with_graph
from hocket.runtime.strategies.eager import PlacedModules
from hocket.runtime.strategies.traced import TracedModel
from hocket.runtime.strategy import Prepared, TrainingTask, claimed_step_s
from hocket.runtime.trace_options import TraceOptions


def placed_strategy(
    task: TrainingTask,
    saved: SavedPlan | None = None,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    alone: torch.device | None = None,
    costs_of: Problem | None = None,
) -> Prepared:
    """Prepare the model as a plan places it, or entirely on the device ``alone``.

    Without a plan, search one for the cluster ``on``, or for the cluster of the problem
    ``costs_of``.
    """
    model, batch, recipe = task.model, task.batch, task.recipe
    is_given = saved is not None
    if saved is not None:
        noted = saved.problem.graph.meta.get("device")
        recipe = replace(recipe, device=noted if isinstance(noted, str) else recipe.device)
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        reason = "it makes sparse gradients, whose size depends on the data"
        dense = copy.deepcopy(model)
        for module in dense.modules():
            if getattr(module, "sparse", False) is True:
                module.sparse = False  # type: ignore[assignment]
        return _by_modules(model, dense, batch, recipe, saved, on, reason, alone, costs_of)
    try:
        graph, program = recipe.trace(model, batch, "train")
    except UntraceableError as error:
        return _by_modules(
            model, model, batch, recipe, saved, on, described(error), alone, costs_of
        )
    warn_without_loss(graph, recipe.name)
    _warn_of_hooks(model)
    saved = _planned(graph, saved, on, recipe.name, costs_of, is_alone=alone is not None)
    devices = _devices(saved, alone)
    is_ranked = task.is_ranked and alone is None
    if is_ranked:
        devices = [task.device] * len(devices)
    options = task.options
    strategy = TracedModel(
        model, batch, recipe, saved.problem, saved.plan, program, devices,
        seed=options.seed, outputs=options.outputs, max_shapes=options.max_shapes,
        replay=options.replay, is_ranked=is_ranked,
    )  # fmt: skip
    is_searched = not is_given and alone is None and not is_ranked
    has_choice = is_searched and saved.problem.cluster.num_devices > 1
    step_s = claimed_step_s(saved.problem, saved.plan)
    return Prepared(strategy, saved.plan, step_s, searched=saved if has_choice else None)


def _by_modules(
    model: nn.Module,
    traceable: nn.Module,
    batch: Any,
    recipe: TraceOptions,
    saved: SavedPlan | None,
    on: str | Path | Cluster,
    reason: str,
    alone: torch.device | None,
    costs_of: Problem | None,
) -> Prepared:
    """Place the model module by module; its step is captured from ``traceable``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        graph = capture(
            traceable, batch, loss=recipe.loss, optimizer=recipe.update, name=recipe.name,
            device=recipe.device, forward=recipe.forward,
        )  # fmt: skip
    warn_without_loss(graph, recipe.name)
    saved = _planned(graph, saved, on, recipe.name, costs_of, is_alone=alone is not None)
    assert saved.plan.device_of is not None
    lost = (
        f"{recipe.name} is placed by modules, not by ops, because {reason}; order, overlap of "
        "transfers and replay of the recorded step are lost, the numbers are the same"
    )
    warn_user(lost, CaptureWarning)
    strategy = PlacedModules(
        model, recipe, graph, saved.plan.device_of, _devices(saved, alone), lost=lost
    )
    return Prepared(strategy, saved.plan, claimed_step_s(saved.problem, saved.plan))


def _warn_of_hooks(model: nn.Module) -> None:
    """Warn of hooks: their tensor ops are traced, but side effects happen only once."""
    if hooked := hooked_modules(model):
        named = ", ".join(repr(path) for path in hooked[:3]) + (", …" if len(hooked) > 3 else "")
        warn_user(
            f"hooks of {named} run when a step is traced and not in every step: tensors that they "
            "compute are part of it, but what they collect or print is not; hint: remove them, or "
            "train with memory=, which calls the model in every step",
            HookWarning,
        )


class HookWarning(UserWarning):
    """Hooks of a model do not run in every step."""


def warn_without_loss(graph: Graph, name: str) -> None:
    """Warn that the mean of the output is minimised, which is rarely what the user wants."""
    if graph.meta.get("loss") == MEAN:
        warn_user(
            f"{name} returns no loss, so this would minimise the mean of its output, which is "
            "hardly what you want. Give hocket.prepare the loss: loss=lambda output: …, or "
            "forward=lambda model, batch: criterion(model(batch[0]), batch[1])",
            CaptureWarning,
        )


def _planned(
    graph: Graph,
    saved: SavedPlan | None,
    on: str | Path | Cluster,
    name: str,
    costs_of: Problem | None,
    *,
    is_alone: bool,
) -> SavedPlan:
    if saved is None and is_alone and costs_of is not None:
        problem = with_graph(costs_of, graph)
        alone = Plan(planner="one device").placing(np.zeros(graph.num_ops, dtype=np.int32))
        return SavedPlan(problem, alone)
    if saved is None:
        problem = make_problem(graph, on)
        # Where there is one device there is nothing to compare.
        planners = (ONE_DEVICE,) if is_alone or problem.cluster.num_devices == 1 else ()
        winner = compare(problem, planners).required_winner()
        assert winner.plan is not None
        return SavedPlan(problem, winner.plan)
    require_same(saved.problem.graph, graph, name)
    if saved.plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    return saved


def _devices(saved: SavedPlan, alone: torch.device | None) -> list[torch.device]:
    """Return the real device of each device of the plan; unused ones share the first used one's."""
    assert saved.plan.device_of is not None
    devices = saved.problem.cluster.devices
    if alone is not None:
        return [alone] * len(devices)
    used = sorted(set(saved.plan.device_of.tolist())) or [0]
    found = places_in_process([devices[device] for device in used])
    places: dict[int, str] = dict(zip(used, found, strict=True))
    rest = places[used[0]]
    return [torch.device(places.get(d, rest)) for d in range(len(devices))]


def places_in_process(devices: Sequence[Device]) -> list[str]:
    """Map accelerators to the GPUs in turn, and everything else to the CPU."""
    gpus, turn = torch.cuda.device_count(), count()
    return [
        "cpu" if device.kind.is_cpu or not gpus else f"cuda:{next(turn) % gpus}"
        for device in devices
    ]


def described(error: UntraceableError) -> str:
    """Describe where and why a step cannot be traced."""
    return f"{error.where}: {error.message}" if error.where else error.message
