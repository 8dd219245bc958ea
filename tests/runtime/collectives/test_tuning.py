"""The number of chunks that ranks agree on, on clocks that a formula sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hocket.runtime.collectives.agreed_plans import ChunkTuning

BYTES = 1 << 20


class Store(dict):
    """What the store of torch.distributed is here."""

    def set(self, key: str, text: str) -> None:
        self[key] = text


def agreed(time_of: Callable[[float, int, int], float], num_calls: int = 40) -> list[float]:
    """The factors of the calls, the same on three ranks; times by factor, call and rank."""
    store = Store()
    ranks = [ChunkTuning(store, rank, 3, "plan", BYTES) for rank in range(3)]
    found = []
    for call in range(num_calls):
        factors = [each.factor(store.__getitem__) for each in ranks]
        assert len(set(factors)) == 1, "all cut alike"
        for rank, each in enumerate(ranks):
            each.took(time_of(factors[rank], call, rank))
        found.append(factors[0])
    assert all(each.is_settled for each in ranks)
    return found


@pytest.mark.parametrize("best", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_the_fastest_number_of_chunks_is_found(best) -> None:
    found = agreed(lambda factor, *_: 1.0 + abs(factor - best) / best)
    assert found[0] == 1.0, "the model's number comes first"
    assert found[-1] == best


def test_ranks_that_come_early_or_are_late_once_do_not_mislead() -> None:
    def time_of(factor: float, call: int, rank: int) -> float:
        waited = 5.0 * ((rank + call) % 3 != 0)
        disturbed = 9.0 if call % 4 == 1 else 0.0
        return 1.0 / factor + factor / 4 + waited + disturbed

    assert agreed(time_of)[-1] == 2.0


def test_a_difference_that_may_be_noise_changes_nothing() -> None:
    assert agreed(lambda factor, *_: 1.0 - 0.02 * (factor > 1))[-1] == 1.0


def test_short_messages_are_left_as_they_are() -> None:
    tuning = ChunkTuning(Store(), 1, 2, "plan", 1 << 12)
    for _ in range(9):
        tuning.took(1.0)
        assert tuning.factor(lambda key: pytest.fail(f"waits for {key}")) == 1.0
