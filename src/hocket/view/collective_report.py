"""The report of a planned collective: one HTML file without scripts.

Shows the schedules, a drawing of each tree over the topology, the links that bound the rate, and
the load of each link. Ranks are drawn on a circle in their order. Switches and other places that
only forward are inside the circle.
"""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise

from hocket import __version__
from hocket.base.units import format_bytes, format_percent, format_rate, format_seconds
from hocket.plan.sections.communication import Send, Tree
from hocket.planners.communication.collective import CollectivePlan
from hocket.view.collective import limit, offers_table, why
from hocket.view.names import inert
from hocket.view.page import Cell, ColumnHead, fitted, page_html, section, stats_html, table
from hocket.view.sections import next_steps
from hocket.view.wording import sentence

MAX_TREES = 24
MAX_LINKS = 60
_SIDE, _RADIUS = 220, 84
_BLUE, _ORANGE, _GREY = "#3c72b4", "#c8752f", "#9aa0a6"
Point = tuple[float, float]


def collective_report_html(plan: CollectivePlan) -> str:
    """Render the report as one HTML text."""
    return page_html(
        title=f"{plan.collective} on {inert(plan.cluster.name)}",
        lead=f"{sentence(inert(why(plan), 400))} {sentence(inert(limit(plan), 400))}",
        stats=_stats(plan),
        body=(
            section("schedules", "Schedules", fitted(offers_table(plan))),
            _next(plan),
            _trees(plan),
            _links(plan),
        ),
        footer=f"Planned with hocket {__version__}; the certificate was checked.",
    )


def _stats(plan: CollectivePlan) -> str:
    chosen, size = plan.chosen, plan.size_bytes
    bound = format_rate(float(plan.bound_bps), "B/s")
    entries = [
        ("Ranks", str(len(chosen.section.ranks)), ", ".join(map(inert, chosen.section.ranks[:8]))),
        ("Rate", format_rate(float(chosen.rate_bps), "B/s"), chosen.name),
        ("Upper bound", bound, f"proven; this schedule reaches {format_percent(1 - plan.gap)}"),
        ("Latency", format_seconds(chosen.latency_s), f"{chosen.times.num_levels} steps"),
        ("Trees", str(len(chosen.section.trees)), ""),
    ]
    if size is not None:
        taken = format_seconds(chosen.times.time_s(size))
        entries.insert(1, ("Time", taken, f"for {format_bytes(size)}"))
    # The speed-up is stated over rings, because NCCL uses those.
    rings = next((offer for offer in plan.offers if offer.name.startswith("ring")), None)
    if rings is not None and rings is not chosen:
        gain = float(chosen.rate_bps / rings.rate_bps)
        entries.insert(1, ("Speed-up", f"{gain:.2f} x", f"over {rings.name}"))
    return stats_html(entries)


def _next(plan: CollectivePlan) -> str:
    names = plan.cluster.device_names
    gpus = ",".join(str(names.index(rank)) for rank in plan.chosen.section.ranks)
    on = inert(plan.cluster.name)
    return next_steps(
        (
            f"hocket collective {plan.collective} --on {on} --gpus {gpus} --export trees.json",
            "the schedule as a program for MSCCL++; .graph.xml for NCCL",
        ),
        (
            'import hocket.torch_backend; torch.distributed.init_process_group("hocket")',
            "planned trees in a PyTorch program",
        ),
    )


def _links(plan: CollectivePlan) -> str:
    links = {link.name: link for link in plan.cluster.links}
    loads = plan.chosen.section.loads(plan.cluster)
    full = sorted(
        ((float(load * plan.chosen.rate_bps) / links[name].bandwidth_bps, name, src)
         for (name, src), load in loads.items()),
        key=lambda entry: (-entry[0], entry[1], entry[2]),
    )  # fmt: skip
    heads = [
        ColumnHead("Link"),
        ColumnHead("From"),
        ColumnHead("Busy", "number"),
        ColumnHead("Capacity", "number"),
    ]
    lines: list[list[Cell]] = [
        [inert(name), inert(src) or "any end", format_percent(share),
         format_rate(links[name].bandwidth_bps, "B/s")]
        for share, name, src in full[:MAX_LINKS]
    ]  # fmt: skip
    return section("links", "Links at the full rate", table(heads, lines))


# ── drawings ─────────────────────────────────────────────────────────────────────────────────────


def _trees(plan: CollectivePlan) -> str:
    shown = sorted(plan.chosen.section.trees, key=lambda tree: -tree.share)[:MAX_TREES]
    at = _places(plan)
    drawn = "".join(_tree(plan, tree, at) for tree in shown)
    more = len(plan.chosen.section.trees) - len(shown)
    note = f'<p class="note">{more} lighter trees are not drawn.</p>' if more else ""
    return section("trees", "Trees over the topology", f"<div>{drawn}</div>{note}")


def _places(plan: CollectivePlan) -> dict[str, Point]:
    """Position of each place: ranks on a circle, other places on a smaller circle inside it."""
    fabric = plan.fabric
    ranks, others = fabric.places[: fabric.num_ranks], fabric.places[fabric.num_ranks :]
    at: dict[str, Point] = {}
    # A single place inside is drawn at the centre (radius 0).
    for names, radius in ((ranks, _RADIUS), (others, _RADIUS * (0.45 if len(others) > 1 else 0))):
        for index, name in enumerate(names):
            angle = 2 * math.pi * index / max(len(names), 1) - math.pi / 2
            centre = _SIDE / 2
            at[name] = (centre + radius * math.cos(angle), centre + radius * math.sin(angle))
    return at


def _tree(plan: CollectivePlan, tree: Tree, at: dict[str, Point]) -> str:
    pairs = {(arc.tail, arc.head) for arc in plan.fabric.arcs if arc.tail < arc.head}
    places = plan.fabric.places
    lines = [_line(at[places[a]], at[places[b]], "#ccd1d6", 1) for a, b in sorted(pairs)]
    drawn = tree.broadcast or tree.reduce
    lines += [_arrow(send, at) for send in drawn]
    marks = []
    for index, (name, (x, y)) in enumerate(at.items()):
        is_rank = index < plan.fabric.num_ranks
        colour = _ORANGE if name == tree.root else _BLUE if is_rank else _GREY
        size = 9 if is_rank else 5
        label = inert(name, 40)
        text = f'<text x="{x:.1f}" y="{y + 3:.1f}" font-size="8" fill="#fff" ' \
               f'text-anchor="middle">{index if is_rank else ""}</text>'  # fmt: skip
        marks.append(
            f'<g><title>{escape(label)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" '
            f'fill="{colour}"/>{text}</g>'
        )
    caption = f"{escape(inert(tree.root, 40))}: {tree.share} of the message"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIDE} {_SIDE + 18}" '
        f'width="{_SIDE}" height="{_SIDE + 18}" role="img" aria-label="{caption}">'
        f'{"".join(lines)}{"".join(marks)}<text x="{_SIDE / 2}" y="{_SIDE + 12}" font-size="11" '
        f'fill="currentColor" text-anchor="middle">{caption}</text></svg>'
    )


def _arrow(send: Send, at: dict[str, Point]) -> str:
    points = [at[send.hops[0][1]], *(at[dst] for _, _, dst in send.hops)]
    lines = "".join(_line(a, b, _BLUE, 3) for a, b in pairwise(points))
    return lines + _head(points[-2], points[-1])


def _line(a: Point, b: Point, colour: str, width: float) -> str:
    return (
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" '
        f'stroke="{colour}" stroke-width="{width}"/>'
    )


def _head(a: Point, b: Point) -> str:
    """Arrow head: a triangle that touches the circle of the destination (radius 9)."""
    length = math.dist(a, b) or 1.0
    ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    x, y = b[0] - 9 * ux, b[1] - 9 * uy
    corners = ((x, y), (x - 7 * ux + 4 * uy, y - 7 * uy - 4 * ux),
               (x - 7 * ux - 4 * uy, y - 7 * uy + 4 * ux))  # fmt: skip
    listed = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
    return f'<polygon points="{listed}" fill="{_BLUE}"/>'
