"""Every loop of the catalogue: no unsound option, the best schedule, lines in every refusal."""

from __future__ import annotations

import pytest
from loops.catalogue import LOOPS
from loops.harness import check_sound

CASES = [(name, False) for name in LOOPS] + [(name, True) for name in LOOPS if not LOOPS[name][4]]


@pytest.mark.parametrize(("name", "ordered"), CASES)
def test_every_legal_option_passes_the_oracle_and_the_best_is_chosen(name, ordered):
    function, data, expected, in_order, permit = LOOPS[name]
    looked, _ = check_sound(function, data, ordered=ordered, permit=permit)
    assert looked.kind == (in_order if ordered else expected)
    decision = looked.decisions[0][1]
    if decision.candidate is None:
        assert all(refusal.lines for refusal in decision.refusals)
        assert decision.refusals


def test_there_are_enough_loops():
    assert len(LOOPS) >= 60
