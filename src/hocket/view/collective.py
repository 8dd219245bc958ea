"""Format a planned collective as text and JSON: schedules, reason for the choice, lower bound.

Also formats the choice of the order in which a data-parallel step sends its gradients.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from hocket.base.units import format_bytes, format_rate, format_seconds
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.wording import picked

if TYPE_CHECKING:
    from hocket.planners.communication.collective import CollectivePlan, Offer
    from hocket.planners.communication.priority import PropagationChoice

MAX_NAMES = 8
_TELLING = 1.005
"""Ratio below which a difference is not mentioned, because it would be printed as 1.00."""


def offers_table(plan: CollectivePlan) -> FittedTable:
    """Table of the bound and all schedules: rate, latency, trees, and time for the given size."""
    size = plan.size_bytes
    rows, styles = [["", "bound", _rate(plan.bound_bps), "100 %", "", "", ""]], [""]
    for offer in plan.offers:
        is_chosen = offer.name == plan.chosen.name
        rows.append([
            "✔" if is_chosen else "",
            offer.name,
            _rate(offer.rate_bps),
            f"{float(100 * offer.rate_bps / plan.bound_bps):.3g} %",
            format_seconds(offer.latency_s),
            str(len(offer.section.trees)),
            "" if size is None else format_seconds(offer.times.time_s(size)),
        ])  # fmt: skip
        styles.append("bold" if is_chosen else "")
    columns = (
        Column(title=""), name("schedule"), number("rate"), number("of bound"),
        number("latency", 2), number("trees", 1), number("time"),
    )  # fmt: skip
    return FittedTable(columns=columns, rows=rows, styles=styles).without_empty()


def _rate(rate_bps: Any) -> str:
    return format_rate(float(rate_bps), "B/s")


def why(plan: CollectivePlan) -> str:
    """Reason why the chosen schedule was preferred to the next best one."""
    others = [offer for offer in plan.offers if offer.name != plan.chosen.name]
    chosen = plan.chosen.name
    if not others:
        return f"{chosen}: nothing else is possible on these links"
    if plan.size_bytes is None:
        best = max(others, key=lambda offer: offer.rate_bps)
        # Rates are exact fractions, so equality is meaningful.
        if best.rate_bps == plan.chosen.rate_bps:
            return f"{chosen} has the same rate as {best.name} with fewer trees"
        gain = float(plan.chosen.rate_bps / best.rate_bps)
        if gain < _TELLING:
            return f"{chosen} has about the rate of {best.name}, the next"
        return f"{chosen} has {gain:.2f} times the rate of {best.name}, the next"
    best = min(others, key=lambda offer: offer.times.time_s(plan.size_bytes or 0))
    gain = best.times.time_s(plan.size_bytes) / plan.chosen.times.time_s(plan.size_bytes)
    size = format_bytes(plan.size_bytes)
    if gain < _TELLING:
        return f"{chosen} is as fast as {best.name}, the next, for {size}"
    return f"{chosen} is {gain:.2f} times as fast as {best.name}, the next, for {size}"


def limit(plan: CollectivePlan) -> str:
    """Name the links that bound the rate of every schedule."""
    from hocket.planners.communication.cuts import LinkCut

    certificate = plan.certificate
    unit = plan.fabric.unit_bps
    if isinstance(certificate, LinkCut):
        outside = [place for place in plan.fabric.places if place not in certificate.side]
        # A cut is the same from both sides; naming the smaller side makes the shorter sentence.
        fewer = min((list(certificate.side), outside), key=len)
        crossing = _rate(certificate.crossing * unit)
        return f"limited by the links around {_names(fewer)}: {crossing} cross that cut"
    price = certificate.price
    full = list(dict.fromkeys(arc.link for arc in plan.fabric.arcs if price[arc.channel] > 0))
    return f"limited by the links {_names(full)}, whose prices prove it"


def _names(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return ", ".join(listed[:MAX_NAMES]) + more


def as_dict(plan: CollectivePlan) -> dict[str, Any]:
    """The planned collective as data for ``--json``."""
    chosen = plan.chosen
    section = chosen.section.to_data()
    return {
        "collective": plan.collective,
        "cluster": plan.cluster.name,
        **picked(chosen.section, "ranks", "root", "num_chunks"),
        "algorithm": chosen.name,
        "rate_bps": float(chosen.rate_bps),
        "rate": str(chosen.rate_bps),
        "bound_bps": float(plan.bound_bps),
        "bound": str(plan.bound_bps),
        "gap": plan.gap,
        "latency_s": chosen.latency_s,
        "size_bytes": plan.size_bytes,
        "time_s": _time_s(plan, chosen),
        "num_trees": len(chosen.section.trees),
        "trees": section["trees"],
        "ways": section["ways"],
        "certificate": {"unit_bps": plan.fabric.unit_bps, **plan.certificate.to_data()},
        "offers": [
            {
                "algorithm": offer.name,
                "rate_bps": float(offer.rate_bps),
                "share_of_bound": float(offer.rate_bps / plan.bound_bps),
                "latency_s": offer.latency_s,
                "num_trees": len(offer.section.trees),
                "time_s": _time_s(plan, offer),
            }
            for offer in plan.offers
        ],
        "why": why(plan),
        "limit": limit(plan),
        "uses_peer_links_only": plan.fabric.is_peer_only,
        "plan_seconds": plan.plan_s,
    }


def _time_s(plan: CollectivePlan, offer: Offer) -> float | None:
    return None if plan.size_bytes is None else offer.times.time_s(plan.size_bytes)


# ── gradients ──


def propagation_table(travel: PropagationChoice) -> FittedTable:
    """Table of the lower bound and of the step time of each order of sending gradients."""
    bound_s = travel.lower_bound_s
    rows = [["", "lower bound: computing or communication alone", format_seconds(bound_s), ""]]
    for offer in travel.offers:
        over = f"{100 * (offer.step_s / bound_s - 1):.0f} %"
        mark = "✔" if offer is travel.chosen else ""
        rows.append([mark, offer.how.name, format_seconds(offer.step_s), over])
    columns = (Column(title=""), name("gradients sent"), number("step"), number("over bound"))
    return FittedTable(columns=columns, rows=rows)


def propagation_why(travel: PropagationChoice) -> str:
    """Times of computing and sending in a step, and the reason for the chosen order of
    gradients."""
    parts = (
        f"a step computes {format_seconds(travel.computes_s)} and sends "
        f"{format_seconds(travel.travels_s)}; {travel.why}"
    )
    size = travel.chosen.how.slice_bytes
    if not travel.chosen.how.crosses:
        return parts
    cut = f", slices of {format_bytes(int(size))}" if size != inf else ""
    return f"{parts}, {travel.gain():.2f} times wait-free{cut}: hocket.priority.wrap does it"


def propagation_as_dict(travel: PropagationChoice) -> dict[str, Any]:
    """The choice of a gradient order as data for ``--json``."""
    return {
        "chosen": travel.chosen.how.name,
        "gain": travel.gain(),
        **picked(travel, "lower_bound_s", "computes_s", "travels_s", "why"),
        "step_s": {offer.how.name: offer.step_s for offer in travel.offers},
    }
