"""``hocket profile``: time a model's ops on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.cli.output import emit, json_option, output_option, working
from hocket.cli.sources import ModelOptions, build_model, model_options, require_folder, say_loss

if TYPE_CHECKING:
    from hocket.hardware.cluster import DeviceKind


@click.command("profile")
@click.argument("model", metavar="NAME_OR_FACTORY")
@output_option("Profile file")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default=None,
    help="Where to run the ops. [default: cuda where there is one]",
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(1, 3600),
    default=120,
    show_default=True,
    help="Seconds to spend on timing; the most expensive ops come first.",
)
@model_options
@json_option
def command(
    model: str,
    output: Path,
    device: str | None,
    budget_s: float,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    optimizer: str | None,
    loss: str | None,
    as_json: bool,
) -> None:
    """Time every distinct op of a model's step on this machine and store the times."""
    from hocket.capture import capture_program
    from hocket.cost.measure import profile_program
    from hocket.cost.profile import write_profile

    options = ModelOptions(batch, seq, dtype, optimizer, loss)
    require_folder(output)
    place, kind = _local_kind(device)
    with working(f"capturing {model}"):
        module, tensors = build_model(model, options)
        graph, program = capture_program(
            module, tensors, loss=options.loss, optimizer=options.optimizer_name, name=model,
            device=place,
        )  # fmt: skip
    say_loss(graph)
    with working(f"timing the ops of {model}"):
        profile = profile_program(graph, program, kind, device=place, budget_s=budget_s)
    write_profile(profile, output)
    if as_json:
        emit(
            {
                "file": str(output),
                "device_kind": profile.device_kind,
                "entries": len(profile.entries),
                "missing": dict(profile.missing),
            }
        )
        return
    click.echo(
        f"wrote {output}: {len(profile.entries)} distinct ops on {profile.device_kind}, "
        f"{len(profile.missing)} without a time"
    )
    click.echo(f"next: hocket calibrate {output} -o calibration.json")


def _local_kind(device: str | None) -> tuple[str, DeviceKind]:
    """The device to run on and its kind, as `hocket detect` names it."""
    from hocket.errors import UsageError
    from hocket.hardware.detect import detect

    kinds = detect().kinds
    accelerators = [kind for kind in kinds if not kind.is_cpu]
    if device == "cuda" and not accelerators:
        raise UsageError("this machine has no CUDA device", hint="use --device cpu")
    if accelerators and device != "cpu":
        return "cuda", accelerators[0]
    processors = [kind for kind in kinds if kind.is_cpu]
    if not processors:
        raise UsageError("hocket detect found no processor here", hint="use --device cuda")
    return "cpu", processors[0]
