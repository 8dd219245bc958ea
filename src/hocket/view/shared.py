"""Plans that share the samples of a batch: in words, and as the graph that they unfold to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_count, format_seconds
from hocket.graph.graph import Graph, Phase
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Order, Parallel, Placement, Priority, Waves
from hocket.plan.words import in_words
from hocket.planners.goal import dollars_per_million, samples_per_s
from hocket.planners.memory.blocks import layer_label
from hocket.simulate.analysis import used_devices
from hocket.simulate.parallel import expand
from hocket.simulate.timeline import Timeline
from hocket.simulate.verify import violations
from hocket.view import placed
from hocket.view.facts import facts_of
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.text import candidate_style, fullest_cells, lacks_memory, verdict
from hocket.view.wording import dollars

if TYPE_CHECKING:
    from hocket.planners.candidates import Candidate, Comparison


# What a plan that shares out a batch keeps of the training of one device, in words.

_NORM = "batch_norm"


def kept_training(graph: Graph, shares: Parallel) -> list[str]:
    """Numerical check of the batch split, and its effect on batch norm and dropout."""
    is_split = len(shares.replicas) > 1 or len(shares.replicas[0].microbatches) > 1
    if not is_split:
        return []
    notes = []
    samples = graph.meta.get("samples")
    if isinstance(samples, str):
        notes.append(
            f"numerics: same as single-GPU training with batch {shares.num_samples}: {samples}"
        )
    if num_norms := _num_norms(graph):
        notes.append(f"{num_norms} batch norm{'s' * (num_norms > 1)} see {_seen(shares)}")
    if (graph.rng_order >= 0).any():
        notes.append("dropout masks differ from a single-GPU run")
    return notes


def _seen(shares: Parallel) -> str:
    """The samples over which a batch norm takes its mean."""
    sizes = sorted({size for r in shares.replicas for size in r.microbatches}, reverse=True)
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} or {sizes[-1]}"
    if len(sizes) > 2:
        each = f"{sizes[-1]} to {sizes[0]}"
    is_whole = all(len(replica.microbatches) == 1 for replica in shares.replicas)
    if is_whole and not shares.is_staged:
        return (
            f"all {shares.num_samples} samples with hocket launch, by sums over devices; with "
            f"hocket run the {each} of their own device"
        )
    return f"{each} samples at a time, as where gradients are accumulated"


def _num_norms(graph: Graph) -> int:
    kinds = [index for index, kind in enumerate(graph.kinds) if _NORM in kind]
    is_forward = graph.op_phase == Phase.FORWARD
    return int((np.isin(graph.op_kind, kinds) & is_forward).sum())


R = TypeVar("R")
_MOST_LINES = 12
"""Lines of the map of layers."""


def unfolded(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The expanded graph of a plan that splits the batch, and where its ops run."""
    found = expand(problem, plan[Parallel], plan.get(Communication), plan.get(Waves))
    sections = (Placement(found.device_of), Order(priority=found.priority))
    inner = replace(plan, work_hash=found.problem.work_hash, sections=sections)
    return found.problem, inner


def unfolding(view: Callable[[Problem, Plan, Timeline], R]) -> Callable[..., R]:
    """A view of placements for plans that share a batch."""

    def viewed(problem: Problem, plan: Plan, timeline: Timeline) -> R:
        return view(*unfolded(problem, plan), timeline)

    return viewed


def summary_by(
    view: Callable[[Problem, Plan, Timeline], RenderableType],
) -> Callable[[Problem, Plan, Timeline], RenderableType]:
    """The plan in words, then the view of its expanded graph."""

    def viewed(problem: Problem, plan: Plan, timeline: Timeline) -> RenderableType:
        how = Text(_how(plan), style="bold")
        return Group(how, unfolding(view)(problem, plan, timeline))

    return viewed


def _how(plan: Plan) -> str:
    waves = plan.get(Waves)
    notes = "" if waves is None else f", two waves, the second {waves.lead} ops behind"
    if plan.get(Priority) is not None:
        notes += ", gradients by priority"
        if plan.claims.step_s is not None:
            notes += f": {format_seconds(plan.claims.step_s)} for a step among many"
    elif waves is not None and plan.claims.step_s is not None:
        notes += f": {format_seconds(plan.claims.step_s)} with stream waits"
    return in_words(plan[Parallel]) + notes


# ── as ``--json`` ────────────────────────────────────────────────────────────────────────────────


def shown(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """JSON of ``hocket show``."""
    shares = plan[Parallel]
    return {
        "planner": plan.planner,
        "how": _how(plan),
        "step_s": timeline.makespan_s,
        "samples_per_s": shares.num_samples / timeline.makespan_s,
        "moved_bytes": facts_of(*unfolded(problem, plan), timeline).moved_bytes,
        "peak_bytes": placed.device_peaks(problem, timeline),
        "parallel": shares.to_data(),
    }


def explained(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """JSON of ``hocket explain``."""
    inner = unfolding(placed.explained)(problem, plan, timeline)
    return {**shown(problem, plan, timeline), **inner}


def simulated(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """JSON of ``hocket simulate``."""
    is_legal = not violations(plan, problem, timeline)
    return {**unfolding(placed.simulated)(problem, plan, timeline), "feasible": is_legal}


# ── hocket plan ──────────────────────────────────────────────────────────────────────────────────


def whole_table(comparison: Comparison) -> RenderableType:
    """The chosen strategy, a line per strategy, why it was chosen and the lower bound."""
    notes = [
        Text(f"{inert(c.planner)}: {inert(c.reason, LONGEST_SENTENCE)}", style="dim")
        for c in comparison.candidates
        if not c.feasible and c.reason and not lacks_memory(comparison.problem, c)
    ]
    table = strategies_table(comparison)
    return Group(*_headline(comparison), *_map(comparison), table, *notes, *_why(comparison))


def strategies_table(comparison: Comparison) -> FittedTable:
    """A line per strategy: step, samples per second, money and memory."""
    columns = (
        Column(title=""), Column(title="strategy"), number("step"), number("samples/s", 2),
        number("$ per M samples", 1), name("fullest", 3), number("peak memory  "),
        number("devices", 4),
    )  # fmt: skip
    return FittedTable(
        columns=columns,
        rows=[_cells(comparison, candidate) for candidate in comparison.candidates],
        styles=[candidate_style(comparison, candidate) for candidate in comparison.candidates],
    ).without_empty()


def _headline(comparison: Comparison) -> list[Text]:
    winner = comparison.winner
    if winner is None or winner.step_s is None:
        return []
    how = inert(how_of(winner), LONGEST_SENTENCE)
    return [Text(f"{how}: {format_seconds(winner.step_s)} per step", style="bold")]


def _map(comparison: Comparison) -> list[Text]:
    """Which layers are where, where devices have different ones or do different things to them."""
    winner = comparison.winner
    shares = None if winner is None or winner.plan is None else winner.plan.get(Parallel)
    if shares is None:
        return []
    lines = layer_lines(comparison.problem.graph, shares)
    folded = [*lines[:_MOST_LINES], f"… {len(lines) - _MOST_LINES} more"]
    return [Text(inert(line), style="dim") for line in
            (lines if len(lines) <= _MOST_LINES else folded)]  # fmt: skip


def layer_lines(graph: Graph, shares: Parallel) -> list[str]:
    """``v100: transformer.wte to transformer.h.5``, and what is recomputed of that."""
    lines: list[str] = []
    for replica in shares.replicas:
        bounds = (0, *replica.cuts, int((graph.op_phase == Phase.FORWARD).sum()))
        for stage, (first, stop) in enumerate(pairwise(bounds)):
            own = replica.devices[stage * shares.tensor : (stage + 1) * shares.tensor]
            again = [block for block in replica.recomputed if first <= block[0] < stop]
            notes = f", {_layers(graph, again[0][0], again[-1][1])} recomputed" if again else ""
            if replica.cuts or notes:
                lines.append(f"{' + '.join(own)}: {_layers(graph, first, stop)}{notes}")
    return lines


def _layers(graph: Graph, first: int, stop: int) -> str:
    """The modules of forward ops from one up to another, by the first and the last."""
    paths = [path for op in range(first, stop) if (path := graph.module_of(op))]
    names = [layer_label(path) or path for path in (paths[:1] + paths[-1:])]
    if not names:
        return f"ops {first} to {stop - 1}"
    return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"


def how_of(candidate: Candidate) -> str:
    """A candidate in words."""
    notes = {} if candidate.plan is None else candidate.plan.notes
    return notes.get("how", candidate.planner)


def _why(comparison: Comparison) -> list[Text]:
    lines = verdict(comparison)
    if comparison.bound is not None and comparison.gap is not None:
        bound, why = format_seconds(comparison.bound.seconds), inert(comparison.bound.why)
        notes = f"lower bound over all strategies: {bound} ({why})"
        lines.append(Text(notes, style="dim"))
    winner = comparison.winner
    shares = None if winner is None or winner.plan is None else winner.plan.get(Parallel)
    if shares is not None:
        kept = kept_training(comparison.problem.graph, shares)
        lines += [Text(inert(line, LONGEST_SENTENCE), style="dim") for line in kept]
    return lines


def _cells(comparison: Comparison, candidate: Candidate) -> list[str]:
    problem, step_s, timeline = comparison.problem, candidate.step_s, candidate.timeline
    tick = "✔" if candidate is comparison.winner else ""
    cells = [tick, inert(candidate.planner), "–", "", "", "", "", ""]
    if step_s:
        cells[2] = format_seconds(step_s, comparison.least_step_s)
        cells[3] = format_count(samples_per_s(problem, step_s))
        cells[4] = money_text(problem, candidate)
    if timeline is not None:
        cells[5:7] = fullest_cells(problem, timeline)
        cells[7] = str(len(used_devices(timeline)))
    return cells


def money_text(problem: Problem, candidate: Candidate) -> str:
    """Price of a million samples as a cell; empty where it is unknown."""
    price = dollars_per_million(problem, candidate)
    return "" if price is None else dollars(price)


def is_whole(comparison: Comparison) -> bool:
    """True if strategies for the batch were compared, not placements alone."""
    return "ways" in comparison.counts


def sharing(comparison: Comparison, candidate: Candidate) -> dict[str, Any]:
    """Further JSON of a strategy in ``hocket plan``."""
    if not is_whole(comparison):
        return {}
    step_s, problem = candidate.step_s, comparison.problem
    return {
        "how": how_of(candidate),
        "samples_per_s": None if not step_s else samples_per_s(problem, step_s),
        "dollars_per_million_samples": dollars_per_million(problem, candidate),
    }


def placing(comparison: Comparison, winner: Candidate) -> dict[str, Any]:
    """Where the winner's ops are and what is sent between them, or who takes which samples."""
    assert winner.plan is not None, "a winner has a plan"
    shares, problem = winner.plan.get(Parallel), comparison.problem
    if shares is not None:
        kept = kept_training(problem.graph, shares)
        return {"parallel": shares.to_data(), "training": kept}
    assert winner.timeline is not None, "a placement was simulated"
    sent = problem.graph.tensor_bytes[winner.timeline.transfer_tensor]
    return {
        "placement": placed.device_names(problem, winner.plan),
        "cut_bytes": int(sent.sum()),
    }
