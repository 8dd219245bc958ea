"""The baselines as Gavel's code has them, and the published workload repeated draw by draw."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies import POLICIES
from hocket.fleet.rounds import (
    Finish,
    FleetDevice,
    FleetState,
    Job,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.throughputs import read_throughputs
from hocket.fleet.traces import read_trace

from .snapshots import random_snapshot

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "cluster"
STAYING = ("fifo-agnostic",)


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "fleet")
    spec = importlib.util.spec_from_file_location(
        "fleet_published", ROOT / "benchmarks" / "fleet" / "published.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fleet_published"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fleet_published"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the published workload is not here")
def test_the_published_workload_is_drawn_again_exactly(benchmark_module: ModuleType) -> None:
    known = read_trace(DATA / "gavel_generated" / "gavel_continuous_single_rate5.6_seed0.tsv")
    device_types = ("v100", "p100", "k80")
    table = read_throughputs(DATA / "gavel" / "simulation_throughputs.json").on(device_types)
    drawn = benchmark_module.published_trace(table, len(known), 5.6)
    assert drawn.job_types == known.job_types
    assert drawn.arrival_s == pytest.approx(known.arrival_s, abs=1e-3)
    assert drawn.total_steps == pytest.approx(known.total_steps, rel=1e-9)
    slower = benchmark_module.published_trace(table, 50, 2.8)
    assert slower.arrival_s == pytest.approx(2.0 * drawn.arrival_s[:50])


def _alone(seed: int) -> ClusterSnapshot:
    """A snapshot of jobs of one device, too few devices for all."""
    snapshot = random_snapshot(seed)
    few = np.maximum(snapshot.num_devices // 4, 1)
    ones = np.ones(snapshot.num_jobs, dtype=np.int64)
    return replace(snapshot, gang=ones, num_devices=few)


@pytest.mark.parametrize("name", STAYING)
@pytest.mark.parametrize("seed", range(20))
def test_jobs_stay_where_they_were_and_devices_are_given_once(name: str, seed: int) -> None:
    snapshot = _alone(seed)
    first = POLICIES[name](snapshot).shares
    again = POLICIES[name](
        replace(snapshot, last_shares=first, remaining_steps=snapshot.remaining_steps[::-1].copy())
    ).shares
    assert np.all(again >= first), "whoever had a device has it still"
    fewer = np.maximum(snapshot.num_devices - 1, 0)
    after_loss = POLICIES[name](replace(snapshot, last_shares=first, num_devices=fewer)).shares
    assert np.all(after_loss.sum(axis=0) <= fewer)
    num_kept = (np.minimum(first, after_loss)).sum(axis=0)
    assert np.array_equal(num_kept, np.minimum(first.sum(axis=0), fewer)), "all but one stay"
    assert not np.any((after_loss > 0.0) & (snapshot.steps_per_s <= 0.0))


def test_a_job_draws_its_type_whoever_else_is_there() -> None:
    random = np.random.default_rng(0)
    snapshot = random_snapshot(3)
    many = replace(
        snapshot,
        ids=tuple(f"job {n}" for n in range(300)),
        **{
            name: np.repeat(getattr(snapshot, name)[:1], 300, axis=0)
            for name in ("gang", "weight", "remaining_steps", "elapsed_s", "deadline_s")
        },
        isolated_s=np.zeros(300),
        team_of=np.zeros(300, dtype=np.int64),
        arrival=np.arange(300),
        device_types=("a", "b", "c"),
        num_devices=np.full(3, 10_000),
        price_per_hour=np.ones(3),
        steps_per_s=random.uniform(1.0, 2.0, (300, 3)),
    )
    shares = POLICIES["fifo-agnostic"](many).shares
    turned = replace(many, ids=many.ids[::-1])
    assert np.array_equal(POLICIES["fifo-agnostic"](turned).shares, shares[::-1])
    assert np.all(shares.sum(axis=0) > 70), "each device type about a third of them"


def _gavel(policy: str, num_fast: int, num_slow: int, *jobs: Job) -> FleetState:
    devices = [FleetDevice(name=f"fast{i}", device_type="fast") for i in range(num_fast)]
    devices += [FleetDevice(name=f"slow{i}", device_type="slow") for i in range(num_slow)]
    rules = Rules(mechanism="gavel", policy=policy)
    state = new_state(("fast", "slow"), tuple(devices), rules)
    return step(state, Submit(time_s=0.0, jobs=jobs))[0]


def _job(number: int, fast: float = 4.0, slow: float = 1.0) -> Job:
    return Job(number=number, name=str(number), steps_per_s=(fast, slow), total_steps=1e6)


def _gang(number: int, gang: int, slow: float = 1.0) -> Job:
    return replace(_job(number, slow=slow), gang=gang)


@pytest.mark.parametrize(("policy", "fills"), [("fifo", False), ("las", True)])
def test_first_come_first_served_of_gavel_leaves_devices_idle(policy: str, fills: bool) -> None:
    state = _gavel(policy, 1, 1, _job(0), _job(1), _job(2))
    first_on_fast = int(state.holders[0, 0])
    state, _ = step(state, Finish(time_s=100.0, numbers=(first_on_fast,)))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert (state.holders[0, 0] >= 0) == fills
    while state.time_s < 2500.0:
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert np.all(state.holders[:, 0] >= 0), "the next allocation gives it out"


def test_first_come_first_served_of_gavel_passes_over_who_cannot_run_on_what_is_left() -> None:
    state = _gavel("fifo", 2, 2, _job(0), _gang(1, 2, slow=0.0), _job(2, slow=0.0), _job(3))
    assert state.jobs.rows["device_type"].tolist() == [0, -1, 0, 1], (
        "the gang cannot run on the slow ones"
    )
    state = _gavel("fifo", 2, 1, _job(0), _gang(1, 2), _job(2))
    assert state.jobs.rows["device_type"].tolist() == [0, -1, -1], "nowhere is room for the gang"


@pytest.mark.parametrize(("policy", "rate"), [("finish-time-fairness", 2.5), ("ftf-agnostic", 4.0)])
def test_time_alone_is_counted_in_the_eyes_of_the_policy(policy: str, rate: float) -> None:
    state = _gavel(policy, 2, 2, *(_job(number) for number in range(8)))
    while state.time_s < 2000.0:
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    state, _ = step(state, Submit(time_s=state.time_s, jobs=(_job(8),)))
    while state.solved_s == 0.0:
        before = state.jobs.rows["done_steps"][:8]
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    rows = state.jobs.rows[:8]
    assert np.all(rows["isolated_steps"] >= before)
    assert before.all()
    # Half of the time each, on both device types alike.
    assert rows["isolated_s"] == pytest.approx(rows["isolated_steps"] / (0.5 * rate))
