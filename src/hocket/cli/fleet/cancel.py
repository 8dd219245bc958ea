"""``hocket fleet cancel``: end a job; one that runs is asked to stop first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.cli.fleet.change import change_command

if TYPE_CHECKING:
    from hocket.service.client import FleetClient


def _cancel(client: FleetClient, job: int) -> dict[str, Any]:
    from hocket.api.service import job_path

    found: dict[str, Any] = client.delete(job_path(job))
    return found


command = change_command("cancel", "End jobs; those that run are told to stop first.", _cancel)
