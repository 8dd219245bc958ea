"""The root command: its name, its subcommands, and did-you-mean for a wrong one."""

from __future__ import annotations

import click

from hocket import __version__
from hocket.base.errors import unknown_name
from hocket.cli import (
    calibrate,
    capture,
    collective,
    completion,
    detect,
    doctor,
    explain,
    export,
    fit,
    fleet,
    generate,
    launch,
    listing,
    loop,
    parallel,
    plan,
    probe,
    profile,
    run,
    schema,
    serve_classes,
    show,
    simulate,
    split,
    tables,
    validate,
    verify,
    waves,
)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            raise unknown_name("command", name, self.commands)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hocket")
def root() -> None:
    """Decide where machine-learning work computes, see what it costs, carry it out.

    \b
    hocket plan gpt2 --on 4xv100-16g     plan a training step and compare the candidates
    hocket fit gpt2-xl --on 1xh200 --memory 8GiB
                                         keep a training step within a number of bytes
    hocket parallel llama3-8b --on 2xdgx-h100 --batch 512
                                         choose data x tensor x pipeline degrees
    hocket show plan.json                look at a plan
    hocket explain plan.json             what limits it
    hocket run plan.json                 carry it out

    Exit codes: 0 ok, 1 a bug of ours, 2 usage, 3 bad input file, 4 no feasible plan,
    5 run failed, 6 a check failed, 130 interrupted.
    """


for module in (
    plan, fit, waves, parallel, collective, fleet, loop, tables, split, serve_classes, run, launch,
    show, explain, simulate, verify, export, capture, generate, listing, detect, probe, profile,
    calibrate, validate, schema, doctor, completion,
):  # fmt: skip
    root.add_command(module.command)
