"""Frame and building blocks of every HTML report.

A report is one self-contained HTML file. A content security policy allows exactly its own style and
script, and no network request. Every text of unknown origin passes `escape`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hocket import __version__
from hocket.view.drawing import picture_css

if TYPE_CHECKING:
    from hocket.view.table import Column, FittedTable

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
# Two alternating voices: the musical form called hocket.
LOGO = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 16" aria-hidden="true">'
    '<path fill="#3c72b4" d="M0 1h7v6H0zM16 1h7v6h-7z"/>'
    '<path fill="#c8752f" d="M8 9h7v6H8zM24 9h7v6h-7z"/></svg>'
)
"""Logo of the page, as SVG."""


def page_html(
    *,
    title: str,
    footer: str,
    body: Sequence[str],
    lead: str = "",
    stats: str = "",
    css: str = "",
    js: str = "",
    data: Mapping[str, Any] | None = None,
    connects: bool = False,
) -> str:
    """Render a report: ``title``, ``lead`` and ``footer`` are text, ``stats`` and ``body`` HTML.

    ``css`` is appended to the common style. ``js`` finds ``data`` as JSON in the element with id
    "data". With ``connects`` the script may send requests to the page's own server.
    """
    style = picture_css() + template("report.css") + css
    script = "" if data is None else _data_element(data)
    script += f"<script>{js}</script>\n" if js else ""
    values = {
        "policy": policy(style, js) + ("; connect-src 'self'" if connects else ""),
        "generator": f"hocket {__version__}",
        "title": escape(title),
        "icon": "data:image/svg+xml," + quote(LOGO),
        "css": style,
        "logo": LOGO,
        "lead": f'<p class="lead">{escape(lead)}</p>\n' if lead else "",
        "stats": f'<dl class="stats">{stats}</dl>\n' if stats else "",
        "body": "\n".join(part for part in body if part),
        "footer": escape(footer),
        "script": script,
    }
    return fill(template("page.html"), values)


def fill(page: str, values: Mapping[str, str]) -> str:
    """Fill the placeholders of a template; values must be HTML already."""
    # One pass over the template, so that a value that looks like a placeholder is not filled again.
    return _PLACEHOLDER.sub(lambda match: values[match[1]], page)


def template(name: str) -> str:
    """Content of a template file."""
    return (files("hocket.view") / "templates" / name).read_text("utf-8")


def policy(css: str, js: str) -> str:
    """Content security policy for a page with this style and this script."""

    def allowed(text: str) -> str:
        # Browsers run inline style and script only if their SHA-256 is listed.
        digest = hashlib.sha256(text.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    return (
        f"default-src 'none'; style-src {allowed(css)}; script-src {allowed(js)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def stats_html(entries: Iterable[tuple[str, Cell, str]]) -> str:
    """HTML of the most important numbers: name, value and a note on each."""
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{_html(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in entries
    )


def _data_element(data: Mapping[str, Any]) -> str:
    """Script element with JSON; escaped so that no value can close the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="data">{text}</script>\n'


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Html:
    """Text that is HTML already and must not be escaped."""

    text: str


Cell = str | Html


def _html(cell: Cell) -> str:
    return cell.text if isinstance(cell, Html) else escape(cell)


@dataclass(frozen=True)
class ColumnHead:
    """Title of a column, with CSS classes that its cells share."""

    title: str
    classes: str = ""


def table(
    heads: Sequence[ColumnHead], rows: Iterable[Sequence[Cell]], row_classes: Sequence[str] = ()
) -> str:
    """HTML table with a title for each column; it scrolls sideways if it is too wide."""
    top = "".join(
        f'<th scope="col"{_classes(head.classes)}>{escape(head.title)}</th>' for head in heads
    )
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(
            f"<td{_classes(head.classes)}>{_html(cell)}</td>"
            for head, cell in zip(heads, row, strict=True)
        )
        lines.append(f"<tr{_classes(row_classes[index] if row_classes else '')}>{cells}</tr>")
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def fitted(shown: FittedTable) -> str:
    """HTML of a terminal table; columns that the terminal may drop are hidden on phones."""
    heads = [
        ColumnHead(column.title.strip()[:1].upper() + column.title.strip()[1:], _classes_of(column))
        for column in shown.columns
    ]
    rows = [
        [_cell(column, cell.plain.strip()) for column, cell in zip(shown.columns, row, strict=True)]
        for row in shown.cells
    ]
    names = {"bold": "chosen", "dim": "infeasible"}
    return table(heads, rows, [names.get(style, "") for style in shown.styles])


def _classes_of(column: Column) -> str:
    if not column.title and not column.is_name:
        return "tick"
    words = ["name"] * column.is_name + ["nowrap"] * column.is_share
    words += ["number"] * (column.align == "right" and not column.is_share)
    return " ".join(words + ["wide"] * (column.rank > 0))


def _cell(column: Column, text: str) -> Cell:
    if text == "✔":
        return Html('✔<span class="visually-hidden"> chosen</span>')
    if text.endswith("✗"):
        return Html(f'<span class="over">{escape(text)}</span>')
    if column.is_share and text.endswith("%"):
        # Cells such as "<1 %" have a sign before the number.
        return Html(bar(float(text.strip("<% ")) / 100) + escape(text))
    return text


def _classes(names: str) -> str:
    return f' class="{names}"' if names else ""


def options_html(values: Iterable[str]) -> str:
    """HTML options of a selection list."""
    return "".join(f'<option value="{escape(value)}"></option>' for value in values)


def section(name: str, title: str, *content: str) -> str:
    """Section with a heading."""
    return (
        f'<section aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>'
        f"{''.join(content)}</section>"
    )


def bar(share: float, kind: str = "") -> str:
    """Small bar filled to the fraction ``share``; hidden from screen readers, which read the
    number.
    """
    filled = 100 * min(max(share, 0.0), 1.0)
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="8"/>'
        f'<rect class="fill {kind}" width="{filled:.1f}" height="8"/></svg>'
    )


def stack(shares: Sequence[float], classes: Sequence[str]) -> str:
    """One bar divided into coloured fractions."""
    left, parts = 0.0, []
    for share, name in zip(shares, classes, strict=True):
        # A gap of 0.15 % separates neighbouring parts.
        width = max(100 * share - 0.15, 0.0)
        parts.append(f'<rect class="{name}" x="{left:.2f}" width="{width:.2f}" height="8"/>')
        left += 100 * share
    return (
        '<svg class="stack" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="8"/>{"".join(parts)}</svg>'
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Legend of colours, from pairs of (CSS class, label)."""
    items = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" '
        f'height="10"/></svg>{escape(label)}</li>'
        for name, label in entries
    )
    return f'<ul class="legend">{items}</ul>'
