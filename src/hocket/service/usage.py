"""Device time of users and teams, by device type and week.

Computed from the stored attempts, including those that still run. Weeks begin on Monday 0:00 UTC.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from hocket.fleet.rounds.fairness import WEEK_S, week_start_s
from hocket.service.records import HeldAttempt


class UsageRow(NamedTuple):
    """Device time of one user in one team on one device type in one week."""

    week: str
    """ISO year and week, such as ``2026-W47``."""
    user: str
    team: str
    device_type: str
    device_hours: float


def count_usage(held: Iterable[HeldAttempt], since_s: float, now_s: float) -> list[UsageRow]:
    """Rows by week, user, team and device type."""
    seconds: defaultdict[tuple[float, str, str, str], float] = defaultdict(float)
    for attempt, user, team, _ in held:
        if attempt.started_s is None:
            continue
        end_s = now_s if attempt.ended_s is None else attempt.ended_s
        for week_s, duration_s in _by_week(max(attempt.started_s, since_s), end_s):
            seconds[week_s, user, team, attempt.device_type] += duration_s * len(attempt.devices)
    return [
        UsageRow(
            f"{datetime.fromtimestamp(week_s, UTC):%G-W%V}", user, team, device_type, total / 3600.0
        )
        for (week_s, user, team, device_type), total in sorted(seconds.items())
    ]


def _by_week(start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    while start_s < end_s:
        week_s = week_start_s(start_s)
        stop_s = min(end_s, week_s + WEEK_S)
        yield week_s, stop_s - start_s
        start_s = stop_s
