import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import UsageError
from hocket.classes.settings import NetTraining, SplitRequest
from hocket.classes.split import balanced_groups, even_sizes


@given(st.integers(2, 14), st.data())
@settings(max_examples=40, deadline=None)
def test_groups_hold_every_class_once_and_have_the_sizes_asked_for(num_classes, data):
    parts = data.draw(st.integers(1, num_classes))
    points = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(num_classes, 3))
    sizes = even_sizes(num_classes, parts)
    groups = balanced_groups(points, sizes)
    assert sorted(each for group in groups for each in group) == list(range(num_classes))
    assert sorted(map(len, groups)) == sorted(sizes)
    assert max(sizes) - min(sizes) <= 1


def test_groups_put_near_classes_together_whatever_their_order():
    centres = np.array([[0.0, 0], [10, 0], [0, 10]])
    points = np.concatenate([centres + 0.1, centres, centres - 0.1])
    assert balanced_groups(points, (3, 3, 3)) == ((0, 3, 6), (1, 4, 7), (2, 5, 8))


def test_equal_embeddings_are_still_grouped():
    assert sorted(map(len, balanced_groups(np.zeros((5, 2)), (3, 2)))) == [2, 3]


def test_more_parts_than_classes_are_refused():
    with pytest.raises(UsageError, match="4 classes cannot be put into 5 parts"):
        even_sizes(4, 5)


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -1.0])
def test_a_learning_rate_is_a_number_above_nothing(rate):
    with pytest.raises(UsageError, match="learning rate"):
        SplitRequest(net="n.py:f", data="d.py:f", retraining=NetTraining(learning_rate=rate))
