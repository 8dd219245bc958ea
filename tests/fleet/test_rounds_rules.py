"""The table of the round rules, and the eviction rule on small servers."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hocket.fleet.policies import POLICIES
from hocket.fleet.rounds import Rules, rules
from hocket.fleet.rounds.assign import slack_rounds
from hocket.fleet.rounds.kernels import place, wishes
from hocket.fleet.rounds.rules import HALF_SLACK_ROUNDS, UNITS_PER_ROUND
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


def floor_of(holders, device_types=None, partners=None):
    """Servers with a list of rows on their devices, -1 for a free one."""
    sizes = [len(server) for server in holders]
    first = np.concatenate(holders)
    second = np.full(len(first), -1) if partners is None else np.concatenate(partners)
    return SimpleNamespace(
        num_free=np.array([server.count(-1) for server in holders]),
        layout=SimpleNamespace(
            server_type=np.array(device_types or [0] * len(holders)),
            server_ptr=np.cumsum([0, *sizes]),
            order=np.arange(len(first)),
        ),
        holders=np.stack([first, second], axis=1),
        first=np.ones(3),
    )


def cleared(plain, floor, *, gangs=(1,) * 6, started=(0.0,) * 6, kept=(), of_any_size=False):
    """The rows that leave for a gang of two."""
    floor.jobs = SimpleNamespace(
        rows=SimpleNamespace(gang=np.array(gangs), started_s=np.array(started, dtype=float))
    )
    floor.is_kept = np.isin(np.arange(len(gangs)), kept)
    floor.stays = np.ones(len(gangs), dtype=bool)
    plain(place).vacate_server(floor, 0, GANG, STARTED_BY_S, of_any_size)
    return np.flatnonzero(~floor.stays).tolist()


def test_the_emptiest_server_that_can_hold_the_gang_is_cleared(plain):
    floor = floor_of([[0, 1], [2, -1], [3, 4]])
    assert cleared(plain, floor) == [2]
    assert floor.num_free.tolist() == [0, 2, 0]
    assert (floor.first == 0).all(), "searches for free devices start anew"


def test_nobody_leaves_where_a_server_has_room(plain):
    assert cleared(plain, floor_of([[0, 1], [-1, -1]])) == []
    assert cleared(plain, floor_of([[0, -1, -1]])) == []


def test_servers_of_another_type_are_left_alone(plain):
    assert cleared(plain, floor_of([[0, -1], [1, 2]], device_types=[1, 0])) == [1, 2]


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


# ── urgency ──────────────────────────────────────────────────────────────────────────────────────

ROUND_S, SLACK = 100.0, 0.5


def deficit(credit_s, left=np.inf, speed=1.0, stays=0.0, priority=0):
    return rules.urgency_of_deficit.function(credit_s, left, speed, stays, SLACK, ROUND_S, priority)


def test_debts_count_in_whole_units_of_a_round():
    assert deficit(250.0) == 2.5
    assert deficit(250.0, stays=1.0) == 3.5
    assert deficit(-4e4, priority=1) > deficit(4e4) > deficit(8e4, priority=-1), "priority first"
    unit_s = ROUND_S / UNITS_PER_ROUND
    assert deficit(250.0 + 0.4 * unit_s) == deficit(250.0)
    assert deficit(-0.4 * unit_s) == -1.0 / UNITS_PER_ROUND


def test_slack_is_whole_at_the_end_and_half_when_so_many_rounds_are_left():
    assert deficit(0.0, left=0.0) == SLACK
    half = np.floor(SLACK / 2 * UNITS_PER_ROUND) / UNITS_PER_ROUND
    assert deficit(0.0, left=HALF_SLACK_ROUNDS * ROUND_S) == half
    assert deficit(0.0, left=HALF_SLACK_ROUNDS * ROUND_S * 2.0, speed=2.0) == half
    assert deficit(0.0, left=np.inf) == 0.0


INF = np.inf
TABLE = [
    # rule, arguments, answer, case
    ("runs_to_end", (1,), False, "saves its work"),
    ("runs_to_end", (0,), True, "saves nothing"),
    ("runs_to_end", (-1,), True, "nobody knows"),
    ("is_kept", (True, False, 0.0, 0.0, False), False, "may be stopped at a round"),
    ("is_kept", (True, False, 0.0, 0.0, True), True, "between rounds"),
    ("is_kept", (True, True, 900.0, 0.0, False), True, "bound"),
    ("is_kept", (True, False, 59.0, 60.0, False), True, "has just begun"),
    ("is_kept", (True, False, 60.0, 60.0, False), False, "has had its minimum time"),
    ("is_kept", (False, True, 0.0, 60.0, True), False, "does not run"),
    ("is_overdue", (2100.0, 0.0, 1000.0, 100.0), False, "at twice its time and a round"),
    ("is_overdue", (2101.0, 0.0, 1000.0, 100.0), True, "beyond"),
    ("is_overdue", (2101.0, 30.0, 1000.0, 100.0), False, "restarts do not count"),
    ("is_overdue", (1e9, 0.0, INF, 100.0), False, "said nothing"),
    ("stop_cost_rounds", (50.0, 900.0, 0, 4.0, 100.0), 0.5, "saves: only the restart"),
    ("stop_cost_rounds", (50.0, 300.0, 1, 4.0, 100.0), 3.5, "lost once: its work too"),
    ("stop_cost_rounds", (0.0, 9e9, 1, 4.0, 100.0), 8.0, "up to two turns"),
    ("stop_cost_rounds", (0.0, 9e9, 2, 4.0, 100.0), 16.0, "lost twice: four turns"),
    ("stop_cost_rounds", (0.0, 9e9, 9, 4.0, 100.0), 128.0, "and no more than 32"),
    ("stop_cost_rounds", (0.0, 9e9, 1, 0.0, 100.0), 2.0, "a turn is a round at least"),
    ("urgency_filling", (2.0, 4.0, False), -1e6 + 0.5, "half as fast as elsewhere"),
    ("urgency_filling", (2.0, 4.0, True), -1e6 + 1.0, "but runs there"),
    ("has_large_deficit", (201.0, 0.1, 200.0), True, "beyond patience"),
    ("has_large_deficit", (200.0, 0.1, 200.0), False, "at patience"),
    ("has_large_deficit", (900.0, 0.0, 200.0), False, "has no share there"),
    ("has_waited_too_long", (4, True, 60.0, 60.0, False, False), True, "gang behind bound jobs"),
    ("has_waited_too_long", (4, True, 59.0, 60.0, False, False), False, "not yet"),
    ("has_waited_too_long", (4, True, 90.0, 60.0, True, False), False, "stops would do"),
    ("has_waited_too_long", (4, True, 9.0, 60.0, True, True), True, "stays reserved"),
    ("has_waited_too_long", (4, True, 9e9, INF, False, True), False, "nobody is bound"),
    ("has_waited_too_long", (4, False, 90.0, 60.0, False, True), False, "runs"),
    ("has_waited_too_long", (1, True, 90.0, 60.0, False, False), False, "one device"),
    ("ends_in_s", (100.0, 2.0, INF, 5.0, False), 55.0, "work and restart"),
    ("ends_in_s", (100.0, 2.0, 20.0, 5.0, False), 20.0, "its limit comes first"),
    ("ends_in_s", (100.0, 2.0, INF, 5.0, True), INF, "what it said is not true"),
    ("ends_in_s", (100.0, 2.0, 700.0, 5.0, True), 700.0, "but its limit is"),
    ("ends_in_s", (INF, 2.0, INF, 5.0, False), INF, "said nothing"),
    ("ends_in_s", (100.0, 2.0, -3.0, 5.0, False), 0.0, "over its limit"),
]


@pytest.mark.parametrize(("rule", "arguments", "answer", "case"), TABLE)
def test_the_rules_of_a_round(rule, arguments, answer, case):
    assert getattr(rules, rule).function(*arguments) == answer, case


def test_every_rule_is_in_the_table():
    stated = {name for name, value in vars(rules).items() if isinstance(value, Kernel)}
    assert stated - {"urgency_of_deficit"} == {row[0] for row in TABLE}


def test_deficits_end_at_the_limit_on_both_sides():
    jobs = SimpleNamespace(
        rows=SimpleNamespace(shape=(2,), pair_credit_s=np.array([9.0, -9.0])),
        credit_s=np.array([[5.0, -5.0], [1.0, -1.0]]),
    )
    wishes._limit_deficits.function(SimpleNamespace(jobs=jobs), 2.0)
    assert jobs.credit_s.tolist() == [[2.0, -2.0], [1.0, -1.0]]
    assert jobs.rows.pair_credit_s.tolist() == [2.0, -2.0]


def test_equal_deficits_are_ordered_by_the_next_keys_and_then_stay():
    keys = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 2.0, 2.0], [0.0, 0.0, 5.0, 0.0]])
    before = wishes._goes_before.function
    assert before(keys, 1, 0)
    assert not before(keys, 0, 1)
    assert before(keys, 2, 0)
    assert not before(keys, 3, 0)
    assert not before(keys, 0, 3)


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [("las", 150.0), ("fifo", 150.0), ("makespan", 0.0), ("makespan-agnostic", 0.0),
     ("min-cost", 150.0), ("min-cost-slo", 0.0)],
)  # fmt: skip
def test_short_jobs_go_first_unless_an_end_is_what_counts(policy, rounds):
    assert slack_rounds(Rules(policy=policy)) == rounds


def test_the_page_names_settings_and_policies_that_exist() -> None:
    pages = Path(__file__).parents[2] / "docs" / "concepts"
    text = (pages / "fleet_rounds.md").read_text()
    named = set(re.findall(r"`([a-z_]+_(?:rounds|s))`", text))
    assert "patience_rounds" in named
    assert named <= {one.name for one in dataclasses.fields(Rules)}
    row = (pages / "fleet.md").read_text()
    assert len(POLICIES) == 15
    assert "fifteen policies" in row
