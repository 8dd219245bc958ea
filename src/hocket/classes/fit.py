"""Find budgets of work for the parts, so that the slowest part meets a latency target.

Work and time are not proportional (thin layers cost more per multiplication), so parts are built,
exported to ONNX and timed. For the heaviest group, the fraction of the net's work is scaled by
target over measured time until the part is just within the target. Every part is then checked with
that budget, which is lowered if the part is too slow. At most ten builds for the heaviest group,
then one to ten for each part.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hocket.base.arrays import FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_seconds
from hocket.classes.cut import PartCut, best_units, build_part
from hocket.classes.exported import as_onnx
from hocket.classes.latency_forecast import FanOut
from hocket.classes.material import Material, Progress
from hocket.classes.session import latency_s, open_session, vector_width
from hocket.classes.settings import HybridCriterion
from hocket.classes.widths import Floors, chosen_widths, needed_macs
from hocket.runtime.process_settings import torch_threads

_TRIES = 10
_WARM_UPS, _RUNS = 3, 20
"""Untimed and timed runs of the net in eager torch."""
_NEAR = 0.9
"""Fraction of the target that is close enough; also the factor that lowers a budget."""
_TYPICAL_SHARE = 0.8
"""Fraction of the value kept when groups are compared by the work that they need."""


@dataclass(frozen=True)
class WholeTimes:
    """Times of the unsplit net for one input on one thread: in ONNX Runtime and in eager torch."""

    latency_s: float
    eager_s: float

    def quicker(self, other: WholeTimes) -> WholeTimes:
        """Return the shorter time of both measurements, separately for each of the two times."""
        return WholeTimes(min(self.latency_s, other.latency_s), min(self.eager_s, other.eager_s))


@dataclass(frozen=True)
class Budgets:
    """Maximum number of multiplications of each part."""

    macs: tuple[float, ...]
    target_s: float | None
    """Target time of the slowest part; None without a latency target."""


def whole_times(material: Material) -> WholeTimes:
    """Measure the unsplit net in ONNX Runtime and in eager torch."""
    example = material.example
    session = open_session(as_onnx(material.net, example))
    eager_s = eager_latency_s(material.net, example)
    material.net.to(material.request.device)
    return WholeTimes(latency_s(session, example.numpy()), eager_s)


@torch.no_grad()
def eager_latency_s(net: torch.nn.Module, example: torch.Tensor) -> float:
    """CPU time of one input in eager torch on one thread."""
    # Measured on the CPU, because parts are served there.
    net = net.cpu().eval()
    spent = []
    with torch_threads(1):
        for _ in range(_WARM_UPS + _RUNS):
            start = time.process_time_ns()
            net(example)
            spent.append(time.process_time_ns() - start)
    return float(np.quantile(spent[_WARM_UPS:], 0.1)) * 1e-9


def group_work(material: Material) -> Callable[[tuple[int, ...]], float]:
    """Return a function that estimates the work that a group of classes needs."""

    @functools.cache
    def work_of(classes: tuple[int, ...]) -> float:
        values = material.scores.of_group(classes)
        return needed_macs(material.structure.model, values, _TYPICAL_SHARE)

    return work_of


def cut_to(material: Material, classes: tuple[int, ...], budget_macs: float) -> PartCut:
    """Keep the most valuable channels for some classes within a budget of work."""
    scores, model = material.scores, material.structure.model
    if material.request.hybrid is not None:
        return PartCut(classes, _units_left(material, classes, material.request.hybrid))
    values, floors = scores.of_group(classes), Floors(vector_width=vector_width())
    chosen = chosen_widths(model, values, budget_macs, floors, scores.influence(classes))
    omitted = tuple(model.blocks[index].name for index in chosen.omitted)
    return PartCut(classes, best_units(values, chosen.units), omitted)


def _units_left(
    material: Material, classes: tuple[int, ...], test: HybridCriterion
) -> tuple[tuple[int, ...], ...]:
    """Units of each stream that the criterion keeps, raised to the floor by the most valuable."""
    floors, left = Floors(vector_width=vector_width()), []
    values, pruned = material.scores.of_group(classes), material.scores.pruned(classes, test)
    for stream, value, gone in zip(material.structure.model.streams, values, pruned, strict=True):
        # Units that remain come first, by value; pruned ones follow, so that the floor empties no
        # layer.
        order = np.lexsort((-value, gone))
        count = max(int((~gone).sum()), floors.floor(stream))
        left.append(tuple(sorted(order[:count].tolist())))
    return tuple(left)


def pruned_overlap(material: Material, budget_macs: float) -> FloatArray:
    """``[class, class]``: intersection over union of the units pruned for each class alone."""
    model, gone = material.structure.model, []
    for each in range(material.splits.num_classes):
        kept = cut_to(material, (each,), budget_macs).kept
        gone.append(np.concatenate([
            ~np.isin(np.arange(stream.units), units)
            for stream, units in zip(model.streams, kept, strict=True)
        ]))  # fmt: skip
    masks = np.stack(gone).astype(np.float64)
    both = masks @ masks.T
    either = masks.sum(axis=1)[:, None] + masks.sum(axis=1)[None] - both
    overlap: FloatArray = np.where(either > 0, both / np.maximum(either, 1), 1.0)
    return overlap


def part_latency_s(material: Material, cut: PartCut) -> float:
    """Measured time of a part for one input; it needs no training, as weights do not matter."""
    part = build_part(material.net, material.structure, material.example, cut)
    model = as_onnx(part, material.example)
    return latency_s(open_session(model), material.example.numpy())


def fitted_budgets(
    material: Material, whole: WholeTimes, classes: Sequence[tuple[int, ...]], progress: Progress
) -> Budgets:
    """Return the largest budgets tried with which the parts meet the target, within 5 %."""
    asked = material.request.target_s
    if asked is None:
        return Budgets(tuple(material.request.work * material.whole_macs for _ in classes), None)
    overhead_s = FanOut().overhead_s(len(classes))
    if asked <= overhead_s:
        raise NoFeasiblePlanError(
            f"no answer comes within {format_seconds(asked)}: reaching {len(classes)} workers "
            f"takes about {format_seconds(overhead_s)}",
            hint="allow a longer --target-latency or take fewer --parts",
        )
    target_s = asked - overhead_s
    # The slowest part decides, and the part that needs most work is probably the slowest.
    heaviest = max(classes, key=group_work(material))
    share = largest_share(material, whole.latency_s, heaviest, target_s, progress)
    macs = []
    for mine in classes:
        budget = share * material.whole_macs
        for _ in range(_TRIES):
            if part_latency_s(material, cut_to(material, mine, budget)) <= 1.05 * target_s:
                break
            # Another group may keep other widths, and may therefore be slower with equal work.
            budget *= _NEAR
        macs.append(budget)
    return Budgets(tuple(macs), target_s)


def largest_share(
    material: Material,
    whole_s: float,
    classes: tuple[int, ...],
    target_s: float,
    progress: Progress,
) -> float:
    """Largest fraction tried of the net's work with which a part meets the target."""
    if whole_s <= target_s:
        return 1.0
    least_s, best = whole_s, 0.0
    # Bisection with a better guess than the middle: time falls with work, but not in proportion.
    share, low, high = max(target_s / whole_s, 1e-4), 0.0, 1.0
    for number in range(_TRIES):
        progress("fit widths to the latency", number, _TRIES)
        now_s = part_latency_s(material, cut_to(material, classes, share * material.whole_macs))
        least_s = min(least_s, now_s)
        if now_s <= target_s:
            low = best = max(best, share)
            if now_s >= _NEAR * target_s:
                break
        else:
            high = min(high, share)
        # Part of the time does not shrink with the work, so a part that is too slow is reduced more
        # than in proportion.
        guess = share * (target_s / now_s) ** (1 if now_s <= target_s else 1.5)
        share = guess if low < guess < high else (low + high) / 2
    if not best:
        raise NoFeasiblePlanError(
            f"no part answers within {format_seconds(target_s)}: the thinnest that was "
            f"tried takes {format_seconds(least_s)}",
            hint="allow a longer --target-latency; processes take part of it for themselves",
        )
    return best
