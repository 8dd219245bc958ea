"""The scan of all configs against plain enumeration, and the shortcuts that it takes."""

from dataclasses import replace

import numpy as np
import pytest
from planners.every_config import enumerate_configs
from planners.parallel_trainings import training

from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.step import predict
from hocket.planners.parallel import space as enumeration
from hocket.planners.parallel.pools import pools_of
from hocket.planners.parallel.transformer_search import default_limits, scan
from hocket.transformer import RECOMPUTES


def judged(problem, configs):
    """What memory and time the closed forms give, asked without any of the scan's shortcuts."""
    held = memory(problem.training.model, configs, problem.training.software)
    step_s = predict(
        problem.training.model,
        configs,
        problem.cluster,
        problem.training.software,
        problem.training.coefficients,
    ).step_s
    return held, step_s


@pytest.mark.parametrize(
    ("model", "on", "batch"),
    [
        ("gpt-7.5b", "8xa100-80g", 8),
        ("gpt-18b", "2xdgx-a100-80g", 12),
        ("mixtral-8x7b", "2xdgx-h100", 4),
    ],
)
def test_scan_finds_the_best_of_all_configs(model, on, batch):
    problem = training(model, on, batch)
    limits = default_limits(problem)
    found = scan(problem, 0, limits, 50)
    every = enumerate_configs(problem.training.model, pools_of(problem)[0], batch, limits)
    held, step_s = judged(problem, every)
    fits = held <= pools_of(problem)[0].memory_bytes
    assert found.num_configs == len(every)
    assert found.num_fitting == fits.sum()
    kept_held, kept_s = judged(problem, found.fitting)
    assert np.all(kept_held <= pools_of(problem)[0].memory_bytes)
    assert np.all(np.diff(kept_s) >= 0)
    assert kept_s[0] <= step_s[fits].min() * 1.005  # see the test on recomputation below
    lacking, _ = judged(problem, found.nearly)
    assert np.all(lacking > pools_of(problem)[0].memory_bytes)


@pytest.mark.parametrize("software", ["megatron-core", "torch", "megatron-2021"])
def test_more_recomputation_never_shortens_a_step(software):
    """What lets the scan skip recomputation where less of it fits.

    Communication that waits anyway may hide behind the work done again, hence the allowance.
    """
    problem = training("gpt-18b", "16xdgx-a100-80g", 96, software)
    limits = replace(default_limits(problem), recomputes=("none",))
    every = enumerate_configs(problem.training.model, pools_of(problem)[0], 96, limits)
    some = every.take(np.random.default_rng(1).integers(0, len(every), 20_000))
    none_s, selective_s, full_s = (
        judged(problem, replace(some, recompute=some.recompute + np.int8(mode)))[1]
        for mode in range(len(RECOMPUTES))
    )
    assert np.all(none_s <= selective_s * 1.005)
    assert np.all(selective_s <= full_s * 1.005)


def test_replicas_left_out_on_large_clusters_would_not_be_chosen(monkeypatch):
    problem = training("gpt-18b", "32xdgx-a100-80g", 48)
    limits = replace(default_limits(problem), schedules=("1f1b", "interleaved"), max_context=2)
    reduced = scan(problem, 0, limits, 20).fitting[0]
    monkeypatch.setattr(enumeration, "FEW_DEVICES", 10**6)
    assert scan(problem, 0, limits, 20).fitting[0] == reduced
