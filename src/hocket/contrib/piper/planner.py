"""Piper: layers, tensor degree, data degree and recomputation of every stage at once, exactly.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021. Its dynamic programme fills, for every set of last layers, number of devices k and sum
s of data degrees, the least time of the slowest stage; s gives the microbatches in flight of the
stage before, ceil(s / d), and with them its memory. Here the programme asks instead whether a time
limit can be kept: then only the pairs (s, k) matter of which none beats another, few degrees of a
stage remain, and sets from which the rest of the work no longer fits the rest of the devices fall
away. Halving the interval of limits gives the same optimum (within one part in 10^11).
O(limits · stages · degrees · points of a front).

As in Piper's program data degrees divide the microbatches of a batch, tensor degrees are those of
the file, s is at most the number of microbatches and of devices, and the ways of layers are chosen
per stage; Piper chooses them greedily, here the choice is exact, so that the result is never worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import format_bytes
from hocket.contrib.piper.input import MAX_DEVICES, PiperInput
from hocket.contrib.piper.state import (
    FrontState,
    StageState,
    new_fronts,
    new_stage_state,
)
from hocket.contrib.piper.tables import Prepared, prepare

_PRECISION = 1e-11
_ANY_S = 1e300
"""A limit that everything keeps that fits the memory."""


@dataclass(frozen=True, kw_only=True)
class PiperStage:
    """A stage: what it holds and how it is replicated."""

    nodes: tuple[int, ...]
    """Ids of its layers, in the order of the file."""
    variants: tuple[str, ...]
    """How each of them is run."""
    tensor: int
    data: int
    in_flight: int
    """Microbatches of which it keeps activations."""
    time_s: float
    """Per microbatch of the batch."""
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class PiperPlan:
    """Stages in the order of the model."""

    stages: tuple[PiperStage, ...]
    time_s: float
    """Of the slowest stage, per microbatch of the batch: what Piper calls time per sample."""
    num_devices: int
    """Devices in use."""
    is_exact: bool
    """Whether no better division exists; false only where a choice of ways was cut short."""


def piper_plan(model: PiperInput, num_devices: int | None = None) -> PiperPlan:
    """The fastest division of a model over at most ``num_devices``, or as many as its file says.

    Raises `NoFeasiblePlanError` where nothing fits the memory.
    """
    count = model.max_devices if num_devices is None else num_devices
    if not 1 <= count <= MAX_DEVICES:
        raise UsageError(f"{count} devices", hint=f"expected 1 to {MAX_DEVICES}")
    prepared = prepare(model, count)
    search = _LimitSearch(prepared)
    best = search.run()
    if best is None:
        raise _lacking(model, count)
    return _described(model, prepared, search, best)


@dataclass(frozen=True)
class _Pick:
    """One stage of a division: degrees by position and value, replicas of it and what follows."""

    stage: int
    degree: int
    data: int
    in_flight: int


class _LimitSearch:
    """The search for the least limit, with the arrays that all its tests use."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.state: StageState = new_stage_state(prepared)
        self.fronts: FrontState = new_fronts(prepared)

    def run(self) -> list[_Pick] | None:
        """The best division; None where no limit helps."""
        from hocket.contrib.piper.kernels import fill_stages

        if not len(self.prepared.table.tensor):
            return None
        fill_stages(self.prepared.table, self.prepared.stages, self.state)
        low_s = self.prepared.table.rest_work_s[0] / self.prepared.table.num_devices
        finite = self.state.fast_s[np.isfinite(self.state.fast_s)]
        limit_s, best = max(low_s, finite.min(initial=np.inf)), None
        while best is None:
            # Start near the bound: tests are quick there, because little can keep the limit.
            limit_s = limit_s * 1.25 if limit_s < finite.max(initial=0.0) else _ANY_S
            best = self.within(limit_s)
            if best is None and limit_s == _ANY_S:
                return None
            low_s = low_s if best is not None else limit_s
        high_s = self.time_s(best)
        while high_s - low_s > _PRECISION * high_s:
            middle_s = (low_s + high_s) / 2.0
            found = self.within(middle_s)
            if found is None:
                low_s = middle_s
            else:
                best, high_s = found, self.time_s(found)
        return best

    def within(self, limit_s: float) -> list[_Pick] | None:
        """A division with no stage above the limit."""
        from hocket.contrib.piper.kernels import find_fronts

        tables, stages, fronts = self.prepared.table, self.prepared.stages, self.fronts
        # What a test learns holds below its limit if it succeeds and above it if it fails.
        known = self.state.at_least.copy(), self.state.at_most.copy()
        if not find_fronts(tables, stages, self.state, fronts, limit_s):
            raise UsageError(
                "the search for degrees needs more memory than it may use",
                hint="join layers, or plan for fewer devices",
            )
        last = stages.num_sets - 1
        point = int(fronts.front_ptr[last + 1]) - 1
        if point < fronts.front_ptr[last]:
            self.state.at_most[:] = known[1]
            return None
        self.state.at_least[:] = known[0]
        picks = []
        while point > 0:
            replicas, _, behind, stage, degree, data = fronts.point[point].tolist()
            picks.append(_Pick(stage, degree, data, -(-replicas // data)))
            point = behind
        return picks

    def stage_s(self, pick: _Pick) -> float:
        """Time per microbatch of one stage; the ways of its layers are in the choices."""
        from hocket.planners.parallelism.partition.choice_kernels import choose

        tables, choices = self.prepared.table, self.state.choices
        slots = slice(*self.prepared.stages.slot_ptr[pick.stage : pick.stage + 2])
        layers, count = self.prepared.stages.slot_layer[slots], slots.stop - slots.start
        sync_s = (pick.data - 1) * tables.sync_s[layers, pick.degree]
        kept_bytes = pick.in_flight * tables.activation_bytes[layers, pick.degree]
        held_bytes = kept_bytes + tables.fixed_bytes[layers, pick.degree]
        choices.num_ways[:count] = tables.num_ways[layers, pick.degree]
        choices.time_s[:count] = (self.state.slot_s[slots, pick.degree] + sync_s) / pick.data
        choices.memory_bytes[:count] = np.minimum(held_bytes, tables.limit_bytes + 1)
        return choose(choices, count, tables.limit_bytes)

    def time_s(self, picks: list[_Pick]) -> float:
        """Time per microbatch of the slowest stage."""
        return max(self.stage_s(pick) for pick in picks)


def _described(
    model: PiperInput, prepared: Prepared, search: _LimitSearch, picks: list[_Pick]
) -> PiperPlan:
    """The division by ids and names, with the nodes that had been left out."""
    stage_of: dict[int, int] = {}
    way_of: dict[int, int] = {}
    times = []
    for index, pick in enumerate(picks):
        times.append(search.stage_s(pick))
        slots = range(*prepared.stages.slot_ptr[pick.stage : pick.stage + 2].tolist())
        for offset, slot in enumerate(slots):
            node = prepared.nodes[prepared.stages.slot_layer[slot]]
            stage_of[node.id] = index
            way_of[node.id] = int(search.state.choices.chosen[offset])
    _place_free(model, stage_of, len(picks))
    stages = []
    for index, pick in enumerate(picks):
        tensor = int(prepared.table.tensor[pick.degree])
        nodes = [node for node in model.nodes if stage_of[node.id] == index]
        variants = [node.variants[tensor][way_of.get(node.id, 0)] for node in nodes]
        held = sum(v.activation_bytes * pick.in_flight + v.fixed_bytes for v in variants)
        stages.append(
            PiperStage(
                nodes=tuple(node.id for node in nodes),
                variants=tuple(variant.name for variant in variants),
                tensor=tensor,
                data=pick.data,
                in_flight=pick.in_flight,
                time_s=times[index],
                memory_bytes=int(held),
            )
        )
    return PiperPlan(
        stages=tuple(stages),
        time_s=max(times),
        num_devices=sum(stage.tensor * stage.data for stage in stages),
        is_exact=not search.state.choices.num_inexact[0],
    )


def _place_free(model: PiperInput, stage_of: dict[int, int], num_stages: int) -> None:
    """Put each node that was left out into the first stage that needs it."""
    waiting = [node.id for node in model.nodes if node.id not in stage_of]
    while waiting:
        later = []
        for node in waiting:
            after = [dst for src, dst in model.edges if src == node]
            if all(dst in stage_of for dst in after):
                stage_of[node] = min((stage_of[dst] for dst in after), default=num_stages - 1)
            else:
                later.append(node)
        waiting = later


def _lacking(model: PiperInput, num_devices: int) -> NoFeasiblePlanError:
    """The error that says what does not fit."""
    limit = model.memory_bytes
    for node in model.nodes:
        usable = [some for degree, some in node.variants.items() if degree <= num_devices]
        variants = [variant for some in usable for variant in some]
        if not variants:
            return NoFeasiblePlanError(
                f"node {node.id} {node.name!r} needs a tensor degree above {num_devices}",
                hint="use more devices",
            )
        needed = min(v.activation_bytes + v.fixed_bytes for v in variants)
        if needed > limit:
            return NoFeasiblePlanError(
                f"a stage with node {node.id} {node.name!r} alone needs {format_bytes(needed)},"
                f" a device has {format_bytes(limit)}",
                hint="use devices with more memory, or higher tensor degrees",
            )
    total = sum(
        min(v.activation_bytes + v.fixed_bytes for some in node.variants.values() for v in some)
        for node in model.nodes
    )
    return NoFeasiblePlanError(
        f"no division over {num_devices} devices fits: layers need {format_bytes(total)} or more in"
        f" all, a device has {format_bytes(limit)}",
        hint="use more devices",
    )
