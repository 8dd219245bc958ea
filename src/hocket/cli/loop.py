"""``hocket loop``: explain how the loops of a Python function can run in parallel.

The file is parsed and never executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.output import answer


@click.group("loop")
def command() -> None:
    """Analyse serial loops: which can run in parallel, and how."""


@declare("explain", command)
def explain(
    *,
    target: Annotated[str, argument("FILE.py:FUNCTION")],
    data: Annotated[
        Path | None, "Arguments by name in an .npz file; then sizes, balance and times are known."
    ] = None,
    ordered: Annotated[bool, "Dependent iterations keep the loop's order."] = False,
    permit: Annotated[
        tuple[str, ...], option("May be buffered (repeatable).", metavar="ARRAY")
    ] = (),
    workers: Annotated[
        int | None, option("Default: all cores.", type=click.IntRange(1, 4096))
    ] = None,
    as_json: bool,
) -> None:
    """Describe how the loops of FUNCTION run: dependences, schedule, refusals. FILE is not run.

    Options that the file's own @parallel_for(...) gives hold where none is given here.
    """
    import os

    from hocket.base.errors import UsageError, unknown_name
    from hocket.loops.decide import Settings
    from hocket.loops.explain import explain_data, explain_source
    from hocket.loops.function import permitted, rates_of
    from hocket.loops.job import run_in_turn
    from hocket.loops.runner import SiteRunner
    from hocket.loops.source import parsed_source

    path, separator, function = target.rpartition(":")
    if not separator or not path or not function:
        raise UsageError(f"{target!r} names no function", hint="write file.py:function")
    if ordered and permit:
        raise UsageError("--ordered and --permit contradict each other", hint="leave out one")
    source = parsed_source(path, function)
    for name in permit:
        if name not in source.parameters:
            raise unknown_name("argument", name, source.parameters, where="--permit")
    written = source.options
    given = dict.fromkeys(permit, "buffer")
    if not ordered and not permit:
        ordered, given = bool(written.get("ordered")), dict(written.get("permit") or {})
    rules = permitted(given)
    # Cores that this process may use; in containers fewer than os.cpu_count().
    num_workers = workers or written.get("workers") or len(os.sched_getaffinity(0))
    settings = Settings(num_workers, run_in_turn, ordered, tuple(rules), rates_of(rules))
    if data is None:
        found = explain_source(source, settings)
    else:
        variables = _arguments(data, source.parameters, source.required)
        runners = {s.number: SiteRunner(source, s, settings) for s in source.all_sites}
        found = explain_data(source, settings, runners, variables)
    answer(as_json, found.as_dict(), str(found))


def _arguments(
    path: Path, parameters: tuple[str, ...], required: tuple[str, ...]
) -> dict[str, Any]:
    """Read arrays and numbers by the names of the function's parameters."""
    from hocket.base.errors import InputFileError, unknown_name
    from hocket.base.npz import read_npz

    found = read_npz(path, hint="write it with numpy.savez(path, name=array, ...)")
    for name in found:
        if name not in parameters:
            raise unknown_name("argument", name, parameters, where=str(path))
    missing = [name for name in required if name not in found]
    if missing:
        wanted = ", ".join(f"{name}={name}" for name in missing)
        raise InputFileError(
            f"lacks what the function needs: {', '.join(missing)}",
            hint=f"write them beside the others: numpy.savez(path, {wanted}, ...)",
            where=str(path),
        )
    # Zero-dimensional arrays are how .npz files store numbers.
    return {name: value if value.ndim else value.item() for name, value in found.items()}
