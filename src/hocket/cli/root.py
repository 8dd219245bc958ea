"""The root command: subcommands in groups, and did-you-mean for a wrong name."""

from __future__ import annotations

import click

from hocket import __version__
from hocket.base.errors import unknown_name
from hocket.cli import (
    calibrate,
    capture,
    collective,
    doctor,
    export,
    fit,
    fleet,
    launch,
    listing,
    loop,
    parallel,
    plan,
    profile,
    run,
    serve_classes,
    split,
    tables,
    ui,
    validate,
    waves,
)
from hocket.cli.developer import completion, generate, schema
from hocket.cli.inspect_plan import explain, show, simulate, verify
from hocket.cli.machine import detect, probe

GROUPS: dict[str, dict[click.Command, str]] = {
    "Plan": {
        plan.command: "compare strategies for a model on a cluster, write the best",
        fit.command: "fit a training step into a memory budget on one GPU",
        ui.command: "a local page: pick a model and GPUs, see how fast it trains",
        parallel.command: "choose data x tensor x pipeline degrees",
        waves.command: "predict the gain of two interleaved microbatches (Wavelet)",
    },
    "Run": {
        run.command: "train some steps of a plan, compare with the prediction",
        launch.command: "run a script once per device of a plan, as torchrun does",
        export.command: "write a plan as flags, config or script of another program",
    },
    "Inspect a plan": {
        show: "devices, memory, links and the longest ops",
        explain: "critical path, idle time and the bottleneck",
        simulate: "step time, memory and use of devices and links",
        verify: "check every section, precedence and memory",
    },
    "Hardware": {
        detect: "describe this machine as a cluster file",
        probe: "measure the links between ranks",
        profile.command: "time the ops of a model on this machine",
        calibrate.command: "fit the cost models to measurements",
    },
    "Clusters, communication, loops, tables, classifiers": {
        fleet.command: "schedule jobs on a shared cluster of mixed devices",
        collective.command: "plan a collective over the links of a topology",
        loop.command: "find out how a serial loop can run in parallel",
        tables.command: "serve parameter tables with bounded staleness",
        split.command: "split a classifier by class into pruned sub-models",
        serve_classes.command: "serve a split classifier over HTTP",
    },
    "More": {
        listing.command: "list hardware, models, planners, policies",
        capture.command: "capture the ops of one training step",
        doctor.command: "check the installation, devices and extras",
    },
}
FOR_DEVELOPERS: tuple[click.Command, ...] = (generate, schema, validate.command, completion)
"""Commands that are not on the first screen."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # One width for all groups, so that the summaries are in one column.
        width = max(len(name) for name in self.commands)
        for title, summaries in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{command.name:<{width}}", text) for command, text in summaries.items()]
                )
        hidden = ", ".join(str(command.name) for command in FOR_DEVELOPERS)
        formatter.write_paragraph()
        formatter.write_text(f"For developers: {hidden}.")

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
    """Find out how to train a PyTorch model on the hardware at hand, and run it.

    \b
    hocket plan gpt2 --on 4xv100-16g     compare strategies: step time, peak memory
    hocket fit gpt2-xl --on 1xh200 --memory 8GiB
                                         fit a training step into a memory budget
    hocket parallel llama3-8b --on 2xdgx-h100 --batch 512
                                         choose data x tensor x pipeline degrees
    hocket explain plan.json             the bottleneck of a plan
    hocket run plan.json                 train some steps with it

    Exit codes: 0 ok, 1 bug in hocket, 2 usage, 3 bad input file, 4 no feasible plan,
    5 run failed, 6 check failed, 130 interrupted.
    """


for command in (*(command for group in GROUPS.values() for command in group), *FOR_DEVELOPERS):
    root.add_command(command)
