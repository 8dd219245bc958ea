"""A step that was fitted into a budget: the table of plans, what was decided, plain data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.graph.graph import Role
from hocket.planners.memory.blocks import inner_label
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.maker import FULL_OFFLOAD, FULL_RECOMPUTE, PLAIN
from hocket.simulate.at_peak import HeldStorage, held_at_peak
from hocket.simulate.rewriting.step import moved_bytes
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable
from hocket.view.wording import count_of

OURS = "ours"
NUM_TENSORS = 5
USUAL = (PLAIN, FULL_RECOMPUTE, FULL_OFFLOAD)


def shown_plans(fit: BudgetFit) -> list[tuple[str, Fitted]]:
    """The usual plans by their names, then the chosen one; where that is a usual one, only it."""
    usual = [(name, plan) for name in USUAL if (plan := fit.frontier.find(name)) is not None]
    if fit.chosen is None:
        return [*usual, ("leanest", fit.frontier.smallest)]
    if any(plan is fit.chosen for _, plan in usual):
        return usual
    return [*usual, (OURS, fit.chosen)]


def recomputed_flops(plan: Fitted) -> float:
    """Arithmetic that is done again in one step."""
    if plan.memory is None:
        return 0.0
    graph = plan.step.rewritten.graph
    again = np.array([name.endswith("@again") for name in graph.op_names])
    return float(graph.flops[again].sum())


def resident_parameter_bytes(plan: Fitted) -> int:
    """Bytes of parameters that are on the device at all times."""
    graph = plan.step.rewritten.graph
    there = (graph.tensor_role == Role.PARAMETER) & (graph.tensor_producer < 0)
    return int(graph.held_bytes[there].sum())


def offloaded_bytes(plan: Fitted) -> int:
    """Bytes that go to the host in one step."""
    return 0 if plan.memory is None else moved_bytes(plan.step.rewritten)[0]


def data(fit: BudgetFit) -> dict[str, Any]:
    """The result as plain data; the numbers are those of the chosen plan, or of the leanest where
    nothing fits."""
    told = fit.chosen or fit.frontier.smallest
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
        "lower_bound_bytes": fit.lower_bound_bytes,
        "lower_bound_s": fit.bound_s,
        "gap": fit.gap,
        "recompute_alone_s": fit.recompute_alone_s,
        "chosen": told.name,
        **_numbers(told),
        "plan_seconds": fit.frontier.plan_seconds,
        "host_updates": fit.update_orders
        and {
            "step_s": fit.update_orders.step_s,
            "bound_s": fit.update_orders.bound_s,
            "gain": fit.update_orders.gain,
        },
        "loss_chunks": 1 if told.memory is None else told.memory.loss_chunks,
        "blocks": told.blocks.num_blocks,
        "expert_groups": _expert_groups(told),
        "candidates": [{"name": name, **_numbers(plan)} for name, plan in shown_plans(fit)],
        "frontier": [
            {"peak_bytes": plan.peak_bytes, "step_s": plan.step_s}
            for plan in fit.frontier.best_of()
        ],
        "at_peak": [
            {"tensor": held.name, "bytes": held.num_bytes, "module": held.module}
            for held in under_peak(told)[:NUM_TENSORS]
        ],
    }


def _expert_groups(plan: Fitted) -> int:
    """The most groups that batched experts of a block come in."""
    blocks = () if plan.memory is None else plan.memory.blocks
    return max((block.expert_groups for block in blocks), default=1)


def _numbers(plan: Fitted) -> dict[str, Any]:
    to_host, from_host = (0, 0) if plan.memory is None else moved_bytes(plan.step.rewritten)
    return {
        "step_s": plan.step_s,
        "peak_bytes": plan.peak_bytes,
        "offloaded_bytes": to_host,
        "fetched_bytes": from_host,
        "recomputed_flops": recomputed_flops(plan),
        "resident_parameters": resident_parameter_bytes(plan),
    }


def under_peak(plan: Fitted) -> list[HeldStorage]:
    """What the device holds when it is fullest, the largest first."""
    return held_at_peak(plan.step.problem, plan.timeline)


def fit_table(fit: BudgetFit) -> RenderableType:
    """A line per plan, then what the chosen one does and what fills the peak."""
    columns = (
        Column(title=""),
        Column(title="plan", is_name=True),
        Column(title="step", align="right"),
        Column(title="peak memory  ", align="right"),
        Column(title="to host", align="right", rank=1),
        Column(title="from host", align="right", rank=2),
        Column(title="recomputed", align="right", rank=3),
    )
    lines = [_cells(fit, name, plan) for name, plan in shown_plans(fit)]
    return Group(FittedTable(columns=columns, rows=lines), Text(), *map(Text, sentences(fit)))


def _cells(fit: BudgetFit, name: str, plan: Fitted) -> list[Text]:
    fits = plan.peak_bytes <= fit.budget_bytes
    is_chosen = plan is fit.chosen
    peak = f"{format_bytes(plan.peak_bytes)} {' ' if fits else '✗'}"
    numbers = _numbers(plan)
    flops = float(fit.frontier.problem.graph.flops.sum())
    share = numbers["recomputed_flops"] / flops if flops else 0.0
    cells = [
        "✔" if is_chosen else "",
        name,
        format_seconds(plan.step_s),
        peak,
        format_bytes(numbers["offloaded_bytes"]),
        format_bytes(numbers["fetched_bytes"]),
        format_percent(share),
    ]
    style = "bold" if is_chosen else "" if fits else "dim"
    return [Text(cell, style=style) for cell in cells]


def sentences(fit: BudgetFit) -> list[str]:
    """What was decided, how good it is and what fills the device."""
    told = fit.chosen or fit.frontier.smallest
    lines = [f"{told_name(fit)}: {decided(told)}."]
    if fit.gap is not None and fit.bound_s is not None:
        lines.append(
            f"No plan of these ways within {format_bytes(fit.budget_bytes)} takes less than "
            f"{format_seconds(fit.bound_s)} (gap {format_percent(fit.gap)}); "
            f"no plan at all needs less than {format_bytes(fit.lower_bound_bytes)}."
        )
    alone = fit.recompute_alone_s
    lines.append(
        "With nothing on the host, and recomputing only what this budget asks for, a step "
        + ("does not fit." if alone is None else f"takes {format_seconds(alone)} at best.")
    )
    if (orders := fit.update_orders) is not None:
        times = ", ".join(f"{format_seconds(s)} {name}" for name, s in orders.step_s.items())
        lines.append(
            f"With updates on the host a step among many takes {times} (so they run; "
            f"{orders.gain:.2f}x)."
        )
    largest = under_peak(told)[:NUM_TENSORS]
    if largest:
        names = ", ".join(f"{inert(h.name)} {format_bytes(h.num_bytes)}" for h in largest)
        lines.append(f"Under the peak of {format_bytes(told.peak_bytes)}: {names}.")
    return lines


def told_name(fit: BudgetFit) -> str:
    """The plan that the sentences are about."""
    return next(
        (n for n, p in shown_plans(fit) if p is (fit.chosen or fit.frontier.smallest)), OURS
    )


def decided(plan: Fitted) -> str:
    """The memory section in a sentence."""
    if plan.memory is None:
        return "nothing is moved or made again"
    blocks = plan.memory.blocks
    counts = Counter(_policy_words(block.activations, block.tensors) for block in blocks)
    parts = [f"{count_of(number, 'block')} {words}" for words, number in counts.items()]
    streamed = sum(block.parameters == "streamed" for block in blocks)
    at_home = sum(block.update == "host" for block in blocks)
    if streamed:
        parts.append(f"parameters of {streamed} streamed")
    if at_home:
        parts.append(f"{at_home} updated on the host")
    visiting = sum(block.parameters == "streamed" and block.update == "device" for block in blocks)
    if visiting:
        parts.append(f"{visiting} updated on the device, where their state comes to")
    members = sum(bool(inner_label(block.name)) for block in blocks)
    if members:
        parts.append(f"{members} of the blocks are members of lists inside others")
    if (groups := _expert_groups(plan)) > 1:
        divided = sum(block.expert_groups > 1 for block in blocks)
        parts.append(f"experts of {divided} in {groups} groups")
    if plan.memory.loss_chunks > 1:
        parts.append(f"the loss in {plan.memory.loss_chunks} chunks")
    return ", ".join(parts)


def _policy_words(activations: str, tensors: tuple[str, ...]) -> str:
    return "recomputed in part" if activations == "recomputed" and tensors else activations
