"""The report of a step fitted into a memory budget: one HTML file without scripts.

Shows the plans, the memory curve before and after with the line of the budget, the storages at the
peak, step time against budget, and the policy of each block.
"""

from __future__ import annotations

from itertools import groupby

from hocket import __version__
from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.maker import PLAIN
from hocket.view.drawing import memory_card, svg_text
from hocket.view.fit import numbers, plans_table, sentences, under_peak
from hocket.view.names import inert
from hocket.view.page import Cell, ColumnHead, fitted, page_html, section, stats_html, table
from hocket.view.picture import memory_paths
from hocket.view.sections import PLAN_FILE, head_stats, next_steps, range_note
from hocket.view.spans import memory_envelope
from hocket.view.step_inputs import step_data
from hocket.view.wording import of_capacity, sentence

NUM_TENSORS = 12


def fit_report_html(fit: BudgetFit, plan_file: str = PLAN_FILE) -> str:
    """Render the report as one HTML text; its commands name ``plan_file``."""
    problem = fit.frontier.problem
    title = f"{inert(problem.graph.name)} within {format_bytes(fit.budget_bytes)}"
    shown_plan = fit.chosen or fit.frontier.smallest
    return page_html(
        title=title,
        lead=" ".join(sentence(line.rstrip(".")) for line in sentences(fit)[:2]),
        stats=_stats(fit, shown_plan),
        body=(
            section("plans", "Plans", fitted(plans_table(fit))),
            budgets_chart(fit),
            _next(fit, plan_file),
            _curves(fit, shown_plan),
            _tensors(shown_plan),
            _blocks(shown_plan),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )


def summary_html(fit: BudgetFit) -> str:
    """HTML of stats, plans, other budgets and memory curves, for the page of ``hocket ui``."""
    shown_plan = fit.chosen or fit.frontier.smallest
    return (
        f'<dl class="stats">{_stats(fit, shown_plan)}</dl>'
        + section("plans", "Plans", fitted(plans_table(fit)))
        + budgets_chart(fit)
        + _curves(fit, shown_plan)
    )


def _stats(fit: BudgetFit, shown_plan: Fitted) -> str:
    plain = fit.frontier.find(PLAIN)
    slower = (
        [] if plain is None else [f"{shown_plan.step_s / plain.step_s:.2f} times the plain step"]
    )
    gap = (
        []
        if fit.gap is None
        else [f"another plan could shorten the step by at most {format_percent(fit.gap)}"]
    )
    problem = fit.frontier.problem
    step = step_data(problem.graph)
    error = [note] if (note := range_note(problem, shown_plan.step_s)) else []
    hourly = problem.cluster.devices[0].kind.price_per_hour or None
    entries = [
        *head_stats(step, shown_plan.step_s, ", ".join(error + slower + gap), hourly),
        ("Peak", of_capacity(shown_plan.peak_bytes, fit.budget_bytes), "of the budget"),
        ("To the host", format_bytes(numbers(shown_plan)["offloaded_bytes"]), "per step"),
        ("Budget", format_bytes(fit.budget_bytes), _of_device(fit)),
        ("Least budget", format_bytes(fit.smallest_bytes),
         f"no plan needs less than {format_bytes(fit.lower_bound_bytes)}"),
    ]  # fmt: skip
    return stats_html(entries)


def _of_device(fit: BudgetFit) -> str:
    problem = fit.frontier.problem
    has, usable = problem.cluster.devices[0], int(problem.memory_bytes[0])
    return (
        f"of its {format_bytes(has.memory_bytes)} {inert(has.name)} lets tensors fill "
        f"{format_bytes(usable)}"
    )


def _curves(fit: BudgetFit, shown_plan: Fitted) -> str:
    plain = fit.frontier.find(PLAIN)
    shown = [] if plain is None or plain is shown_plan else [("before", plain)]
    shown.append(("after" if shown else "as it is", shown_plan))
    most = max(plan.peak_bytes for _, plan in shown)
    cards = "".join(_curve(name, plan, fit.budget_bytes, most) for name, plan in shown)
    note = '<p class="note">Bytes held over the step; the dashed line is the budget.</p>'
    return section("memory", "Memory", f'<div class="devices">{cards}</div>', note)


def _curve(name: str, plan: Fitted, budget_bytes: int, most: int) -> str:
    time_s, size = memory_envelope(plan.timeline, 0, 400)
    # Both curves use the scale of the larger peak, so that their heights can be compared.
    height = 92 * min(1.0, max(plan.peak_bytes, budget_bytes) / max(most, budget_bytes))
    curve = memory_paths(
        0, 400, 100 - height, height, time_s, size, plan.timeline.makespan_s, budget_bytes,
        plan.peak_bytes,
    )  # fmt: skip
    return memory_card(name, of_capacity(plan.peak_bytes, budget_bytes), curve)


def _tensors(shown_plan: Fitted) -> str:
    heads = [
        ColumnHead("Storage", "name code"),
        ColumnHead("Bytes", "number"),
        ColumnHead("Kind"),
        ColumnHead("Module", "name code"),
    ]
    lines: list[list[Cell]] = [
        [inert(held.name), format_bytes(held.num_bytes), held.role.name.lower().replace("_", " "),
         inert(held.module)]
        for held in under_peak(shown_plan)[:NUM_TENSORS]
    ]  # fmt: skip
    return section("peak", "Largest tensors at the peak", table(heads, lines))


def budgets_chart(fit: BudgetFit) -> str:
    """Chart of step time against memory for the plans of the frontier; the chosen one is marked."""
    plans = sorted(fit.frontier.best_of(), key=lambda plan: plan.peak_bytes)
    if len(plans) < 2:
        return ""
    most_bytes = plans[-1].peak_bytes
    low_s = min(plan.step_s for plan in plans)
    high_s = max(plan.step_s for plan in plans)
    width, height, left, top = 640, 220, 64, 12

    def at(plan: Fitted) -> tuple[float, float]:
        x = left + (width - left - 16) * plan.peak_bytes / most_bytes
        return x, top + (height - top - 34) * (1 - (plan.step_s / (1.1 * high_s)))

    base = height - 34
    parts = [f'<path class="grid" d="M{left} {top}V{base}H{width}"/>']
    for share in (0.25, 0.5, 0.75, 1.0):
        x = left + (width - left - 16) * share
        parts.append(
            svg_text(x, base + 16, format_bytes(int(share * most_bytes)), "muted", "middle")
        )
    for seconds in {low_s, high_s}:
        y = top + (base - top) * (1 - seconds / (1.1 * high_s))
        parts.append(svg_text(left - 6, y + 4, format_seconds(seconds), "muted", "end"))
    points = [at(plan) for plan in plans]
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts.append(f'<path class="memory-line" d="M{line}"/>')
    for plan, (x, y) in zip(plans, points, strict=True):
        chosen = ' class="chosen"' if plan is fit.chosen else ""
        shown_plan = f"{format_bytes(plan.peak_bytes)}: {format_seconds(plan.step_s)}"
        parts.append(
            f'<circle{chosen} cx="{x:.1f}" cy="{y:.1f}" r="{6 if chosen else 4}">'
            f"<title>{shown_plan}</title></circle>"
        )
    label = f"step time against memory, from {format_bytes(plans[0].peak_bytes)}"
    picture = (
        f'<svg class="curve budgets hocket-svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    note = (
        '<p class="note">Step time (up) against GPU memory (right) of the best plans; the chosen '
        "one is larger.</p>"
    )
    return section("budgets", "Other budgets", picture, note)


def _next(fit: BudgetFit, plan_file: str) -> str:
    budget = format_bytes(fit.budget_bytes).replace(" ", "")
    return next_steps(
        (
            f'train = hocket.prepare(model, optimizer, batch, memory="{budget}")',
            "in your training loop; then train.step(batch)",
        ),
        ("hocket show plan.json", "what each block does and what moves"),
        ("hocket run plan.json --steps 5", "a few steps here: predicted beside measured"),
        plan_file=plan_file,
    )


def _blocks(shown_plan: Fitted) -> str:
    if shown_plan.memory is None:
        return ""
    heads = [
        ColumnHead("Blocks", "name code"),
        ColumnHead("Activations"),
        ColumnHead("Parameters"),
        ColumnHead("Update"),
    ]

    def policy_of(number: int) -> tuple[str, str, str]:
        assert shown_plan.memory is not None
        block = shown_plan.memory.blocks[number]
        words: str = block.activations
        if words == "offloaded" and block.share < 1:
            words = f"{format_percent(block.share)} offloaded"
        if words == "recomputed":
            words += ", input on the host" if block.checkpoint == "offloaded" else ""
        return words, block.parameters, f"on the {block.update}"

    lines: list[list[Cell]] = []
    for words, indices in groupby(range(len(shown_plan.memory.blocks)), policy_of):
        run = list(indices)
        first, last = shown_plan.memory.blocks[run[0]].name, shown_plan.memory.blocks[run[-1]].name
        name = inert(first) if len(run) == 1 else f"{inert(first)} … {inert(last)}"
        lines.append([name, *words])
    return section("blocks", "What each block does", table(heads, lines))
