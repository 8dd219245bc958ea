"""The report: one HTML file that needs nothing else.

Tables, memory curves and a picture of the timeline are in the page itself, so it can be read
without scripts; a script turns the picture into a timeline to zoom and hover. A content security
policy allows exactly the style and the script of the page, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline
from hocket.view import sections
from hocket.view.facts import Facts, facts_of
from hocket.view.payload import MAX_MARKS, report_data
from hocket.view.picture import PHASES, draw_timeline, picture_css
from hocket.view.story import lead_sentence
from hocket.view.wording import sentence

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
# Two voices that alternate: what a hocket is.
LOGO = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 16" aria-hidden="true">'
    '<path fill="#3c72b4" d="M0 1h7v6H0zM16 1h7v6h-7z"/>'
    '<path fill="#c8752f" d="M8 9h7v6H8zM24 9h7v6h-7z"/></svg>'
)
"""The mark of the page, as SVG."""


def report_html(
    problem: Problem, plan: Plan, timeline: Timeline, comparison: Comparison | None = None
) -> str:
    """The report as one HTML text."""
    facts = facts_of(problem, plan, timeline)
    css = picture_css() + template("report.css")
    js = template("paint.js") + template("report.js")
    data = report_data(problem, timeline, facts)
    values = {
        "policy": policy(css, js),
        "generator": f"hocket {__version__}",
        "title": escape(facts.title),
        "icon": "data:image/svg+xml," + quote(LOGO),
        "css": css,
        "logo": LOGO,
        "lead": escape(_lead(facts)),
        "stats": sections.stats(facts),
        "candidates": sections.candidates(comparison),
        "picture": draw_timeline(problem, timeline, facts, width=1080, styled=False),
        "legend": _legend(facts),
        "timeline_note": _thinned_note(data),
        "modules": sections.modules(facts),
        "memory": sections.memory(problem, timeline, facts),
        "links": sections.links(facts),
        "path": sections.critical_path(problem, timeline, facts),
        "top_ops": sections.top_ops(facts),
        "plan": sections.plan_section(problem, plan, facts),
        "footer": escape(f"Predicted by simulation with hocket {__version__}."),
        "data": _script_json(data),
        "js": js,
    }
    return fill(template("report.html"), values)


def write_report(
    path: str | Path,
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    comparison: Comparison | None = None,
) -> None:
    """Write the report to a file."""
    write_atomically(path, report_html(problem, plan, timeline, comparison).encode())


def fill(page: str, values: Mapping[str, str]) -> str:
    """A template with its placeholders filled; values must be HTML already."""
    # One pass over the template: a value that looks like a placeholder is not filled again.
    return _PLACEHOLDER.sub(lambda match: values[match[1]], page)


def template(name: str) -> str:
    """A file of the folder of templates."""
    return (files("hocket.view") / "templates" / name).read_text("utf-8")


def policy(css: str, js: str) -> str:
    """The content security policy of a page with this style and this script."""

    def allowed(text: str) -> str:
        digest = hashlib.sha256(text.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    return (
        f"default-src 'none'; style-src {allowed(css)}; script-src {allowed(js)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _script_json(data: dict[str, Any]) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _lead(facts: Facts) -> str:
    sentences = (lead_sentence(facts), facts.bottleneck)
    return " ".join(sentence(text) for text in sentences if text)


def _legend(facts: Facts) -> str:
    names = [*PHASES, *(["transfer"] if facts.links else [])]
    return sections.legend([*((name, name) for name in names), ("critical", "critical path")])


def _thinned_note(data: dict[str, Any]) -> str:
    if not data["is_thinned"]:
        return ""
    return (
        f'<p class="note">More than {MAX_MARKS:,} spans: short neighbours are drawn as one, '
        "as high as they fill it. The trace has every span.</p>"
    )
