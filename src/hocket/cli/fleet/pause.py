"""``hocket fleet pause``: take the devices of a job away until it is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.cli.fleet.change import change_command

if TYPE_CHECKING:
    from hocket.service.client import FleetClient


def _pause(client: FleetClient, job: int) -> dict[str, Any]:
    from hocket.api.service import job_path

    found: dict[str, Any] = client.post(job_path(job, ":pause"))
    return found


command = change_command("pause", "Take the devices of a job away until it is resumed.", _pause)
