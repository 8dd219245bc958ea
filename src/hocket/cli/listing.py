"""``hocket list``: names of hardware, models, planners, policies and training programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated

import click

from hocket.cli.declare import argument, declare
from hocket.cli.output import console, emit

Names = list[tuple[str, str]]
"""Names, each with a description."""


def _presets() -> Names:
    from hocket.base.units import format_bytes
    from hocket.hardware.files import read_machine
    from hocket.hardware.kinds import PRESETS, preset_kinds
    from hocket.hardware.shorthand import machine_names

    kinds = [
        (name, f"one device, {format_bytes(entry.kind.memory_bytes)}: {entry.kind.source}")
        for name, entry in preset_kinds().items()
    ]
    machines = []
    for name in machine_names():
        cluster = read_machine(PRESETS / f"{name}.toml").cluster
        counts = Counter(device.kind.name for device in cluster.devices)
        found = " + ".join(f"{count} x {kind}" for kind, count in counts.items())
        machines.append((name, f"machine: {found}"))
    return kinds + machines


def _models() -> Names:
    from importlib.util import find_spec

    from hocket.transformer.counts import parameter_counts
    from hocket.transformer.files import find_model, preset_names
    from hocket.transformer.hf_cache import PREFIX, cached_names

    shapes = [(name, find_model(name)) for name in preset_names()]
    both = [
        (name, f"plan, parallel: {_billions(parameter_counts(shape).total)} billion parameters")
        for name, shape in shapes
    ]
    others: Names = []
    # Zoo models need PyTorch. find_spec answers without importing it, which takes seconds.
    if find_spec("torch") is not None:
        from hocket.capture import ZOO

        others = [(name, "plan") for name in ZOO if name not in preset_names()]
    cached = [(PREFIX + name, "from the cache of Hugging Face models") for name in cached_names()]
    return [*both, *others, *cached]


def _billions(count: int) -> str:
    return f"{count / 1e9:,.0f}" if count >= 1e11 else f"{count / 1e9:.3g}"


def _planners() -> Names:
    from hocket.planners import PLANNERS

    return [(name, _summary(planner)) for name, planner in PLANNERS.items()]


def _policies() -> Names:
    from hocket.fleet.policies import POLICIES

    return [(name, _summary(policy)) for name, policy in POLICIES.items()]


def _programs() -> Names:
    from hocket.planners.parallel.search_limits import PROGRAMS

    return [(name, f"schedules: {', '.join(can.schedules)}") for name, can in PROGRAMS.items()]


def _summary(function: object) -> str:
    first_paragraph = (getattr(function, "__doc__", None) or "").strip().split("\n\n")[0]
    return " ".join(first_paragraph.split())


LISTS: dict[str, Callable[[], Names]] = {
    "presets": _presets,
    "models": _models,
    "planners": _planners,
    "policies": _policies,
    "programs": _programs,
}


@declare("list")
def command(
    *,
    what: Annotated[str, argument(type=click.Choice(list(LISTS)))],
    as_json: bool,
) -> None:
    """List the names of hardware, models, planners, policies or training programs."""
    names = LISTS[what]()
    if as_json:
        emit({what: [{"name": name, "is": summary} for name, summary in names]})
        return
    from rich.table import Table
    from rich.text import Text

    shown = Table.grid(padding=(0, 2), pad_edge=True)
    shown.add_column(no_wrap=True)
    shown.add_column()
    for name, summary in names:
        shown.add_row(Text(name), Text(summary, style="dim"))
    console().print(shown)
