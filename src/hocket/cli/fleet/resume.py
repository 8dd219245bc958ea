"""``hocket fleet resume``: let a paused job have devices again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.cli.fleet.change import change_command

if TYPE_CHECKING:
    from hocket.service.client import FleetClient


def _resume(client: FleetClient, job: int) -> dict[str, Any]:
    from hocket.api.service import job_path

    found: dict[str, Any] = client.post(job_path(job, ":resume"))
    return found


command = change_command("resume", "Let a paused job have devices again.", _resume)
