import pytest

from hocket.planners.memory.largest import MAX_TRIES, largest


@pytest.mark.parametrize("grow", [lambda n: 7 * n + 100, lambda n: n * n + 3 * n, lambda n: 2**n])
@pytest.mark.parametrize("start", [1, 8, 300])
@pytest.mark.parametrize("budget", [0, 107, 5_000, 123_456])
def test_largest_is_the_last_size_that_fits_in_few_tries(grow, start, budget):
    tried = []

    def needed(size):
        tried.append(size)
        return grow(size)

    most = 2_000
    wanted = max((n for n in range(1, most + 1) if grow(n) <= budget), default=0)
    found = largest(needed, budget, start, most)
    assert grow(found) <= budget or found == 0
    if len(tried) < MAX_TRIES:
        assert found == wanted
    assert len(tried) == len(set(tried)) <= MAX_TRIES + 14
