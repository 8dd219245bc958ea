"""Options of rounds, the same for a fleet that is served and for one that is simulated."""

from __future__ import annotations

import click

from hocket.cli.numbers import FiniteRange

round_option = click.option(
    "--round",
    "round_s",
    type=FiniteRange(min=0.1, max=1e6),
    default=360.0,
    show_default=True,
    metavar="SECONDS",
    help="Length of a round.",
)
min_run_option = click.option(
    "--min-run",
    "min_run_s",
    type=FiniteRange(min=0.0),
    default=0.0,
    metavar="SECONDS",
    help="A started job keeps its devices at least so long. [default: 0]",
)
