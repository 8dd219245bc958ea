import dataclasses
from itertools import combinations

import numpy as np
import pytest

from hocket.base.errors import UsageError
from hocket.classes import codes
from hocket.classes.codes import cyclic_code, pattern_table, ruler
from hocket.classes.combine import Combiner, OddsCalibration, accuracy, probabilities
from hocket.classes.split import calibrated
from hocket.classes.validation import lost_workers


def test_the_published_codes_come_out():
    assert ruler(3, 10) == (0, 1, 3)
    assert ruler(4, 13) == (0, 1, 3, 9)
    assert cyclic_code(10, 3)[:2] == ((0, 1, 3), (1, 2, 4))
    assert cyclic_code(10, 3)[9] == (0, 2, 9)


def test_the_published_pattern_table_comes_out(monkeypatch):
    """Yang et al. 2020: ten machines, {0, 1, 3}."""
    rows = [(row.lost, row.losing, row.patterns) for row in pattern_table(cyclic_code(10, 3), 4)]
    assert rows == [(1, 0, 10), (2, 0, 45), (3, 10, 120), (4, 70, 210)]
    rows = [(row.losing, row.worst) for row in pattern_table(cyclic_code(10, 1), 2)]
    assert rows == [(10, 1), (45, 2)]
    assert pattern_table(cyclic_code(13, 4), 3)[-1].losing == 0
    assert pattern_table(cyclic_code(10, 3), 3)[-1].worst == 1
    # One worker is left in any case.
    assert [row.lost for row in pattern_table(cyclic_code(3, 1), 9)] == [1, 2]
    monkeypatch.setattr(codes, "MAX_PATTERNS", 50)
    assert [row.patterns for row in pattern_table(cyclic_code(10, 3), 4)] == [10, 45]


@pytest.mark.parametrize(("parts", "copies"), [(2, 2), (3, 2), (5, 2), (7, 3), (10, 3), (13, 4)])
def test_copies_are_spread_so_that_two_workers_share_one_group_at_most(parts, copies):
    held = cyclic_code(parts, copies)
    counts = np.bincount([group for groups in held for group in groups], minlength=parts)
    assert (counts == copies).all()
    if parts > 2:
        assert all(len(set(a) & set(b)) <= 1 for a, b in combinations(held, 2))


@pytest.mark.parametrize(
    ("parts", "copies", "shared"), [(5, 3, 2), (10, 4, 2), (10, 5, 3), (5, 5, 5)]
)
def test_more_copies_than_a_ruler_has_marks_are_spread_as_far_as_can_be(parts, copies, shared):
    """A design would share copies * (copies - 1) / (parts - 1) groups; no code shares less."""
    held = cyclic_code(parts, copies)
    assert shared == int(np.ceil(copies * (copies - 1) / (parts - 1)))
    assert max(len(set(a) & set(b)) for a, b in combinations(held, 2)) == shared
    lost = [row.losing for row in pattern_table(held, copies - 1)]
    assert lost == [0] * (copies - 1)


def test_a_code_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="5 parts have no code of redundancy 6"):
        cyclic_code(5, 6)


def test_a_class_has_the_mean_of_the_answers_that_came():
    combiner = Combiner(3, ((0, 1), (1, 2)), (OddsCalibration(2.0, 1.0), OddsCalibration()))
    first, second = np.array([1.0, 2.0, 4.0]), np.array([0.0, 5.0, 6.0])
    assert combiner.scores([first, second]).tolist() == [3.0, 6.0, 6.0]
    assert combiner.scores([None, second]).tolist() == [-np.inf, 5.0, 6.0]
    assert combiner.copies([True, False]).tolist() == [1, 1, 0]
    shares = probabilities(combiner.scores([None, second]))
    assert shares[0] == 0
    assert shares.sum() == pytest.approx(1)
    assert probabilities(combiner.scores([None, None])).sum() == 0


def test_a_class_with_fewer_answers_counts_less_where_parts_err_apart():
    combiner = Combiner(3, ((0, 1), (1, 2)), (OddsCalibration(),) * 2, doubt=0.5)
    first, second = np.array([0.0, 2.0, 4.0]), np.array([0.0, 5.0, 6.0])
    assert combiner.scores([first, second]).tolist() == [2.0, 4.5, 6.0]
    # Class 1 has one of its two answers, class 2 all that it could have.
    assert combiner.scores([None, second]) == pytest.approx([-np.inf, 5.0 * 0.5**0.5, 6.0])


def test_doubt_is_found_from_how_parts_err():
    """Two of ten workers dead: parts that are wrong aloud lose less, equal ones nothing."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 6000)
    odds = 4.0 * np.eye(10)[labels] - 2 + rng.normal(0, 1.0, (6000, 10))
    held = cyclic_code(10, 3)
    plain = Combiner(10, held, (OddsCalibration(),) * 10)
    lost, found = {}, {}
    for own in (0.0, 1.0):
        noisy = [odds[:, list(mine)] * rng.normal(1, own, (6000, 3)) for mine in held]
        outputs = [np.pad(each, ((0, 0), (1, 0))) for each in noisy]
        fitted = calibrated(plain, [each[:3000] for each in outputs], labels[:3000])
        rest = [each[3000:] for each in outputs]
        for doubt in (0.0, fitted.doubt, 1.0):
            combiner = dataclasses.replace(fitted, doubt=doubt)
            all_came, _, two = lost_workers(combiner, rest, labels[3000:], 2)
            lost[own, doubt] = all_came.mean - two.mean
        found[own] = lost[own, fitted.doubt]
    assert found[0.0] < 0.002 < lost[0.0, 1.0]
    assert found[1.0] < 0.9 * lost[1.0, 0.0]


def test_calibration_mends_parts_whose_confidence_differs():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 4000)
    odds = 2.0 * np.eye(4)[labels] + rng.normal(0, 1.0, (4000, 4))
    # The second part is far too sure and leans to its classes.
    distorted = [odds[:, :2], 6 * odds[:, 2:] + 9]
    outputs = [np.concatenate([np.zeros((4000, 1)), each], axis=1) for each in distorted]
    plain = Combiner(4, ((0, 1), (2, 3)), (OddsCalibration(), OddsCalibration()))
    fitted = calibrated(plain, [each[:2000] for each in outputs], labels[:2000])
    held_out = [each[2000:] for each in outputs]
    best = accuracy(odds[2000:], labels[2000:])
    assert accuracy(plain.scores(held_out), labels[2000:]) < best - 0.2
    assert accuracy(fitted.scores(held_out), labels[2000:]) > best - 0.01
