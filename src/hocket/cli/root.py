"""The root command: all subcommands in groups, imported when they are used."""

from __future__ import annotations

import click

from hocket import __version__
from hocket.cli.declare import LazyGroup

GROUPS: dict[str, dict[str, str]] = {
    "Plan": {
        "plan": "compare strategies for a model on a cluster, write the best",
        "fit": "fit a training step into a memory budget on one GPU",
        "ui": "a local page: pick a model and GPUs, see how fast it trains",
        "parallel": "choose data x tensor x pipeline degrees",
        "waves": "predict the gain of two interleaved microbatches (Wavelet)",
    },
    "Run": {
        "run": "train some steps of a plan, compare with the prediction",
        "launch": "run a script once per device of a plan, as torchrun does",
        "export": "write a plan as flags, config or script of another program",
    },
    "Inspect a plan": {
        "show": "devices, memory, links and the longest ops",
        "explain": "alternatives, critical path, idle time and the bottleneck",
        "simulate": "step time, memory and use of devices and links",
        "verify": "check every section, precedence and memory",
    },
    "Hardware": {
        "detect": "describe this machine as a cluster file",
        "probe": "measure the links between ranks",
        "profile": "time the ops of a model on this machine",
        "calibrate": "fit the cost models to measurements",
    },
    "Clusters, communication, loops, tables, classifiers": {
        "fleet": "schedule jobs on a shared cluster of mixed devices",
        "collective": "plan a collective over the links of a topology",
        "loop": "find out how a serial loop can run in parallel",
        "tables": "serve parameter tables with bounded staleness",
        "split": "split a classifier by class into pruned sub-models",
        "serve-classes": "serve a split classifier over HTTP",
    },
    "More": {
        "list": "list hardware, models, planners, policies",
        "capture": "capture the ops of one training step",
        "doctor": "check the installation, devices and extras",
    },
}
"""Groups of the first help screen, with the commands of each and their summaries."""
FOR_DEVELOPERS = ("generate", "schema", "validate", "completion")
_SEVERAL = {
    **dict.fromkeys(("show", "explain", "simulate", "verify"), "inspect_plan"),
    **dict.fromkeys(("generate", "schema", "completion"), "developer"),
    **dict.fromkeys(("detect", "probe"), "machine"),
}
"""Modules that contain several commands, each a function with the command's name."""


def _place_of(name: str) -> str:
    if name in _SEVERAL:
        return f"hocket.cli.{_SEVERAL[name]}:{name}"
    return f"hocket.cli.{'listing' if name == 'list' else name.replace('-', '_')}"


_PLACES = {
    name: _place_of(name) for name in (*(n for group in GROUPS.values() for n in group),
                                       *FOR_DEVELOPERS)
}  # fmt: skip


class _Commands(LazyGroup):
    """Command group that lists its commands under the titles of `GROUPS`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # One width for all groups, so that the summaries are in one column.
        width = max(map(len, _PLACES))
        for title, summaries in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in summaries.items()])
        formatter.write_paragraph()
        formatter.write_text(f"For developers: {', '.join(FOR_DEVELOPERS)}.")


@click.group(
    cls=_Commands,
    places=_PLACES,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
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
