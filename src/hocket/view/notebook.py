"""A plan as a small piece of HTML for notebooks: what ``_repr_html_`` returns."""

from __future__ import annotations

from html import escape

from hocket.base.units import format_percent
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline
from hocket.view.facts import facts_of
from hocket.view.page import ColumnHead, table
from hocket.view.picture import draw_timeline
from hocket.view.story import lead_sentence
from hocket.view.wording import of_capacity


def plan_html(problem: Problem, plan: Plan, timeline: Timeline) -> str:
    """The step in a sentence, a table of the devices and the picture of the timeline."""
    facts = facts_of(problem, plan, timeline)
    heads = (
        ColumnHead("Device"),
        ColumnHead("Kind"),
        ColumnHead("Ops"),
        ColumnHead("Busy"),
        ColumnHead("Peak memory"),
    )
    rows = [
        [
            device.name,
            device.kind,
            f"{device.num_ops:,}",
            format_percent(device.busy_share),
            of_capacity(device.peak_bytes, device.capacity_bytes) + ("" if device.fits else " ✗"),
        ]
        for device in facts.devices
    ]
    picture = draw_timeline(problem, timeline, facts, width=860, styled=True)
    limit = f"<br>{escape(facts.bottleneck)}" if facts.bottleneck else ""
    return (
        f'<div class="hocket-plan"><p><strong>{escape(facts.title)}</strong><br>'
        f"{escape(lead_sentence(facts))}{limit}</p>{table(heads, rows)}{picture}</div>"
    )
