"""``hocket profile``: time the distinct ops of a model's step on this machine.

The most expensive ops are timed first, and a later run continues where the file ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import ModelOptions
from hocket.cli.output import emit, say, working
from hocket.cli.sources import build_model, say_loss
from hocket.cli.written import require_folder

if TYPE_CHECKING:
    from hocket.cost.profile import Profile
    from hocket.hardware.cluster import DeviceKind

MAX_REASONS = 6
"""Number of reasons that are printed; the file contains all."""


@declare("profile")
def command(
    *,
    model: Annotated[str, argument("NAME_OR_FACTORY")],
    output: Annotated[Path, option("Profile file to write.", "-o", "--output")],
    device: Annotated[
        Literal["cpu", "cuda"] | None, "Where to run the ops. [default: cuda where there is one]"
    ] = None,
    budget_s: Annotated[
        float,
        option(
            "Seconds to spend on timing; the most expensive ops come first.",
            "--seconds",
            type=click.FloatRange(1, 3600),
        ),
    ] = 120,
    fresh: Annotated[
        bool, "Time everything again; else a profile of this machine in the file is gone on from."
    ] = False,
    options: ModelOptions,
    as_json: bool,
) -> None:
    """Time every distinct op of a model's step on this machine and store the times."""
    from hocket.cost.profile import write_profile
    from hocket.view.inputs import profile_data

    require_folder(output)
    place, kind = _local_kind(device)
    with working(f"capturing {model}"):
        # build_model imports PyTorch, which takes seconds, hence inside the spinner.
        from hocket.capture import capture_program
        from hocket.capture.precision import amp_forward
        from hocket.cost.measure import profile_program

        module, tensors = build_model(model, options)
        graph, program = capture_program(
            module, tensors, loss=options.loss, optimizer=options.optimizer_name, name=model,
            device=place, forward=amp_forward(options.amp_name, place),
        )  # fmt: skip
    say_loss(graph)
    known = None if fresh else _known(output)
    with working(f"timing the ops of {model}") as progress:
        profile = profile_program(
            graph, program, kind, device=place, budget_s=budget_s, known=known,
            on_op=lambda number, total: progress(f"timing op {number} of {total} of {model}"),
        )  # fmt: skip
    write_profile(profile, output)
    if as_json:
        emit(profile_data(profile, output))
        return
    click.echo(
        f"wrote {output}: {len(profile.entries)} distinct ops on {profile.device_kind}, "
        f"{len(profile.missing)} without a time"
    )
    for line in _reasons(profile, output):
        say(line)
    if profile.entries:
        click.echo(f"next: hocket calibrate {output} -o calibration.json")


def _known(output: Path) -> Profile | None:
    """The profile of an earlier run from the output file; None if there is none."""
    from hocket.base.errors import InputFileError
    from hocket.cost.profile import read_profile

    try:
        return read_profile(output) if output.is_file() else None
    # A file that is no profile is overwritten, as -o promises.
    except InputFileError:
        return None


def _reasons(profile: Profile, output: Path) -> Iterator[str]:
    """Yield the reasons why ops have no time, one line each, and a remedy."""
    from hocket.cost.measure import OUT_OF_MEMORY, OUT_OF_TIME

    reasons = Counter(
        # Messages of out-of-memory errors go on with details, which would make each of them a
        # reason of its own.
        OUT_OF_MEMORY if text.startswith(OUT_OF_MEMORY) else text
        for text in profile.missing.values()
    )
    for reason, count in reasons.most_common(MAX_REASONS):
        yield f"  {count} x {reason}"
    if len(reasons) > MAX_REASONS:
        yield f"  and {len(reasons) - MAX_REASONS} other reasons, in {output}"
    if OUT_OF_TIME in reasons:
        yield "  run the command again to go on, or give it more time with --seconds"
    if OUT_OF_MEMORY in reasons:
        yield "  a smaller --batch needs less memory; its times are other ops'"


def _local_kind(device: str | None) -> tuple[str, DeviceKind]:
    """Device to run on and its device type, named as `hocket detect` names it."""
    from hocket.api.clusters import detect
    from hocket.base.errors import UsageError
    from hocket.hardware.detect import detect_cpu

    cluster = detect_cpu() if device == "cpu" else detect()
    kind = cluster.kinds[0]
    if device == "cuda" and kind.is_cpu:
        raise UsageError("this machine has no CUDA device", hint="use --device cpu")
    return "cpu" if kind.is_cpu else "cuda", kind
