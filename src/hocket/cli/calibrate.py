"""``hocket calibrate``: fit the cost models to measurements.

``profiles`` fits op efficiencies to timed ops, ``--from`` fits step times to recorded runs, and
``parallel`` fits the closed-form step predictor to a table of measured training runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.output import emit

if TYPE_CHECKING:
    from hocket.base.arrays import FloatArray
    from hocket.cost.parallel.coefficients import Coefficients
    from hocket.hardware.cluster import DeviceKind

_DEFAULT = "profiles"


class _Calibrations(click.Group):
    """Command group that treats arguments as profiles when no subcommand is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.group("calibrate", cls=_Calibrations, subcommand_metavar="[PROFILES]... | parallel DATA")
def command() -> None:
    """Fit the cost models to what was measured on a machine.

    \b
    hocket calibrate profile.json -o calibration.json      ops of one device type
    hocket calibrate --from run.json -o calibration.json   steps of hocket run --json
    hocket calibrate parallel runs.csv --on 64xdgx-a100-80g   steps of parallel training
    """


@declare(_DEFAULT, command)
def profiles_command(
    *,
    profiles: Annotated[tuple[Path, ...], argument(nargs=-1)],
    run_files: Annotated[
        tuple[Path, ...],
        option(
            "Output of hocket run --json or of train.report(…, record=); several are allowed.",
            "--from",
            metavar="RUN",
        ),
    ] = (),
    output: Annotated[Path, option("Calibration file to write.", "-o", "--output")],
    on: Annotated[
        str,
        option(
            "A cluster with the profiles' kind of device; 'auto' is this machine.",
            metavar="CLUSTER",
        ),
    ] = "auto",
    as_json: bool,
) -> None:
    """Fit efficiencies per family of ops from PROFILES of one device type, or steps from runs."""
    if bool(profiles) == bool(run_files):
        raise click.UsageError("give profiles, or runs with --from, not both")
    if run_files:
        _calibrate_from_runs(run_files, output, as_json)
        return
    from hocket.cost.calibrate import calibrate, calibration_errors, write_calibration
    from hocket.cost.profile import merge_profiles, read_profile
    from hocket.view.inputs import calibration_data

    profile = merge_profiles([read_profile(path) for path in profiles])
    kind = _find_kind(profile.device_kind, on)
    calibration = calibrate(profile, kind)
    write_calibration(calibration, output)
    errors = calibration_errors(calibration, profile, kind)
    if as_json:
        emit(calibration_data(kind.name, errors, output))
        return
    click.echo("family           measured   predicted    error")
    for row in errors:
        click.echo(
            f"{row.family:<15}{row.measured_s * 1e3:>7.2f} ms {row.predicted_s * 1e3:>8.2f} ms"
            f" {row.error:>+7.1%}"
        )
    click.echo(f"wrote {output} — next: hocket plan MODEL --on CLUSTER --calibration {output}")


def _calibrate_from_runs(files: tuple[Path, ...], output: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from hocket.cost.calibrate import Calibration, write_calibration
    from hocket.cost.measured_steps import fit_steps, read_runs
    from hocket.view.inputs import measured_run_lines

    runs = read_runs(files)
    steps = fit_steps(runs)
    write_calibration(Calibration({}, f"{len(runs)} runs", steps), output)
    if as_json:
        found = {name: asdict(step) for name, step in steps.items()}
        emit({"written": output, "runs": len(runs), "steps": found})
        return
    for line in measured_run_lines(runs):
        click.echo(line)
    for name, step in steps.items():
        click.echo(
            f"{name}: steps take {step.scale:.2f} times the data sheet's prediction; "
            f"80 % range {step.low:.2f} to {step.high:.2f} of the corrected one"
        )
    click.echo(f"wrote {output} — next: hocket plan MODEL --on CLUSTER --calibration {output}")


@declare("parallel", command)
def parallel_command(
    *,
    data: Annotated[Path, argument()],
    on: Annotated[str, option("Cluster of the measured runs.", metavar="CLUSTER")],
    output: Annotated[Path, option("Coefficients file to write.", "-o", "--output")] = Path(
        "coefficients.json"
    ),
    software: Annotated[
        str, option("The program that the runs were made with.", metavar="NAME")
    ] = "megatron-core",
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "Recomputation in the runs, where DATA has no column for it.",
    ] = "full",
    sequence: Annotated[
        int,
        option(
            "Tokens of a sequence, where DATA has no column for it.", type=click.IntRange(1, 10**9)
        ),
    ] = 2048,
    as_json: bool,
) -> None:
    """Fit the step predictor from a table of measured runs on one cluster."""
    from dataclasses import replace

    from hocket.cost.parallel.calibrate import calibrate, prediction_errors
    from hocket.cost.parallel.coefficients import Coefficients, write_coefficients
    from hocket.cost.parallel.measured_runs import read_runs
    from hocket.cost.parallel.softwares import find_software, usual_dtype
    from hocket.hardware.shorthand import cluster_from_text
    from hocket.view.inputs import coefficients_data

    cluster = cluster_from_text(on)
    program = find_software(software)
    program = replace(program, dtype=usual_dtype(program, cluster))
    table = read_runs(data, program, recompute=recompute, sequence=sequence)
    runs = [run for run in table if run.step_s is not None]
    coefficients = calibrate(runs, cluster, source=f"{len(runs)} runs of {data.name}")
    write_coefficients(coefficients, output)
    before = prediction_errors(runs, cluster, Coefficients())
    after = prediction_errors(runs, cluster, coefficients)
    num_skipped = len(table) - len(runs)
    if as_json:
        emit(coefficients_data(coefficients, output, num_skipped, before, after))
        return
    _show(coefficients, before, after)
    click.echo(f"{len(runs)} runs; these errors are of the runs that were fitted")
    if num_skipped:
        click.echo(f"{num_skipped} rows without a step time were left out")
    click.echo(f"wrote {output} — next: hocket parallel MODEL --on {on} --coefficients {output}")


def _show(coefficients: Coefficients, before: FloatArray, after: FloatArray) -> None:
    from hocket.cost.parallel.coefficients import NAMES

    for name in NAMES:
        click.echo(f"{name:<12}{getattr(coefficients, name):>7.3f}")
    for name, errors in (("before", before), ("after", after)):
        sizes = abs(errors)
        click.echo(f"{name:<8} mean error {sizes.mean():>6.1%}, largest {sizes.max():>6.1%}")


def _find_kind(name: str, on: str) -> DeviceKind:
    from hocket.api.clusters import detect
    from hocket.base.errors import unknown_name
    from hocket.hardware.kinds import preset_kinds
    from hocket.hardware.shorthand import cluster_from_text

    cluster = detect() if on == "auto" else cluster_from_text(on)
    kinds = {kind.name: kind for kind in cluster.kinds}
    presets = {entry.kind.name: entry.kind for entry in preset_kinds().values()}
    known = {**presets, **kinds}
    if name not in known:
        raise unknown_name("device kind", name, known, where="--on")
    return known[name]
