"""A plan in sentences: where its time goes, what starts late and why, what would help."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.plan.problem import Problem
from hocket.simulate.analysis import PathStep
from hocket.simulate.timeline import Timeline
from hocket.units import format_seconds
from hocket.view.facts import Facts, step_name
from hocket.view.names import inert
from hocket.view.wording import count_of, of_capacity, percent

REASONS = {
    "start": "the start of the step",
    "data": "its data",
    "device": "its device",
    "link": "its link",
}
"""What a step of the critical path started after."""
NEARLY_FULL = 0.92
BUSY = 0.7
IDLE = 0.4


@dataclass(frozen=True, kw_only=True)
class ToldStep:
    """A step of the critical path as it is shown."""

    number: int
    """Position in the path."""
    step: PathStep
    name: str
    place: str
    duration_s: float
    step_share: float
    reason: str


def lead_sentence(facts: Facts) -> str:
    """One sentence: what was planned and what it gives."""
    used = sum(1 for device in facts.devices if device.num_ops)
    by = f" placed by {facts.planner}" if facts.planner else ""
    return (
        f"one step takes {format_seconds(facts.step_s)} on {count_of(used, 'device')}, "
        f"with {count_of(facts.num_ops, 'op')}{by}"
    )


def path_sentence(facts: Facts) -> str:
    """Where the time of the critical path goes."""
    parts = ", ".join(f"{cause} {percent(share)}" for cause, share in facts.path.shares.items())
    steps = count_of(len(facts.path.steps), "step")
    return f"critical path: {steps}, {format_seconds(facts.step_s)}" + (
        f" = {parts}" if parts else ""
    )


def longest_steps(
    problem: Problem, timeline: Timeline, facts: Facts, max_steps: int
) -> tuple[ToldStep, ...]:
    """The longest steps of the critical path, in the order in which they happen."""
    steps = facts.path.steps
    by_length = sorted(range(len(steps)), key=lambda i: (steps[i].start_s - steps[i].end_s, i))
    return tuple(told(problem, timeline, facts, i) for i in sorted(by_length[:max_steps]))


def told(problem: Problem, timeline: Timeline, facts: Facts, number: int) -> ToldStep:
    """One step of the critical path as it is shown."""
    step = facts.path.steps[number]
    duration_s = step.end_s - step.start_s
    place = "link"
    if step.kind == "op":
        place = inert(problem.cluster.device_names[int(timeline.op_device[step.index])])
    return ToldStep(
        number=number,
        step=step,
        name=step_name(problem, timeline, step),
        place=place,
        duration_s=duration_s,
        step_share=duration_s / facts.step_s if facts.step_s > 0 else 0.0,
        reason=reason_text(step),
    )


def reason_text(step: PathStep) -> str:
    """What a step started after, and how long it had to wait for it."""
    reason = REASONS.get(step.reason, step.reason)
    return f"{reason}, {format_seconds(step.wait_s)} later" if step.wait_s > 0 else reason


def advice(facts: Facts) -> tuple[str, ...]:
    """What would shorten the step, as far as the timeline tells."""
    found: list[str] = []
    busiest = facts.busiest
    idlest = min(facts.devices, key=lambda device: device.busy_share)
    moving = facts.path.shares.get("transfers", 0.0)
    if busiest.busy_share >= BUSY and idlest.busy_share <= IDLE:
        found.append(
            f"moving work from {busiest.name} ({percent(busiest.busy_share)} busy) "
            f"to {idlest.name} ({percent(idlest.busy_share)} busy)"
        )
    elif busiest.busy_share >= BUSY:
        found.append(
            f"faster devices: {busiest.name} computes {percent(busiest.busy_share)} of the step"
        )
    if facts.links and facts.links[0].busy_share >= BUSY:
        link = facts.links[0]
        found.append(f"more bandwidth on {link.name} ({percent(link.busy_share)} busy)")
    elif moving >= 0.15:
        found.append(f"fewer or smaller transfers: they are {percent(moving)} of the critical path")
    if busiest.busy_share < BUSY and moving < 0.15 and len(facts.devices) > 1:
        found.append(
            "more independent work: the ops of the critical path depend on each other, "
            "so other devices wait"
        )
    full = facts.fullest
    if full.fullness >= NEARLY_FULL:
        used = of_capacity(full.peak_bytes, full.capacity_bytes)
        found.append(f"memory on {full.name}, which leaves the planner little choice ({used})")
    return tuple(found)
