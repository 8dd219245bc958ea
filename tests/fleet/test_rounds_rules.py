"""Single rules of the rounds' kernels, run as plain Python on a few devices."""

from types import SimpleNamespace

import numpy as np
import pytest

from hocket.fleet.rounds.kernels import order, room
from hocket.fleet.rounds.tables import HALF_ROUNDS, UNITS_PER_ROUND
from hocket.kernels.decorator import Kernel


@pytest.fixture
def plain(monkeypatch):
    """The kernels of a module call each other without being compiled."""

    def uncompiled(module):
        for name, value in list(vars(module).items()):
            if isinstance(value, Kernel):
                monkeypatch.setattr(module, name, value.function)
        return module

    return uncompiled


# ── room for a gang ──────────────────────────────────────────────────────────────────────────────

GANG, STARTED_BY_S = 2, 100.0


def floor_of(holders, kinds=None, partners=None):
    """Servers with a list of rows on their devices, -1 for a free one."""
    sizes = [len(server) for server in holders]
    first = np.concatenate(holders)
    second = np.full(len(first), -1) if partners is None else np.concatenate(partners)
    return SimpleNamespace(
        num_free=np.array([server.count(-1) for server in holders]),
        server_kind=np.array(kinds or [0] * len(holders)),
        server_ptr=np.cumsum([0, *sizes]),
        order=np.arange(len(first)),
        holders=np.stack([first, second], axis=1),
        first=np.ones(3),
    )


def cleared(plain, floor, *, gangs=(1,) * 6, started=(0.0,) * 6, kept=(), of_any_size=False):
    """The rows that leave for a gang of two."""
    jobs = SimpleNamespace(
        rows=SimpleNamespace(gang=np.array(gangs), started_s=np.array(started, dtype=float))
    )
    wishes = SimpleNamespace(is_kept=np.isin(np.arange(len(gangs)), kept))
    changes = SimpleNamespace(stays=np.ones(len(gangs), dtype=bool))
    made = plain(room).make_room
    made(jobs, 0, GANG, STARTED_BY_S, of_any_size, wishes, floor, changes)
    return np.flatnonzero(~changes.stays).tolist()


def test_the_emptiest_server_that_can_hold_the_gang_is_cleared(plain):
    floor = floor_of([[0, 1], [2, -1], [3, 4]])
    assert cleared(plain, floor) == [2]
    assert floor.num_free.tolist() == [0, 2, 0]
    assert (floor.first == 0).all(), "searches for free devices start anew"


def test_nobody_leaves_where_a_server_has_room(plain):
    assert cleared(plain, floor_of([[0, 1], [-1, -1]])) == []
    assert cleared(plain, floor_of([[0, -1, -1]])) == []


def test_servers_of_another_kind_are_left_alone(plain):
    assert cleared(plain, floor_of([[0, -1], [1, 2]], kinds=[1, 0])) == [1, 2]


def test_kept_jobs_stay_and_so_does_their_server(plain):
    assert cleared(plain, floor_of([[0, -1], [1, 2]]), kept=[0]) == [1, 2]
    assert cleared(plain, floor_of([[0, -1], [1, 2]]), kept=[0, 1]) == []


def test_jobs_that_just_began_stay(plain):
    begun = (STARTED_BY_S, STARTED_BY_S + 1, 0.0, 0.0, 0.0, 0.0)
    assert cleared(plain, floor_of([[0, -1]]), started=begun) == [0]
    assert cleared(plain, floor_of([[1, -1]]), started=begun) == []


def test_only_smaller_jobs_leave_unless_any_may(plain):
    gangs = (2, 2, 1, 1, 1, 1)
    assert cleared(plain, floor_of([[0, 0]]), gangs=gangs) == []
    assert cleared(plain, floor_of([[0, 0]]), gangs=gangs, of_any_size=True) == [0]


def test_both_jobs_of_a_device_leave_and_a_partner_elsewhere_goes_on(plain):
    floor = floor_of([[0, 1]], partners=[[2, -1]])
    assert cleared(plain, floor) == [0, 1, 2]
    # Row 3 runs first on the server that is cleared and second on one that is not.
    floor = floor_of([[3, -1], [4, 5]], partners=[[-1, -1], [3, -1]])
    assert cleared(plain, floor) == [3]
    assert floor.holders.tolist() == [[-1, -1], [-1, -1], [4, -1], [5, -1]]


def test_a_device_is_free_only_when_nobody_is_left_on_it(plain):
    floor = floor_of([[1, -1, 2]], partners=[[0, -1, -1]])
    assert cleared(plain, floor, kept=[0]) == [1, 2]
    assert floor.num_free.tolist() == [2]
    assert floor.holders.tolist() == [[0, -1], [-1, -1], [-1, -1]]


def test_what_stays_in_the_way_counts_as_no_room(plain):
    assert cleared(plain, floor_of([[0, 1, -1]]), kept=[1]) == [0]
    assert cleared(plain, floor_of([[0, 1, 2]]), kept=[1, 2]) == []


# ── who is owed ──────────────────────────────────────────────────────────────────────────────────

PACE = SimpleNamespace(round_s=100.0, slack_rounds=0.5)


def owed(credit_s, left=np.inf, speed=1.0, stays=0.0):
    return order._rounds_owed.function(credit_s, left, speed, stays, PACE)


def test_debts_count_in_whole_units_of_a_round():
    assert owed(250.0) == 2.5
    assert owed(250.0, stays=1.0) == 3.5
    unit_s = PACE.round_s / UNITS_PER_ROUND
    assert owed(250.0 + 0.4 * unit_s) == owed(250.0)
    assert owed(-0.4 * unit_s) == -1.0 / UNITS_PER_ROUND


def test_slack_is_whole_at_the_end_and_half_when_so_many_rounds_are_left():
    assert owed(0.0, left=0.0) == PACE.slack_rounds
    half = np.floor(PACE.slack_rounds / 2 * UNITS_PER_ROUND) / UNITS_PER_ROUND
    assert owed(0.0, left=HALF_ROUNDS * PACE.round_s) == half
    assert owed(0.0, left=HALF_ROUNDS * PACE.round_s * 2.0, speed=2.0) == half
    assert owed(0.0, left=np.inf) == 0.0


def test_debts_end_at_the_limit_on_both_sides():
    jobs = SimpleNamespace(
        rows=SimpleNamespace(shape=(2,), pair_credit_s=np.array([9.0, -9.0])),
        credit_s=np.array([[5.0, -5.0], [1.0, -1.0]]),
    )
    order._limit_debts.function(jobs, 2.0)
    assert jobs.credit_s.tolist() == [[2.0, -2.0], [1.0, -1.0]]
    assert jobs.rows.pair_credit_s.tolist() == [2.0, -2.0]


def test_equal_debts_are_ordered_by_the_next_keys_and_then_stay():
    keys = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 2.0, 2.0], [0.0, 0.0, 5.0, 0.0]])
    before = order._goes_before.function
    assert before(keys, 1, 0)
    assert not before(keys, 0, 1)
    assert before(keys, 2, 0)
    assert not before(keys, 3, 0)
    assert not before(keys, 0, 3)
