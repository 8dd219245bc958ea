"""Gangs that need one server: how long they wait, and who has to go."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.fleet.rounds import FleetDevice, FleetState, Job, Rules, Submit, Tick, new_state, step

ROUND_S = 360.0


def fleet(num_servers: int, size: int, rules: Rules) -> FleetState:
    devices = tuple(
        FleetDevice(name=f"{server}-{at}", device_type="fast", server=str(server))
        for server in range(num_servers)
        for at in range(size)
    )
    return new_state(("fast",), devices, rules)


def gang(number: int, size: int, needs_one_server: bool = True, **more: float) -> Job:
    return Job(
        number=number,
        name=str(number),
        steps_per_s=(1.0,),
        total_steps=more.pop("steps", 1e9),
        gang=size,
        spread_steps_per_s=(0.0,) if needs_one_server else None,
        **more,
    )


def longest_waits(state: FleetState, rounds: int, after: int = 0) -> np.ndarray:
    """Rounds that each job waited at a stretch, at most."""
    waited = np.zeros(len(state.jobs.rows))
    longest = waited.copy()
    for at in range(rounds):
        waited = np.where(state.jobs.rows["device_type"] < 0, waited + 1, 0)
        longest = np.maximum(longest, waited if at >= after else 0)
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    return longest


@pytest.mark.parametrize("slack", [0.0, 150.0])
@pytest.mark.parametrize(
    ("num_servers", "size", "gangs"),
    [(2, 4, (3, 3, 2)), (3, 4, (3, 3, 3, 3)), (2, 4, (4, 3, 2)), (1, 8, (5, 5)), (1, 8, (4, 3, 2))],
)
def test_no_gang_waits_for_ever(
    num_servers: int, size: int, gangs: tuple[int, ...], slack: float
) -> None:
    # Counted in devices nearly all fit at once, but not on servers: debts rise to their limit.
    rules = Rules(patience_rounds=10.0, slack_rounds=slack)
    jobs = tuple(gang(number, size) for number, size in enumerate(gangs))
    state = step(fleet(num_servers, size, rules), Submit(time_s=0.0, jobs=jobs))[0]
    share = state.jobs.shares.sum(axis=1).min()
    most = 2 * rules.patience_rounds / share + 2 * rules.stickiness_rounds + 2
    assert longest_waits(state, 400).max() <= most
    assert longest_waits(state, 1000, after=500).max() <= most


def test_devices_are_not_kept_for_a_gang_that_finds_no_server() -> None:
    first = (gang(0, 3), gang(1, 3))
    state = step(fleet(2, 4, Rules(policy="shortest-job-first")), Submit(time_s=0.0, jobs=first))[0]
    late = (gang(2, 2), gang(3, 1), gang(4, 1))
    state, actions = step(state, Submit(time_s=1.0, jobs=late))
    assert sorted(start.number for start in actions.starts) == [3, 4]
    for _ in range(5):
        state, actions = step(state, Tick(time_s=state.next_tick_s))
        assert (state.holders[:, 0] >= 0).all()
        assert len(actions.stopped) == 0, "those who stay are not moved about in vain"
