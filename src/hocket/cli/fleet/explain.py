"""``hocket fleet explain``: print the reason why a job waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hocket.cli.declare import declare
from hocket.cli.fleet.connection import Job, Service
from hocket.cli.output import emit

if TYPE_CHECKING:
    pass


@declare("explain")
def command(
    *,
    service: Service,
    job: Job,
    as_json: bool,
) -> None:
    """Explain in one sentence why a job waits, with the numbers behind the reason."""
    client = service.connect()
    from hocket.service.client import job_path

    found = client.get_when_free(job_path(job, "/explain"))
    if as_json:
        emit(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from hocket.view.names import LONGEST_SENTENCE, inert

    click.echo(inert(found["sentence"], LONGEST_SENTENCE))
    for row in found["evidence"].get("device_types", ()):
        click.echo(
            f"  {inert(row['device_type'])}: {row['free']} of {row['devices']} free, "
            f"{row['steps_per_s']:g} steps/s, share {row['target_share']:.0%}, "
            # Without the zero a tiny deficit would read "-0.0".
            f"deficit {round(row['deficit_rounds'], 1) + 0.0:.1f} rounds"
        )
    if pair_share := found["evidence"].get("pair_share", 0.0):
        click.echo(f"  sharing devices with another job: share {pair_share:.0%}")
    holders = found["evidence"].get("holders", ())
    if holders and found["status"] == "queued":
        more = found["evidence"]["num_holders"] - len(holders)
        names = ", ".join(f"job {holder['job']}" for holder in holders)
        click.echo(
            f"  what it could use is held by {names}" + (f" and {more} more" if more else "")
        )
