"""A step traced for one shape of batch, with its placement and its runner.

`TracedStep` splits a placed program into instructions, chooses the runner (eager, CUDA graph,
several devices, or ranks), and maps model and batch to the tensors of the program. Steps that are
traced later, for another batch shape or without gradients, are placed like the planned step
(`placement_like`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from hocket.base.arrays import IntArray
from hocket.capture.fake import all_tensors, batch_tensors
from hocket.capture.program import Program
from hocket.capture.recording import Ref
from hocket.cost.roofline import costs_from_settings
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import raise_violations, structure_violations
from hocket.runtime.device_instructions import Do, Setup, StepCalls, split
from hocket.runtime.eager_step import EagerStep, ReplayedStep, kept_tensors
from hocket.runtime.model_tensors import ModelTensors
from hocket.runtime.placed_step import PlacedStep
from hocket.runtime.ranked_step import RankedStep
from hocket.runtime.trace_options import starts_backward
from hocket.simulate import Timeline, simulate
from hocket.simulate.engine import instructions_of
from hocket.simulate.verify import update_violations


def with_graph(problem: Problem, graph: Graph) -> Problem:
    """Return the same problem with another graph."""
    costs = costs_from_settings(graph, problem.cluster, problem.costs.settings)
    return replace(problem, work=graph, op_costs=costs)


def placement_like(graph: Graph, planned: Graph, device_of: IntArray) -> IntArray:
    """Return a device for each op of ``graph``, following the placement of ``planned``.

    ``graph`` is a step of the same model with another batch shape, or without gradients. An op gets
    the device of the planned op of the same name, or of most ops of its module, or of its input.
    Ops that must share a device get the device of the first of them. O(ops + reads).
    """
    if graph.op_names == planned.op_names and np.array_equal(graph.group, planned.group):
        return device_of
    by_name = dict(zip(planned.op_names, device_of.tolist(), strict=True))
    by_module: dict[str, Counter[int]] = {}
    for op, device in enumerate(device_of.tolist()):
        by_module.setdefault(planned.module_of(op), Counter())[device] += 1
    found: list[int] = []
    leader: dict[int, int] = {}
    for op in range(graph.num_ops):
        group = int(graph.group[op])
        if group in leader:
            found.append(leader[group])
            continue
        found.append(_place(graph, op, by_name, by_module, found))
        if group >= 0:
            leader[group] = found[-1]
    return np.array(found, dtype=np.int32)


def _place(
    graph: Graph,
    op: int,
    by_name: dict[str, int],
    by_module: dict[str, Counter[int]],
    found: list[int],
) -> int:
    name = graph.op_names[op]
    if name in by_name:
        return by_name[name]
    module = graph.module_of(op)
    if module in by_module:
        return by_module[module].most_common(1)[0][0]
    makers = (int(graph.tensor_producer[tensor]) for tensor in graph.reads_of(op).tolist())
    return next((found[maker] for maker in makers if maker >= 0), 0)


class PlacedProgram(NamedTuple):
    """A traced program, and the device of each of its ops."""

    problem: Problem
    """The problem of the plan, with the graph of the program."""
    plan: Plan
    program: Program
    devices: Sequence[torch.device]
    """The real device of each device of the plan; with ranks, all entries are this rank's
    device."""


class TracedStep:
    """One traced step with its placement, ready to run."""

    def __init__(
        self,
        placed: PlacedProgram,
        *,
        seed: int | None,
        everything: bool,
        replay: bool,
        is_ranked: bool = False,
    ) -> None:
        """``everything`` keeps all outputs of the model, not only single numbers.

        With ``replay`` a step on one CUDA device is replayed as one CUDA graph.
        """
        problem, plan, program, devices = placed
        assert plan.device_of is not None
        found = list(structure_violations(plan, problem))
        found += [] if found else list(update_violations(plan.device_of, problem))
        raise_violations(found, plan.planner)
        self.problem, self.plan, self.program = problem, plan, program
        self.devices, self.seed, self.is_ranked = list(devices), seed, is_ranked
        self.has_run = False
        """True once all ops of the step have run on real tensors."""
        self.predicted: Timeline = simulate(problem, plan)
        parts = _parts(problem, plan, program, self.predicted, self.is_on_one_device)
        self.setup = Setup(problem.graph, program, plan.device_of, parts)
        self.keep = kept_tensors(self.setup, everything=everything)
        self.runner: EagerStep | PlacedStep
        self._present = self.setup.split.present
        if is_ranked:
            ranked = RankedStep(self.setup, self.devices[0], seed=seed, keep=self.keep)
            here, self.runner = ranked.device_index, ranked
            self._present = tuple(p if d == here else () for d, p in enumerate(self._present))
        elif not self.is_on_one_device:
            self.runner = self.timed()
        else:
            kind = ReplayedStep if replay and self.devices[0].type == "cuda" else EagerStep
            self.runner = kind(self.setup, self.devices[0], seed=seed, keep=self.keep)
        self._inputs: list[tuple[int, int, int]] = []
        self._given: list[dict[int, torch.Tensor]] = []
        self._addresses: list[int] = []

    @property
    def is_on_one_device(self) -> bool:
        """True if all devices of the plan are one real device, and no other ranks run the step."""
        return len(set(self.devices)) == 1 and not self.is_ranked

    def timed(self) -> PlacedStep:
        """Return a runner of the step that times every op."""
        devices = dict(enumerate(self.devices))
        return PlacedStep(self.setup, devices, seed=self.seed, keep=self.keep)

    def given(
        self, model: nn.Module, held: ModelTensors, batch: Any
    ) -> list[dict[int, torch.Tensor]]:
        """Return the tensors that exist before the step, per device of the plan."""
        if not self._given:
            self._inputs = self._find_inputs(model, batch)
        addresses = held.addresses()
        # The user may have moved or replaced tensors between steps.
        if addresses != self._addresses:
            self._given = held.settle(self.program, self._present, self.devices)
            self._addresses = held.addresses()
        tensors = [tensor for _, tensor in batch_tensors(batch)]
        for position, device, number in self._inputs:
            tensor = tensors[position].detach()
            self._given[device][number] = tensor.to(self.devices[device], non_blocking=True)
        return self._given

    def _find_inputs(self, model: nn.Module, batch: Any) -> list[tuple[int, int, int]]:
        """Return (position in the batch, device, number) of each batch tensor that is read."""
        names = [name for name, role, _ in all_tensors(model, batch) if role == Role.INPUT]
        position = {name: at for at, name in enumerate(names)}
        return [
            (position[self.program.names[number]], device, number)
            for device, numbers in enumerate(self._present)
            for number in numbers
            if self.program.tensors[number].role == Role.INPUT
        ]

    def returned(self, runner: EagerStep | None = None) -> Any:
        """Return the model's outputs, with None for tensors that were not kept.

        ``runner`` is the runner that has run the step; by default it is `runner` of this step.
        """
        found = self.program.returned
        if found is None:
            return None
        leaves = [self._leaf(leaf, runner or self.runner) for leaf in found.leaves]
        return tree_unflatten(leaves, found.form)

    def _leaf(self, leaf: Any, runner: EagerStep | PlacedStep) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return runner.value(leaf.number) if leaf.number in self.keep else None


def _parts(
    problem: Problem, plan: Plan, program: Program, predicted: Timeline, one_device: bool
) -> StepCalls:
    """Return the instructions of each device, in planned order if possible, else in traced order.

    With recompute, one device runs in traced order, which has second runs as late as possible.
    """
    tables = instructions_of(problem, plan)
    planned = split(problem.graph, tables, timeline=predicted, order=plan.by_device)
    if not one_device or (not program.repeats and _keeps_order(planned, program)):
        return planned
    return split(problem.graph, tables)


def _keeps_order(parts: StepCalls, program: Program) -> bool:
    """True if ops on one device may run in planned order.

    Random draws of the unsplit model need the traced order of drawing ops. Forward must end before
    backward begins, so that both can be called separately.
    """
    ops = [number for _, (do, number) in parts.sequence if do == Do.RUN]
    calls = [program.calls[op] for op in ops]
    drawn = [op for op, call in zip(ops, calls, strict=True) if call.draws]
    starts = [at for at, call in enumerate(calls) if starts_backward(program, call)]
    forward = [at for at, call in enumerate(calls) if call.phase == Phase.FORWARD]
    return drawn == sorted(drawn) and max(forward, default=-1) < min(starts, default=len(ops))
