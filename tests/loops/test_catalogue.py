"""Every loop of the catalogue: no unsound option, the best schedule, lines in every refusal."""

from __future__ import annotations

import pytest
from loops.catalogue import LOOPS
from loops.harness import Looked, check_sound


@pytest.mark.parametrize("name", LOOPS)
def test_every_legal_option_passes_the_oracle_and_the_best_is_chosen(name):
    function, data, expected, _, permit = LOOPS[name]
    looked, _ = check_sound(function, data, workers=(3,), permit=permit)
    assert looked.kind == expected
    decision = looked.decisions[0][1]
    if decision.candidate is None:
        assert decision.refusals
        assert all(refusal.lines for refusal in decision.refusals)


@pytest.mark.parametrize("name", [name for name in LOOPS if not LOOPS[name][4]])
def test_ordered_keeps_only_what_keeps_the_order(name):
    function, data, _, expected, _ = LOOPS[name]
    looked = Looked(function, data, ordered=True, workers=2).record()
    assert looked.kind == expected
    assert all(option.is_exact for option in looked.decisions[0][1].verdict.options)


def test_there_are_enough_loops():
    assert len(LOOPS) >= 60
