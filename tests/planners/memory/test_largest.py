import pytest

from hocket.planners.memory.largest import MAX_TRIES, largest

CURVES = {
    "line": lambda n: 7 * n + 100,
    "parabola": lambda n: n * n + 3 * n,
    "doubling": lambda n: 2**n,
    "stairs": lambda n: 100 + n // 8 * 64,
    "kink": lambda n: max(50 * n, 10 * n * n - 3000),
    "flat": lambda n: max(500, 3 * n),
}
MOST = 2_000


@pytest.mark.parametrize("grow", CURVES)
@pytest.mark.parametrize("start", [1, 8, 300])
@pytest.mark.parametrize("budget", [0, 107, 5_000, 123_456])
def test_largest_is_the_last_size_that_fits_in_few_tries(grow, start, budget):
    curve, tried = CURVES[grow], []

    def needed(size):
        tried.append(size)
        return curve(size)

    wanted = max((n for n in range(1, MOST + 1) if curve(n) <= budget), default=0)
    assert largest(needed, budget, start, MOST) == wanted
    assert len(tried) == len(set(tried)) < MAX_TRIES
    if grow in ("line", "parabola"):
        assert len(tried) <= 6


def test_a_deep_model_is_captured_twice_beside_small_ones():
    """From four layers on: each try of a deep one takes minutes."""
    tried = []

    def needed(layers):
        tried.append(layers)
        return 41_000 + 6_025 * layers

    assert largest(needed, 41_000 + 6_025 * 165, 4, 4096) == 165
    assert tried == [4, 8, 64, 165, 166]
