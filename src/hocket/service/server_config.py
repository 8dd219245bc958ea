"""The server's config: what users and teams may ask for (``hocket fleet serve --config FILE``).

time_limit_s = 86400       # of jobs whose files name none
memory = "64GiB"           # the same for the memory of all processes of a job on a machine
cpus = 16                  # the same for CPU cores
priorities = {urgent = 1, spare = -1}   # levels of the priority classes; 0 for jobs without one

[defaults]                 # users that are not named below
max_weight = 1.0

[users.ann]
max_weight = 4.0           # the largest weight that her job files may name
weight = 2.0               # share against other users, whatever she submits
max_devices = 8            # that her jobs hold at once
device_hours_per_week = 500
teams = ["vision"]         # teams that her job files may name
priorities = ["urgent"]    # priority classes that they may name
unix_user = "ann"          # her jobs run as this Unix user, where the service is root

[teams.vision]
weight = 2.0               # share against other teams and users
max_devices = 16           # and device_hours_per_week, as for users
is_open = true             # every user may name it

[notify]                   # when a job fails (or with on = "end", when any job ends)
webhook = "https://chat.example/hook"     # gets a JSON object by POST
command = ["/usr/local/bin/mail-owner"]   # gets the same on standard input

Admins may ask for everything.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hocket.base.checked import checked
from hocket.base.errors import unknown_name
from hocket.base.fields import located
from hocket.base.jsonfile import read_bounded
from hocket.base.toml import parse_toml
from hocket.fleet.rounds.fairness import MAX_PRIORITY
from hocket.service.errors import ForbiddenError
from hocket.service.spec import JobSpec, Memory, Name, Text
from hocket.service.tokens import Holder

MAX_FILE_BYTES = 1_000_000
Weight = Annotated[float, Field(ge=1e-6, le=1e6)]
Level = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class _ConfigTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quota(_ConfigTable):
    """Limits and weight of a user or a team."""

    weight: Weight = 1.0
    max_devices: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """At once; None for as many as there are."""
    device_hours_per_week: Annotated[float, Field(ge=0.0, le=1e9)] | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """Devices at once and device seconds per week, infinite for none."""
        most = math.inf if self.max_devices is None else float(self.max_devices)
        hours = self.device_hours_per_week
        return most, math.inf if hours is None else 3600.0 * hours


class UserLimits(Quota):
    """Limits of one user."""

    max_weight: Weight = 1.0
    teams: tuple[Name, ...] = ()
    priorities: tuple[Name, ...] = ()
    unix_user: Annotated[str, Field(max_length=200)] = ""
    """Unix user that the jobs run as, where the service is root; empty for its own user."""


class TeamConfig(Quota):
    """One team."""

    is_open: bool = False
    """True where every user may name it."""


class NotifyConfig(_ConfigTable):
    """Receivers of notices about ended jobs; see `hocket.service.notifier`."""

    webhook: Annotated[str, Field(pattern=r"^(https?://\S+)?$", max_length=2000)] = ""
    command: tuple[Text, ...] = ()
    on: Literal["failure", "end"] = "failure"


class ServerConfig(_ConfigTable):
    """The whole file; every table may be left out."""

    defaults: UserLimits = UserLimits()
    users: dict[Name, UserLimits] = {}
    teams: dict[Name, TeamConfig] = {}
    priorities: dict[Name, Level] = {}
    """Level of each priority class; jobs that name none are at level 0."""
    time_limit_s: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """Time that jobs may hold devices whose files name no limit; None for as long as they want."""

    memory: Memory | None = None
    """Memory limit of jobs whose files name none."""
    cpus: Annotated[float, Field(ge=0.01, le=100_000.0)] | None = None
    notify: NotifyConfig = NotifyConfig()

    def limits_of(self, user: str) -> UserLimits:
        """Limits of a user."""
        return self.users.get(user, self.defaults)

    def quota_of_team(self, team: str) -> Quota:
        """Quota of a team."""
        return self.teams.get(team, Quota())

    def level(self, priority: str) -> int:
        """Level of a priority class; raises `UsageError` for an unknown one."""
        if priority and priority not in self.priorities:
            raise unknown_name("priority class", priority, self.priorities, where="priority")
        return self.priorities.get(priority, 0)

    def check(self, spec: JobSpec, holder: Holder) -> None:
        """Raise `ForbiddenError` where a job asks for more than its user may."""
        # Quotas hold for admins too: a larger gang would wait for ever.
        gang = min(spec.gangs or (spec.gang,))
        for who, quota in (
            (f"user {holder.name!r}", self.limits_of(holder.name)),
            (f"team {spec.team!r}", self.quota_of_team(spec.team)),
        ):
            if gang > quota.limits[0]:
                raise ForbiddenError(
                    f"{who} may hold at most {quota.max_devices} devices at once, not {gang}",
                    hint="lower gang, or ask an admin to raise max_devices in the server's config",
                    where="gang",
                )
        if holder.role == "admin":
            return
        limits = self.limits_of(holder.name)
        if spec.weight > limits.max_weight:
            raise ForbiddenError(
                f"{holder.name!r} may ask for a weight of at most {limits.max_weight:g}, "
                f"not {spec.weight:g}",
                hint="lower weight, or ask an admin to raise max_weight in the server's config",
                where="weight",
            )
        if spec.priority and spec.priority not in limits.priorities:
            raise ForbiddenError(
                f"{holder.name!r} may not ask for priority {spec.priority!r}",
                hint="leave out priority, or ask an admin for it (priorities of the user)",
                where="priority",
            )
        team = self.teams.get(spec.team)
        if spec.team and spec.team not in limits.teams and not (team and team.is_open):
            named = [*limits.teams, *(name for name, one in self.teams.items() if one.is_open)]
            hint = f"teams of {holder.name!r}: {', '.join(named[:20])}" if named else (
                "leave out team, or ask an admin for it (teams in the server's config)"
            )  # fmt: skip
            raise ForbiddenError(
                f"{holder.name!r} is in no team {spec.team!r}", hint=hint, where="team"
            )


def read_server_config(path: Path | None) -> ServerConfig:
    """The config of a TOML file, the defaults where None; raises `InputFileError` otherwise."""
    if path is None:
        return ServerConfig()
    data = read_bounded(path, MAX_FILE_BYTES, lambda head: b"\x00" not in head, "TOML")
    with located(str(path)):
        content = parse_toml(data)
    hint = "docs/how-to/fleet_service.md shows the server's config"
    return checked(ServerConfig, content, str(path), hint=hint)
