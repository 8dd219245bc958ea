"""Op placement in one process, or in one rank per device.

A model whose step can be traced is placed op by op (`TracedModel`; `RankedModel` with one rank per
device). Any other model is placed module by module, with a warning that gives the reason and the
lost features.

Torch's engines have no op placement: its pipelining cuts a model between modules, and Accelerate's
``device_map`` runs whole modules one after the other.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
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
from hocket.runtime.ranked_step import RankedStep
from hocket.runtime.step_record import StepRecord
from hocket.runtime.strategies.eager import PlacedModules
from hocket.runtime.strategies.parallel_state import ParallelState, TensorOwner
from hocket.runtime.strategies.traced import TracedModel
from hocket.runtime.strategy import Prepared, TrainingTask, claimed_step_s
from hocket.runtime.traced_step import PlacedProgram, with_graph


class HookWarning(UserWarning):
    """Hooks of a model do not run in every step."""


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Source of the placement of a step's ops; by default a search on this machine."""

    saved: SavedPlan | None = None
    """A plan to follow."""
    on: str | Path | Cluster = ON_THIS_MACHINE
    """The cluster for which a placement is searched."""
    alone: torch.device | None = None
    """The only device to use."""
    costs_of: Problem | None = None
    """A problem whose costs predict the step time on the device `alone`."""

    def planned(self, graph: Graph, name: str) -> SavedPlan:
        """Return the given plan for a captured step, or search one."""
        if self.saved is not None:
            require_same(self.saved.problem.graph, graph, name)
            if self.saved.plan.device_of is None:
                raise UsageError(
                    "the plan does not say where ops run", hint="run a placement planner"
                )
            return self.saved
        if self.alone is not None and self.costs_of is not None:
            problem = with_graph(self.costs_of, graph)
            everywhere = np.zeros(graph.num_ops, dtype=np.int32)
            return SavedPlan(problem, Plan(planner=ONE_DEVICE).placing(everywhere))
        problem = make_problem(graph, self.on)
        is_single = self.alone is not None or problem.cluster.num_devices == 1
        winner = compare(problem, (ONE_DEVICE,) if is_single else ()).required_winner()
        assert winner.plan is not None
        return SavedPlan(problem, winner.plan)

    def devices(self, saved: SavedPlan) -> list[torch.device]:
        """Return the real device of each device of a plan."""
        assert saved.plan.device_of is not None
        devices = saved.problem.cluster.devices
        if self.alone is not None:
            return [self.alone] * len(devices)
        used = sorted(set(saved.plan.device_of.tolist())) or [0]
        found = places_in_process([devices[device] for device in used])
        places: dict[int, str] = dict(zip(used, found, strict=True))
        # Unused devices of the plan share the device of the first used one.
        return [torch.device(places.get(d, places[used[0]])) for d in range(len(devices))]


def placed_strategy(task: TrainingTask, placing: Placing) -> Prepared:
    """Prepare a model that is placed op by op, or by modules if it cannot be traced."""
    model, recipe, saved = task.model, task.recipe, placing.saved
    if saved is not None:
        # The trace must have the kernels of the device type that the plan was made for.
        noted = saved.problem.graph.meta.get("device")
        recipe = replace(recipe, device=noted if isinstance(noted, str) else recipe.device)
        task = replace(task, recipe=recipe)
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        # Captured with dense gradients instead; the user's model keeps its sparse ones.
        dense = copy.deepcopy(model)
        for module in dense.modules():
            if getattr(module, "sparse", False) is True:
                module.sparse = False  # type: ignore[assignment]
        reason = "it makes sparse gradients, whose size depends on the data"
        return _by_modules(task, placing, dense, reason)
    try:
        graph, program = recipe.trace(model, task.batch, "train")
    except UntraceableError as error:
        return _by_modules(task, placing, model, described(error))
    warn_without_loss(graph, recipe.name)
    _warn_of_hooks(model)
    saved = placing.planned(graph, recipe.name)
    devices = placing.devices(saved)
    is_ranked = task.is_ranked and placing.alone is None
    if is_ranked:
        devices = [task.device] * len(devices)
    placed = PlacedProgram(saved.problem, saved.plan, program, devices)
    strategy = (RankedModel if is_ranked else TracedModel)(task, placed)
    is_searched = placing.saved is None and placing.alone is None and not is_ranked
    has_choice = is_searched and saved.problem.cluster.num_devices > 1
    step_s = claimed_step_s(saved.problem, saved.plan)
    return Prepared(strategy, saved.plan, step_s, searched=saved if has_choice else None)


def _by_modules(
    task: TrainingTask, placing: Placing, traceable: nn.Module, reason: str
) -> Prepared:
    """Place the model module by module; its step is captured from ``traceable``."""
    recipe = task.recipe
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        graph = capture(
            traceable, task.batch, loss=recipe.loss, optimizer=recipe.update, name=recipe.name,
            device=recipe.device, forward=recipe.forward,
        )  # fmt: skip
    warn_without_loss(graph, recipe.name)
    saved = placing.planned(graph, recipe.name)
    assert saved.plan.device_of is not None
    lost = (
        f"{recipe.name} is placed by modules, not by ops, because {reason}; order, overlap of "
        "transfers and replay of the recorded step are lost, the numbers are the same"
    )
    warn_user(lost, CaptureWarning)
    devices = placing.devices(saved)
    strategy = PlacedModules(task.model, recipe, graph, saved.plan.device_of, devices, lost=lost)
    return Prepared(strategy, saved.plan, claimed_step_s(saved.problem, saved.plan))


def _warn_of_hooks(model: nn.Module) -> None:
    """Warn of hooks: their tensor ops are traced, but side effects happen only once."""
    if hooked := hooked_modules(model):
        named = ", ".join(repr(path) for path in hooked[:3]) + (", …" if len(hooked) > 3 else "")
        warn_user(
            f"hooks of {named} run when a step is traced and not in every step: the step contains "
            "the tensors that they compute, but not what they collect or print; hint: remove "
            "them, or train with memory=, which calls the model in every step",
            HookWarning,
        )


def warn_without_loss(graph: Graph, name: str) -> None:
    """Warn if the model returns no loss, so that training would minimize its mean output."""
    if graph.meta.get("loss") == MEAN:
        warn_user(
            f"{name} returns no loss, so this would minimise the mean of its output, which is "
            "hardly what you want. Give hocket.prepare the loss: loss=lambda output: …, or "
            "forward=lambda model, batch: criterion(model(batch[0]), batch[1])",
            CaptureWarning,
        )


def places_in_process(devices: Sequence[Device]) -> list[str]:
    """Map the plan's accelerators to this machine's GPUs cyclically, and CPUs to the CPU."""
    gpus, turn = torch.cuda.device_count(), count()
    return [
        "cpu" if device.kind.is_cpu or not gpus else f"cuda:{next(turn) % gpus}"
        for device in devices
    ]


def described(error: UntraceableError) -> str:
    """Describe where and why a step cannot be traced."""
    return f"{error.where}: {error.message}" if error.where else error.message


class RankedModel(TracedModel):
    """One rank of an op placement, which runs the ops of one device of the traced step.

    All ranks run the same script and trace the same program. Every rank gets losses and outputs.
    Gradients stay on the rank whose device has the parameter, where the user's optimizer applies
    them; on other ranks the parameter has no gradient, and the optimizer skips it.
    """

    is_ranked = True

    def __init__(self, task: TrainingTask, placed: PlacedProgram) -> None:
        super().__init__(task, placed)
        runner = self.first.runner
        assert isinstance(runner, RankedStep)
        self._runner = runner
        numbers = {name: number for number, name in placed.program.names.items()}
        self._owner_of = {
            id(tensor): runner.owner(numbers[name])
            for name, tensor in self.tensors.items() if name in numbers
        }  # fmt: skip
        self.rank_state = ParallelState(task.model, self._owner, task.device)

    @property
    def record(self) -> StepRecord | None:
        """Times of the last step on this rank's device."""
        return self._runner.record

    def clip(self, max_norm: float) -> None:
        """Clip gradients by their norm over all ranks, with the same bits as in one process.

        Each rank contributes the norms of its gradients; the common norm is computed from all of
        them in the order of the parameters.
        """
        parameters = self._parameters
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
        norms = torch.zeros(2, len(parameters), device=self._runner.device, dtype=dtype)
        own = []
        for at, parameter in enumerate(parameters):
            if parameter.grad is not None:
                own.append(parameter)
                norms[0, at], norms[1, at] = 1, torch.linalg.vector_norm(parameter.grad)
        dist.all_reduce(norms)
        total = torch.linalg.vector_norm(norms[1][norms[0] > 0])
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, total)

    def _owner(self, tensor: torch.Tensor) -> TensorOwner:
        # A tensor that the traced step does not use is the same on all ranks.
        owner = self._owner_of.get(id(tensor), 0)
        return TensorOwner((owner,), None, is_here=True, is_updated=owner == dist.get_rank())
