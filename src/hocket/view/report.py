"""The report of a plan: one self-contained HTML file.

Tables, memory curves and a picture of the timeline are part of the page and need no script. A
script turns the picture into a timeline that can be zoomed. A content security policy allows
exactly the style and script of the page, and no network request.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.base.units import format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline
from hocket.view import sections
from hocket.view.facts import Facts, facts_of
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.page import fill, fitted, legend, page_html, template
from hocket.view.payload import MAX_MARKS, report_data
from hocket.view.picture import PHASES, draw_timeline
from hocket.view.story import lead_sentence
from hocket.view.text import device_table
from hocket.view.wording import sentence

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison


def report_html(
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    comparison: Comparison | None = None,
    *,
    is_measured: bool = False,
    plan_file: str = sections.PLAN_FILE,
) -> str:
    """Render the report as one HTML text; its commands name ``plan_file``."""
    facts = facts_of(problem, plan, timeline)
    bound_s = None if comparison is None or comparison.bound is None else comparison.bound.seconds
    data = report_data(problem, timeline, facts, bound_s)
    timeline_section = fill(
        template("timeline.html"),
        {
            "title": escape(facts.title),
            "picture": draw_timeline(
                problem, timeline, facts, width=1080, styled=False, bound_s=bound_s
            ),
            "legend": _legend(facts),
            "timeline_note": _thinned_note(data),
        },
    )
    return page_html(
        title=facts.title,
        lead=_lead(facts, plan),
        stats=sections.stats(facts, problem, comparison, measured=is_measured),
        body=(
            sections.candidates(comparison),
            timeline_section,
            sections.next_steps(*_NEXT, plan_file=plan_file),
            sections.modules(facts),
            sections.memory(problem, timeline, facts),
            sections.links(facts),
            sections.critical_path(problem, timeline, facts),
            sections.top_ops(facts),
            sections.plan_section(problem, plan),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
        js=template("paint.js") + template("report.js"),
        data=data,
    )


def summary_html(
    problem: Problem, plan: Plan, timeline: Timeline, comparison: Comparison | None
) -> str:
    """HTML of stats, candidates and memory curves, for the page of ``hocket ui``."""
    facts = facts_of(problem, plan, timeline)
    return (
        f'<p class="lead">{escape(_lead(facts, plan))}</p>'
        f'<dl class="stats">{sections.stats(facts, problem, comparison)}</dl>'
        + sections.candidates(comparison)
        + sections.memory(problem, timeline, facts)
    )


def plan_html(problem: Problem, plan: Plan, timeline: Timeline) -> str:
    """HTML of a plan for a notebook: a sentence, its devices and a picture of the timeline."""
    facts = facts_of(problem, plan, timeline)
    limit = f"<br>{escape(facts.bottleneck)}" if facts.bottleneck else ""
    return (
        f'<div class="hocket-plan"><p><strong>{escape(facts.title)}</strong><br>'
        f"{escape(lead_sentence(facts))}{limit}</p>{fitted(device_table(facts))}"
        f"{draw_timeline(problem, timeline, facts, width=860, styled=True)}</div>"
    )


_NEXT = (
    ("hocket explain plan.json", "what limits this step and what would help"),
    ("hocket run plan.json --steps 5", "a few steps on random batches: predicted beside measured"),
    ("hocket launch plan.json train.py", "your training script, once per device of the plan"),
)


def write_report(
    path: str | Path,
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    comparison: Comparison | None = None,
    *,
    is_measured: bool = False,
) -> None:
    """Write the report to a file."""
    page = report_html(problem, plan, timeline, comparison, is_measured=is_measured)
    write_atomically(path, page.encode())


def _lead(facts: Facts, plan: Plan) -> str:
    """The strategy, its step time, and the limit of the step."""
    how = inert(str(plan.notes.get("how", "")), LONGEST_SENTENCE)
    first = f"{how}: {format_seconds(facts.step_s)} per step" if how else lead_sentence(facts)
    sentences = (first, facts.bottleneck)
    return " ".join(sentence(text) for text in sentences if text)


def _legend(facts: Facts) -> str:
    names = [*PHASES, *(["transfer"] if facts.links else [])]
    return legend([*((name, name) for name in names), ("critical", "critical path")])


def _thinned_note(data: dict[str, Any]) -> str:
    if not data["is_thinned"]:
        return ""
    return (
        f'<p class="note">More than {MAX_MARKS:,} spans: short neighbours are drawn as one, '
        "as high as they fill it. The trace has every span.</p>"
    )
