"""The protocol under random schedules, and the parts that are not seen from outside."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import CheckError, InputFileError, RunError
from hocket.tables import Layout, ShardServer, TableSpec, check
from hocket.tables.codec import decode, encode
from hocket.tables.core.client import MY_CLOCK, change_rows, new_client
from hocket.tables.core.message import COUNT, HEAD, KIND, ROWS, UPDATES, Message
from hocket.tables.core.rule import (
    REVISE,
    apply_change,
    apply_locally,
    starting_cells,
    starting_hidden,
)
from hocket.tables.core.shard import NOW, new_shard
from hocket.tables.group import inside_ports
from hocket.tables.priority import next_changes, next_rows
from hocket.tables.route import LinkUse, SendBudget


@pytest.mark.timeout(400)  # the checker may have to be compiled
def test_no_read_of_some_thousand_random_schedules_misses_what_it_must_hold():
    assert check.check_schedules(4000, seed=11) >= 4000


@pytest.mark.timeout(400)
def test_a_promise_that_is_not_kept_is_found_out(monkeypatch):
    """Rows that are read with staleness 1 do not hold what staleness 0 promises."""
    broken = check.Arrangement(2, 1, 1, True, 0, promised=0)
    assert check.first_fault(broken, 0, 500)[0] == check.OLD_MISSING
    monkeypatch.setattr(check, "arrangements", lambda: [broken])
    with pytest.raises(CheckError, match="older than the staleness allows"):
        check.check_schedules(500)


def message(kind, rows, cells):
    head = np.zeros(HEAD, np.int64)
    head[KIND], head[COUNT] = kind, len(rows)
    return Message(head, np.array(rows, np.int64), np.array(cells, np.float32))


@given(st.integers(1, 9), st.integers(1, 12), st.floats(0, 1), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_messages_survive_the_way_dense_or_sparse(count, width, filled, seed):
    random = np.random.default_rng(seed)
    cells = random.normal(size=(count, width)) * (random.random((count, width)) < filled)
    sent = message(UPDATES, random.integers(0, 20, count), cells)
    data = encode(sent)
    found = decode(data, 20, width)
    np.testing.assert_array_equal(found.cells, sent.cells)
    np.testing.assert_array_equal(found.rows, sent.rows)
    assert len(data) <= 8 * HEAD + 4 * count + 1 + 4 * count * width


@given(st.binary(max_size=400), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_message_are_refused_or_harmless(noise, place, value):
    good = bytearray(encode(message(ROWS, [1, 2], np.ones((2, 3)))))
    good[place % len(good)] = value
    for data in (noise, bytes(good), bytes(good[: -1 - place % 20])):
        try:
            found = decode(data, 5, 3)
        except RunError:
            continue
        assert ((found.rows >= 0) & (found.rows < 5)).all()
        assert found.cells.shape in ((len(found.rows), 3), (0, 3))


def test_a_shard_outlives_noise():
    shards, clients = inside_ports(1, 1)
    server = ShardServer(Layout((TableSpec("w", 4, 2),)), 0, shards[0])
    for noise in (b"", b"x" * 500, encode(message(UPDATES, [9], np.ones((1, 2))))):
        clients[0].send(0, noise)
    server.turn(0)
    assert server.num_refused_messages == 3
    assert not server.cells(0).any()


def adagrad(gradients, rate):
    value, total = 0.0, 1.0
    for gradient in gradients:
        total += gradient * gradient
        value -= rate / np.sqrt(total) * gradient
    return value


def revised(pairs, rate):
    """A row after gradients, each with the sum of gradients that its sender knew."""
    cells, hidden = starting_cells(REVISE, 1, 1, 1.0), starting_hidden(REVISE, 1, 1, 1.0)
    for pair in pairs:
        apply_change(REVISE, rate, cells, hidden, 0, np.array([pair], np.float32), 0)
    return cells[0]


def test_adaptive_revision_without_delay_is_adagrad():
    gradients = [0.5, -1.25, 2.0, 0.125]
    known = np.cumsum([0.0, *gradients[:-1]])
    cells = revised(list(zip(gradients, known, strict=True)), 0.3)
    assert cells[0] == pytest.approx(adagrad(gradients, 0.3), rel=1e-6)
    local = starting_cells(REVISE, 1, 1, 1.0)
    for gradient in gradients:
        apply_locally(REVISE, 0.3, local, 0, np.array([[gradient, 0]], np.float32), 0)
    np.testing.assert_allclose(local[0], cells, rtol=1e-6)


def test_adaptive_revision_of_delayed_gradients_follows_the_paper():
    # Two gradients of 1, both computed at 0: z = 1 + 1, then 2 + 1 + 2 * 1 * 1 = 5.
    rate, first, last = 1.0, 1 / np.sqrt(2), 1 / np.sqrt(5)
    expected = -first * 1 - last * 1 + (first - last) * 1
    assert revised([(1, 0), (1, 0)], rate)[0] == pytest.approx(expected, rel=1e-6)


def sent_over(rates_bps):
    """A budget after messages of 1,000 bytes over a link, four seconds at each of its rates."""
    budget, now_s, arrived = SendBudget(), 0.0, []
    for rate_bps in rates_bps:
        for _ in range(4000):
            now_s += 0.001
            if budget.allows():
                start_s = max(now_s, arrived[-1][0] if arrived else 0.0)
                arrived.append((start_s + 1000 / rate_bps, budget.sent(1000, now_s)))
            seen = [stamp for at_s, stamp in arrived[-40:] if at_s <= now_s]
            budget.returned(seen[-1] if seen else 0, now_s)
    return budget


def test_goodput_is_measured_and_kept_to():
    budget = sent_over([50_000])
    assert budget.goodput_bps == pytest.approx(50_000, rel=0.1)
    assert budget.sent_bytes == pytest.approx(4 * 50_000, rel=0.1)
    assert budget.in_flight_bytes < 6_000


def test_goodput_follows_a_link_that_becomes_slower_and_faster():
    assert sent_over([50_000, 10_000]).goodput_bps == pytest.approx(10_000, rel=0.2)
    assert sent_over([10_000, 50_000]).goodput_bps == pytest.approx(50_000, rel=0.2)


def test_a_stamp_that_comes_again_says_nothing():
    budget = SendBudget()
    stamp = budget.sent(1000, 1.0)
    budget.returned(stamp - 500, 1.01)
    before = copy.deepcopy(vars(budget))
    budget.returned(stamp - 500, 2.0)
    assert vars(budget) == before


def test_changes_of_later_clocks_stay():
    client, random = new_client(0, 4, 1), np.random.default_rng(0)
    change_rows(client, 0, np.array([1]), np.ones((1, 1), np.float32))
    client.facts[MY_CLOCK] = 1
    change_rows(client, 1, np.array([2]), np.ones((1, 1), np.float32))
    assert list(next_changes(client, 4, "fifo", 1, random, newest=0)) == [1]
    assert list(next_changes(client, 4, "fifo", 1, random, newest=1)) == [1, 2]


def test_rows_that_no_clock_waits_for_go_over_an_idle_link_only():
    shard, random = new_shard(1, 4, 1), np.random.default_rng(0)
    shard.asked[0, 0], shard.asked[0, 1], shard.num_asked[0] = 0, 5, 2
    shard.dirty[0, 2:], shard.num_dirty[0] = True, 2
    shard.due[0, 2], shard.num_due[0] = True, 1
    shard.facts[NOW] = 1

    def chosen(**options):
        return list(next_rows(shard, 0, 4, "fifo", random, **options))

    assert chosen(is_due=False, is_idle=False) == [0]
    assert chosen(is_due=True, is_idle=False) == [0, 2]
    assert chosen(is_due=False, is_idle=True) == [0, 2, 3]


def test_a_link_that_short_clocks_keep_busy_has_no_spare_time(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("hocket.tables.route.time.monotonic", lambda: now_s[0])
    use = LinkUse()

    def over_a_clock(clock, clock_s, busy_s):
        use.has_spare_time(clock, is_busy=True)
        now_s[0] += busy_s
        use.has_spare_time(clock, is_busy=False)
        now_s[0] += clock_s - busy_s
        return use.has_spare_time(clock + 1, is_busy=False)

    assert not over_a_clock(0, 0.1, 0.07)
    assert over_a_clock(1, 0.1, 0.03)
    assert over_a_clock(2, 1.0, 0.7)
    assert not use.has_spare_time(3, is_busy=True)


def checkpoint(path, layout):
    shards, _ = inside_ports(1, 1)
    return ShardServer(layout, 0, shards[0], checkpoint=path)


def test_a_checkpoint_of_other_tables_or_none_is_refused_in_words(tmp_path):
    path = tmp_path / "shard.npz"
    checkpoint(path, Layout((TableSpec("w", 4, 2),))).close()
    with pytest.raises(InputFileError, match="differs in tables"):
        checkpoint(path, Layout((TableSpec("w", 4, 3),)))
    np.savez(path, facts=np.frombuffer(json.dumps([1]).encode(), np.uint8))
    with pytest.raises(InputFileError, match="differs in format"):
        checkpoint(path, Layout((TableSpec("w", 4, 2),)))
    path.write_bytes(b"no archive")
    with pytest.raises(InputFileError, match="no checkpoint"):
        checkpoint(path, Layout((TableSpec("w", 4, 2),)))
    with path.open("wb") as file:
        np.save(file, np.arange(3))  # one array, without a name
    with pytest.raises(InputFileError, match="no checkpoint"):
        checkpoint(path, Layout((TableSpec("w", 4, 2),)))
