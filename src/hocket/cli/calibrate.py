"""``hocket calibrate``: fit the cost model to measured profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.cli.output import emit, json_option, output_option

if TYPE_CHECKING:
    from hocket.hardware.cluster import DeviceKind


@click.command("calibrate")
@click.argument("profiles", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_option("Calibration file")
@click.option(
    "--on",
    default="auto",
    show_default=True,
    metavar="CLUSTER",
    help="A cluster with the profiles' kind of device; 'auto' is this machine.",
)
@json_option
def command(profiles: tuple[Path, ...], output: Path, on: str, as_json: bool) -> None:
    """Fit efficiencies per family of ops from PROFILES of one kind of device."""
    from hocket.cost.calibrate import calibrate, calibration_errors, write_calibration
    from hocket.cost.profile import merge_profiles, read_profile

    profile = merge_profiles([read_profile(path) for path in profiles])
    kind = _find_kind(profile.device_kind, on)
    calibration = calibrate(profile, kind)
    write_calibration(calibration, output)
    errors = calibration_errors(calibration, profile, kind)
    if as_json:
        families = {
            row.family: {
                "measured_s": row.measured_s,
                "predicted_s": row.predicted_s,
                "error": row.error,
            }
            for row in errors
        }
        emit({"file": str(output), "device_kind": kind.name, "families": families})
        return
    click.echo("family           measured   predicted    error")
    for row in errors:
        click.echo(
            f"{row.family:<15}{row.measured_s * 1e3:>7.2f} ms {row.predicted_s * 1e3:>8.2f} ms"
            f" {row.error:>+7.1%}"
        )
    click.echo(f"wrote {output} — next: hocket plan MODEL --on CLUSTER --calibration {output}")


def _find_kind(name: str, on: str) -> DeviceKind:
    from hocket.errors import unknown_name
    from hocket.hardware.detect import detect
    from hocket.hardware.kinds import preset_kinds
    from hocket.hardware.shorthand import cluster_from_text

    cluster = detect() if on == "auto" else cluster_from_text(on)
    kinds = {kind.name: kind for kind in cluster.kinds}
    presets = {entry.kind.name: entry.kind for entry in preset_kinds().values()}
    known = {**presets, **kinds}
    if name not in known:
        raise unknown_name("device kind", name, known, where="--on")
    return known[name]
