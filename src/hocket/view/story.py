"""Describe a plan in sentences: time on the critical path, waits with their cause, advice."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.base.units import format_percent as percent
from hocket.base.units import format_seconds
from hocket.plan.problem import Problem
from hocket.simulate.analysis import COMPUTE, EXCHANGES, TRANSFERS, PathStep
from hocket.simulate.timeline import Timeline
from hocket.view.facts import SHARING, Facts, step_name
from hocket.view.names import inert
from hocket.view.wording import count_of, held_of

NEARLY_FULL = 0.92
HALF = 0.5
ALWAYS = 0.9
"""Busy fraction from which idle time of a device is not worth advice."""
NOTABLE = 0.1
"""Fraction of the step above which a cause is mentioned."""


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """A step of the critical path, formatted for display."""

    number: int
    """Position in the path."""
    step: PathStep
    name: str
    place: str
    duration_s: float
    step_share: float
    reason: str


def lead_sentence(facts: Facts) -> str:
    """One sentence: step time, devices, ops and planner."""
    used = sum(1 for device in facts.devices if device.num_ops)
    by = f" placed by {facts.planner}" if facts.planner else ""
    return (
        f"one step takes {format_seconds(facts.step_s)} on {count_of(used, 'device')}, "
        f"with {count_of(facts.num_ops, 'op')}{by}"
    )


def sent_counts(facts: Facts) -> str:
    """Numbers of transfers, collectives and host copies, such as ``12 transfers and 48
    collectives``.
    """
    # A collective counts once, however many devices run it.
    num_exchanges = max((each.num_exchanges for each in facts.exchanges), default=0)
    counts = [count_of(facts.num_transfers, "transfer")] if facts.num_transfers else []
    counts += [count_of(num_exchanges, "collective")] if num_exchanges else []
    if num_copies := facts.copies.num_copies:
        counts.append(f"{num_copies:,} copies to and from the host")
    return " and ".join(counts) or count_of(0, "transfer")


def path_sentence(facts: Facts) -> str:
    """One line with the time of the critical path per cause."""
    parts = ", ".join(f"{cause} {percent(share)}" for cause, share in facts.path.shares.items())
    steps = count_of(len(facts.path.steps), "step")
    spent = f" = {parts}" if parts else ""
    return f"critical path: {steps}, {format_seconds(facts.step_s)}{spent}"


def longest_steps(
    problem: Problem, timeline: Timeline, facts: Facts, max_steps: int
) -> tuple[ShownStep, ...]:
    """The longest steps of the critical path, in order of time."""
    return tuple(shown_step(problem, timeline, facts, i) for i in facts.path.longest(max_steps))


def shown_step(problem: Problem, timeline: Timeline, facts: Facts, number: int) -> ShownStep:
    """Format one step of the critical path."""
    step = facts.path.steps[number]
    duration_s = step.end_s - step.start_s
    place = "link"
    if step.kind == "op":
        place = inert(problem.cluster.device_names[int(timeline.op_device[step.index])])
    return ShownStep(
        number=number,
        step=step,
        name=step_name(problem, timeline, step),
        place=place,
        duration_s=duration_s,
        step_share=duration_s / facts.step_s if facts.step_s > 0 else 0.0,
        reason=reason_text(step),
    )


def reason_text(step: PathStep) -> str:
    """The event after which a step started, and the time that it waited."""
    if step.reason == "start":
        return "the start"
    if step.wait_s <= 0:
        return step.reason
    waited = format_seconds(step.wait_s)
    return f"data, idle {waited}" if step.reason == "data" else f"{step.reason}, waited {waited}"


def headroom_sentence(facts: Facts) -> str:
    """Memory that each device type reserves; empty if no type reserves any."""
    kept: dict[tuple[str, int], int] = {}
    for device in facts.devices:
        if device.headroom_bytes > 0:
            key = (device.kind, device.headroom_bytes)
            kept[key] = max(kept.get(key, 0), device.capacity_bytes + device.headroom_bytes)
    parts = [f"{held_of(size, total)} on {kind}" for (kind, size), total in kept.items()]
    if not parts:
        return ""
    return f"headroom for context, workspaces and fragmentation: {', '.join(parts)}"


def advice(facts: Facts) -> tuple[str, ...]:
    """Suggest measures that would shorten the step, according to the timeline."""
    return tuple(line for line in (_compute(facts), _transfers(facts), _memory(facts)) if line)


def _compute(facts: Facts) -> str:
    share, queued = facts.path.shares.get(COMPUTE, 0.0), facts.path.device_share
    busiest = facts.busiest
    idlest = min(facts.devices, key=lambda device: device.busy_share)
    used = [device.busy_share for device in facts.devices if device.num_ops]
    if share < HALF:
        return ""
    if len(used) > 1 and sum(used) / len(used) < HALF and busiest.busy_share < ALWAYS:
        return (
            "overlap, since the devices compute one after another "
            f"({percent(sum(used) / len(used))} busy on average): a batch in parts, as a pipeline, "
            "lets them work at the same time"
        )
    if queued >= NOTABLE and idlest.busy_share < HALF:
        return (
            f"moving independent work from {busiest.name} ({percent(busiest.busy_share)} busy) to "
            f"{idlest.name} ({percent(idlest.busy_share)} busy): ops that take {percent(queued)} "
            "of the step had their data before their device was free"
        )
    if queued >= NOTABLE:
        return f"more or faster devices: {percent(share)} of the step is computing"
    return f"faster devices: {percent(share)} of the step is a chain of ops that need each other"


def _transfers(facts: Facts) -> str:
    moving = facts.path.shares.get(TRANSFERS, 0.0)
    sharing = facts.path.shares.get(SHARING, 0.0)
    exchanging = facts.path.shares.get(EXCHANGES, 0.0)
    if exchanging >= NOTABLE:
        return (
            "faster links between devices, or a plan that communicates less, such as a pipeline: "
            f"{percent(exchanging)} of the step is collectives"
        )
    if sharing >= NOTABLE:
        return (
            f"more bandwidth, first on {facts.links[0].name}: transfers that slow each other "
            f"down cost {percent(sharing)} of the step"
        )
    if moving >= NOTABLE:
        return f"fewer or smaller transfers, or faster links: {percent(moving)} of the step"
    return ""


def _memory(facts: Facts) -> str:
    full = facts.fullest
    if full.fullness < NEARLY_FULL:
        return ""
    used = held_of(full.peak_bytes, full.capacity_bytes)
    return f"memory on {full.name}, which leaves planners little choice ({used})"
