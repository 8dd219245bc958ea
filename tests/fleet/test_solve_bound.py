"""What the linear program calls a bound is one, whatever its solver says of the rows' worth."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from hocket.fleet.solve import linear
from hocket.fleet.solve.linear import LinearProgram, maximise, solve
from hocket.fleet.solve.price_tables import JobClassTable
from hocket.fleet.solve.sharing import PairColumns


def program_of(seed: int, *, has_pairs: bool = False) -> LinearProgram:
    random = np.random.default_rng(seed)
    num_classes, num_columns = 4, 3
    job_classes = JobClassTable(
        rates=random.uniform(0.5, 3.0, (num_classes, num_columns)),
        num_jobs=random.integers(1, 6, num_classes).astype(float),
        gang=random.choice([1.0, 2.0], num_classes) if not has_pairs else np.ones(num_classes),
        capacity=random.integers(1, 6, num_columns).astype(float),
    )
    if not has_pairs:
        return LinearProgram(job_classes=job_classes)
    one, other = np.triu_indices(num_classes)
    column = np.tile(np.arange(num_columns), len(one))
    return LinearProgram(
        job_classes=job_classes,
        pairs=random.uniform(0.8, 1.0, (num_columns, num_classes, num_classes))
        * job_classes.rates.T[:, :, None],
        columns=PairColumns(
            class_a=np.repeat(one, num_columns),
            class_b=np.repeat(other, num_columns),
            column=column,
        ),
    )


def answers(program: LinearProgram, weight, value) -> dict[str, linear.Solved]:
    nothing = np.zeros(len(weight))
    return {
        "level": solve(program, base=nothing, slope=weight, near=1.0),
        "sum": maximise(program, value, nothing),
    }


@pytest.mark.parametrize("has_pairs", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_are_reached_and_hold_with_any_worth_of_rows(seed, has_pairs, monkeypatch):
    program = program_of(seed, has_pairs=has_pairs)
    job_classes, random = program.job_classes, np.random.default_rng(1_000 + seed)
    weight = random.uniform(0.5, 2.0, len(job_classes.num_jobs))
    value = random.uniform(0.5, 2.0, job_classes.rates.shape)
    exact = answers(program, weight, value)
    alone = float((value * job_classes.rates * exact["sum"].alone).sum())
    best = {"level": exact["level"].level, "sum": alone + exact["sum"].pair_value}
    for name, solved in exact.items():
        assert solved.bound == pytest.approx(best[name], rel=1e-6)

    truly = linear._highs

    def careless(share, cost, matrix, limits):
        found = truly(cost, matrix, limits)
        wrong = SimpleNamespace(marginals=found.ineqlin.marginals * share(len(limits)))
        return SimpleNamespace(x=found.x, ineqlin=wrong)

    def some_too_much(count):
        return random.uniform(0.0, 1.5, count)

    def all_too_little(count):
        return np.full(count, 0.95)

    for share in (some_too_much, all_too_little):
        monkeypatch.setattr(linear, "_highs", partial(careless, share))
        for name, solved in answers(program, weight, value).items():
            assert solved.bound >= best[name] * (1 - 1e-9)
