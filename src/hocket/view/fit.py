"""Format the plans of a step within a memory budget: table, decision and JSON."""

from __future__ import annotations

from math import isinf
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.maker import FULL_OFFLOAD, FULL_RECOMPUTE, PLAIN
from hocket.simulate.storages import HeldStorage, held_at_peak
from hocket.view.budgeted import WithinBudget, decided, parameter_bytes
from hocket.view.facts import HostCopies
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.wording import picked

OURS, MINIMUM_MEMORY = "hocket", "minimum memory"
NUM_TENSORS = 5
USUAL = (PLAIN, FULL_RECOMPUTE, FULL_OFFLOAD)


def shown_plans(fit: BudgetFit) -> list[tuple[str, Fitted]]:
    """The usual plans, then the chosen one, or the minimum-memory plan if nothing fits."""
    usual = [(name, plan) for name in USUAL if (plan := fit.frontier.find(name)) is not None]
    shown = _shown_plan(fit)
    if any(plan is shown for _, plan in usual):
        return usual
    return [*usual, (MINIMUM_MEMORY if fit.chosen is None else OURS, shown)]


def _shown_plan(fit: BudgetFit) -> Fitted:
    """The chosen plan, or the minimum-memory plan if nothing fits."""
    return fit.chosen or fit.frontier.smallest


def within_of(plan: Fitted) -> WithinBudget | None:
    """The memory plan of a fitted step; None if it is the plain step."""
    if plan.memory is None:
        return None
    return WithinBudget(plan.uses.graph, plan.memory, plan.step.rewritten.graph)


def resident_parameter_bytes(plan: Fitted) -> int:
    """Bytes of parameters that stay on the device during the whole step."""
    return parameter_bytes(plan.step.rewritten.graph)


def data(fit: BudgetFit) -> dict[str, Any]:
    """The result as data, with the numbers of the chosen or minimum-memory plan."""
    shown = _shown_plan(fit)
    names = fit.frontier.problem.cluster.device_names
    return {
        "graph": {
            "name": fit.frontier.problem.graph.name,
            "ops": fit.frontier.problem.graph.num_ops,
            "hash": fit.frontier.problem.graph.content_hash,
        },
        "device": names[0],
        "feasible": fit.chosen is not None,
        "budget_bytes": fit.budget_bytes,
        "device_bytes": fit.frontier.problem.cluster.devices[0].memory_bytes,
        "usable_bytes": int(fit.frontier.problem.memory_bytes[0]),
        "smallest_budget_bytes": fit.smallest_bytes,
        "host_budget_bytes": None if isinf(on_host := fit.frontier.host_bytes) else int(on_host),
        "smallest_host_bytes": fit.enough_on_host_bytes,
        "lower_bound_bytes": fit.lower_bound_bytes,
        "lower_bound_s": fit.bound_s,
        "gap": fit.gap,
        "chosen": None if fit.chosen is None else shown.name,
        "minimum_memory": fit.frontier.smallest.name,
        **numbers(shown),
        "plan_seconds": fit.frontier.plan_seconds,
        "host_updates": shown.async_step_s
        and {
            "step_s": shown.finished_step_s,
            "async_step_s": shown.async_step_s,
            "gain": shown.finished_step_s / shown.async_step_s,
        },
        "loss_chunks": 1 if shown.memory is None else shown.memory.loss_chunks,
        "blocks": shown.blocks.num_blocks,
        "candidates": [{"name": name, **numbers(plan)} for name, plan in shown_plans(fit)],
        "frontier": [picked(plan, "peak_bytes", "step_s") for plan in fit.frontier.best_of()],
        "at_peak": [
            {"tensor": held.name, "bytes": held.num_bytes, "module": held.module}
            for held in under_peak(shown)[:NUM_TENSORS]
        ],
    }


def numbers(plan: Fitted) -> dict[str, Any]:
    """Step time, peak, copied bytes and recomputed operations of a plan."""
    within = within_of(plan)
    copies = HostCopies(0, 0, 0) if within is None else within.copies
    return {
        **picked(plan, "step_s", "peak_bytes"),
        "offloaded_bytes": copies.to_host_bytes,
        "fetched_bytes": copies.from_host_bytes,
        "recomputed_flops": 0.0 if within is None else within.again_flops,
        "resident_parameters": resident_parameter_bytes(plan),
    }


def under_peak(plan: Fitted) -> list[HeldStorage]:
    """Storages on the device at the peak, the largest first."""
    return held_at_peak(plan.step.problem, plan.timeline)


def fit_table(fit: BudgetFit) -> RenderableType:
    """A table of plans, the decision, and the largest tensors at the peak."""
    return Group(plans_table(fit), Text(), *map(Text, sentences(fit)))


def plans_table(fit: BudgetFit) -> FittedTable:
    """Table of plans: step, peak, copied bytes and the recomputed fraction of the arithmetic."""
    flops = float(fit.frontier.problem.graph.flops.sum())
    rows, styles = [], []
    for label, plan in shown_plans(fit):
        fits, is_chosen, found = (
            plan.peak_bytes <= fit.budget_bytes,
            plan is fit.chosen,
            numbers(plan),
        )
        rows.append([
            "✔" if is_chosen else "",
            label,
            format_seconds(plan.step_s),
            f"{format_bytes(plan.peak_bytes)} {' ' if fits else '✗'}",
            format_bytes(found["offloaded_bytes"]),
            format_bytes(found["fetched_bytes"]),
            format_percent(found["recomputed_flops"] / flops if flops else 0.0),
        ])  # fmt: skip
        styles.append("bold" if is_chosen else "" if fits else "dim")
    columns = (
        Column(title=""), name("plan"), number("step"), number("peak  "), number("to host", 1),
        number("from host", 2), number("recomputed"),
    )  # fmt: skip
    return FittedTable(columns=columns, rows=rows, styles=styles, least_gap=1)


def sentences(fit: BudgetFit) -> list[str]:
    """The decision, its gap to the lower bound, and the largest tensors at the peak, as
    sentences."""
    shown = _shown_plan(fit)
    lines = [_decision(fit)]
    if fit.gap is not None and fit.bound_s is not None:
        lines.append(
            f"Lower bound at {format_bytes(fit.budget_bytes)}: {format_seconds(fit.bound_s)} "
            f"(gap {format_percent(fit.gap)}); no plan needs less than "
            f"{format_bytes(fit.lower_bound_bytes)}."
        )
    if fit.chosen is not None and (async_s := shown.async_step_s) is not None:
        finished_s = shown.finished_step_s
        lines.append(
            f"CPU optimizer: {format_seconds(finished_s)} if updates end with the step, "
            f"{format_seconds(async_s)} with async_update ({finished_s / async_s:.2f}x)."
        )
    largest = under_peak(shown)[:NUM_TENSORS]
    if largest:
        names = ", ".join(f"{inert(h.name)} {format_bytes(h.num_bytes)}" for h in largest)
        lines.append(f"Largest tensors at the peak of {format_bytes(shown.peak_bytes)}: {names}.")
    return lines


def _decision(fit: BudgetFit) -> str:
    """Summary of the chosen plan, or of the minimum-memory plan if nothing fits."""
    shown, within = _shown_plan(fit), within_of(_shown_plan(fit))
    label = next(label for label, plan in shown_plans(fit) if plan is shown)
    does = "nothing is offloaded or recomputed" if within is None else decided(within)
    if fit.chosen is not None:
        return f"{label}: {does}."
    also = "" if label == MINIMUM_MEMORY else f", {label},"
    return (
        f"Nothing fits into {fit.limits}. The minimum-memory plan{also} would need "
        f"{format_bytes(fit.smallest_bytes)}: {does}."
    )
