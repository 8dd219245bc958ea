"""Ranks in namespaces whose cables slow down and vanish while they train."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from runtime.collectives.ranks import training

from hocket.base.errors import RunError
from hocket.runtime.collectives.launched import probe_launched


def _testbed() -> Any:
    path = Path(__file__).parents[3] / "benchmarks/testbed.py"
    spec = importlib.util.spec_from_file_location("testbed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["testbed"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def testbed() -> Any:
    """What makes namespaces; skips where there can be none."""
    name = f"hocket-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"needs iproute2: {error}")
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if made.returncode:
        pytest.skip(f"needs root and network namespaces: {made.stderr.strip()}")
    return _testbed()


def _expected(num_steps: int, count: int) -> list[float]:
    """What the program computes, each sum rounded once."""
    parameter, found = np.zeros(400_000, dtype=np.float32), []
    for number in range(num_steps):
        draws = [np.random.default_rng(1000 * number + rank) for rank in range(count)]
        total = sum(draw.standard_normal(400_000, dtype=np.float32).astype(np.float64)
                    for draw in draws)  # fmt: skip
        parameter = np.float32(0.9) * parameter + total.astype(np.float32)
        found.append(float(parameter[::1000].astype(np.float64).sum()))
    return found


def test_a_cable_that_slows_down_or_is_cut_is_planned_around_and_no_bit_changes(testbed) -> None:
    names = [f"r{n}" for n in range(4)]
    shape = testbed.Shape(20e6, burst_bytes=100_000)
    slow = testbed.Shape(5e6, burst_bytes=100_000)
    ring = {(a, b): shape for a, b in zip(names, [*names[1:], names[0]], strict=True)}
    with testbed.Testbed(dict.fromkeys(names, slow), ring) as bed:
        variables = {
            "MASTER_ADDR": bed.address("r0"), "GLOO_SOCKET_IFNAME": "eth0", "HOCKET_WIDE_SUMS": "1"
        }  # fmt: skip
        spaces = [bed.space(name) for name in names]
        with forked.ranks(4, training, spaces, **variables) as ranks:
            steps = _until(ranks[0], lambda plans, number: number == 4)
            bed.shape("r0", "r1", slow)
            steps += _until(ranks[0], lambda plans, number: plans >= 1)
            bed.cut("r2", "r3")
            steps += _until(ranks[0], lambda plans, number: plans >= 2)
            steps += _until(ranks[0], lambda plans, number: number == 4)
    assert [total for total, _ in steps] == _expected(len(steps), 4)


def _until(rank: forked.Rank, is_enough: Callable[[int, int], bool]) -> list[tuple[float, int]]:
    """What a rank tells of its steps, up to the one with which it is enough."""
    found: list[tuple[float, int]] = []
    while not found or not is_enough(found[-1][1], len(found)):
        found.append(rank.hear())
    return found


def test_ranks_that_have_no_place_to_meet_are_told(monkeypatch) -> None:
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunError, match=r"the ranks do not meet: .*MASTER_ADDR"):
        probe_launched()
