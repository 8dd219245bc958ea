"""The root command: subcommands in groups, and did-you-mean for a wrong name."""

from __future__ import annotations

from types import ModuleType

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
    ui,
    validate,
    verify,
    waves,
)

GROUPS: dict[str, dict[ModuleType, str]] = {
    "Plan": {
        plan: "compare strategies for a model on a cluster, write the best",
        fit: "fit a training step into a memory budget on one GPU",
        ui: "a local page: pick a model and GPUs, see how fast it trains",
        parallel: "choose data x tensor x pipeline degrees",
        waves: "predict the gain of two interleaved microbatches (Wavelet)",
    },
    "Run": {
        run: "train some steps of a plan, compare with the prediction",
        launch: "run a script once per device of a plan, as torchrun does",
        export: "write a plan as flags, config or script of another program",
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
        profile: "time the ops of a model on this machine",
        calibrate: "fit the cost models to measurements",
    },
    "Clusters, communication, loops, tables, classifiers": {
        fleet: "schedule jobs on a shared cluster of mixed devices",
        collective: "plan a collective over the links of a topology",
        loop: "find out how a serial loop can run in parallel",
        tables: "serve parameter tables with bounded staleness",
        split: "split a classifier by class into pruned sub-models",
        serve_classes: "serve a split classifier over HTTP",
    },
    "More": {
        listing: "list hardware, models, planners, policies",
        capture: "capture the ops of one training step",
        doctor: "check the installation, devices and extras",
    },
}
FOR_DEVELOPERS: tuple[ModuleType, ...] = (generate, schema, validate, completion)
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
                    [
                        (f"{module.command.name:<{width}}", text)
                        for module, text in summaries.items()
                    ]
                )
        hidden = ", ".join(str(module.command.name) for module in FOR_DEVELOPERS)
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


for module in (*(module for group in GROUPS.values() for module in group), *FOR_DEVELOPERS):
    root.add_command(module.command)
